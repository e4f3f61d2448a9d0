"""Find which part of the reference's activation a rank's should equal, and in which simple way it departs from it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from pytest_fsdp_meta.checks.tracing.facts import AGREES, DEPARTS, Departure
from pytest_fsdp_meta.checks.values.observe import comparable
from pytest_fsdp_meta.evidence import Region
from pytest_fsdp_meta.ranks.adapters.dtensor import local_part, own_part
from pytest_fsdp_meta.ranks.reference_record import Record, is_array

MOST_SLICES = 2**15
"""Slices that are looked for in any order; a comparison of each with each needs the square of it in memory."""
SIGNS = 8
"""Random numbers that stand for a slice."""

_Way: TypeAlias = tuple[tuple[Region, ...], "int | None"]
"""The elements that a part has, and the dim that ``splits`` cut."""


@dataclass(frozen=True)
class Layout:
    """How a rank's activations lie in those of the whole batch on one device.

    ``rows`` is the (index, size) of its slice of the batch, and ``splits`` those along the mesh dimensions whose ranks
    see the same rows.
    """

    rows: tuple[int, int] = (0, 1)
    splits: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Match:
    """A rank's own tensor, and which elements of the reference's it should equal; ``split`` is a dim, or None."""

    local: Tensor
    regions: tuple[Region, ...]
    split: int | None = None
    placed: bool = False
    """Whether the tensor's placements say where it lies, so that nothing was guessed from its shape."""
    others: tuple[tuple[Region, ...], ...] = ()
    """The regions that fit the shape as well, but are less usual."""


def match(tensor: Tensor, shape: Sequence[int], layout: Layout) -> Match | None:
    """Return the part of a reference's tensor of this shape; None if it is not known, as for partial sums."""
    if not is_array(tensor) or not tensor.ndim:
        return None  # a mean over own rows is rightly another
    if isinstance(tensor, DTensor):
        return _match_placed(tensor, shape, layout)
    local = local_part(tensor)
    if local.ndim != len(shape):
        return None
    usual, less_usual = _fit(local.shape, shape, layout)
    if len(usual) != 1:
        return None
    [(regions, split)] = usual
    return Match(local, regions, split, others=tuple(other for other, _ in less_usual))


def _match_placed(tensor: DTensor, shape: Sequence[int], layout: Layout) -> Match | None:
    """Return the elements that a DTensor's placements imply; its global shape is that of the rows of its ranks."""
    if any(placement.is_partial() for placement in tensor.placements):
        return None
    part = own_part(tensor)
    if len(part.shape) != len(shape):
        return None
    usual, _ = _fit(part.shape, shape, Layout(layout.rows))
    if len(usual) != 1:
        return None
    starts = [runs[0][0] for runs in usual[0][0]]
    regions = tuple(
        tuple((first + start, last + start) for first, last in runs)
        for runs, start in zip(part.regions, starts, strict=True)
    )
    local = local_part(part.local)
    return Match(local, regions, placed=True) if is_array(local) else None


def _fit(own: Sequence[int], whole: Sequence[int], layout: Layout) -> tuple[list[_Way], list[_Way]]:
    """Return the ways in which a shape is a part of another one: those with the rows along dim 0, and the others.

    Where no way has them there, the others are the usual ones. At most one dim is cut by one of the splits.
    """
    off = [dim for dim, (mine, all_of) in enumerate(zip(own, whole, strict=True)) if mine != all_of]
    cuts: list[tuple[tuple[int, int], bool]] = [(split, True) for split in layout.splits]
    if layout.rows[1] > 1:
        cuts.append((layout.rows, False))
    ways = []
    for chosen in product(cuts, repeat=len(off)):
        fits = all(whole[dim] == own[dim] * size for dim, ((_, size), _) in zip(off, chosen, strict=True))
        if fits and len(set(chosen)) == len(chosen) and sum(is_split for _, is_split in chosen) <= 1:
            ways.append(dict(zip(off, chosen, strict=True)))
    # If dim 0 is shorter, it is the rows that are shared out, even if a mesh dimension that splits has the same size.
    by_rows = [way for way in ways if off[:1] == [0] and not way[0][1]]
    usual, less_usual = (by_rows, [way for way in ways if way not in by_rows]) if by_rows else (ways, [])
    return [_regions(way, own) for way in usual], [_regions(way, own) for way in less_usual]


