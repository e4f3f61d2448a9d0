"""Accumulate gradients over micro-batches, with the reduction switched off for all but the last."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from pytest_fsdp_meta.evidence import splits_model
from pytest_fsdp_meta.loader.subject import Subject
from pytest_fsdp_meta.ranks.adapters import megatron_fsdp
from pytest_fsdp_meta.ranks.adapters.dtensor import mesh_facts
from pytest_fsdp_meta.ranks.batches import global_batch, indivisible, loss_of, own_rows
from pytest_fsdp_meta.ranks.generators import seed_all
from pytest_fsdp_meta.ranks.inventory import drop_gradients, named_tensors
from pytest_fsdp_meta.ranks.joined_optimizer import parts_of_optimizer
from pytest_fsdp_meta.ranks.modes import comparable_modes
from pytest_fsdp_meta.ranks.torch_private import step_hooks
from pytest_fsdp_meta.text import first_line
from pytest_fsdp_meta.worlds import SEED, doing

MICRO_BATCHES = 2
"""Micro-batches per data-parallel rank."""


def indivisible_batch(subject: Subject, size: int) -> str:
    """Return why the first batch does not split into micro-batches for ``size`` ranks; empty where it does."""
    rows = indivisible(global_batch(subject, 0), size * MICRO_BATCHES)
    return f"{rows}, which do not divide into {MICRO_BATCHES} micro-batches for each of {size} ranks" if rows else ""


def micro_batches(data_parallel: tuple[int, int]) -> list[tuple[int, int]]:
    """Split a slice (index, size) of the global batch into smaller slices of it."""
    index, size = data_parallel
    return [(index * MICRO_BATCHES + number, size * MICRO_BATCHES) for number in range(MICRO_BATCHES)]


def union_of_ranks(size: int) -> list[list[tuple[int, int]]]:
    """Return, for each round, the micro-batches of all ``size`` ranks: what the ranks see at the same time.

    A loss that is divided by a count over all ranks counts the labels of one round.
    """
    return [list(pieces) for pieces in zip(*(micro_batches((index, size)) for index in range(size)), strict=True)]


def half_of_ranks(size: int) -> list[list[tuple[int, int]]]:
    """Return one round with the first half of each rank's rows, as a window of accumulation that ends early."""
    return union_of_ranks(size)[: MICRO_BATCHES // 2]


def accumulate(
    subject: Subject,
    device: torch.device,
    rounds: Sequence[Sequence[tuple[int, int]]],
    around_first: AbstractContextManager[None] | None = None,
) -> tuple[str, ...]:
    """Accumulate the mean gradient over the rounds; the caller zeroes the gradients.

    A round is one forward over some slices of the first batch together, and its backward; the first one runs in the
    context ``around_first``. Return the parameters whose gradients were already reduced after it.
    """
    model, early = subject.model, tuple[str, ...]()
    drop_gradients(model)
    with comparable_modes(model):
        batch = global_batch(subject, 0)
        for number, slices in enumerate(rounds):
            rows = _join([own_rows(batch, 0, piece, device) for piece in slices])
            seed_all(SEED)
            doing(f"accumulating gradients, micro-batch {number + 1} of {len(rounds)}")
            last = number == len(rounds) - 1
            around = around_first if number == 0 else None
            with nullcontext() if last else _unsynced(model), around or nullcontext():
                (loss_of(subject, rows) / len(rounds)).backward()
            if number == 0 and not last:
                early = tuple(_already_reduced(model))
    return early


def finish_gradients(optimizer: Optimizer) -> str:
    """Run the hooks of the optimizer's step, which may reduce or scale gradients, without the step itself.

    Return the error that one of them raises, which may expect a step of the training; empty if none does.
    """
    try:
        for part in parts_of_optimizer(optimizer):
            for before, hook in step_hooks(part):
                if before:
                    hook(part, (), {})
    except Exception as error:
        return f"{type(error).__name__}: {first_line(error)}"
    return ""


def _join(slices: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return slices of one batch as one; entries without rows are the same in all."""
    first = slices[0]
    rows = {key for key, value in first.items() if isinstance(value, Tensor) and value.ndim}
    return {key: torch.cat([own[key] for own in slices]) if key in rows else first[key] for key in first}


@contextmanager
def _unsynced(model: Module) -> Iterator[None]:
    """Switch off the reduction of FSDP and DDP.

    FSDP2 reads its switch in the backward and DDP in the forward; FSDP1 has one on the root.
    """
    outermost = list(_outermost(model))  # authors may override the public switch of their outermost modules
    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, DistributedDataParallel) or (
                module is model and isinstance(module, FullyShardedDataParallel)
            ):
                stack.enter_context(module.no_sync())
            elif megatron_fsdp.is_wrapper(module):
                stack.enter_context(megatron_fsdp.unsynced(module))
        for module in outermost:
            module.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            for module in outermost:
                module.set_requires_gradient_sync(True)


def _outermost(module: Module) -> Iterator[FSDPModule]:
    """Yield the FSDP2 modules that no other FSDP2 module contains."""
    if isinstance(module, FSDPModule):
        yield module
        return
    for child in module.children():
        yield from _outermost(child)


def _already_reduced(model: Module) -> Iterator[str]:
    """Yield sharded parameters that have a gradient: FSDP2 sets ``grad`` only once it has reduced the gradient."""
    if not any(isinstance(module, FSDPModule) for module in model.modules()):
        return
    for name, _, tensor in named_tensors(model):
        if isinstance(tensor, DTensor) and tensor.grad is not None and _sharded_over_data(tensor):
            yield name


def _sharded_over_data(tensor: DTensor) -> bool:
    """Whether a mesh dimension that splits the batch shards the tensor, so that its gradient must be reduced."""
    dims = mesh_facts(tensor).dims
    return any(p.is_shard() and not splits_model(dim) for p, dim in zip(tensor.placements, dims, strict=True))
