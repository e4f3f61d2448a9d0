"""The data of the charts: losses against the reference, and memory against the model's size and the budget."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isfinite

from pytest_fsdp_meta.reports.schema import Curves, Summary

FLOOR = 1e-9
"""Relative differences are drawn on a log scale, and equal losses at this height."""


@dataclass(frozen=True)
class LossRow:
    """One training step in the table; None where there is no reference."""

    mean: float
    reference: float | None
    difference: float | None
    """Relative to the largest loss of the reference, as ``loss_parity`` judges it; infinite for a NaN."""
    allowed: float | None
    slices: tuple[float | None, ...]

    @property
    def is_off(self) -> bool:
        return self.difference is not None and self.allowed is not None and self.difference > self.allowed


@dataclass(frozen=True)
class LossChart:
    """The losses as a table, and what the script plots of them."""

    rows: tuple[LossRow, ...]
    slices: int
    points: str

    @property
    def has_reference(self) -> bool:
        return any(row.reference is not None for row in self.rows)

    @property
    def lost(self) -> tuple[int, ...]:
        """The steps, from 1, whose loss is NaN or infinite on the ranks or in the reference."""
        return tuple(step for step, row in enumerate(self.rows, 1) if not _is_finite(row))

    @property
    def off(self) -> tuple[int, ...]:
        """The steps, from 1, whose loss differs by more than the tolerance."""
        return tuple(step for step, row in enumerate(self.rows, 1) if row.is_off)


@dataclass(frozen=True)
class MemoryChart:
    """The memory of each rank while loading. ``points`` is empty without timelines."""

    model: int
    budget: int
    points: str


def loss_chart(losses: Curves) -> LossChart:
    """Return the chart of the losses: their difference from the reference's, or the losses without a reference."""
    largest = max([1e-12, *(abs(value) for value in losses.reference if isfinite(value))])
    rows = tuple(_row(losses, step, largest) for step in range(len(losses.mean)))
    points: dict[str, object] = {"lost": [step for step, row in enumerate(rows, 1) if not _is_finite(row)]}
    if losses.reference:
        points["difference"] = [_drawn(row.difference) for row in rows]
        points["allowed"] = [row.allowed for row in rows]
    else:
        points |= {"mean": _finite(losses.mean), "ranks": [_finite(one) for one in losses.ranks]}
    return LossChart(rows, len(losses.ranks), json.dumps(points, separators=(",", ":"), allow_nan=False))


def memory_chart(summary: Summary) -> MemoryChart | None:
    """Return the chart of the memory; None if it was not measured."""
    if not summary.memory:
        return None
    points = ""
    if any(one.timeline for one in summary.memory):
        lines = [one.timeline for one in summary.memory]
        facts = {"ranks": lines, "model": summary.model_bytes, "budget": summary.load_budget}
        points = json.dumps(facts, separators=(",", ":"), allow_nan=False)
    return MemoryChart(summary.model_bytes, summary.load_budget, points)


def _row(losses: Curves, step: int, largest: float) -> LossRow:
    mean, reference = losses.mean[step], _at(losses.reference, step)
    difference = None
    if reference is not None:
        difference = abs(mean - reference) / largest if isfinite(mean) and isfinite(reference) else float("inf")
    allowed = _at(losses.tolerance, step)
    return LossRow(mean, reference, difference, allowed, tuple(_at(one, step) for one in losses.ranks))


def _at(values: Sequence[float], step: int) -> float | None:
    return values[step] if step < len(values) else None


def _is_finite(row: LossRow) -> bool:
    return isfinite(row.mean) and (row.reference is None or isfinite(row.reference))


def _drawn(difference: float | None) -> float | None:
    """Return a difference for a log scale; None, which is a gap, where it is not finite or unknown."""
    return max(difference, FLOOR) if difference is not None and isfinite(difference) else None


def _finite(values: Iterable[float]) -> list[float | None]:
    return [value if isfinite(value) else None for value in values]
