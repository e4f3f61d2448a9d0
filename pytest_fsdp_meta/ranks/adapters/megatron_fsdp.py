"""Describe the DTensors of megatron-fsdp, whose rows are not split as their placements say.

megatron-fsdp splits one flat buffer of many parameters into equal parts, so a rank may hold any number of rows of a
parameter; the attribute ``megatron_fsdp_slice`` of the parameter has the elements. Modules register these sharded
parameters between steps, and whole ones (``orig_param``) in temporary memory during a forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module

from pytest_fsdp_meta.checks.structure.facts import slice_runs
from pytest_fsdp_meta.evidence import Region
from pytest_fsdp_meta.loader.adapter import MEGATRON_FSDP, Adapter, Part
from pytest_fsdp_meta.ranks.adapters.dtensor import held_regions, mesh_facts, own_memory, own_part

SLICE, WHOLE = "megatron_fsdp_slice", "orig_param"


def adapter(model: Module) -> Adapter | None:
    """Return the adapter if megatron-fsdp sharded any parameter of the model."""
    return _part_of if any(hasattr(parameter, SLICE) for parameter in model.parameters()) else None


def _part_of(name: str, parameter: Tensor) -> Part | None:
    if not isinstance(parameter, DTensor) or not hasattr(parameter, SLICE):
        return None  # whole on every rank, as with the strategy "no_shard"
    local, held = own_memory(parameter), getattr(parameter, SLICE)
    return Part(
        local,
        tuple(parameter.shape),
        _rows(parameter, held.start, held.stop),
        placements=own_part(parameter).placements,
        mesh=mesh_facts(parameter),
        by=MEGATRON_FSDP,
        gradient=getattr(parameter, "decoupled_grad", None),
    )


def _rows(parameter: DTensor, start: int, stop: int) -> tuple[Region, ...]:
    """Return the regions of elements ``start`` to ``stop`` of this rank's tensor-parallel shard of the parameter."""
    tp_shard = getattr(parameter, WHOLE)
    regions = held_regions(tp_shard)
    row = prod(tuple(own_memory(tp_shard).shape)[1:])
    return (slice_runs(regions[0], start // row, -(-stop // row)), *regions[1:])


def reshard(model: Module) -> None:
    """Register the sharded parameters again, as after a backward."""
    for module in model.modules():
        if is_wrapper(module):
            # megatron-fsdp has no public function for it, and does this itself after a backward only.
            module._replace_param_with_distributed_if_needed()


def is_wrapper(module: Module) -> bool:
    """Whether the module is megatron-fsdp's wrapper around a model; Megatron-LM contains a copy of the package."""
    return type(module).__name__ == "MegatronFSDP" and "megatron_fsdp" in type(module).__module__


@contextmanager
def unsynced(wrapper: Any) -> Iterator[None]:
    """Switch off both reductions: the one in every backward, and the one in the last micro-batch's backward."""
    auto_sync = wrapper.model_auto_sync
    wrapper.set_model_auto_sync(False)
    try:
        with wrapper.no_sync():
            yield
    finally:
        wrapper.set_model_auto_sync(auto_sync)
