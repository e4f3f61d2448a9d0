"""Losses: those of N ranks equal those of one device, step by step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from pytest_fsdp_meta.checks.tracing.judge import FORWARD, describe_origin
from pytest_fsdp_meta.checks.training.judge.author_step import explain_objective, explain_returned, unless_by_author
from pytest_fsdp_meta.checks.training.judge.buffers import explain_buffers
from pytest_fsdp_meta.checks.training.judge.gradient_causes import explain_module
from pytest_fsdp_meta.checks.values.facts import LOSS_TOLERANCE
from pytest_fsdp_meta.evidence import RankTraining
from pytest_fsdp_meta.judging.expectations import sequence_places
from pytest_fsdp_meta.judging.findings import Explanation, Finding, either
from pytest_fsdp_meta.judging.gates import (
    BEFORE_UPDATES,
    add_precision,
    comparable_training,
    explain_plain_reference,
    explain_uneven_backwards,
    format_losses,
    global_losses,
    require_given,
    require_gradients,
    require_no_other_cause,
    require_whole_comparison,
    slice_losses,
)
from pytest_fsdp_meta.judging.limits import LossLimits, largest_of, loss_limits, relative_distance, require_noise
from pytest_fsdp_meta.judging.multiples import divides, number_of, whole
from pytest_fsdp_meta.judging.registry import training_check
from pytest_fsdp_meta.judging.view import View
from pytest_fsdp_meta.text import first_of, grouped, name_ranks

SAME_FACTOR = 0.1
"""Relative: how much the factors of later losses may differ from that of the first loss. A scaled loss has scaled
gradients, so every later step starts from other weights than the reference's."""
CHANCE = 0.1
"""Fraction: if the tolerance covers more of the interval between whole numbers, a whole factor may be a coincidence."""


@training_check(
    promise="the losses of N ranks equal the reference's at every step",
    uses=["values", "verifier"],
    after=[*BEFORE_UPDATES, "second_grad_parity", "update_parity"],
    why="A forward that differs, or a wrong average over the ranks' losses, shows nowhere but in the loss curve.",
    cause="the forward of the sharded model differs from the reference's",
    remedy="compare gradients and attention settings, and make the global loss a mean that weights all ranks correctly",
    references=["NVIDIA-NeMo/Automodel#2146", "pytorch/torchtune#2172"],
    tolerance=LOSS_TOLERANCE,
)
def loss_parity(view: View) -> Iterable[Finding]:
    runs = comparable_training(view)
    silent = tuple(rank for rank, run in enumerate(runs) if not any(run.losses))
    if view.evidence.subject.stages and 0 < len(silent) < len(runs):
        where = name_ranks(rank for rank in range(len(runs)) if rank not in silent)
        yield Finding(None, silent, "loss 0 in every step", f"that of {where}", **_ON_ONE_STAGE)
        return
    expected, actual = view.reference.losses or (), global_losses(view.evidence)
    limits = loss_limits(view)
    wrong_steps = [step for step in range(len(expected)) if limits.exceeded(actual, expected, step)]
    # If all ranks have the same wrong loss at one step, a disagreement at a later step follows from that error.
    subject = view.evidence.subject
    # Ranks with the same rows may have different losses where the author assigned the rows: the mesh that splits the
    # sequence may be one that no parameter lies on.
    may_differ = "data_parallel" in subject.declared and subject.loss_over_ranks != "same"
    last = min(wrong_steps, default=-1 if may_differ else len(expected))
    disagreements = [found for found in _disagreements(view, runs, limits) if found[2] <= last] if last >= 0 else []
    if not wrong_steps and not disagreements:
        require_gradients(view)
        errors = (relative_distance(actual, expected, step) for step in range(len(expected)))
        require_noise(view, LOSS_TOLERANCE, errors)
        require_whole_comparison(view)
        return
    if wrong_steps:
        message = _describe_step(wrong_steps[0], actual, expected)
    else:
        rank, other, step = disagreements[0]
        message = _describe_step(step, runs[rank].losses, runs[other].losses)
    first = min([*wrong_steps, *(step for _, _, step in disagreements)])
    require_no_other_cause(view, f"the losses differ ({message})", first_forward=first == 0)
    origin = describe_origin(view.evidence.traces, (FORWARD,), step=first)
    alike = grouped(((other, step, runs[rank].losses), rank) for rank, other, step in disagreements)
    reported = (_report_disagreement(view, runs, ranks, *where) for (*where, _), ranks in alike.items())
    yield from (replace(finding, origin=origin) for finding in reported)
    if not wrong_steps:
        return
    step = wrong_steps[0]
    require_given(view, f"the losses differ ({message})")
    allowed = limits.at(expected, step)
    ours, theirs = _distinct_digits(actual[step], expected[step])
    yield Finding(
        None,
        tuple(range(len(runs))),
        f"loss {ours} at step {step}",
        f"{theirs} within {allowed * largest_of(expected):.2g}",
        f"losses {format_losses(actual)}; reference {format_losses(expected)}",
        origin=origin,
        step=step,
        **_explain_losses(view, step, runs, allowed),
    )


