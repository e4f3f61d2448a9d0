"""Drawings of tensor layouts: one box per rank, arranged as the mesh, with the part on that rank filled.

Tensors with the same layout share one drawing. The paths are computed here, so the drawings need no script.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from pytest_fsdp_meta.evidence import Region, WorldFacts
from pytest_fsdp_meta.reports.schema import LoaderRecord, Piece, TensorRecord
from pytest_fsdp_meta.text import grouped, name_ranks

STATES = {
    "shard": "holds a part",
    "whole": "holds the whole tensor",
    "wrong": "named by a finding",
    "unsharded": "holds the whole tensor, which should be sharded",
    "uninitialised": "never written, in whole or in part",
    "meta": "on the meta device, without memory",
    "nothing": "holds no part",
}
"""Every state of a tensor on a rank, with its meaning; of several problems, the last one here is drawn."""
PROBLEMS = ("wrong", "unsharded", "uninitialised", "meta")
UNSHARDED = "nothing_left_unsharded"
BOX_WIDTH, BOX_HEIGHT, VECTOR_HEIGHT, GAP, LABEL_HEIGHT = 56, 36, 14, 8, 11
"""Sizes (px); boxes of tensors with one dim have ``VECTOR_HEIGHT``."""
BOXES_PER_ROW = 8
"""Boxes in a row if the mesh has one dimension, or its last dimension is longer than twice this."""
LEAST_WIDTH = 1.2
"""Width (px) of the smallest part that is visible."""


@dataclass(frozen=True)
class Picture:
    """SVG: one path of all outlines, one filled path per state, and the label of each rank as (x, y, rank)."""

    width: int
    height: int
    box: int
    """The height of each box."""
    outlines: str
    fills: tuple[tuple[str, str], ...]
    labels: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Held:
    """The part that some ranks hold, as text."""

    ranks: tuple[int, ...]
    text: str
    state: str
    piece: Piece | None = None


@dataclass(frozen=True)
class Layout:
    """Tensors with the same layout; ``tensor`` is the first of them."""

    names: tuple[str, ...]
    tensor: TensorRecord
    held: tuple[Held, ...]
    picture: Picture
    checks: tuple[str, ...] = ()
    """The checks with a finding that names the tensors."""

    @property
    def tied(self) -> tuple[str, ...]:
        """The tensors that are one weight with the first, unless the drawing names them as well."""
        return tuple(name for name in self.tensor.tied if name not in self.names)

    @property
    def states(self) -> tuple[str, ...]:
        return tuple(state for state in STATES if any(held.state == state for held in self.held))

    @property
    def has_problem(self) -> bool:
        return bool(self.checks) or any(held.state in PROBLEMS for held in self.held)

    @property
    def description(self) -> str:
        """The drawing as text."""
        return "; ".join(f"{name_ranks(held.ranks)}: {held.text}" for held in self.held)


Mesh = tuple[tuple[str, int], ...]
"""The names and sizes of the dimensions of a mesh."""
Named = Mapping[str, Mapping[str, frozenset[int]]]
"""Tensor -> check -> the ranks of its findings about the tensor."""


def group_layouts(record: LoaderRecord, mesh: Mesh) -> tuple[Layout, ...]:
    """Return the layouts of a loader's tensors, those with problems first. Ranks are drawn in the order of ``mesh``."""
    if record.summary is None:
        return ()
    named = _ranks_by_check(record)

    def alike(tensor: TensorRecord) -> object:
        findings = tuple(named.get(tensor.name, {}).items())
        return replace(tensor, name="", mesh=None, tied=()), findings, bool(tensor.tied)

    world = replace(record.world, mesh=mesh)
    groups = grouped((alike(tensor), tensor) for tensor in record.summary.tensors)
    layouts = []
    for first, *others in groups.values():
        by_check = named.get(first.name, {})
        held = tuple(_held(first, by_check, world))
        names = tuple(tensor.name for tensor in (first, *others))
        layouts.append(Layout(names, first, held, _picture(first, held, world), tuple(by_check)))
    return tuple(sorted(layouts, key=lambda layout: not layout.has_problem))


