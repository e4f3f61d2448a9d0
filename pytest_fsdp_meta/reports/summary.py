"""What a report shows of a trial's evidence. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from pytest_fsdp_meta.catalogue import Finding, Verdict
from pytest_fsdp_meta.catalogue.diagnosis.parity import mean_losses, slice_losses
from pytest_fsdp_meta.evidence import Evidence, RankInventory, TensorFacts
from pytest_fsdp_meta.evidence.collectives import RankCollectives
from pytest_fsdp_meta.reports.schema import Curves, FindingRecord, Piece, Summary, TensorRecord, Traffic


def summarise(evidence: Evidence) -> Summary:
    """The evidence as far as a report shows it."""
    return Summary(
        tensors=tuple(_tensors(evidence.inventory)),
        losses=_curves(evidence),
        traffic=tuple(_traffic(evidence.collectives or ())),
        memory=evidence.memory or (),
        unavailable={name: why.summary for name, why in evidence.unavailable.items()},
    )


def record_findings(verdict: Verdict) -> tuple[FindingRecord, ...]:
    return tuple(map(_finding, verdict.findings))


def _finding(found: Finding) -> FindingRecord:
    return FindingRecord(
        found.tensor, found.ranks, found.actual, found.expected, found.detail, found.cause, found.remedy
    )


def _tensors(inventory: Iterable[RankInventory]) -> Iterable[TensorRecord]:
    # Where ranks do not agree about the shape, each has a picture of its own.
    alike: dict[tuple[object, ...], list[tuple[RankInventory, TensorFacts]]] = {}
    for rank in inventory:
        for tensor in rank.tensors:
            alike.setdefault((tensor.name, tensor.shape, tensor.flat), []).append((rank, tensor))
    for held in alike.values():
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
    """One for all ranks that hold the same; in the order of the first of them."""
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
        mean=mean_losses(evidence.training),
        ranks=tuple(tuple(slices[index]) for index in sorted(slices)),
        reference=(evidence.reference.losses or ()) if evidence.reference else (),
    )


def _traffic(collectives: Iterable[RankCollectives]) -> Iterable[Traffic]:
    alike: dict[str, list[tuple[int, RankCollectives]]] = {}
    for rank, one in enumerate(collectives):
        # Another part of the mesh talks in groups of its own; that alone is no difference.
        parts = one.loading, one.step or ()
        told = [[(c.op, c.dtype, c.shapes, c.tensors, c.reduction, len(c.ranks)) for c in part] for part in parts]
        alike.setdefault(repr(told), []).append((rank, one))
    for held in alike.values():
        first = held[0][1]
        yield Traffic(tuple(rank for rank, _ in held), first.loading, first.step or ())