def _disagreements(view: View, runs: Sequence[RankTraining], limits: LossLimits) -> list[tuple[int, int, int]]:
    """Return (rank, first rank that should have the same loss, first step at which their losses differ).

    The mean over ranks can hide such differences, since they may cancel.
    """
    places, all_same = sequence_places(view.evidence), view.evidence.subject.loss_over_ranks == "same"
    first: dict[object, tuple[int, RankTraining]] = {}
    found = []
    for rank, run in enumerate(runs):
        # Ranks along a sequence dimension see other parts of the same rows, so only the mean of their losses is known.
        tokens = () if all_same else (run.data_parallel[0], places[rank])
        other, same = first.setdefault(tokens, (rank, run))
        finite = [step for step in range(len(run.losses)) if math.isfinite(run.losses[step] + same.losses[step])]
        different = [step for step in finite if limits.exceeded(run.losses, same.losses, step)]
        found += [(rank, other, step) for step in different[:1]]
    return found


def _report_disagreement(
    view: View, runs: Sequence[RankTraining], ranks: Sequence[int], other: int, step: int
) -> Finding:
    losses = runs[ranks[0]].losses
    ours, theirs = _distinct_digits(losses[step], runs[other].losses[step])
    declared_same = view.evidence.subject.loss_over_ranks == "same"
    why = "because every rank returns the global loss" if declared_same else "which sees the same rows"
    return Finding(
        None,
        tuple(ranks),
        f"loss {ours} at step {step}",
        f"{theirs}, as on rank {other}, {why}",
        f"losses {format_losses(losses)}; rank {other} {format_losses(runs[other].losses)}",
        step=step,
        **(_explain_not_global(runs, step) if declared_same else _DIVERGED if step else _IN_PARTS),
    )


_ON_ONE_STAGE: Explanation = {
    "cause": "one stage of the pipeline computes the loss, and train_step returns 0 on the others",
    "remedy": "send it to the other stages before returning it: dist.broadcast(loss, group=..., group_src=...)",
}
_DIVERGED: Explanation = {
    "cause": "ranks of one data-parallel slice compute different outputs: their replicas diverged, or a "
    "tensor-parallel layer does not reduce its output",
    "remedy": "compare the parameters of these ranks, and the output layouts of the tensor-parallel plan; if they see "
    "different parts of the sequence, name that mesh dimension cp",
}
_IN_PARTS: Explanation = {
    "cause": "ranks of one data-parallel slice compute different outputs from equal weights: a sum, mean or size is "
    "that of the rank's part (of the vocabulary, a layer or the sequence) and is not reduced",
    "remedy": "reduce it over the ranks that share the model, and compare the output layouts of the tensor-parallel "
    "plan; if they see different parts of the sequence, name that mesh dimension cp",
}
_NOT_GLOBAL: Explanation = {
    "cause": "the loss is not reduced over all ranks: each rank returns the loss of its own rows",
    "remedy": "reduce the loss over all data-parallel ranks before it is returned, or declare "
    'Subject(loss_over_ranks="mean") or "sum"',
}


