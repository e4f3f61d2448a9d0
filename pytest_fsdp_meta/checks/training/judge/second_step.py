"""The second step and all updates: gradients are those of one device, and each parameter moves as there."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from pytest_fsdp_meta.checks.tracing.judge import describe_origin
from pytest_fsdp_meta.checks.training.facts import SecondStep
from pytest_fsdp_meta.checks.training.judge.buffers import explain_buffers
from pytest_fsdp_meta.checks.training.judge.gradients import describe_error, excused_gradients
from pytest_fsdp_meta.checks.training.judge.optimization import explain_written
from pytest_fsdp_meta.checks.values.facts import GRADIENT_TOLERANCE, UPDATE_TOLERANCE
from pytest_fsdp_meta.evidence import Measure, RankTraining
from pytest_fsdp_meta.judging.causes import Cases, by_label
from pytest_fsdp_meta.judging.findings import Explanation, Finding, either
from pytest_fsdp_meta.judging.gates import (
    BEFORE_UPDATES,
    comparable_training,
    explain_plain_reference,
    explain_uneven_backwards,
    global_losses,
    require_no_other_cause,
    require_same_forward,
    unless_explained,
)
from pytest_fsdp_meta.judging.limits import Limits, describe_length, gradients_beyond_rounding, limits_of, loss_limits
from pytest_fsdp_meta.judging.multiples import alike
from pytest_fsdp_meta.judging.registry import training_check
from pytest_fsdp_meta.judging.view import Blocked, NotJudged, View
from pytest_fsdp_meta.text import counted

_CHANGED = either(
    "the parameters are right after the first step, and the second gradients are not: ",
    "a forward keeps state, or computes with a copy of the weights from before the step",
    "the reduction is off from the second step on",
    "look for buffers and caches that the forward keeps between steps, for cast copies of weights, and for "
    "set_requires_gradient_sync(False)",
)


@training_check(
    promise="if the first step moved the parameters as in the reference, each gradient of the second step equals the "
    "reference's",
    uses=["values", "verifier"],
    after=BEFORE_UPDATES,
    why="A gradient that is not zeroed, a forward that keeps old weights and a reduction that stays off show only from "
    "the second step on.",
    cause=_CHANGED["cause"],
    remedy=_CHANGED["remedy"],
    references=["karpathy/llm.c#548"],
    tolerance=GRADIENT_TOLERANCE,
)
def second_grad_parity(view: View) -> Iterable[Finding]:
    runs = comparable_training(view)
    seconds = [run.second for run in runs if run.second is not None]
    if len(seconds) < len(runs):
        one = any(len(run.losses) < 2 for run in runs)
        raise NotJudged("there was no second step: @fsdp_conformance(steps=1)" if one else "nothing is trainable")
    if not first_steps_equal(view, seconds):
        message = "the first step moved the parameters differently from the reference"
        require_same_forward(view, runs)
        require_no_other_cause(view, message)
        raise Blocked(message, ["update_parity"])
    found: Sequence[Finding] = list(_wrong_gradients(view, runs, seconds))
    compared = (c for one in seconds for c in one.gradients)
    what = "the gradients of the second step differ"
    accumulates = any(max(run.backwards, default=0) > 1 for run in runs)
    found = unless_explained(view, runs, found, what, compared, GRADIENT_TOLERANCE, fewer_forwards=accumulates)
    origin = describe_origin(view.evidence.traces, step=1)
    yield from (replace(finding, origin=origin, step=1) for finding in found)


def first_steps_equal(view: View, seconds: Sequence[SecondStep]) -> bool:
    """Return whether the first step moved the parameters on all ranks as in the reference."""
    limits, due = limits_of(view, "first_updates"), gradients_beyond_rounding(view)
    moved = [(rank, c) for rank, second in enumerate(seconds) for c in second.parameters if c.name in due]
    return not any(
        limits.exceeded(rank, c) and c.measure is not None and not c.measure.apart <= 2 * c.measure.grain
        for rank, c in moved
    )


def explain_rates(view: View, runs: Sequence[RankTraining], ranks: Sequence[int]) -> Explanation:
    """Explain updates by the first learning rate that is not the reference's; return {} if the rates agree."""
    rates = view.reference.rates
    pairs = ((step, runs[rank].rates[step]) for step in range(len(rates)) for rank in ranks if runs[rank].rates[step:])
    found = next(((step, own) for step, own in pairs if not _equal_rates(own, rates[step])), None)
    if found is None:
        return {}
    step, actual = found
    ours, theirs = (", ".join(f"{rate:.9g}" for rate in dict.fromkeys(own)) for own in (actual, rates[step]))
    differ = f"the learning rate of step {step} is {ours} on these ranks, and {theirs} in the reference"
    if "scheduler" not in view.evidence.subject.declared:
        return {
            "cause": f"{differ}: an undeclared scheduler, train_step or a hook of the optimizer's step sets it",
            "remedy": "set it by a scheduler, alike on all ranks, and declare it: Subject(scheduler=...)",
        }
    how = "at other times, or once per rank, or it schedules an optimizer that was replaced"
    if later := next((n for n in range(step + 1, len(rates)) if _equal_rates(actual, rates[n])), 0):
        own = runs[ranks[0]].rates
        ahead = all(_equal_rates(now, due) for now, due in zip(own, rates[1:], strict=False))
        how = f"{'before the optimizer does' if ahead else 'more often'}: it is the reference's rate of step {later}"
    return {
        "cause": f"{differ}, whose scheduler steps once after each step of the optimizer: on the ranks it steps {how}",
        "remedy": "build the scheduler for the optimizer that trains, step it once after each of its steps, and "
        "declare it in Subject(scheduler=...)",
    }


