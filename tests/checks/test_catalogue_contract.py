"""What every check of the built-in catalogue has in common, on healthy, incomplete, empty and wrong evidence."""

from __future__ import annotations

import re
import sys
from collections import Counter
from dataclasses import replace

import pytest

from conformance import recorded
from fixtures.defects import DEFECTS
from pytest_fsdp_meta.catalogue import Verdict
from pytest_fsdp_meta.checks.collectives.facts import FsdpGroup, RankCollectives
from pytest_fsdp_meta.checks.memory.facts import RankMemory
from pytest_fsdp_meta.checks.simulation.facts import PhasePeak, RankSize, SimulatedSize, SimulatedStep, Traffic
from pytest_fsdp_meta.evidence import Evidence, SubjectFacts
from tests.checks.evidence_factory import (
    CATALOGUE,
    EMBEDDING,
    FROZEN,
    HEAD,
    LOSSES,
    MIDDLE,
    change,
    change_reference,
    clipped,
    declare,
    drew,
    empty,
    healthy,
    kept_beside,
    on_ranks,
    on_runs,
    place,
    skipping_alike,
    undeclared,
    verdict,
    with_batches,
    with_random_state,
)

IDS = CATALOGUE.ids()
SIMULATED = ["no_rank_is_empty_handed", "memory_falls_with_ranks", "communication_scales", "step_fits"]
"""The checks that judge simulated worlds only."""
OF_WORLDS = [id for id in IDS if id not in SIMULATED]
NEEDS = [(check.id, need) for check in CATALOGUE for need in check.needs]
USES = [(check.id, use) for check in CATALOGUE for use in check.uses]
HSDP = {"dp_replicate": 2, "dp_shard": 2}
WORLDS = {"alone": {"dp_shard": 1}, "two": {"dp_shard": 2}, "uneven": {"dp_shard": 4}, "hsdp": HSDP, "tp": {"tp": 2}}
LARGE = {EMBEDDING: (64, 16), MIDDLE: (50, 16), FROZEN: (32, 16), HEAD: (64, 16)}
WHOLE = {"router.weight": (4, 4)}
KEPT = "fsdp_no_shard"
NOT_DRAWN = "Subject(drawn=...) is not declared"
NO_REFERENCE, NO_BATCH = "Subject(reference=...) is not declared", "Subject(batch=...) is not declared"
NO_DATA = "Subject(data=...) is not declared"
NEEDS_NO_FIELD = {
    *("same_manifest_on_every_rank", "no_meta_params", "no_meta_buffers", "no_uninitialized_memory"),
    *("params_on_rank_device", "buffers_on_rank_device", "managed_params_are_registered", "nothing_left_unsharded"),
    *("dtensor_placements", "shards_tile_the_tensor", "replicas_equal", "shard_bytes_within_budget"),
    *("load_peak_memory_bounded", "load_is_repeatable", "dcp_round_trip"),
}
"""The checks that judge a model for which its author declares nothing."""
NOT_SHARDED = {"shard_bytes_within_budget", "load_peak_memory_bounded"}
NO_TRAFFIC = {"collectives_within_budget", "unsharded_modules_are_not_gathered"}
NO_STATISTICS = "buffers_follow_training"
NOT_APPLICABLE = {
    **{world: {NO_STATISTICS} for world in WORLDS},
    "alone": {
        *(*NOT_SHARDED, *NO_TRAFFIC, "replicas_stay_equal", "drawn_weights_are_one_draw", NO_STATISTICS),
        *("random_numbers_follow_the_mesh", "batches_follow_the_mesh", "ranks_skip_alike"),
    },
    "tp": {*NOT_SHARDED, "drawn_weights_are_one_draw", NO_STATISTICS},
}
"""The checks to which a healthy model is not applicable, by the world that it was loaded in."""
EMPTY = {
    *NOT_SHARDED,
    *NO_TRAFFIC,
    *("tied_weights_share_storage", "tied_weights_stay_tied", "replicas_stay_equal", "frozen_weights_stay_frozen"),
    *("optimizer_owns_parameters", "optimizer_state_round_trip", "every_trainable_moves"),
    *("beside_parity", "beside_round_trip"),
    *("random_numbers_follow_the_mesh", "random_numbers_resume", "recomputation_draws_alike", "modules_train"),
    "ranks_skip_alike",
    *("second_save_is_current", "drawn_weights_are_one_draw", "buffers_follow_training"),
    *("forward_sees_current_weights", "grad_norm_parity", "grad_clip_parity", "second_grad_parity"),
    *("grad_accumulation_parity", "parameter_attributes_kept", "unsharded_modules_stay_whole"),
    *("batches_follow_the_mesh", "batches_resume"),
}
"""The checks to which a model without parameters and buffers is not applicable."""


def with_traffic(evidence: Evidence, groups: tuple[FsdpGroup, ...] = ()) -> Evidence:
    return replace(evidence, collectives=(RankCollectives((), (), groups),) * len(evidence.inventory))


