"""Record each rank's part of tensors, and put the parts of all ranks together in the world of the reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, product
from pathlib import Path

import torch
from torch import Tensor

from pytest_fsdp_meta.evidence import PartFacts
from pytest_fsdp_meta.loader.adapter import Part
from pytest_fsdp_meta.observers.adapters.dtensor import local_part
from pytest_fsdp_meta.observers.support.reference_record import Record, write_record


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
        whole = None
        for held, record in zip(held_by_rank, records, strict=True):
            if name in held:
                values = record.read_whole(name)
                if whole is None:
                    whole = (start or _zeros)(name, held[name], values)
                write_part(whole, held[name], values)
        assert whole is not None, "some rank has the name"
        yield name, whole


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
