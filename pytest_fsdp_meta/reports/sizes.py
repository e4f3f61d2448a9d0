"""What a simulated loader needs by world size: lines of the terminal's totals, and a table with bars on the page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pytest_fsdp_meta.checks.simulation.facts import ModuleTraffic, SimulatedSize, SimulatedStep, Traffic
from pytest_fsdp_meta.text import as_bytes

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


def describe_sizes(sizes: Sequence[SimulatedSize], device_memory: int) -> Iterator[str]:
    """Yield a line for each size, smallest world first, and at which ones a step fits into ``device_memory`` bytes."""
    ordered = smallest_first(sizes)
    width = len(str(ordered[-1].size)) if ordered else 0
    for size in ordered:
        yield f"   {size.size:>{width}} ranks: {_describe_size(size)}"
    if device_memory and (fit := describe_fit(ordered, device_memory)):
        yield f"   {fit}"


def smallest_first(sizes: Sequence[SimulatedSize]) -> list[SimulatedSize]:
    return sorted(sizes, key=lambda size: size.size)


def why_no_step(size: SimulatedSize) -> str:
    """Return why a world has no step; empty if it has one, or if the loader declares no batch."""
    problems = [rank.step.problem for rank in size.ranks if rank.step is not None]
    return size.problem or next(filter(None, problems), "")


def describe_fit(ordered: Sequence[SimulatedSize], device_memory: int) -> str:
    """Return at which sizes a step fits into so many bytes; empty if no step was simulated."""
    steps = [(size.size, size.step) for size in ordered if size.step is not None]
    fitting = [size for size, step in steps if step.most <= device_memory]
    others = [size for size, step in steps if step.most > device_memory]
    memory = as_bytes(device_memory)
    if not steps:
        return ""
    if not fitting:
        return f"a step does not fit into {memory} on {_listed(others, 'or')} ranks"
    except_on = f", not on {_listed(others, 'or')}" if others else ""
    apart = ", but what the optimizer needs while it steps is unknown" if any(s.unstepped for _, s in steps) else ""
    return f"a step fits into {memory} on {_listed(fitting, 'and')} ranks{except_on}{apart}"


def _describe_size(size: SimulatedSize) -> str:
    if size.problem:
        return f"not simulated ({size.problem})"
    held = _describe_parameters(size)
    if size.step is not None:
        return f"{held}, {_describe_step(size.step)}"
    why = why_no_step(size)
    return f"{held}; no step was simulated ({why})" if why else held


def _describe_parameters(size: SimulatedSize) -> str:
    known = size.parameters
    if known is None:
        return f"{as_bytes(size.largest)} of parameters on a rank"
    if known.minimum == known.maximum:
        return f"{as_bytes(known.maximum)} of parameters on every rank"
    return (
        f"{as_bytes(known.minimum)} to {as_bytes(known.maximum)} of parameters on a rank "
        f"({as_bytes(known.median)} in the median)"
    )


def _describe_step(step: SimulatedStep) -> str:
    sent = ", ".join(f"{as_bytes(nbytes)} over {where}" for where, nbytes in step.sent_by_dims.items()) or "nothing"
    phases = "forward and backward", "the optimizer's step"
    (most, where), (other, elsewhere) = sorted(zip((step.peak, step.stepping), phases, strict=True), reverse=True)
    second = f"{as_bytes(other)} in {elsewhere}"
    if step.unstepped:
        most, where, second = step.peak, phases[0], f"more in {phases[1]} is possible: {step.unstepped}"
    return (
        f"{as_bytes(step.gradients)} of gradients, {as_bytes(step.optimizer)} of optimizer state; a step gathers up to "
        f"{as_bytes(step.gathered)} at a time, peaks at {as_bytes(most)} in {where} ({second}) and "
        f"sends {sent}"
    )


def _listed(sizes: Sequence[int], joint: str) -> str:
    """Return the sizes as "16, 128 and 1024"."""
    *most, last = map(str, sizes)
    return f"{', '.join(most)} {joint} {last}" if most else last


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
    largest = ordered[-1].step
    sent = [(traffic, part) for traffic in (largest.traffic if largest else ()) for part in traffic.modules]
    sent.sort(key=lambda pair: pair[1].nbytes, reverse=True)
    return Sizes(rows, device_memory * scale if device_memory else None, fit, tuple(sent[:MOST_MODULES]))


def _parts(size: SimulatedSize) -> Iterator[tuple[str, int]]:
    if size.problem:
        return
    yield "held", size.largest
    if step := size.step:
        yield "gradients", step.gradients
        yield "optimizer", step.optimizer
        yield "rest", max(0, step.most - size.largest - step.gradients - step.optimizer)


def _bars(size: SimulatedSize, scale: float) -> Iterator[Bar]:
    left = 0.0
    for part, nbytes in _parts(size):
        yield Bar(part, left, nbytes * scale)
        left += nbytes * scale
