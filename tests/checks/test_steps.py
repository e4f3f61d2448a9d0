"""Gradients of the second step, clipped gradients, and limits that follow the reference's noise."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from pytest_fsdp_meta.checks.training.facts import OwnClipping
from pytest_fsdp_meta.evidence import Accumulation, Clipping, Comparison, Evidence, Noise, TensorNoise
from tests.checks.evidence_factory import (
    EMBEDDING,
    MIDDLE,
    PARAMETERS,
    change,
    change_reference,
    clipped,
    declare,
    empty,
    findings_of,
    healthy,
    measured,
    on_runs,
    place,
    remeasured,
    second_step,
    verdict,
    with_reference,
)

SECOND, PARITY, CLIP, NORM, UPDATE, LOSS = (
    "second_grad_parity",
    "grad_parity",
    "grad_clip_parity",
    "grad_norm_parity",
    "update_parity",
    "loss_parity",
)
ACCUMULATION = "grad_accumulation_parity"
SIZE = healthy().training[0].gradients[1].measure.truth
"""The norm of MIDDLE's gradient on one rank."""


# The second step.


def test_what_clipping_hides_may_be_left_of_the_first_gradient():
    clips = declare(healthy(), declared=healthy().subject.declared | {"train_step", "max_grad_norm"})
    [finding] = verdict(SECOND, second_step(clips, apart=1.0)).findings
    assert "does not call zero_grad(), and clips what is left" in finding.cause
    assert finding.remedy.startswith("call optimizer.zero_grad() in every step")


def test_what_is_left_of_the_first_gradient_is_certain():
    lacking = with_reference(second_step(healthy(), 2.0, left_over=(MIDDLE,)), not_given={"scale": "differs"})
    assert [f.tensor for f in verdict(SECOND, lacking).findings] == [MIDDLE]


def test_a_reduction_that_is_lost_after_the_first_step():
    lost = second_step(healthy(), without_gradient=(MIDDLE,))
    (found,) = verdict(SECOND, lost).findings
    actual = "no gradient in the second step, although it had one in the first"
    assert (found.tensor, found.ranks, found.actual) == (MIDDLE, (0, 1), actual)
    unused = on_runs(lost, None, without_gradient=(MIDDLE,))
    assert all("second" not in f.actual for f in verdict(SECOND, unused).findings)


def test_an_update_that_is_wrong_explains_the_second_gradients():
    """The first step has moved the parameters elsewhere, so that all later gradients differ."""
    evidence = second_step(healthy(), apart=1.0)
    moved = remeasured(evidence, EMBEDDING, 0.1, observed="parameters")
    assert [f.tensor for f in verdict(SECOND, moved).findings] == [MIDDLE]  # the first step alone was right
    runs = tuple(replace(run, second=replace(run.second, parameters=run.parameters)) for run in moved.training)
    evidence = replace(moved, training=runs)
    assert "the findings of update_parity explain" in verdict(SECOND, evidence).reason
    assert [f.tensor for f in verdict(UPDATE, evidence).findings] == [EMBEDDING]


def test_one_step_has_no_second():
    one_step = on_runs(healthy(losses=(2.0,)), None, second=None)
    assert verdict(SECOND, one_step).reason == "there was no second step: @fsdp_conformance(steps=1)"
    frozen = on_runs(empty(), None, second=None)
    assert verdict(SECOND, frozen).reason == "nothing is trainable"


def test_a_loss_of_another_model_than_its_argument():
    evidence = on_runs(healthy(), None, norm=0.5)
    found = verdict("loss_parity", replace(evidence, reference=replace(evidence.reference, gradients={})))
    assert (found.status, found.reason.split(":")[0]) == (
        "error",
        "Subject(loss=...) gives gradients on the ranks, and none in the reference",
    )


# Clipping.


@pytest.mark.parametrize(
    ("factor", "apart", "actual"),
    [(0.5, 0.0, "clipped gradient is 1/2 times the reference's"), (1.0, 2.0, "clipped gradient differs")],
)
def test_clipped_gradients_that_differ(factor, apart, actual):
    found = verdict(CLIP, clipped(healthy(4), factor, apart, ranks=[1, 2]))
    assert findings_of(found) == [(MIDDLE, (1, 2), actual, "half as large as before, within 0.0001", "")]


