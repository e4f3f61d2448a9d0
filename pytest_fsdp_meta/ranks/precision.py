"""Which dtypes models compute in, and which ones a mixed-precision policy sets for computing and reducing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from pytest_fsdp_meta.ranks.torch_private import mixed_precision

COMPUTED = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
"""Dtypes in which models compute, and to which FSDP2 casts without a scale. float8 is a form of storage."""
WRAPPERS = (DistributedDataParallel, FullyShardedDataParallel)


def precision(model: Module) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return ``computes_in`` and ``reduces_in`` of a RankInventory."""
    policies: list[tuple[torch.dtype | None, torch.dtype | None]] = []
    for module in model.modules():
        if isinstance(module, FSDPModule):
            policy = mixed_precision(module)
            policies.append((policy.param_dtype, policy.reduce_dtype))
        elif isinstance(module, WRAPPERS) and module.mixed_precision is not None:
            policies.append((module.mixed_precision.param_dtype, module.mixed_precision.reduce_dtype))
    return _names(policy[0] for policy in policies), _names(policy[1] for policy in policies)


@contextmanager
def noting_autocast(device: torch.device) -> Iterator[set[str]]:
    """Yield the dtypes of each ``torch.autocast`` for the device that is entered where gradients are computed."""
    found: set[str] = set()
    enter = torch.autocast.__enter__

    def noting(autocast: torch.autocast) -> Any:
        entered = enter(autocast)
        if torch.is_grad_enabled() and torch.is_autocast_enabled(device.type):
            found.add(str(torch.get_autocast_dtype(device.type)).removeprefix("torch."))
        return entered

    torch.autocast.__enter__ = noting
    try:
        yield found
    finally:
        torch.autocast.__enter__ = enter


def is_low(dtype: torch.dtype) -> bool:
    """Whether the dtype is a floating one of a lower precision than float32."""
    return bool(dtype.is_floating_point and torch.finfo(dtype).eps > torch.finfo(torch.float32).eps)


def _names(dtypes: Iterator[torch.dtype | None]) -> tuple[str, ...]:
    return tuple(sorted({str(dtype).removeprefix("torch.") for dtype in dtypes if dtype is not None}))
