"""Test the private names of torch that observers use; these tests fail when torch moves one of them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_reduce, wait_tensor
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_fsdp_meta.ranks.adapters.lookup import parts_of
from pytest_fsdp_meta.ranks.inventory import managed_names
from pytest_fsdp_meta.ranks.torch_private import (
    FakeTensorMode,
    cutting_own_shards,
    drop_unreduced_gradients,
    flat_parameters,
    fsdp_groups,
    is_in_backward,
    is_operator,
    is_replicated,
    managed_places,
    managed_weights,
    mixed_precision,
    non_persistent_names,
    operator_arguments,
    operator_name,
    process_group,
    rearranging_shapes_only,
    refusing_objects,
    sequence_number,
    step_hooks,
    tree_leaves,
    write_count,
)
from pytest_fsdp_meta.worlds import current
from tests.world_help import world_of


def test_non_persistent_buffers():
    module = nn.Module()
    module.register_buffer("kept", torch.zeros(1))
    module.register_buffer("left_out", torch.zeros(1), persistent=False)
    assert non_persistent_names(module) == {"left_out"} == {"kept", "left_out"} - set(module.state_dict())


def test_the_name_and_the_arguments_of_an_operator():
    class Noted(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            on_note.append((is_operator(func), operator_name(func), operator_arguments(func, args, kwargs or {})))
            return func(*args, **(kwargs or {}))

    on_note = []
    with Noted():
        torch.add(torch.ones(1), 2, alpha=3)
    [(known, name, given)] = [one for one in on_note if one[1] == "add"]
    assert known
    assert (name, given["other"], given["alpha"]) == ("add", 2, 3)
    assert not is_operator(torch.ops.higher_order.cond)


def policies() -> list[MixedPrecisionPolicy]:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    fully_shard(model[0], mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    fully_shard(model)
    return [mixed_precision(module) for module in (model[0], model)]


def test_the_mixed_precision_policy_of_fully_shard():
    with world_of(2) as world:
        given = [MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32), MixedPrecisionPolicy()]
        assert world.run(policies) == [given, given]


def replicated() -> list[bool]:
    from torch.distributed._composable.replicate import replicate
    from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_with_fsdp

    plain, by_ddp, by_fsdp = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
    replicate(by_ddp, device_mesh=current().mesh)
    replicate_with_fsdp(by_fsdp)
    return [is_replicated(module) for module in (plain, by_ddp, by_fsdp)]


def test_replicated_modules():
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


def test_flat_parameters_of_fsdp1():
    with world_of(2) as world:
        results = world.run(look_into_fsdp1)
    shapes = {"0.weight": (5, 3), "0.bias": (5,), "1.weight": (3, 5), "1.bias": (3,)}
    for found in results:
        assert {name: shape for name, (shape, *_) in found.items()} == shapes
        assert all(equal and by == "FSDP1" for _, _, equal, by in found.values())
    held = [sum(stop - start for runs in regions for start, stop in runs) for found in results
            for _, regions, _, _ in found.values()]  # fmt: skip
    assert sum(held) == sum(p.numel() for p in build().parameters())


def sharded_pair(forward: bool) -> nn.Sequential:
    """Return a model of two FSDP2 groups; the root's group stays gathered after a forward."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4))
    fully_shard(model[0], mesh=current().mesh)
    fully_shard(model, mesh=current().mesh, ignored_params={model[2].weight, model[2].bias})
    if forward:
        model(torch.ones(2, 4)).sum().backward() if forward == "backward" else model(torch.ones(2, 4))
    return model


def recreate_weight(model: nn.Sequential, layer: int) -> None:
    model[layer].weight = nn.Parameter(model[layer].weight.detach().clone())


def unmanaged_names(model: nn.Module) -> list[str]:
    """Return the names whose registered parameter FSDP2 does not manage."""
    names = managed_names(model)
    assert set(names) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    return [name for name, live in names.items() if not live]


def managed() -> dict[str, list[str]]:
    found = {}
    for forward in (False, True, "backward"):
        found[f"intact, {forward}"] = unmanaged_names(sharded_pair(forward))
        model = sharded_pair(forward)
        model.to_empty(device="cpu")
        found[f"to_empty, {forward}"] = unmanaged_names(model)
        model = sharded_pair(forward)
        model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
        found[f"assign, {forward}"] = unmanaged_names(model)
        for layer in (0, 1):
            model = sharded_pair(forward)
            recreate_weight(model, layer)
            found[f"layer {layer} recreated, {forward}"] = unmanaged_names(model)
    model = sharded_pair(False)
    model[1].weight = nn.Parameter(torch.ones(4, 4))
    found["plain"] = unmanaged_names(model)
    return found


