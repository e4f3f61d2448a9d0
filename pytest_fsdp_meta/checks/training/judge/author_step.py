"""Explain how the author's first step differs from one backward of Subject(loss=...), by what was seen and tried."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from pytest_fsdp_meta.checks.tracing.judge import AGREE, follow_step
from pytest_fsdp_meta.checks.training.facts import FirstBackward, RankTraining
from pytest_fsdp_meta.checks.values.facts import GRADIENT_TOLERANCE, LOSS_TOLERANCE
from pytest_fsdp_meta.judging.findings import Explanation
from pytest_fsdp_meta.judging.gates import global_losses
from pytest_fsdp_meta.judging.limits import tolerance
from pytest_fsdp_meta.judging.multiples import divides, number_of, whole
from pytest_fsdp_meta.judging.view import View

SAME, EXACT = 0.02, 1e-4
"""Relative: factors that differ by less are the same, and norms of gradients that nothing has changed."""


def explain_step(view: View, runs: Sequence[RankTraining], factor: float | None, right: bool = False) -> Explanation:
    """Return why the gradients of the author's first step are wrong; {} if nothing that was seen decides.

    ``factor`` is that of all gradients, if they have one, and ``right`` says that those of some parameters are.
    """
    if not (seen := _watched(runs)):
        return {}
    between = _unlike_backwards(seen) if factor is None else {}  # which makes no multiple of the right ones
    return between or explain_objective(view, runs, factor, right) or explain_scale(view, runs, factor)


def explain_objective(
    view: View, runs: Sequence[RankTraining], factor: float | None, right: bool = False
) -> Explanation:
    """Return how what the first step differentiates is not the declared loss of all rows; {} if that is not known."""
    if not (seen := _watched(runs)):
        return {}
    total, expected = _total(view, runs, seen), (view.reference.losses or (math.nan,))[0]
    ratio = total / expected if expected else math.nan
    allowed, multiples = max(SAME, tolerance(view, GRADIENT_TOLERANCE)), 0
    differs = abs(ratio - 1) > 3 * tolerance(view, LOSS_TOLERANCE)
    if differs and not right and not whole(ratio, SAME) and (of_own_rows := _explain_own_rows(view, runs)):
        return of_own_rows
    for run, own in zip(runs, seen, strict=True):
        tried = run.objective
        if tried is None or not math.isfinite(tried.residual + tried.loss + own.values[0]):
            continue
        if not tried.loss or not own.values[0]:  # as of a straight-through loss, which has a gradient
            continue
        value = own.values[0] / tried.loss
        if tried.residual > allowed:
            same = math.isclose(value, (own.pieces[0][1] - own.pieces[0][0]) / run.rows, rel_tol=SAME)
            if not same and not differs:  # a loss that contrasts with the rows of other ranks, and is right
                return {}
            values = f"of the first micro-batch, with the same weights, {own.values[0]:.4g} for {tried.loss:.4g}"
            cause = f"train_step differentiates another loss than Subject(loss=...), not a multiple of it: {values}"
            return _DETACHED if same else {"cause": cause, "remedy": _COMPARE}
        times = tried.factor / value
        # A loss that every rank returns for all may be reduced in one of the two places only.
        if abs(times - 1) > allowed and view.evidence.subject.loss_over_ranks != "same":
            if factor is None or not abs(times * ratio - factor) <= SAME * abs(factor):
                return {}
            cause = f"the gradient that train_step starts from is {times:.3g} times that of its loss"
            return {**_DETACHED, "cause": cause}
        multiples += 1
    is_wrong = factor is not None and abs(ratio - factor) <= abs(factor - 1) / 10  # it explains what is wrong
    if not is_wrong and not differs:
        return {}
    for run, own in zip(runs, seen, strict=True):
        if own.pieces and sorted(row for piece in own.pieces for row in range(*piece)) != [*range(run.rows)]:
            taken = ", ".join(f"{first} to {last - 1}" for first, last in own.pieces)
            cause = f"of the rows 0 to {run.rows - 1} that it gets, train_step trains on {taken}"
            return {"cause": cause, "remedy": "train once on each of them"}
    if is_wrong and (text := whole(ratio, SAME)):
        return _explain_constant(view, runs, text, len(seen[0].values))
    # A forward that departs adds up to another loss as well, and so does the scale of a GradScaler.
    if right or multiples < len(runs) or not _forward_agrees(view) or not 1 / 16 < ratio < 16:
        return {}
    return {
        "cause": "of the first micro-batch, train_step differentiates a multiple of Subject(loss=...), and in all "
        f"{total:.5g} for {expected:.5g}: each micro-batch or rank is divided by its own count, such as its labels, or "
        "has its own statistic; or a later one has another loss",
        "remedy": "divide by what Subject(loss=...) divides by, counted over all micro-batches and ranks",
    }


def _explain_own_rows(view: View, runs: Sequence[RankTraining]) -> Explanation:
    """Return the explanation if the loss of each rank is ``Subject(loss=...)`` of its rows, and its forward is right.

    Without a step of the author's, it always is. The losses of an author's step add up to it, and the gradients have
    the norm of its gradients.
    """
    own_rows = len(runs) > 1 and runs[0].data_parallel[1] == len(runs)
    if not own_rows or view.evidence.subject.loss_over_ranks != "mean" or not _forward_agrees(view):
        return {}
    for own, tried in ((run.first_backward, run.objective) for run in runs):
        if own is None:
            continue
        if tried is None:
            return {}
        (loss, norm), (norm_after_last, _) = tried.whole, own.norms[-2]
        apart, largest = abs(math.fsum(own.values) - loss), max(map(abs, (*own.values, loss)))
        if not (apart <= SAME * largest and abs(norm_after_last - norm) <= SAME * norm):  # NaN is not the same
            return {}
    return _OWN_ROWS


def _forward_agrees(view: View) -> bool:
    # Where a forward depends on the other rows, as by statistics of a batch, the noise has the difference of slices.
    calls, most = follow_step(view.evidence.traces or ())[0], tolerance(view, GRADIENT_TOLERANCE)
    return bool(calls) and all(one.state == AGREE and one.call.distance <= most for one in calls)


_OWN_ROWS: Explanation = {
    "cause": "each rank computes the loss of its own rows only, with statistics of those rows (a mean, deviation or "
    "count, or rows to contrast with): the forward is right, and the mean of these losses is not the loss of all rows",
    "remedy": "compute the statistics over the rows of all ranks; or, if those of a rank are meant, let "
    "Subject(loss=...) take the mean over blocks of as many rows as a rank has",
}


def explain_returned(view: View, runs: Sequence[RankTraining], returned: float) -> Explanation:
    """Return why the right loss is differentiated and not returned, or why it is that of own rows only; {} if not."""
    total, expected = _total(view, runs, _watched(runs)), (view.reference.losses or (math.nan,))[0]
    if not abs(total - expected) < abs(returned - expected) / 10:
        return _explain_own_rows(view, runs)
    cause = f"what train_step differentiates adds up to the right loss ({total:.5g}), and it returns another number"
    return {"cause": cause, "remedy": "return the mean of the loss over all the rows that train_step gets"}


def _watched(runs: Sequence[RankTraining]) -> list[FirstBackward]:
    """Return what was seen, if all ranks ran as many backwards; where modules draw, no other forward is the same."""
    seen = [run.first_backward for run in runs if run.first_backward is not None and not run.drawing]
    numbers = {len(own.values) for own in seen}
    return seen if len(seen) == len(runs) and len(numbers - {0}) == len(numbers) == 1 else []


def _total(view: View, runs: Sequence[RankTraining], seen: Sequence[FirstBackward]) -> float:
    """Return what the losses from which the backwards begin add up to over all rows; NaN if that is not known."""
    # Where a backward undoes another, what is added up is not known.
    if not seen or view.evidence.subject.loss_over_ranks == "sum" or _unlike_backwards(seen):
        return math.nan
    summed = tuple(replace(run, losses=(math.fsum(own.values),)) for run, own in zip(runs, seen, strict=True))
    return global_losses(replace(view.evidence, training=summed))[0]


_COMPARE = "compare its terms, their coefficients, the labels and their mask with those of Subject(loss=...)"
_DETACHED: Explanation = {
    "cause": "of the first micro-batch, train_step's loss is that of Subject(loss=...), and its gradient is not: a "
    "part of it is detached, or a collective in it passes no gradient on",
    "remedy": "compute it without detach(), and with collectives of torch.distributed.nn.functional",
}


def _explain_constant(view: View, runs: Sequence[RankTraining], text: str, backwards: int) -> Explanation:
    number, of_ranks = number_of(view, runs, text)
    labels = {run.data_parallel[0]: run.labels[0] for run in runs if run.labels}.values()
    means = {sum(own) / len(labels) for own in zip(*labels, strict=True)}
    known = {"the number of micro-batches": {backwards}, "the mean number of labels on a rank": means}
    of_step = next((name for name, numbers in known.items() if int(number) in numbers), "")
    said = (
        f"the losses that train_step differentiates add up to {text} {'of' if divides(text) else 'times'} the right one"
    )
    both = " and ".join(filter(None, (of_step, of_ranks)))
    return {
        "cause": f"{said} ({number} is {both})" if both else said,
        "cause_alone": f"{said} ({number} is {of_step})" if of_step else said,
        "remedy": "scale it once: accelerate's backward() divides by gradient_accumulation_steps, FSDP and DDP average "
        "over the ranks, and a loss that is divided by the tokens of all needs the number of ranks as a factor",
    }


def _unlike_backwards(seen: Sequence[FirstBackward]) -> Explanation:
    """Explain gradients that change between two backwards, or that a backward leaves as they are on every rank."""
    for number in range(2, min(len(own.norms) for own in seen) - 1, 2):
        which = f"backward {number // 2 + 1} of {len(seen[0].values)}"
        for own in seen:
            (ended, _), (before, scaled) = own.norms[number - 1 : number + 1]
            # Unless what was added up elsewhere is put into the gradients before the step.
            if ended and abs(before - ended) > EXACT * ended and (scaled or not before) and own.norms[-1][1]:
                done = f"scales gradients from norm {ended:.3g} to {before:.3g}" if before else "zeroes the gradients"
                remedy = "call zero_grad() only after the step of the optimizer, and clip after the last backward"
                return {"cause": f"train_step {done} before {which}", "remedy": remedy}
        given = all(own.values[number // 2] for own in seen)  # a micro-batch without labels adds nothing
        if given and all(own.norms[number][0] and own.norms[number][0] == own.norms[number + 1][0] for own in seen):
            cause = f"{which} adds nothing to the gradients, as where their reduction is off (no_sync())"
            return {"cause": cause, "remedy": "turn the reduction off for all backwards but the last"}
    return {}


CLIP_ONCE = "clip once, by the norm of all parameters on all ranks (with FSDP1, by the model's own clip_grad_norm_)"


def explain_scale(view: View, runs: Sequence[RankTraining], factor: float | None) -> Explanation:
    """Explain gradients by what scales them between the last backward and the step."""
    seen = _watched(runs)
    ends = [own.norms[-2:] for own in seen]
    scales = [stepped / ended for (ended, _), (stepped, scaled) in ends if ended and scaled]
    if not scales or not all(map(math.isfinite, scales)):
        return {}
    if max(scales) > (1 + SAME) * min(scales):
        each = f"{min(scales):.3g} to {max(scales):.3g}"
        cause = f"ranks scale their gradients unlike each other ({each}), as by the norm of each rank's own shards"
        return {"cause": cause, "remedy": CLIP_ONCE}
    bound, norm = view.evidence.subject.max_grad_norm, view.reference.norm_before_clipping
    due = bound / norm if bound and norm and norm > bound else 1.0
    explains = factor and abs(factor * due / scales[0] - 1) <= SAME  # else another scale came before that
    if not explains or abs(scales[0] / due - 1) <= SAME:
        return {}
    own = f"scales gradients by {scales[0]:.3g}" if abs(scales[0] - 1) > EXACT else "leaves gradients as they are"
    theirs = "the reference does not" if due == 1 else f"clipping to max_grad_norm={bound:g} scales them by {due:.3g}"
    bounded = f"{CLIP_ONCE}, to the bound that is declared"
    remedy = bounded if bound else "if train_step clips, declare Subject(max_grad_norm=<its bound>)"
    return {"cause": f"train_step {own} after the last backward, and {theirs}", "remedy": remedy}


def unless_by_author(view: View, otherwise: Explanation) -> Explanation:
    """Return the explanation; where a train_step is declared, that it may depart in any way."""
    return UNKNOWN_STEP if "train_step" in view.evidence.subject.declared else otherwise


UNKNOWN_STEP: Explanation = {
    "cause": "train_step differs from one backward of Subject(loss=...) in a way that was not found: in its rows, "
    "labels, mask or divisor, or in how gradients are scaled, clipped or reduced; or the forward differs",
    "remedy": "compare them with Subject(loss=...); if train_step clips, declare Subject(max_grad_norm=<its bound>)",
}