def complete(mesh: dict[str, int], whole: dict[str, tuple[int, ...]] = WHOLE) -> Evidence:
    """Healthy evidence with every observation taken and every field declared; ``whole`` are kept unsharded."""
    evidence = healthy(mesh=mesh, parameters={**LARGE, **whole})
    for name, shape in whole.items():
        evidence = place(evidence, name, {}, shape=shape)
    for name in LARGE:
        attributes = {KEPT: "True"} if name == MIDDLE else {}
        evidence = change(evidence, name, attributes=attributes, managed=True)
        evidence = change_reference(evidence, name, attributes=attributes)
    evidence = on_ranks(evidence, None, lambda rank: tuple(replace(t, width=4, backing_bytes=0) for t in rank.tensors))
    evidence = drew(evidence, MIDDLE)
    memory = (RankMemory(host=1024, whole=64),) * len(evidence.inventory)
    evidence = replace(evidence, memory=memory, repetition=evidence.inventory)
    evidence = declare(evidence, kept_attributes=(KEPT,), unsharded=tuple(whole), frozen={FROZEN: FROZEN})
    evidence = skipping_alike(with_batches(with_random_state(kept_beside(clipped(evidence)))))
    return with_traffic(evidence, groups=(FsdpGroup(tuple(LARGE), forwards=1, reshards=True, trainable=True),))


def with_loading(evidence: Evidence) -> Evidence:
    """Add an observation of collectives and memory in which nothing happened, if there is none."""
    return with_traffic(replace(evidence, memory=evidence.memory or (RankMemory(0),) * len(evidence.inventory)))


def without_tensors(world: int) -> Evidence:
    """A model without parameters and buffers, with every observation taken."""
    evidence = on_runs(
        empty(world),
        None,
        gradients=(),
        norm=None,
        accumulation=None,
        clipped=None,
        second=None,
        optimizer=None,
        movements=(),
        losses=LOSSES,
    )
    return with_loading(evidence)


def bare(evidence: Evidence) -> Evidence:
    """The model when its author declares nothing: only what needs no declaration was observed."""
    evidence = replace(with_loading(evidence), subject=SubjectFacts())
    evidence = undeclared(evidence, "reference", "values", "verifier", why=NO_REFERENCE)
    evidence = undeclared(evidence, "draws", why=NOT_DRAWN)
    evidence = undeclared(evidence, "state_dict", "export", "resharded", why=NO_REFERENCE)
    trained = ("training", "continued", "resumed", "saved_again", "restored_again", "training_mode", "not_finite")
    evidence = undeclared(evidence, *trained, why=NO_BATCH)
    evidence = undeclared(evidence, "batches", "batches_resumed", why=NO_DATA)
    return replace(evidence, collectives=(RankCollectives((), None),) * len(evidence.inventory))


HEALTHY = {name: complete(mesh) for name, mesh in WORLDS.items()}
EMPTIED = {world: without_tensors(world) for world in (1, 2, 4)}
BARE = {name: bare(complete(mesh, whole={})) for name, mesh in WORLDS.items()}
BARE_EMPTIED = {name: bare(evidence) for name, evidence in EMPTIED.items()}


def assert_nothing_wrong(found: Verdict, status: str) -> None:
    assert (found.status, found.findings, found.unjudged, found.detail) == (status, (), {}, "")
    assert bool(found.reason) is (status == "skipped")


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("id", OF_WORLDS)
def test_healthy_evidence_passes_where_the_check_is_applicable(id, world):
    assert_nothing_wrong(verdict(id, HEALTHY[world]), "skipped" if id in NOT_APPLICABLE.get(world, ()) else "passed")


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("id", OF_WORLDS)
def test_a_check_without_what_it_needs_names_the_field_to_declare(id, world):
    found = verdict(id, BARE[world])
    named = set(re.findall(r"Subject\((\w+)=", found.reason))
    if id in NEEDS_NO_FIELD:
        assert_nothing_wrong(found, "skipped" if id in NOT_APPLICABLE.get(world, ()) else "passed")
        assert not named
    else:
        known = {field for fields in CATALOGUE[id].fields for field in fields.split(" or ")}
        assert_nothing_wrong(found, "skipped")
        assert named
        assert named <= known | {"reference", "batch"}


@pytest.mark.parametrize("world", EMPTIED)
@pytest.mark.parametrize("id", OF_WORLDS)
def test_a_model_without_tensors_is_neither_a_failure_nor_an_error(id, world):
    assert_nothing_wrong(verdict(id, EMPTIED[world]), "skipped" if id in EMPTY else "passed")
    inapplicable = id in EMPTY or id not in NEEDS_NO_FIELD
    assert_nothing_wrong(verdict(id, BARE_EMPTIED[world]), "skipped" if inapplicable else "passed")


@pytest.mark.parametrize(("id", "need"), NEEDS)
def test_a_needed_observation_that_was_not_taken_is_the_reason(id, need):
    reason = f"{need} was not taken"
    found = verdict(id, undeclared(HEALTHY["two"], need, why=reason))
    assert (found.status, found.reason, found.detail, found.findings) == ("skipped", reason, "", ())


