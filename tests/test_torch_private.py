"""The private names of torch that observers rely on: this breaks when one moves."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard

from pytest_fsdp_meta.observers.adapters.lookup import parts_of
from pytest_fsdp_meta.observers.torch_private import flat_parameters, is_replicated, mixed_precision
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


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3))


def look_into_fsdp1():
    whole = dict(build().named_parameters())
    model = FullyShardedDataParallel(build(), use_orig_params=True, device_id=current().device)
    found = {}
    model(torch.ones(2, 3))  # leaves the root gathered, for a backward; its parameters are the parts all the same
    adapter = parts_of(model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for parameter, shape, start in flat_parameters(model):
        name = names[id(parameter)].removeprefix("_fsdp_wrapped_module.")
        part = adapter.of(name, parameter)
        expected = whole[name].detach().flatten()[start : start + part.local.numel()]
        found[name] = (shape, part.regions, torch.equal(part.local, expected), part.by)
    return found


def test_the_parameters_that_fsdp1_flattened():
    with world_of(2) as world:
        results = world.run(look_into_fsdp1)
    shapes = {"0.weight": (5, 3), "0.bias": (5,), "1.weight": (3, 5), "1.bias": (3,)}
    for found in results:
        assert {name: shape for name, (shape, *_) in found.items()} == shapes
        assert all(equal and by == "FSDP1" for _, _, equal, by in found.values())
    held = [sum(stop - start for runs in regions for start, stop in runs) for found in results
            for _, regions, _, _ in found.values()]  # fmt: skip
    assert sum(held) == sum(p.numel() for p in build().parameters())
