"""What the checks make of buffers that training changes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_fsdp_meta.evidence import Noise, TensorNoise
from tests.checks.evidence_factory import (
    COUNTER,
    MIDDLE,
    ROTARY,
    change,
    change_reference,
    counted,
    declare,
    healthy,
    in_slices,
    on_runs,
    remeasured,
    second_step,
    undeclared,
    verdict,
    with_reference,
)

ID, REPLICAS = "buffers_follow_training", "replicas_stay_equal"
HSDP = {"dp_replicate": 2, "dp_shard": 2}


def on_buffers(evidence, first=None, **facts):
    """Change facts of the trained buffers on all ranks; ``first`` names the step that the first one is like."""
    runs = []
    for run in evidence.training:
        like = {"first": getattr(run.buffers, first)} if first else {}
        runs.append(replace(run, buffers=replace(run.buffers, **like, **facts)))
    return replace(evidence, training=tuple(runs))


def rounding(evidence, grain=1e-6):
    """Let the counter be a float, which rounds."""
    runs = []
    for run in evidence.training:
        seen = {
            when: tuple(replace(c, measure=replace(c.measure, grain=grain)) for c in getattr(run.buffers, when))
            for when in ("first", "last")
        }
        runs.append(replace(run, buffers=replace(run.buffers, **seen)))
    evidence = change(replace(evidence, training=tuple(runs)), COUNTER, dtype="float32")
    return change_reference(evidence, COUNTER, dtype="float32")


@pytest.mark.parametrize("mesh", [{"dp_shard": 1}, {"dp_shard": 2}, HSDP, {"tp": 2}])
def test_buffers_that_follow_the_reference(mesh):
    evidence = counted(healthy(mesh=mesh))
    assert (verdict(ID, evidence).status, verdict(ID, rounding(evidence)).status) == ("passed", "passed")
    assert verdict(REPLICAS, evidence).status == ("skipped" if mesh == {"dp_shard": 1} else "passed")


@pytest.mark.parametrize(
    ("factor", "cause"),
    [
        (2.0, "it is summed over the ranks where the reference has a mean: 2 is the number of data-parallel ranks"),
        (2.0, "; or it is updated twice in a step: activation checkpointing runs the forward again in backward"),
        (0.5, "each rank counts its own rows only: 2 is the number of data-parallel ranks"),
        (3.0, "they are computed at another time of the step, or once more in a forward that activation "),
    ],
)
def test_a_factor_explains_what_happened(factor, cause):
    (found,) = verdict(ID, counted(healthy(), factor, "first")).findings
    assert (found.tensor, found.ranks, cause in found.cause) == (COUNTER, (0, 1), True)


def test_integers_have_to_be_equal_and_floats_within_rounding():
    almost = counted(healthy(), 1.0005, "first")
    assert verdict(ID, almost).status == "failed"
    assert verdict(ID, rounding(almost)).status == "passed"
    assert verdict(ID, rounding(counted(healthy(), 1.5, "first"))).status == "failed"
    # A token whose two best experts are nearly alike is counted for either, which is noise.
    noise = {"first_buffers": {COUNTER: TensorNoise(0.001)}, "buffers": {COUNTER: TensorNoise(0.001)}}
    assert verdict(ID, on_runs(almost, None, noise=Noise(**noise))).status == "passed"


@pytest.mark.parametrize(
    ("factor", "when", "apart", "actual"),
    [
        (1.5, "last", 0.0, "1.5 times the reference's change after 3 steps"),
        (0.0, "first", 0.0, "no change after the first step"),
        (1.0, "first", 0.5, "another change than the reference's after the first step"),
    ],
)
def test_another_change_than_the_references(factor, when, apart, actual):
    (found,) = verdict(ID, counted(healthy(), factor, when, apart=apart)).findings
    assert found.actual == actual


def test_a_wrong_update_explains_a_difference_after_the_last_step_only():
    wrong = remeasured(counted(healthy(), 1.5), MIDDLE, 0.1, observed="parameters")
    assert verdict(ID, wrong).why == "depends on a failed check"
    assert verdict("update_parity", wrong).status == "failed"


def test_replicas_that_differ_are_one_finding():
    evidence = on_buffers(counted(healthy(), 0.5, "last", ranks=[1]), first="last")
    found = verdict(REPLICAS, evidence)
    assert [(f.tensor, f.ranks) for f in found.findings] == [(COUNTER, (1,))]
    assert (verdict(ID, evidence).findings, verdict(ID, evidence).unjudged) == ((), {REPLICAS: (COUNTER,)})


@pytest.mark.parametrize(("sent", "why"), [((), "differs"), ((ROTARY,), "not applicable")])
def test_statistics_of_each_ranks_own_rows_are_a_difference(sent, why):
    evidence = change_reference(change(healthy(), ROTARY, persistent=True), ROTARY, persistent=True)
    unlike = change(evidence, ROTARY, [0], digest="own").inventory
    steps = tuple(replace(step, after=unlike[rank]) for rank, step in enumerate(evidence.training_mode or ()))
    found = verdict("replicas_stay_equal", on_buffers(replace(evidence, training_mode=steps), broadcast=sent))
    assert (found.why, f"ranks differ in {ROTARY} after a step in train()" in found.reason) == (why, not sent)
    without = replace(unlike[1], tensors=tuple(t for t in unlike[1].tensors if t.name != ROTARY))
    replaced = (steps[0], replace(steps[1], after=without))  # by a step that replaces a module
    found = verdict("replicas_stay_equal", on_buffers(replace(evidence, training_mode=replaced), broadcast=sent))
    assert found.why == "not applicable"


def test_replicas_that_round_differently_are_equal():
    evidence = rounding(counted(healthy(), 1.0005, ranks=[1]))
    assert verdict(REPLICAS, evidence).status == "passed"
    without = undeclared(evidence, "reference", "values", "verifier", why="no")
    assert [f.tensor for f in verdict(REPLICAS, without).findings] == [COUNTER]


def test_buffers_that_differ_before_the_steps_are_each_ranks_own():
    """An offset that depends on the rank moves alike or stays."""
    evidence = change(counted(healthy()), COUNTER, [1], digest="offset of rank 1")
    assert COUNTER not in [f.tensor for f in verdict(REPLICAS, evidence).findings]


def test_scratch_memory_is_not_judged():
    def transient(rank):
        return replace(rank, tensors=tuple(replace(t, persistent=t.name != COUNTER) for t in rank.tensors))

    evidence = counted(healthy(), 0.5, "first")
    runs = tuple(replace(run, after=transient(run.after)) for run in evidence.training)
    evidence = replace(evidence, training=runs)
    evidence = with_reference(evidence, after=transient(evidence.reference.after))
    assert verdict(ID, evidence).reason.startswith("training changes no persistent buffer")
    assert verdict(REPLICAS, evidence).reason.startswith("no parameter is replicated")


def test_buffers_that_ddp_broadcasts_are_not_judged():
    evidence = on_buffers(counted(healthy(), 0.5, "first", ranks=[1]), broadcast=(COUNTER,))
    assert (verdict(ID, evidence).status, verdict(REPLICAS, evidence).status) == ("skipped", "skipped")


def test_steps_of_several_forwards_change_statistics_by_design():
    evidence = counted(healthy(), 2.0, "first")
    evidence = declare(evidence, declared=evidence.subject.declared | {"train_step"})
    found = verdict(ID, on_buffers(evidence, forwards=6))
    assert (found.why, "train_step runs 6 forwards" in found.reason) == ("differs", True)
    assert verdict(ID, on_buffers(evidence, forwards=3)).status == "failed"


def test_wrong_buffers_explain_later_differences_and_a_wrong_gradient_those_of_buffers():
    wrong = remeasured(counted(healthy(), 2.0, "first"), MIDDLE, 0.1, observed="parameters")
    assert verdict("update_parity", wrong).why == "depends on a failed check"
    evidence = remeasured(counted(healthy(), 2.0, "first"), MIDDLE, 2.0)
    assert verdict(ID, evidence).why == "depends on a failed check"
    apart = remeasured(counted(healthy(), 0.5, ranks=[1]), MIDDLE, 2.0)
    found = verdict(REPLICAS, apart)
    assert (found.findings, found.why) == ((), "depends on a failed check")
    assert f"{COUNTER} differs from its replicas after 3 steps: rank 1 differs from rank 0" in found.reason
    assert verdict(REPLICAS, apart, ["grad_parity"]).why == "differs"


REASON = "differs between the ranks in train_step"
WRONG = {
    "grad_parity": remeasured(healthy(), MIDDLE, 2.0),
    "second_grad_parity": second_step(healthy(), 2.0),
    "update_parity": remeasured(healthy(), MIDDLE, 0.1, observed="parameters"),
    "loss_parity": on_runs(healthy(), None, losses=(2.5, 1.5, 1.25)),
    ID: counted(healthy(), 3.0, "first"),
}


@pytest.mark.parametrize("check", WRONG)
def test_a_difference_that_may_come_from_what_the_reference_could_not_be_given(check):
    found = verdict(check, with_reference(WRONG[check], not_given={"scale": REASON}))
    assert (found.status, found.why) == ("skipped", "differs")
    assert found.reason.endswith(f"; scale: {REASON}, so the reference could not be given it")
    assert verdict(check, WRONG[check]).status == "failed"


def test_ranks_that_disagree_are_reported_whatever_the_reference_lacks():
    evidence = with_reference(in_slices(healthy(), 0, 0), not_given={"scale": REASON})
    runs = tuple(replace(run, losses=(2.5 + rank, 1.5, 1.25)) for rank, run in enumerate(evidence.training))
    found = verdict("loss_parity", replace(evidence, training=runs))
    assert [(f.ranks, f.actual) for f in found.findings] == [((1,), "loss 3.5 at step 0")]
