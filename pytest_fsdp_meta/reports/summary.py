"""The summary of a trial's evidence that a report shows, with the traced step: call by call where it departs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from pytest_fsdp_meta.checks.memory.judge import load_limits
from pytest_fsdp_meta.checks.sharding.facts import is_expert, sharded_dim
from pytest_fsdp_meta.checks.tracing.facts import AGAIN_INPUT, AGAIN_OUTPUT, INPUT, OUTPUT, RankTrace
from pytest_fsdp_meta.checks.tracing.judge import (
    AGREE,
    BETWEEN,
    DEPART,
    UNKNOWN,
    MergedCall,
    Place,
    describe_place,
    find_place,
    follow_step,
)
from pytest_fsdp_meta.checks.training.judge.optimization import describe_groups
from pytest_fsdp_meta.evidence import Evidence, RankInventory, TensorFacts
from pytest_fsdp_meta.judging.gates import global_losses, slice_losses
from pytest_fsdp_meta.judging.limits import loss_tolerances
from pytest_fsdp_meta.reports.schema import (
    TRACED,
    Curves,
    Piece,
    Summary,
    TensorRecord,
    TracedPhase,
    TracedRow,
    TracedStep,
)
from pytest_fsdp_meta.text import counted, grouped


def summarise(evidence: Evidence) -> Summary:
    """Return the part of the evidence that a report shows."""
    traced = record_step(evidence.traces or ())
    missing = {name: why.summary for name, why in evidence.unavailable.items()}
    if evidence.traces and traced is None:
        missing["traces"] = next((t.problem for t in evidence.traces if t.problem), "the ranks run different modules")
    limits = [load_limits(rank) for rank in evidence.inventory]
    return Summary(
        tensors=tuple(_tensors(evidence.inventory)),
        losses=_curves(evidence),
        memory=evidence.memory or (),
        model_bytes=max((whole for whole, _ in limits), default=0),
        load_budget=max((budget for _, budget in limits), default=0),
        traced=traced,
        unavailable=missing,
    )


def notes_on(evidence: Evidence) -> dict[str, tuple[str, ...]]:
    """Return ``LoaderRecord.notes``."""
    steps = [rates for run in (evidence.training or ())[:1] for rates in run.rates if rates]
    alike = "scheduler" in evidence.subject.declared and len({*steps}) == 1
    rates = (", ".join(f"{rate:.4g}" for rate in steps[0]) + f" in {counted(len(steps), 'step')}",) if alike else ()
    kept = tuple(dict.fromkeys(name for step in evidence.training_mode or () for name in step.norms_in_eval))
    norms = evidence.reference.batch_norms if evidence.reference is not None else ()
    built = evidence.inventory[0].optimizer  # None for one that Subject(optimizer=...) builds
    found = {
        "one rate": rates,
        "norms in eval": tuple(name for name in norms if name not in kept),
        "norms kept": kept,
        "own groups": (f"{built.kind} ({groups})",) if built and (groups := describe_groups([built])) else (),
    }
    return {
        **{kind: names for kind, names in found.items() if names},
        **_even_shards(evidence.inventory[0]),
        **_hidden(evidence),
    }


def _even_shards(inventory: RankInventory) -> dict[str, tuple[str, ...]]:
    """Return what is sharded evenly, with its size; () if anything is sharded unevenly."""
    parts: Counter[tuple[str, int]] = Counter()
    for tensor in inventory.tensors:
        sizes = tensor.mesh.shape if tensor.mesh is not None and tensor.kind == "parameter" else ()
        for dim, size in zip(map(sharded_dim, tensor.placements or ()), sizes, strict=False):
            if dim is not None and tensor.shape[dim]:
                key = f"{tensor.name} ({tensor.shape[dim]} on dim {dim})", tensor.shape[dim]
                parts[key] = size * (parts[key] or 1)
    sharded = tuple(name for (name, _), size in parts.items() if size > 1)
    even = not any(whole % size for (_, whole), size in parts.items())
    return {"even shards": sharded if even else ()} if sharded else {}


def _hidden(evidence: Evidence) -> dict[str, tuple[str, ...]]:
    """Return the tensors whose values or sizes hide a mistake from every check, by what they hide."""
    if evidence.values is None or evidence.reference is None:
        return {}
    drawn, first = evidence.subject.drawn, evidence.inventory[0]
    loaded = [t for t in first.tensors if t.kind == "parameter" and t.name not in drawn and t.numel > 1]
    holders = grouped((_bits(tensor), tensor.name) for tensor in loaded)
    vectors = [t for t in loaded if len(t.shape) == 1]
    equal = [
        t.name
        for t in vectors
        if set(holders[_bits(t)]) - first.tied_with.get(t.name, {t.name})
        or _same_on_another_rank(t, evidence.inventory)
    ]
    square = [
        f"{t.name} {t.shape}"
        for t in loaded
        if is_expert(t) and len(t.shape) > 1 and t.shape[-1] == t.shape[-2] and evidence.reference.complete
    ]
    found = {"equal vectors": tuple(equal), "square experts": tuple(square)}
    return {kind: names for kind, names in found.items() if names}


def _bits(tensor: TensorFacts) -> object:
    return tensor.digest or tensor.name, tensor.dtype, tensor.local_shape


def _same_on_another_rank(tensor: TensorFacts, inventory: Sequence[RankInventory]) -> bool:
    """Return whether a rank that holds another part of the tensor holds the same bits."""
    others = (rank.by_name.get(tensor.name, tensor) for rank in inventory)
    return any(other.regions != tensor.regions and _bits(other) == _bits(tensor) for other in others)


def _tensors(inventory: Iterable[RankInventory]) -> Iterable[TensorRecord]:
    # Ranks that disagree about the shape of a tensor get one record per shape, and so one drawing each.
    groups = grouped(
        ((tensor.name, tensor.shape, tensor.flat), (rank, tensor)) for rank in inventory for tensor in rank.tensors
    )
    for held in groups.values():
        first_rank, first = held[0]
        yield TensorRecord(
            name=first.name,
            kind=first.kind,
            shape=first.shape,
            extent=first.extent,
            pieces=tuple(_pieces(held)),
            mesh=first.mesh,
            flat=first.flat,
            requires_grad=first.requires_grad,
            persistent=first.persistent,
            tied=tuple(sorted(first_rank.tied_with.get(first.name, frozenset()) - {first.name})),
        )


def _pieces(held: Iterable[tuple[RankInventory, TensorFacts]]) -> Iterable[Piece]:
    """Yield one piece for all ranks that hold the same part, in the order of their first ranks."""

    def piece(rank: RankInventory, tensor: TensorFacts) -> Piece:
        return Piece(
            ranks=(),
            regions=tensor.regions,
            device="" if tensor.device == rank.device else tensor.device,
            dtype=tensor.dtype,
            placements=tensor.placements,
            poisoned=tensor.poisoned,
            nan=tensor.nan,
        )

    for part, holders in grouped((piece(rank, tensor), rank.rank) for rank, tensor in held).items():
        yield replace(part, ranks=tuple(holders))


def _curves(evidence: Evidence) -> Curves | None:
    if not evidence.training:
        return None
    slices = slice_losses(evidence.training)
    return Curves(
        mean=global_losses(evidence),
        ranks=tuple(tuple(slices[index]) for index in sorted(slices)),
        reference=(evidence.reference.losses or ()) if evidence.reference else (),
        tolerance=loss_tolerances(evidence),
    )


NAMES = {AGREE: "agrees", UNKNOWN: "not compared", BETWEEN: "in between", DEPART: "departs"}
SEVERITY = {name: severity for severity, name in enumerate(TRACED)}
OUTPUT_OF = {INPUT: OUTPUT, AGAIN_INPUT: AGAIN_OUTPUT}
MOST_COLUMNS = 8
NEAR, NEXT = 8, 2
"""Calls with rows of their own on both sides of the first that departs, and of other beginnings."""
MOST_BEGINNINGS = 4
"""Other beginnings with rows of their own, in one phase."""
FEWEST_FOLDED = 4
"""The least number of calls that share a row."""


def record_step(traces: Sequence[RankTrace]) -> TracedStep | None:
    """Return the traced step as a report has it; None if there is none, or ranks did not run the same modules."""
    if not traces or any(trace.problem for trace in traces):
        return None
    place = find_place(traces)
    forward, backward = (_without_plain_inputs(calls, place) for calls in follow_step(traces))
    if not forward:
        return None
    columns = _group_ranks(forward, backward, len(traces))
    kinds = {name: facts.kind for trace in traces for name, facts in trace.modules.items()}
    return TracedStep(
        ranks=columns,
        forward=TracedPhase(tuple(_rows(forward, columns, kinds, NEAR))),
        # All that the backward reaches is off if the forward is: where that begins says little.
        backward=TracedPhase(tuple(_rows(backward, columns, kinds, NEXT if _first_departing(forward) else NEAR))),
        step=traces[0].step,
        origin=describe_place(place, traces) if place is not None else "",
        module=place.module if place is not None else None,
        phase=place.phase if place is not None else "",
    )


def _without_plain_inputs(calls: Sequence[MergedCall], place: Place | None) -> list[MergedCall]:
    """Leave out inputs that agree, or are as the output of the same call; not those at which the place is named."""
    states = {(one.call.stage, one.call.module, one.call.turn): one.states for one in calls}
    first = _first_departing(calls)
    named = (place.after, place.before) if place is not None else ()

    def is_plain(one: MergedCall) -> bool:
        output = states.get((OUTPUT_OF.get(one.call.stage, ""), one.call.module, one.call.turn))
        return output is not None and all(
            own in (AGREE, theirs) for own, theirs in zip(one.states, output, strict=True)
        )

    return [one for one in calls if one is first or (one.call.stage, one.call.module) in named or not is_plain(one)]


def _first_departing(calls: Sequence[MergedCall]) -> MergedCall | None:
    return next((one for one in calls if DEPART in one.states), None)


def _group_ranks(
    forward: Sequence[MergedCall], backward: Sequence[MergedCall], size: int
) -> tuple[tuple[int, ...], ...]:
    """Return the ranks with the same states; if there are too many groups, those that begin to depart together."""

    def begin(calls: Sequence[MergedCall], rank: int) -> int | None:
        return next((index for index, one in enumerate(calls) if one.states[rank] == DEPART), None)

    keys: list[list[Hashable]] = [
        [tuple(one.states[rank] for one in (*forward, *backward)) for rank in range(size)],
        [(begin(forward, rank), begin(backward, rank)) for rank in range(size)],
        [begin([*forward, *backward], rank) is None for rank in range(size)],
    ]
    for by_rank in keys:
        groups = grouped((key, rank) for rank, key in enumerate(by_rank))
        if len(groups) <= MOST_COLUMNS:
            break
    return tuple(map(tuple, groups.values()))


def _rows(
    calls: Sequence[MergedCall], columns: Sequence[Sequence[int]], kinds: Mapping[str, str], near: int
) -> Iterator[TracedRow]:
    """Yield a row for each call near a beginning, and one for each stretch of other calls."""
    rows = [_row(one, columns, kinds) for one in calls]
    alone = _rows_of_their_own(rows, near)
    start = 0
    for index in range(len(rows) + 1):
        if index < len(rows) and index not in alone:
            continue
        stretch = rows[start:index]
        yield from stretch if len(stretch) < FEWEST_FOLDED else [_fold(stretch)]
        yield from rows[index : index + 1]
        start = index + 1


def _row(one: MergedCall, columns: Sequence[Sequence[int]], kinds: Mapping[str, str]) -> TracedRow:
    """Return the call with a state for each column, the worst of its ranks, and how far off the farthest rank is."""
    return TracedRow(
        stage=one.call.stage,
        module=one.call.module,
        states=tuple(_worst([NAMES[one.states[rank]] for rank in ranks]) for ranks in columns),
        distances=tuple(_farthest([one.distances[rank] for rank in ranks]) for ranks in columns),
        kind=kinds.get(one.call.module, ""),
        turn=one.call.turn,
    )


def _fold(rows: Sequence[TracedRow]) -> TracedRow:
    """Return successive calls as one row, with the worst state of each column."""
    by_column = list(zip(*(row.states for row in rows), strict=True))
    worst = tuple(map(_worst, by_column))
    return replace(
        rows[0],
        states=worst,
        distances=tuple(map(_farthest, zip(*(row.distances for row in rows), strict=True))),
        kind="",
        calls=len(rows),
        until=rows[-1].module,
        times=tuple(states.count(state) for states, state in zip(by_column, worst, strict=True)),
    )


def _worst(states: Sequence[str]) -> str:
    return max(states, key=SEVERITY.__getitem__)


def _farthest(distances: Sequence[float | None]) -> float | None:
    known = max((distance for distance in distances if distance is not None), default=None)
    return None if known is None else float(f"{known:.3g}")


def _rows_of_their_own(rows: Sequence[TracedRow], near: int) -> Collection[int]:
    """Return the calls ``near`` the first that departs, and those next to others where a column ceases to agree."""
    first = next((index for index, one in enumerate(rows) if "departs" in one.states), None)
    others = [index for index, one in enumerate(rows) if _begins(one, rows[index - 1] if index else None)]
    others = [index for index in others if index != first][:MOST_BEGINNINGS]
    around = [(index, NEXT) for index in others] + ([(first, near)] if first is not None else [])
    return {other for index, reach in around for other in range(index - reach, index + reach + 1)}


def _begins(one: TracedRow, before: TracedRow | None) -> bool:
    off = ("in between", "departs")
    return any(
        state in off and (before is None or before.states[column] not in off) for column, state in enumerate(one.states)
    )