def test_the_epsilon_that_torch_adds_to_the_norm_is_not_a_difference():
    evidence = clipped(healthy(), 1 - 4e-4)
    assert verdict(CLIP, evidence).status == "failed"
    small = replace(evidence, reference=replace(evidence.reference, norm=5e-3))
    assert verdict(CLIP, small).status == "passed"


def test_clipping_that_was_not_recorded():
    """As in evidence of an older version, or if nothing is trainable."""
    found = verdict(CLIP, on_runs(clipped(healthy()), None, clipped=None))
    reason = "nothing was clipped: nothing is trainable, or clipping was not recorded"
    assert (found.status, found.reason) == ("skipped", reason)
    assert verdict(CLIP, on_runs(clipped(healthy()), None, clipped=Clipping())).status == "passed"


# Clipping, where the reference clips with the author's function.


def by_own_function(norms: float, factor: float, half: float = 2.0, **facts: Any) -> Evidence:
    """The function's norm is 2.0 on the reference. On the ranks, MIDDLE is ``factor`` times what it leaves there."""
    own, other = clipped(healthy(), factor), clipped(healthy(), half)
    runs = tuple(
        replace(run, norm=norms, clipped=replace(run.clipped, own=right.clipped.gradients))
        for run, right in zip(other.training, own.training, strict=True)
    )
    reference = replace(other.reference, own_clipping=OwnClipping(2.0, 1.0), **facts)
    return replace(other, training=runs, reference=reference)


def test_the_own_function_of_the_reference_is_expected():
    # What torch leaves is right as well: on one device a function may miss what it counts ranks for.
    for right in (by_own_function(2.0, 1.0), by_own_function(3.0, 0.5, half=1.0)):
        assert (verdict(NORM, right).status, verdict(CLIP, right).status) == ("passed", "passed")
    actual = "clipped gradient is 1/2 times the reference's"
    expected = "as the same function leaves it on one device, within 0.0002"
    assert findings_of(verdict(CLIP, by_own_function(2.0, 0.5))) == [(MIDDLE, (0, 1), actual, expected, "")]
    assert [f.expected for f in verdict(NORM, by_own_function(1.0, 1.0)).findings] == [
        "2 within 0.0002, as the same function returns on one device"
    ]


def test_the_noise_of_the_own_norm_counts():
    evidence = by_own_function(2.01, 1.004)
    assert (verdict(NORM, evidence).status, verdict(CLIP, evidence).status) == ("failed", "skipped")
    noisy = with_noise(evidence, own_norm=0.01)
    assert (verdict(NORM, noisy).status, verdict(CLIP, noisy).status) == ("passed", "passed")
    assert verdict(NORM, with_noise(evidence, norm=0.01)).status == "failed"


# Clipping to a bound above the norm.


def above(factor: float, apart: float = 0.0, ranks: tuple[int, ...] = (0, 1), **facts: Any) -> Evidence:
    changed = Comparison(MIDDLE, False, 12, measure=measured(12, factor, apart))
    evidence = on_runs(clipped(healthy()), None, **facts)
    return on_runs(evidence, ranks, clipped=replace(evidence.training[0].clipped, changed=(changed,)))


@pytest.mark.parametrize(
    ("factor", "apart", "size", "cause"),
    [
        (2.0, 0.0, "is 2 times as large", "the factor is not limited to 1, "),
        (0.0, 0.0, "is 0 times as large", "the function changes gradients whose norm is below the bound"),
        (1.0, 2.0, "differs", "the function changes gradients whose norm is below the bound"),
        (math.nan, 0.0, "differs", "the function changes gradients whose norm is below the bound"),
    ],
)
def test_gradients_that_a_bound_above_the_norm_changes(factor, apart, size, cause):
    (found,) = verdict(CLIP, above(factor, apart, (1,))).findings
    actual = f"gradient {size} after clipping to a bound above the norm"
    assert (found.tensor, found.ranks, found.actual, found.expected) == (MIDDLE, (1,), actual, "unchanged")
    assert found.cause.startswith(cause)
    # A wrong norm does not explain it.
    assert [f.expected for f in verdict(CLIP, above(factor, apart, norm=2.0)).findings] == ["unchanged"]


