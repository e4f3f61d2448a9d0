"""Gradients: the gradients of N ranks equal those of one device on the whole batch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from pytest_fsdp_meta.checks.tracing.judge import describe_origin, explain_settings
from pytest_fsdp_meta.checks.training.judge.author_step import UNKNOWN_STEP, explain_step
from pytest_fsdp_meta.checks.training.judge.gradient_causes import (
    CONSTANT,
    backward_order,
    explain_factor,
    explain_module,
    explain_other,
    find_wrong_norm,
    unreduced_gradients,
)
from pytest_fsdp_meta.checks.values.facts import GRADIENT_TOLERANCE
from pytest_fsdp_meta.evidence import Comparison, Measure, RankTraining
from pytest_fsdp_meta.judging.causes import Cases
from pytest_fsdp_meta.judging.findings import Explanation, Finding
from pytest_fsdp_meta.judging.gates import (
    EXPLAINING_CHECKS,
    comparable_training,
    require_gradients,
    unless_explained,
)
from pytest_fsdp_meta.judging.limits import Limits, describe_length, gradients_beyond_rounding, limits_of
from pytest_fsdp_meta.judging.multiples import ROUNDING, multiple, whole
from pytest_fsdp_meta.judging.registry import training_check
from pytest_fsdp_meta.judging.view import PartlyJudged, View
from pytest_fsdp_meta.text import grouped

SCALED = 0.05
"""Fraction: gradients before clipping that are off by less have no wrong scale."""
ALIKE = 0.25
"""Fraction: weights that differ from the reference's by this much of their move may have gradients of another scale."""
FAR = 3
"""A factor of all gradients is named if its distance from 1 is this many times the error of their direction. A smaller
one may be noise."""


@training_check(
    promise="each gradient equals the reference's in direction and size",
    uses=["values", "verifier"],
    after=[*EXPLAINING_CHECKS, "forward_sees_current_weights"],
    why="Gradients that are scaled or not reduced train a worse model that looks fine; Adam hides a wrong scale.",
    cause="the gradient is not the mean over the whole batch: some ranks are left out of its reduction or count twice",
    remedy="compare how the gradient of this parameter is reduced with a parameter whose gradient is correct",
    references=[
        "NVIDIA/Megatron-LM#5956",
        "pytorch/torchtitan#4332",
        "verl-project/verl#7835",
        "NVIDIA-NeMo/Automodel#2146",
    ],
    tolerance=GRADIENT_TOLERANCE,
)
def grad_parity(view: View) -> Iterable[Finding]:
    runs = comparable_training(view)
    clipping = find_wrong_norm(view, runs)
    rightly, known = (runs, None) if clipping is None else (clipping.taken_out(runs), Explanation())
    unreduced = list(unreduced_gradients(view, rightly))
    yield from (replace(finding, step=0) for finding in unreduced)
    reported = {finding.tensor for finding in unreduced}
    found: Sequence[Finding] = [one for one in _wrong_gradients(view, rightly, known) if one.tensor not in reported]
    found = [*found, *_gradients_of_ranks_only(view, runs)]
    if clipping is not None:
        culprit = next((finding.tensor or "" for finding in (*unreduced, *found)), "")
        reported |= {finding.tensor for finding in found}
        scaled = _wrong_gradients(view, runs, clipping.explain(view, runs, culprit))
        found = [*found, *(finding for finding in scaled if finding.tensor not in reported)]
    if unreduced and not found:
        return
    if not found:
        require_gradients(view)
        yield from _scaled_before_clipping(view, runs)
    compared = (c for run in runs for c in run.gradients)
    if found := unless_explained(view, runs, found, "the gradients differ", compared, GRADIENT_TOLERANCE):
        departing = {finding.tensor for finding in found if finding.tensor}
        origin = describe_origin(view.evidence.traces)
        if departing and departing <= view.tied_over_stages:
            found = [finding.explained_by(_TIED_OVER_STAGES) for finding in found]
        elif before := [*_scaled_below_the_bound(view, runs)]:
            found = [*before, *(finding.explained_by(before[0].explanation) for finding in found)]
        elif configured := explain_settings(view.evidence.traces, departing):
            found = [finding.explained_by(configured) for finding in found]
        elif module := explain_module(view):
            found = [finding if finding.cause_alone == CONSTANT else finding.explained_by(module) for finding in found]
        yield from (replace(finding, origin=origin, step=0) for finding in found)
    else:
        bound, norm = view.evidence.subject.max_grad_norm, view.reference.norm
        by_author = "clip_grad_norm" in view.evidence.subject.declared  # perhaps by another norm
        if bound is not None and norm is not None and norm < 0.99 * bound and not by_author:
            raise PartlyJudged(
                f"the norm of the first gradients is {norm:.3g}, below max_grad_norm={bound:g}, so nothing is clipped; "
                f"in this test, clip to less than {norm:.3g}"
            )
        if refused := next((run.unclipped_refused for run in runs if run.unclipped_refused), ""):
            raise PartlyJudged(
                f"clipping hides a wrong scale, and one more step with small gradients raised {refused}; let "
                "train_step run more steps in this test"
            )
        if all(run.unclipped for run in runs) and not _moved_apart(runs) <= ALIKE:
            raise PartlyJudged(
                "the weights moved differently from the reference's, so the gradients before clipping were not "
                "compared, and clipping hides their scale; compute in float32 in this test"
            )


