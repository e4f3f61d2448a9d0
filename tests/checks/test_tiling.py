"""shards_tile_the_tensor on hand-made evidence."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.checks.evidence_factory import (
    MIDDLE,
    change,
    declare,
    findings_of,
    healthy,
    parameter,
    place,
    undeclared,
    verdict,
)

TILE = "shards_tile_the_tensor"
HSDP, TWO_D = {"dp_replicate": 2, "dp_shard": 2}, {"dp_shard": 2, "tp": 2}


@pytest.mark.parametrize(
    ("mesh", "placements", "shape"),
    [
        ({"dp_shard": 4}, ("S(0)",), (1, 2)),
        ({"dp_shard": 4}, ("S(0)",), (0, 2)),
        ({"dp_shard": 2}, ("S(0)",), (1, 4)),
        ({"dp_shard": 4}, ("S(1)",), (5, 2)),
        ({"dp_shard": 4}, ("R",), ()),
        ({"dp_shard": 4}, (), ()),
        ({"dp_shard": 4}, (), (3,)),
        (HSDP, ("R", "S(0)"), (3, 5)),
        (TWO_D, ("_S(0, 2)", "S(0)"), (7, 3)),
        (TWO_D, ("S(0)", "S(1)"), (7, 3)),
        (TWO_D, ("S(0)", "R"), (7, 3)),
        (TWO_D, ("P(sum)", "S(0)"), (7, 3)),
        ({"dp_shard": 2}, ("S(0)",), (7, 3)),  # two meshes of two ranks
        ({"ep": 4}, ("S(0)",), (8, 4)),
    ],
)
def test_placements_of_every_kind_cover_the_tensor(mesh, placements, shape):
    evidence = healthy(mesh=mesh if prod(mesh.values()) == 4 else {"dp_shard": 2, "pp": 2})
    evidence = place(evidence, MIDDLE, mesh, *placements, shape=shape)
    declared = {"placements": {MIDDLE: placements}} if placements else {"unsharded": (MIDDLE,)}
    assert verdict(TILE, declare(evidence, **declared)).status == "passed"


def test_the_shards_of_a_tensor_without_elements_are_empty():
    evidence = place(healthy(2), MIDDLE, {"dp_shard": 2}, "S(0)", shape=(8, 0))
    assert verdict(TILE, change(evidence, MIDDLE, local_shape=(0, 0))).status == "passed"


shards = st.one_of(st.none(), st.integers(0, 1))


@given(
    shape=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    plan=st.lists(st.tuples(st.integers(1, 3), shards), min_size=1, max_size=3),
    copied=st.data(),
)
def test_a_rank_at_the_coordinate_of_another_is_always_found(shape, plan, copied):
    mesh = {f"tp{number}": size for number, (size, _) in enumerate(plan)}
    placements = ["R" if dim is None else f"S({dim})" for _, dim in plan]
    evidence = healthy(mesh=mesh, parameters={})
    places = list(product(*(range(size) for size in mesh.values())))
    tensors = [parameter("w", shape, mesh, placements, place) for place in places]

    def judged(tensors):
        ranks = (replace(r, tensors=(t,)) for r, t in zip(evidence.inventory, tensors, strict=True))
        bare = undeclared(replace(evidence, inventory=tuple(ranks)), "reference", why="not declared")
        return verdict(TILE, declare(bare, placements={"w": tuple(placements)}))

    assert judged(tensors).status == "passed"
    one, other = (copied.draw(st.integers(0, len(tensors) - 1)) for _ in range(2))
    same = tensors[one].regions == tensors[other].regions or not (tensors[one].numel or tensors[other].numel)
    moved = [tensors[other] if rank == one else tensor for rank, tensor in enumerate(tensors)]
    assert judged(moved).status == ("passed" if same else "failed")


def at(evidence, rank, coordinate, mesh, placements, shape=(6, 4)):
    """Give one rank the shard of another coordinate."""
    shard = parameter(MIDDLE, shape, mesh, placements, coordinate)
    facts = {key: getattr(shard, key) for key in ("mesh", "regions", "local_shape")}
    return change(evidence, MIDDLE, [rank], **facts)


def all_at_one(evidence):
    for rank in evidence.inventory[1:]:
        evidence = at(evidence, rank.rank, (0,), {"dp_shard": 4}, ("S(0)",))
    return evidence


STRIDED = ("_S(0, 2)", "S(0)")
STRIDED_ON_TWO_D = place(healthy(mesh=TWO_D), MIDDLE, TWO_D, *STRIDED, shape=(8, 4))
ONE_ROW = place(healthy(), MIDDLE, {"dp_shard": 2}, "S(0)", shape=(1, 4))


@pytest.mark.parametrize(
    ("evidence", "ranks", "actual", "expected"),
    [
        (
            at(healthy(), 1, (0,), {"dp_shard": 2}, ("S(0)",)),
            *((0, 1), "2 ranks hold [0:3, 0:4] and no rank holds [3:6, 0:4]", "(6, 4) exactly once"),
        ),
        (
            at(healthy(mesh=HSDP), 3, (1, 0), HSDP, ("R", "S(0)")),
            *((0, 2, 3), "3 ranks hold [0:3, 0:4] and only 1 rank holds [3:6, 0:4]"),
            "(6, 4) exactly once in each of 2 replicas",
        ),
        (
            at(STRIDED_ON_TWO_D, 3, (0, 1), TWO_D, STRIDED, (8, 4)),
            *((1, 3), "2 ranks hold [4:6, 0:4] and no rank holds [6:8, 0:4]", "(8, 4) exactly once"),
        ),
        (
            at(ONE_ROW, 1, (0,), {"dp_shard": 2}, ("S(0)",), (1, 4)),
            *((0, 1), "2 ranks hold [0:1, 0:4]", "(1, 4) exactly once"),
        ),
        (
            all_at_one(healthy(4)),
            *((0, 1, 2, 3), "4 ranks hold [0:2, 0:4] and no rank holds [2:6, 0:4]", "(6, 4) exactly once"),
        ),
    ],
    ids=["two ranks", "a replica", "strided", "a single row", "all of many"],
)
def test_ranks_at_the_coordinate_of_others(evidence, ranks, actual, expected):
    found = verdict(TILE, evidence)
    assert findings_of(found) == [(MIDDLE, ranks, actual, f"shards that cover {expected}", "")]


def outside(evidence, rank, local_shape=(0,)):
    mesh = replace(evidence.inventory[rank].by_name[MIDDLE].mesh, coordinate=None)
    return change(evidence, MIDDLE, [rank], mesh=mesh, regions=((), ()), local_shape=local_shape)


def test_a_rank_outside_the_mesh_holds_no_part():
    # Ranks 0 and 1 shard; ranks 2 and 3 are not in their mesh.
    evidence = place(healthy(mesh={"dp_shard": 2, "pp": 2}), MIDDLE, {"dp_shard": 2}, "S(0)")
    assert verdict(TILE, outside(outside(evidence, 2), 3)).status == "passed"
    # A missing rank in a mesh of four leaves a gap.
    found = verdict(TILE, outside(healthy(4), 1))
    assert [(f.ranks, f.actual) for f in found.findings] == [((0, 2, 3), "no rank holds [2:4, 0:4]")]


def test_each_pattern_of_shards_is_analysed_once(monkeypatch):
    from pytest_fsdp_meta.checks.sharding import judge as tiling

    counted = []
    flaw = tiling._flaw
    monkeypatch.setattr(tiling, "_flaw", lambda *pattern: counted.append(pattern) or flaw(*pattern))
    shapes = {f"layers.{number}.weight": (8 + number % 2, 4) for number in range(500)}
    assert verdict(TILE, healthy(4, parameters=shapes)).status == "passed"
    assert len(counted) == 4  # two shapes of weights, two buffers