# Noise.


def with_noise(evidence: Evidence, **fields: Any) -> Evidence:
    return on_runs(evidence, None, noise=Noise(**fields))


def of_middle(share: float, factor: float = math.inf) -> Mapping[str, TensorNoise]:
    return {MIDDLE: TensorNoise(share * SIZE, factor)}


PARITY_AND_UPDATE = pytest.mark.parametrize(
    ("check", "field", "observed"),
    [(PARITY, "gradients", "gradients"), (UPDATE, "updates", "parameters")],
)


def test_a_factor_that_explains_less_than_it_leaves_is_none():
    noisy = with_noise(healthy(), gradients=of_middle(0.02))
    [finding] = verdict(PARITY, remeasured(noisy, MIDDLE, 0.9, apart=0.03 * SIZE)).findings
    assert finding.actual == "gradient is 0.9 times the reference's"
    [finding] = verdict(PARITY, remeasured(noisy, MIDDLE, 0.95, apart=0.07 * SIZE)).findings
    assert finding.actual == "gradient differs from the reference's"


def test_the_factor_that_is_known_best_names_the_others():
    """In low precision, a small gradient that is 1.8 times too large may pass for one that is twice too large."""
    both = remeasured(remeasured(healthy(), MIDDLE, 1.8), EMBEDDING, 1.8)
    assert {f.actual for f in verdict(PARITY, both).findings} == {"gradient is 1.8 times the reference's"}
    vague = with_noise(both, gradients=of_middle(0.05))
    assert {f.actual for f in verdict(PARITY, vague).findings} == {"gradient is 1.8 times the reference's"}
    alone = with_noise(remeasured(healthy(), MIDDLE, 1.8), gradients=of_middle(0.05))
    [finding] = verdict(PARITY, alone).findings
    assert finding.actual == "gradient is 2 times the reference's"


@pytest.mark.parametrize(
    ("check", "field", "observed", "expected"),
    [
        (PARITY, "gradients", "gradients", "equal within 0.04"),
        (UPDATE, "updates", "parameters", "equal within 0.04"),
        (ACCUMULATION, "accumulated", "accumulation", "the mean over the micro-batches, equal within 0.04"),
    ],
)
def test_a_difference_below_the_noise_passes_and_one_above_it_fails(check, field, observed, expected):
    seen = off_in(observed, 1.0, 0.1 * SIZE)
    assert verdict(check, with_noise(seen)).status == "failed"
    assert verdict(check, with_noise(seen, **{field: of_middle(0.08)})).status == "passed"
    found = verdict(check, with_noise(seen, **{field: of_middle(0.02)}))
    assert [f.expected for f in found.findings] == [expected]
    # The noise of other tensors does not excuse this one.
    assert verdict(check, with_noise(seen, **{field: {EMBEDDING: TensorNoise(100.0)}})).status == "failed"


@PARITY_AND_UPDATE
def test_a_scale_is_found_below_the_noise_of_the_elements(check, field, observed):
    """Noise of many elements cancels along the tensor's own direction."""
    seen = remeasured(healthy(), MIDDLE, 1.05, observed=observed)
    for noise in (of_middle(0.05), of_middle(0.05, factor=0.03), of_middle(0.2, factor=0.005)):
        assert verdict(check, with_noise(seen, **{field: noise})).status == "passed"
    found = verdict(check, with_noise(seen, **{field: of_middle(0.05, factor=0.005)}))
    assert [f.actual.split(" times")[0].split()[-1] for f in found.findings] == ["1.05"]


