"""Record each rank's part of tensors, and put the parts of all ranks together in another world."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, product
from pathlib import Path

import torch
from torch import Tensor

from pytest_fsdp_meta.evidence import PartFacts, Region
from pytest_fsdp_meta.loader.adapter import Part
from pytest_fsdp_meta.ranks.adapters.dtensor import local_part
from pytest_fsdp_meta.ranks.reference_record import Record, select, write_record


def record_parts(parts: Mapping[str, Part], path: Path) -> dict[str, PartFacts]:
    """Record the elements of this rank's parts at ``path``; return where they lie in the whole tensors."""
    write_record(path, [(name, local_part(part.local)) for name, part in parts.items()])
    return {name: facts_of(part) for name, part in parts.items()}


def facts_of(part: Part) -> PartFacts:
    """Return where the elements of the part lie."""
    return PartFacts(part.shape, part.regions, part.flat)


def put_together(
    held_by_rank: Sequence[Mapping[str, PartFacts]],
    records: Sequence[Record],
    start: Callable[[str, PartFacts, Tensor], Tensor] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the whole of one tensor after the other, from the parts that ``record_parts`` recorded on each rank.

    Parts are written to what ``start`` returns for the name and its first part, or to zeros.
    """
    for name in dict.fromkeys(name for held in held_by_rank for name in held):
        yield name, _put_together(name, held_by_rank, records, start or _zeros)


def _put_together(
    name: str,
    held_by_rank: Sequence[Mapping[str, PartFacts]],
    records: Sequence[Record],
    start: Callable[[str, PartFacts, Tensor], Tensor],
) -> Tensor:
    whole = None
    for held, record in zip(held_by_rank, records, strict=True):
        if name in held:
            values = record.read_whole(name)
            if whole is None:
                whole = start(name, held[name], values)
            write_part(whole, held[name], values)
    assert whole is not None, "some rank has the name"
    return whole


class AssembledRecord(Record):
    """Tensors that are put together from the parts that ``record_parts`` recorded on each rank.

    Who reads a part of one holds the whole of it, one tensor at a time.
    """

    def __init__(self, held_by_rank: Sequence[Mapping[str, PartFacts]], paths: Sequence[Path], label: str) -> None:
        self.label = label
        self._held_by_rank = held_by_rank
        self._records = [Record(path) for path in paths]
        self._facts = {name: facts for held in held_by_rank for name, facts in held.items()}
        self._read: tuple[str, Tensor] | None = None
        """The tensor that was read last: its elements may be asked for in several blocks."""

    def __contains__(self, name: str) -> bool:
        return name in self._facts

    def names(self) -> list[str]:
        return [*self._facts]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._facts[name].shape

    def dtype(self, name: str) -> str:
        return next(record.dtype(name) for record in self._records if name in record)

    def read(self, name: str, regions: Sequence[Region]) -> Tensor:
        if self._read is None or self._read[0] != name:
            self._read = name, _put_together(name, self._held_by_rank, self._records, _zeros)
        return select(self._read[1], regions)


def write_part(whole: Tensor, facts: PartFacts, values: Tensor) -> None:
    """Write the values of a part to the whole tensor, block by block: torch cannot index some dtypes otherwise."""
    whole, values = rows_of(whole, facts), rows_of(values, facts)
    for target, own in boxes_of(facts):
        whole[target].copy_(values[own])


def rows_of(tensor: Tensor, facts: PartFacts) -> Tensor:
    """Return the tensor in the form that ``boxes_of`` indexes."""
    return tensor.reshape(-1) if facts.flat else tensor


def boxes_of(facts: PartFacts) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """Yield the slices of each contiguous block of a part: those in the whole tensor, and those in the part."""
    spans = []
    for runs in facts.regions:
        starts = accumulate((stop - start for start, stop in runs), initial=0)
        spans.append([(start, stop, own) for (start, stop), own in zip(runs, starts, strict=False)])
    for box in product(*spans):
        target = tuple(slice(start, stop) for start, stop, _ in box)
        yield target, tuple(slice(own, own + stop - start) for start, stop, own in box)


def _zeros(_: str, facts: PartFacts, values: Tensor) -> Tensor:
    return torch.zeros(facts.shape, dtype=values.dtype)
