"""Describe FSDP1 with ``use_orig_params=True``: a rank holds a run of elements of each parameter.

FSDP1 splits one flat tensor of many parameters, so the run may begin and end anywhere in a parameter.
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn import Module

from pytest_fsdp_meta.loader.adapter import FSDP1, Adapter, Part
from pytest_fsdp_meta.ranks.torch_private import flat_parameters


def adapter(model: Module) -> Adapter | None:
    """Return an adapter if FSDP1 wraps any module of the model."""
    if not any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        return None
    layout = {id(parameter): (shape, start) for parameter, shape, start in flat_parameters(model)}

    def part(name: str, tensor: Tensor) -> Part | None:
        if id(tensor) not in layout:
            return None  # a buffer, an ignored parameter, or one that the strategy NO_SHARD keeps whole
        shape, start = layout[id(tensor)]
        return Part.run(tensor.detach(), shape, start, by=FSDP1)

    return part
