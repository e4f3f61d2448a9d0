"""Collectives as the page tells them: how many of a kind and when, and all of them in order, equal ones folded."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import log2, prod

from pytest_fsdp_meta.evidence.collectives import Collective

MOST_ROWS = 400
LONG, TALL, LOW = 160, 16, 1.5
"""The picture of when a kind of collective was issued, and its lowest bar."""


@dataclass(frozen=True)
class Kind:
    """Collectives that differ only in what they move. ``path`` draws them over the sequence, higher for more bytes."""

    op: str
    members: int
    times: int
    bytes: int | None
    path: str


@dataclass(frozen=True)
class Row:
    """A collective, or several in succession that differ in their tensors alone."""

    first: int
    collective: Collective
    times: int
    tensors: tuple[str, ...]

    @property
    def bytes(self) -> int | None:
        return size_of(self.collective)

    @property
    def notes(self) -> tuple[str, ...]:
        one = self.collective
        told = ("by FSDP2" if one.by_fsdp else "", "by the optimizer" if one.optimizing else "", one.reduction)
        return tuple(filter(None, (*told, "" if one.root is None else f"root {one.root}")))


def kinds(collectives: Sequence[Collective]) -> tuple[Kind, ...]:
    """By op and size of its group, in the order of their first."""
    found: dict[tuple[str, int], list[int]] = {}
    for index, one in enumerate(collectives):
        found.setdefault((one.op, len(one.ranks)), []).append(index)
    return tuple(_kind(op, members, places, collectives) for (op, members), places in found.items())


def _kind(op: str, members: int, places: Sequence[int], collectives: Sequence[Collective]) -> Kind:
    sizes = [size_of(collectives[place]) for place in places]
    known = [size for size in sizes if size is not None]
    pitch = LONG / len(collectives)
    largest = max(1.0, *(log2((size_of(one) or 0) + 1) for one in collectives))
    bars: dict[int, float] = {}
    for place, size in zip(places, sizes, strict=True):  # no more than one for each point across
        at = int(place * pitch)
        bars[at] = max(bars.get(at, 0.0), LOW + log2((size or 0) + 1) / largest * (TALL - LOW))
    wide = max(1.0, min(6.0, pitch - 1))
    path = "".join(f"M{at} {TALL}v-{high:.1f}h{wide:.1f}v{high:.1f}z" for at, high in bars.items())
    return Kind(op, members, len(places), sum(known) if len(known) == len(sizes) else None, path)


def rows(collectives: Iterable[Collective]) -> tuple[tuple[Row, ...], int]:
    """All in order, those that are equal but for their tensors in one row; and how many rows are left out."""
    told: list[Row] = []
    first = 1
    for _, members in groupby(collectives, lambda one: replace(one, tensors=())):
        run = list(members)
        tensors = dict.fromkeys(name for one in run for name in one.tensors)
        told.append(Row(first, run[0], len(run), tuple(tensors)))
        first += len(run)
    return tuple(told[:MOST_ROWS]), len(told) - min(len(told), MOST_ROWS)


def size_of(collective: Collective) -> int | None:
    """The bytes that a rank hands over; None where the width of its dtype is not known."""
    width = _width(collective.dtype)
    if width is None:
        return None if collective.shapes else 0
    return width * sum(prod(shape) for shape in collective.shapes)


def _width(dtype: str) -> int | None:
    """From the bits in the name of a dtype: bfloat16, float8_e4m3fn, complex64."""
    if dtype == "bool":
        return 1
    bits = re.match(r"[a-z]+(8|16|32|64|128)(?!\d)", dtype)
    return int(bits[1]) // 8 if bits else None
