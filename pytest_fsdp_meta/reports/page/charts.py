"""The charts of a loader: losses against the reference, and memory against the model's size and the budget.

Lines lie in a square of 1000 by 1000 that the page stretches, but not its texts and dots.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil, floor, inf, isfinite, log2, log10

from pytest_fsdp_meta.reports.schema import Curves, Summary
from pytest_fsdp_meta.text import as_bytes

FLOOR = 1e-9
"""Relative differences are drawn on a log scale, and equal losses at this height."""
HUES = 8
"""Colours of ranks; the lines of further ones are dashed."""
SIDE = 1000
MOST_TICKS = 6
MOST_COLUMNS = 24
"""Places along a plot that show their values when they are pointed at."""
MOST_NAMED = 12
"""With more lines than this, a plot has no legend."""

Point = tuple[float, float | None]


@dataclass(frozen=True)
class Axis:
    """An axis from ``low`` to ``high``; ``ticks`` are the values that are written beside it."""

    label: str
    low: float
    high: float
    ticks: tuple[float, ...]
    write: Callable[[float], str]
    is_log: bool = False

    def place(self, value: float) -> float:
        """Return where a value lies, between 0 and 1."""
        low, high = self.low, self.high
        if self.is_log:
            value, low, high = log10(value), log10(low), log10(high)
        return (value - low) / (high - low)


@dataclass(frozen=True)
class Curve:
    """The points of a line; None is a gap. ``style`` are its classes, ``rank`` whose it is if it is one rank's."""

    label: str
    style: str
    points: Sequence[Point]
    rank: int | None = None
    is_stepped: bool = False
    has_dots: bool = False

    def at(self, x: float) -> float | None:
        """Return its value at a point; between points, a stepped line has that of the point before."""
        index = bisect_right(self.points, x, key=lambda point: point[0]) - 1
        if index < 0 or (not self.is_stepped and self.points[index][0] != x):
            return None
        return self.points[index][1]


@dataclass(frozen=True)
class Plot:
    """Lines over two axes. ``lost`` are the values of x at which there is nothing to draw, since it is not finite."""

    x: Axis
    y: Axis
    lines: tuple[Curve, ...]
    lost: tuple[float, ...] = ()
    band: Curve | None = None
    """The area below this line is filled: values in it are allowed."""
    off: frozenset[float] = field(default_factory=frozenset)
    """The values of x whose dots are outside of what is allowed."""

    @property
    def has_legend(self) -> bool:
        return len(self.lines) <= MOST_NAMED

    @property
    def x_ticks(self) -> list[tuple[str, str]]:
        """The ticks below the plot, as (place in percent, text)."""
        return [(percent(self.x.place(tick)), self.x.write(tick)) for tick in self.x.ticks]

    @property
    def y_ticks(self) -> list[tuple[str, str]]:
        write = "{:.0e}".format if self.y.is_log else self.y.write
        return [(percent(1 - self.y.place(tick)), write(tick)) for tick in self.y.ticks]

    def path(self, line: Curve) -> str:
        """Return the path of a line."""
        parts, drawn = [], False
        for x, y in line.points:
            if y is not None:
                across, down = self._place(x, y)
                step = f"H{across}V{down}" if line.is_stepped else f"L{across} {down}"
                parts.append(step if drawn else f"M{across} {down}")
            drawn = y is not None
        return "".join(parts) + (f"H{SIDE}" if line.is_stepped and drawn else "")

    @property
    def area(self) -> str:
        """The path of what the band fills, from the left end of the plot to the right one."""
        known = [self._place(x, y) for x, y in self.band.points if y is not None] if self.band else []
        if not known:
            return ""
        edge = "".join(f"L{across} {down}" for across, down in known)
        return f"M0 {SIDE}V{known[0][1]}{edge}H{SIDE}V{SIDE}z"

    def dots(self, line: Curve) -> list[tuple[str, str, bool]]:
        """Return the places of a line's dots in percent, and whether they are off."""
        return [
            (percent(self.x.place(x)), percent(1 - self.y.place(y)), x in self.off)
            for x, y in line.points
            if line.has_dots and y is not None
        ]

    @property
    def crosses(self) -> list[str]:
        return [percent(self.x.place(x)) for x in self.lost]

    @property
    def columns(self) -> list[tuple[str, str, str]]:
        """Strips of the plot, as (left, width, the values of all lines there)."""
        values = sorted({x for line in self.lines for x, _ in line.points})
        values = values[:: ceil(len(values) / MOST_COLUMNS) or 1]
        places = [self.x.place(value) for value in values]
        ends = [0.0, *((one + other) / 2 for one, other in pairwise(places)), 1.0]
        return [
            (percent(left), percent(right - left), self._describe(value))
            for value, left, right in zip(values, ends, ends[1:], strict=False)
        ]

    def _place(self, x: float, y: float) -> tuple[int, int]:
        return round(SIDE * self.x.place(x)), round(SIDE * (1 - self.y.place(y)))

    def _describe(self, x: float) -> str:
        where = f"{self.x.label}: {self.x.write(x)}"
        if not self.has_legend:
            known = [value for line in self.lines if (value := line.at(x)) is not None]
            return f"{where}\n{self.y.write(min(known))} to {self.y.write(max(known))}" if known else where
        values = [(line.label, line.at(x)) for line in self.lines]
        return "\n".join([where, *(f"{label}: {'none' if y is None else self.y.write(y)}" for label, y in values)])


