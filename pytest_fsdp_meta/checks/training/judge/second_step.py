"""The second step: its gradients equal those of one device, so that nothing was carried over or lost."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from pytest_fsdp_meta.checks.tracing.judge import describe_origin
from pytest_fsdp_meta.checks.training.judge.gradients import describe_error, excused_gradients
from pytest_fsdp_meta.checks.values.facts import GRADIENT_TOLERANCE
from pytest_fsdp_meta.evidence import RankTraining, SecondStep
from pytest_fsdp_meta.judging.causes import Cases
from pytest_fsdp_meta.judging.findings import Explanation, Finding, either
from pytest_fsdp_meta.judging.gates import (
    BEFORE_UPDATES,
    comparable_training,
    explain_uneven_backwards,
    require_no_other_cause,
    require_same_forward,
    unless_explained,
)
from pytest_fsdp_meta.judging.limits import (
    Limits,
    gradients_beyond_rounding,
    limits_of,
)
from pytest_fsdp_meta.judging.registry import training_check
from pytest_fsdp_meta.judging.view import Blocked, NotJudged, View

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
        raise NotJudged(_describe_missing(view, runs))
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


def _describe_missing(view: View, runs: Sequence[RankTraining]) -> str:
    """Return why a rank has no observation of a second step."""
    one = any(len(run.losses) < 2 for run in runs)
    return "there was no second step: @fsdp_conformance(steps=1)" if one else "nothing is trainable"


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
    ours, theirs = (", ".join(f"{rate:g}" for rate in dict.fromkeys(own)) for own in (actual, rates[step]))
    differ = f"the learning rate of step {step} is {ours} on these ranks, and {theirs} in the reference"
    if "scheduler" not in view.evidence.subject.declared:
        return {
            "cause": f"{differ}: train_step, or a hook of the optimizer's step, sets it",
            "remedy": "set it by a scheduler, alike on all ranks, and declare that in Subject(scheduler=...)",
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
        explanation = explanation or (_CLIPPED if clips else _CHANGED)
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
