"""Record the collectives of this rank, in order, and the FSDP2 groups of one training step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Module
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from pytest_fsdp_meta.checks.collectives.facts import Collective, FsdpGroup
from pytest_fsdp_meta.ranks.adapters.dtensor import local_part, own_memory
from pytest_fsdp_meta.ranks.bits import digest
from pytest_fsdp_meta.ranks.inventory import named_tensors
from pytest_fsdp_meta.ranks.torch_private import fsdp_groups, operator_arguments, operator_name, process_group
from pytest_fsdp_meta.ranks.watching import tensors_in, watching
from pytest_fsdp_meta.text import grouped
from pytest_fsdp_meta.worlds import Rank, current

NAMESPACES = frozenset({"c10d", "_c10d_functional", "_dtensor"})
"""Where torch's operators that communicate are."""
OPS = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "all_reduce_coalesced_": "all_reduce",
    "reduce_": "reduce",
    "broadcast": "broadcast",
    "broadcast_": "broadcast",
    "allgather_": "all_gather of lists",
    "allgather_coalesced_": "all_gather of lists",
    "_allgather_base_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter_": "reduce_scatter of lists",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_out": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "gather_": "gather",
    "gather_into_tensor_": "gather",
    "scatter_": "scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "all_to_all_single": "all_to_all",
    "shard_dim_alltoall": "all_to_all",
    "barrier": "barrier",
    "monitored_barrier_": "barrier",
}
"""The collective of each of torch's operators."""
OTHERS = frozenset(
    {
        *("send", "recv_", "recv_any_source_", "isend", "irecv", "batch_p2p_ops"),
        *("wait_tensor", "wait_tensors", "_wrap_tensor_autograd", "check_for_nan", "mesh_get_process_group"),
    }
)
"""Operators beside the collectives: point-to-point transfers, waits, and what looks up or checks something."""
INPUTS = ("input_tensors", "input_tensor", "input_list", "inputs", "input", "tensors")
"""The names that operators' schemas give the tensors that a rank sends."""
GROUPS = ("process_group", "group_name")
FSDP_BUFFERS = {
    "all_gather_copy_in": "all_gather",
    "chunk_cat": "reduce_scatter",
    "chunk_cat_mixed_dtype": "reduce_scatter",  # since torch 2.15
}
"""The operators with which FSDP2 fills its buffers, and the collective that a buffer is for."""
FSDP_OTHERS = frozenset({"split_with_sizes_copy", "copy_", "record_grad_output_stream"})
"""FSDP2's other operators."""
Span = tuple[StorageWeakRef, int, int]
"""A storage with the first byte and the byte after the last; the weak reference keeps its identity from reuse."""


@dataclass
class _Recorded:
    facts: Collective
    inputs: list[Span]
    copies: tuple[str, ...] = ()
    """The known parameters that an input is a copy of."""