def percent(share: float) -> str:
    return f"{100 * share:.4g}%"


def step_axis(count: int) -> Axis:
    """Return the axis of training steps, from 1."""
    apart = ceil(count / MOST_TICKS) or 1
    return Axis("step", 0.85, count + 0.15, tuple(range(1, count + 1, apart)), lambda step: f"{step:g}")


def linear_axis(label: str, values: Iterable[float], write: Callable[[float], str]) -> Axis:
    """Return an axis on which all values lie, with round numbers beside it."""
    known = sorted(values) or [0.0, 1.0]
    margin = (known[-1] - known[0]) / 20 or abs(known[-1]) / 20 or 1.0
    low, high = known[0] - margin, known[-1] + margin
    return Axis(label, low, high, _ticks(low, high, _round_step(high - low)), write)


def bytes_axis(label: str, largest: float) -> Axis:
    """Return an axis from zero, with a power of two between its ticks."""
    high = largest * 1.05 or 1.0
    apart = 2.0 ** max(0, ceil(log2(high / (MOST_TICKS - 1))))
    return Axis(label, 0, high, _ticks(0, high, apart), lambda size: as_bytes(round(size)))


def log_axis(label: str, low: float, high: float, write: Callable[[float], str]) -> Axis:
    """Return an axis with powers of ten beside it."""
    first, last = ceil(log10(low)), floor(log10(high))
    ticks = range(first, last + 1, ceil((last - first + 1) / MOST_TICKS))
    return Axis(label, low, high, tuple(10.0**power for power in ticks), write, is_log=True)


def _round_step(extent: float) -> float:
    """Return the least of 1, 2 and 5 times a power of ten that gives few ticks."""
    least = extent / (MOST_TICKS - 1)
    power = 10.0 ** floor(log10(least))
    return next(many * power for many in (1, 2, 5, 10) if many * power >= least)


def _ticks(low: float, high: float, apart: float) -> tuple[float, ...]:
    return tuple(number * apart for number in range(ceil(low / apart), floor(high / apart) + 1))


@dataclass(frozen=True)
class LossRow:
    """One training step, from 1; None where there is no reference."""

    step: int
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
    def off(self) -> tuple[int, ...]:
        """The steps, from 1, whose loss differs by more than the tolerance."""
        return tuple(row.step for row in self.rows if row.is_off)


def loss_chart(losses: Curves) -> LossChart:
    """Return the chart of the losses: their difference from the reference's, or the losses without a reference."""
    largest = max([1e-12, *(abs(value) for value in losses.reference if isfinite(value))])
    rows = tuple(_row(losses, step, largest) for step in range(len(losses.mean)))
    plot = _plot_differences(rows) if losses.reference else _plot_losses(losses, rows)
    return LossChart(rows, len(losses.ranks), plot)


