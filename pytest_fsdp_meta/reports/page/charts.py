"""The charts of a loader: losses against the reference, and memory against the model's size and the budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite

from pytest_fsdp_meta.reports.page.plots import Line, Plot, bytes_axis, linear_axis, log_axis, step_axis, time_axis
from pytest_fsdp_meta.reports.schema import Curves, Summary

FLOOR = 1e-9
"""Relative differences are drawn on a log scale, and equal losses at this height."""
HUES = 8
"""Colours of ranks; the lines of further ones are dashed."""


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
    """The losses as a table and as a plot."""

    rows: tuple[LossRow, ...]
    slices: int
    plot: Plot

    @property
    def has_reference(self) -> bool:
        return any(row.reference is not None for row in self.rows)

    @property
    def lost(self) -> tuple[float, ...]:
        """The steps, from 1, whose loss is NaN or infinite on the ranks or in the reference."""
        return self.plot.lost

    @property
    def off(self) -> tuple[int, ...]:
        """The steps, from 1, whose loss differs by more than the tolerance."""
        return tuple(step for step, row in enumerate(self.rows, 1) if row.is_off)


def loss_chart(losses: Curves) -> LossChart:
    """Return the chart of the losses: their difference from the reference's, or the losses without a reference."""
    largest = max([1e-12, *(abs(value) for value in losses.reference if isfinite(value))])
    rows = tuple(_row(losses, step, largest) for step in range(len(losses.mean)))
    plot = _plot_differences(rows) if losses.reference else _plot_losses(losses, rows)
    return LossChart(rows, len(losses.ranks), plot)


def _plot_differences(rows: Sequence[LossRow]) -> Plot:
    difference = Line(
        "difference", "main", [(step, _drawn(row.difference)) for step, row in _steps(rows)], has_dots=True
    )
    allowed = Line("allowed", "allowed", [(step, _positive(row.allowed)) for step, row in _steps(rows)])
    known = [value for _, value in (*difference.points, *allowed.points) if value is not None]
    low, high = min([1e-7, *known]) / 2, max([1e-4, *known]) * 3
    has_band = any(value is not None for _, value in allowed.points)
    return Plot(
        step_axis(len(rows)),
        log_axis("relative difference", low, high, lambda value: f"{value:.2g}"),
        (difference, allowed) if has_band else (difference,),
        _lost(rows),
        allowed if has_band else None,
        frozenset(step for step, row in _steps(rows) if row.is_off),
    )


def _plot_losses(losses: Curves, rows: Sequence[LossRow]) -> Plot:
    curves = losses.ranks if len(losses.ranks) > 1 else ()
    slices = [Line(f"slice {slice_}", "slice", _finite(curve)) for slice_, curve in enumerate(curves)]
    lines = (*slices, Line("mean of ranks", "main", _finite(losses.mean), has_dots=True))
    values = [value for line in lines for _, value in line.points if value is not None]
    return Plot(step_axis(len(rows)), linear_axis("loss", values, describe_loss), lines, _lost(rows))


def plot_memory(summary: Summary) -> Plot | None:
    """Return the plot of the memory of each rank while loading; None without timelines."""
    if not any(one.timeline for one in summary.memory):
        return None
    ranks = [
        Line(
            f"rank {rank}", f"hue-{rank % HUES}{' again' if rank >= HUES else ''}", ((0, 0), *one.timeline), rank, True
        )
        for rank, one in enumerate(summary.memory)
    ]
    levels = (("whole model", "model", summary.model_bytes), ("a rank may hold", "budget", summary.load_budget))
    lines = (*ranks, *(Line(label, style, ((0, level),), is_stepped=True) for label, style, level in levels if level))
    return Plot(
        time_axis("seconds since loading began", max(line.points[-1][0] for line in ranks)),
        bytes_axis("live bytes on the host", max(value or 0 for line in lines for _, value in line.points)),
        lines,
    )


def _steps(rows: Sequence[LossRow]) -> list[tuple[int, LossRow]]:
    return list(enumerate(rows, 1))


def _lost(rows: Sequence[LossRow]) -> tuple[int, ...]:
    """Return the steps, from 1, whose loss is NaN or infinite on the ranks or in the reference."""
    return tuple(step for step, row in _steps(rows) if not _is_finite(row))


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


def _positive(value: float | None) -> float | None:
    return value if value is not None and 0 < value < inf else None


def _finite(values: Sequence[float]) -> list[tuple[float, float | None]]:
    return [(step, value if isfinite(value) else None) for step, value in enumerate(values, 1)]


def describe_loss(value: float) -> str:
    """Return a loss with six digits, or "nan" or "inf"."""
    return f"{value:.6g}" if isfinite(value) else str(value)