def _other_rates(view: View, runs: Sequence[RankTraining]) -> Iterator[Finding]:
    """Report a schedule that is not the reference's, however little the rates of these few steps differ."""
    if explanation := explain_rates(view, runs, range(len(runs))):
        ranks, actual = tuple(range(len(runs))), "another learning rate than the reference's"
        yield Finding(None, ranks, actual, "the same in each step", **explanation, certain=True)


def _equal_rates(ours: Sequence[float], theirs: Sequence[float]) -> bool:
    return len(ours) != len(theirs) or all(map(math.isclose, ours, theirs))


def _wrong_gradients(view: View, runs: Sequence[RankTraining], seconds: Sequence[SecondStep]) -> Iterator[Finding]:
    limits, excused = limits_of(view, "second"), excused_gradients(view, runs)
    names, due = view.names("parameter", only=view.reference.gradients), gradients_beyond_rounding(view)
    pairs = view.comparisons(tuple(second.gradients for second in seconds), names)
    for name in names:
        missing = tuple(
            rank
            for rank, second in enumerate(seconds)
            if name in second.without_gradient and name not in runs[rank].without_gradient
        )
        if missing and name in due:
            actual = "no gradient in the second step, although it had one in the first"
            yield Finding(name, missing, actual, "", **_LOST, certain=True)
        wrong = [(rank, c) for rank, c in pairs.get(name, []) if limits.exceeded(rank, c)]
        if wrong and name not in excused:
            yield from _describe_wrong(view, runs, name, wrong, limits)


def _describe_wrong(
    view: View, runs: Sequence[RankTraining], name: str, wrong: Cases, limits: Limits
) -> Iterator[Finding]:
    left_over = [(rank, c) for rank, c in wrong if (second := runs[rank].second) and name in second.left_over]
    others = [case for case in wrong if case not in left_over]
    if left_over:
        actual = "gradient of the second step still contains that of the first"
        ranks = tuple(rank for rank, _ in left_over)
        yield Finding(name, ranks, actual, limits.describe(left_over), **_NOT_ZEROED, certain=True)
    if others:
        actual = "gradient of the second step differs from the reference's, that of the first does not"
        detail = describe_error(limits, others)
        clips = {"train_step", "max_grad_norm"} <= set(view.evidence.subject.declared)
        ranks = tuple(rank for rank, _ in others)
        explanation = explain_uneven_backwards(view, last=1) or explain_rates(view, runs, ranks)
        explanation = explanation or explain_buffers(view, runs) or (_CLIPPED if clips else _CHANGED)
        yield Finding(name, ranks, actual, limits.describe(others), detail, **explanation)