def _explain_not_global(runs: Sequence[RankTraining], step: int) -> Explanation:
    """Name the groups of ranks with one loss, if some have ranks with different rows."""
    by_loss = grouped((run.losses[step], rank) for rank, run in enumerate(runs))
    if not any(len({runs[rank].data_parallel for rank in ranks}) > 1 for ranks in by_loss.values()):
        return _NOT_GLOBAL
    groups = " and one on ".join(map(name_ranks, by_loss.values()))
    cause = f"the loss is reduced over some of the data-parallel ranks only: one loss is on {groups}"
    return {**_NOT_GLOBAL, "cause": cause}


def _explain_losses(view: View, first: int, runs: Sequence[RankTraining], allowed: float) -> Explanation:
    """Return the first explanation that applies to losses that differ from step ``first`` on."""
    uneven = explain_uneven_backwards(view, first)
    if first > 0:
        known = uneven or explain_plain_reference(view) or explain_buffers(view, runs)
        return known or add_precision(view, _STATE_BETWEEN_STEPS)
    if view.evidence.subject.loss_over_ranks == "mean" and _weighting_by_labels_explains(view, runs, allowed):
        return _OWN_LABELS
    ours, theirs = global_losses(view.evidence)[0], (view.reference.losses or (math.nan,))[0]
    explanation = (
        _explain_draws(runs)
        or explain_objective(view, runs, ours / theirs if theirs else None)
        or _explain_multiple(view, runs, allowed)
        or uneven
        or explain_module(view)
        or explain_returned(view, runs, ours)
    )
    return explanation or add_precision(view, unless_by_author(view, _OTHER_FORWARD))


def _explain_draws(runs: Sequence[RankTraining]) -> Explanation:
    drawing = list(dict.fromkeys(name for run in runs for name in run.drawing))
    if not drawing:
        return {}
    return {
        "cause": f"random numbers are drawn (in {first_of(drawing)}) although dropout is off when losses are compared, "
        "so the outputs differ from the reference's by chance",
        "remedy": "call dropout as torch.nn.functional.dropout, not by a name that was imported from there, so that it "
        "can be switched off; if a loss needs noise, take it from batch(step)",
    }


_OWN_LABELS: Explanation = {
    "cause": "each rank averages over its own labels, and the ranks have different numbers of labels (-100 does not "
    "count): weighted by these numbers, the ranks' losses give the reference's loss",
    "remedy": "divide each rank's summed loss by the number of labels in the global batch, and multiply it by the "
    "number of data-parallel ranks, because gradients are averaged over them",
}
_OTHER_FORWARD = either(
    "the first forward already differs although the weights are equal: ",
    "a module is missing, replaced, random or configured differently (attention, scale, activation, precision)",
    "a rank gets other rows or tokens than it should, or losses or parts of ranks are not put together correctly",
    "compare attention settings, and make the global loss a mean that weights all ranks correctly; if the loader uses "
    "another precision on purpose, set tolerance=...",
)


_STATE_BETWEEN_STEPS: Explanation = {
    "cause": "the first forward and its gradients are correct, later losses are not: something changes between the "
    "steps, such as a buffer or a cache that the forward updates on each rank separately",
    "remedy": "compare the state that the forward keeps between steps with the reference's",
}


