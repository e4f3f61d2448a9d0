"""Every private name of torch that observers need, where no public one exists.

tests/test_torch_private.py breaks when one moves.
"""

from __future__ import annotations

from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy


def mixed_precision(module: FSDPModule) -> MixedPrecisionPolicy:
    """The policy that ``fully_shard`` was given; public torch takes it and never tells it again."""
    policy = module._get_fsdp_state()._mp_policy
    assert isinstance(policy, MixedPrecisionPolicy)
    return policy