_CLIPPED: Explanation = {
    "cause": "the parameters are right after the first step, and the second gradients are not: train_step does not "
    "call zero_grad(), and clips what is left of the first gradient together with the second; a forward keeps state "
    "or old weights; or the reduction is off from the second step on",
    "remedy": "call optimizer.zero_grad() in every step; else clip to a bound above the norm in this test, which shows "
    "what is left in full, and look for buffers and caches that the forward keeps",
}
_LOST: Explanation = {
    "cause": "the reduction is switched off after the first step (set_requires_gradient_sync(False), no_sync()), or "
    "the second forward does not use the parameter",
    "remedy": "switch the reduction on again for the last backward before each step; look for caches that the first "
    "forward fills",
}
_NOT_ZEROED: Explanation = {
    "cause": "nothing zeroes this gradient after the step: zero_grad() is not called, or the optimizer's does not "
    "reach it, so each step adds to all earlier ones",
    "remedy": "let train_step call optimizer.zero_grad(); if it does, call it for every parameter group, and clear "
    "gradient buffers that a wrapper keeps",
}


MOST_PERPENDICULAR = 0.35
"""Fraction: an update is a multiple of the reference's if at most this part of it is perpendicular to the reference's.
If only the signs agree, the part is about 0.6."""
SAME_UPDATE = 0.02
"""Relative: update factors that differ by less count as the same factor."""
_SETTINGS = either(
    "",
    "the optimizer's learning rate, weight decay or parameter groups are not the reference's",
    "groups are chosen by the size of a rank's shard, or the function that builds the optimizer depends on the number "
    "of ranks (1 for the reference)",
    "compare the optimizer's groups and their settings with the reference's, by parameter name",
)
_STEP = either(
    "the settings of the parameter's group are the reference's: ",
    "the optimizer computes its step otherwise, from another state or by another number of steps",
    "the optimizer computes on each rank's shard what needs the whole tensor, such as its norm, its mean or an "
    "orthogonal matrix",
    "compare the optimizer's state and step with the reference's; compute norms and matrices of whole tensors over the "
    "ranks that shard them",
)


@training_check(
    promise="each parameter's update over the training steps equals the reference's",
    uses=["values", "verifier"],
    after=[*BEFORE_UPDATES, "second_grad_parity"],
    why="A parameter group without its learning rate or weight decay still has correct gradients and is noticed late.",
    cause=_SETTINGS["cause"],
    remedy=_SETTINGS["remedy"],
    references=["pytorch/pytorch#149205"],
    tolerance=UPDATE_TOLERANCE,
)
def update_parity(view: View) -> Iterable[Finding]:
    runs = comparable_training(view)
    found = list(_wrong_updates(view, runs)) or list(_other_rates(view, runs))
    compared = (c for run in runs for c in run.parameters)
    unless_explained(view, runs, found, "the updates differ", compared, UPDATE_TOLERANCE)
    if found:
        _require_same_last_forward(view, runs)
    yield from found


def _require_same_last_forward(view: View, runs: Sequence[RankTraining]) -> None:
    """Raise Blocked if the last loss is wrong although the parameters were right before: then the last update is, too.

    loss_parity reports that the forward has changed.
    """
    expected, actual = view.reference.losses or (), global_losses(view.evidence)
    last = len(expected) - 1
    if "loss_parity" not in view.selection or not all(run.late for run in runs):
        return
    limits = replace(limits_of(view, "updates"), roundings=2 * last)
    moved = any(limits.exceeded(rank, c) for rank, run in enumerate(runs) for c in run.late)
    if not moved and loss_limits(view).exceeded(actual, expected, last):
        raise Blocked(
            f"the parameters are right before the last step, whose loss is {actual[last]:.6g}, but should be "
            f"{expected[last]:.6g}",
            ["loss_parity"],
        )


