"""Every private name of torch that observers need, where no public one exists.

tests/test_torch_private.py breaks when one moves.
"""

from __future__ import annotations

from torch.distributed._composable.replicate import replicate
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
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