def own_meshes(record: LoaderRecord) -> tuple[Mesh, ...]:
    """Return the meshes of tensors that are neither the mesh of the world nor a part of it."""
    meshes = (tensor.mesh for tensor in (record.summary.tensors if record.summary else ()))
    pairs = (mesh.pairs for mesh in meshes if mesh is not None)
    return tuple(
        tuple((name or "unnamed", size) for name, size in mesh)
        for mesh in dict.fromkeys(pairs)
        if not set(mesh) <= set(record.world.mesh)
    )


def drawn_mesh(world: WorldFacts, own: Sequence[Mesh]) -> Mesh:
    """Return the mesh in whose order ranks are drawn: the one that the loader made of all ranks, or the world's."""
    return own[0] if len(own) == 1 and prod(size for _, size in own[0]) == world.size else world.mesh


def _ranks_by_check(record: LoaderRecord) -> Named:
    named: dict[str, dict[str, frozenset[int]]] = {}
    for check in record.checks:
        for finding in check.findings:
            if finding.tensor is not None:
                checks = named.setdefault(finding.tensor, {})
                checks[check.check] = checks.get(check.check, frozenset()) | set(finding.ranks)
    return named


def _held(tensor: TensorRecord, by_check: Mapping[str, frozenset[int]], world: WorldFacts) -> Iterable[Held]:
    """Yield every rank that ran once. Ranks with the same piece are separated if findings name only some of them."""
    missing = set(world.ranks)
    for piece in tensor.pieces:
        missing -= set(piece.ranks)
        states = grouped((_state(tensor, piece, rank, by_check, world), rank) for rank in piece.ranks)
        for state, ranks in states.items():
            yield Held(tuple(ranks), _describe_piece(tensor, piece), state, piece)
    if missing:
        yield Held(tuple(sorted(missing)), "does not have it", "nothing")


def _state(
    tensor: TensorRecord, piece: Piece, rank: int, by_check: Mapping[str, frozenset[int]], world: WorldFacts
) -> str:
    if piece.device.split(":")[0] == "meta" and not world.simulated:
        return "meta"
    if not _is_known(tensor, piece):
        return "nothing"
    if piece.poisoned:
        return "uninitialised"
    if rank in by_check.get(UNSHARDED, ()):
        return "unsharded"
    if any(rank in ranks for ranks in by_check.values()):
        return "wrong"
    if not _elements(piece):
        return "nothing"
    return "whole" if world.size > 1 and _elements(piece) == prod(tensor.extent) else "shard"


def _is_known(tensor: TensorRecord, piece: Piece) -> bool:
    """Return whether the part that the ranks hold is known."""
    return len(piece.regions) == len(tensor.extent)


def _elements(piece: Piece) -> int:
    return prod(_length(runs) for runs in piece.regions)


def _length(runs: Region) -> int:
    return sum(stop - start for start, stop in runs)


def _describe_piece(tensor: TensorRecord, piece: Piece) -> str:
    """Return a text such as "dim 0: 0-31 of 128", with the sharded dims only."""
    if not _is_known(tensor, piece):
        return "unknown part"
    if not _elements(piece):
        return "empty shard" if prod(tensor.extent) else "whole tensor, which has no elements"
    label = "elements" if tensor.flat else "dim {}:"
    sharded = [
        f"{label.format(dim)} {_describe_runs(runs)} of {size}"
        for dim, (runs, size) in enumerate(zip(piece.regions, tensor.extent, strict=True))
        if _length(runs) != size
    ]
    return ", ".join(sharded) or "whole tensor"


def _describe_runs(runs: Region, most: int = 4) -> str:
    listed = ", ".join(str(start) if stop - start == 1 else f"{start}-{stop - 1}" for start, stop in runs[:most])
    return listed + (f" and {len(runs) - most} more runs" if len(runs) > most else "")


