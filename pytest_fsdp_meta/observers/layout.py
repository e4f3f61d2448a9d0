"""Which indices of a global tensor a rank holds. Pure arithmetic on mesh coordinates, no torch.

torch has this as private helpers only, and they give one offset per dimension, which a strided shard (FSDP2 over TP
on the same dim) does not have: it holds several separate runs.
"""

from __future__ import annotations

from collections.abc import Sequence

from pytest_fsdp_meta.evidence import Region


def regions(
    shape: Sequence[int],
    shards: Sequence[tuple[int, int] | None],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
) -> tuple[Region, ...]:
    """The runs held of every dimension by the rank at ``coordinate``.

    ``shards`` has one entry per mesh dimension: None where the tensor is not sharded over it, else the tensor dim and
    the split factor (1 for an ordinary shard). Like torch, a dimension is cut into chunks of ceil(size / ranks), so
    the last ranks may hold less, or nothing.
    """
    held: list[Region] = [((0, size),) if size else () for size in shape]
    for shard, ranks, index in zip(shards, mesh_shape, coordinate, strict=True):
        if shard is not None:
            dim, factor = shard
            pieces = [_chunk(held[dim], factor, number) for number in range(factor)]
            held[dim] = _join([run for piece in pieces for run in _chunk(piece, ranks, index)])
    return tuple(held)


def _chunk(runs: Region, count: int, index: int) -> Region:
    """The chunk ``index`` of ``count`` of these runs, as ``torch.chunk`` cuts them."""
    total = sum(stop - start for start, stop in runs)
    size = -(-total // count)
    first, last = index * size, min((index + 1) * size, total)
    taken, position = [], 0
    for start, stop in runs:
        low, high = max(first, position), min(last, position + stop - start)
        if low < high:
            taken.append((start + low - position, start + high - position))
        position += stop - start
    return tuple(taken)


def _join(runs: Sequence[tuple[int, int]]) -> Region:
    joined: list[tuple[int, int]] = []
    for start, stop in runs:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(joined)
