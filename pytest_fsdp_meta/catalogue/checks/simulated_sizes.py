"""Check what a loader does at a size at which it does not run: empty ranks, memory and traffic by world size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod

from pytest_fsdp_meta.catalogue.checks.structure import MANIFEST
from pytest_fsdp_meta.catalogue.findings import Finding
from pytest_fsdp_meta.catalogue.registry import check
from pytest_fsdp_meta.catalogue.view import Blocked, NotJudged, View
from pytest_fsdp_meta.evidence import TensorFacts, sharded_dim
from pytest_fsdp_meta.evidence.simulation import SimulatedSize
from pytest_fsdp_meta.text import as_bytes, counted

LARGE = 0.01
"""Fraction of the whole; smaller parts, such as those of norms and biases, are not named."""
SLACK = 1.25
"""Factor by which a rank may hold or send more than the growth of the world explains: padding and small tensors."""
EXPLAINING = ("nothing_left_unsharded", "dtensor_placements", "shards_tile_the_tensor", "no_rank_is_empty_handed")
"""Checks that name the tensors because of which ranks hold too much."""
NOT_SIMULATED = "it is judged in simulated worlds: @fsdp_conformance(simulate=1024)"


@check(
    promise="in a simulated world, no rank holds nothing of what the ranks should share (small tensors do not count)",
    family="scale",
    needs=["inventory"],
    after=[MANIFEST, "dtensor_placements", "shards_tile_the_tensor"],
    why="A tensor whose dim is shorter than the number of ranks is shared by a few of them: these hold much more than "
    "the others and run out of memory, however many ranks there are.",
    cause="the tensor is sharded on a dim that is shorter than the number of ranks",
    remedy="shard it on a longer dim: fully_shard(shard_placement_fn=lambda parameter: Shard(1)), or over fewer ranks",
    references=["pytorch/pytorch#140069"],
    since="0.3",
    simulated="only",
)
def no_rank_is_empty_handed(view: View) -> Iterable[Finding]:
    if not view.evidence.world.simulated:
        raise NotJudged(NOT_SIMULATED)
    shared = [(name, facts[0][1], facts) for name, facts in view.tensors("parameter") if facts[0][1].placements]
    even = sum(_bytes(tensor) / _ranks(tensor) for _, tensor, _ in shared)
    wasted = {name: _bytes(tensor) / _ranks(tensor) * (_excess(tensor) - 1) for name, tensor, _ in shared}
    if sum(wasted.values()) <= (SLACK - 1) * even:
        return  # the chunks of a few tensors do not reach the last ranks, which costs next to nothing
    for name, tensor, facts in shared:
        if wasted[name] < LARGE * sum(wasted.values()):
            continue
        dim, ranks = max(_shares(tensor), key=lambda share: _chunk_excess(tensor.shape[share[0]], share[1]))
        length = tensor.shape[dim]
        yield Finding(
            name,
            tuple(rank for rank, one in facts if not one.numel) or tuple(rank for rank, _ in facts),
            f"{length} rows on dim {dim} for {ranks} ranks, of which {_empty_chunks(length, ranks)} hold nothing",
            "a part of it on every rank",
            cause=f"dim {dim} is shorter than the ranks that share it: from {length + 1} ranks on, some hold nothing"
            if ranks > length
            else f"dim {dim} is cut into chunks of {-(-length // ranks)} rows, which do not reach the last ranks",
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


@check(
    promise="in a simulated world, what a rank holds falls as the mesh grows",
    family="scale",
    needs=["inventory", "simulation"],
    after=[MANIFEST, *EXPLAINING],
    why="A model that fits on eight GPUs should fit on sixty-four with room for longer sequences; a part that does not "
    "fall is paid on every GPU.",
    cause="parameters are whole on every rank, are sharded over a part of the mesh only, or on a dim that is too short",
    remedy="shard them over the dimension that grows; what should stay whole is declared by Subject(unsharded=...)",
    references=["arXiv:1910.02054 (ZeRO), figure 1"],
    since="0.3",
    simulated="only",
)
def memory_falls_with_ranks(view: View) -> Iterable[Finding]:
    sizes = _sizes(view)
    if by := [id for id in EXPLAINING if id in view.failed]:
        raise Blocked(f"what a rank holds depends on {by[0]}, which failed")
    largest = sizes[0]
    for smaller in sizes[1:]:
        growth = largest.size // smaller.size
        kept = _unsharded(view)
        expected = (smaller.largest - kept) / growth + kept
        if largest.largest > SLACK * expected + LARGE * smaller.largest:
            yield Finding(
                None,
                (_heaviest(largest),),
                f"{as_bytes(largest.largest)} of parameters on a rank of {largest.size}, after "
                f"{as_bytes(smaller.largest)} on one of {smaller.size}",
                f"{as_bytes(round(expected))}: {growth} times the ranks share them",
            )


@check(
    promise="in a simulated world, what a rank sends in a step does not grow with the mesh",
    family="scale",
    needs=["inventory", "simulation"],
    after=[MANIFEST],
    why="FSDP sends as much per rank on a thousand ranks as on ten; traffic that grows with the ranks ends scaling.",
    cause="a collective gathers something from every rank: gradients, optimizer state or outputs",
    remedy="reduce instead of gathering, or gather within a group of fixed size",
    references=["arXiv:1910.02054 (ZeRO), section 7"],
    since="0.3",
    simulated="only",
)
def communication_scales(view: View) -> Iterable[Finding]:
    sizes = _sizes(view)
    step = sizes[0].step
    if step is None:
        problems = [rank.step.problem for rank in sizes[0].ranks if rank.step is not None and rank.step.problem]
        raise NotJudged(problems[0] if problems else "no step was simulated: Subject(batch=...) is not declared")
    for smaller in sizes[1:]:
        before = smaller.step
        if before is None:
            continue
        known = {(part.op, part.dims): part for part in before.traffic}
        for part in step.traffic:
            earlier = known.get((part.op, part.dims))
            if earlier is None or earlier.ranks < 2 or part.nbytes < LARGE * step.sent:
                continue
            if part.nbytes <= SLACK * _ring(part.ranks, earlier.ranks) * earlier.nbytes:
                continue
            over = f" over {' and '.join(part.dims)}" if part.dims else f" among {counted(part.ranks, 'rank')}"
            yield Finding(
                None,
                (sizes[0].ranks[0].rank,),
                f"{as_bytes(part.nbytes)} sent by {part.op}{over} in a step of {sizes[0].size} ranks, after "
                f"{as_bytes(earlier.nbytes)} in one of {smaller.size}",
                "about as much",
            )


def _ring(ranks: int, before: int) -> float:
    """Return the growth of what a ring sends: (n - 1) / n of the whole."""
    return (1 - 1 / ranks) / (1 - 1 / before)


def _sizes(view: View) -> tuple[SimulatedSize, ...]:
    if not view.evidence.world.simulated:
        raise NotJudged(NOT_SIMULATED)
    sizes = view.evidence.simulation or ()
    if len(sizes) < 2:
        raise NotJudged("no dimension of the mesh that shards data can be made smaller")
    return sizes


def _heaviest(size: SimulatedSize) -> int:
    return max(size.ranks, key=lambda rank: rank.parameters).rank


def _unsharded(view: View) -> int:
    """Return the bytes of the parameters that are declared whole."""
    declared = view.evidence.subject.unsharded
    return sum(_bytes(tensor) for name, tensor in view.evidence.inventory[0].by_name.items() if name in declared)
