"""megatron-fsdp: DTensors whose rows are not cut as their placements say.

It cuts one flat buffer of many parameters into equal parts, so a rank may hold any number of rows of a parameter, and
notes which elements on the parameter (``megatron_fsdp_slice``). The modules have these parameters while nothing
computes; during a forward they have whole ones (``orig_param``), in memory that comes and goes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module

from pytest_fsdp_meta.evidence import Region
from pytest_fsdp_meta.loader.adapter import Adapter, Part
from pytest_fsdp_meta.observers.adapters.dtensor import held_regions, mesh_facts, own_memory, own_part
from pytest_fsdp_meta.observers.support.layout import take

BY = "megatron-fsdp"
SLICE, WHOLE = "megatron_fsdp_slice", "orig_param"


def adapter(model: Module) -> Adapter | None:
    return describe if any(hasattr(parameter, SLICE) for parameter in model.parameters()) else None


def describe(name: str, parameter: Tensor) -> Part | None:
    if not isinstance(parameter, DTensor) or not hasattr(parameter, SLICE):
        return None  # whole on every rank: "no_shard" cuts nothing
    local, held = own_memory(parameter), getattr(parameter, SLICE)
    return Part(
        local,
        tuple(parameter.shape),
        _rows(parameter, held.start, held.stop),
        placements=own_part(parameter).placements,
        mesh=mesh_facts(parameter),
        by=BY,
        gradient=getattr(parameter, "decoupled_grad", None),
    )


def _rows(parameter: DTensor, start: int, stop: int) -> tuple[Region, ...]:
    """The rows of the elements from ``start`` to ``stop`` of what tensor parallelism leaves of the parameter here."""
    whole = getattr(parameter, WHOLE)
    here = held_regions(whole)
    row = prod(tuple(own_memory(whole).shape)[1:])
    return (take(here[0], start // row, -(-stop // row)), *here[1:])


def reshard(model: Module) -> None:
    for module in model.modules():
        if is_wrapper(module):
            # There is no public call: it is otherwise made after a backward only.
            module._replace_param_with_distributed_if_needed()


def is_wrapper(module: Module) -> bool:
    """Whether it is the module that megatron-fsdp puts around a model; Megatron-LM has a copy of the package."""
    return type(module).__name__ == "MegatronFSDP" and "megatron_fsdp" in type(module).__module__


@contextmanager
def unsynced(wrapper: Any) -> Iterator[None]:
    """Both of its switches are turned: one reduces in every backward, the other in that of the last micro-batch."""
    every = wrapper.model_auto_sync
    wrapper.set_model_auto_sync(False)
    try:
        with wrapper.no_sync():
            yield
    finally:
        wrapper.set_model_auto_sync(every)
