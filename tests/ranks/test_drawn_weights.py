"""What torch draws on the CPU, and how well spreads of draws can be distinguished."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from pytest_fsdp_meta import Subject
from pytest_fsdp_meta.checks.drawn.judge import fans_of, limit, measure_ratio, wrong_fan
from pytest_fsdp_meta.checks.drawn.observe import HEAD, SAMPLE, spread_of
from pytest_fsdp_meta.evidence import DrawnTensor
from pytest_fsdp_meta.ranks.watching import DTensorDraws, watching
from pytest_fsdp_meta.worlds import Rank, current
from tests.checks.evidence_factory import parameter
from tests.trial_help import observe
from tests.world_help import world_of

SIZE = 16


def sharded() -> nn.Linear:
    with torch.device("meta"):
        linear = nn.Linear(SIZE, SIZE, bias=False)
    fully_shard(linear, mesh=current().mesh)
    linear.to_empty(device=current().device)
    return linear


def shard_drawn_by(draw: Callable[[nn.Linear], object], seed: int = 7) -> tuple[list[float], bool]:
    """Return this rank's shard, and whether torch drew it as a DTensor."""
    linear = sharded()
    torch.manual_seed(seed)
    draws = DTensorDraws()
    with torch.no_grad(), watching(draws=draws):
        draw(linear)
    return linear.weight.to_local().flatten().tolist(), draws.seen


def local(linear: nn.Linear) -> Tensor:
    shard: Tensor = linear.weight.detach().to_local()
    return shard


def copy_of_whole(linear: nn.Linear) -> None:
    """DrawnTensor the whole tensor on each rank, and keep the own rows."""
    rank, rows = current().rank, SIZE // current().world_size
    local(linear).copy_(torch.randn(SIZE, SIZE)[rank * rows : (rank + 1) * rows])


ON_DTENSORS: dict[str, Callable[[nn.Linear], object]] = {
    "normal_": lambda linear: linear.weight.normal_(),
    "data.uniform_": lambda linear: linear.weight.data.uniform_(),
    "init.normal_": lambda linear: nn.init.normal_(linear.weight),
    "init.trunc_normal_": lambda linear: nn.init.trunc_normal_(linear.weight),
    "init.kaiming_uniform_": lambda linear: nn.init.kaiming_uniform_(linear.weight),
    "init.xavier_normal_": lambda linear: nn.init.xavier_normal_(linear.weight),
    "reset_parameters": lambda linear: linear.reset_parameters(),
    "randn_like": lambda linear: linear.weight.copy_(torch.randn_like(linear.weight)),
}
LOCALLY: dict[str, Callable[[nn.Linear], object]] = {
    "local normal_": lambda linear: local(linear).normal_(),
    "local init": lambda linear: nn.init.kaiming_uniform_(local(linear)),
}
WHOLE: dict[str, Callable[[nn.Linear], object]] = {
    "before sharding": copy_of_whole,
    "distribute_tensor": lambda linear: linear.weight.copy_(
        distribute_tensor(torch.randn(SIZE, SIZE), current().mesh, [Shard(0)])
    ),
}


def all_shards() -> dict[str, tuple[list[float], bool]]:
    return {name: shard_drawn_by(draw) for name, draw in (ON_DTENSORS | LOCALLY | WHOLE).items()}


def test_which_draws_give_equal_shards_on_the_cpu():
    """torch 2.13 draws the same numbers for each shard of a DTensor on the CPU, and says so in a warning."""
    with world_of(2) as world:
        first, second = world.run(all_shards)
    equal = {name for name in first if first[name][0] == second[name][0]}
    assert equal == {*ON_DTENSORS, *LOCALLY}
    assert {name for name, (_, by_dtensor) in first.items() if by_dtensor} == {*ON_DTENSORS}


def test_loading_without_draws_on_dtensors_is_not_one():
    def draws() -> bool:
        return shard_drawn_by(lambda linear: nn.init.ones_(linear.weight))[1]

    with world_of(2) as world:
        assert world.run(draws) == [False, False]


def test_the_spread_of_a_tensor():
    found = spread_of(torch.tensor([[1.0, 1.0], [3.0, 3.0]]))
    assert (found.elements, found.distinct, found.fourth, found.head) == (4, 2, 1.0, "")
    assert found.variance == pytest.approx(4 / 3)
    assert found.surprise == pytest.approx(4 * math.log(2))
    assert spread_of(torch.zeros(5, 5)).surprise == 0.0
    assert spread_of(torch.full((40,), math.nan)).variance != 0


