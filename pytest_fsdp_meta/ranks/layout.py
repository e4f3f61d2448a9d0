"""Compute which indices of a global tensor a rank holds, from mesh coordinates and without torch.

torch has private helpers for this, but they return one offset per dimension. A strided shard (FSDP2 over TP on the
same dim) has no such offset: it holds several separate runs.
"""

from __future__ import annotations

from collections.abc import Sequence

from pytest_fsdp_meta.checks.structure.facts import Region, join_runs


def regions(
    shape: Sequence[int],
    shards: Sequence[tuple[int, int] | None],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
) -> tuple[Region, ...]:
    """Return the runs of every dimension that the rank at ``coordinate`` holds.

    ``shards`` has one entry per mesh dimension: None where the tensor is not sharded over it, else the tensor dim and
    the split factor (1 for an ordinary shard). Each dim is cut into chunks of ceil(size / ranks) as in torch, so the
    last ranks may hold less, or nothing.
    """
    held: list[Region] = [((0, size),) if size else () for size in shape]
    for mesh_dim, dim, factor in _cuts(shards, mesh_shape):
        pieces = [_chunk(held[dim], factor, number) for number in range(factor)]
        own = [_chunk(piece, mesh_shape[mesh_dim], coordinate[mesh_dim]) for piece in pieces]
        held[dim] = join_runs([run for runs in own for run in runs])
    return tuple(held)


def _cuts(shards: Sequence[tuple[int, int] | None], mesh_shape: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return (mesh dimension, tensor dim, pieces to cut each of) in the order in which the tensor is cut.

    A strided shard means that mesh dimensions to its right cut first, into as many pieces as its split factor; FSDP2
    creates it that way. Reading the placements from left to right instead (cut every piece, then join) gives the same
    result for even sizes only.
    """
    order: list[tuple[int, int, int]] = []
    for mesh_dim, shard in reversed(list(enumerate(shards))):
        if shard is None:
            continue
        dim, factor = shard
        before, pieces = 0, 1
        while before < len(order) and pieces < factor:
            other, cut, _ = order[before]
            pieces *= mesh_shape[other] if cut == dim else 1
            before += 1
        order.insert(*((before, (mesh_dim, dim, 1)) if pieces == factor else (0, (mesh_dim, dim, factor))))
    return order


def _chunk(runs: Region, count: int, index: int) -> Region:
    """Return chunk ``index`` of ``count`` chunks of these runs, as ``torch.chunk`` cuts them."""
    total = sum(stop - start for start, stop in runs)
    size = -(-total // count)
    return slice_runs(runs, index * size, (index + 1) * size)


def slice_runs(runs: Region, first: int, last: int) -> Region:
    """Return the runs that cover the indices from position ``first`` up to position ``last`` of these runs."""
    taken, position = [], 0
    for start, stop in runs:
        low, high = max(first, position), min(last, position + stop - start)
        if low < high:
            taken.append((start + low - position, start + high - position))
        position += stop - start
    return tuple(taken)
