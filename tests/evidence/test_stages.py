"""Which ranks are a stage of a pipeline, and which tensors whole stages hold."""

from __future__ import annotations

import pytest

from pytest_fsdp_meta.checks.sharding.facts import held_by_stages, holding_stages, stages_of
from pytest_fsdp_meta.evidence import RankInventory, TensorFacts

PAIRS = ((0, 1), (2, 3))


@pytest.mark.parametrize(
    ("mesh", "expected"),
    [
        ((("dp_shard", 4),), ()),
        ((("pp", 1), ("dp_shard", 2)), ()),
        ((("pp", 2),), ((0,), (1,))),
        ((("pp", 2), ("dp_shard", 2)), PAIRS),
        ((("dp_shard", 2), ("pp", 2)), ((0, 2), (1, 3))),
        ((("dp", 2), ("pipeline", 2), ("tp", 2)), ((0, 1, 4, 5), (2, 3, 6, 7))),
        ((), ()),
    ],
)
def test_the_ranks_of_each_stage(mesh, expected):
    assert stages_of(mesh) == expected


def held(*by_rank: str) -> list[RankInventory]:
    return [
        RankInventory(
            rank, "cpu", tuple(TensorFacts(name, "parameter", (2,), (2,), (), "float32", "cpu") for name in names)
        )
        for rank, names in enumerate(by_rank)
    ]


def test_what_whole_stages_hold():
    inventory = held("ab", "ab", "bc", "bcd")
    assert held_by_stages(PAIRS, inventory) == ("a", "c")  # "d" is on one rank of its stage alone
    assert held_by_stages((), inventory) == ()
    assert held_by_stages(PAIRS, inventory[1:3]) == ("a", "c")  # a simulated world has some of the ranks
    assert [holding_stages(name, PAIRS, inventory[1:3]) for name in "ab"] == [[0], [0, 1]]
    assert [holding_stages(name, PAIRS, inventory) for name in "abd"] == [[0], [0, 1], [1]]
