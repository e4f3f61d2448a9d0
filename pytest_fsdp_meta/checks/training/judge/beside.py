"""What the author keeps beside the model, such as averaged weights, is what the reference keeps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from pytest_fsdp_meta.checks.training.facts import Followed, RankTraining
from pytest_fsdp_meta.checks.values.facts import UPDATE_TOLERANCE
from pytest_fsdp_meta.evidence import Comparison, TensorNoise
from pytest_fsdp_meta.judging.findings import Explanation, Finding, Mismatch
from pytest_fsdp_meta.judging.gates import BEFORE_UPDATES, comparable_training, given_or_certain, require_no_other_cause
from pytest_fsdp_meta.judging.limits import Limits, limits_of
from pytest_fsdp_meta.judging.registry import training_check
from pytest_fsdp_meta.judging.view import Differs, NotDeclared, NotJudged, PartlyJudged, View, ranks_by
from pytest_fsdp_meta.text import first_of, grouped


@training_check(
    promise="weights that are averaged or copied beside the model equal those of the training on one device",
    uses=["values", "verifier"],
    after=[*BEFORE_UPDATES, "second_grad_parity", "update_parity", "loss_parity"],
    why="Averaged weights are what is evaluated and released, and nothing that is logged depends on them.",
    cause="they are updated once per micro-batch, before the optimizer steps, or with another decay",
    remedy="update them once after each step of the optimizer, from this rank's shards",
    references=["pytorch/pytorch#117742"],
    fields=["beside"],
    tolerance=UPDATE_TOLERANCE,
)
def beside_parity(view: View) -> Iterable[Finding]:
    runs = comparable_training(view)
    cases = grouped((c.name, (rank, c)) for rank, run in enumerate(runs) for c in run.beside)
    if "beside" not in view.evidence.subject.declared:
        raise NotDeclared("beside")
    aliases = [(rank, name) for rank, run in enumerate(runs) for name in run.beside_aliases]
    for name, ranks in ranks_by(aliases).items():
        yield Finding(name, ranks, "is a parameter of the model itself", "a copy of it", **_ALIASES)
    alone = list(dict.fromkeys(name for run in runs for name in run.beside_alone))
    if not cases and alone:
        raise NotJudged(f"{first_of(alone)}: {_NO_COUNTERPART}")
    if not cases:
        raise PartlyJudged(
            "the reference keeps no tensors of it: give Subject(beside=...) a function of the model, such as a class "
            "that averages its parameters and has them in its state_dict()"
        )
    measures = {name: [c.measure for _, c in pairs if c.measure is not None] for name, pairs in cases.items()}
    # What moves here alone.
    untrained = [name for name, own in measures.items() if any(m.actual for m in own) and not any(m.truth for m in own)]
    if len(untrained) == len(cases):
        raise Differs(f"{first_of(untrained)} moves, but does not in the reference, {_HOW_IT_IS_UPDATED}")
    limits = limits_of(view, "updates")
    limits = replace(limits, noise=None if limits.noise is None else _noise_by_entry(view, limits, cases))
    limits = replace(limits, roundings=2 * len(view.reference.losses or ()))
    judged = {name: pairs for name, pairs in cases.items() if name not in untrained}
    found = [finding for name, pairs in judged.items() for finding in _judge_entry(view, limits, name, pairs)]
    if found:
        message = f"what is kept beside the model differs ({found[0].tensor}: {found[0].actual})"
        require_no_other_cause(view, message)
        yield from given_or_certain(view, found, message)
    yield from _rounded_away(runs)
    moved = {name for name, pairs in cases.items() if any(c.measure is None or c.measure.truth for _, c in pairs)}
    if not moved:
        low = "".join(f"; {owner} is kept in {dtype}" for owner, dtype in _followed(runs))
        raise NotJudged(
            "nothing that is kept beside the model moves in these steps, neither here nor in the reference (pass more "
            f"steps= if it begins later){low}"
        )
    if untrained:
        raise Differs(f"{first_of(untrained)} moves, but does not in the reference, {_HOW_IT_IS_UPDATED}")
    if alone:
        raise PartlyJudged(f"{first_of(alone)}: {_NO_COUNTERPART}")
    unlike = [name for name, pairs in cases.items() if any(c.problem is not None for _, c in pairs)]
    if unlike:
        raise PartlyJudged(
            f"{first_of(unlike)}: plain tensors of another shape than the reference's; keep DTensors, so that the part "
            "that a rank holds is known"
        )


def _judge_entry(view: View, limits: Limits, name: str, pairs: Sequence[tuple[int, Comparison]]) -> Iterator[Finding]:
    still = tuple(rank for rank, c in pairs if c.measure is not None and c.measure.truth and not c.measure.actual)
    if still and any(limits.exceeded(rank, c) for rank, c in pairs):
        explanation = _NEVER_UPDATED if len(still) == len(pairs) else _UPDATED_ON_SOME
        yield Finding(name, still, STILL, "updated after each step", **explanation, certain=True)
        return
    if len(pairs) < len(view.evidence.training or ()):
        kept = dict(pairs)
        without = tuple(rank for rank in _holders_of_its_parameter(view, name) if rank not in kept)
        if without:
            yield Finding(name, without, "is not kept", "kept on every rank", **_ON_SOME_RANKS)
    off = [(rank, c) for rank, c in pairs if limits.exceeded(rank, c)]
    if off:
        ranks = tuple(rank for rank, _ in off)
        yield Finding(name, ranks, *_describe_movement(off, limits))
    counted = (
        (rank, Mismatch(f"{_number(c.actual)} after the training", f"{_number(c.expected)}"))
        for rank, c in pairs
        if c.measure is None and c.problem is None and not c.equal
    )
    yield from view.findings_for(name, counted)


def _holders_of_its_parameter(view: View, entry: str) -> list[int]:
    """Return the ranks that have the parameter that an entry is named after; all of them if it is named after none."""
    inventory = view.evidence.inventory
    names = {t.name for rank in inventory for t in rank.tensors if entry.endswith(f".{t.name}")}
    longest = max(names, key=len, default="")
    return [rank.rank for rank in inventory if not longest or longest in rank.by_name]


def _followed(runs: Sequence[RankTraining]) -> dict[tuple[str, str], list[tuple[int, Followed]]]:
    """Return (owner, dtype) -> what each rank that keeps it has counted."""
    return grouped(((own.owner, own.dtype), (rank, own)) for rank, run in enumerate(runs) for own in run.followed)


def _rounded_away(runs: Sequence[RankTraining]) -> Iterator[Finding]:
    """Report what stands still, but for a few elements, while the parameters move.

    What does not move at all may be updated less often than after each step.
    """
    for (owner, dtype), counts in _followed(runs).items():
        moved, due = sum(own.moved for _, own in counts), sum(own.due for _, own in counts)
        if 0 < moved < FOLLOWED * due:
            actual = f"moves in {100 * moved / due:.2g}% of the elements in which the parameters move"
            ranks = tuple(rank for rank, _ in counts)
            cause = f"it is kept in {dtype}, in which a small part of a small difference is rounded away"
            yield Finding(owner, ranks, actual, "moved in most of them", cause=cause, remedy=_KEEP_FLOAT)


STILL = "does not move"
FOLLOWED = 0.1
"""Share of the elements that move in the parameters: an average in which fewer move stands still."""
_KEEP_FLOAT = "keep it in float32, and cast it where it is evaluated or exported"
_NO_COUNTERPART = "the reference keeps nothing of that name, so this was not compared"
_HOW_IT_IS_UPDATED = "where only update_parameters(model) or update(model) of an object is called after each step"


def _describe_movement(cases: Sequence[tuple[int, Comparison]], limits: Limits) -> tuple[str, str, str]:
    """Return (actual, expected, detail): a multiple of the reference's way if alike on all ranks, else the error."""
    factors = {f"{c.measure.factor:.4g}" for _, c in cases if c.measure is not None and c.measure.residual < 0.05}
    if len(factors) == 1 and factors != {"1"}:
        return f"moves {factors.pop()} times as far as the reference's", limits.describe(cases), ""
    worst = max(c.relative for _, c in cases)
    error = f"relative error {worst:.2g}" if math.isfinite(worst) else ""
    return "changes differently from the reference's", limits.describe(cases), error