def _plot_differences(rows: Sequence[LossRow]) -> Plot:
    difference = Curve("difference", "main", [(row.step, _drawn(row.difference)) for row in rows], has_dots=True)
    limits = ((row.step, row.allowed) for row in rows)
    allowed = Curve("allowed", "allowed", [(step, y if y is not None and 0 < y < inf else None) for step, y in limits])
    known = [value for _, value in (*difference.points, *allowed.points) if value is not None]
    low, high = min([1e-7, *known]) / 2, max([1e-4, *known]) * 3
    has_band = any(value is not None for _, value in allowed.points)
    return Plot(
        step_axis(len(rows)),
        log_axis("relative difference", low, high, lambda value: f"{value:.2g}"),
        (difference, allowed) if has_band else (difference,),
        _lost(rows),
        allowed if has_band else None,
        frozenset(row.step for row in rows if row.is_off),
    )


def _plot_losses(losses: Curves, rows: Sequence[LossRow]) -> Plot:
    curves = losses.ranks if len(losses.ranks) > 1 else ()
    slices = [Curve(f"slice {slice_}", "slice", _finite(curve)) for slice_, curve in enumerate(curves)]
    lines = (*slices, Curve("mean of ranks", "main", _finite(losses.mean), has_dots=True))
    values = [value for line in lines for _, value in line.points if value is not None]
    return Plot(step_axis(len(rows)), linear_axis("loss", values, describe_loss), lines, _lost(rows))


def plot_memory(summary: Summary) -> Plot | None:
    """Return the plot of the memory of each rank while loading; None without timelines."""
    if not any(one.timeline for one in summary.memory):
        return None
    ranks = [
        Curve(
            f"rank {rank}", f"hue-{rank % HUES}{' again' if rank >= HUES else ''}", ((0, 0), *one.timeline), rank, True
        )
        for rank, one in enumerate(summary.memory)
    ]
    levels = (("whole model", "model", summary.model_bytes), ("a rank may hold", "budget", summary.load_budget))
    lines = (*ranks, *(Curve(label, style, ((0, level),), is_stepped=True) for label, style, level in levels if level))
    end = max(line.points[-1][0] for line in ranks) or 1.0
    ticks = _ticks(0, end, _round_step(end))
    return Plot(
        Axis("seconds since loading began", 0, end, ticks, lambda seconds: f"{seconds:.4g}"),
        bytes_axis("live bytes on the host", max(value or 0 for line in lines for _, value in line.points)),
        lines,
    )


def _lost(rows: Sequence[LossRow]) -> tuple[int, ...]:
    """Return the steps, from 1, whose loss is NaN or infinite on the ranks or in the reference."""
    return tuple(row.step for row in rows if not isfinite(row.mean) or not isfinite(row.reference or 0.0))


def _row(losses: Curves, step: int, largest: float) -> LossRow:
    mean, reference = losses.mean[step], _at(losses.reference, step)
    difference = None
    if reference is not None:
        difference = abs(mean - reference) / largest if isfinite(mean) and isfinite(reference) else float("inf")
    allowed = _at(losses.tolerance, step)
    return LossRow(step + 1, mean, reference, difference, allowed, tuple(_at(one, step) for one in losses.ranks))


def _at(values: Sequence[float], step: int) -> float | None:
    return values[step] if step < len(values) else None


def _drawn(difference: float | None) -> float | None:
    """Return a difference for a log scale; None, which is a gap, where it is not finite or unknown."""
    return max(difference, FLOOR) if difference is not None and isfinite(difference) else None


def _finite(values: Sequence[float]) -> list[tuple[float, float | None]]:
    return [(step, value if isfinite(value) else None) for step, value in enumerate(values, 1)]


def describe_loss(value: float) -> str:
    """Return a loss with six digits, or "nan" or "inf"."""
    return f"{value:.6g}" if isfinite(value) else str(value)
