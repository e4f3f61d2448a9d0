"""The backward: the order in which it reaches parameters, and gradients that nothing reduces after it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from pytest_fsdp_meta.evidence import Comparison, RankTraining
from pytest_fsdp_meta.judging.findings import Explanation, Finding
from pytest_fsdp_meta.judging.limits import gradients_beyond_rounding, limits_of
from pytest_fsdp_meta.judging.multiples import ROUNDING
from pytest_fsdp_meta.judging.view import View, ranks_by

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


def sort_by_backward(view: View, names: Sequence[str]) -> list[str]:
    """Return the names with those first whose gradients the backward completes first."""
    order = backward_order(view)
    return sorted(names, key=lambda name: order.get(name, len(order)))


def describe_first_departure(view: View, runs: Sequence[RankTraining], departing: Collection[str]) -> str:
    """Return which gradient the backward reaches first of those that depart, and one beside it that agrees, else ""."""
    limits, due = limits_of(view, "gradients"), gradients_beyond_rounding(view)
    # A gradient of zeros agrees whatever the backward does.
    names = [name for name in view.names("parameter") if name in due and name not in departing]
    pairs = view.comparisons(tuple(run.gradients for run in runs), names)
    agreeing = [name for name, cases in pairs.items() if not any(limits.exceeded(*case) for case in cases)]
    if not agreeing or not departing:
        return ""
    order = backward_order(view)
    place = {name: order.get(name, len(order)) for name in (*agreeing, *departing)}
    first = min(departing, key=place.__getitem__)
    beside = min(agreeing, key=lambda name: abs(place[name] - place[first]))
    return f"the backward reaches {first} first, {beside} agrees"


def unreduced_gradients(view: View, runs: Sequence[RankTraining]) -> Iterator[Finding]:
    """Report replicated parameters that have a different gradient for each slice of the batch."""
    gradients = [{comparison.name: comparison for comparison in run.gradients} for run in runs]
    names = dict.fromkeys(name for by_name in gradients for name in by_name)
    found: list[tuple[str, tuple[int, ...], str]] = []
    for name in names:
        for ranks in _replicas_of_other_rows(view, runs, name):
            # Compare one rank per slice: the other ranks of a slice, such as tensor-parallel ones, may hold partial
            # sums.
            representatives = {runs[rank].data_parallel[0]: rank for rank in reversed(ranks)}
            by_rank = {
                rank: gradients[rank][name] for rank in sorted(representatives.values()) if name in gradients[rank]
            }
            # If the optimizer reduces the gradients itself, the parameters are equal after its steps.
            detail = "" if _equal_after_steps(runs, name, by_rank) else _describe_spread(by_rank)
            if detail and view.judgeable(name):
                found.append((name, ranks, detail))
    every = len(names) > 1 and names.keys() == {name for name, _, _ in found} and not _outside_fsdp(view, found)
    explanation = _NOT_WRAPPED if any(run.unreduced for run in runs) else _BYPASSED if every else _IGNORED
    for name, ranks, detail in found:
        yield Finding(name, ranks, *_UNREDUCED, detail, **explanation)


def _outside_fsdp(view: View, found: Iterable[tuple[str, tuple[int, ...], str]]) -> bool:
    """Return whether FSDP2 manages none of these parameters, and does manage others, such as frozen ones."""
    managed = {t.name for rank in view.evidence.inventory for t in rank.tensors if t.managed is not None}
    return bool(managed) and managed.isdisjoint(name for name, _, _ in found)


def _equal_after_steps(runs: Sequence[RankTraining], name: str, ranks: Iterable[int]) -> bool:
    """Return whether these ranks are bit-identical after the steps; False if that was not recorded."""
    after = [run.after.by_name.get(name) for run in (runs[rank] for rank in ranks) if run.after is not None]
    return bool(after) and len({tensor.digest for tensor in after if tensor is not None}) == 1


def _replicas_of_other_rows(view: View, runs: Sequence[RankTraining], name: str) -> Iterator[tuple[int, ...]]:
    """Yield groups of ranks that hold the same part of a parameter and do not all see the same rows of the batch."""
    for ranks in ranks_by((rank, tensor.held) for rank, tensor in view.holders(name)).values():
        if len({runs[rank].data_parallel for rank in ranks}) > 1:
            yield ranks


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
    "cause": "nothing reduces the gradients of any parameter over these ranks: the forward bypasses the wrapper "
    "(model.module(...)), or its reduction is off (no_sync(), set_requires_all_reduce(False))",
    "remedy": "call the wrapped model itself, and turn the reduction on for the last backward before each step",
}
_NOT_WRAPPED: Explanation = {
    "cause": "all parameters are plain tensors and no DDP wraps the model, so nothing reduces their gradients",
    "remedy": "shard or wrap the model; or declare Subject(data_parallel=(0, 1)) if every rank sees the whole batch",
}
