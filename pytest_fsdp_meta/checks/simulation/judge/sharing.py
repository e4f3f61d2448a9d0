"""Check what ranks would hold at a size at which the loader does not run: empty ranks, and memory by world size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import wraps
from math import prod

from pytest_fsdp_meta.checks.memory.judge import stacks_of
from pytest_fsdp_meta.checks.simulation.facts import FACTORS, SimulatedSize, Traffic
from pytest_fsdp_meta.checks.structure.judge import MANIFEST
from pytest_fsdp_meta.evidence import (
    TensorFacts,
    replicates,
    sharded_dim,
    shards_data,
    splits_model,
    splits_sequence,
    splits_stages,
)
from pytest_fsdp_meta.judging.findings import Explanation, Finding
from pytest_fsdp_meta.judging.registry import Judge, scale_check
from pytest_fsdp_meta.judging.view import Blocked, NotJudged, View
from pytest_fsdp_meta.text import as_bytes, counted

LARGE = 0.01
"""Fraction of the whole; smaller parts, such as those of norms and biases, are not named."""
FEWEST_BLOCKS = 3
"""Fewer blocks in one group are often meant: each gather costs time."""
MUCH_OF_THE_MODEL = 0.4
"""Fraction of the parameters, from which on the blocks that one group gathers are a large part of the model."""
SLACK = 1.25
"""Factor by which a rank may hold or send more than the growth of the world explains: padding and small tensors."""
EXPLAINING = ("nothing_left_unsharded", "dtensor_placements", "shards_tile_the_tensor", "no_rank_is_empty_handed")
"""Checks that name the tensors because of which ranks hold too much."""
_LONGER_DIM = (
    "shard it on a longer dim: fully_shard(shard_placement_fn=lambda parameter: Shard(1)), or over fewer ranks"
)
PADDING = ("all_gather", "reduce_scatter")
"""Collectives by which FSDP sends shards, which it pads to equal sizes."""
NOT_SIMULATED = "it is judged in simulated worlds: @fsdp_conformance(simulate=1024)"


def left_to_sharding(judge: Judge) -> Judge:
    """Leave what the judge finds to the checks that name wrongly sharded tensors, where one of them has failed."""

    @wraps(judge)
    def left(view: View) -> Iterator[Finding]:
        for finding in judge(view):
            if by := [id for id in EXPLAINING if id in view.failed]:
                raise Blocked(f"{finding.actual}; expected: {finding.expected}", by)
            yield finding

    return left


@scale_check(
    promise="in a simulated world, each rank holds a part of every large tensor that is split",
    needs=["inventory"],
    after=[MANIFEST, "dtensor_placements", "shards_tile_the_tensor"],
    why="A tensor whose dim is shorter than the number of ranks is shared by a few of them: these hold much more than "
    "the others and run out of memory, however many ranks there are.",
    cause="the tensor is sharded on a dim that is shorter than the number of ranks",
    remedy=_LONGER_DIM,
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


def explain_padding(view: View, part: Traffic, growth: float, times: int) -> Explanation:
    """Explain the bytes by which traffic grows in a world of so many ``times`` the ranks, if they are padding; or {}.

    FSDP pads a dim to a multiple of the ranks, in what it gathers and in what it reduces and scatters.
    """
    if part.op not in PADDING:
        return {}
    tensors = {t.identity: t for t in view.evidence.inventory[0].tensors if _is_sharded_over(t, part.dims)}
    # A dim that the growing dimension of the mesh does not divide may have fewer ranks than the world has grown times.
    padded = {
        one: _bytes(tensor)
        * (_chunk_excess(tensor.shape[dim], ranks) - _chunk_excess(tensor.shape[dim], max(ranks // times, 1)))
        for one, tensor in tensors.items()
        for dim, ranks in [_most_padded(tensor)]
    }
    # It is sent once or twice, in the dtype of the parameter or in one of half of its size.
    if not growth / 2 <= sum(padded.values()) <= 2 * growth:
        return {}
    tensor = tensors[max(padded, key=lambda one: padded[one])]
    dim, ranks = _most_padded(tensor)
    return {
        "cause": f"dim {dim} of {tensor.name} is {tensor.shape[dim]} long, and collectives pad it to a multiple of the "
        f"{ranks} ranks",
        "remedy": _LONGER_DIM,
    }


def _most_padded(tensor: TensorFacts) -> tuple[int, int]:
    """Return the dim that is padded most, and the number of ranks that share it."""
    return max(_shares(tensor), key=lambda share: _chunk_excess(tensor.shape[share[0]], share[1]))


def _is_sharded_over(tensor: TensorFacts, dims: Sequence[str]) -> bool:
    """Return whether it is a parameter that a mesh with one of these dimensions shards."""
    named = zip(tensor.mesh.dims if tensor.mesh else (), tensor.placements or (), strict=True)
    return tensor.kind == "parameter" and any(dim in dims and sharded_dim(p) is not None for dim, p in named)


def _empty_chunks(length: int, ranks: int) -> int:
    chunk = -(-length // ranks)
    return ranks - (-(-length // chunk) if chunk else ranks)


def _bytes(tensor: TensorFacts) -> int:
    return prod(tensor.shape) * tensor.width


@scale_check(
    promise="in a simulated world, what a rank holds falls as the mesh grows, each mesh dimension that "
    "should split the model splits at least one tensor, and no group gathers a large part of the model at a time",
    after=[MANIFEST, *EXPLAINING],
    why="A model that fits on eight GPUs should fit on sixty-four with room for longer sequences; a part that does not "
    "fall is paid on every GPU.",
    cause="parameters are whole on every rank, are sharded over a part of the mesh only, or on a dim that is too short",
    remedy="shard them over the dimension that grows; what should stay whole is declared by Subject(unsharded=...), "
    "and replicas on a mesh of the loader's own by its dimension's name, dp_replicate",
    references=["arXiv:1910.02054 (ZeRO), figure 1"],
    simulated="only",
)
@left_to_sharding
def memory_falls_with_ranks(view: View) -> Iterable[Finding]:
    for dim, size in _idle_dims(view):
        ranks = tuple(rank.rank for rank in view.evidence.inventory)
        yield Finding(None, ranks, f"{dim}={size} divides no parameter", "what it is for on each of them", **_IDLE)
    yield from _gathered_together(view)
    largest, *others = sizes_to_compare(view)
    for smaller in others:
        growth = largest.size // smaller.size
        kept = _kept(view, largest, smaller)
        expected = (smaller.largest - kept) / growth + kept
        if largest.largest > SLACK * expected + LARGE * smaller.largest:
            # If the rank in the middle holds less, a few ranks hold too much.
            known = largest.parameters
            in_median = f" ({as_bytes(known.median)} in the median)" if known and known.median < known.maximum else ""
            yield Finding(
                None,
                (_heaviest(largest),),
                f"{as_bytes(largest.largest)} of parameters on a rank of {largest.size}{in_median}, after "
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


def _gathered_together(view: View) -> Iterator[Finding]:
    """Report groups that gather many blocks at a time: on every rank, however many there are."""
    inventory = view.evidence.inventory[0]
    tensors = inventory.by_name

    def nbytes(names: Iterable[str]) -> int:
        return sum(
            _bytes(tensor) for tensor in {tensors[n].identity: tensors[n] for n in names if n in tensors}.values()
        )

    whole = nbytes(name for name, tensor in tensors.items() if tensor.kind == "parameter")
    step = next((size.step for size in simulated_sizes(view) if size.step is not None), None)
    stacks = list(stacks_of(inventory))
    for group in step.groups if step is not None else ():
        own = frozenset(group.parameters)
        for stack in stacks:
            blocks = [names for names in stack.blocks.values() if not own.isdisjoint(names)]
            gathered = nbytes(name for names in blocks for name in names & own)
            if group.ranks > 1 and len(blocks) >= FEWEST_BLOCKS and gathered > MUCH_OF_THE_MODEL * whole:
                yield Finding(
                    None,
                    (inventory.rank,),
                    f"one FSDP group gathers {len(blocks)} of the {counted(len(stack.blocks), 'block')} of "
                    f"{stack.name} at once: {as_bytes(gathered)} of {as_bytes(whole)}",
                    f"{as_bytes(nbytes(blocks[0]))}, a block at a time",
                    **_TOGETHER,
                )


_TOGETHER: Explanation = {
    "cause": "fully_shard() was applied to a module with many blocks and not to these, so they are gathered together "
    "on every rank, however many there are",
    "remedy": "call fully_shard() on each block, and then on the module around them; if the model is small enough "
    "to be gathered so, skip this check with that reason",
}


def simulated_sizes(view: View) -> tuple[SimulatedSize, ...]:
    """Return the simulated world and smaller ones, as far as they could be simulated."""
    if not view.evidence.world.simulated:
        raise NotJudged(NOT_SIMULATED)
    return tuple(size for size in view.evidence.simulation or () if not size.problem)


def sizes_to_compare(view: View) -> tuple[SimulatedSize, ...]:
    """Return the simulated world and at least one smaller one."""
    world, sizes = view.evidence.world, view.evidence.simulation or ()
    if len(known := simulated_sizes(view)) > 1:
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
