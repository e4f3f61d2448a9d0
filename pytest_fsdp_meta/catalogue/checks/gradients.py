"""Gradients: what N ranks make of a batch pulls every weight as it does on one device."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from pytest_fsdp_meta.catalogue.diagnosis.multiples import ROUNDING, SLIGHT, multiple, number_of
from pytest_fsdp_meta.catalogue.diagnosis.parity import (
    EXPLAINING,
    OF_GRADIENTS,
    OF_UPDATES,
    beyond_rounding,
    gradient_apart,
    other_precision,
    require_no_other_cause,
    require_same_forward,
    tolerance,
    trained,
    typical_gradient,
)
from pytest_fsdp_meta.catalogue.diagnosis.patterns import Cases
from pytest_fsdp_meta.catalogue.findings import Explanation, Finding
from pytest_fsdp_meta.catalogue.registry import check
from pytest_fsdp_meta.catalogue.view import NotJudged, View, ranks_by
from pytest_fsdp_meta.evidence import Comparison, RankTraining, TensorFacts

NOISE = 1e-7
"""Gradients this small are what rounding leaves of a zero, as of the bias of attention keys."""


@check(
    promise="each gradient equals the reference's, by direction and by size",
    family="training",
    needs=["inventory", "reference", "training"],
    uses=["values", "verifier"],
    after=EXPLAINING,
    why="Gradients that are scaled or not reduced train a model that looks fine and is worse; Adam hides it longer.",
    cause="the gradient is not reduced as the reference's mean over the batch is: ranks are left out or counted twice",
    remedy="compare how the gradients of this parameter are reduced with those of one that is right",
    references=[
        "NVIDIA/Megatron-LM#5956",
        "pytorch/torchtitan#4332",
        "verl-project/verl#7835",
        "NVIDIA-NeMo/Automodel#2146",
    ],
    since="0.2",
    tolerance=OF_GRADIENTS,
)
def grad_parity(view: View) -> Iterable[Finding]:
    runs = trained(view)
    scattered = list(_unreduced(view, runs))
    yield from scattered
    told = {finding.tensor for finding in scattered}
    found = [finding for finding in _apart(view, runs) if finding.tensor not in told]
    if found:
        require_same_forward(view, runs)
        first = found[0]
        require_no_other_cause(view, f"the gradients differ ({first.tensor}: {first.actual})")
        yield from found


def _apart(view: View, runs: Sequence[RankTraining]) -> Iterator[Finding]:
    """Gradients that are not the reference's, or that are missing."""
    allowed, typical = tolerance(view, view.tolerance), typical_gradient(view)
    names, due = view.names("parameter", only=view.reference.gradients), beyond_rounding(view)
    pairs = view.comparisons(tuple(run.gradients for run in runs), names)
    updates = view.comparisons(tuple(run.parameters for run in runs), names)
    in_parts = _in_parts(view)
    none = len(names) > 1 and all(set(names) <= set(run.without_gradient) for run in runs)
    for name in names:
        missing = tuple(rank for rank, run in enumerate(runs) if name in run.without_gradient)
        if missing and name in due:
            yield Finding(name, missing, "no gradient", "the reference's", **(_SWITCHED_OFF if none else _MISSING))
        wrong = [(rank, c) for rank, c in pairs.get(name, []) if _wrong(c, allowed, typical)]
        if wrong and name not in in_parts and not _made_good(view, name, pairs[name], updates.get(name, [])):
            yield from _differing(view, runs, name, wrong, allowed)


def _wrong(comparison: Comparison, allowed: float, typical: float) -> bool:
    return comparison.measure is not None and gradient_apart(comparison.measure, allowed, typical)


def _in_parts(view: View) -> set[str]:
    """The names of one memory under two parameters, each of which has the gradient of its own uses alone."""
    found: set[str] = set()
    for rank in view.evidence.inventory:
        sharing: dict[str, list[TensorFacts]] = {}
        for tensor in rank.tensors:
            if tensor.storage:
                sharing.setdefault(tensor.storage, []).append(tensor)
        for tensors in sharing.values():
            if len({tensor.identity for tensor in tensors}) > 1:
                found.update(tensor.name for tensor in tensors)
    return found


