"""Describe the weights that the loader drew, and note whether torch drew any of them as a DTensor."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from pytest_fsdp_meta.checks.drawn.facts import DrawnTensor, RankDraws, Spread
from pytest_fsdp_meta.checks.materialisation.observe import loaded_subject
from pytest_fsdp_meta.checks.values.observe import Rows, comparable, drawn_places, read_part
from pytest_fsdp_meta.loader.adapter import Part
from pytest_fsdp_meta.ranks.adapters.dtensor import local_part
from pytest_fsdp_meta.ranks.adapters.lookup import parts_of
from pytest_fsdp_meta.ranks.bits import digest
from pytest_fsdp_meta.ranks.inventory import named_tensors
from pytest_fsdp_meta.ranks.reference_record import Record, is_array
from pytest_fsdp_meta.ranks.watching import DTensorDraws
from pytest_fsdp_meta.worlds import current, doing

SAMPLE = 2**16
"""Most elements of a part that are measured: the standard error of a normal's spread is then 0.28%."""
HEAD = 16
"""The elements that begin a part. torch computes the last 16 of a normal draw from other random numbers."""


def observe_draws(
    path: str | None, names: Collection[str], unwritten: Collection[str], rows: Mapping[str, Rows]
) -> RankDraws:
    """Describe this rank's parts of the tensors ``names``, beside the reference's own values in the record ``path``.

    Without a reference, the path is None. The reference does not write the ``unwritten`` tensors itself. Only these
    ``rows``, where given, were drawn.
    """
    doing("describing what was drawn")
    rank = current()
    model, record = loaded_subject(rank).model, None if path is None else Record(path)
    parts = parts_of(model)
    found = []
    for name, _, tensor in named_tensors(model):
        if name not in names:
            continue
        part = parts.of(name, tensor)
        if part.local.is_meta or not part.local.numel() or not is_array(part.local):
            continue
        own = local_part(part.local).detach()
        theirs = _of_reference(part, own, record, name) if record is not None and name not in unwritten else None
        if name in rows:
            inside = drawn_places(part, rows[name])
            own, theirs = own.cpu()[inside], None if theirs is None else theirs[inside]
            if not own.numel():
                continue
        found.append(DrawnTensor(name, spread_of(own), None if theirs is None else spread_of(theirs)))
    draws: DTensorDraws | None = rank.state.get("draws")
    return RankDraws(tuple(found), by_dtensor=draws is not None and draws.seen)


def _of_reference(part: Part, own: Tensor, record: Record, name: str) -> Tensor | None:
    """Return the reference's values of the part, in the dtype of ``own``; None where it has no such part."""
    if name not in record or record.shape(name) != part.shape:
        return None
    theirs = read_part(part, record, name)
    return theirs.to(own.dtype) if theirs.shape == own.shape else None


def spread_of(tensor: Tensor) -> Spread:
    """Measure how the elements are spread."""
    values = comparable(tensor.cpu()).flatten()
    step = -(-values.numel() // SAMPLE)
    sample = values[:: step | 1]  # an odd step does not keep to the same columns
    numbers = sample.double()  # torch cannot sort every dtype
    counts = torch.unique(numbers, return_counts=True)[1].double()
    mean = numbers.mean()
    squares = (numbers - mean).square()
    head = values[:HEAD]
    telling = values.numel() >= 2 * HEAD and torch.unique(head.double()).numel() == HEAD
    return Spread(
        elements=sample.numel(),
        distinct=counts.numel(),
        variance=float(squares.sum() / max(sample.numel() - 1, 1)),
        fourth=float(squares.square().mean()),
        surprise=float((counts * (math.log(sample.numel()) - counts.log())).sum()),
        digest=digest(sample),
        head=digest(head) if telling else "",
    )
