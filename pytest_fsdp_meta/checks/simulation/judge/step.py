"""Check what a step would need at a size at which the loader does not run: its traffic and its memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from pytest_fsdp_meta.checks.simulation.facts import (
    ACTIVATIONS,
    GATHERED,
    GRADIENTS,
    HELD,
    OPTIMIZER,
    STEPPING,
    TEMPORARY,
    SimulatedSize,
    SimulatedStep,
    Traffic,
)
from pytest_fsdp_meta.checks.simulation.judge.sharing import (
    EXPLAINING,
    LARGE,
    SLACK,
    explain_padding,
    left_to_sharding,
    simulated_sizes,
    sizes_to_compare,
)
from pytest_fsdp_meta.checks.structure.judge import MANIFEST
from pytest_fsdp_meta.evidence import WorldFacts
from pytest_fsdp_meta.judging.findings import Explanation, Finding
from pytest_fsdp_meta.judging.registry import scale_check
from pytest_fsdp_meta.judging.view import NotDeclared, NotJudged, PartlyJudged, Unjudgeable, View
from pytest_fsdp_meta.text import as_bytes, counted, first_of

FEW_TIMES = (2, 4, 8, 16)
"""How many times as many ranks are worth naming where a step does not fit."""


@scale_check(
    promise="in a simulated world, what a rank sends in a step does not grow with the mesh",
    after=[MANIFEST, *EXPLAINING],
    why="FSDP sends as much per rank on a thousand ranks as on ten; traffic that grows with the ranks ends scaling.",
    cause="a collective gathers something from every rank: gradients, optimizer state or outputs",
    remedy="reduce instead of gathering, or gather within a group of fixed size",
    references=["arXiv:1910.02054 (ZeRO), section 7"],
    simulated="only",
)
@left_to_sharding
def communication_scales(view: View) -> Iterable[Finding]:
    largest, *others = sizes_to_compare(view)
    step = _step(largest)
    for smaller in others:
        for part, before, expected in _pairs(step, _step(smaller)):
            if part.nbytes < LARGE * step.sent or part.nbytes <= SLACK * expected:
                continue
            over = f" over {' and '.join(part.dims)}" if part.dims else f" among {counted(part.ranks, 'rank')}"
            most = max(part.modules, key=lambda own: own.nbytes, default=None)
            of_it = f" ({as_bytes(most.nbytes)} of it in {most.module or 'the root module'})" if most else ""
            yield Finding(
                None,
                (largest.ranks[0].rank,),
                f"{as_bytes(part.nbytes)} sent by {part.op}{over} in a step of {largest.size} ranks{of_it}, "
                f"after {as_bytes(before)} in one of {smaller.size}",
                "about as much",
                **explain_padding(view, part, part.nbytes - expected, largest.size // smaller.size),
            )


@scale_check(
    promise="in a simulated world, a step recomputes activations if the reference does, and fits into the memory of a "
    "device (--fsdp-device-memory), with a reserve",
    after=[MANIFEST, *EXPLAINING],
    why="A step that does not fit is found out after hours in a queue, by a thousand GPUs at once.",
    cause="what a rank holds at the peak of the step takes more than the device has for tensors",
    remedy="use more ranks or fewer rows, or hold less at a time",
    references=["arXiv:1910.02054 (ZeRO), section 3"],
    simulated="only",
)
@left_to_sharding
def step_fits(view: View) -> Iterable[Finding]:
    world, sizes = view.evidence.world, simulated_sizes(view)
    size, step = sizes[0], _step(sizes[0])
    lost = [*_checkpointing_lost(view, size, step)]
    yield from lost
    if not world.device_memory:
        if lost:
            return
        raise NotJudged("the memory of a device is not known: --fsdp-device-memory=80GiB")
    if step.most > world.usable_memory:
        yield Finding(
            None,
            tuple(rank.rank for rank in size.ranks if rank.step is step),
            f"{as_bytes(step.most)} in {step.peak.phase}{f' at {step.peak.module}' if step.peak.module else ''}",
            f"at most {describe_memory(world)}",
            cause=f"at the peak, a rank holds {step.peak.composition}",
            remedy="; ".join(_what_would_help(step, size.size, world.usable_memory)),
        )
    elif step.unstepped:
        raise PartlyJudged(f"what the optimizer needs while it steps is unknown: {step.unstepped}")


def _checkpointing_lost(view: View, size: SimulatedSize, step: SimulatedStep) -> Iterator[Finding]:
    """Report checkpointing that the reference has, where the model neither recomputes nor is set to do it.

    A checkpointed block that needs no gradient is not computed again, and functions may be checkpointed apart.
    """
    reference, assumed = view.evidence.reference, step.assumed
    if reference is None or not reference.recomputing or assumed.recomputes or assumed.checkpointed:
        return
    kept = max((peak.parts.get(ACTIVATIONS, 0) for peak in step.peaks), default=0)
    yield Finding(
        None,
        tuple(rank.rank for rank in size.ranks if rank.step is step),
        f"no module is computed again in backward, which keeps {as_bytes(kept)} of activations",
        f"activation checkpointing, as {first_of(reference.recomputing)} of the reference",
        **_CHECKPOINTING_LOST,
    )


_CHECKPOINTING_LOST: Explanation = {
    "cause": "activation checkpointing is not set on the model that trains: it is applied to another copy, or the "
    "loader switches it off",
    "remedy": "apply it to the loaded model: gradient_checkpointing_enable(), or checkpoint_wrapper() on each block "
    "before fully_shard()",
}


def describe_memory(world: WorldFacts) -> str:
    """Return such as "75.2 GiB (80 GiB less a reserve of 6%)"."""
    reserve = f"a reserve of {100 * world.memory_reserve:g}%"
    return f"{as_bytes(world.usable_memory)} ({as_bytes(world.device_memory)} less {reserve})"


def _what_would_help(step: SimulatedStep, ranks: int, limit: int) -> Iterator[str]:
    """Yield what takes memory at the peak that a loader need not hold, each with its bytes."""
    peak, over = step.peak, step.most - limit
    kept, gathered = peak.large_parts.get(ACTIVATIONS, 0), peak.large_parts.get(GATHERED, 0)
    if kept and not step.assumed.recomputes:
        yield f"checkpoint each block, which keeps a small part of the {as_bytes(kept)} of activations"
    if gathered > 2 * step.gathered:
        yield (
            "reshard_after_forward=True and a group for each block: at most a few groups are gathered at a time, "
            f"instead of {as_bytes(gathered)}"
        )
    if peak.phase == STEPPING and (temporary := peak.parts.get(TEMPORARY, 0)):
        yield f"fused=True or foreach=False in the optimizer, which saves {as_bytes(temporary)}"
    falling = (HELD, GRADIENTS, OPTIMIZER, TEMPORARY if peak.phase == STEPPING else "")
    shared = sum(peak.parts.get(part, 0) for part in falling)
    if factor := next((n for n in FEW_TIMES if shared * (1 - 1 / n) >= over), 0):
        about = as_bytes(round(step.most - shared * (1 - 1 / factor)))
        yield f"{factor * ranks} ranks, on which it would be about {about}, if they share all of the parameters"
    else:
        yield f"fewer rows or shorter ones: {as_bytes(step.most - shared)} would not fall with more ranks"


def _step(size: SimulatedSize) -> SimulatedStep:
    if size.step is not None:
        return size.step
    steps = [rank.step for rank in size.ranks if rank.step is not None and rank.step.problem]
    if not steps:
        raise NotDeclared("batch")
    message = f"no step of {size.size} ranks was simulated: {steps[0].problem}"
    if steps[0].missing:
        raise NotDeclared(steps[0].missing, instead=message)
    raise Unjudgeable(message) if steps[0].error else NotJudged(message)


def _pairs(step: SimulatedStep, earlier: SimulatedStep) -> Iterator[tuple[Traffic, int, float]]:
    """Yield traffic of a world with the bytes in a smaller one, and those that a ring of its size would send.

    Groups of the same size are alike. The others differ in size because the world does, and are compared together.
    """
    by_ranks = {(part.op, part.dims, part.ranks): part for part in earlier.traffic}
    alike = [(part, by_ranks.pop((part.op, part.dims, part.ranks), None)) for part in step.traffic]
    grown: dict[tuple[str, tuple[str, ...]], Traffic] = {}
    for part, same in alike:
        if same is not None:
            yield part, same.nbytes, same.nbytes
            continue
        other = grown.get((part.op, part.dims), replace(part, nbytes=0, modules=()))
        joined = replace(
            part,
            ranks=max(part.ranks, other.ranks),
            nbytes=part.nbytes + other.nbytes,
            modules=(*part.modules, *other.modules),
        )
        grown[part.op, part.dims] = joined
    for (op, dims), part in grown.items():
        before = [one for one in by_ranks.values() if (one.op, one.dims) == (op, dims) and one.ranks > 1]
        if before:
            # A ring sends (n - 1) / n of the whole.
            expected = sum((1 - 1 / part.ranks) / (1 - 1 / one.ranks) * one.nbytes for one in before)
            yield part, sum(one.nbytes for one in before), expected