def _made_good(view: View, name: str, gradients: Cases, updates: Cases) -> bool:
    """Whether an optimizer reduced what backward left apart: ranks that hold all of it moved it as the reference did.

    Adam moves by the sign alone, so what is a multiple of the reference's on every rank is not excused.
    """
    placements = {p for rank in view.evidence.inventory for p in rank.by_name[name].placements or ()}
    if placements - {"R"}:
        return False
    moved = [comparison.measure for _, comparison in updates if comparison.measure]
    pulled = [comparison.measure for _, comparison in gradients if comparison.measure]
    limit = tolerance(view, OF_UPDATES, "update_parity")
    alike = len(view.evidence.inventory) > 1 and any(m.residual > ROUNDING for m in pulled)
    return alike and bool(moved) and all(m.apart <= limit * m.truth for m in moved)


def _differing(view: View, runs: Sequence[RankTraining], name: str, wrong: Cases, allowed: float) -> Iterator[Finding]:
    """A finding per multiple of the reference's gradient that ranks have, and one for what is no multiple of it."""
    by_factor: dict[str, list[tuple[int, Comparison]]] = {}
    for rank, comparison in wrong:
        assert comparison.measure is not None
        by_factor.setdefault(multiple(comparison.measure, allowed), []).append((rank, comparison))
    expected = f"the reference's within {allowed:g}"
    for factor, cases in by_factor.items():
        ranks = tuple(rank for rank, _ in cases)
        words = _scaled(view, runs, name, factor) if factor else _other(view, name, cases)
        actual = f"a gradient {factor} times the reference's" if factor else "a gradient unlike the reference's"
        yield Finding(name, ranks, actual, expected, "" if factor else _numbers(cases), **words)


def _scaled(view: View, runs: Sequence[RankTraining], name: str, factor: str) -> Explanation:
    if factor == "0":
        return _ZERO
    number, of = number_of(view, runs, factor, name)
    if not of:
        return {
            "cause": "gradients, or the loss, are multiplied by a constant that the reference does not have",
            "remedy": "look at loss scaling, gradient accumulation and the gradient divide factor",
        }
    if factor.startswith("1/"):
        return {
            "cause": f"divided once too often ({number} is {of}): the loss is scaled and the reduction averages as "
            "well, or parts of a sum are averaged",
            "remedy": "divide either the loss or the gradients, and sum what ranks hold in parts",
        }
    return {
        "cause": f"summed where the reference takes the mean ({number} is {of})",
        "remedy": "average gradients over the data-parallel ranks (leave FSDP2's gradient divide factor alone), and "
        "count ranks that see the same rows once",
    }


def _other(view: View, name: str, cases: Cases) -> Explanation:
    words = _EXPERTS if "expert" in name else _UNLIKE
    if _tied_beyond(view, name):
        words = _TIED
    elif max(_relative(comparison) for _, comparison in cases) < SLIGHT:
        words = _SLIGHTLY
    return {"cause": words["cause"] + other_precision(view), "remedy": words["remedy"]}


def _tied_beyond(view: View, name: str) -> bool:
    """Whether the model ties it to what the reference keeps apart from it."""
    own, truth = view.evidence.inventory[0].tied_with, view.truth.tied_with
    return not own.get(name, frozenset({name})) <= truth.get(name, frozenset({name}))


def _numbers(cases: Cases) -> str:
    """Of the rank that is farthest off."""
    rank, worst = max(cases, key=lambda case: _relative(case[1]))
    place = f" at [{', '.join(map(str, worst.index))}]" if worst.index else ""
    off = f"off by {_relative(worst):.2g} of its length, " if math.isfinite(_relative(worst)) else ""
    return f"{off}{worst.actual:.6g}{place} on rank {rank}, but should be {worst.expected:.6g}"


def _relative(comparison: Comparison) -> float:
    measure = comparison.measure
    if measure is None or not math.isfinite(measure.apart) or not measure.truth:
        return math.inf
    return measure.apart / measure.truth


