"""How evenly the mesh divides the sharded dims of a model, and the smallest mesh that would divide one unevenly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from math import prod

from pytest_fsdp_meta.checks.sharding.facts import sharded_dim, splits_model
from pytest_fsdp_meta.checks.structure.facts import Dims
from pytest_fsdp_meta.checks.training.facts import RankTraining
from pytest_fsdp_meta.evidence import RankInventory, TensorFacts, WorldFacts
from pytest_fsdp_meta.reports.schema import Evenness
from pytest_fsdp_meta.text import grouped


@dataclass(frozen=True)
class _ShardedDim:
    """One dim of a parameter, the mesh that shards it, and the indices of the mesh dimensions that do."""

    name: str
    dim: int
    size: int
    mesh: Dims
    over: tuple[int, ...]

    @property
    def parts(self) -> int:
        return prod(self.mesh[index][1] for index in self.over)


def evenness_of(
    world: WorldFacts, inventory: Sequence[RankInventory], training: Sequence[RankTraining] | None
) -> Evenness | None:
    """Return how evenly the mesh divides the DTensors of the first rank; None if it shards none."""
    sharded = [place for tensor in inventory[0].tensors for place in _sharded_dims(tensor)]
    if all(one.parts == 1 for one in sharded):
        return None
    return min(_uneven_worlds(world, sharded, training[0] if training else None), key=lambda found: found.ranks)


def _uneven_worlds(
    world: WorldFacts, sharded: Sequence[_ShardedDim], training: RankTraining | None
) -> Iterator[Evenness]:
    """Yield the smallest uneven world by another size of one mesh dimension, for each that shards something."""
    even = not any(one.size % one.parts for one in sharded)
    by_dimension = grouped((one.mesh[index][0] or index, (one, index)) for one in sharded for index in one.over)
    for divided in by_dimension.values():
        # What the other dimensions of the mesh divide into, and the dim itself.
        shares = [(one, one.parts // one.mesh[index][1]) for one, index in divided]
        ranks = next(ranks for ranks in count(2) if any(one.size % (others * ranks) for one, others in shares))
        first, at = divided[0]
        mesh, (name, before) = first.mesh, first.mesh[at]
        if name is not None and (name, before) in world.mesh:  # else the loader made the mesh
            mesh, at = world.mesh, world.mesh.index((name, before))
        rows = 0
        if training is not None and not splits_model(name):
            rows = _rows_on(world, {one.parts for one in sharded}, training, (before, ranks))
        yield Evenness(
            even,
            world.size // before * ranks,
            tuple(f"{one.name} ({one.size} on dim {one.dim})" for one, others in shares if one.size % (others * ranks)),
            rows,
            (*mesh[:at], (name, ranks), *mesh[at + 1 :]),
        )


def _rows_on(world: WorldFacts, parts: set[int], training: RankTraining, change: tuple[int, int]) -> int:
    """Return ``Evenness.rows``. It is known if every rank has rows of its own, or as many share them as the tensors."""
    slices, (before, ranks) = training.data_parallel[1], change
    if slices != world.size and parts - {1} != {slices}:
        return 0
    needed = slices // before * ranks
    return training.rows * needed if training.rows * slices % needed else 0


def _sharded_dims(tensor: TensorFacts) -> Iterator[_ShardedDim]:
    """Yield each dim of a parameter that the mesh shards."""
    if tensor.mesh is None or tensor.kind != "parameter":
        return
    over = grouped((sharded_dim(placement), index) for index, placement in enumerate(tensor.placements or ()))
    for dim, indices in over.items():
        if dim is not None and tensor.shape[dim]:
            yield _ShardedDim(tensor.name, dim, tensor.shape[dim], tensor.mesh.pairs, tuple(indices))
