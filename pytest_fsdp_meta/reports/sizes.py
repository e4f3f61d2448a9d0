"""What a simulated loader needs by world size, as lines of the terminal's summary."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pytest_fsdp_meta.evidence.simulation import SimulatedSize, SimulatedStep
from pytest_fsdp_meta.text import as_bytes


def describe_sizes(sizes: Sequence[SimulatedSize], device_memory: int) -> Iterator[str]:
    """Yield a line for each size, smallest world first, and at which ones a step fits into ``device_memory`` bytes."""
    ordered = sorted(sizes, key=lambda size: size.size)
    width = len(str(ordered[-1].size)) if ordered else 0
    for size in ordered:
        yield f"   {size.size:>{width}} ranks: {_describe_size(size)}"
    if device_memory and any(size.step for size in ordered):
        yield f"   {_describe_fit(ordered, device_memory)}"


def _describe_size(size: SimulatedSize) -> str:
    if size.problem:
        return f"not simulated ({size.problem})"
    held = f"{as_bytes(size.largest)} of parameters on a rank"
    if size.step is not None:
        return f"{held}, {_describe_step(size.step)}"
    problems = [rank.step.problem for rank in size.ranks if rank.step is not None]
    return f"{held}; no step was simulated ({problems[0]})" if problems else held


def _describe_step(step: SimulatedStep) -> str:
    by_dims: dict[str, int] = {}
    for part in step.traffic:
        where = " and ".join(part.dims) or f"{part.ranks} ranks"
        by_dims[where] = by_dims.get(where, 0) + part.nbytes
    sent = ", ".join(f"{as_bytes(nbytes)} over {where}" for where, nbytes in by_dims.items()) or "nothing"
    return (
        f"{as_bytes(step.gradients)} of gradients, {as_bytes(step.optimizer)} of optimizer state; a step gathers up to "
        f"{as_bytes(step.gathered)} at a time, peaks at {as_bytes(step.peak)} and sends {sent}"
    )


def _describe_fit(ordered: Sequence[SimulatedSize], device_memory: int) -> str:
    steps = [(size.size, size.step) for size in ordered if size.step is not None]
    fitting = [size for size, step in steps if step.peak <= device_memory]
    others = [size for size, step in steps if step.peak > device_memory]
    memory = as_bytes(device_memory)
    if not fitting:
        return f"a step does not fit into {memory} on {_listed(others, 'or')} ranks"
    except_on = f", not on {_listed(others, 'or')}" if others else ""
    return f"a step fits into {memory} on {_listed(fitting, 'and')} ranks{except_on}"


def _listed(sizes: Sequence[int], joint: str) -> str:
    """Return the sizes as "16, 128 and 1024"."""
    *most, last = map(str, sizes)
    return f"{', '.join(most)} {joint} {last}" if most else last
