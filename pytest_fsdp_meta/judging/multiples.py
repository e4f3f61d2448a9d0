"""Find the factor between a value and its reference, and what else has that number (ranks, mesh dimensions)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from pytest_fsdp_meta.evidence import Measure, RankTraining, splits_model
from pytest_fsdp_meta.judging.view import View

ROUNDING = 1e-2
"""Relative; reduced gradients agree within this on all ranks, gradients of different rows differ by far more."""
SLIGHT = 0.01
"""Fraction of the vector's norm; a gradient that is not reduced or not computed is farther off."""
WIDEST = 0.25
"""Relative; factors that differ by more are never grouped, however uncertain they are."""
DIGITS = 3
"""Significant digits of a factor in messages."""


def multiple(measure: Measure, allowed: float) -> str:
    """Return the constant factor of a gradient ("2", "1/2", "0"); empty if there is none, or it is close to 1."""
    if not math.isfinite(measure.apart):
        return ""
    if not measure.actual:
        return "0"
    factor = measure.factor
    if measure.residual > max(allowed, ROUNDING) or factor <= 0 or not measure.truth:
        return ""
    # A factor that leaves more of the difference than it explains says nothing.
    constant = abs(factor - 1) >= max(SLIGHT, measure.residual)
    return whole(factor, max(allowed, 1e-3)) or (f"{factor:.4g}" if constant else "")


_INVERSE = "1/"


def divides(factor: str) -> bool:
    """Return whether a factor that ``whole`` returned is below 1."""
    return factor.startswith(_INVERSE)


def whole(factor: float, allowed: float) -> str:
    """Return a factor like "2" or "1/2" if it or its inverse is whole within ``allowed`` (relative); else empty."""
    if not factor > 0 or not math.isfinite(factor) or not math.isfinite(1 / factor):
        return ""
    number = round(max(factor, 1 / factor))
    for value, text in ((float(number), str(number)), (1 / number, f"{_INVERSE}{number}")):
        if number > 1 and abs(factor / value - 1) <= allowed:
            return text
    return ""


def number_of(view: View, runs: Sequence[RankTraining], factor: str, name: str | None = None) -> tuple[str, str]:
    """Return the number in a factor ("2" for "2" and "1/2") and what has that number, such as data-parallel ranks.

    If the loader created its own meshes, the one of the tensor ``name`` counts.
    """
    number = factor.removeprefix(_INVERSE)
    matches = [f"the number of {what}" for what, size in _sizes(view, runs, name).items() if str(size) == number]
    return number, " and ".join(matches)


def _sizes(view: View, runs: Sequence[RankTraining], name: str | None) -> dict[str, int]:
    """Return the number of data-parallel ranks and of ranks along each mesh dimension, where more than one."""
    mesh = dict(view.evidence.world.mesh)
    for _, tensor in view.holders(name) if name else ():
        if tensor.mesh is not None:
            mesh |= {dim: size for dim, size in tensor.mesh.pairs if dim}
    slices = runs[0].data_parallel[1]
    found = {"data-parallel ranks": slices} if slices > 1 else {}
    others = {f"ranks along {dim}": size for dim, size in mesh.items() if size > 1}
    if found and list(others.values()) == [slices] and not splits_model(next(iter(mesh))):
        return found
    return found | others


def alike(uncertainties: Mapping[float, float], spread: float) -> dict[float, str]:
    """Return a display text for each factor; factors that are nearly equal share one.

    ``uncertainties`` maps each factor to its relative uncertainty. No factor is displayed as 1, and none above 1
    shares its text with one below, so that a reader sees the direction.
    """
    names: dict[float, str] = {}
    group: list[float] = []
    for factor in [*sorted(uncertainties), math.inf]:
        uncertain = [uncertainties[member] for member in group]
        room = max(spread, min(2 * max(uncertain, default=0.0), WIDEST))
        if group and (factor > group[0] * (1 + room) or (group[0] < 1) is not (factor < 1)):
            names |= dict.fromkeys(group, _round(group, math.fsum(uncertain) / len(group)))
            group = []
        group.append(factor)
    return names


def _round(group: Sequence[float], uncertainty: float) -> str:
    """Return a whole number, its inverse or a quarter within the uncertainty of all; else the mean, never shown as 1.

    Factors that people set are round, and several training steps blur them.
    """
    least, most = group[0] * (1 - uncertainty), group[-1] * (1 + uncertainty)
    mean = math.fsum(group) / len(group)
    numbers = (float(round(mean)), 1 / round(1 / mean) if mean < 1 else 1.0, round(4 * mean) / 4)
    for number in numbers:
        if least <= number <= most and number not in (0.0, 1.0):
            return f"{number:.{DIGITS}g}"
    texts = (f"{mean:.{digits}g}" for digits in range(DIGITS, 18))
    return next((text for text in texts if float(text) != 1), f"{mean:.17g}")
