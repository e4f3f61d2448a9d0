"""Every private name of torch that observers need, where no public one exists.

tests/test_torch_private.py breaks when one moves.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.distributed._composable.replicate import replicate
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy
from torch.nn import Module

try:
    from torch.distributed._composable.replicate_with_fsdp import ReplicateModule
except ImportError:  # before torch 2.9 there is only the other

    class ReplicateModule:  # type: ignore[no-redef]
        """What no module is."""


def mixed_precision(module: FSDPModule) -> MixedPrecisionPolicy:
    """The policy that ``fully_shard`` was given; public torch takes it and never tells it again."""
    policy = module._get_fsdp_state()._mp_policy
    assert isinstance(policy, MixedPrecisionPolicy)
    return policy


def is_replicated(module: Module) -> bool:
    """Whether replicate() was applied to the module: DDP without a wrapper, which public torch does not have."""
    return isinstance(module, ReplicateModule) or replicate.state(module) is not None


def flat_parameters(model: Module) -> Iterator[tuple[Tensor, tuple[int, ...], int]]:
    """(parameter, its whole shape, number of the first element that this rank holds) of what FSDP1 shards.

    The rank's elements are the parameter itself; their number is its size, which may be 0. Public torch tells neither
    the shape nor the offset: only state dicts do, by gathering.
    """
    for module in FullyShardedDataParallel.fsdp_modules(model):
        handle: Any = module._handle
        if handle is not None and handle.uses_sharded_strategy:
            flat = handle.flat_param
            for parameter, shape, info in zip(flat._params, flat._shapes, flat._shard_param_infos, strict=True):
                yield parameter, tuple(shape), info.intra_param_start_idx or 0
