"""What is a multiple of the truth: by which factor, and of what there are just as many."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from pytest_fsdp_meta.catalogue.view import View
from pytest_fsdp_meta.evidence import Measure, RankTraining, splits_model

ROUNDING = 1e-2
"""Relative: reduced gradients are the same bits on every rank, or nearly; those of other rows differ by far more."""
SLIGHT = 0.01
"""Of its length: what is not reduced, or not computed, is farther off."""
WIDEST = 0.25
"""Relative: factors that differ by more are never told as one, however uncertain they are."""
DIGITS = 3
"""Significant ones, in which a factor is told."""


def multiple(measure: Measure, allowed: float) -> str:
    """The constant factor by which a gradient is off: "2", "1/2", "0"; empty where there is none but nearly 1."""
    if not math.isfinite(measure.apart):
        return ""
    if not measure.actual:
        return "0"
    factor = measure.factor
    if measure.residual > max(allowed, ROUNDING) or factor <= 0 or not measure.truth:
        return ""
    told = whole(factor, max(allowed, 1e-3))
    return told or (f"{factor:.4g}" if abs(factor - 1) >= SLIGHT else "")


def whole(factor: float, allowed: float) -> str:
    """ "2", "1/2": a factor that is a whole number, or one over it, within ``allowed`` (relative); else empty."""
    if not factor > 0 or not math.isfinite(factor) or not math.isfinite(1 / factor):
        return ""
    number = round(max(factor, 1 / factor))
    for value, told in ((float(number), str(number)), (1 / number, f"1/{number}")):
        if number > 1 and abs(factor / value - 1) <= allowed:
            return told
    return ""


def number_of(view: View, runs: Sequence[RankTraining], factor: str, name: str | None = None) -> tuple[str, str]:
    """The 2 of "2" and "1/2", and what there are just as many of: "the number of data-parallel ranks", or nothing.

    Of the meshes that loaders make themselves, that of the tensor ``name`` counts.
    """
    number = factor.removeprefix("1/")
    of = [f"the number of {what}" for what, size in _sizes(view, runs, name).items() if str(size) == number]
    return number, " and ".join(of)


def _sizes(view: View, runs: Sequence[RankTraining], name: str | None) -> dict[str, int]:
    """What there are several of: data-parallel ranks, and ranks along each dimension of a mesh."""
    mesh = dict(view.evidence.world.mesh)
    for rank in view.evidence.inventory:
        own = rank.by_name[name].mesh if name in rank.by_name else None
        if own is not None:
            mesh |= {dim: size for dim, size in zip(own.dims, own.shape, strict=True) if dim}
    slices = runs[0].data_parallel[1]
    found = {"data-parallel ranks": slices} if slices > 1 else {}
    others = {f"ranks along {dim}": size for dim, size in mesh.items() if size > 1}
    if found and list(others.values()) == [slices] and not splits_model(next(iter(mesh))):
        return found
    return found | others


def alike(shares: Mapping[float, float], spread: float) -> dict[float, str]:
    """What to call each factor; those that are nearly alike have one name. ``shares`` says how far each is uncertain.

    None is called 1, and none above 1 has the name of one below: the reader wants to know which it is.
    """
    names: dict[float, str] = {}
    group: list[float] = []
    for factor in [*sorted(shares), math.inf]:
        unsure = [shares[one] for one in group]
        room = max(spread, min(2 * max(unsure, default=0.0), WIDEST))
        if group and (factor > group[0] * (1 + room) or (group[0] < 1) is not (factor < 1)):
            names |= dict.fromkeys(group, _round(group, math.fsum(unsure) / len(group)))
            group = []
        group.append(factor)
    return names


def _round(group: Sequence[float], unsure: float) -> str:
    """The whole multiple, the part or the quarter that all may be; else their mean, in digits that tell it from 1.

    What people set is round, and several steps blur it.
    """
    least, most = group[0] * (1 - unsure), group[-1] * (1 + unsure)
    mean = math.fsum(group) / len(group)
    numbers = (float(round(mean)), 1 / round(1 / mean) if mean < 1 else 1.0, round(4 * mean) / 4)
    for number in numbers:
        if least <= number <= most and number not in (0.0, 1.0):
            return f"{number:.{DIGITS}g}"
    told = (f"{mean:.{digits}g}" for digits in range(DIGITS, 18))
    return next((one for one in told if float(one) != 1), f"{mean:.17g}")