@pytest.mark.parametrize(("share", "status"), [(0.0, "failed"), (1 / 9, "passed"), (1 / 9000, "failed")])
def test_an_update_of_a_few_units_in_the_last_place_may_be_one_unit_longer(share, status):
    """Eight units instead of nine, where all nudged trainings round to the same weights (mamba2's dt_bias)."""
    seen = remeasured(healthy(), MIDDLE, 8 / 9, observed="parameters")
    updates = seen.training[0].parameters
    grained = tuple(replace(c, measure=replace(c.measure, grain=share * SIZE)) for c in updates) if share else updates
    noisy = with_noise(on_runs(seen, None, parameters=grained), updates=of_middle(0.0, factor=0.0))
    assert verdict(UPDATE, noisy).status == status


def off_in(observed: str, factor: float, apart: float) -> Evidence:
    """Make MIDDLE ``factor`` times the reference's, plus an orthogonal ``apart``, in one observation."""
    if observed == "clipped":
        return clipped(healthy(), factor, apart)
    if observed == "second":
        return second_step(healthy(), factor, apart)
    if observed == "accumulation":
        gradients = remeasured(healthy(), MIDDLE, factor, apart).training[0].gradients
        return on_runs(healthy(), None, accumulation=Accumulation(gradients))
    return remeasured(healthy(), MIDDLE, factor, apart, observed=observed)


LENGTH = "as long as the reference's,"
OBSERVED = [
    (PARITY, "gradients", "gradients", "{}"),
    (SECOND, "second", "second", "{}"),
    (CLIP, "gradients", "clipped", "half as large as before, {}"),
    (UPDATE, "updates", "parameters", "{}"),
    (ACCUMULATION, "accumulated", "accumulation", "the mean over the micro-batches, {}"),
]


@pytest.mark.parametrize(("check", "field", "observed", "expected"), OBSERVED)
def test_a_message_has_the_tolerance_that_was_exceeded(check, field, observed, expected):
    noise = {field: of_middle(0.055, factor=0.005)}
    far = verdict(check, with_noise(off_in(observed, 1.0, 0.2 * SIZE), **noise))
    within = "within 0.11" if check == CLIP else "equal within 0.11"
    assert [f.expected for f in far.findings] == [expected.format(within)]
    # Only the length is off, by less than the distance may be. Updates may always differ by 0.002.
    long = verdict(check, with_noise(off_in(observed, 1.046, 0.0), **noise))
    within = f"within {0.024 if check == UPDATE else 0.022}"
    assert [f.expected for f in long.findings] == [expected.format(within if check == CLIP else f"{LENGTH} {within}")]


@pytest.mark.parametrize(("check", "field", "observed", "expected"), [case for case in OBSERVED if case[0] != CLIP])
def test_a_length_without_a_clear_factor_is_in_the_message(check, field, observed, expected):
    found = verdict(check, with_noise(off_in(observed, 1.008, 0.012 * SIZE), **{field: of_middle(0.01, factor=0.0)}))
    (finding,) = found.findings
    assert finding.expected == expected.format(f"{LENGTH} within {0.006 if check == UPDATE else 0.0041}")
    assert finding.detail == "1.008 times as long on rank 0"


@pytest.mark.parametrize(("rows", "ratio", "status"), [(1, 2.5, "passed"), (1, 13.0, "failed"), (6, 2.1, "failed")])
@PARITY_AND_UPDATE
def test_five_trainings_know_little_of_the_noise_of_one_element(check, field, observed, rows, ratio, status):
    evidence = healthy(parameters={**PARAMETERS, MIDDLE: (2 * rows,)})
    noise = TensorNoise(0.01 * math.sqrt(rows))
    seen = remeasured(evidence, MIDDLE, apart=ratio * noise.distance, observed=observed)
    assert verdict(check, with_noise(seen, **{field: {MIDDLE: noise}})).status == status


@pytest.mark.parametrize(("rows", "status"), [(1, "passed"), (6, "failed")])
def test_the_length_of_one_element_has_its_noise(rows, status):
    seen = remeasured(healthy(parameters={**PARAMETERS, MIDDLE: (2 * rows,)}), MIDDLE, 1.05)
    noise = TensorNoise(0.03 * math.sqrt(rows), 0.01)
    assert verdict(PARITY, with_noise(seen, gradients={MIDDLE: noise})).status == status