def test_replaced_parameters_are_not_managed():
    with world_of(2) as world:
        first, second = world.run(managed)
    assert first == second
    broken = {case: names for case, names in first.items() if names}
    # Before its first forward FSDP2 adopts the DTensors that it finds.
    assert broken == {
        "layer 0 recreated, True": ["0.weight"],
        "layer 1 recreated, True": ["1.weight"],
        "layer 0 recreated, backward": ["0.weight"],
        "layer 1 recreated, backward": ["1.weight"],
        "plain": ["1.weight"],
    }


def shared() -> list[dict[str, bool]]:
    def tied() -> nn.Sequential:
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        model[1].weight = model[0].weight
        fully_shard(model, mesh=current().mesh)
        return model

    intact, untied, assigned = tied(), tied(), tied()
    recreate_weight(untied, 1)
    assigned.load_state_dict(assigned.state_dict(), assign=True)
    twice = nn.Sequential(*[nn.Linear(4, 4, bias=False)] * 2)
    fully_shard(twice, mesh=current().mesh)
    return [managed_names(model) for model in (intact, untied, assigned, twice)]


def test_parameters_shared_by_two_modules():
    with world_of(2) as world:
        intact, untied, assigned, twice = world.run(shared)[0]
    assert intact == assigned == twice == {"0.weight": True, "1.weight": True}
    assert untied == {"0.weight": True, "1.weight": False}


def test_a_model_without_fsdp_has_no_managed_parameters():
    assert list(managed_places(nn.Linear(2, 2))) == []


def grouped() -> list[tuple[list[int], list[int]]]:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    fully_shard(model[0], mesh=current().mesh)
    fully_shard(model, mesh=current().mesh)
    modules = {id(module): index for index, module in enumerate(model.modules())}
    parameters = {id(parameter): index for index, parameter in enumerate(model.parameters())}
    return [
        ([modules[id(m)] for m in group.modules], [parameters[id(p)] for p in group.parameters])
        for group in fsdp_groups(model)
    ]


def policies_of_groups() -> list[tuple[bool, bool]]:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    fully_shard(model[0], mesh=current().mesh)
    fully_shard(model[1], mesh=current().mesh, reshard_after_forward=False)
    return [(group.reshards, group.replicates) for group in fsdp_groups(model)]


def test_groups_of_fsdp2():
    with world_of(2) as world:
        assert world.run(grouped) == [[([0], [2]), ([1], [0, 1])]] * 2


@pytest.mark.parametrize("mesh", [{"dp_shard": 2}, {"dp_replicate": 2, "dp_shard": 1}])
def test_resharding_and_replication_of_fsdp2_groups(mesh):
    with world_of(2, mesh=mesh) as world:
        assert world.run(policies_of_groups) == [[(True, len(mesh) == 2), (False, len(mesh) == 2)]] * 2


def gradient_after_an_unreduced_one() -> list[float]:
    """Leave a gradient unreduced, drop it, and return the sum of the next one; the batches are ones."""
    sums = []
    for keep in ("set_requires_gradient_sync", "set_requires_all_reduce"):
        model = nn.Linear(2, 1, bias=False)
        fully_shard(model, mesh=current().mesh)
        getattr(model, keep)(False)
        model(torch.ones(4, 2)).sum().backward()
        drop_unreduced_gradients(model)
        model.zero_grad()
        getattr(model, keep)(True)
        model(torch.ones(1, 2)).sum().backward()
        sums.append(model.weight.grad.full_tensor().sum().item())
    return sums


def test_gradients_that_were_not_reduced_are_dropped():
    with world_of(2, mesh={"dp_replicate": 2, "dp_shard": 1}) as world:
        assert world.run(gradient_after_an_unreduced_one) == [[2.0, 2.0]] * 2


def groups() -> list[tuple[str, list[int]]]:
    seen: list[dist.ProcessGroup] = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            for argument, value in zip(func._schema.arguments, args, strict=False):
                if argument.name in ("process_group", "group_name"):
                    seen.append(process_group(value))
            return func(*args, **(kwargs or {}))

    pair = dist.new_group([0, 1])
    with Mode():
        dist.all_reduce(torch.ones(1), group=pair)
        wait_tensor(all_reduce(torch.ones(1), "sum", pair))
    return [(group.group_name == pair.group_name, dist.get_process_group_ranks(group)) for group in seen]


def test_the_process_group_of_a_collective():
    with world_of(2) as world:
        assert world.run(groups) == [[(True, [0, 1])] * 2] * 2


def test_writes_are_counted():
    weight = nn.Parameter(torch.ones(2))
    before = write_count(weight)
    with torch.no_grad():
        weight.add_(1)
    assert write_count(weight) > before