@dataclass
class Recorder:
    """A watcher that records the collectives of one phase; it recognises copies of the ``known`` parameters."""

    known: Mapping[str, Tensor] = field(default_factory=dict)
    unknown: set[str] = field(default_factory=set)
    """Operators of torch that communicate or serve FSDP2 and are in none of the tables above."""
    _steps: int = 0
    """The number of optimizers' steps that run now: one may call the step of another."""
    _recorded: list[_Recorded] = field(default_factory=list)
    _fsdp_buffers: dict[str, list[StorageWeakRef]] = field(default_factory=dict)
    """The buffers of FSDP2 for each collective. The result of a reduce-scatter becomes the gradient, which others may
    gather."""

    def before(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if func.namespace == "fsdp":
            name = operator_name(func)
            if buffer_for := FSDP_BUFFERS.get(name):
                self._mark_as_fsdp(buffer_for, kwargs.get("out"))
            elif name not in FSDP_OTHERS:
                self.unknown.add(f"fsdp::{name}")
            return
        if func.namespace not in NAMESPACES:
            return
        name = operator_name(func)
        op = OPS.get(name)
        if op is None:
            if name not in OTHERS:
                self.unknown.add(f"{func.namespace}::{name}")
            return
        given = operator_arguments(func, args, kwargs)
        group = process_group(next(given[name] for name in GROUPS if name in given))
        inputs = [] if op == "barrier" else list(tensors_in(next((given[n] for n in INPUTS if n in given), None)))
        storages = () if self._steps else {StorageWeakRef(tensor.untyped_storage()).cdata for tensor in inputs}
        by_fsdp = any(ref.cdata in storages for ref in self._fsdp_buffers.get(op, ()))
        if by_fsdp and op == "reduce_scatter":
            self._mark_as_fsdp("all_reduce", given.get("output_tensor"))  # HSDP reduces it again, over the replicas
        facts = Collective(
            op=op,
            group=group.group_name,
            ranks=tuple(dist.get_process_group_ranks(group)),
            dtype=", ".join(dict.fromkeys(str(tensor.dtype).removeprefix("torch.") for tensor in inputs)),
            shapes=tuple(tuple(tensor.shape) for tensor in inputs),
            root=given.get("root_rank", given.get("src")),
            reduction=given["reduce_op"] if isinstance(given.get("reduce_op"), str) else "",
            by_fsdp=by_fsdp,
            optimizing=self._steps > 0,
        )
        copies = () if by_fsdp else self._find_copies(inputs)
        self._recorded.append(_Recorded(facts, [_span(tensor) for tensor in inputs], copies))

    def after(self, func: Any, args: Sequence[Any], out: Any) -> None:
        if func.namespace == "fsdp" and (buffer_for := FSDP_BUFFERS.get(operator_name(func))):
            self._mark_as_fsdp(buffer_for, out)

    @contextmanager
    def noting_optimizers(self) -> Iterator[None]:
        """Mark the collectives of optimizers' steps within the block; one may step while the backward still runs."""

        def count(change: int, *_: Any) -> None:
            self._steps += change

        with ExitStack() as handles:
            handles.callback(register_optimizer_step_pre_hook(partial(count, 1)).remove)
            handles.callback(register_optimizer_step_post_hook(partial(count, -1)).remove)
            yield

    def collectives(self, model: Module) -> tuple[Collective, ...]:
        """Return what was recorded, with the names of the parameters and buffers of ``model`` that were sent."""
        spans: dict[int, list[tuple[int, int, str]]] = {}
        tensors = {name: tensor for name, _, tensor in named_tensors(model)}
        alive = []  # while these references live, no other storage gets the same identity
        for name, tensor in tensors.items():
            for local in tensors_in(own_memory(tensor)):
                if local.numel():
                    ref, first, last = _span(local)
                    alive.append(ref)
                    spans.setdefault(ref.cdata, []).append((first, last, name))
        return tuple(replace(recorded.facts, tensors=_names(recorded, spans)) for recorded in self._recorded)

    def _mark_as_fsdp(self, op: str, buffers: Any) -> None:
        refs = self._fsdp_buffers.setdefault(op, [])
        refs += [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors_in(buffers)]

    def _find_copies(self, inputs: Sequence[Tensor]) -> tuple[str, ...]:
        """Return the known parameters that equal an input bit by bit; a single repeated value proves no copy."""
        names = []
        held = {name: own_memory(known) for name, known in self.known.items()}
        for tensor in inputs:
            alike = (tensor.numel(), tensor.dtype)
            candidates = [name for name, own in held.items() if (own.numel(), own.dtype) == alike]
            if candidates and _varies(tensor):
                bits = digest(tensor)
                names += [name for name in candidates if digest(local_part(self.known[name])) == bits]
        return tuple(dict.fromkeys(names))


def _varies(tensor: Tensor) -> bool:
    """Return whether the elements differ; torch.unique() does not take each dtype, bytes do."""
    if not tensor.numel():
        return False
    elements = tensor.reshape(-1).contiguous().view(torch.uint8).unflatten(0, (tensor.numel(), -1))
    return bool((elements != elements[:1]).any())


def _span(tensor: Tensor) -> Span:
    first = tensor.storage_offset() * tensor.element_size()
    return StorageWeakRef(tensor.untyped_storage()), first, first + tensor.numel() * tensor.element_size()


def _names(recorded: _Recorded, spans: Mapping[int, list[tuple[int, int, str]]]) -> tuple[str, ...]:
    """Return the tensors in the memory that was sent: one tensor, tied ones, or all of a flat buffer."""
    names = [
        name
        for ref, first, last in recorded.inputs
        for start, stop, name in spans.get(ref.cdata, ())
        if first < stop and start < last
    ]
    return tuple(dict.fromkeys([*names, *recorded.copies]))


StepTraffic = tuple[tuple[Collective, ...], tuple[FsdpGroup, ...], tuple[str, ...]]
"""The collectives of one step, the FSDP2 groups that it gathered, and the operators that the recorder does not know."""


def observe_step() -> StepTraffic | None:
    """Return what was recorded of this rank's step; None where no step was recorded to its end."""
    step: StepTraffic | None = current().state.get("step")
    return step


@dataclass
class _Forwards:
    """Counts the forwards of groups: the modules that fully_shard got as a list gather once, the first that runs.

    One that runs again, or after FSDP2's root has returned, gathers by itself, as a head does in a loss by chunks.
    """

    counted: Counter[int] = field(default_factory=Counter)
    _ran: dict[int, set[Module]] = field(default_factory=dict)
    _depth: int = 0

    def begin(self, index: int, module: Module, *_: Any) -> None:
        self._depth += 1
        ran = self._ran.setdefault(index, set())
        if not ran or module in ran:
            self.counted[index] += 1
            ran.clear()
        ran.add(module)

    def end(self, *_: Any) -> None:
        self._depth -= 1
        if not self._depth:
            self._ran.clear()


@contextmanager
def watching_step(rank: Rank, model: Module, steps: int, step: int) -> Iterator[None]:
    """Record the collectives of the block if it is the second of ``steps`` steps and a check asked for them.

    The first step is not typical: FSDP2 initialises itself and DDP orders its buckets.
    """
    if "collectives" not in rank.state["watch"] or step != min(1, steps - 1):
        yield
        return
    groups, forwards = list(fsdp_groups(model)), _Forwards()
    parameters = {name: tensor for name, kind, tensor in named_tensors(model) if kind == "parameter"}
    recorder = Recorder(known=parameters)
    with ExitStack() as hooks:
        for index, group in enumerate(groups):
            for module in group.modules:
                hooks.callback(module.register_forward_pre_hook(partial(forwards.begin, index)).remove)
                hooks.callback(module.register_forward_hook(forwards.end).remove)
        with recorder.noting_optimizers(), watching(recorder):
            yield
    names = grouped((id(tensor), name) for name, _, tensor in named_tensors(model))
    facts = tuple(
        FsdpGroup(
            parameters=tuple(name for parameter in group.parameters for name in names.get(id(parameter), ())),
            forwards=forwards.counted[index],
            reshards=group.reshards,
            trainable=any(parameter.requires_grad for parameter in group.parameters),
            replicates=group.replicates,
            ranks=group.ranks,
        )
        for index, group in enumerate(groups)
    )
    rank.state["step"] = recorder.collectives(model), facts, tuple(sorted(recorder.unknown))