@pytest.mark.parametrize(("id", "need"), NEEDS)
def test_a_needed_observation_that_failed_is_an_error(id, need):
    failed = undeclared(HEALTHY["two"], need, why="rank 1 was killed", error=True, detail="SIGKILL")
    found = verdict(id, failed)
    assert (found.status, found.reason, found.detail, found.findings) == ("error", "rank 1 was killed", "SIGKILL", ())


@pytest.mark.parametrize(("id", "use"), USES)
def test_an_observation_that_a_check_only_uses_may_be_absent(id, use):
    found = verdict(id, undeclared(HEALTHY["hsdp"], use, why=f"{use} was not taken"))
    assert (found.findings, found.unjudged) == ((), {})
    explained = id in NOT_APPLICABLE["hsdp"] or re.search(rf"{use}|Subject\(", found.reason)
    assert found.status == "passed" or (found.status == "skipped" and explained)


def simulated(ranks: int, sizes: tuple[SimulatedSize, ...] = ()):
    """Evidence of the first and the last rank of a world that does not run."""
    evidence = healthy(mesh={"dp_shard": ranks}, parameters={MIDDLE: (64, 16)})
    evidence = on_ranks(evidence, None, lambda rank: tuple(replace(tensor, width=4) for tensor in rank.tensors))
    both = evidence.inventory[0], evidence.inventory[-1]
    world = replace(evidence.world, simulated=(0, ranks - 1), device_memory=1000)
    return replace(evidence, world=world, inventory=both, training=None, simulation=sizes or (grown(ranks, 512),))


def grown(ranks: int, parameters: int, sent: int = 0) -> SimulatedSize:
    """A size at which each rank holds and sends so many bytes, and takes as many in a step."""
    sending = (Traffic("all_gather", ("dp_shard",), ranks, 1, sent),)
    step = SimulatedStep(1, 1, 1, (PhasePeak("forward", "", {"held": sent or 1}),), sending)
    return SimulatedSize((("dp_shard", ranks),), (RankSize(0, parameters, 0, step),))


RECORDED = {*recorded.names()}
FIRST_DEFECT = {defect.caught_by: name for name, defect in reversed(DEFECTS.items()) if name in RECORDED}


@pytest.mark.parametrize("id", SIMULATED)
def test_what_is_simulated_passes_where_it_scales(id):
    scaling = simulated(8, sizes=(grown(16, 64, sent=938), grown(2, 512, sent=500)))
    assert_nothing_wrong(verdict(id, scaling), "passed")
    found = verdict(id, HEALTHY["two"])
    assert (found.status, found.reason) == (
        "skipped",
        "it is judged in simulated worlds: @fsdp_conformance(simulate=1024)",
    )


@pytest.mark.parametrize("check", CATALOGUE, ids=lambda check: check.id)
def test_a_check_that_needs_values_judges_no_simulated_world(check):
    found = verdict(check.id, simulated(8))
    if not check.simulated:
        reason = "simulated: the ranks have no values, and send nothing"
        assert (found.status, found.reason, found.why) == ("skipped", reason, "not applicable")


def test_the_exceptions_are_checks_of_the_catalogue():
    assert {*EMPTY, *NEEDS_NO_FIELD, *NOT_APPLICABLE["alone"]} <= set(IDS)


@pytest.mark.parametrize("id", IDS)
def test_a_finding_is_written_in_single_lines_and_has_a_cause_and_a_remedy(id):
    evidence = recorded.read(FIRST_DEFECT[id])
    found = verdict(id, evidence)
    ranks = [rank.rank for rank in evidence.inventory]
    assert found.status == "failed"
    for finding in found.findings:
        assert finding.ranks
        assert list(finding.ranks) == sorted({*finding.ranks} & {*ranks})
        assert all(is_phrase(text) for text in (finding.actual, finding.cause, finding.remedy))
        assert all(not text or is_phrase(text) for text in (finding.expected, finding.detail))


@pytest.mark.parametrize("id", IDS)
def test_the_texts_of_a_check_are_written_alike(id):
    check = CATALOGUE[id]
    assert all(is_phrase(text) for text in (check.promise, check.cause, check.remedy, check.why.removesuffix(".")))
    assert check.why.endswith(".")
    assert check.why[0].isupper()
    assert check.references


def is_phrase(text: str) -> bool:
    """Whether a text is one line without spaces around it, without a full stop and without doubled spaces."""
    return bool(text) and text == " ".join(text.split()) and not re.search(r"[^.]\.$", text)


@pytest.mark.parametrize("id", IDS)
def test_four_times_the_tensors_take_about_four_times_the_calls(id):
    """Two checks that looked at all tensors for each of them took minutes for models of 5,000."""

    def count_calls(tensors: int) -> int:
        evidence, events = healthy(parameters={f"layers.{n}.weight": (8, 4) for n in range(tensors)}), Counter[str]()
        sys.setprofile(lambda frame, event, argument: events.update([event]))
        try:
            verdict(id, evidence)
        finally:
            sys.setprofile(None)
        return events["call"] + events["c_call"]

    assert count_calls(100) < 6 * count_calls(25)