def test_measured_noise_replaces_the_tolerance_of_the_dtype():
    bfloat16 = change_reference(change(healthy(), MIDDLE, dtype="bfloat16"), MIDDLE, dtype="bfloat16")
    off = remeasured(bfloat16, MIDDLE, apart=0.05 * SIZE)
    assert verdict(PARITY, off).status == "passed"
    assert verdict(PARITY, with_noise(off, gradients=of_middle(0.01))).status == "failed"
    # If it could not be measured, a finding says why.
    refused = "RuntimeError: hooks are refused"
    assert verdict(PARITY, with_noise(off, problem=refused)).status == "passed"
    (finding,) = verdict(PARITY, with_noise(remeasured(healthy(), MIDDLE, apart=SIZE), problem=refused)).findings
    assert finding.cause.endswith(f"; the noise of the reference could not be measured ({refused})")
    # A declared tolerance is taken as it is.
    off = with_noise(remeasured(healthy(), MIDDLE, apart=0.05 * SIZE), gradients=of_middle(0.2))
    assert verdict(PARITY, off).status == "passed"
    strict = replace(off, tolerance={PARITY: 1e-3})
    assert [f.expected for f in verdict(PARITY, strict).findings] == ["equal within 0.001"]


@pytest.mark.parametrize("check", [PARITY, SECOND, CLIP, UPDATE, ACCUMULATION, LOSS, NORM])
def test_a_difference_that_may_be_rounding_is_not_passed_if_the_reference_ended(check):
    where = {SECOND: "second", CLIP: "clipped", ACCUMULATION: "accumulation", UPDATE: "parameters"}
    off = off_in(where.get(check, "gradients"), 1.0, 0.05 * SIZE)
    off = on_runs(off, None, losses=(2.0, 1.5, 1.26), norm=3.1) if check in (LOSS, NORM) else off
    off = change_reference(change(off, MIDDLE, dtype="bfloat16"), MIDDLE, dtype="bfloat16")
    killed = {"problem": "the reference was killed", "ended": True}
    found = verdict(check, with_noise(off, **killed))
    assert (found.status, found.why) == ("skipped", "partly checked")
    share = {LOSS: "0.005", NORM: "0.033"}.get(check, "0.05")
    assert found.reason == (
        f"measuring the reference's noise failed (the reference was killed), so a difference of {share} may be an error"
    )
    assert verdict(check, with_noise(off, problem="RuntimeError: hooks are refused")).status == "passed"
    assert verdict(check, replace(with_noise(off, **killed), tolerance={check: 0.2})).status == "passed"
    unchanged = clipped(healthy()) if check == CLIP else healthy()
    assert verdict(check, with_noise(unchanged, **killed)).status == "passed"


def test_losses_within_noise():
    evidence = on_runs(healthy(), None, losses=(2.0, 1.5, 1.26))
    assert verdict(LOSS, evidence).status == "failed"
    assert verdict(LOSS, with_noise(evidence, losses=(0.0, 0.0, 0.02))).status == "passed"
    found = verdict(LOSS, with_noise(evidence, losses=(0.0, 0.0, 0.002)))
    assert [f.expected for f in found.findings] == ["1.25 within 0.008"]
    # The noise of outputs does not include the rounding of a loss that is computed in bfloat16.
    noisy = with_noise(evidence, losses=(0.0, 0.0, 1e-4))
    assert verdict(LOSS, noisy).status == "failed"
    assert verdict(LOSS, on_runs(noisy, None, loss_dtype="bfloat16")).status == "passed"


def test_a_norm_within_noise():
    evidence = on_runs(healthy(), None, norm=3.1)
    assert verdict(NORM, evidence).status == "failed"
    assert verdict(NORM, with_noise(evidence, norm=0.1)).status == "passed"
    assert verdict(NORM, with_noise(evidence, norm=0.01)).status == "failed"
    # A part of the noise of the gradients may lie along them.
    for share, status in ((0.02, "failed"), (0.5, "passed")):
        noisy = with_noise(
            evidence,
            norm=0.01,
            gradients={c.name: TensorNoise(share * SIZE, 0.0) for c in evidence.training[0].gradients},
        )
        assert verdict(NORM, noisy).status == status


