"""Gradients of several micro-batches, with the reduction switched off for all but the last."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from pytest_fsdp_meta.evidence import splits_model
from pytest_fsdp_meta.loader.subject import Subject
from pytest_fsdp_meta.observers.adapters import megatron_fsdp
from pytest_fsdp_meta.observers.adapters.dtensor import mesh_facts
from pytest_fsdp_meta.observers.batches import global_batch, indivisible, loss_of, own_rows
from pytest_fsdp_meta.observers.inventory import named_tensors
from pytest_fsdp_meta.observers.support.poison import deterministic
from pytest_fsdp_meta.worlds import SEED, doing

MICRO_BATCHES = 2


def not_shared(subject: Subject, size: int) -> str:
    """Why ``size`` ranks cannot cut their slices of the first batch into micro-batches; empty where they can."""
    rows = indivisible(global_batch(subject, 0), size * MICRO_BATCHES)
    return f"{rows}, which {size} ranks cannot cut into {MICRO_BATCHES} micro-batches each" if rows else ""


def micro_batches(share: tuple[int, int]) -> list[tuple[int, int]]:
    """The slices of the global batch that a slice of it falls into."""
    index, size = share
    return [(index * MICRO_BATCHES + number, size * MICRO_BATCHES) for number in range(MICRO_BATCHES)]


def accumulate(subject: Subject, device: torch.device, shares: Sequence[tuple[int, int]]) -> tuple[str, ...]:
    """Leaves the mean gradient over these slices of the first batch; the caller zeroes it.

    Returns the parameters whose gradients were reduced already when the first micro-batch was over.
    """
    model, early = subject.model, tuple[str, ...]()
    model.zero_grad(set_to_none=True)
    with deterministic():
        batch = global_batch(subject, 0)
        for number, share in enumerate(shares):
            rows = own_rows(batch, 0, share, device)
            torch.manual_seed(SEED)
            doing(f"accumulating gradients, micro-batch {number + 1} of {len(shares)}")
            last = number == len(shares) - 1
            with ExitStack() as unsynced:
                if not last:
                    unsynced.enter_context(_unsynced(model))
                (loss_of(subject, rows) / len(shares)).backward()
            if number == 0 and not last:
                early = tuple(_reduced(model))
    return early


@contextmanager
def _unsynced(model: Module) -> Iterator[None]:
    """FSDP and DDP told not to reduce. FSDP2 reads its switch in backward, DDP in forward; FSDP1 has it on the root."""
    outermost = list(_outermost(model))  # called as an author calls it, who may have made a switch of his own
    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, DistributedDataParallel) or (
                module is model and isinstance(module, FullyShardedDataParallel)
            ):
                stack.enter_context(module.no_sync())
            elif megatron_fsdp.is_wrapper(module):
                stack.enter_context(megatron_fsdp.unsynced(module))
        for one in outermost:
            one.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            for one in outermost:
                one.set_requires_gradient_sync(True)


def _outermost(module: Module) -> Iterator[FSDPModule]:
    """The FSDP2 modules that are in no other."""
    if isinstance(module, FSDPModule):
        yield module
        return
    for child in module.children():
        yield from _outermost(child)


def _reduced(model: Module) -> Iterator[str]:
    """Sharded parameters that have a gradient: FSDP2 keeps unsharded ones to itself until it has reduced them."""
    if not any(isinstance(module, FSDPModule) for module in model.modules()):
        return
    for name, _, tensor in named_tensors(model):
        if isinstance(tensor, DTensor) and tensor.grad is not None and _sharded_over_data(tensor):
            yield name


def _sharded_over_data(tensor: DTensor) -> bool:
    """Whether a rank's gradient of it needs the others' rows; what only tensor parallelism shards does not."""
    dims = mesh_facts(tensor).dims
    return any(p.is_shard() and not splits_model(dim) for p, dim in zip(tensor.placements, dims, strict=True))
