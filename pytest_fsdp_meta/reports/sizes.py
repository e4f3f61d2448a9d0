"""What a simulated loader needs by world size: lines of the terminal's totals, and a table with bars on the page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from pytest_fsdp_meta.checks.simulation.facts import (
    PARTS,
    STEPPING,
    ModuleTraffic,
    PhasePeak,
    SimulatedSize,
    SimulatedStep,
    Traffic,
)
from pytest_fsdp_meta.checks.simulation.judge.step import describe_memory
from pytest_fsdp_meta.evidence import Evidence, WorldFacts
from pytest_fsdp_meta.text import as_bytes

BAR_WIDTH, BAR_HEIGHT = 320, 14
"""Sizes (px) of the bar of a world."""
MOST_MODULES = 8
"""Rows of the table of modules."""


def describe_sizes(sizes: Sequence[SimulatedSize], world: WorldFacts) -> Iterator[str]:
    """Yield lines for each size, smallest world first, what was assumed, and at which sizes a step fits.

    ``world`` is the simulated one, with the memory of its devices.
    """
    ordered = smallest_first(sizes)
    width = len(str(ordered[-1].size)) if ordered else 0
    for size in ordered:
        yield f"   {size.size:>{width}} ranks: {_describe_size(size)}"
        if size.step is not None:
            yield f"   {'':{width}} {_describe_peaks(size.step)}"
    if assumed := _describe_assumptions(ordered):
        yield f"   assumed: {assumed}"
    if fit := describe_fit(ordered, world):
        yield f"   {fit}"


def smallest_first(sizes: Sequence[SimulatedSize]) -> list[SimulatedSize]:
    return sorted(sizes, key=lambda size: size.size)


def why_no_step(size: SimulatedSize) -> str:
    """Return why a world has no step; empty if it has one, or if the loader declares no batch."""
    problems = [rank.step.problem for rank in size.ranks if rank.step is not None]
    return size.problem or next(filter(None, problems), "")


def describe_fit(ordered: Sequence[SimulatedSize], world: WorldFacts) -> str:
    """Return at which sizes a step fits into the memory of a device; empty if that or the step is not known."""
    steps = [(size.size, size.step) for size in ordered if size.step is not None]
    fitting = [size for size, step in steps if step.most <= world.usable_memory]
    others = [size for size, step in steps if step.most > world.usable_memory]
    if not steps or not world.device_memory:
        return ""
    memory = describe_memory(world)
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
    return (
        f"{as_bytes(step.gradients)} of gradients, {as_bytes(step.optimizer)} of optimizer state; a step gathers up to "
        f"{as_bytes(step.gathered)} at a time and sends {sent}"
    )


def _describe_peaks(step: SimulatedStep) -> str:
    """Return such as "peaks at 33 GiB in backward (20 GiB of activations, ...), 31 GiB in forward"."""
    highest, *others = sorted(step.peaks, key=lambda peak: peak.nbytes, reverse=True)
    at = f" at {highest.module}" if highest.module else ""
    lower = "".join(f", {as_bytes(peak.nbytes)} in {peak.phase}" for peak in others)
    unknown = f", more in {STEPPING} is possible: {step.unstepped}" if step.unstepped else ""
    return f"peaks at {as_bytes(highest.nbytes)} in {highest.phase}{at} ({highest.composition}){lower}{unknown}"


def _describe_assumptions(ordered: Sequence[SimulatedSize]) -> str:
    """Return what the step of the largest world was run with; empty if none has a step."""
    steps = [size.step for size in ordered if size.step is not None]
    if not steps:
        return ""
    assumed = steps[-1].assumed
    rows = ", ".join(f"{name} {' x '.join(map(str, shape))}" for name, shape in assumed.batch.items())
    computed = "modules are computed again in backward" if assumed.recomputes else "no activation checkpointing"
    on = f"; parameters on {' and '.join(assumed.meshes)}" if assumed.meshes else ""
    return f"{rows} on each rank; {assumed.optimizer or 'no optimizer'}; {computed}{on}"


def _listed(sizes: Sequence[int], joint: str) -> str:
    """Return the sizes as "16, 128 and 1024"."""
    *most, last = map(str, sizes)
    return f"{', '.join(most)} {joint} {last}" if most else last


@dataclass(frozen=True)
class Sizes:
    """The worlds of a loader, smallest first; ``limit`` is where the memory of a device ends in the bars."""

    worlds: tuple[SimulatedSize, ...]
    scale: float
    """Pixels of a bar for each byte."""
    limit: float | None
    fit: str
    assumed: str
    sent: tuple[tuple[Traffic, ModuleTraffic], ...]
    """What is sent for modules in a step of the largest world, most first."""

    def bars(self, peak: PhasePeak) -> Iterator[tuple[str, float, float]]:
        """Yield (part, left end, width) of the bars of one phase of a step, in pixels from left to right."""
        left = 0.0
        for part in PARTS:
            width = peak.parts.get(part, 0) * self.scale
            yield part, left, width
            left += width


def size_view(sizes: Sequence[SimulatedSize], world: WorldFacts) -> Sizes | None:
    """Return the table of a loader; None if it was not simulated."""
    if not sizes:
        return None
    ordered = smallest_first(sizes)
    needed = [size.step.most for size in ordered if size.step is not None]
    scale = BAR_WIDTH / max(1, world.usable_memory, *needed)
    largest = ordered[-1].step
    sent = [(traffic, part) for traffic in (largest.traffic if largest else ()) for part in traffic.modules]
    sent.sort(key=lambda pair: pair[1].nbytes, reverse=True)
    limit = world.usable_memory * scale if world.device_memory else None
    fit, assumed = describe_fit(ordered, world), _describe_assumptions(ordered)
    return Sizes(tuple(ordered), scale, limit, fit, assumed, tuple(sent[:MOST_MODULES]))


def sizes_of(evidence: Evidence) -> tuple[SimulatedSize, ...]:
    """Return the simulated sizes without the groups of parameters, whose names would be most of a report."""
    return tuple(
        replace(
            size, ranks=tuple(replace(rank, step=rank.step and replace(rank.step, groups=())) for rank in size.ranks)
        )
        for size in evidence.simulation or ()
    )
