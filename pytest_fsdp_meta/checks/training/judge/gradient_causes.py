"""Why a gradient is not the reference's: the module where the forward departs, its factor, its place, the backward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod, sqrt
from statistics import median_low

from pytest_fsdp_meta.checks.sharding.facts import is_expert, splits_batch, splits_model
from pytest_fsdp_meta.checks.tracing.judge import FORWARD, explain_numbers, explain_settings, find_place
from pytest_fsdp_meta.checks.training.judge.author_step import CLIP_ONCE, explain_scale, unless_by_author
from pytest_fsdp_meta.evidence import Comparison, RankTraining
from pytest_fsdp_meta.judging.causes import Cases
from pytest_fsdp_meta.judging.findings import Explanation, Finding, either
from pytest_fsdp_meta.judging.gates import add_precision, explain_uneven_backwards
from pytest_fsdp_meta.judging.limits import limits_of
from pytest_fsdp_meta.judging.multiples import ROUNDING, SLIGHT, divides, number_of
from pytest_fsdp_meta.judging.view import View, ranks_by


def explain_module(view: View) -> Explanation:
    """Explain losses and gradients by the module in whose forward the first step departs; return {} if none does.

    If nothing departs by more than rounding, a number that modules have otherwise may explain them.
    """
    traces = view.evidence.traces
    place = find_place(traces) if traces and not traces[0].step else None
    if place is None:
        return explain_numbers(traces)
    if place.phase != FORWARD or not (place.module or (place.before and place.before[1])):
        return {}  # with neither, it departs where there is a loss already
    return explain_settings(traces) or add_precision(view, _OTHER_MODULE)


def explain_factor(view: View, runs: Sequence[RankTraining], name: str, factor: str) -> Explanation:
    if factor == "0":
        return _ZERO
    number, meaning = number_of(view, runs, factor, name)
    if not meaning:
        return explain_uneven_backwards(view) or unless_by_author(view, {"cause": CONSTANT, "remedy": _UNSCALED})
    counted = f"({number} is {meaning})"
    if not divides(factor):
        facts = [tensor for _, tensor in view.holders(name)]
        keep = "keep FSDP2's default gradient divide factor, " * any(t.managed is not None for t in facts)
        remedy = _DIVIDE_EXPERTS if any(map(is_expert, facts)) else keep + _AVERAGE
        cause = f"summed instead of averaged {counted}"
    elif (over := view.evidence.subject.loss_over_ranks) != "mean":
        cause = (
            f"divided once too often {counted}: what the ranks differentiate adds up "
            f'(loss_over_ranks="{over}"), and their gradients are averaged'
        )
        remedy = (
            "call set_gradient_divide_factor(1.0) on every FSDP module, not only on the root; with gloo, also "
            "set_force_sum_reduction_for_comms(True)"
        )
    else:
        cause = (
            f"divided once too often {counted}: the loss is scaled and the reduction averages as well, or partial sums "
            "are averaged"
        )
        remedy = "divide either the loss or the gradients, not both; sum gradients that are partial sums"
    return {"cause": cause, "remedy": remedy, "cause_alone": CONSTANT, "remedy_alone": _UNSCALED}


def explain_other(view: View, name: str, cases: Cases) -> Explanation:
    if uneven := explain_uneven_backwards(view):
        return uneven
    own, reference = view.evidence.inventory[0].tied_with, view.reference_inventory.tied_with
    if not own.get(name, frozenset({name})) <= reference.get(name, frozenset({name})):  # tied here alone
        explanation = _TIED
    elif max(c.relative for _, c in cases) < SLIGHT:
        explanation = _SLIGHTLY_OFF
    else:
        on_some = len(cases) < len([tensor for _, tensor in view.holders(name) if tensor.numel])
        explanation = unless_by_author(view, _ON_SOME_RANKS if on_some else _DIFFERENT)
    return add_precision(view, explanation)


_OTHER_MODULE = either(
    "the first forward already differs where it is said to start, although the weights are equal: ",
    "the module is another one, random or configured differently (attention, scale, activation, precision)",
    "it computes from the rank's part what needs the whole (a mean or norm over a row), or the parts are not put "
    "together correctly: a missing or doubled reduction, a bias added once per rank, a fused weight cut without regard "
    "to its parts",
    "compare the module's settings with the reference's, and its input and output layouts in the parallel plan; if the "
    "loader uses another precision on purpose, set tolerance=...",
)
CONSTANT = (
    "the loss is divided once too rarely or too often, such as by the number of micro-batches, or the loss or its "
    "gradients are multiplied by a constant that the reference does not have"
)
_UNSCALED = "check loss scaling, gradient accumulation and the gradient divide factor"
_AVERAGE = (
    "average gradients over the data-parallel ranks, and count the gradients of ranks that see the same rows only once"
)
_DIVIDE_EXPERTS = (
    "divide the gradients of experts by the number of all data-parallel ranks, whose rows reach them, and not by that "
    "of their own FSDP mesh, which is FSDP2's default: set_gradient_divide_factor() on the experts' FSDP modules"
)
_ZERO: Explanation = {
    "cause": "the loss does not depend on it on these ranks, or its gradient is zeroed before the optimizer step",
    "remedy": "look for masks and hooks on its gradient, and for a zero_grad() between backward and the optimizer step",
}
_DIFFERENT = either(
    "the forward is correct and the backward is not: ",
    "a hook or a custom backward changes the gradient, or activation checkpointing recomputes with other random "
    "numbers",
    "the gradient is reduced over too few ranks or twice, or a part of it, such as an auxiliary loss's, is scaled by "
    "their number",
    "compare how the gradient of this parameter is reduced with a parameter whose gradient is correct",
)
_ON_SOME_RANKS: Explanation = {
    "cause": "something changes the gradient on these ranks only, after its reduction: a hook, code that depends on "
    "the rank, or a reduction that leaves these ranks out",
    "remedy": "look for hooks and for conditions on the rank between backward and the step",
}
_SLIGHTLY_OFF = either(
    "the error is small: ",
    "the forward differs slightly (another activation, epsilon, scale or precision), or gradients are added up in a "
    "lower precision",
    "gradients are rounded while they are reduced",
    "compare the modules' settings and compute dtypes with the reference's; if the other precision is intended, set "
    "tolerance=...",
)
_TIED: Explanation = {
    "cause": "it is tied to another parameter, so it has the gradients of both; the reference does not tie them",
    "remedy": "check what ties weights during loading (tie_weights(), tie_word_embeddings), or tie them in the "
    "reference",
}


NEAR, EXACT = 0.25, 0.01
"""Fractions: the length of right gradients changes by less while weights move apart; and an exact multiple."""


@dataclass(frozen=True)
class WrongNorm:
    """What clipping by a wrong norm makes of gradients that were right before: one multiple of them all on a rank."""

    factors: tuple[float, ...]
    """The multiple on each rank."""
    names: frozenset[str]
    """The parameters whose gradients were right."""

    def taken_out(self, runs: Sequence[RankTraining]) -> list[RankTraining]:
        """Return the runs with the other gradients as the right norm would clip them, and without these."""
        return [
            replace(run, gradients=tuple(_divided(c, factor) for c in run.gradients if c.name not in self.names))
            for run, factor in zip(runs, self.factors, strict=True)
        ]

    def explain(self, view: View, runs: Sequence[RankTraining], culprit: str) -> Explanation:
        """Say what is wrong with the norm, or with the gradient of ``culprit`` in it."""
        if culprit:
            cause = f"it is right before clipping; the norm to clip by is wrong, because the gradient of {culprit} is"
            return {"cause": cause, "remedy": f"fix that of {culprit} first"}
        return explain_scale(view, runs, self.factors[0]) or {
            "cause": "gradients are right before clipping: train_step clips by another norm than that of all "
            "gradients, such as that of some parameters",
            "remedy": CLIP_ONCE,
        }


def find_wrong_norm(view: View, runs: Sequence[RankTraining]) -> WrongNorm | None:
    """Return what clipping has scaled that one more step shows to be right without it; None if that is not known.

    The weights have moved a little apart until that step, but in the first one all of them are an exact multiple.
    """
    factors, names, wrong = [], set[str](), set[str]()
    for run in runs:
        seen = [(c.name, c.measure) for c in run.unclipped if c.measure is not None]
        after = {c.name: c.measure for c in run.gradients if c.measure is not None and c.measure.truth}
        right = after.keys() & {name for name, m in seen if abs(m.factor - 1) <= NEAR and m.residual <= 2 * NEAR}
        factor = median_low([after[name].factor for name in right]) if right else 1.0
        if (after and not right) or not factor > 0:
            return None
        exact = {n for n in right if after[n].residual <= EXACT and abs(after[n].factor / factor - 1) <= EXACT}
        factors.append(factor)
        names |= exact
        wrong |= after.keys() - exact
    scaled = any(abs(factor - 1) > limits_of(view, "gradients").relative for factor in factors)
    return WrongNorm(tuple(factors), frozenset(names - wrong)) if scaled and names - wrong else None


def _divided(comparison: Comparison, by: float) -> Comparison:
    """Return the comparison of the divided gradient; values of elements stay as they were seen."""
    if (own := comparison.measure) is None:
        return comparison
    actual, dot = own.actual / by, own.dot / by
    apart = sqrt(max(actual**2 - 2 * dot + own.truth**2, 0.0))
    return replace(comparison, measure=replace(own, actual=actual, dot=dot, apart=apart))


NOISE = 1e-7
"""Largest element of a gradient that is zero but for rounding, such as that of an attention key's bias."""


