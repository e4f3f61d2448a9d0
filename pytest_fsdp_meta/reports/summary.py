"""The summary of a trial's evidence that a report shows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from pytest_fsdp_meta.checks.collectives.facts import RankCollectives
from pytest_fsdp_meta.checks.memory.judge import load_limits
from pytest_fsdp_meta.checks.sharding.facts import is_expert
from pytest_fsdp_meta.evidence import Evidence, RankInventory, TensorFacts
from pytest_fsdp_meta.judging.gates import global_losses, slice_losses
from pytest_fsdp_meta.judging.limits import loss_tolerances
from pytest_fsdp_meta.reports.schema import Curves, Piece, Summary, TensorRecord, Traffic
from pytest_fsdp_meta.reports.traced_step import record_step
from pytest_fsdp_meta.text import as_bytes, first_of


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
        traffic=tuple(_traffic(evidence.collectives or ())),
        memory=evidence.memory or (),
        model_bytes=max((whole for whole, _ in limits), default=0),
        load_budget=max((budget for _, budget in limits), default=0),
        traced=traced,
        unavailable=missing,
    )


def notes_on(evidence: Evidence) -> dict[str, tuple[str, ...]]:
    """Return ``LoaderRecord.notes``, which the terminal shows for a loader without failures."""
    resent = [sent for rank in evidence.collectives or () for one in rank.loading for sent in one.resent]
    names, size = list(dict(resent)), sum(nbytes for _, nbytes in resent)
    again = {"sent again": (f"{as_bytes(size)} ({first_of(names)})",)} if resent else {}
    return again | _hidden(evidence)


def _hidden(evidence: Evidence) -> dict[str, tuple[str, ...]]:
    """Return the tensors whose values or sizes hide a mistake from every check, by what they hide."""
    if evidence.values is None or evidence.reference is None:
        return {}
    drawn, first = evidence.subject.drawn, evidence.inventory[0]
    loaded = [t for t in first.tensors if t.kind == "parameter" and t.name not in drawn and t.numel > 1]
    holders: dict[object, set[str]] = {}
    for tensor in loaded:
        holders.setdefault(_bits(tensor), set()).add(tensor.name)
    equal = [
        t.name
        for t in loaded
        if len(t.shape) == 1
        and (holders[_bits(t)] - first.tied_with.get(t.name, {t.name}) or _same_on_another_rank(t, evidence.inventory))
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
    groups: dict[tuple[object, ...], list[tuple[RankInventory, TensorFacts]]] = {}
    for rank in inventory:
        for tensor in rank.tensors:
            groups.setdefault((tensor.name, tensor.shape, tensor.flat), []).append((rank, tensor))
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
    ranks: dict[Piece, list[int]] = {}
    for rank, tensor in held:
        piece = Piece(
            ranks=(),
            regions=tensor.regions,
            device="" if tensor.device == rank.device else tensor.device,
            dtype=tensor.dtype,
            placements=tensor.placements,
            poisoned=tensor.poisoned,
            nan=tensor.nan,
        )
        ranks.setdefault(piece, []).append(rank.rank)
    for piece, holders in ranks.items():
        yield replace(piece, ranks=tuple(holders))


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


def _traffic(collectives: Iterable[RankCollectives]) -> Iterable[Traffic]:
    groups: dict[str, list[tuple[int, RankCollectives]]] = {}
    for rank, issued in enumerate(collectives):
        # Ranks in other parts of the mesh use other process groups. Only the size of the group counts here.
        parts = issued.loading, issued.step or ()
        key = [[(c.op, c.dtype, c.shapes, c.tensors, c.reduction, len(c.ranks)) for c in part] for part in parts]
        groups.setdefault(repr(key), []).append((rank, issued))
    for held in groups.values():
        first = held[0][1]
        yield Traffic(tuple(rank for rank, _ in held), first.loading, first.step or ())
