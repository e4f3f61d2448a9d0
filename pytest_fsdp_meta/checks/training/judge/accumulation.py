"""Gradient accumulation: gradients summed over micro-batches equal those of the whole batch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from pytest_fsdp_meta.checks.training.judge.gradients import describe_error, excused_gradients
from pytest_fsdp_meta.checks.values.facts import GRADIENT_TOLERANCE
from pytest_fsdp_meta.evidence import Accumulation, RankTraining
from pytest_fsdp_meta.judging.causes import by_label
from pytest_fsdp_meta.judging.findings import Explanation, Finding
from pytest_fsdp_meta.judging.gates import BEFORE_UPDATES, comparable_training, describe_difference, unless_explained
from pytest_fsdp_meta.judging.limits import limits_of
from pytest_fsdp_meta.judging.multiples import multiple
from pytest_fsdp_meta.judging.registry import training_check
from pytest_fsdp_meta.judging.view import Blocked, NotJudged, PartlyJudged, Unjudgeable, View


@training_check(
    promise="gradients accumulated over micro-batches equal those of their rows in one batch, also in a step with "
    "fewer rows, and are reduced only with the last micro-batch",
    uses=["values", "verifier"],
    after=[*BEFORE_UPDATES, "second_grad_parity", "update_parity", "loss_parity"],
    why="If turning the reduction off has no effect, each micro-batch costs a reduction; if it stays off, the whole "
    "step is lost. A step with fewer rows that is divided as a full one trains too little on them.",
    cause="the switch (FSDP2's set_requires_gradient_sync, DDP's no_sync) does not reach every wrapped module",
    remedy="apply the switch to every FSDP module, and turn it on again before the backward of the last micro-batch",
    references=["nvidia-cosmos/cosmos-framework#161", "huggingface/transformers#39659", "modelscope/ms-swift#10084"],
    tolerance=GRADIENT_TOLERANCE,
)
def grad_accumulation_parity(view: View) -> Iterable[Finding]:
    runs = comparable_training(view)
    if "train_step" in view.evidence.subject.declared:
        yield from _wrong_short_step(view, runs)
        return
    refusing = "a hook of the optimizer's step raises when it is called once more"
    recorded = _recorded([run.accumulation for run in runs], refusing)
    early = {
        name: tuple(rank for rank, accumulation in enumerate(recorded) if name in accumulation.early)
        for name in view.names("parameter")
    }
    for name, ranks in early.items():
        if ranks:
            yield Finding(
                name, ranks, "gradient reduced in the first micro-batch", "reduced only in the last", **_NOT_OFF
            )
    found = list(_wrong_gradients(view, runs, recorded, "accumulated", _AT_THE_END, _STAYS_OFF, _OVERWRITTEN))
    if any(early.values()) and not found:
        return
    yield from _unexplained(view, runs, found, "accumulated gradients differ", recorded)


def _recorded(taken: Sequence[Accumulation | None], refusing: str, so: str = "") -> list[Accumulation]:
    """Return what was taken on all ranks, or raise; ``so`` says what follows from too few rows."""
    recorded = [one for one in taken if one is not None]
    if not recorded or len(recorded) < len(taken):
        raise NotJudged("nothing is trainable, so there are no gradients to accumulate")
    if refused := {one.refused for one in recorded} - {""}:
        alike = all(one.refused in refused for one in recorded)
        raise (PartlyJudged if alike else Unjudgeable)(f"{refusing}: {min(refused)}")
    if problem := next((one.problem for one in recorded if one.problem), ""):
        raise NotJudged(f"batch(0): {problem}{so}; give it more rows")
    return recorded


def _unexplained(
    view: View, runs: Sequence[RankTraining], found: Sequence[Finding], what: str, recorded: Sequence[Accumulation]
) -> Iterator[Finding]:
    """Yield what was ``found`` after the steps, unless something else explains it."""
    compared = (c for one in recorded for c in one.gradients)
    yield from unless_explained(view, runs, found, what, compared, GRADIENT_TOLERANCE, fewer_forwards=True)


def _wrong_short_step(view: View, runs: Sequence[RankTraining]) -> Iterator[Finding]:
    """Yield the gradients that are wrong in a step of the author's with half of the rows, if whole ones are right."""
    if all(max(run.backwards, default=0) < 2 for run in runs):
        raise NotJudged("train_step runs one backward, and grad_parity compares its gradients")
    refusing = "train_step refuses half of the rows of a batch"
    recorded = _recorded([run.short for run in runs], refusing, ", so no step can be half as long")
    found = list(_wrong_gradients(view, runs, recorded, "short", _SHORT, _NEVER_LAST, _FULL_SIZE))
    what = "gradients of a step with half of the rows differ"
    if found and view.failed:
        raise Blocked(describe_difference(what, found), view.failed)
    yield from _unexplained(view, runs, found, what, recorded)


