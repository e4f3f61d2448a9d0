"""The private names of torch that observers rely on: this breaks when one moves."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from pytest_fsdp_meta.observers.torch_private import is_replicated, mixed_precision
from pytest_fsdp_meta.worlds import current
from tests.world_help import world_of


def policies() -> list[MixedPrecisionPolicy]:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    fully_shard(model[0], mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    fully_shard(model)
    return [mixed_precision(module) for module in (model[0], model)]


def test_the_precision_that_fully_shard_was_given():
    with world_of(2) as world:
        given = [MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32), MixedPrecisionPolicy()]
        assert world.run(policies) == [given, given]


def replicated() -> list[bool]:
    from torch.distributed._composable.replicate import replicate
    from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_with_fsdp

    plain, by_ddp, by_fsdp = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
    replicate(by_ddp, device_mesh=current().mesh)
    replicate_with_fsdp(by_fsdp, mesh=current().mesh)
    return [is_replicated(module) for module in (plain, by_ddp, by_fsdp)]


def test_what_replicate_holds():
    with world_of(2) as world:
        assert world.run(replicated) == [[False, True, True]] * 2
