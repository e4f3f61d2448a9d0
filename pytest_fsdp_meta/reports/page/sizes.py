"""What a simulated loader needs by world size, as the page shows it: a table with a bar for the memory of each size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pytest_fsdp_meta.checks.simulation.facts import ModuleTraffic, SimulatedSize, SimulatedStep, Traffic
from pytest_fsdp_meta.reports.sizes import describe_fit, smallest_first, why_no_step

BAR_WIDTH, BAR_HEIGHT = 320, 14
"""Sizes (px) of the bar of a world."""
MOST_MODULES = 8
"""Rows of the table of modules."""
PARTS = {
    "held": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "rest": "activations, gathered parameters and all else at the peak",
}
"""The parts of a bar, from left to right."""


@dataclass(frozen=True)
class Bar:
    """One part of a bar: where it begins and how wide it is, in pixels."""

    part: str
    left: float
    width: float


@dataclass(frozen=True)
class SizeRow:
    """A world of one size; ``why`` says why it has no step."""

    size: SimulatedSize
    step: SimulatedStep | None
    why: str
    bars: tuple[Bar, ...]


@dataclass(frozen=True)
class Sizes:
    """The worlds of a loader, smallest first; ``limit`` is where the memory of a device ends in the bars."""

    rows: tuple[SizeRow, ...]
    limit: float | None
    fit: str
    sent: tuple[tuple[Traffic, ModuleTraffic], ...]
    """What is sent for modules in a step of the largest world, most first."""


def size_view(sizes: Sequence[SimulatedSize], device_memory: int) -> Sizes | None:
    """Return the table of a loader; None if it was not simulated."""
    if not sizes:
        return None
    ordered = smallest_first(sizes)
    needed = [sum(nbytes for _, nbytes in _parts(size)) for size in ordered]
    scale = BAR_WIDTH / max(1, device_memory, *needed)
    rows = tuple(SizeRow(size, size.step, why_no_step(size), tuple(_bars(size, scale))) for size in ordered)
    fit = describe_fit(ordered, device_memory) if device_memory else ""
    return Sizes(rows, device_memory * scale if device_memory else None, fit, tuple(_sent(ordered[-1].step)))


def _sent(step: SimulatedStep | None) -> list[tuple[Traffic, ModuleTraffic]]:
    parts = [(traffic, part) for traffic in (step.traffic if step else ()) for part in traffic.modules]
    return sorted(parts, key=lambda pair: pair[1].nbytes, reverse=True)[:MOST_MODULES]


def _parts(size: SimulatedSize) -> Iterator[tuple[str, int]]:
    if size.problem:
        return
    yield "held", size.largest
    if step := size.step:
        yield "gradients", step.gradients
        yield "optimizer", step.optimizer
        yield "rest", max(0, step.peak - size.largest - step.gradients - step.optimizer)


def _bars(size: SimulatedSize, scale: float) -> Iterator[Bar]:
    left = 0.0
    for part, nbytes in _parts(size):
        yield Bar(part, left, nbytes * scale)
        left += nbytes * scale
