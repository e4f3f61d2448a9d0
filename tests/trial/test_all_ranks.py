"""What all ranks of a world hold, from those of some: against the chunks that torch cuts for each rank."""

from __future__ import annotations

from math import prod
from statistics import median_low

import pytest
import torch

from pytest_fsdp_meta.checks.simulation.facts import BytesOfRanks
from pytest_fsdp_meta.evidence import MeshFacts, RankInventory, TensorFacts
from pytest_fsdp_meta.trial.simulation import bytes_of_ranks

HSDP = (("dp_replicate", 2), ("dp_shard", 6))
TP = (("dp_shard", 6), ("tp", 2))


def tensor(name, shape, placements, dims, place, sharded_by=""):
    mesh = MeshFacts(tuple(name for name, _ in dims), tuple(size for _, size in dims), place)
    extra = {"placements": placements, "mesh": mesh} if placements else {"sharded_by": sharded_by}
    return TensorFacts(name, "parameter", shape, (), (), "float32", "meta", identity=hash(name), width=4, **extra)


def inventory(rank, world, tensors, dims=None):
    """The tensors of a rank; each lies on some dimensions of the world, by default on all."""
    dims = dims or world
    place, rest = {}, rank
    for dim, size in reversed(world):
        rest, place[dim] = divmod(rest, size)
    at = tuple(place[dim] for dim, _ in dims)
    return RankInventory(rank, "meta", tuple(tensor(*one, dims, at) for one in tensors))


def chunk(length, count, index):
    parts = torch.empty(length, device="meta").chunk(count)
    return len(parts[index]) if index < len(parts) else 0


def spread(held):
    return BytesOfRanks(min(held), median_low(held), max(held))


def test_replicas_hold_the_same_and_the_last_ranks_less():
    tensors = [("a", (8, 3), ("R", "S(0)")), ("b", (4,), ("R", "S(0)")), ("tied", (6, 7), ("R", "S(1)"))]
    held = [4 * (3 * chunk(8, 6, rank % 6) + chunk(4, 6, rank % 6) + 6 * chunk(7, 6, rank % 6)) for rank in range(12)]
    some = [inventory(rank, HSDP, tensors) for rank in (0, 5, 11)]
    assert bytes_of_ranks(some, HSDP, {0: held[0], 5: held[5], 11: held[11]}) == spread(held)


def test_tensor_parallelism_cuts_before_fsdp():
    tensors = [("a", (10, 3), ("_S(0, 2)", "S(0)")), ("b", (5, 7), ("S(0)", "S(1)"))]
    held = [4 * (3 * chunk(5, 6, dp) + chunk(5, 6, dp) * chunk(7, 2, tp)) for dp in range(6) for tp in range(2)]
    assert bytes_of_ranks([inventory(0, TP, tensors), inventory(11, TP, tensors)], TP, {}) == spread(held)


def test_a_part_of_the_mesh():
    some = [inventory(rank, HSDP, [("a", (8, 3), ("S(0)",))], HSDP[1:]) for rank in (0, 11)]
    held = [12 * chunk(8, 6, rank) for rank in range(6)]
    assert bytes_of_ranks(some, HSDP, {}) == spread(held * 2)


WHOLE = [("a", (8, 3), ())]
UNKNOWN = {
    "another rank has another tensor": ([WHOLE, [("a", (8, 4), ())]], {}),
    "a part without placements": ([[("a", (8, 3), (), "an adapter")]] * 2, {}),
    "not what a rank holds": ([WHOLE, WHOLE], {11: 4}),
}


@pytest.mark.parametrize("why", UNKNOWN)
def test_nothing_is_said_of_ranks_that_may_hold_something_else(why):
    by_rank, known = UNKNOWN[why]
    some = [
        RankInventory(rank, "meta", tuple(tensor(*one[:3], (), (), *one[3:]) for one in tensors))
        for rank, tensors in zip((0, 11), by_rank, strict=True)
    ]
    assert bytes_of_ranks(some, HSDP, known) is None
    whole = 4 * prod((8, 3))
    assert bytes_of_ranks([some[0]] * 2, HSDP, {}) in (None, BytesOfRanks(whole, whole, whole))


def test_ranks_that_are_numbered_irregularly_are_unknown():
    tensors = [("a", (8, 3), ("R", "S(0)"))]
    first, last = inventory(0, HSDP, tensors), inventory(11, HSDP, tensors)
    assert bytes_of_ranks([RankInventory(3, "meta", first.tensors), last], HSDP, {}) is None
