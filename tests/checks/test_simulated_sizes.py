"""What ranks send in simulated worlds of two sizes: the traffic of groups that grow, and of groups that do not."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import pytest

from pytest_fsdp_meta.catalogue import built_in, judge
from pytest_fsdp_meta.checks.memory.facts import GatheredGroup
from pytest_fsdp_meta.checks.simulation.facts import (
    Assumptions,
    BytesOfRanks,
    ModuleTraffic,
    PhasePeak,
    RankSize,
    SimulatedSize,
    SimulatedStep,
    Traffic,
)
from pytest_fsdp_meta.evidence import Evidence, MeshFacts, RankInventory, ReferenceFacts, TensorFacts, WorldFacts

MIB = 2**20


HELD = PhasePeak("forward", "", {"held": MIB})


def size(ranks: int, *traffic: Traffic, problem: str = "", **facts: Any) -> SimulatedSize:
    peaks = () if problem else (HELD,)
    step = SimulatedStep(**{"peaks": peaks, "traffic": traffic, "problem": problem, **facts})
    return SimulatedSize((("dp_shard", ranks),), (RankSize(0, MIB, 0, step),))


def gathered(ranks: int, nbytes: int, *dims: str) -> Traffic:
    return Traffic("all_gather", dims, ranks, 1, nbytes)


def judged(
    *sizes: SimulatedSize,
    id: str = "communication_scales",
    memory: int = 0,
    recomputing: tuple[str, ...] = (),
    tensors: tuple[TensorFacts, ...] = (),
):
    world = WorldFacts(
        sizes[0].size, sizes[0].mesh, "meta", "fake", simulated=(0,), device_memory=memory, memory_reserve=0.06
    )
    inventory = RankInventory(0, "meta", tensors)
    reference = ReferenceFacts("callable", inventory, recomputing=recomputing)
    evidence = Evidence(world, inventory=(inventory,), reference=reference, simulation=sizes)
    catalogue = built_in()
    return judge(catalogue[id], evidence, catalogue)


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
        ((gathered(64, 640 * MIB, "dp"),), (gathered(8, 64 * MIB, "dp"),), "640 MiB sent by all_gather over dp in"),
        (
            (gathered(64, 64 * MIB), gathered(4, 700 * MIB)),
            (gathered(8, 64 * MIB), gathered(4, 70 * MIB)),
            "700 MiB sent by all_gather among 4 ranks in",
        ),
    ],
)
def test_more_is_found(later, earlier, actual):
    [finding] = judged(size(64, *later), size(8, *earlier)).findings
    assert finding.actual.startswith(actual)


def test_the_module_that_sends_most_is_named():
    parts = (ModuleTraffic("head", 1, 600 * MIB), ModuleTraffic("layers.*", 4, 40 * MIB))
    later = replace(gathered(64, 640 * MIB, "dp"), modules=parts)
    [finding] = judged(size(64, later), size(8, gathered(8, 64 * MIB, "dp"))).findings
    assert "(600 MiB of it in head)" in finding.actual


def test_a_world_without_a_step_is_not_compared():
    verdict = judged(size(64, gathered(64, MIB)), size(8, problem="no CUDA"))
    assert (verdict.status, verdict.reason) == ("skipped", "no step of 8 ranks was simulated: no CUDA")


def test_a_step_that_cannot_run_is_an_error_and_one_without_a_loss_is_not_declared():
    failed = size(64, problem="RuntimeError in layers.0.o_proj (model.py:3): shapes", error=True)
    undeclared = size(64, problem="Subject(loss=...): no .loss", error=True, missing="loss")
    for id, memory in (("communication_scales", 0), ("step_fits", MIB)):
        error, missing = (judged(one, size(8), id=id, memory=memory) for one in (failed, undeclared))
        assert (error.status, error.reason) == (
            "error",
            "no step of 64 ranks was simulated: RuntimeError in layers.0.o_proj (model.py:3): shapes",
        )
        assert (missing.status, missing.why, missing.missing_field) == ("skipped", "not declared", "loss")
        assert missing.reason == "no step of 64 ranks was simulated: Subject(loss=...): no .loss"


FITS = "step_fits"
BACKWARD = PhasePeak("backward", "layers.0", {"held": 20 * MIB, "activations": 40 * MIB, "gathered": 8 * MIB})
STEP = PhasePeak("the optimizer's step", "", {"held": 20 * MIB, "optimizer": 40 * MIB, "temporary": 20 * MIB})


def test_a_step_fits_with_a_reserve():
    exact = PhasePeak("backward", "", {"held": 94 * MIB})
    assert judged(size(8, peaks=(exact,)), id=FITS, memory=100 * MIB).status == "passed"
    [finding] = judged(size(8, peaks=(exact,)), id=FITS, memory=99 * MIB).findings
    assert (finding.ranks, finding.actual) == ((0,), "94 MiB in backward")
    assert finding.expected == "at most 93.1 MiB (99 MiB less a reserve of 6%)"
    unknown = judged(size(8, peaks=(exact,), unstepped="TypeError: no"), id=FITS, memory=100 * MIB)
    assert (unknown.status, unknown.why) == ("skipped", "partly checked")
    reason = judged(size(8), id=FITS).reason
    assert reason == "the memory of a device is not known: --fsdp-device-memory=80GiB"


@pytest.mark.parametrize(
    ("peak", "memory", "facts", "remedies"),
    [
        (
            BACKWARD,
            60,
            {"gathered": 2 * MIB},
            ["checkpoint each block", "reshard_after_forward=True", "32 ranks, on which it would be about 53 MiB"],
        ),
        (
            BACKWARD,
            40,
            {"gathered": 8 * MIB, "assumed": Assumptions({}, recomputes=True)},
            ["fewer rows or shorter ones: 48 MiB"],
        ),
        (
            STEP,
            50,
            {},
            ["fused=True or foreach=False in the optimizer", "16 ranks, on which it would be about 40 MiB"],
        ),
    ],
    ids=["activations and gathered parameters", "rows", "optimizer"],
)
def test_what_would_fit_is_said_with_its_bytes(peak, memory, facts, remedies):
    [finding] = judged(size(8, peaks=(peak,), **facts), id=FITS, memory=memory * MIB).findings
    shown = finding.remedy.split("; ")
    assert [text[: len(start)] for text, start in zip(shown, remedies, strict=True)] == remedies


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("recomputing", [(), ("layers.0", "layers.1")])
def test_checkpointing_of_the_reference_only_is_found(recomputes, recomputing):
    facts = {"peaks": (BACKWARD,), "assumed": Assumptions({}, recomputes=recomputes)}
    verdict = judged(size(8, **facts), id=FITS, recomputing=recomputing)
    if recomputes or not recomputing:
        assert (verdict.status, verdict.findings) == ("skipped", ())
        return
    [finding] = verdict.findings
    assert finding.actual == "no module is computed again in backward, which keeps 40 MiB of activations"
    assert finding.expected == "activation checkpointing, as layers.0 and 1 more of the reference"


def parameter(name: str, rows: int) -> TensorFacts:
    part = -(-rows // 64), 4
    mesh, runs = MeshFacts(("dp_shard",), (64,), (0,)), (((0, part[0]),), ((0, 4),))
    layout = {"placements": ("S(0)",), "mesh": mesh, "width": 4, "identity": hash(name)}
    return TensorFacts(name, "parameter", (rows, 4), part, runs, "float32", "meta", **layout)


@pytest.mark.parametrize(
    ("rows", "sent", "dim", "padded"),
    [
        (8, 1024, "dp_shard", True),
        (8, 1024, "tp", False),
        (8, 4096, "dp_shard", False),
        (8, 256, "dp_shard", False),
        (64, 1024, "dp_shard", False),
    ],
    ids=["padded", "over another dim", "little of it", "more than all of it", "even"],
)
def test_a_short_dim_that_is_padded_is_the_cause(rows, sent, dim, padded):
    sizes = size(64, gathered(64, sent, dim)), size(8, gathered(8, sent // 8, dim))
    [finding] = judged(*sizes, tensors=(parameter("a", rows), parameter("w", 6400))).findings
    expected = "dim 0 of a is 8 long, and collectives pad it to a multiple of the 64 ranks"
    assert (finding.cause == expected) == padded


def test_a_short_dim_of_few_ranks_explains_no_growth():
    mesh = MeshFacts(("dp_shard", "tp"), (64, 2), (0, 0))
    tensor = replace(parameter("a", 64), shape=(64, 3), placements=("S(0)", "S(1)"), mesh=mesh)
    sizes = size(64, gathered(64, 1024, "dp_shard")), size(8, gathered(8, 128, "dp_shard"))
    [finding] = judged(*sizes, tensors=(tensor, parameter("w", 6400))).findings
    assert "pad it" not in finding.cause


def test_traffic_that_does_not_grow_passes_beside_a_tensor_that_is_sharded_wrongly():
    right = size(64, gathered(64, 64 * MIB, "dp")), size(8, gathered(8, 64 * MIB, "dp"))
    assert judged(*right, tensors=(parameter("a", 8),)).status == "passed"


@pytest.mark.parametrize(
    ("blocks", "ranks", "embedding", "found"),
    [
        (range(5, 10), 8, 100, "5 of the 10 blocks of layers at once: 80 KiB of 162 KiB"),
        (range(4, 10), 1, 100, ""),
        (range(7, 10), 8, 100, ""),
        (range(5, 10), 8, 10_000, ""),
        (range(1), 8, 100, ""),
    ],
    ids=["half", "of one rank", "less than 40%", "little beside the embedding", "one"],
)
def test_blocks_that_are_gathered_together_are_found(blocks, ranks, embedding, found):
    names = [f"layers.{number}.up.weight" for number in range(10)]
    tensors = (parameter("embed", embedding), *(parameter(name, 1024) for name in names))
    group = GatheredGroup(("embed", *(names[number] for number in blocks)), ranks)
    smaller = SimulatedSize((("dp_shard", 8),), (RankSize(0, 8 * MIB, 0, SimulatedStep(peaks=(HELD,))),))
    verdict = judged(size(64, groups=(group,)), smaller, id="memory_falls_with_ranks", tensors=tensors)
    assert [finding.actual for finding in verdict.findings] == ([f"one FSDP group gathers {found}"] if found else [])
    assert {finding.expected for finding in verdict.findings} <= {"16 KiB, a block at a time"}


def test_a_smaller_world_that_failed_says_why():
    failed = SimulatedSize((("dp_shard", 8),), (), problem="rank 0 raised KeyError: 8")
    verdict = judged(size(64), failed)
    assert verdict.reason == "no world of 8 could be simulated: rank 0 raised KeyError: 8"
    assert judged(size(97)).reason == "dp_shard=97 has no divisor up to 64 that gives a smaller world to compare with"


@pytest.mark.parametrize(
    ("length", "ranks", "expected"),
    [
        (128, 1024, "dim 0 is shorter than the ranks that share it: from 129 ranks on"),
        (100, 64, "dim 0 is cut into chunks of 2 rows, which do not reach the last ranks; on fewer than 11 ranks"),
    ],
)
def test_an_empty_rank_is_found_with_the_size_from_which_on_some_are(length, ranks, expected):
    mesh = MeshFacts(("dp_shard",), (ranks,), (0,))
    part = -(-length // ranks), 4
    runs = ((0, part[0]),), ((0, 4),)
    tensor = TensorFacts(
        "w", "parameter", (length, 4), part, runs, "float32", "meta", placements=("S(0)",), mesh=mesh, width=4
    )
    world = WorldFacts(ranks, (("dp_shard", ranks),), "meta", "fake", simulated=(0,))
    inventory = RankInventory(0, "meta", (tensor,))
    evidence = Evidence(world, inventory=(inventory,), reference=ReferenceFacts("callable", inventory))
    verdict = judge(built_in()["no_rank_is_empty_handed"], evidence, built_in())
    assert [finding.cause.startswith(expected) for finding in verdict.findings] == [True]


def test_a_rank_that_holds_more_than_the_median_is_found_with_it():
    def held(ranks, nbytes, median):
        known = BytesOfRanks(0, median, nbytes)
        return SimulatedSize((("dp_shard", ranks),), (RankSize(0, nbytes, 0),), parameters=known)

    verdict = judged(held(64, 4 * MIB, MIB), held(8, 4 * MIB, 4 * MIB), id="memory_falls_with_ranks")
    assert [finding.actual for finding in verdict.findings] == [
        "4 MiB of parameters on a rank of 64 (1 MiB in the median), after 4 MiB on one of 8"
    ]


@pytest.mark.parametrize(
    ("mesh", "placements", "own", "idle"),
    [
        ({"dp_shard": 8, "tp": 2}, ("S(0)", "R"), ("dp_shard", "tp"), ["tp=2 divides no parameter"]),
        ({"dp_shard": 8, "tp": 2}, ("S(0)", "S(1)"), ("dp_shard", "tp"), []),
        ({"dp_shard": 8, "ep": 2}, ("S(0)",), ("dp_shard",), ["ep=2 divides no parameter"]),
        ({"dp_shard": 8, "cp": 2, "pp": 2}, ("S(0)",), ("dp_shard",), []),
        ({"dp_shard": 8, "tp": 2}, ("S(0)",), ("all",), []),
    ],
    ids=["replicated", "divided", "on no mesh", "no parts of parameters", "a mesh with other names"],
)
def test_a_dimension_for_parts_of_the_model_divides_some(mesh, placements, own, idle):
    on = MeshFacts(own, tuple(mesh.get(dim, 16) for dim in own), (0,) * len(own))
    part = (8, 4), (1, 4), (((0, 1),), ((0, 4),))
    tensor = TensorFacts("w", "parameter", *part, "float32", "meta", placements=placements, mesh=on, width=4)
    world = WorldFacts(prod(mesh.values()), tuple(mesh.items()), "meta", "fake", simulated=(0,))
    inventory = RankInventory(0, "meta", (tensor,))
    known = (
        SimulatedSize(tuple(mesh.items()), (RankSize(0, 16, 0),)),
        SimulatedSize((("dp_shard", 2),), (RankSize(0, 64, 0),)),
    )
    evidence = Evidence(
        world, inventory=(inventory,), reference=ReferenceFacts("callable", inventory), simulation=known
    )
    verdict = judge(built_in()["memory_falls_with_ranks"], evidence, built_in())
    assert [finding.actual for finding in verdict.findings if "divides" in finding.actual] == idle