def _wrong_gradients(
    view: View,
    runs: Sequence[RankTraining],
    recorded: Sequence[Accumulation],
    steps: str,
    when: str,
    if_lost: Explanation,
    if_wrong: Explanation,
) -> Iterator[Finding]:
    """Yield the gradients that these ``steps`` have lost or summed wrongly; ``when`` says in which they did."""
    limits = limits_of(view, steps)
    names = view.names("parameter", only=view.reference.gradients, but=excused_gradients(view, runs))
    pairs = view.comparisons(tuple(one.gradients for one in recorded), names)
    for name, found in pairs.items():
        if any(c.measure and not math.isfinite(c.measure.truth) for _, c in found):
            raise NotJudged(
                f"after the steps the reference's own gradient of {name} is not finite: its training diverges; "
                "give Subject(optimizer=...) a smaller learning rate"
            )
    for name in names:  # those that the first step had
        lost = [rank for rank, accumulation in enumerate(recorded) if name in accumulation.without_gradient]
        if ranks := tuple(rank for rank in lost if name not in runs[rank].without_gradient):
            yield Finding(name, ranks, f"no gradient {when}", _MEAN, **if_lost, certain=True)
    for name in names:
        wrong = [(rank, comparison) for rank, comparison in pairs.get(name, []) if limits.exceeded(rank, comparison)]
        label = partial(multiple, allowed=limits.relative_to(wrong))
        for factor, cases in by_label(wrong, label).items():
            ranks = tuple(rank for rank, _ in cases)
            actual = f"gradient {factor} times as large" if factor else "different gradient"
            expected, detail = f"{_MEAN}, {limits.describe(cases)}", "" if factor else describe_error(limits, cases)
            yield Finding(name, ranks, f"{actual} {when}", expected, detail, **if_wrong)


_SHORT = "in a step with half of the rows"
_FULL_SIZE: Explanation = {
    "cause": "the loss of a window with fewer micro-batches, such as the last one of an epoch, is divided by as many "
    "as a full one has",
    "remedy": "divide by the micro-batches, or the tokens, that the window really has; if yours never ends early, skip "
    "this check with that reason",
}
_AT_THE_END = "after the last micro-batch"
_MEAN = "the mean over the micro-batches"
_NOT_OFF: Explanation = {
    "cause": "the switch (FSDP2's set_requires_gradient_sync) has no effect: each micro-batch costs a reduction",
    "remedy": "apply the switch to every FSDP module",
}
_OVERWRITTEN: Explanation = {
    "cause": "a later micro-batch drops or changes the gradients of earlier ones: a zero_grad() in the forward or in a "
    "hook, or a hook that scales or reduces the whole accumulated gradient in each backward; or a module computes with "
    "a cached copy of a weight from before the last step",
    "remedy": "change gradients once per step, after the last backward: no zero_grad() between micro-batches, no "
    "hook that changes p.grad in each backward, and no copies of weights that outlive a step",
}
_NEVER_LAST: Explanation = {
    "cause": "the reduction is turned on for the last micro-batch of a full window only (an index or a count that a "
    "shorter window does not reach)",
    "remedy": "ask for the last micro-batch that the window really has",
}
_STAYS_OFF: Explanation = {
    "cause": "the reduction is not turned on again for the last micro-batch, so gradients stay unreduced inside FSDP",
    "remedy": "call set_requires_gradient_sync(True) before the backward of the last micro-batch, on every FSDP module",
}
