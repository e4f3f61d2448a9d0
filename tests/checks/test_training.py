"""loss_parity and update_parity on hand-made evidence."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from pytest_fsdp_meta.checks.tracing.facts import RankTrace, TracedCall
from pytest_fsdp_meta.evidence import Evidence, RankTraining
from pytest_fsdp_meta.judging.gates import mean_losses
from tests.checks.evidence_factory import (
    CATALOGUE,
    COUNTER,
    EMBEDDING,
    HEAD,
    LOSSES,
    MIDDLE,
    ROTARY,
    change,
    change_reference,
    differ,
    healthy,
    in_slices,
    on_ranks,
    place,
    remeasured,
    rename,
    undeclared,
    verdict,
    with_reference,
)

PARITY = "loss_parity"
FORWARD = (
    "the first forward already differs although the weights are equal: a module is missing, replaced, random or "
    "configured differently (attention, scale, activation, precision); or a rank gets other rows or tokens "
    "than it should, or losses or parts of ranks are not put together correctly"
)
DIVERGED = (
    "ranks of one data-parallel slice compute different outputs from equal weights: a sum, mean or size is that of the "
    "rank's part (of the vocabulary, a layer or the sequence) and is not reduced"
)
LATER = (
    "the first forward and its gradients are correct, later losses are not: something changes between the steps, such "
    "as a buffer or a cache that the forward updates on each rank separately"
)


OWN_ROWS = "each rank computes the loss of its own rows only, with statistics of those rows"
AGREES = RankTrace(forward=(TracedCall("output", "head", compared=1, noise=1e-6),))
UPDATE = "update_parity"
AT_ANOTHER_RATE = "the learning rate of step 1 is 0.1 on these ranks, and 0.2 in the reference: an undeclared scheduler"


def at_rates(*rates: float) -> Evidence:
    evidence = with_reference(healthy(1), rates=((0.2,),) * 3)
    return replace(evidence, training=(replace(evidence.training[0], rates=tuple((rate,) for rate in rates)),))


def losses(evidence: Evidence, *by_rank: tuple[float, ...]) -> Evidence:
    training = (replace(run, losses=curve) for run, curve in zip(evidence.training, by_rank, strict=True))
    return replace(evidence, training=tuple(training))


RAISED = {"why": f"rank 1 raised RuntimeError: {MIDDLE} is odd", "error": True, "detail": "Traceback"}
NAMED = {**RAISED, "names": (MIDDLE,)}
KILLED = {"why": "rank 1 was killed by SIGKILL", "error": True, "detail": "..."}
PART_OF_RANK_0 = healthy().inventory[0].by_name[MIDDLE].regions
DTYPES, MANIFEST = "dtypes_match_reference", "same_manifest_on_every_rank"


@pytest.mark.parametrize(
    ("evidence", "by"),
    [
        (change(healthy(), MIDDLE, dtype="bfloat16"), DTYPES),
        (rename(healthy(), "module.", MIDDLE), "names_match_reference"),
        (change(change(healthy(), MIDDLE, shape=(8, 4)), MIDDLE, [1], dtype="float64"), MANIFEST),
        (change(healthy(), MIDDLE, device="meta", storage=None, digest=None), "no_meta_params"),
        (change(healthy(), MIDDLE, [1], regions=PART_OF_RANK_0), "shards_tile_the_tensor"),
    ],
)
def test_the_findings_of_a_tensor_explain_an_exception_that_names_it(evidence, by):
    found = verdict(PARITY, undeclared(evidence, "training", **NAMED))
    reason = f"{RAISED['why']}, which the findings of {by} explain; fix those first"
    assert (found.status, found.reason, found.detail, found.why) == ("skipped", reason, "", "depends on a failed check")


CRASHED = ("training", "continued", "resumed", "saved", "restored", "resharded", "export", "state_dict")
CRASHED += ("saved_again", "restored_again")


def test_a_wrong_model_explains_a_crash_to_every_check():
    wrong = undeclared(change(healthy(), MIDDLE, dtype="bfloat16"), *CRASHED, **NAMED)
    using = [check.id for check in CATALOGUE if set(check.needs) & set(CRASHED)]
    assert {"tied_weights_stay_tied", "optimizer_state_round_trip", "resume_parity"} < set(using)
    for id in using:
        found = verdict(id, wrong)
        reason = f"{RAISED['why']}, which the findings of {DTYPES} explain; fix those first"
        assert (found.status, found.detail, found.reason) == ("skipped", "", reason), id


ODD = change(healthy(), MIDDLE, dtype="bfloat16")


@pytest.mark.parametrize(
    ("evidence", "observation", "facts", "expected"),
    [
        (ODD, "training", KILLED, ()),
        (ODD, "training", RAISED, ()),
        (ODD, "training", {**NAMED, "names": (HEAD,)}, ()),
        (ODD, "training", NAMED, (DTYPES,)),
        (differ(healthy(), MIDDLE), "training", NAMED, ()),
        (place(healthy(), MIDDLE, {}, shape=(6, 4)), "training", NAMED, ()),
        (ODD, "repetition", NAMED, ()),
        (ODD, "reference", NAMED, ()),
        (healthy(), "training", {**RAISED, "by": (MANIFEST,)}, ()),
    ],
    ids=[
        *(
            "a rank that is killed",
            "an exception that names nothing",
            "another tensor",
            "a check that is expected to fail",
        ),
        *("wrong values", "a tensor that is not sharded", "another load", "the reference", "a check that passes"),
    ],
)
def test_what_does_not_explain_an_error(evidence, observation, facts, expected):
    id = {"training": PARITY, "repetition": "load_is_repeatable", "reference": "params_equal_reference"}[observation]
    found = verdict(id, undeclared(evidence, observation, **facts), expected)
    assert (found.status, found.reason, found.detail) == ("error", facts["why"], facts["detail"])


def test_what_is_not_declared_needs_no_explanation():
    found = verdict(PARITY, undeclared(ODD, "training", why="not declared", kind="undeclared"))
    assert (found.status, found.reason, found.why) == ("skipped", "not declared", "not declared")


TRAINABLE = "requires_grad_matches_reference"
FROZEN = change(healthy(), MIDDLE, requires_grad=False)


def test_a_check_that_is_expected_to_fail_leaves_others_to_be_judged():
    wrong = losses(FROZEN, *[(2.0, 1.75, 1.25)] * 2)
    assert verdict(PARITY, wrong).why == "depends on a failed check"
    assert verdict(PARITY, wrong, [TRAINABLE]).why == "differs"
    shared = with_reference(wrong, retrained=tuple(t.name for t in wrong.inventory[0].tensors))
    assert [verdict(PARITY, shared, expected).status for expected in ([], [TRAINABLE])] == ["failed", "failed"]
    assert verdict(PARITY, FROZEN, [TRAINABLE]).status == "passed"


@pytest.mark.parametrize(("evidence", "by"), [(remeasured(healthy(), MIDDLE, 2.0), "grad_parity"), (ODD, DTYPES)])
def test_a_difference_that_no_failing_check_explains_differs(evidence, by):
    wrong = losses(evidence, *[(2.0, 1.75, 1.25)] * 2)
    assert verdict(PARITY, wrong).why == "depends on a failed check"
    found = verdict(PARITY, wrong, [by])
    assert (found.status, found.why) == ("skipped", "differs")
    assert found.reason.endswith(f"; it is left to {by}, which does not fail this run")


@pytest.mark.parametrize(
    ("id", "expected", "why"),
    [
        ("every_trainable_moves", (), "depends on a failed check"),
        ("every_trainable_moves", (DTYPES,), "partly checked"),
    ],
)
def test_tensors_of_an_expected_finding_are_left_out(id, expected, why):
    found = verdict(id, ODD, expected)
    assert (found.status, found.why, found.unjudged) == ("skipped", why, {DTYPES: (MIDDLE,)})


@pytest.mark.parametrize(
    ("places", "curves", "mean"),
    [
        ([(0, 1)], [(2.0,)], (2.0,)),
        ([(0, 2), (1, 2)], [(1.0,), (3.0,)], (2.0,)),
        ([(0, 2), (0, 2), (1, 2)], [(1.0,), (1.0,), (3.0,)], (2.0,)),
        ([(0, 1), (0, 1)], [(1.0, 4.0), (3.0, 4.0)], (2.0, 4.0)),
        ([(1, 2), (0, 2)], [(), ()], ()),
    ],
)
def test_ranks_that_see_the_same_rows_count_once(places, curves, mean):
    runs = [RankTraining(curve, place) for place, curve in zip(places, curves, strict=True)]
    assert mean_losses(runs) == mean


@pytest.mark.parametrize(
    ("evidence", "curve", "cause"),
    [
        (healthy(2), (4.0, 3.0, 2.5), "the loss is 2 times the reference's in every step (2 is the number of data-"),
        (healthy(4), (8.0, 6.1, 4.9), "the loss is 4 times the reference's in every step (4 is the number of data-"),
        (healthy(2), (1.0, 0.75, 0.625), "the loss is 1/2 of the reference's in every step (2 is the number of data-"),
        (
            healthy(1),
            (4.0, 3.0, 2.5),
            "the loss is 2 times the reference's in every step: the loss is summed over rows or micro-batches",
        ),
        (healthy(1), (0.5, 0.375, 0.3125), "the loss is 1/4 of the reference's in every step: the loss is divided"),
        (healthy(2), (3.0, 2.25, 1.875), FORWARD),  # not a whole number
        (healthy(2), (4.001, 3.0, 2.5), FORWARD),
        (healthy(2), (4.0, 1.5, 1.25), FORWARD),  # not in every step
        (healthy(2), (4.0, math.nan, math.nan), FORWARD),
        (healthy(2, losses=(0.0, 1.0)), (2.0, 2.0), FORWARD),
        (healthy(2), (-4.0, -3.0, -2.5), FORWARD),
        (healthy(1), (2.0, 2.9, 2.5), LATER),
        (replace(healthy(2), traces=(AGREES, AGREES)), (2.5, 2.0, 1.5), OWN_ROWS),
    ],
)
def test_a_whole_multiple_of_the_loss(evidence, curve, cause):
    (finding,) = verdict(PARITY, losses(evidence, *[curve] * evidence.world.size)).findings
    assert finding.cause.startswith(cause)


def test_another_learning_rate_is_found_where_it_shows_in_no_loss():
    later = at_rates(0.2, 0.1, 0.1)
    (finding,) = verdict(UPDATE, later).findings
    assert finding.cause.startswith(AT_ANOTHER_RATE)
    assert verdict(UPDATE, at_rates(0.2, 0.2, 0.2)).status == "passed"
    assert "the findings of update_parity explain" in verdict(PARITY, losses(later, (2.0, 1.5, 1.2))).reason


def test_a_whole_multiple_by_chance():
    # With a wide tolerance, every large factor is near a whole number.
    for factor, whole in ((20.1, False), (4.01, True)):
        evidence = replace(losses(healthy(1), tuple(factor * loss for loss in LOSSES)), tolerance={PARITY: 0.02})
        found = verdict(PARITY, evidence).findings
        assert [finding.cause.startswith("the loss is ") for finding in found] == [whole]


SEEN = "as on rank 0, which sees the same rows"


@pytest.mark.parametrize(
    ("slices", "curves", "findings"),
    [
        ((0, 1, 2, 3), (LOSSES, LOSSES, LOSSES, (2.0, 1.5, 5.25)), [((0, 1, 2, 3), "loss 2.25 at step 2")]),
        (
            (0, 0, 1, 1),
            ((3.0, 1.5, 1.25), (3.0, 1.75, 1.25), (3.0, 1.5, 1.25), (3.0, 1.5, 1.25)),
            [((0, 1, 2, 3), "loss 3 at step 0")],
        ),
        (
            (0, 0, 0, 0),
            (LOSSES, (2.0, 1.75, 1.25), (2.0, 1.25, 1.25), LOSSES),
            [((1,), "loss 1.75 at step 1", f"1.5, {SEEN}"), ((2,), "loss 1.25 at step 1", f"1.5, {SEEN}")],
        ),
        (
            (0, 0),
            (LOSSES, (2.5, 1.5, 1.25)),
            [
                ((1,), "loss 2.5 at step 0", f"2, {SEEN}", DIVERGED),
                ((0, 1), "loss 2.25 at step 0", "2 within 2e-05", FORWARD),
            ],
        ),
    ],
    ids=["one odd rank", "disagree after all were wrong", "each against the first", "before the mean"],
)
def test_ranks_that_disagree(slices, curves, findings):
    found = verdict(PARITY, losses(in_slices(healthy(len(slices)), *slices), *curves)).findings
    shown = [(f.ranks, f.actual, f.expected, f.cause) for f in found]
    assert [one[: len(facts)] for one, facts in zip(shown, findings, strict=True)] == findings


@pytest.mark.parametrize(
    ("off", "dtype", "actual", "expected"),
    [
        (1e-4, "float32", "loss 1.5002 at step 1", "1.5 within 2e-05"),
        (2e-5, "float32", "loss 1.50003 at step 1", "1.5 within 2e-05"),
        (1e-8, "float64", "loss 1.50000001 at step 1", "1.5 within 2e-09"),
    ],
)
def test_losses_are_shown_with_as_many_digits_as_they_need(off, dtype, actual, expected):
    evidence = on_ranks(healthy(1), None, lambda rank: tuple(replace(t, dtype=dtype) for t in rank.tensors))
    evidence = with_reference(
        evidence, inventory=replace(evidence.reference.inventory, tensors=evidence.inventory[0].tensors)
    )
    (finding,) = verdict(PARITY, losses(evidence, (2.0, 1.5 * (1 + off), 1.25))).findings
    assert (finding.actual, finding.expected) == (actual, expected)


def test_ranks_of_one_slice_that_cancel_in_the_mean():
    curves = ((2.0, 1.5, 1.25), (2.5, 1.5, 1.25), (2.0, 1.5, 1.25), (1.5, 1.5, 1.25))
    found = verdict(PARITY, losses(in_slices(healthy(4), 0, 1, 0, 1), *curves))
    assert [(f.ranks, f.actual, f.cause) for f in found.findings] == [((3,), "loss 1.5 at step 0", DIVERGED)]
    assert found.findings[0].remedy.startswith("reduce it over the ranks that share the model")
    # Ranks of other slices see different rows.
    assert verdict(PARITY, losses(in_slices(healthy(4), 0, 1, 2, 3), *curves)).status == "passed"


@pytest.mark.parametrize(("off", "status"), [(1e-6, "passed"), (1e-4, "failed")])
def test_ranks_of_one_slice_agree_within_the_tolerance(off, status):
    curves = ((2.0 * (1 + off), 1.5, 1.25), (2.0 * (1 - off), 1.5, 1.25))
    assert verdict(PARITY, losses(in_slices(healthy(2), 0, 0), *curves)).status == status


def test_ranks_that_all_have_nan_do_not_disagree():
    bad = (2.0, math.nan, math.nan)
    found = verdict(PARITY, losses(in_slices(healthy(2), 0, 0), bad, bad))
    assert [(finding.ranks, finding.actual) for finding in found.findings] == [((0, 1), "loss nan at step 1")]
    # They may disagree at steps before that.
    found = verdict(PARITY, losses(in_slices(healthy(2), 0, 0), bad, (2.5, math.nan, math.nan)))
    assert [finding.ranks for finding in found.findings] == [(1,), (0, 1)]


def test_context_parallel_ranks_may_disagree():
    evidence = losses(in_slices(healthy(2), 0, 0), (2.5, 2.0, 1.75), (1.5, 1.0, 0.75))
    assert verdict(PARITY, evidence).status == "failed"
    for mesh, status in (({"cp": 2}, "passed"), ({"dp_shard": 2, "cp": 1}, "failed"), ({"tp": 2}, "failed")):
        world = replace(evidence.world, mesh=tuple(mesh.items()))
        assert verdict(PARITY, replace(evidence, world=world)).status == status


def test_a_reference_that_differs_each_time_it_is_built_is_an_error():
    evidence = with_reference(healthy(), unstable=(ROTARY,))
    assert verdict(PARITY, evidence).status == "passed"
    found = verdict(PARITY, losses(evidence, *[(2.0, 1.75, 1.25)] * 2))
    assert (found.status, found.findings) == ("error", ())
    assert f"the reference is not reproducible: building it again gives different values ({ROTARY})" in found.reason


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite(bad):
    found = verdict(PARITY, losses(healthy(2), (2.0, bad, bad), LOSSES))
    assert found.status == "failed"
    assert (found.findings[0].actual, found.findings[0].expected) == (f"loss {bad:g} at step 1", "1.5 within 2e-05")


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_reference_whose_loss_is_not_finite_is_an_error(bad):
    evidence = with_reference(healthy(), losses=(2.0, bad, bad), losses_again=(2.0, bad, bad))
    found = verdict(PARITY, evidence)
    assert (found.status, found.reason) == (
        "error",
        f"the reference's own loss is {bad} at step 1; give it a batch, a loss and an optimizer that keep it finite",
    )


def test_a_reference_that_is_not_reproducible_is_an_error():
    found = verdict(PARITY, with_reference(healthy(), losses_again=(2.0, 1.5000001, 1.25)))
    assert (found.status, found.reason.split(":")[0]) == ("error", "the reference is not reproducible")


def test_a_batch_that_differs_on_a_rank_is_an_error():
    evidence = healthy(2)
    odd = replace(evidence.training[1], batches=("batch 0", "another", "batch 2"))
    found = verdict(PARITY, replace(evidence, training=(evidence.training[0], odd)))
    assert (found.status, found.reason) == (
        "error",
        "batch(1) on rank 1 differs from the reference's; make batch(step) depend on step only",
    )


@pytest.mark.parametrize(
    ("dtype", "off", "status"),
    [
        ("float64", 1e-8, "failed"),
        ("float64", 1e-10, "passed"),
        ("float32", 1e-4, "failed"),
        ("float32", 1e-6, "passed"),
        ("bfloat16", 3e-2, "failed"),
        ("bfloat16", 1e-2, "passed"),
        ("float8_e4m3fn", 1e-4, "failed"),
    ],
)
def test_the_tolerance_follows_the_dtype(dtype, off, status):
    evidence = on_ranks(healthy(1), None, lambda rank: tuple(replace(t, dtype=dtype) for t in rank.tensors))
    inventory = replace(evidence.reference.inventory, tensors=evidence.inventory[0].tensors)
    evidence = with_reference(evidence, inventory=inventory)
    curve = tuple(loss * (1 + off) for loss in LOSSES)
    assert verdict(PARITY, losses(evidence, curve)).status == status


def test_the_coarsest_parameter_sets_the_tolerance_not_buffers():
    # The reference declares the cast, too.
    curve = tuple(loss * 1.01 for loss in LOSSES)
    for name, status in ((MIDDLE, "passed"), (COUNTER, "failed")):
        evidence = change_reference(change(healthy(1), name, dtype="bfloat16"), name, dtype="bfloat16")
        assert verdict(PARITY, losses(evidence, curve)).status == status


@pytest.mark.parametrize(
    ("tolerance", "status"),
    [
        ({}, "failed"),
        ({PARITY: 0.1}, "passed"),
        ({"*": 0.1}, "passed"),
        ({PARITY: 0.001, "*": 0.1}, "failed"),
        ({PARITY: 0.1, "*": 0.0}, "passed"),
        ({"params_equal_reference": 0.1}, "failed"),
    ],
)
def test_declared_tolerances(tolerance, status):
    curve = tuple(loss * 1.05 for loss in LOSSES)
    assert verdict(PARITY, replace(losses(healthy(1), curve), tolerance=tolerance)).status == status
    far = replace(losses(healthy(1), (4.0, 1.5, 1.25)), tolerance={PARITY: 0.02})
    assert verdict(PARITY, far).findings[0].expected == "2 within 0.04"


def test_a_loss_of_zero():
    assert verdict(PARITY, healthy(losses=(0.0, 0.0, 0.0))).status == "passed"
    assert verdict(PARITY, losses(healthy(1, losses=(1.0, 0.0, 0.0)), (1.0, 0.5, 0.5))).status == "failed"
    assert verdict(PARITY, losses(healthy(1, losses=(0.0, 0.0)), (0.0, 1e-6))).status == "failed"


@pytest.mark.parametrize(("off", "status"), [(1e-6, "passed"), (1e-4, "failed")])
def test_the_error_of_a_loss_near_zero_is_relative_to_the_largest_loss(off, status):
    for curve in ((2.0, 0.5, 1e-9), (-0.25, 0.0, 2.0), (-2.0, -1.0, 0.0)):
        evidence = healthy(1, losses=curve)
        assert verdict(PARITY, losses(evidence, tuple(loss + off for loss in curve))).status == status


@pytest.mark.parametrize("name", [MIDDLE, EMBEDDING])
def test_losses_that_an_earlier_check_explains_are_not_reported_again(name):
    assert verdict(PARITY, differ(healthy(), name)).status == "passed"
    evidence = differ(losses(healthy(), (2.5, 2.5, 2.5), (2.5, 2.5, 2.5)), name)
    found = verdict(PARITY, evidence)
    assert (found.status, found.findings) == ("skipped", ())
    assert found.unjudged == {"params_equal_reference": (name,)}
    # Several explanations are named in the order of the model.
    several = verdict(PARITY, change(differ(evidence, COUNTER), EMBEDDING, dtype="float64"))
    known = "dtypes_match_reference, " + ("params_equal_reference, " if name == MIDDLE else "")
    assert f"the findings of {known}buffers_equal_reference explain" in several.reason