_MISSING: Explanation = {
    "cause": "nothing of the loss reaches it: its output is detached, it is computed under no_grad, or the module "
    "computes with another parameter than the one it registers",
    "remedy": "make the forward use the registered parameter, and keep detach() and no_grad() out of its way",
}
_SWITCHED_OFF: Explanation = {
    "cause": "no parameter has one: the reduction is switched off and never on again "
    "(set_requires_gradient_sync(False), set_requires_all_reduce(False)), or the loss reaches nothing",
    "remedy": "switch it on for every FSDP module before the backward whose gradients the optimizer takes",
}
_ZERO: Explanation = {
    "cause": "nothing of the loss reaches it on these ranks, or its gradient was zeroed before the optimizer saw it",
    "remedy": "look for masks and hooks on its gradient, and for a zero_grad() between backward and the optimizer",
}
_UNLIKE: Explanation = {
    "cause": "the forward agrees and the backward does not: a gradient is reduced over too few ranks, a hook or a "
    "backward of its own changes it, or activation checkpointing computes anew with other random numbers",
    "remedy": "compare how the gradients of this parameter are reduced with those of one that is right",
}
_SLIGHTLY: Explanation = {
    "cause": "it is slightly off: the forward computes a little otherwise (another activation, epsilon, scale or "
    "precision), or gradients are rounded while they are reduced",
    "remedy": "compare the settings of the modules and the dtypes that they compute in with the reference's; where "
    "another precision is meant, set tolerance=...",
}
_TIED: Explanation = {
    "cause": "it is tied to another parameter here, and the reference keeps the two apart: it has both gradients",
    "remedy": "look at what ties weights while loading: tie_weights(), tie_word_embeddings; or tie the reference",
}
_EXPERTS: Explanation = {
    "cause": "gradients of experts are reduced over the wrong ranks, or over none: experts that several ranks hold "
    "need the rows of all of them",
    "remedy": "reduce gradients of experts over the ranks that hold the same experts, and scale them as all others",
}


def _unreduced(view: View, runs: Sequence[RankTraining]) -> Iterator[Finding]:
    """Parameters that ranks hold alike and that each slice of the batch pulls its own way."""
    gradients = [{comparison.name: comparison for comparison in run.gradients} for run in runs]
    words = _PLAIN if any(run.unreduced for run in runs) else _IGNORED
    for name in dict.fromkeys(name for by_name in gradients for name in by_name):
        for ranks in _replicas(view, runs, name):
            # One rank of each slice; the others of a slice, tensor-parallel ones, may hold parts of a sum.
            apart = {runs[rank].data_parallel[0]: rank for rank in reversed(ranks)}
            seen = {rank: gradients[rank][name] for rank in sorted(apart.values()) if name in gradients[rank]}
            # An optimizer may reduce what backward left apart; its parameters are then equal.
            detail = "" if _equal_after(runs, name, seen) else _scattered(seen)
            if detail and view.judgeable(name):
                yield Finding(name, ranks, *_SCATTERED, detail, **words)


def _equal_after(runs: Sequence[RankTraining], name: str, ranks: Iterable[int]) -> bool:
    """Whether these ranks hold the same bits once the steps are over; False where nobody looked."""
    after = [run.after.by_name.get(name) for run in (runs[rank] for rank in ranks) if run.after is not None]
    return bool(after) and len({tensor.digest for tensor in after if tensor is not None}) == 1


def _replicas(view: View, runs: Sequence[RankTraining], name: str) -> Iterator[tuple[int, ...]]:
    """Ranks that hold the same part of a parameter and do not all see the same rows."""
    inventory = view.evidence.inventory
    held = [(rank.rank, rank.by_name[name].regions) for rank in inventory if name in rank.by_name]
    for ranks in ranks_by(held).values():
        if len({runs[rank].data_parallel for rank in ranks}) > 1:
            yield ranks