def _wrong_updates(view: View, runs: Sequence[RankTraining]) -> Iterator[Finding]:
    """Report the parameters with the largest errors; smaller errors elsewhere may follow from these."""
    names = view.names("parameter", only=gradients_beyond_rounding(view))
    updates = view.comparisons(tuple(run.parameters for run in runs), names)
    moved = {name: [c.measure.truth for _, c in cases if c.measure is not None] for name, cases in updates.items()}
    # Each step rounds each element once, on the ranks and in the reference. A slice that moved little may differ as
    # much as the one that moved farthest.
    longest = {name: max(lengths) for name, lengths in moved.items() if lengths}
    limits = replace(limits_of(view, "updates"), roundings=2 * len(view.reference.losses or ()), longest=longest)
    exceeding = {name: [(rank, c) for rank, c in cases if limits.exceeded(rank, c)] for name, cases in updates.items()}
    off = {name: cases for name, cases in exceeding.items() if cases}
    worst = max((c.relative for cases in off.values() for _, c in cases), default=0.0)
    least = min(worst, 1.0) / 2
    farthest = {name: [(rank, c) for rank, c in cases if c.relative >= least] for name, cases in off.items()}
    measured = [c.measure for cases in farthest.values() for _, c in cases if c.measure is not None]
    labels = alike(
        {_update_factor(m): m.residual for m in measured if _update_factor(m)}, max(limits.relative, SAME_UPDATE)
    )
    for name, cases in farthest.items():
        for factor, alike_cases in by_label(cases, lambda measure: labels.get(_update_factor(measure), "")).items():
            actual = f"update is {factor} times the reference's" if factor else "update differs from the reference's"
            error = f"relative error {max(c.relative for _, c in alike_cases):.2g}"
            detail = "" if factor else describe_length(alike_cases) if limits.only_scaled(alike_cases) else error
            ranks = tuple(rank for rank, _ in alike_cases)
            explanation = explain_rates(view, runs, ranks) or explain_written(runs, name, ranks)
            explanation = explanation or _explain_counted(runs, ranks)
            explanation = explanation or explain_plain_reference(view)
            theirs, held = view.reference.settings.get(name), [runs[rank].optimizer for rank in ranks]
            same = theirs and all(facts is not None and facts.settings.get(name) == theirs for facts in held)
            explanation = explanation or (_STEP if same else _SETTINGS)
            yield Finding(name, ranks, actual, limits.describe(alike_cases), detail, **explanation)


def _explain_counted(runs: Sequence[RankTraining], ranks: Sequence[int]) -> Explanation:
    """Explain an update by steps that the loader's optimizer has counted without gradients; return {} without any."""
    optimizers = [runs[rank].optimizer for rank in ranks]
    counted_by = {optimizer.counted for optimizer in optimizers if optimizer is not None}
    if counted_by in (set(), {0.0}):
        return {}
    steps = counted(round(max(counted_by)), "step")
    return {
        "cause": f"the loader's optimizer has counted {steps} before the training, and its moments are zero: a step "
        "with zero gradients created its state, as torch's get_optimizer_state_dict does, so AdamW corrects the first "
        "moments as those of a later step",
        "remedy": "set each step in optimizer.state back to 0 after creating the state, or load a state instead",
    }


def _update_factor(measure: Measure) -> float:
    """Return the factor of an update that is a multiple of the reference's; 0 if it is not a multiple.

    It does not count as a multiple if its different direction explains more of the error than the factor does.
    """
    if not math.isfinite(measure.apart) or measure.residual > MOST_PERPENDICULAR:
        return 0.0
    return measure.factor if measure.factor > 0 and abs(measure.factor - 1) >= measure.residual else 0.0
