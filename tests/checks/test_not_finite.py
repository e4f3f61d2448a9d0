"""ranks_skip_alike on hand-made evidence."""

from __future__ import annotations

from dataclasses import replace

from pytest_fsdp_meta.checks.training.facts import StepNotFinite
from pytest_fsdp_meta.evidence import Evidence
from tests.checks.evidence_factory import declare, healthy, on_ranks, verdict

SKIP = "ranks_skip_alike"


def stepping(*moved: tuple[bool, ...]) -> Evidence:
    """Return what ranks with rows of their own did in a step with NaN on the first, and one with NaN on the last."""
    evidence = declare(healthy(len(moved)), declared=healthy().subject.declared | {"train_step"})
    steps = (StepNotFinite((rank, len(moved)), own) for rank, own in enumerate(moved))
    return replace(evidence, not_finite=tuple(steps))


def test_a_rank_that_skips_alone():
    [finding] = verdict(SKIP, stepping((False,), (True,))).findings
    assert (finding.ranks, finding.actual) == ((0,), "the step is skipped, and other ranks make it")
    assert finding.detail == "NaN on rank 0; rank 1 made the step"
    [finding] = verdict(SKIP, stepping((False, True), (False, False))).findings
    assert (finding.ranks, finding.detail) == ((1,), "NaN on rank 1; rank 0 made the step")


def test_one_rank_that_decides_for_all():
    [finding] = verdict(SKIP, stepping((False, True), (False, True))).findings
    assert finding.actual == "the step is made, although it is skipped where rank 0 has NaN"
    assert finding.cause == "one rank decides for all by its own loss"


def test_a_rank_without_elements_that_train_shows_nothing():
    made = stepping((True,), (True,), (False,))
    assert verdict(SKIP, made).status == "failed"
    empty = on_ranks(made, [2], lambda rank: tuple(replace(tensor, local_shape=(0, 8)) for tensor in rank.tensors))
    assert verdict(SKIP, empty).status == "passed"


def test_a_step_that_calls_no_model_is_not_judged():
    found = verdict(SKIP, stepping((), (False,)))
    assert (found.status, found.why) == ("skipped", "not applicable")
    assert found.reason.startswith("train_step does not call the model itself")