def _number(value: float | None) -> str:
    return "nothing" if value is None else f"{value:g}"


def _noise_by_entry(
    view: View, limits: Limits, cases: Mapping[str, Sequence[tuple[int, Comparison]]]
) -> tuple[Mapping[str, TensorNoise], ...]:
    """Return the noise of each entry: as large a part of its way as that of the parameter it is named after."""
    updates = {
        (rank, c.name): c.measure for rank, run in enumerate(view.evidence.training or ()) for c in run.parameters
    }
    found: list[Mapping[str, TensorNoise]] = []
    for rank, noise in enumerate(limits.noise or ()):
        own: dict[str, TensorNoise] = {}
        for name, pairs in cases.items():
            parameter = max((one for one in noise if name.endswith(f".{one}")), key=len, default="")
            measure = next((c.measure for number, c in pairs if number == rank), None)
            update = updates.get((rank, parameter))
            if measure is not None and update is not None and update.truth:
                known = noise[parameter]
                own[name] = TensorNoise(known.distance * measure.truth / update.truth, known.factor)
        found.append(own)
    return tuple(found)


_ALIASES: Explanation = {
    "cause": "it is a view of the parameter, such as detach() or .data, so the optimizer's step changes it as well, "
    "and averaging it with the parameter changes nothing",
    "remedy": "copy each parameter: parameter.detach().clone()",
}
_ON_SOME_RANKS: Explanation = {
    "cause": "some ranks build no object, or its state_dict() is empty there",
    "remedy": "build and save it on every rank, each with its own shards",
}
_UPDATED_ON_SOME: Explanation = {
    "cause": "the other ranks update it and these do not: code that depends on the rank, such as rank 0's alone",
    "remedy": "update it on every rank: each holds a shard of the weights that it averages",
}
_NEVER_UPDATED: Explanation = {
    "cause": "its update changes nothing: it skips these tensors (plain ones, or DTensors), or averages a copy of the "
    "model; or train_step has a parameter beside, and does not call it",
    "remedy": "update it after each step of the optimizer, from the parameters that the optimizer holds",
}
