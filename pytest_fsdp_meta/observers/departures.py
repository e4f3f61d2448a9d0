"""Find out in which simple way a tensor departs from the reference's: rounded, multiplied, shifted, or in part."""

from __future__ import annotations

import torch
from torch import Tensor

from pytest_fsdp_meta.evidence.traces import AGREES, DEPARTS, Departure

COARSE = (torch.bfloat16, torch.float16)
LEFT = 0.02
"""Fraction of a departure that a multiple, or one vector for all rows, may leave unexplained."""


def describe_departure(
    own: Tensor, reference: Tensor, values: tuple[Tensor, Tensor], noise: float, unit: float
) -> Departure | None:
    """Return how a tensor departs from the reference's part; None if no simple way is found.

    ``values`` are both in float64, as they were compared; ``noise`` is relative to the norm of the reference's, and
    ``unit`` is one unit in the last place of the dtypes in which the loader computes.
    """
    ours, theirs = values
    if not ours.numel() or not bool(ours.isfinite().all()):
        return None
    return (
        _rounded(own, reference, unit)
        or _multiple(ours, theirs, noise)
        or _shifted(ours, theirs, noise)
        or _some_rows(ours, theirs, noise)
        or _some_columns(ours, theirs, noise)
    )


def _rounded(own: Tensor, reference: Tensor, unit: float) -> Departure | None:
    """Return in which coarser dtype all values are, also if they were cast back since.

    A dtype in which the loader is known to compute says nothing.
    """
    if not own.is_floating_point() or not reference.is_floating_point():
        return None
    for coarse in (own.dtype, *COARSE):
        is_coarser = torch.finfo(coarse).eps > max(2 * unit, torch.finfo(reference.dtype).eps)
        if is_coarser and own.count_nonzero() and _fits(own, coarse) and not _fits(reference, coarse):
            return Departure(dtypes=(_name(coarse), _name(reference.dtype)))
    return None


def _fits(tensor: Tensor, coarse: torch.dtype) -> bool:
    return bool((tensor.to(coarse).to(tensor.dtype) == tensor).all())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _multiple(ours: Tensor, theirs: Tensor, noise: float) -> Departure | None:
    length = float(theirs.norm())
    if not length:
        return None
    factor = float(ours.flatten().dot(theirs.flatten())) / length**2
    left = float((ours - factor * theirs).norm())
    apart = float((ours - theirs).norm())
    # A few elements are always a multiple of each other, nearly.
    if theirs.numel() > 2 and left <= max(LEFT * apart, AGREES * noise * length) < apart / 2:
        return Departure(factor=factor)
    return None


def _shifted(ours: Tensor, theirs: Tensor, noise: float) -> Departure | None:
    apart = (ours - theirs).reshape(-1, ours.shape[-1])
    if len(apart) < 3 or ours.shape[-1] < 2:
        return None
    left = float((apart - apart.mean(dim=0)).norm())
    if left <= max(LEFT * float(apart.norm()), AGREES * noise * float(theirs.norm())) < float(apart.norm()) / 2:
        return Departure(same_vector=True)
    return None


def _some_rows(ours: Tensor, theirs: Tensor, noise: float) -> Departure | None:
    ours, theirs = (tensor.reshape(-1, tensor.shape[-1]) for tensor in (ours, theirs))
    off = _slices_off(ours, theirs, noise)
    if off is None:
        return None
    own, known = ours[off], theirs[off]
    zero = not own.count_nonzero() and bool(known.count_nonzero(dim=1).all())
    return Departure(rows=(int(off.sum()), len(off)), zero=zero)


def _some_columns(ours: Tensor, theirs: Tensor, noise: float) -> Departure | None:
    off = _slices_off(ours.reshape(-1, ours.shape[-1]).T, theirs.reshape(-1, ours.shape[-1]).T, noise)
    if off is None:
        return None
    first, last = (int(off.nonzero()[end]) for end in (0, -1))
    return Departure(columns=(first, last + 1, len(off))) if bool(off[first : last + 1].all()) else None


def _slices_off(ours: Tensor, theirs: Tensor, noise: float) -> Tensor | None:
    """Return which rows of two matrices are off; None unless some are and all others agree."""
    # A row of small elements has the noise of the whole tensor.
    lengths = theirs.norm(dim=1).clamp_min(float(theirs.norm()) / max(len(theirs), 1) ** 0.5)
    distances = (ours - theirs).norm(dim=1) / lengths
    off, agreeing = distances > DEPARTS * noise, distances <= AGREES * noise
    return off if bool(off.any()) and bool(agreeing.any()) and bool((off | agreeing).all()) else None
