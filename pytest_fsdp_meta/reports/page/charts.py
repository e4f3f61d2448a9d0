"""The table of a loader's losses, and the plot of its memory against the model's size and the budget.

Lines lie in a square of 1000 by 1000 that the page stretches, but not its texts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, floor, isfinite, log2, log10

from pytest_fsdp_meta.reports.schema import Curves, Summary
from pytest_fsdp_meta.text import as_bytes

HUES = 8
"""Colours of ranks; the lines of further ones are dashed."""
SIDE = 1000
MOST_TICKS = 6
MOST_NAMED = 12
"""With more lines than this, a plot has no legend."""


@dataclass(frozen=True)
class Axis:
    """An axis from ``low`` to ``high``; ``ticks`` are the values that are written beside it."""

    label: str
    low: float
    high: float
    ticks: tuple[float, ...]
    write: Callable[[float], str]

    def place(self, value: float) -> float:
        """Return where a value lies, between 0 and 1."""
        return (value - self.low) / (self.high - self.low)


@dataclass(frozen=True)
class Curve:
    """The points of a stepped line. ``style`` are its classes, ``rank`` whose it is if it is one rank's."""

    label: str
    style: str
    points: Sequence[tuple[float, float]]
    rank: int | None = None


@dataclass(frozen=True)
class Plot:
    """Lines over two axes."""

    x: Axis
    y: Axis
    lines: tuple[Curve, ...]

    @property
    def has_legend(self) -> bool:
        return len(self.lines) <= MOST_NAMED

    @property
    def x_ticks(self) -> list[tuple[str, str]]:
        """The ticks below the plot, as (place in percent, text)."""
        return [(percent(self.x.place(tick)), self.x.write(tick)) for tick in self.x.ticks]

    @property
    def y_ticks(self) -> list[tuple[str, str]]:
        return [(percent(1 - self.y.place(tick)), self.y.write(tick)) for tick in self.y.ticks]

    def path(self, line: Curve) -> str:
        """Return the path of a line."""
        places = [self._place(x, y) for x, y in line.points]
        first = "M{} {}".format(*places[0])
        return first + "".join(f"H{across}V{down}" for across, down in places[1:]) + f"H{SIDE}"

    def _place(self, x: float, y: float) -> tuple[int, int]:
        return round(SIDE * self.x.place(x)), round(SIDE * (1 - self.y.place(y)))


def percent(share: float) -> str:
    return f"{100 * share:.4g}%"


def bytes_axis(label: str, largest: float) -> Axis:
    """Return an axis from zero, with a power of two between its ticks."""
    high = largest * 1.05 or 1.0
    apart = 2.0 ** max(0, ceil(log2(high / (MOST_TICKS - 1))))
    return Axis(label, 0, high, _ticks(0, high, apart), lambda size: as_bytes(round(size)))


def _round_step(extent: float) -> float:
    """Return the least of 1, 2 and 5 times a power of ten that gives few ticks."""
    least = extent / (MOST_TICKS - 1)
    power = 10.0 ** floor(log10(least))
    return next(many * power for many in (1, 2, 5, 10) if many * power >= least)


def _ticks(low: float, high: float, apart: float) -> tuple[float, ...]:
    return tuple(number * apart for number in range(ceil(low / apart), floor(high / apart) + 1))


@dataclass(frozen=True)
class LossRow:
    """One training step; None where there is no reference."""

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
class LossTable:
    """The losses of all steps."""

    rows: tuple[LossRow, ...]
    slices: int

    @property
    def has_reference(self) -> bool:
        return any(row.reference is not None for row in self.rows)


def loss_table(losses: Curves) -> LossTable:
    """Return the losses, with their difference from the reference's if there is one."""
    largest = max([1e-12, *(abs(value) for value in losses.reference if isfinite(value))])
    rows = tuple(_row(losses, step, largest) for step in range(len(losses.mean)))
    return LossTable(rows, len(losses.ranks))


def plot_memory(summary: Summary) -> Plot | None:
    """Return the plot of the memory of each rank while loading; None without timelines."""
    if not any(one.timeline for one in summary.memory):
        return None
    ranks = [
        Curve(f"rank {rank}", f"hue-{rank % HUES}{' again' if rank >= HUES else ''}", ((0, 0), *one.timeline), rank)
        for rank, one in enumerate(summary.memory)
    ]
    levels = (("whole model", "model", summary.model_bytes), ("a rank may hold", "budget", summary.load_budget))
    lines = (*ranks, *(Curve(label, style, ((0, level),)) for label, style, level in levels if level))
    end = max(line.points[-1][0] for line in ranks) or 1.0
    ticks = _ticks(0, end, _round_step(end))
    return Plot(
        Axis("seconds since loading began", 0, end, ticks, lambda seconds: f"{seconds:.4g}"),
        bytes_axis("live bytes on the host", max(value or 0 for line in lines for _, value in line.points)),
        lines,
    )


def _row(losses: Curves, step: int, largest: float) -> LossRow:
    mean, reference = losses.mean[step], _at(losses.reference, step)
    difference = None
    if reference is not None:
        difference = abs(mean - reference) / largest if isfinite(mean) and isfinite(reference) else float("inf")
    allowed = _at(losses.tolerance, step)
    return LossRow(mean, reference, difference, allowed, tuple(_at(one, step) for one in losses.ranks))


def _at(values: Sequence[float], step: int) -> float | None:
    return values[step] if step < len(values) else None


def describe_loss(value: float) -> str:
    """Return a loss with six digits, or "nan" or "inf"."""
    return f"{value:.6g}" if isfinite(value) else str(value)
