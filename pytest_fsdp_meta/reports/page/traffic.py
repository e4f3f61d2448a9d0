"""Collectives as the page shows them: by kind with their number and time, and in order with equal ones folded."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import log2, prod

from pytest_fsdp_meta.checks.collectives.facts import Collective

MOST_ROWS = 400
TIMELINE_WIDTH, TIMELINE_HEIGHT, LEAST_BAR = 160, 16, 1.5
"""Sizes (px) of the drawing that shows when a kind of collective was issued, and of its lowest bar."""


@dataclass(frozen=True)
class Kind:
    """Collectives with the same op and group size. ``path`` draws them along the sequence, higher for more bytes."""

    op: str
    members: int
    times: int
    bytes: int | None
    path: str


@dataclass(frozen=True)
class Row:
    """One collective, or several in succession that differ only in their tensors."""

    first: int
    collective: Collective
    times: int
    tensors: tuple[str, ...]

    @property
    def bytes(self) -> int | None:
        return size_of(self.collective)

    @property
    def notes(self) -> tuple[str, ...]:
        issued = self.collective
        by = "by FSDP2" if issued.by_fsdp else "", "by the optimizer" if issued.optimizing else ""
        return tuple(filter(None, (*by, issued.reduction, "" if issued.root is None else f"root {issued.root}")))


@dataclass(frozen=True)
class TrafficView:
    """The collectives of ranks that issued the same ones, while loading or in one training step."""

    title: str
    ranks: tuple[int, ...]
    kinds: tuple[Kind, ...]
    rows: tuple[Row, ...]
    left: int
    total: int
    largest: int
    """The bytes of the loader's largest collective on any rank, to which all bars are drawn."""


def largest_of(issued: Iterable[Sequence[Collective]]) -> int:
    """Return the bytes of the largest collective."""
    return max((size_of(one) or 0 for collectives in issued for one in collectives), default=0)


def show_traffic(
    title: str, issued: Sequence[tuple[tuple[int, ...], tuple[Collective, ...]]], largest: int
) -> Iterator[TrafficView]:
    """Group ranks that issued the same collectives in one phase; of process groups, only the size counts."""
    groups: dict[object, tuple[list[int], tuple[Collective, ...]]] = {}
    for ranks, collectives in issued:
        key = tuple(replace(one, group="", ranks=(), root=len(one.ranks)) for one in collectives)
        groups.setdefault(key, ([], collectives))[0].extend(ranks)
    most = max((len(collectives) for _, collectives in groups.values()), default=0)
    for same, collectives in groups.values():
        if collectives:
            rows, left = fold_rows(collectives)
            kinds = group_by_kind(collectives, largest, most)
            yield TrafficView(title, tuple(sorted(same)), kinds, rows, left, len(collectives), largest)


def group_by_kind(collectives: Sequence[Collective], largest: int, most: int) -> tuple[Kind, ...]:
    """Group collectives by op and size of the process group, in the order of the first of each kind.

    The drawings of several ranks have in common the bytes of the ``largest`` bar, and ``most`` collectives.
    """
    found: dict[tuple[str, int], dict[int, int | None]] = {}
    for index, one in enumerate(collectives):
        found.setdefault((one.op, len(one.ranks)), {})[index] = size_of(one)
    pitch, highest = TIMELINE_WIDTH / max(1, most), max(1.0, log2(largest + 1))
    return tuple(_kind(op, members, sizes, pitch, highest) for (op, members), sizes in found.items())


def _kind(op: str, members: int, sizes: Mapping[int, int | None], pitch: float, highest: float) -> Kind:
    """Return a kind from the sizes of its collectives by their place in the sequence."""
    known = [size for size in sizes.values() if size is not None]
    bars: dict[int, float] = {}
    for place, size in sizes.items():  # at most one bar per pixel
        x = int(place * pitch)
        height = LEAST_BAR + log2((size or 0) + 1) / highest * (TIMELINE_HEIGHT - LEAST_BAR)
        bars[x] = max(bars.get(x, 0.0), height)
    width = max(1.0, min(6.0, pitch - 1))
    path = "".join(f"M{x} {TIMELINE_HEIGHT}v-{bar:.1f}h{width:.1f}v{bar:.1f}z" for x, bar in bars.items())
    return Kind(op, members, len(sizes), sum(known) if len(known) == len(sizes) else None, path)


def fold_rows(collectives: Iterable[Collective]) -> tuple[tuple[Row, ...], int]:
    """Return the collectives in order, with equal successive ones in one row, and the number of rows left out."""
    rows: list[Row] = []
    first = 1
    for _, members in groupby(collectives, lambda one: replace(one, tensors=())):
        run = list(members)
        tensors = dict.fromkeys(name for one in run for name in one.tensors)
        rows.append(Row(first, run[0], len(run), tuple(tensors)))
        first += len(run)
    return tuple(rows[:MOST_ROWS]), len(rows) - min(len(rows), MOST_ROWS)


def size_of(collective: Collective) -> int | None:
    """Return the bytes that one rank passes in; None if the width of the dtype is unknown."""
    width = _width(collective.dtype)
    if width is None:
        return None if collective.shapes else 0
    return width * sum(prod(shape) for shape in collective.shapes)


def _width(dtype: str) -> int | None:
    """Return the bytes of one element, from the bits in the name of a dtype: bfloat16, float8_e4m3fn, complex64."""
    if dtype == "bool":
        return 1
    bits = re.match(r"[a-z]+(8|16|32|64|128)(?!\d)", dtype)
    return int(bits[1]) // 8 if bits else None
