"""Find out in which simple way a tensor departs from the reference's: rounded, multiplied, shifted, or in part."""

from __future__ import annotations

import torch
from torch import Tensor

from pytest_fsdp_meta.checks.tracing.facts import AGREES, DEPARTS, Departure

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