def _scattered(seen: Mapping[int, Comparison]) -> str:
    """Where tensors differ from one another by more than rounding; empty where they do not.

    All are compared with one truth, so a rank that does not differ from it at an index has the truth's value there.
    """
    indices = [c.index for c in seen.values() if c.index is not None]
    if not indices or max(c.max_abs for c in seen.values()) < NOISE:
        return ""
    index = min(indices)
    truth = next(c.expected for c in seen.values() if c.index == index)
    values = {rank: c.actual if c.index == index else truth for rank, c in seen.items()}
    ordered = sorted((value, rank) for rank, value in values.items() if value is not None)
    (low, least), (high, most) = ordered[0], ordered[-1]
    if not high - low > ROUNDING * max(abs(low), abs(high)):  # nor where one is NaN, which the losses tell
        return ""
    place = f"at [{', '.join(map(str, index))}]: " if index else ""
    return f"of the first step, {place}{low:.6g} on rank {least}, {high:.6g} on rank {most}"


_SCATTERED = ("gradients that differ from rank to rank", "reduced over the data-parallel ranks")
_IGNORED: Explanation = {
    "cause": "it is left out of FSDP and DDP (ignored_params), and nothing else reduces its gradients",
    "remedy": "shard it, or reduce its gradients after backward (mean over the data-parallel ranks)",
}
_PLAIN: Explanation = {
    "cause": "all parameters are plain tensors and no DDP wraps the model, so nobody reduces their gradients",
    "remedy": "shard or wrap the model; or declare Subject(data_parallel=(0, 1)) if every rank sees the whole batch",
}


@check(
    promise="the norm of all gradients, as clip_grad_norm_ sees it, is the reference's on every rank",
    family="training",
    needs=["inventory", "reference", "training"],
    uses=["values", "verifier"],
    after=[*EXPLAINING, "grad_parity"],
    why="A norm over a rank's own shards is too small, so gradients are clipped too late, and on each rank otherwise.",
    cause="the norm is taken over the rank's own shards and not reduced, or replicated parameters count more than once",
    remedy="use torch.nn.utils.clip_grad_norm_ on the sharded parameters, or sum the squares over the ranks that shard",
    references=["pytorch/pytorch#170862", "pytorch/torchtune#2420", "pytorch/pytorch#180346"],
    since="0.2",
    tolerance=OF_GRADIENTS,
)
def grad_norm_parity(view: View) -> Iterable[Finding]:
    runs, truth = trained(view), view.reference.norm
    allowed = tolerance(view, view.tolerance)
    problem = next((run.norm_problem for run in runs if run.norm_problem), "")
    if problem:
        raise NotJudged(
            f"torch has no norm over these gradients ({problem}); declare Subject(clip_grad_norm=<callable>), as the "
            "training uses it"
        )
    if truth is None or any(run.norm is None for run in runs):
        raise NotJudged("nothing is trainable, so there is no gradient to take a norm of")
    off = [(rank, run.norm) for rank, run in enumerate(runs) if not _near(run.norm, truth, allowed)]
    if off:
        require_same_forward(view, runs)
        require_no_other_cause(view, f"the norm of the gradients differs ({off[0][1]:.6g}, but should be {truth:.6g})")
    for norm, ranks in ranks_by((rank, f"{norm:.6g}") for rank, norm in off).items():
        words = _NORM[float(norm) > truth] if len(ranks) == len(runs) > 1 else {}
        yield Finding(None, ranks, f"norm {norm}", f"{truth:.6g} within {allowed:g}", **words)


_NORM: dict[bool, Explanation] = {
    False: {
        "cause": "all ranks agree and miss a part: gradients are left out of the sum (vectors, unsharded parameters, "
        "another mesh), or one rank's part is taken for the whole",
        "remedy": "sum the squares of all gradients that the optimizer takes, over the ranks that shard them",
    },
    True: {
        "cause": "all ranks agree on too much: replicated parameters count once per rank, or norms are added up in "
        "place of their squares",
        "remedy": "count what several ranks hold alike once, and sum squares over the ranks that shard",
    },
}


def _near(actual: float | None, expected: float, allowed: float) -> bool:
    return actual is not None and abs(actual - expected) <= allowed * expected + NOISE * allowed