_TIED_OVER_STAGES: Explanation = {
    "cause": "the stages of the pipeline do not add up the gradients of a weight that they share, such as that of the "
    "embedding and of the head",
    "remedy": "add up the gradients of all its copies before the optimizer steps",
}


def _scaled_before_clipping(view: View, runs: Sequence[RankTraining]) -> Iterator[Finding]:
    """Report gradients that are right after clipping, and were the same multiple of the reference's before."""
    if (factor := _factor_before_clipping(view, runs)) is not None:
        detail = "the clipped ones are equal, as long as their norm exceeds the bound"
        explanation = explain_step(view, runs, factor) or UNKNOWN_STEP
        yield Finding(None, tuple(range(len(runs))), _describe_before(factor), "equal", detail, step=0, **explanation)


def _factor_before_clipping(view: View, runs: Sequence[RankTraining]) -> float | None:
    """Return by what all gradients were multiplied before train_step clipped them; None if that is 1 or not known.

    Clipping hides it while the norm exceeds the bound. Weights that have moved otherwise have other gradients.
    """
    if not all(run.unclipped for run in runs):
        return None  # undeclared, or gradients that do not follow the scale of the backward on some rank
    measures = [c.measure for run in runs for c in run.unclipped if c.measure is not None and view.judgeable(c.name)]
    apart = _moved_apart(runs)
    if not apart <= ALIKE or not all(math.isfinite(m.apart) for m in measures):
        return None
    factor, residual = _common_factor(measures)
    # Weights that moved 20% less may have gradients that are 8% larger.
    elsewhere = apart if apart > SCALED else 0.0
    return factor if abs(factor - 1) > max(SCALED, FAR * residual, elsewhere) else None


def _moved_apart(runs: Sequence[RankTraining]) -> float:
    """Return how far the weights moved apart from the reference's, as a fraction of how far those moved."""
    updates = [c.measure for run in runs for c in run.parameters if c.measure is not None]
    moved = math.fsum(measure.truth**2 for measure in updates)
    apart = math.fsum(measure.apart**2 for measure in updates)
    if not apart:
        return 0.0
    return math.sqrt(apart / moved) if moved else math.inf


def _common_factor(measures: Sequence[Measure]) -> tuple[float, float]:
    """Return the factor of all gradients together, and how far they are from that multiple; (1, 0) of none."""
    square = math.fsum(measure.truth**2 for measure in measures)
    if not square > 0:
        return 1.0, 0.0
    factor = math.fsum(measure.dot for measure in measures) / square
    others = math.fsum(measure.actual**2 for measure in measures) - factor**2 * square
    return factor, math.sqrt(max(others, 0.0) / square)


def _describe_before(factor: float) -> str:
    power = 2.0 ** round(math.log2(factor))
    if power >= 1024 and abs(factor - power) <= SCALED * power:  # the scale of a GradScaler
        return f"gradients before clipping are {power:.0f} times the reference's"
    return f"gradients before clipping are {whole(factor, SCALED) or f'{factor:.3g}'} times the reference's"


def _scaled_below_the_bound(view: View, runs: Sequence[RankTraining]) -> Iterator[Finding]:
    """Report what the gradients were before clipping, if that alone explains those after it.

    Their norm is then below the bound, to which the reference clips.
    """
    bound, norm = view.evidence.subject.max_grad_norm, view.reference.norm_before_clipping
    if bound is None or norm is None or (factor := _factor_before_clipping(view, runs)) is None:
        return
    if not 0 < factor * norm < bound < norm:
        return
    left, _ = _common_factor([c.measure for run in runs for c in run.gradients if c.measure is not None])
    if abs(left * bound / (factor * norm) - 1) <= 2 * SCALED:
        detail = f"their norm is below max_grad_norm={bound:g}, to which the reference clips"
        explanation = explain_step(view, runs, factor) or UNKNOWN_STEP
        yield Finding(None, tuple(range(len(runs))), _describe_before(factor), "equal", detail, **explanation)