def _regions(way: Mapping[int, tuple[tuple[int, int], bool]], own: Sequence[int]) -> _Way:
    starts = [way[dim][0][0] * size if dim in way else 0 for dim, size in enumerate(own)]
    split = next((dim for dim, (_, is_split) in way.items() if is_split), None)
    return tuple(((start, start + size),) for start, size in zip(starts, own, strict=True)), split


def is_in_another_order(values: Tensor, found: Match, record: Record, key: str, allowed: float) -> bool:
    """Return whether the slices along the split dim are other slices of the reference's tensor, as of a fused weight.

    Which ranks have which slices is then another matter than whether they were computed rightly. Slices are the same
    if they differ by the ``allowed`` relative distance at most.
    """
    dim, shape = found.split, record.shape(key)
    if dim is None or shape[dim] > MOST_SLICES:
        return False
    regions = [*found.regions]
    regions[dim] = ((0, shape[dim]),)
    ours, theirs = (
        tensor.double().movedim(dim, 0).flatten(1) for tensor in (values, comparable(record.read(key, regions)))
    )
    signs = torch.randn(ours.shape[1], SIGNS, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    own, whole = ours @ signs, theirs @ signs
    nearest = torch.cdist(own, whole).min(dim=1)
    first, last = found.regions[dim][0]
    elsewhere = bool((nearest.indices != torch.arange(first, last)).any())
    length = own.norm(dim=1).clamp_min(float(own.norm()) / math.sqrt(max(len(own), 1)))
    return elsewhere and bool((nearest.values <= allowed * length).all())


def sketch(tensor: Tensor) -> tuple[float, ...]:
    """Return sums of the elements with random signs, the same signs for tensors of the same size."""
    flat = comparable(tensor.cpu()).double().flatten()
    generator = torch.Generator().manual_seed(tensor.numel())
    bits = torch.randint(0, 2, (3, flat.numel()), generator=generator, dtype=torch.int8)
    return tuple(float((flat * (1.0 - 2.0 * own)).sum()) for own in bits)


COARSE = (torch.bfloat16, torch.float16)
ROUNDED = 2.0
"""How many units in the last place of a coarser dtype rounding to it may be off, as a norm."""
LEFT = 0.02
"""Fraction of a departure that a multiple, or one vector for all rows, may leave unexplained."""
FITTING, TELLING = 0.99, 0.05
"""Fraction of the elements that must fit a multiple, and of those that are large enough to tell it from no multiple."""


def describe_departure(
    own: Tensor, reference: Tensor, values: tuple[Tensor, Tensor], noise: float, unit: float
) -> Departure | None:
    """Return how a tensor departs from the reference's part; None if no simple way is found.

    ``values`` are both in float64, as they were compared; ``noise`` is relative to the norm of the reference's, and
    ``unit`` is one unit in the last place of the dtypes in which the loader computes.
    """
    ours, theirs = (tensor.reshape(-1, tensor.shape[-1]) if tensor.numel() else tensor for tensor in values)
    if own.is_complex() or not ours.numel() or not bool(ours.isfinite().all()):
        return None
    return (
        _rounded(ours, theirs, reference.dtype, unit)
        or _multiple(ours, theirs, noise)
        or _some_rows(ours, theirs, noise)
        or _some_columns(ours, theirs, noise)
        or _shifted(ours, theirs, noise)
        or _scaled_rows(ours, theirs, noise)
    )


def _rounded(ours: Tensor, theirs: Tensor, dtype: torch.dtype, unit: float) -> Departure | None:
    """Return in which coarser dtype all values are, also if they were cast back since.

    A dtype in which the loader is known to compute says nothing, nor do values that are off by more than rounding.
    """
    if not dtype.is_floating_point:
        return None
    distance = float((ours - theirs).norm()) / max(float(theirs.norm()), torch.finfo(torch.float64).tiny)
    for coarse in COARSE:
        eps = torch.finfo(coarse).eps
        may_be = max(2 * unit, torch.finfo(dtype).eps) < eps and distance <= ROUNDED * eps
        if may_be and _fits(ours, coarse) and not _fits(theirs, coarse):
            return Departure(dtypes=(str(coarse).removeprefix("torch."), str(dtype).removeprefix("torch.")))
    return None


def _fits(values: Tensor, coarse: torch.dtype) -> bool:
    return bool((values.to(coarse).double() == values).all())


def _multiple(ours: Tensor, theirs: Tensor, noise: float) -> Departure | None:
    """Return the multiple that all elements are, not only the few large ones that the norm is made of."""
    length = float(theirs.norm())
    if not length or theirs.numel() < 3:  # one or two elements are always a multiple of each other, nearly
        return None
    factor = float(ours.flatten().dot(theirs.flatten())) / length**2
    allowed = DEPARTS * noise * length / theirs.numel() ** 0.5
    due = abs(factor - 1) * theirs.abs()
    fitting = (ours - factor * theirs).abs() <= LEFT * due + allowed
    enough = float(fitting.double().mean()) >= FITTING and float((due > 2 * allowed).double().mean()) >= TELLING
    return Departure(factor=factor) if enough else None


def _some_rows(ours: Tensor, theirs: Tensor, noise: float) -> Departure | None:
    off = _rows_off(ours, theirs, noise)
    if off is None:
        return None
    zero = not ours[off].count_nonzero() and bool(theirs[off].count_nonzero(dim=1).all())
    return Departure(rows=(int(off.sum()), len(off)), zero=zero)


def _some_columns(ours: Tensor, theirs: Tensor, noise: float) -> Departure | None:
    off = _rows_off(ours.T, theirs.T, noise)
    if off is None:
        return None
    first, last = (int(off.nonzero()[end]) for end in (0, -1))
    return Departure(columns=(first, last + 1, len(off))) if bool(off[first : last + 1].all()) else None


def _rows_off(ours: Tensor, theirs: Tensor, noise: float) -> Tensor | None:
    """Return which rows of two matrices are off; None unless some are and all others agree."""
    # A row of small elements has the noise of the whole tensor.
    lengths = theirs.norm(dim=1).clamp_min(float(theirs.norm()) / max(len(theirs), 1) ** 0.5)
    distances = (ours - theirs).norm(dim=1) / lengths
    off, agreeing = distances > DEPARTS * noise, distances <= AGREES * noise
    return off if bool(off.any()) and bool(agreeing.any()) and bool((off | agreeing).all()) else None


def _shifted(ours: Tensor, theirs: Tensor, noise: float) -> Departure | None:
    """Return whether one vector is added to all rows, unless the reference's rows are one vector themselves."""
    apart = ours - theirs
    if len(apart) < 3 or ours.shape[1] < 2 or _is_one_vector(theirs, noise * float(theirs.norm())):
        return None
    allowed = max(LEFT * float(apart.norm()), AGREES * noise * float(theirs.norm()))
    return Departure(same_vector=True) if _is_one_vector(apart, allowed) and allowed < float(apart.norm()) / 2 else None


def _scaled_rows(ours: Tensor, theirs: Tensor, noise: float) -> Departure | None:
    """Return the range of the factors if each row is a multiple of its own: a statistic of the row is another one."""
    squares = theirs.square().sum(dim=1)
    if len(theirs) < 3 or ours.shape[1] < 3 or not bool((squares > 0).all()):
        return None
    factors = (ours * theirs).sum(dim=1) / squares
    due, allowed = (factors - 1).abs() * squares.sqrt(), DEPARTS * noise * float(theirs.norm()) / len(theirs) ** 0.5
    left = (ours - factors[:, None] * theirs).norm(dim=1)
    telling = float((due > 2 * allowed).double().mean()) >= 0.5
    fits = float((left <= LEFT * due + allowed).double().mean()) >= FITTING
    return Departure(row_factors=(float(factors.min()), float(factors.max()))) if telling and fits else None


def _is_one_vector(rows: Tensor, allowed: float) -> bool:
    return float((rows - rows.mean(dim=0)).norm()) <= allowed