def test_a_large_tensor_is_measured_on_a_sample():
    found = spread_of(torch.randn(3, SAMPLE))
    assert SAMPLE / 2 < found.elements <= SAMPLE
    assert found.variance == pytest.approx(1, abs=0.02)


def test_uneven_draws_begin_alike():
    def beginning(rows: int, draw: Callable[[Tensor], object]) -> str:
        torch.manual_seed(3)
        values = torch.empty(rows, 5)
        draw(values)
        return spread_of(values).head

    for draw in (nn.init.normal_, nn.init.uniform_, nn.init.trunc_normal_):
        assert beginning(9, draw) == beginning(7, draw) != ""
    assert beginning(2 * HEAD // 5, nn.init.normal_) == ""


def drawn_pair(kind: str, elements: int, generator: torch.Generator) -> DrawnTensor:
    def one() -> Tensor:
        values = torch.empty(elements)
        if kind == "uniform":
            return values.uniform_(-1, 1, generator=generator)
        values.normal_(generator=generator)
        if kind == "truncated":
            return nn.init.trunc_normal_(values, a=-2.0, b=2.0, generator=generator)
        return values.bfloat16() if kind == "bfloat16" else values

    return DrawnTensor("a", spread_of(one()), spread_of(one()))


@pytest.mark.parametrize("kind", ["normal", "uniform", "truncated", "bfloat16"])
def test_equal_spreads_are_as_rarely_apart_as_stated(kind):
    """Three standard errors, one-sided, are 0.135%; a million runs would take too long."""
    generator = torch.Generator().manual_seed(14)
    ratios = [measure_ratio([drawn_pair(kind, 256, generator)]) for _ in range(1500)]
    assert sum(ratio.log > 3 * ratio.error for ratio in ratios if ratio) <= 8
    fans = fans_of(parameter("a", (16, 32), {"tp": 2}, ["S(1)"], [0]), None)
    assert not any(wrong_fan(ratio, fans, tests=1) for ratio in ratios if ratio)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_spread_of_a_shards_fan_is_found(ranks):
    """A weight of 64 x 64 has enough elements for any number of ranks."""
    tensor = parameter("a", (64, 64), {"tp": ranks}, ["S(1)"], [0])
    generator = torch.Generator().manual_seed(14)
    found = 0
    for _ in range(50):
        whole, shards = (torch.empty(64, 64).uniform_(-1, 1, generator=generator) for _ in range(2))
        ratio = measure_ratio([DrawnTensor("a", spread_of(shards * ranks**0.5), spread_of(whole))])
        fan = wrong_fan(ratio, fans_of(tensor, None), tests=300)
        found += fan is not None and fan.ratio == ranks
    assert found == 50
    assert limit(300) > 5


@pytest.mark.parametrize("written", [True, False])
def test_the_references_own_draw_is_observed(written):
    def build() -> nn.Linear:
        torch.manual_seed(1)
        linear = nn.Linear(SIZE, SIZE, bias=False)
        if not written:
            linear.weight = nn.Parameter(torch.empty(SIZE, SIZE))
        return linear

    def load(fsdp: Rank) -> Subject:
        linear = sharded()
        local(linear).normal_(std=fsdp.rank + 1)
        return Subject(linear, reference=build, drawn="weight")

    first, second = observe(load, wanted=["draws"]).draws
    assert [draw.name for draw in first.draws] == ["weight"]
    assert second.draws[0].own.variance > 2 * first.draws[0].own.variance
    if written:
        whole = build().weight.detach()
        assert second.draws[0].reference == spread_of(whole[SIZE // 2 :])
    else:
        assert second.draws[0].reference is None


def test_nothing_is_observed_where_nothing_is_declared_drawn():
    def load(fsdp: Rank) -> Subject:
        return Subject(sharded(), reference=lambda: nn.Linear(SIZE, SIZE, bias=False))

    found = observe(load, wanted=["draws"], mesh={"dp": 2})
    assert found.draws is None
    assert found.unavailable["draws"].summary == "Subject(drawn=...) is not declared"
