"""How tensors lie on the ranks, drawn: a box for every rank, arranged as the mesh, filled with the part that it holds.

Tensors that lie alike share one drawing. Everything is computed here, so that the picture needs no script.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from pytest_fsdp_meta.evidence import Region, WorldFacts
from pytest_fsdp_meta.reports.schema import LoaderRecord, Piece, TensorRecord
from pytest_fsdp_meta.text import fold_names, name_ranks

STATES = {
    "shard": "holds a part",
    "whole": "holds all of it",
    "wrong": "is named by a finding",
    "unsharded": "holds all of it, but should be sharded",
    "uninitialised": "was never written, in whole or in part",
    "meta": "is on meta: no memory",
    "nothing": "holds nothing of it",
}
"""What may be true of a tensor on a rank; of several troubles, the one that comes last here is drawn."""
TROUBLES = ("wrong", "unsharded", "uninitialised", "meta")
UNSHARDED = "nothing_left_unsharded"
WIDTH, HEIGHT, LOW, GAP, LABEL = 56, 36, 14, 8, 11
ACROSS = 8
"""Boxes in a row, where a mesh has one dimension or its last is longer than twice that."""
THIN = 1.2
"""The least of a picture that can be seen."""


@dataclass(frozen=True)
class Picture:
    """SVG: one path of outlines, one path for each state, and where the number of each rank stands."""

    width: int
    height: int
    box: int
    """The height of each box."""
    outlines: str
    fills: tuple[tuple[str, str], ...]
    labels: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Held:
    """What some ranks hold, in words."""

    ranks: tuple[int, ...]
    text: str
    state: str
    piece: Piece | None = None


@dataclass(frozen=True)
class Layout:
    """Tensors that lie alike; ``tensor`` is the first of them."""

    names: tuple[str, ...]
    tensor: TensorRecord
    held: tuple[Held, ...]
    picture: Picture
    checks: tuple[str, ...] = ()
    """Those with a finding that names it."""

    @property
    def folded(self) -> tuple[str, ...]:
        return tuple(fold_names(self.names))

    @property
    def states(self) -> tuple[str, ...]:
        return tuple(state for state in STATES if any(one.state == state for one in self.held))

    @property
    def troubled(self) -> bool:
        return bool(self.checks) or any(one.state in TROUBLES for one in self.held)

    @property
    def described(self) -> str:
        """The picture in words."""
        return "; ".join(f"{name_ranks(one.ranks)}: {one.text}" for one in self.held)


Named = Mapping[str, Mapping[str, frozenset[int]]]
"""Tensor -> check -> the ranks on which a finding of it names the tensor."""


def layouts(record: LoaderRecord) -> tuple[Layout, ...]:
    """Those with troubles first."""
    if record.summary is None:
        return ()
    named = _named(record)
    alike: dict[object, list[TensorRecord]] = {}
    for tensor in record.summary.tensors:
        marks = tuple(named.get(tensor.name, {}).items())
        alike.setdefault((replace(tensor, name="", mesh=None, tied=()), marks, bool(tensor.tied)), []).append(tensor)
    drawn = [_layout(tensors, named, record.world) for tensors in alike.values()]
    return tuple(sorted(drawn, key=lambda one: not one.troubled))


def _named(record: LoaderRecord) -> Named:
    named: dict[str, dict[str, frozenset[int]]] = {}
    for check in record.checks:
        for one in check.findings:
            if one.tensor is not None:
                of = named.setdefault(one.tensor, {})
                of[check.check] = of.get(check.check, frozenset()) | set(one.ranks)
    return named


def _layout(tensors: Sequence[TensorRecord], named: Named, world: WorldFacts) -> Layout:
    first, marks = tensors[0], named.get(tensors[0].name, {})
    held = tuple(_held(first, marks, world.size))
    return Layout(
        names=tuple(one.name for one in tensors),
        tensor=first,
        held=held,
        picture=_picture(first, held, world),
        checks=tuple(marks),
    )


def _held(tensor: TensorRecord, marks: Mapping[str, frozenset[int]], size: int) -> Iterable[Held]:
    """Every rank once; ranks of one piece apart where findings tell them apart."""
    missing = set(range(size))
    for piece in tensor.pieces:
        missing -= set(piece.ranks)
        states: dict[str, list[int]] = {}
        for rank in piece.ranks:
            states.setdefault(_state(tensor, piece, rank, marks, size), []).append(rank)
        for state, ranks in states.items():
            yield Held(tuple(ranks), _in_words(tensor, piece), state, piece)
    if missing:
        yield Held(tuple(sorted(missing)), "does not have it", "nothing")


def _state(tensor: TensorRecord, piece: Piece, rank: int, marks: Mapping[str, frozenset[int]], size: int) -> str:
    if piece.device.split(":")[0] == "meta":
        return "meta"
    if not _known(tensor, piece):
        return "nothing"
    if piece.poisoned:
        return "uninitialised"
    if rank in marks.get(UNSHARDED, ()):
        return "unsharded"
    if any(rank in ranks for ranks in marks.values()):
        return "wrong"
    if not _elements(piece):
        return "nothing"
    return "whole" if size > 1 and _elements(piece) == prod(tensor.extent) else "shard"


def _known(tensor: TensorRecord, piece: Piece) -> bool:
    """Whether it is told what part of the tensor the ranks hold."""
    return len(piece.regions) == len(tensor.extent)


def _elements(piece: Piece) -> int:
    return prod(_length(runs) for runs in piece.regions)


def _length(runs: Region) -> int:
    return sum(stop - start for start, stop in runs)


def _in_words(tensor: TensorRecord, piece: Piece) -> str:
    """ "dim 0: 0-31 of 128"; only the dims that are cut."""
    if not _known(tensor, piece):
        return "nobody knows which part"
    if not _elements(piece):
        return "an empty shard" if prod(tensor.extent) else "all of it, which has no elements"
    what = "elements" if tensor.flat else "dim {}:"
    cut = [
        f"{what.format(dim)} {_runs(runs)} of {size}"
        for dim, (runs, size) in enumerate(zip(piece.regions, tensor.extent, strict=True))
        if _length(runs) != size
    ]
    return ", ".join(cut) or "all of it"


def _runs(runs: Region, most: int = 4) -> str:
    told = ", ".join(str(start) if stop - start == 1 else f"{start}-{stop - 1}" for start, stop in runs[:most])
    return told + (f" and {len(runs) - most} more runs" if len(runs) > most else "")


def _picture(tensor: TensorRecord, held: Sequence[Held], world: WorldFacts) -> Picture:
    across = _across(world)
    dims = _drawn_dims(tensor)
    height = HEIGHT if len(dims) > 1 else LOW
    fills: dict[str, list[str]] = {}
    places = {}
    for rank in range(world.size):
        places[rank] = (rank % across * (WIDTH + GAP), LABEL + rank // across * (height + GAP + LABEL))
    for one in held:
        boxes = _boxes(tensor, one.piece, dims, height) if one.piece is not None else []
        for rank in one.ranks:
            x, y = places.get(rank, (0, 0))
            fills.setdefault(one.state, []).extend(
                f"M{_short(x + left)} {_short(y + top)}h{_short(wide)}v{_short(high)}h{_short(-wide)}z"
                for left, top, wide, high in boxes
            )
    rows = -(-world.size // across)
    return Picture(
        width=min(across, world.size) * (WIDTH + GAP),
        height=rows * (height + GAP + LABEL),
        box=height,
        outlines="".join(f"M{x} {y}h{WIDTH}v{height}h{-WIDTH}z" for x, y in places.values()),
        fills=tuple((state, "".join(parts)) for state, parts in fills.items() if parts),
        labels=tuple((x, y - 2, rank) for rank, (x, y) in places.items()),
    )


def _across(world: WorldFacts) -> int:
    """Boxes in a row: the last dimension of the mesh, if it is one of several and no row would be too long."""
    sizes = [size for _, size in world.mesh]
    if len(sizes) > 1 and sizes[-1] <= 2 * ACROSS and prod(sizes) == world.size:
        return sizes[-1]
    return min(ACROSS, max(world.size, 1))


def _drawn_dims(tensor: TensorRecord) -> tuple[int, ...]:
    """One or two dims: those that are cut, with the first or the second beside one that is cut alone."""
    count = len(tensor.extent)
    if count < 2:
        return tuple(range(count))
    cut = [
        dim
        for dim, size in enumerate(tensor.extent)
        if any(_length(piece.regions[dim]) != size for piece in tensor.pieces if _known(tensor, piece))
    ]
    others = [dim for dim in range(count) if dim not in cut]
    return tuple(sorted([*cut, *others][:2]))


def _boxes(
    tensor: TensorRecord, piece: Piece, dims: Sequence[int], height: int
) -> list[tuple[float, float, float, float]]:
    """(left, top, width, height) of what a piece holds, in a box; the last of ``dims`` runs to the right."""
    if not _known(tensor, piece) or not _elements(piece):
        return []
    across = _scaled(piece.regions[dims[-1]], tensor.extent[dims[-1]], WIDTH) if dims else [(0.0, float(WIDTH))]
    down = _scaled(piece.regions[dims[0]], tensor.extent[dims[0]], height) if len(dims) > 1 else [(0.0, float(height))]
    return [(left, top, right - left, bottom - top) for top, bottom in down for left, right in across]


def _scaled(runs: Region, size: int, length: int) -> list[tuple[float, float]]:
    """Runs as lengths of a picture: none thinner than can be seen, those that would touch joined."""
    scaled: list[tuple[float, float]] = []
    for start, stop in runs:
        low, high = start / size * length, stop / size * length
        high = max(high, low + THIN)
        if scaled and low - scaled[-1][1] < THIN / 4:
            scaled[-1] = (scaled[-1][0], high)
        else:
            scaled.append((low, high))
    return scaled


def _short(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")