def _wrong_gradients(view: View, runs: Sequence[RankTraining], known: Explanation | None) -> Iterator[Finding]:
    """Report gradients that are missing or differ from the reference's; ``known`` says why, instead of the step."""
    limits = limits_of(view, "gradients")
    order = backward_order(view)  # those first whose gradients the backward completes first
    names = sorted(view.names("parameter", only=view.reference.gradients), key=lambda n: order.get(n, len(order)))
    due = gradients_beyond_rounding(view)
    pairs = view.comparisons(tuple(run.gradients for run in runs), names)
    excused = excused_gradients(view, runs)
    none = len(names) > 1 and all(set(names) <= set(run.without_gradient) for run in runs)
    sharpest = _sharpest_factors(pairs, limits)
    measures = [c.measure for cases in pairs.values() for _, c in cases if c.measure is not None]
    factor, left = _common_factor(measures) if all(math.isfinite(m.apart) for m in measures) else (1.0, math.inf)
    right = any(not any(limits.exceeded(*case) for case in pairs[name]) for name in due & pairs.keys())
    common = factor if left <= max(SCALED, limits.relative) * abs(factor) else None
    by_step = explain_step(view, runs, common, right) if known is None else known
    for name in names:
        missing = tuple(rank for rank, run in enumerate(runs) if name in run.without_gradient)
        if missing and name in due:
            explanation = _REDUCTION_OFF if none else _MISSING
            yield Finding(name, missing, "no gradient, although the reference has one", "", **explanation, certain=True)
        wrong = [(rank, c) for rank, c in pairs.get(name, []) if limits.exceeded(rank, c)]
        if wrong and name not in excused:
            yield from _describe_wrong(view, runs, name, wrong, limits, sharpest, by_step)


def _gradients_of_ranks_only(view: View, runs: Sequence[RankTraining]) -> Iterator[Finding]:
    """Report gradients of parameters on which the reference's loss does not depend, though they train there as well."""
    trained = {t.name for t in view.reference_inventory.tensors if t.requires_grad} - view.reference.gradients.keys()
    sizes = grouped((name, (rank, size)) for rank, run in enumerate(runs) for name, size in run.only_here.items())
    for name in view.names("parameter", only=trained & sizes.keys()):
        ranks, detail = tuple(rank for rank, _ in sizes[name]), f"root mean square {sizes[name][0][1]:.3g}"
        actual = "a gradient, although the reference has none"
        yield Finding(name, ranks, actual, "", detail, **_ONLY_HERE, certain=True)


_ONLY_HERE: Explanation = {
    "cause": "the loss depends on it on the ranks alone: train_step adds a term that Subject(loss=...) lacks, or the "
    "reference's forward leaves this part out",
    "remedy": "give Subject(loss=...) the same terms, of its argument alone, and the reference the same forward",
}


def _sharpest_factors(pairs: Mapping[str, Cases], limits: Limits) -> dict[int, tuple[float, str]]:
    """Return for each rank the factor of all its wrong gradients that is known best, with its text.

    In low precision, a small gradient that is 1.8 times too large may pass for one that is twice too large.
    """
    found: dict[int, tuple[float, float, str]] = {}
    for cases in pairs.values():
        wrong = [(rank, c) for rank, c in cases if limits.exceeded(rank, c)]
        allowed = limits.relative_to(wrong) if wrong else 1.0
        for rank, c in wrong if allowed < 1 else ():
            assert c.measure is not None
            if c.measure.factor > 0 and (text := multiple(c.measure, allowed)):
                found[rank] = min(found.get(rank, (1.0, 0.0, "")), (allowed, c.measure.factor, text))
    return {rank: (factor, text) for rank, (_, factor, text) in found.items()}


def _partial_gradients(view: View) -> set[str]:
    """Return the names of distinct parameters that share storage: each has the gradient of its own uses only."""
    found: set[str] = set()
    for rank in view.evidence.inventory:
        for tensors in grouped((tensor.storage, tensor) for tensor in rank.tensors if tensor.storage).values():
            if len({tensor.identity for tensor in tensors}) > 1:
                found.update(tensor.name for tensor in tensors)
    return found


def excused_gradients(view: View, runs: Sequence[RankTraining]) -> set[str]:
    """Return the parameters whose gradients before the optimizer's step need not equal the reference's."""
    return _partial_gradients(view) | set(reduced_by_the_optimizer(view, runs))