def _picture(tensor: TensorRecord, held: Sequence[Held], world: WorldFacts) -> Picture:
    columns = _boxes_per_row(world)
    dims = _drawn_dims(tensor)
    box_height = BOX_HEIGHT if len(dims) > 1 else VECTOR_HEIGHT
    row_height = box_height + GAP + LABEL_HEIGHT
    fills: dict[str, list[str]] = {}
    places = {}
    for box, rank in enumerate(world.ranks):
        places[rank] = (box % columns * (BOX_WIDTH + GAP), LABEL_HEIGHT + box // columns * row_height)
    for part in held:
        rectangles = _rectangles(tensor, part.piece, dims, box_height) if part.piece is not None else []
        for rank in part.ranks:
            x, y = places.get(rank, (0, 0))
            fills.setdefault(part.state, []).extend(
                f"M{_decimal(x + left)} {_decimal(y + top)}h{_decimal(width)}v{_decimal(height)}h{_decimal(-width)}z"
                for left, top, width, height in rectangles
            )
    rows = -(-len(places) // columns)
    return Picture(
        width=min(columns, len(places)) * (BOX_WIDTH + GAP),
        height=rows * row_height,
        box=box_height,
        outlines="".join(f"M{x} {y}h{BOX_WIDTH}v{box_height}h{-BOX_WIDTH}z" for x, y in places.values()),
        fills=tuple((state, "".join(parts)) for state, parts in fills.items() if parts),
        labels=tuple((x, y - 2, rank) for rank, (x, y) in places.items()),
    )


def _boxes_per_row(world: WorldFacts) -> int:
    """Return the size of the last mesh dimension if there are several and a row of that size is short enough."""
    sizes = [size for _, size in world.mesh]
    if world.simulated:
        return min(BOXES_PER_ROW, len(world.simulated))
    if len(sizes) > 1 and sizes[-1] <= 2 * BOXES_PER_ROW and prod(sizes) == world.size:
        return sizes[-1]
    return min(BOXES_PER_ROW, max(world.size, 1))


def _drawn_dims(tensor: TensorRecord) -> tuple[int, ...]:
    """Return the one or two dims to draw: sharded dims first, then the others."""
    count = len(tensor.extent)
    if count < 2:
        return tuple(range(count))
    sharded = [
        dim
        for dim, size in enumerate(tensor.extent)
        if any(_length(piece.regions[dim]) != size for piece in tensor.pieces if _is_known(tensor, piece))
    ]
    others = [dim for dim in range(count) if dim not in sharded]
    return tuple(sorted([*sharded, *others][:2]))


def _rectangles(
    tensor: TensorRecord, piece: Piece, dims: Sequence[int], height: int
) -> list[tuple[float, float, float, float]]:
    """Return (left, top, width, height) of the parts of a box that a piece fills; the last of ``dims`` runs right."""
    if not _is_known(tensor, piece) or not _elements(piece):
        return []
    across = _scaled(piece.regions[dims[-1]], tensor.extent[dims[-1]], BOX_WIDTH) if dims else [(0.0, float(BOX_WIDTH))]
    down = _scaled(piece.regions[dims[0]], tensor.extent[dims[0]], height) if len(dims) > 1 else [(0.0, float(height))]
    return [(left, top, right - left, bottom - top) for top, bottom in down for left, right in across]


def _scaled(runs: Region, size: int, length: int) -> list[tuple[float, float]]:
    """Scale runs to pixels. Each is wide enough to be visible, and runs that would touch are joined."""
    scaled: list[tuple[float, float]] = []
    for start, stop in runs:
        low, high = start / size * length, stop / size * length
        high = max(high, low + LEAST_WIDTH)
        if scaled and low - scaled[-1][1] < LEAST_WIDTH / 4:
            scaled[-1] = (scaled[-1][0], high)
        else:
            scaled.append((low, high))
    return scaled


def _decimal(number: float) -> str:
    """Return a number with at most one decimal, to keep the page small."""
    return f"{number:.1f}".removesuffix(".0")