def backward_order(view: View) -> dict[str, int]:
    """Return the place of each parameter in the order in which the backward completes the gradients.

    That is the reverse of the order of first use in the reference's forward. The order of registration stands in for it
    for what no module's forward announced.
    """
    registered = [t.name for t in view.reference_inventory.tensors if t.kind == "parameter"]
    used = view.reference.used
    known = set(used)
    order = [*reversed(used), *(name for name in reversed(registered) if name not in known)]
    return {name: place for place, name in enumerate(order)}


def unreduced_gradients(view: View, runs: Sequence[RankTraining]) -> Iterator[Finding]:
    """Report replicated parameters that have a different gradient for each slice of the batch."""
    gradients = [{comparison.name: comparison for comparison in run.gradients} for run in runs]
    names = dict.fromkeys(name for by_name in gradients for name in by_name)
    found: list[tuple[str, tuple[int, ...], str]] = []
    for name in names:
        for ranks in ranks_by((rank, tensor.held) for rank, tensor in view.holders(name)).values():
            # Compare one rank per slice: the other ranks of a slice, such as tensor-parallel ones, may hold partial
            # sums.
            representatives = {runs[rank].data_parallel[0]: rank for rank in reversed(ranks)}
            if len(representatives) == 1:
                continue
            by_rank = {
                rank: gradients[rank][name] for rank in sorted(representatives.values()) if name in gradients[rank]
            }
            # If the optimizer reduces the gradients itself, the parameters are equal after its steps.
            detail = "" if _equal_after_steps(runs, name, by_rank) else _describe_spread(by_rank)
            if detail and view.judgeable(name):
                found.append((name, ranks, detail))
    unreduced = {name for name, _, _ in found}
    managed = {t.name for rank in view.evidence.inventory for t in rank.tensors if t.managed is not None}
    # Not where FSDP2 manages none of these and does manage others, such as frozen ones.
    every = len(names) > 1 and names.keys() == unreduced and not (managed and managed.isdisjoint(unreduced))
    explanation = _BYPASSED if every else _IGNORED
    for name, ranks, detail in found:
        dims = _lacking_dims(view, name, runs[0].data_parallel[1])
        yield Finding(name, ranks, *_UNREDUCED, detail, **(_on_a_part_of_the_mesh(dims) if dims else explanation))