@pytest.mark.parametrize(
    ("check", "field", "observed", "apart"),
    [(PARITY, "gradients", "gradients", 3.3e-7), (UPDATE, "updates", "parameters", 1e-3)],
)
@pytest.mark.parametrize("measured", [True, False])
def test_a_loss_in_float32_rounds_gradients_of_float64_parameters(check, field, observed, apart, measured):
    evidence = healthy()
    for name in PARAMETERS:
        evidence = change_reference(change(evidence, name, dtype="float64"), name, dtype="float64")
    evidence = remeasured(evidence, MIDDLE, apart=apart * SIZE, observed=observed)
    noise = {field: of_middle(1e-9)} if measured else {"problem": "RuntimeError: hooks are refused"}
    evidence = with_noise(evidence, **noise)
    assert verdict(check, evidence).status == "failed"
    assert verdict(check, on_runs(evidence, None, loss_dtype="float64")).status == "failed"
    assert verdict(check, on_runs(evidence, None, loss_dtype="float32")).status == "passed"


def test_gradients_that_the_optimizer_reduces_have_no_norm_and_are_neither_clipped_nor_accumulated_yet():
    found = verdict(NORM, on_runs(reduced_later(healthy()), None, norm=2.0))
    assert found.why == "differs"
    assert found.reason.endswith(f"; the optimizer itself reduces the gradients of {MIDDLE} after that")
    evidence = reduced_later(clipped(healthy(), 1.0, 2.0))
    assert verdict(CLIP, evidence).findings == ()
    accumulated = replace(evidence.training[0].accumulation, gradients=evidence.training[0].gradients)
    assert verdict(ACCUMULATION, on_runs(evidence, None, accumulation=accumulated)).findings == ()


def test_a_gradient_that_noise_hides_may_be_missing():
    """The gradient of a key's bias is zero but for rounding, and so may be absent."""
    evidence = on_runs(healthy(), None, without_gradient=(MIDDLE,))
    assert verdict(PARITY, with_noise(evidence)).status == "failed"
    assert verdict(PARITY, with_noise(evidence, gradients=of_middle(2.0))).status == "passed"


def reduced_later(evidence: Evidence) -> Evidence:
    """The gradient of a whole parameter differs between ranks, and its update is right."""
    return place(remeasured(evidence, MIDDLE, 0.9, 2.0), MIDDLE, {})


def test_an_update_that_noise_could_explain_excuses_no_gradient():
    evidence = reduced_later(healthy())
    assert verdict(PARITY, evidence).findings == ()
    assert verdict(PARITY, with_noise(evidence, updates=of_middle(0.1))).findings == ()
    unknown = with_noise(evidence, updates=of_middle(0.4))
    assert {f.tensor for f in verdict(PARITY, unknown).findings} == {MIDDLE}


def test_a_rounding_gradient_that_moved_its_weight_otherwise_is_no_other_first_step():
    """Adam takes a whole step where the gradient is zero but for rounding."""
    evidence = second_step(healthy(), 2.0)
    sizes = {**evidence.reference.gradients, EMBEDDING: 1e-9}
    moved = remeasured(evidence, EMBEDDING, -1.0, observed="parameters").training[0].parameters
    runs = tuple(replace(run, second=replace(run.second, parameters=moved)) for run in evidence.training)
    evidence = replace(evidence, training=runs, reference=replace(evidence.reference, gradients=sizes))
    assert [f.tensor for f in verdict(SECOND, evidence).findings] == [MIDDLE]


def test_a_hook_that_does_not_run_once_more():
    accumulated = Accumulation(refused="IndexError: list index out of range")
    assert verdict(ACCUMULATION, on_runs(healthy(), None, accumulation=accumulated)).reason == (
        "a hook of the optimizer's step raises when it is called once more: IndexError: list index out of range"
    )


# Other numbers of backwards on some ranks.


def uneven(evidence: Evidence, *numbers: tuple[int, ...]) -> Evidence:
    for rank, backwards in enumerate(numbers):
        evidence = on_runs(evidence, [rank], backwards=backwards)
    return evidence


