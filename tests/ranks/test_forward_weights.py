"""What the observer of forwards sees of small models on two ranks, defective and correct ones."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from pytest_fsdp_meta import Subject
from pytest_fsdp_meta.checks.training.observe.step_watches import WeightWatch
from pytest_fsdp_meta.worlds import current
from tests.world_help import world_of

ROWS = 5
"""Rows of a weight, which two ranks do not share evenly."""


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(ROWS, 4), nn.Linear(4, ROWS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids))


def train(model: nn.Module, around: Any = nullcontext, steps: int = 3) -> list[tuple[str, str, int, str]]:
    """Train a few steps and return what was stale: name, module, first step and how."""
    optimizer, watch = torch.optim.SGD(model.parameters(), lr=0.5), WeightWatch(model)
    subject = Subject(model, loss=lambda model, rows: model(rows["ids"]).float().square().sum())
    with around():
        for _ in range(steps):
            watch.loss_of(subject, {"ids": torch.arange(ROWS)}).backward()
            optimizer.step()
            optimizer.zero_grad()
    observed = watch.observed()
    assert observed.forwards == steps
    return [(weight.name, weight.module, weight.step, weight.how) for weight in observed.stale]


def tied_after_sharding(together: bool = False, rows: int = ROWS, **policy: Any) -> Tied:
    model = Tied()
    model.embed, model.head = nn.Embedding(rows, 4), nn.Linear(4, rows, bias=False)
    for modules in [[model.embed, model.head]] if together else [[model.embed], [model.head]]:
        fully_shard(modules, mesh=current().mesh, **policy)
    fully_shard(model, mesh=current().mesh, **policy)
    model.head.weight = model.embed.weight
    return model


def tied_before_sharding(**policy: Any) -> Tied:
    model = Tied()
    model.head.weight = model.embed.weight
    fully_shard([model.embed, model.head], mesh=current().mesh, **policy)
    fully_shard(model, mesh=current().mesh, **policy)
    return model


HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
APART = [("embed.weight", "embed", 1, "padded apart")]


@pytest.mark.parametrize(
    ("together", "policy"),
    [(False, {}), (True, {}), (False, {"mp_policy": HALF}), (False, {"reshard_after_forward": False})],
)
def test_a_tie_that_is_made_after_sharding(together, policy):
    """The head's group is the last to pad its shard, so the embedding's gathers from old memory. One group for both
    modules does not help, because it manages the two weights that it found."""
    with world_of(2) as world:
        assert world.run(lambda: train(tied_after_sharding(together, **policy))) == [[], APART]
        assert world.run(lambda: train(tied_after_sharding(together, rows=6, **policy))) == [[], []]
        assert world.run(lambda: train(tied_before_sharding(**policy))) == [[], []]


def test_a_frozen_tie_has_nothing_to_miss():
    def train_frozen() -> list[Any]:
        model = nn.Sequential(tied_after_sharding(), nn.Linear(ROWS, 2))
        fully_shard(model, mesh=current().mesh)
        model[0].requires_grad_(False)
        return train(model)

    with world_of(2) as world:
        assert world.run(train_frozen) == [[], []]


def sharded() -> nn.Sequential:
    model = nn.Sequential(nn.Embedding(ROWS, 4), nn.Linear(4, 3))
    for layer in model:
        fully_shard(layer, mesh=current().mesh)
    fully_shard(model, mesh=current().mesh)
    return model


def gathered_in_bfloat16(current_weights: bool) -> list[Any]:
    """The shards say how they are gathered, by torch's extension for float8, as torch's own tests write it."""

    def pre_gather(shard: Tensor, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
        sent = shard.detach().bfloat16()
        return (sent if current_weights else sent * 0 + first[id(shard)],), None

    def post_gather(shard: Tensor, gathered: Any, metadata: Any, dtype: Any, *, out: Tensor | None = None) -> Any:
        whole = gathered[0].to(dtype)
        if out is None:
            return whole, (gathered[0], whole)
        with torch.no_grad(), _unsafe_preserve_version_counter(out):
            out.copy_(whole)
        return None

    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 2, bias=False)).bfloat16().float()
    for module in (*model, model):
        fully_shard(module, mesh=current().mesh)
    shards = [parameter._local_tensor for parameter in model.parameters()]
    first = {id(shard): shard.detach().bfloat16() for shard in shards}
    for shard in shards:
        shard.fsdp_pre_all_gather = partial(pre_gather, shard)
        shard.fsdp_post_all_gather = partial(post_gather, shard)
    return train(model)


def test_shards_that_say_how_they_are_gathered():
    with world_of(2) as world:
        assert world.run(gathered_in_bfloat16, True) == [[], []]
        [stale, _] = world.run(gathered_in_bfloat16, False)
        assert {(name, how) for name, _, _, how in stale} == {("0.weight", "gathered"), ("1.weight", "gathered")}


def never_resharded() -> list[Any]:
    model = sharded()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_reshard_after_forward(False)
            module.set_reshard_after_backward(False)
    return train(model)


def test_groups_that_stay_gathered_over_a_step():
    with world_of(2) as world:
        first, second = world.run(never_resharded)
    assert first == second
    assert first == [
        ("0.weight", "0", 1, "gathered"),
        ("1.weight", "1", 1, "gathered"),
        ("1.bias", "1", 1, "gathered"),
    ]


def around_steps(device: str = "cpu") -> Any:
    return torch.autocast(device, dtype=torch.bfloat16)


def test_autocast_around_all_steps_keeps_the_first_casts():
    with world_of(2) as world:
        found = world.run(lambda: train(sharded(), around_steps))
        assert found == [[("1.weight", "1", 1, "copied"), ("1.bias", "1", 1, "copied")]] * 2
        plain = world.run(lambda: train(nn.Sequential(nn.Embedding(ROWS, 4), nn.Linear(4, 3)), around_steps))
        assert plain == found


class Cast(nn.Linear):
    """Enter autocast in each forward, and checkpoint the activations."""

    def forward(self, x: Tensor) -> Tensor:
        with around_steps():
            return checkpoint(super().forward, x, use_reentrant=False)


class Noisy(nn.Linear):
    """Compute with another weight than the parameter in every forward, on purpose."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_forward_pre_hook(lambda module, _: module.weight.data.add_(torch.randn(module.weight.shape)))


@pytest.mark.parametrize("kind", [Cast, Noisy])
def test_what_is_computed_in_every_forward_is_current(kind):
    def build() -> nn.Module:
        model = nn.Sequential(nn.Embedding(ROWS, 4), kind(4, 3))
        fully_shard(model[1], mesh=current().mesh)
        fully_shard(model, mesh=current().mesh)
        return model

    with world_of(2) as world:
        assert world.run(lambda: train(build())) == [[], []]
