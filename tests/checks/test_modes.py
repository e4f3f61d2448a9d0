"""Test the judges of modes, of steps that are not finite, and of what backward draws again, on hand-made evidence."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_fsdp_meta.checks.training.facts import StepNotFinite
from tests.checks.evidence_factory import (
    MIDDLE,
    differ,
    healthy,
    on_ranks,
    on_runs,
    on_some,
    skipping_alike,
    undeclared,
    verdict,
    with_reference,
)

MODES, SKIPS, AGAIN = "modules_train", "ranks_skip_alike", "recomputation_draws_alike"


def in_modes(ranks=None, **facts):
    evidence = healthy()
    return replace(evidence, training_mode=on_some(evidence.training_mode, ranks, lambda step: replace(step, **facts)))


def test_a_part_that_does_not_train():
    [finding] = verdict(MODES, in_modes([1], evaluating=("layers.0",))).findings
    assert (finding.tensor, finding.ranks) == ("layers.0", (1,))
    assert finding.actual == "in eval() while the rest of the model trains"


def test_a_dropout_of_another_fraction_than_the_references():
    due = {"layers.0.drop.p": 0.1, "layers.1.drop.p": 0.1, "head.p": 0.5}
    evidence = with_reference(healthy(), dropouts=due)
    same = on_runs(evidence, None, dropouts=due)
    off = on_runs(same, [1], dropouts=dict.fromkeys(due, 0.0))
    assert [verdict(MODES, one).findings for one in (same, off)] == [(), ()]
    other = on_runs(same, [1], dropouts={**due, "layers.0.drop.p": 0.2, "layers.1.drop.p": 0.2, "own.p": 0.3})
    [finding] = verdict(MODES, other).findings
    assert (finding.tensor, finding.ranks) == ("layers.{0..1}.drop.p", (1,))
    assert (finding.actual, finding.expected) == ("is 0.2", "0.1, as in the reference")


def test_a_forward_that_fails_in_evaluation_is_partly_checked():
    found = verdict(MODES, in_modes(evaluation_problem="KeyError: 'loss'"))
    assert (found.status, found.why) == ("skipped", "partly checked")
    assert found.reason.endswith("a forward there raises KeyError: 'loss'")
    both = verdict(MODES, in_modes(evaluation_problem="KeyError: 'loss'", evaluating=("layers.0",)))
    assert both.status == "failed"


def skipping(*moved, index=None, size=2, **facts):
    places = index or range(len(moved))
    ranks = tuple(StepNotFinite((place, size), own, **facts) for place, own in zip(places, moved, strict=True))
    return replace(healthy(len(moved)), not_finite=ranks)


@pytest.mark.parametrize(
    "evidence", [skipping((True,), (True,)), skipping((False, False), (False, False)), skipping_alike(healthy())]
)
def test_ranks_that_do_the_same_pass(evidence):
    assert verdict(SKIPS, evidence).status == "passed"


@pytest.mark.parametrize(
    ("moved", "ranks", "actual"),
    [
        (((True,), (False,)), (1,), "the step is skipped"),
        (((False,), (True,)), (0,), "the step is skipped"),
        (((False, True), (False, False)), (1,), "the step is skipped"),
        (((False, True), (False, True)), (0, 1), "the step is made"),
    ],
)
def test_ranks_that_decide_otherwise(moved, ranks, actual):
    [finding] = verdict(SKIPS, skipping(*moved)).findings
    assert (finding.ranks, finding.actual.split(",")[0]) == (ranks, actual)


def test_a_step_that_does_not_end():
    [finding] = verdict(SKIPS, skipping((), (), waiting="rank 1 did not answer")).findings
    assert (finding.ranks, finding.detail) == ((0, 1), "rank 1 did not answer")


@pytest.mark.parametrize(
    ("evidence", "reason"),
    [
        (healthy(), "Subject(train_step=...) is not declared, so nothing decides whether a step is skipped"),
        (skipping((), ()), "train_step calls neither the model nor its parts"),
        (skipping((True,), (False,), index=(0, 0), size=1), "all ranks have the same rows"),
        (undeclared(healthy(), "not_finite", why="a step is not made"), "a step is not made"),
    ],
)
def test_nothing_to_judge(evidence, reason):
    found = verdict(SKIPS, evidence)
    assert (found.status, found.reason.startswith(reason)) == ("skipped", True)


def test_a_rank_without_elements_that_train_shows_nothing():
    made = skipping((True,), (True,), (False,), size=3)
    assert verdict(SKIPS, made).status == "failed"
    empty = on_ranks(made, [2], lambda rank: tuple(replace(tensor, local_shape=(0, 8)) for tensor in rank.tensors))
    assert verdict(SKIPS, empty).status == "passed"


def test_a_backward_that_draws_nothing_again():
    steps = healthy().training_mode or ()
    once = tuple(replace(step, draws=tuple(draw for draw in step.draws if not draw.again)) for step in steps)
    assert verdict(AGAIN, replace(healthy(), training_mode=once)).reason == "backward draws no random numbers again"


def test_a_comparison_in_evaluation_is_a_part_of_what_should_be_compared():
    evidence = healthy()
    evaluated = replace(evidence, reference=replace(evidence.reference, evaluated="router draws random numbers"))
    for id in ("loss_parity", "grad_parity", "update_parity"):
        found = verdict(id, evaluated)
        assert (found.status, found.why) == ("skipped", "partly checked")
        assert found.reason.endswith("are compared in eval(), because router draws random numbers")


def test_a_step_of_a_model_with_garbage_decides_nothing():
    moved = ((False, True), (False, True))
    garbage = differ(skipping(*moved), MIDDLE)
    found = verdict(SKIPS, garbage)
    assert (found.status, found.findings) == ("skipped", ())
    assert found.reason.endswith("which the findings of params_equal_reference explain; fix those first")
