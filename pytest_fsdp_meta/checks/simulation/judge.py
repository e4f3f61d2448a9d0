"""Check what a loader does at a size at which it does not run: empty ranks, memory and traffic by world size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import prod

from pytest_fsdp_meta.checks.simulation.facts import (
    ACTIVATIONS,
    FACTORS,
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
from pytest_fsdp_meta.checks.structure.judge import MANIFEST
from pytest_fsdp_meta.evidence import (
    TensorFacts,
    WorldFacts,
    replicates,
    sharded_dim,
    shards_data,
    splits_model,
    splits_sequence,
    splits_stages,
)
from pytest_fsdp_meta.judging.findings import Explanation, Finding
from pytest_fsdp_meta.judging.registry import scale_check
from pytest_fsdp_meta.judging.view import Blocked, NotDeclared, NotJudged, PartlyJudged, Unjudgeable, View
from pytest_fsdp_meta.text import as_bytes, counted

LARGE = 0.01
"""Fraction of the whole; smaller parts, such as those of norms and biases, are not named."""
FEW_TIMES = (2, 4, 8, 16)
"""How many times as many ranks are worth naming where a step does not fit."""
SLACK = 1.25
"""Factor by which a rank may hold or send more than the growth of the world explains: padding and small tensors."""
EXPLAINING = ("nothing_left_unsharded", "dtensor_placements", "shards_tile_the_tensor", "no_rank_is_empty_handed")
"""Checks that name the tensors because of which ranks hold too much."""
NOT_SIMULATED = "it is judged in simulated worlds: @fsdp_conformance(simulate=1024)"


@scale_check(
    promise="in a simulated world, no rank holds nothing of what the ranks should share (small tensors do not count)",
    needs=["inventory"],
    after=[MANIFEST, "dtensor_placements", "shards_tile_the_tensor"],
    why="A tensor whose dim is shorter than the number of ranks is shared by a few of them: these hold much more than "
    "the others and run out of memory, however many ranks there are.",
    cause="the tensor is sharded on a dim that is shorter than the number of ranks",
    remedy="shard it on a longer dim: fully_shard(shard_placement_fn=lambda parameter: Shard(1)), or over fewer ranks",
    references=["pytorch/pytorch#140069"],
    simulated="only",
)
def no_rank_is_empty_handed(view: View) -> Iterable[Finding]:
    if not view.evidence.world.simulated:
        raise NotJudged(NOT_SIMULATED)
    shared = [(name, facts[0][1], facts) for name, facts in view.tensors("parameter") if facts[0][1].placements]
    even = sum(_bytes(tensor) / _ranks(tensor) for _, tensor, _ in shared)
    empty = [one for one in shared if any(_empty_chunks(one[1].shape[dim], ranks) for dim, ranks in _shares(one[1]))]
    wasted = {name: _bytes(tensor) / _ranks(tensor) * (_excess(tensor) - 1) for name, tensor, _ in empty}
    if sum(wasted.values()) <= (SLACK - 1) * even:
        return  # the chunks of a few tensors do not reach the last ranks, which costs next to nothing
    for name, tensor, facts in empty:
        if wasted[name] < LARGE * sum(wasted.values()):
            continue
        dim, ranks = max(_shares(tensor), key=lambda share: _empty_chunks(tensor.shape[share[0]], share[1]))
        length = tensor.shape[dim]
        yield Finding(
            name,
            tuple(rank for rank, one in facts if not one.numel) or tuple(rank for rank, _ in facts),
            f"{length} rows on dim {dim} for {ranks} ranks, of which {_empty_chunks(length, ranks)} hold nothing",
            "a part of it on every rank",
            cause=_why_empty(dim, length, ranks),
        )


def _why_empty(dim: int, length: int, ranks: int) -> str:
    if ranks > length:
        return f"dim {dim} is shorter than the ranks that share it: from {length + 1} ranks on, some hold nothing"
    fewest = next(n for n in range(2, ranks + 1) if _empty_chunks(length, n))
    return (
        f"dim {dim} is cut into chunks of {-(-length // ranks)} rows, which do not reach the last ranks; on fewer than "
        f"{fewest} ranks, each has a part"
    )


def _ranks(tensor: TensorFacts) -> int:
    """Return the number of ranks that share the tensor."""
    return prod(ranks for _, ranks in _shares(tensor))


def _excess(tensor: TensorFacts) -> float:
    """Return how many times an even share the largest part is."""
    return prod(_chunk_excess(tensor.shape[dim], ranks) for dim, ranks in _shares(tensor))


def _chunk_excess(length: int, ranks: int) -> float:
    return -(-length // ranks) * ranks / length if length else 1.0


def _shares(tensor: TensorFacts) -> Iterator[tuple[int, int]]:
    """Yield each dim that is sharded, with the number of ranks that share it."""
    by_dim: dict[int, int] = {}
    for placement, size in zip(tensor.placements or (), tensor.mesh.shape if tensor.mesh else (), strict=True):
        if (dim := sharded_dim(placement)) is not None:
            by_dim[dim] = by_dim.get(dim, 1) * size
    yield from by_dim.items()


def _empty_chunks(length: int, ranks: int) -> int:
    chunk = -(-length // ranks)
    return ranks - (-(-length // chunk) if chunk else ranks)


def _bytes(tensor: TensorFacts) -> int:
    return prod(tensor.shape) * tensor.width


@scale_check(
    promise="in a simulated world, what a rank holds falls as the mesh grows, and each dimension of the mesh that is "
    "for parts of the model divides some",
    after=[MANIFEST, *EXPLAINING],
    why="A model that fits on eight GPUs should fit on sixty-four with room for longer sequences; a part that does not "
    "fall is paid on every GPU.",
    cause="parameters are whole on every rank, are sharded over a part of the mesh only, or on a dim that is too short",
    remedy="shard them over the dimension that grows; what should stay whole is declared by Subject(unsharded=...), "
    "and replicas on a mesh of the loader's own by its dimension's name, dp_replicate",
    references=["arXiv:1910.02054 (ZeRO), figure 1"],
    simulated="only",
)
def memory_falls_with_ranks(view: View) -> Iterable[Finding]:
    for dim, size in _idle_dims(view):
        ranks = tuple(rank.rank for rank in view.evidence.inventory)
        yield Finding(None, ranks, f"{dim}={size} divides no parameter", "what it is for on each of them", **_IDLE)
    largest, *others = _sizes(view)
    for smaller in others:
        growth = largest.size // smaller.size
        kept = _kept(view, largest, smaller)
        expected = (smaller.largest - kept) / growth + kept
        if largest.largest > SLACK * expected + LARGE * smaller.largest:
            yield Finding(
                None,
                (_heaviest(largest),),
                f"{as_bytes(largest.largest)} of parameters on a rank of {largest.size}{_median(largest)}, after "
                f"{as_bytes(smaller.largest)} on one of {smaller.size}",
                f"{as_bytes(round(expected))}: {growth} times the ranks share them",
            )


_IDLE: Explanation = {
    "cause": "no plan names this dimension of the mesh: each of its ranks holds the same parameters, and computes the "
    "same as the others",
    "remedy": "divide over it what it is for, such as the experts over ep; or leave it out of the mesh, so that these "
    "ranks train on rows of their own",
}


def _idle_dims(view: View) -> Iterator[tuple[str, int]]:
    """Yield the dimensions that should divide the model and divide none of its parameters, with their sizes.

    None where ranks hold what placements do not describe, or on meshes of the loader's own with other names.
    """
    world = view.evidence.world.mesh
    tensors = [t for rank in view.evidence.inventory for t in rank.tensors if t.kind == "parameter"]
    meshes = {tensor.mesh for tensor in tensors if tensor.mesh is not None}
    known = all({*mesh.dims} <= {dim for dim, _ in world} for mesh in meshes)
    if not view.evidence.world.simulated or not known or view.on_some_ranks or any(t.sharded_by for t in tensors):
        return
    divided = {
        dim
        for tensor in tensors
        if tensor.mesh is not None
        for dim, placement in zip(tensor.mesh.dims, tensor.placements or (), strict=False)
        if sharded_dim(placement) is not None
    }
    for dim, size in world:
        divides = splits_model(dim) and not splits_stages(dim) and not splits_sequence(dim)
        if size > 1 and divides and dim not in divided:
            yield dim, size


def _median(size: SimulatedSize) -> str:
    """Return what the rank in the middle holds, if that is less: then a few ranks hold too much."""
    known = size.parameters
    return f" ({as_bytes(known.median)} in the median)" if known and known.median < known.maximum else ""


@scale_check(
    promise="in a simulated world, what a rank sends in a step does not grow with the mesh",
    after=[MANIFEST, *EXPLAINING],
    why="FSDP sends as much per rank on a thousand ranks as on ten; traffic that grows with the ranks ends scaling.",
    cause="a collective gathers something from every rank: gradients, optimizer state or outputs",
    remedy="reduce instead of gathering, or gather within a group of fixed size",
    references=["arXiv:1910.02054 (ZeRO), section 7"],
    simulated="only",
)
def communication_scales(view: View) -> Iterable[Finding]:
    largest, *others = _sizes(view)
    step = _step(largest)
    for smaller in others:
        for part, before, expected in _pairs(step, _step(smaller)):
            if part.nbytes < LARGE * step.sent or part.nbytes <= SLACK * expected:
                continue
            over = f" over {' and '.join(part.dims)}" if part.dims else f" among {counted(part.ranks, 'rank')}"
            yield Finding(
                None,
                (largest.ranks[0].rank,),
                f"{as_bytes(part.nbytes)} sent by {part.op}{over} in a step of {largest.size} ranks{_most(part)}, "
                f"after {as_bytes(before)} in one of {smaller.size}",
                "about as much",
            )


def _most(part: Traffic) -> str:
    """Return the module for which most of it is sent."""
    most = part.largest_module
    return f" ({as_bytes(most.nbytes)} of it in {most.module or 'the root module'})" if most is not None else ""


@scale_check(
    promise="in a simulated world, a step fits into the memory of a device (--fsdp-device-memory), with a reserve",
    after=[MANIFEST, *EXPLAINING],
    why="A step that does not fit is found out after hours in a queue, by a thousand GPUs at once.",
    cause="what a rank holds at the peak of the step takes more than the device has for tensors",
    remedy="use more ranks or fewer rows, or hold less at a time",
    references=["arXiv:1910.02054 (ZeRO), section 3"],
    simulated="only",
)
def step_fits(view: View) -> Iterable[Finding]:
    world, sizes = view.evidence.world, _simulated(view)
    if not world.device_memory:
        raise NotJudged("the memory of a device is not known: --fsdp-device-memory=80GiB")
    size, step = sizes[0], _step(sizes[0])
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


def describe_memory(world: WorldFacts) -> str:
    """Return such as "75.2 GiB (80 GiB less a reserve of 6%)"."""
    reserve = f"a reserve of {100 * world.memory_reserve:g}%"
    return f"{as_bytes(world.usable_memory)} ({as_bytes(world.device_memory)} less {reserve})"


def _what_would_help(step: SimulatedStep, ranks: int, limit: int) -> Iterator[str]:
    """Yield what takes memory at the peak that a loader need not hold, each with its bytes."""
    peak, over = step.peak, step.most - limit
    kept, gathered = peak.parts.get(ACTIVATIONS, 0), peak.parts.get(GATHERED, 0)
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
            expected = sum(_ring(part.ranks, one.ranks) * one.nbytes for one in before)
            yield part, sum(one.nbytes for one in before), expected


def _ring(ranks: int, before: int) -> float:
    """Return the growth of what a ring sends: (n - 1) / n of the whole."""
    return (1 - 1 / ranks) / (1 - 1 / before)


def _simulated(view: View) -> tuple[SimulatedSize, ...]:
    """Return the simulated world and smaller ones, as far as they could be simulated."""
    if not view.evidence.world.simulated:
        raise NotJudged(NOT_SIMULATED)
    if by := [id for id in EXPLAINING if id in view.failed]:
        raise Blocked(f"what a rank holds and sends depends on {by[0]}, which failed")
    return tuple(size for size in view.evidence.simulation or () if not size.problem)


def _sizes(view: View) -> tuple[SimulatedSize, ...]:
    """Return the simulated world and at least one smaller one."""
    world, sizes = view.evidence.world, view.evidence.simulation or ()
    if len(known := _simulated(view)) > 1:
        return known
    if problems := [f"no world of {size.size} could be simulated: {size.problem}" for size in sizes if size.problem]:
        raise NotJudged(problems[0])
    sharding = [(dim, size) for dim, size in world.mesh if shards_data(dim) and size > 1]
    if not sharding:
        raise NotJudged("no dimension of the mesh shards data")
    dim, size = max(sharding, key=lambda pair: pair[1])
    raise NotJudged(f"{dim}={size} has no divisor up to {max(FACTORS)} that gives a smaller world to compare with")


def _heaviest(size: SimulatedSize) -> int:
    return max(size.ranks, key=lambda rank: rank.parameters).rank


def _kept(view: View, largest: SimulatedSize, smaller: SimulatedSize) -> int:
    """Return the bytes of the heaviest rank that, on purpose, do not fall as the world grows."""
    grown = next(dim for (dim, size), (_, other) in zip(largest.mesh, smaller.mesh, strict=True) if size != other)
    rank = _heaviest(largest)
    inventory = next(one for one in view.evidence.inventory if one.rank == rank)
    kept = {t.identity: t for t in inventory.tensors if t.kind == "parameter" and _is_kept(view, t, grown)}
    return sum(tensor.numel * tensor.width for tensor in kept.values())


def _is_kept(view: View, tensor: TensorFacts, grown: str) -> bool:
    subject, mesh = view.evidence.subject, tensor.mesh
    if tensor.name in subject.unsharded:
        return True
    if tensor.placements is None:  # other ranks have other tensors instead, such as experts
        return tensor.name in view.on_some_ranks
    if mesh is None:
        return False
    world = dict(view.evidence.world.mesh)
    own = list(zip(mesh.dims, mesh.shape, tensor.placements, strict=True))
    whole = {dim for dim, _, p in own if sharded_dim(p) is None}
    # HSDP on a mesh of the loader's own, which says by its names that nodes are replicas.
    if any(replicates(dim) and world.get(dim or "") != size and dim in whole for dim, size, _ in own):
        return len(whole) < len(own)
    known = all(dim in world and world[dim] == size and (dim != grown or dim in whole) for dim, size, _ in own)
    return tensor.name in subject.placements and known
