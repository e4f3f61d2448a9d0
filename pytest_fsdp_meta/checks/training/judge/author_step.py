"""What a step of the author's does otherwise than one backward of Subject(loss=...), by what was seen and tried."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from pytest_fsdp_meta.checks.training.facts import FirstBackward, Objective, RankTraining
from pytest_fsdp_meta.checks.values.facts import GRADIENT_TOLERANCE, LOSS_TOLERANCE
from pytest_fsdp_meta.judging.findings import Explanation
from pytest_fsdp_meta.judging.limits import tolerance
from pytest_fsdp_meta.judging.multiples import divides, number_of, whole
from pytest_fsdp_meta.judging.view import View
from pytest_fsdp_meta.text import counted

Tried = Sequence[tuple[RankTraining, FirstBackward, Objective]]
SAME, EXACT = 0.01, 1e-4
"""Relative: factors that differ by less are the same, and norms of gradients that nothing has changed."""


def explain_step(view: View, runs: Sequence[RankTraining], factor: float | None = None) -> Explanation:
    """Return why the gradients of the author's first step are wrong; {} if nothing that was seen decides.

    ``factor`` is that of all gradients, if they have one.
    """
    return _unlike_backwards(runs) or explain_objective(view, runs, factor) or _changed_after(view, runs, factor)


def explain_objective(view: View, runs: Sequence[RankTraining], factor: float | None) -> Explanation:
    """Return how the loss that the first step differentiates is not the declared one; {} if that is not known."""
    seen = [(run, run.first_backward) for run in runs if run.first_backward is not None]
    for run, own in seen:
        if left := sorted(set(range(run.rows)).difference(*(range(*piece) for piece in own.pieces))):
            which = f"{counted(len(left), 'row')} of {run.rows}, from row {left[0]} on"
            return {"cause": f"train_step leaves out {which}", "remedy": "train on all the rows that train_step gets"}
    tried = [(run, own, run.objective) for run, own in seen if run.objective is not None]
    if not tried or len(tried) < len(runs):
        return {}
    allowed, found = max(SAME, tolerance(view, GRADIENT_TOLERANCE)), list[tuple[float, ...]]()
    for run, own, declared in tried:
        if not declared.losses[0]:
            return {}
        value, parts = own.value / declared.losses[0], _parts(runs, run, own, declared)
        times = value if math.isnan(declared.factor) else declared.factor
        if declared.residual > allowed or abs(value - times) > allowed * abs(times):
            return _other_objective(own, declared, math.isclose(value, parts[0], rel_tol=SAME))
        found.append(tuple(times / part if part else math.nan for part in parts))
    by_rows, *by_labels = (shares for shares in zip(*found, strict=True) if not any(map(math.isnan, shares)))
    if _alike(by_rows, 1):
        return next(_own_counts(tried, 3 * tolerance(view, LOSS_TOLERANCE)), Explanation())
    if any(_alike(shares, 1) for shares in by_labels):
        return {}
    for shares in (by_rows, *by_labels):
        if factor is not None and _alike(shares, factor):
            return _explain_constant(view, runs, tried, shares[0])
    least = min((by_rows, *by_labels), key=lambda shares: max(shares) - min(shares))
    if _alike(least, least[0]):
        return {}  # it may be the scale of a GradScaler
    each = f"by rank, it is {min(least):.3g} to {max(least):.3g} times its share of Subject(loss=...)"
    return {"cause": f"the loss that train_step differentiates has another divisor: {each}", "remedy": _DIVIDE}


def _alike(factors: Sequence[float], factor: float) -> bool:
    return all(abs(own - factor) <= 2 * SAME * abs(factor) for own in factors)


def _parts(runs: Sequence[RankTraining], run: RankTraining, own: FirstBackward, declared: Objective) -> list[float]:
    """Return what fraction of its rank's loss the first micro-batch is: by rows, and by the labels of all ranks."""
    size, of_slice = run.data_parallel[1], {other.data_parallel[0]: other.labels[0] for other in runs if other.labels}
    every = [sum(numbers) for numbers in zip(*of_slice.values(), strict=True)]
    by_labels = [size * own / whole if whole else 0.0 for own, whole in zip(declared.labels, every, strict=True)]
    return [(own.pieces[0][1] - own.pieces[0][0]) / run.rows, *by_labels]


def explain_returned(view: View, runs: Sequence[RankTraining], expected: float) -> Explanation:
    """Return the explanation if the first loss is wrong, and that of Subject(loss=...) on the ranks' rows is not."""
    losses = [run.objective.whole for run in runs if run.objective is not None]
    mean = math.fsum(losses) / len(runs)
    right = abs(mean - expected) <= 3 * tolerance(view, LOSS_TOLERANCE) * abs(expected)
    if len(losses) < len(runs) or view.evidence.subject.loss_over_ranks != "mean" or not right:
        return {}
    cause = f"Subject(loss=...) has the right mean over the ranks ({mean:.4g}), and train_step returns another number"
    return {"cause": cause, "remedy": "return the mean of the loss over all the rows that train_step gets"}


def _other_objective(own: FirstBackward, declared: Objective, same: bool) -> Explanation:
    if same:
        cause = "of the first micro-batch, train_step's loss is that of Subject(loss=...), and its gradient is not: "
        cause += "a part of it is detached, or a collective in it passes no gradient on"
        return {"cause": cause, "remedy": "compute it without detach(), and with torch.distributed.nn.functional"}
    return {
        "cause": "train_step differentiates another loss than Subject(loss=...), not a multiple of it: of the first "
        f"micro-batch, with the same weights, {own.value:.4g} for {declared.losses[0]:.4g}",
        "remedy": "compare its terms, their coefficients, the labels and their mask with those of Subject(loss=...)",
    }


