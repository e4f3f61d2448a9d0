"""What ranks send in simulated worlds of two sizes: the traffic of groups that grow, and of groups that do not."""

from __future__ import annotations

import pytest

from pytest_fsdp_meta.catalogue import built_in, judge
from pytest_fsdp_meta.evidence import Evidence, RankInventory, ReferenceFacts, WorldFacts
from pytest_fsdp_meta.evidence.simulation import RankSize, SimulatedSize, SimulatedStep, Traffic

MIB = 2**20


def size(ranks: int, *traffic: Traffic, problem: str = "") -> SimulatedSize:
    return SimulatedSize(
        (("dp_shard", ranks),), (RankSize(0, MIB, 0, SimulatedStep(traffic=traffic, problem=problem)),)
    )


def gathered(ranks: int, nbytes: int, *dims: str) -> Traffic:
    return Traffic("all_gather", dims, ranks, 1, nbytes)


def judged(*sizes: SimulatedSize):
    world = WorldFacts(sizes[0].size, sizes[0].mesh, "meta", "fake", simulated=(0,))
    inventory = RankInventory(0, "meta", ())
    reference = ReferenceFacts("callable", inventory)
    evidence = Evidence(world, inventory=(inventory,), reference=reference, simulation=sizes)
    catalogue = built_in()
    return judge(catalogue["communication_scales"], evidence, catalogue)


@pytest.mark.parametrize(
    ("later", "earlier"),
    [
        # A ring of 64 sends almost twice what one of 2 does.
        ((gathered(64, 126 * MIB, "dp"),), (gathered(2, 64 * MIB, "dp"),)),
        # A group of fixed size without a name beside one that grows.
        ((gathered(64, 126 * MIB), gathered(8, 70 * MIB)), (gathered(2, 64 * MIB), gathered(8, 70 * MIB))),
        # What only the larger world sends has nothing to be compared with.
        ((gathered(64, MIB, "dp"),), ()),
    ],
)
def test_a_ring_sends_as_much_in_a_larger_world(later, earlier):
    assert judged(size(64, *later), size(8, *earlier)).status == "passed"


@pytest.mark.parametrize(
    ("later", "earlier", "actual"),
    [
        (
            (gathered(64, 640 * MIB, "dp"),),
            (gathered(8, 64 * MIB, "dp"),),
            "640 MiB sent by all_gather over dp in a step of 64 ranks, after 64 MiB in one of 8",
        ),
        (
            (gathered(64, 64 * MIB), gathered(4, 700 * MIB)),
            (gathered(8, 64 * MIB), gathered(4, 70 * MIB)),
            "700 MiB sent by all_gather among 4 ranks in a step of 64 ranks, after 70 MiB in one of 8",
        ),
    ],
)
def test_more_is_found(later, earlier, actual):
    verdict = judged(size(64, *later), size(8, *earlier))
    assert [(finding.ranks, finding.actual) for finding in verdict.findings] == [((0,), actual)]


def test_a_world_without_a_step_is_not_compared():
    verdict = judged(size(64, gathered(64, MIB)), size(8, problem="no CUDA"))
    assert (verdict.status, verdict.reason) == ("skipped", "no step of 8 ranks was simulated: no CUDA")


def test_a_smaller_world_that_failed_says_why():
    failed = SimulatedSize((("dp_shard", 8),), (), problem="rank 0 raised KeyError: 8")
    verdict = judged(size(64), failed)
    assert verdict.reason == "no world of 8 could be simulated: rank 0 raised KeyError: 8"
    assert judged(size(97)).reason == "dp_shard=97 has no divisor up to 64 that gives a smaller world to compare with"