def _lacking_dims(view: View, name: str, slices: int) -> str:
    """Return the dimensions of the marker's mesh that the tensor's lacks, if its ranks see only some of the rows."""
    mesh = view.holders(name)[0][1].mesh
    if mesh is None or None in mesh.dims:
        return ""
    if prod(size for dim, size in zip(mesh.dims, mesh.shape, strict=True) if not splits_model(dim)) >= slices:
        return ""
    return ", ".join(dim for dim, _ in view.evidence.world.mesh if splits_batch(dim) and dim not in mesh.dims)


def _on_a_part_of_the_mesh(dims: str) -> Explanation:
    cause = f"it is sharded on a mesh without {dims}, and nothing else reduces the gradients over it"
    remedy = f"pass a mesh with {dims} to fully_shard(): two dimensions mean hybrid sharding; or declare"
    return {"cause": cause, "remedy": f"{remedy} Subject(data_parallel=...) if ranks along {dims} see the same rows"}


def _equal_after_steps(runs: Sequence[RankTraining], name: str, ranks: Iterable[int]) -> bool:
    """Return whether these ranks are bit-identical after the steps; False if that was not recorded."""
    after = [run.after.by_name.get(name) for run in (runs[rank] for rank in ranks) if run.after is not None]
    return bool(after) and len({tensor.digest for tensor in after if tensor is not None}) == 1


def _describe_spread(by_rank: Mapping[int, Comparison]) -> str:
    """Describe where the gradients of ranks differ from each other by more than rounding; "" if they do not.

    All ranks are compared with the same reference, so a rank that reports no difference at an index has the
    reference's value there.
    """
    indices = [c.index for c in by_rank.values() if c.index is not None]
    if not indices or max(c.max_abs for c in by_rank.values()) < NOISE:
        return ""
    index = min(indices)
    reference = next(c.expected for c in by_rank.values() if c.index == index)
    values = {rank: c.actual if c.index == index else reference for rank, c in by_rank.items()}
    ordered = sorted((value, rank) for rank, value in values.items() if value is not None)
    (low, least), (high, most) = ordered[0], ordered[-1]
    # "not >" is also true for NaN, which loss_parity reports.
    if not high - low > ROUNDING * max(abs(low), abs(high)):
        return ""
    place = f"at [{', '.join(map(str, index))}]: " if index else ""
    return f"first step, {place}{low:.6g} on rank {least}, {high:.6g} on rank {most}"


_UNREDUCED = ("gradient differs between ranks", "reduced over the data-parallel ranks")
_IGNORED: Explanation = {
    "cause": "it is left out of FSDP and DDP (ignored_params, or added after fully_shard(), as adapters may be), and "
    "nothing else reduces its gradients",
    "remedy": "shard it, or reduce its gradients after backward (mean over the data-parallel ranks)",
}
_BYPASSED: Explanation = {
    "cause": "nothing reduces the gradients of any parameter over these ranks: nothing wraps or shards the model, the "
    "forward bypasses the wrapper (model.module(...)), or its reduction is off (no_sync(), "
    "set_requires_all_reduce(False))",
    "remedy": "call the wrapped model itself, and turn the reduction on for the last backward before each step; if "
    "every rank sees the whole batch, declare Subject(data_parallel=(0, 1))",
}