def _own_counts(tried: Tried, allowed: float) -> Iterator[Explanation]:
    """Yield the explanation if the losses of the micro-batches do not add up to that of all rows."""
    for run, own, declared in tried:
        sizes = [last - first for first, last in own.pieces]
        mean = math.fsum(size * loss for size, loss in zip(sizes, declared.losses, strict=True)) / run.rows
        if abs(mean - declared.whole) > allowed * abs(declared.whole):
            cause = f"the mean of Subject(loss=...) over {len(sizes)} micro-batches is {mean:.4g}, and over all rows "
            cause += f"{declared.whole:.4g}: each is divided by its own count, as of labels, or has its own statistic"
            yield {"cause": cause, "remedy": _DIVIDE}


def _explain_constant(view: View, runs: Sequence[RankTraining], tried: Tried, share: float) -> Explanation:
    _, own, declared = tried[0]
    text = whole(share, SAME) or f"{share:.4g}"
    number, of_ranks = number_of(view, runs, text)
    of_step = "the number of micro-batches" if number == str(len(own.pieces)) else ""
    times = f"{text} of" if divides(text) else f"{text} times"
    said = f"the loss that train_step differentiates is {times} its share of Subject(loss=...)"
    if any(abs(declared.factor - count) <= SAME * count for count in declared.labels):
        said += f": it is the sum over {declared.factor:.0f} labels, not divided by their number"
    both = " and ".join(filter(None, (of_step, of_ranks)))
    return {
        "cause": f"{said} ({number} is {both})" if both else said,
        "cause_alone": f"{said} ({number} is {of_step})" if of_step else said,
        "remedy": SCALE_ONCE,
    }


_DIVIDE = "divide by what Subject(loss=...) divides by, counted over all micro-batches and ranks"
SCALE_ONCE = (
    "scale it once: accelerate's backward() divides by gradient_accumulation_steps, FSDP and DDP average over the "
    "ranks, and a loss that is divided by the tokens of all needs the number of ranks as a factor"
)


def _unlike_backwards(runs: Sequence[RankTraining]) -> Explanation:
    """Explain gradients that change between two backwards, or that a backward leaves as they are."""
    for run in runs:
        lengths = run.first_backward.lengths if run.first_backward is not None else ()
        for number in range(2, len(lengths) - 1, 2):
            (ended, _), (before, scaled), (after, _) = lengths[number - 1 : number + 2]
            which = f"backward {number // 2 + 1} of {len(lengths) // 2}"
            # Unless what was added up elsewhere is put into the gradients before the step.
            if ended and abs(before - ended) > EXACT * ended and (scaled or not before) and lengths[-1][1]:
                done = f"scales gradients from norm {ended:.3g} to {before:.3g}" if before else "zeroes the gradients"
                remedy = "call zero_grad() only after the step of the optimizer, and clip after the last backward"
                return {"cause": f"train_step {done} before {which}", "remedy": remedy}
            if before and before == after:
                cause = f"{which} adds nothing to the gradients, as where their reduction is off (no_sync())"
                return {"cause": cause, "remedy": "turn the reduction off for all backwards but the last"}
    return {}


def _changed_after(view: View, runs: Sequence[RankTraining], factor: float | None) -> Explanation:
    """Explain gradients by what scales them between the last backward and the step."""
    ends = [run.first_backward.lengths[-2:] for run in runs if run.first_backward is not None]
    scales = [stepped / ended for (ended, _), (stepped, scaled) in ends if ended and scaled]
    if not scales or len(ends) < len(runs):
        return {}
    if not _alike(scales, scales[0]):
        each = f"{min(scales):.3g} to {max(scales):.3g}"
        cause = f"ranks scale their gradients unlike each other ({each}), as by the norm of each rank's own shards"
        return {"cause": cause, "remedy": "clip by the norm of all ranks (torch.nn.utils.clip_grad_norm_)"}
    bound, norm = view.evidence.subject.max_grad_norm, view.reference.norm_before_clipping
    due = bound / norm if bound and norm and norm > bound else 1.0
    if not factor or abs(factor * due / scales[0] - 1) > 2 * SAME:
        return {}  # another scale before that, such as that of a GradScaler
    own = f"scales gradients by {scales[0]:.3g}" if abs(scales[0] - 1) > EXACT else "leaves gradients as they are"
    theirs = "the reference does not" if due == 1 else f"clipping to max_grad_norm={bound:g} scales them by {due:.3g}"
    cause = f"train_step {own} after the last backward, and {theirs}"
    remedy = "clip once before the step, by the norm of all ranks, to the bound that is declared"
    return {
        "cause": cause,
        "remedy": remedy if bound else "if train_step clips, declare Subject(max_grad_norm=<its bound>)",
    }


def unknown_step(view: View, runs: Sequence[RankTraining]) -> bool:
    """Return whether what the author's step differentiates is not known."""
    return "train_step" in view.evidence.subject.declared and not all(run.objective for run in runs)


UNKNOWN_STEP: Explanation = {
    "cause": "train_step takes gradients of another loss than Subject(loss=...), of other rows, or scales, clips or "
    "reduces them otherwise; which of these was not tried, because it is not known which rows its forwards get",
    "remedy": "compare labels, mask and divisor with those of Subject(loss=...), over all micro-batches and ranks; "
    "reduce once, after the last micro-batch; clip once, after the reduction, by the norm of all ranks",
}
