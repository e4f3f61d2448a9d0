"""Every collective of this rank, in order, with the parameter that it moves where it is one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Module
from torch.optim.optimizer import register_optimizer_step_pre_hook

from pytest_fsdp_meta.evidence.collectives import Collective
from pytest_fsdp_meta.observers.adapters.dtensor import local_part, own_memory
from pytest_fsdp_meta.observers.inventory import named_tensors
from pytest_fsdp_meta.observers.support.bits import digest
from pytest_fsdp_meta.observers.support.torch_private import operator_arguments, operator_name, process_group
from pytest_fsdp_meta.observers.support.watching import tensors_in

NAMESPACES = frozenset({"c10d", "_c10d_functional", "_dtensor"})
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
    "scatter_": "scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "all_to_all_single": "all_to_all",
    "shard_dim_alltoall": "all_to_all",
    "barrier": "barrier",
    "monitored_barrier_": "barrier",
}
"""Collectives by torch's operators; point-to-point transfers and waiting are none."""
INPUTS = ("input_tensors", "input_tensor", "input_list", "inputs", "input", "tensors")
"""How their schemas call what a rank hands over."""
GROUPS = ("process_group", "group_name")
FSDP_BUFFERS = frozenset({"all_gather_copy_in", "chunk_cat"})
"""The operators with which FSDP2 fills what it then gathers, and what it then reduces and scatters."""


@dataclass
class _Seen:
    facts: Collective
    inputs: list[tuple[StorageWeakRef, int, int]]
    """The storages, with the first and the last byte of each input; a weak reference keeps its identity from reuse."""
    copies: tuple[str, ...] = ()


@dataclass
class Recorder:
    """A watcher that notes the collectives of one phase. ``known`` are parameters of which copies are told as well."""

    known: Mapping[str, Tensor] = field(default_factory=dict)
    optimizing: bool = False
    _seen: list[_Seen] = field(default_factory=list)
    _fsdp: list[StorageWeakRef] = field(default_factory=list)

    def before(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if func.namespace == "fsdp":
            if operator_name(func) in FSDP_BUFFERS:
                self._mark(kwargs.get("out"))
            return
        op = OPS.get(operator_name(func)) if func.namespace in NAMESPACES else None
        if op is None:
            return
        given = operator_arguments(func, args, kwargs)
        group = process_group(next(given[name] for name in GROUPS if name in given))
        inputs = [] if op == "barrier" else list(tensors_in(next((given[n] for n in INPUTS if n in given), None)))
        by_fsdp = any(self._is_fsdp(tensor) for tensor in inputs)
        if by_fsdp and op == "reduce_scatter":
            self._mark(given.get("output_tensor"))  # HSDP reduces it once more
        facts = Collective(
            op=op,
            group=group.group_name,
            ranks=tuple(dist.get_process_group_ranks(group)),
            dtype=_dtype(inputs),
            shapes=tuple(tuple(tensor.shape) for tensor in inputs),
            root=given.get("root_rank", given.get("src")),
            reduction=given["reduce_op"] if isinstance(given.get("reduce_op"), str) else "",
            by_fsdp=by_fsdp,
            optimizing=self.optimizing,
        )
        copies = () if by_fsdp else self._copied(inputs)
        self._seen.append(_Seen(facts, [_place(tensor) for tensor in inputs], copies))

    def after(self, func: Any, args: Sequence[Any], out: Any) -> None:
        if func.namespace == "fsdp" and operator_name(func) in FSDP_BUFFERS:
            self._mark(out)

    @contextmanager
    def noting_optimizers(self) -> Iterator[None]:
        """Until the end of the block, what comes from an optimizer's step on is told as such."""

        def begins(*_: Any) -> None:
            self.optimizing = True

        handle = register_optimizer_step_pre_hook(begins)
        try:
            yield
        finally:
            handle.remove()

    def told(self, model: Module) -> tuple[Collective, ...]:
        """What was seen, with the names of the parameters and buffers of ``model`` whose memory was handed over."""
        places: dict[int, list[tuple[int, int, str]]] = {}
        alive = []
        for name, _, tensor in named_tensors(model):
            for local in tensors_in(own_memory(tensor)):
                if local.numel():
                    ref, first, last = _place(local)
                    alive.append(ref)
                    places.setdefault(ref.cdata, []).append((first, last, name))
        return tuple(replace(one.facts, tensors=_names(one, places)) for one in self._seen)

    def _mark(self, buffers: Any) -> None:
        self._fsdp += [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors_in(buffers)]

    def _is_fsdp(self, tensor: Tensor) -> bool:
        own = StorageWeakRef(tensor.untyped_storage()).cdata
        return any(ref.cdata == own for ref in self._fsdp)

    def _copied(self, inputs: Sequence[Tensor]) -> tuple[str, ...]:
        """The known parameters that an input equals in size and bits. One value repeated is no sign of a copy."""
        names = []
        for tensor in inputs:
            alike = [name for name, known in self.known.items() if _alike(known, tensor)]
            if alike and len(torch.unique(tensor)) > 1:
                bits = digest(tensor)
                names += [name for name in alike if digest(local_part(self.known[name])) == bits]
        return tuple(dict.fromkeys(names))


def _alike(known: Tensor, tensor: Tensor) -> bool:
    local = own_memory(known)
    return bool(local.numel() == tensor.numel() and local.dtype == tensor.dtype)


def _place(tensor: Tensor) -> tuple[StorageWeakRef, int, int]:
    first = tensor.storage_offset() * tensor.element_size()
    return StorageWeakRef(tensor.untyped_storage()), first, first + tensor.numel() * tensor.element_size()


def _names(one: _Seen, places: Mapping[int, list[tuple[int, int, str]]]) -> tuple[str, ...]:
    """All that lies in the memory that was handed over: one tensor, its ties, or those of a flat buffer."""
    names = [
        name
        for ref, first, last in one.inputs
        for start, stop, name in places.get(ref.cdata, ())
        if first < stop and start < last
    ]
    return tuple(dict.fromkeys([*names, *one.copies]))


def _dtype(inputs: Sequence[Tensor]) -> str:
    return ", ".join(dict.fromkeys(str(tensor.dtype).removeprefix("torch.") for tensor in inputs))