def _explain_multiple(view: View, runs: Sequence[RankTraining], allowed: float) -> Explanation:
    """Explain a first loss that is a whole multiple of the reference's, with later losses close to that multiple."""
    pairs = list(zip(global_losses(view.evidence), view.reference.losses or (), strict=True))
    factors = [ours / theirs if theirs and math.isfinite(ours) else math.nan for ours, theirs in pairs]
    if not factors[0] > 0 or not all(abs(later / factors[0] - 1) <= SAME_FACTOR for later in factors):
        return {}
    summed = view.evidence.subject.loss_over_ranks == "sum"
    if summed and (explanation := _explain_sum(view, runs, factors[0], allowed)):
        return explanation
    factor = whole(factors[0], max(allowed, LOSS_TOLERANCE["float64"]))
    number, meaning = number_of(view, runs, factor)
    if not factor or (not meaning and int(number) * allowed > CHANCE):
        return {}
    scaled = f"the loss is {factor} {'of' if divides(factor) else 'times'} the reference's in every step"
    in_ranks = f" ({number} is {meaning})" if meaning else ""
    of_ranks, of_one = _SCALED_LOSS[divides(factor)]
    shares = "" if summed or not meaning or not divides(factor) else _SHARES
    remedy = "make each rank's loss the mean over its own rows, without a factor for ranks, rows or micro-batches"
    return {
        "cause": f"{scaled}{in_ranks}: {of_ranks if meaning else ''}{of_one}",
        "remedy": f"{remedy}{shares}",
        "cause_alone": f"{scaled}: {of_one}",
    }


def _explain_sum(view: View, runs: Sequence[RankTraining], factor: float, allowed: float) -> Explanation:
    """Explain losses whose declared sum is about as many times the reference's as there are ranks, else return {}.

    Means over rows with different numbers of labels do not add up to a whole multiple.
    """
    number, meaning = number_of(view, runs, whole(factor, SAME_FACTOR))
    if not meaning or factor < 1:
        return {}
    about = "" if whole(factor, allowed) else "about "
    times = (
        f"the sum of the ranks' losses is {about}{number} times the reference's in every step ({number} is {meaning})"
    )
    first = [losses[0] for losses in slice_losses(runs).values()]
    if max(first) - min(first) <= allowed * abs(max(first)):
        return {
            "cause": f"{times}: each rank's loss is the global loss itself, not a share of it",
            "remedy": 'declare Subject(loss_over_ranks="same")',
        }
    return {
        "cause": f"{times}: the ranks' losses are means over their own rows, not shares of the global loss",
        "remedy": 'declare Subject(loss_over_ranks="mean") (the default), or return shares: sums over own rows, '
        "divided by the count of the global batch",
    }


_SCALED_LOSS = {
    True: (
        "each rank divides its sum by the count of the global batch instead of its own, or ",
        "the loss is divided once too often (by the number of micro-batches, ranks or rows)",
    ),
    False: (
        "the ranks' losses are summed or multiplied by the number of ranks, or ",
        "the loss is summed over rows or micro-batches while the reference takes the mean, or multiplied by a constant",
    ),
}
"""The causes of a scaled loss that take several ranks and those that do not, by whether it is too small."""
_SHARES = '; or declare Subject(loss_over_ranks="sum") if the ranks\' losses add up to the global loss'


def _weighting_by_labels_explains(view: View, runs: Sequence[RankTraining], allowed: float) -> bool:
    """Return whether the first losses, weighted by each slice's number of labels, average to the reference's."""
    labels_of = {run.data_parallel[0]: run.labels[0] for run in reversed(runs) if run.labels}
    losses = {index: curve[0] for index, curve in slice_losses(runs).items()}
    expected = view.reference.losses or ()
    for kind in (0, 1):
        weights = {index: labels[kind] for index, labels in labels_of.items()}
        if len(set(weights.values())) > 1 and weights.keys() == losses.keys():
            weighted = math.fsum(weights[i] * losses[i] for i in weights if weights[i]) / sum(weights.values())
            if relative_distance([weighted], expected, 0) <= allowed:
                return True
    return False


def _distinct_digits(actual: float, expected: float) -> tuple[str, str]:
    """Format both numbers with as many digits as distinguish them, but at least four."""
    for digits in range(4, 17):
        formatted = f"{actual:.{digits}g}", f"{expected:.{digits}g}"
        if formatted[0] != formatted[1]:
            break
    return formatted


def _describe_step(step: int, actual: Sequence[float], expected: Sequence[float]) -> str:
    error = relative_distance(actual, expected, step)
    return f"step {step}: {actual[step]:.6f}, but should be {expected[step]:.6f}, relative error {error:.2g}"