def test_the_step_hooks_of_an_optimizer():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    assert step_hooks(optimizer) == []
    hooks = [lambda *_: None, lambda *_: None]
    optimizer.register_step_post_hook(hooks[0])
    optimizer.register_step_pre_hook(hooks[1])
    assert step_hooks(optimizer) == [(True, hooks[1]), (False, hooks[0])]


def weights_of_two_groups() -> list[tuple[list[int], bool, bool, bool]]:
    """Describe the weights of a tied pair that was tied after it had been sharded as two groups of 3 rows."""
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    for layer in model:
        fully_shard(layer, mesh=current().mesh)
    fully_shard(model, mesh=current().mesh)
    before = [weight.whole is None and weight.gathers_from_shard() for weight in managed_weights(model)]
    assert before == [True, True]
    model[1].weight = model[0].weight
    model(torch.ones(2, 3)).sum()
    modules = list(model)
    found = []
    for weight in managed_weights(model):
        [(module, name)] = weight.places
        layer = modules.index(module)
        whole = weight.whole
        model[layer].unshard()
        own = weight.own_slice(getattr(module, name))
        assert own is not None
        equal = torch.equal(own, weight.shard) and module.weight is whole
        model[layer].reshard()
        assert weight.own_slice(module.weight) is None  # a shard is not whole
        found.append(([layer, *weight.shard.shape], weight.trainable, equal, weight.gathers_from_shard()))
    return found


def test_where_fsdp2_gathers_from():
    """torch 2.13 pads the uneven shard of rank 1 for each group; this test fails when a release shares the memory."""
    with world_of(2) as world:
        first, second = world.run(weights_of_two_groups)
    assert first == [([0, 2, 3], True, True, True), ([1, 2, 3], True, True, True)]
    assert second == [([0, 1, 3], True, True, False), ([1, 1, 3], True, True, True)]


def test_autograd_nodes_are_numbered_in_the_order_in_which_they_are_made():
    weight = torch.ones(2, requires_grad=True)
    early, late = weight.to(torch.float64), weight.clone()
    assert sequence_number(early.grad_fn) < sequence_number(late.grad_fn)
    assert (early.grad_fn.name(), early.grad_fn.next_functions[0][0].variable is weight) == ("ToCopyBackward0", True)


def test_code_that_runs_in_a_backward():
    seen = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda gradient: seen.append(is_in_backward()))
    (x * 2).sum().backward()
    assert (seen, is_in_backward()) == ([True], False)


def test_fake_tensors_have_a_device_and_no_values():
    with FakeTensorMode():
        fake = torch.empty(4, 4, device="cpu")
        assert (fake.device.type, fake.untyped_storage().nbytes(), tree_leaves([fake, (1,)])) == ("cpu", 64, [fake, 1])
        with pytest.raises(RuntimeError):
            fake.sum().item()


def test_shards_that_are_cut_alone_are_those_of_torch():
    for length, ranks in ((8, 4), (10, 4), (3, 8), (17, 16), (1, 1)):
        tensor = torch.arange(length * 2.0).view(length, 2)
        with cutting_own_shards():
            own = _fsdp_param._chunk_with_empty(tensor, ranks, dim=0)
        torchs = _fsdp_param._chunk_with_empty(tensor, ranks, dim=0)
        assert isinstance(torchs, list)
        assert len(own) == len(torchs)
        assert all(torch.equal(own[rank], torchs[rank]) for rank in range(ranks))


def gathering_objects() -> str:
    from torch.distributed import all_gather_object

    with pytest.raises(ValueError, match="refused all_gather_object"), refusing_objects(_refusal):
        all_gather_object([None, None], "own")
    found = [None, None]
    all_gather_object(found, "own")
    return " ".join(found)


def _refusal(function: str, error: BaseException | None) -> ValueError:
    return ValueError(f"refused {function}")


def test_objects_are_refused_that_ranks_send():
    with world_of(2) as world:
        assert world.run(gathering_objects) == ["own own", "own own"]


def test_shapes_are_rearranged_as_torch_does_it():
    torchs = _fsdp_collectives.torch
    for shape, dim in (((4, 6), 1), ((2, 3, 8), 2)):
        tensor = torch.empty(shape)
        with rearranging_shapes_only():
            own = _fsdp_collectives.torch.cat(_fsdp_collectives.torch.chunk(tensor, 2, dim=dim), dim=0)
            out = torch.empty(1)
            assert _fsdp_collectives.torch.cat(_fsdp_collectives.torch.chunk(tensor, 2), dim=dim, out=out) is out
            assert _fsdp_collectives.torch.cat([tensor, tensor]).shape[0] == 2 * shape[0]
        assert own.shape == torchs.cat(torchs.chunk(tensor, 2, dim=dim), dim=0).shape
    assert _fsdp_collectives.torch is torch