@pytest.mark.parametrize(
    ("id", "wrong"),
    [
        (PARITY, remeasured(healthy(), MIDDLE, apart=1.0)),
        (PARITY, remeasured(healthy(), MIDDLE, factor=7.0)),
        (SECOND, second_step(healthy(), apart=1.0)),
        (LOSS, on_runs(healthy(), None, losses=(2.5, 2.0, 1.5))),
    ],
)
def test_other_numbers_of_backwards_are_the_cause(id, wrong):
    found = verdict(id, uneven(wrong, (2, 1), (1, 1)))
    assert found.status == "failed"
    assert found.findings[0].cause.startswith(
        "Subject(train_step=...) ran 2 backwards on rank 0 and 1 backward on rank 1 in step 0, but should run the same"
    )
    assert "Subject(train_step=...)" not in verdict(id, uneven(wrong, (2, 2), (2, 2))).findings[0].cause
    assert "Subject(train_step=...)" not in verdict(id, uneven(wrong, (2, 2), ())).findings[0].cause


def test_numbers_of_later_backwards_explain_no_earlier_gradient():
    found = verdict(PARITY, uneven(remeasured(healthy(), MIDDLE, apart=1.0), (1, 2), (1, 1)))
    assert "Subject(train_step=...)" not in found.findings[0].cause
    later = verdict(SECOND, uneven(second_step(healthy(), apart=1.0), (1, 2), (1, 1)))
    assert "in step 1" in later.findings[0].cause
    # Where the result is right, the numbers may differ.
    assert {verdict(id, uneven(healthy(), (2, 1), (1, 1))).status for id in (PARITY, SECOND, LOSS)} == {"passed"}


# A wrong scale that clipping hides.


def unclipped(factor: float, apart: float = 0.0, evidence: Evidence | None = None) -> Evidence:
    """Return evidence of a step whose gradients before clipping are ``factor`` times the reference's."""
    evidence = evidence or healthy()
    runs = (
        replace(
            run,
            unclipped=tuple(replace(c, measure=measured(c.elements, factor, apart)) for c in run.gradients),
        )
        for run in evidence.training or ()
    )
    return replace(evidence, training=tuple(runs))


@pytest.mark.parametrize(("factor", "text"), [(2.0, "2"), (0.5, "1/2"), (0.25, "1/4"), (3.3, "3.3"), (1.1, "1.1")])
def test_a_scale_that_clipping_hides(factor, text):
    found = verdict(PARITY, unclipped(factor))
    assert [f.actual for f in found.findings] == [f"gradients before clipping are {text} times the reference's"]


@pytest.mark.parametrize(
    "evidence",
    [
        unclipped(1.0),
        unclipped(1.02),
        unclipped(1.2, apart=1.0),  # as far off in direction: a loss that scales its own gradient, or noise
        unclipped(math.nan),
        on_runs(unclipped(2.0), [1], unclipped=()),
    ],
)
def test_gradients_before_clipping_that_are_right_or_differ_in_direction(evidence):
    assert verdict(PARITY, evidence).status == "passed"


def test_a_step_that_refuses_small_gradients_is_told():
    found = verdict(PARITY, on_runs(healthy(), [1], unclipped_refused="StopIteration: the schedule has ended"))
    assert (found.status, found.why) == ("skipped", "partly checked")
    raised = "StopIteration: the schedule has ended"
    assert f"one more step with small gradients raised {raised}; let train_step run more steps" in found.reason


def test_gradients_before_clipping_of_weights_that_have_moved_otherwise():
    found = verdict(PARITY, unclipped(2.0, evidence=remeasured(healthy(), MIDDLE, apart=9.0, observed="parameters")))
    assert (found.status, found.why) == ("skipped", "partly checked")
    assert (
        "the weights moved differently from the reference's, so the gradients before clipping were not" in found.reason
    )


def test_a_wrong_gradient_is_not_reported_again_as_one_before_clipping():
    found = verdict(PARITY, unclipped(2.0, evidence=remeasured(healthy(), MIDDLE, factor=2.0)))
    assert [finding.tensor for finding in found.findings] == [MIDDLE]