def reduced_by_the_optimizer(view: View, runs: Sequence[RankTraining]) -> list[str]:
    """Return the parameters whose gradients differ only until the optimizer, or a hook of its step, reduces them."""
    limits, names = limits_of(view, "gradients"), view.names("parameter", only=view.reference.gradients)
    pairs = view.comparisons(tuple(run.gradients for run in runs), names)
    updates = view.comparisons(tuple(run.parameters for run in runs), names)
    off = [name for name, cases in pairs.items() if any(limits.exceeded(rank, c) for rank, c in cases)]
    return [name for name in off if _optimizer_reduces(view, name, pairs[name], updates.get(name, []))]


def _optimizer_reduces(view: View, name: str, gradients: Cases, updates: Cases) -> bool:
    """Return whether the optimizer reduced a replicated parameter's gradients, so that its update is correct.

    Adam's step depends on the sign only, so gradients that are a multiple of the reference's on every rank do not
    count as reduced, even where the update is correct.
    """
    placements = {p for _, t in view.holders(name) for p in t.placements or ()}
    if placements - {"R"}:
        return False
    moved = [comparison.measure for _, comparison in updates if comparison.measure]
    measured = [comparison.measure for _, comparison in gradients if comparison.measure]
    limits = limits_of(view, "updates")
    unreduced = len(view.evidence.inventory) > 1 and any(m.residual > ROUNDING for m in measured)
    if not unreduced or not moved or any(limits.exceeded(rank, c) for rank, c in updates):
        return False
    # An update that noise could change by half of its length proves nothing.
    known = [(rank, c.measure) for rank, c in updates if c.measure is not None and c.measure.elements]
    return all(limits.allowed(rank, name, m) < m.truth / 2 for rank, m in known)


def _describe_wrong(
    view: View,
    runs: Sequence[RankTraining],
    name: str,
    wrong: Cases,
    limits: Limits,
    sharpest: Mapping[int, tuple[float, str]],
    by_step: Explanation,
) -> Iterator[Finding]:
    """Yield a finding for each constant factor that ranks are off by, and one for ranks without such a factor."""
    allowed = limits.relative_to(wrong)
    # A gradient of nothing but rounding is many times that of the reference, and no factor says why.
    may_have_factor = allowed < 1
    by_factor: dict[str, list[tuple[int, Comparison]]] = {}
    for rank, c in wrong:
        assert c.measure is not None
        text = multiple(c.measure, allowed) if may_have_factor else ""
        factor, known = sharpest.get(rank, (0.0, ""))
        if text and factor and abs(c.measure.factor / factor - 1) <= allowed:
            text = known
        by_factor.setdefault(text, []).append((rank, c))
    for text, cases in by_factor.items():
        ranks = tuple(rank for rank, _ in cases)
        by_numbers = explain_factor(view, runs, name, text) if text else explain_other(view, name, cases)
        explanation = by_step or by_numbers
        actual = f"gradient is {text} times the reference's" if text else "gradient differs from the reference's"
        detail = "" if text else describe_error(limits, cases)
        yield Finding(name, ranks, actual, limits.describe(cases), detail, **explanation)


def describe_error(limits: Limits, cases: Cases) -> str:
    """Describe the error of the rank whose gradient is farthest off, or its length if only lengths are.

    The element is the one that is farthest off: most others may differ by little.
    """
    if limits.only_scaled(cases):
        return describe_length(cases)
    rank, worst = max(cases, key=lambda case: case[1].relative)
    off = f"relative error {worst.relative:.2g}; " if math.isfinite(worst.relative) else ""
    element = worst.farthest
    if element is None:  # gradients that are NaN on both sides have no other element
        return off.rstrip("; ") or f"not finite on rank {rank}"
    place = f" at [{', '.join(map(str, element.index))}]" if element.index else ""
    return f"{off}{element.actual:.6g}{place} on rank {rank}, but should be {element.expected:.6g}"


_MISSING: Explanation = {
    "cause": "the loss does not depend on it: its output is detached, it is used under no_grad (as in reentrant "
    "checkpointing of a part whose input needs no gradient), or the module computes with another tensor than the "
    "parameter it registers",
    "remedy": "use the registered parameter in the forward, without detach() or no_grad() around it; checkpoint with "
    "use_reentrant=False",
}
_REDUCTION_OFF: Explanation = {
    "cause": "no parameter has a gradient: the reduction is turned off and never on again "
    "(set_requires_gradient_sync(False), set_requires_all_reduce(False)), train_step calls zero_grad() between the "
    "backward and the step, hooks step an optimizer that is not declared, or the loss depends on no parameter",
    "remedy": "turn the reduction on for every FSDP module before the backward whose gradients the optimizer uses",
}
