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


@dataclass(frozen=True)
class _Larger:
    """A mesh in which the dimension ``name`` has the size ``ranks`` instead of ``before``, and the world ``size``."""

    name: str | None
    size: int
    ranks: int
    before: int
    mesh: Dims
    uneven: tuple[_ShardedDim, ...]


def evenness_of(
    world: WorldFacts, inventory: Sequence[RankInventory], training: Sequence[RankTraining] | None
) -> Evenness | None:
    """Return how evenly the mesh divides the DTensors of the first rank; None if it shards none."""
    sharded = [place for tensor in inventory[0].tensors for place in _sharded_dims(tensor)]
    if all(one.parts == 1 for one in sharded):
        return None
    smallest = min(_uneven_meshes(world, sharded), key=lambda larger: larger.size)
    return Evenness(
        even=not any(one.size % one.parts for one in sharded),
        ranks=smallest.size,
        tensors=tuple(f"{one.name} ({one.size} on dim {one.dim})" for one in smallest.uneven),
        rows=_rows_on(world, smallest, {one.parts for one in sharded}, training[0]) if training else 0,
        mesh=smallest.mesh,
    )


def _uneven_meshes(world: WorldFacts, sharded: Sequence[_ShardedDim]) -> Iterator[_Larger]:
    """Yield the mesh of the world with another size of one dimension, for each dimension that shards something."""
    by_dimension: dict[object, list[_ShardedDim]] = {}
    for one in sharded:
        for index in one.over:
            by_dimension.setdefault(one.mesh[index][0] or index, []).append(one)
    for dimension, divided in by_dimension.items():
        ranks = next(ranks for ranks in count(2) if any(one.size % ranks for one in divided))
        own = divided[0].mesh
        index = next(index for index in divided[0].over if dimension in (own[index][0], index))
        known = world.mesh if own[index] in world.mesh else own  # the loader may have made the mesh
        at = known.index(own[index])
        yield _Larger(
            name=own[index][0],
            size=world.size // own[index][1] * ranks,
            ranks=ranks,
            before=own[index][1],
            mesh=(*known[:at], (own[index][0], ranks), *known[at + 1 :]),
            uneven=tuple(one for one in divided if one.size % ranks),
        )


def _rows_on(world: WorldFacts, larger: _Larger, parts: set[int], training: RankTraining) -> int:
    """Return ``Evenness.rows``. It is known if every rank has rows of its own, or as many share them as the tensors."""
    slices = training.data_parallel[1]
    if splits_model(larger.name) or (slices != world.size and parts - {1} != {slices}):
        return 0
    needed = slices // larger.before * larger.ranks
    return training.rows * needed if training.rows * slices % needed else 0


def _sharded_dims(tensor: TensorFacts) -> Iterator[_ShardedDim]:
    """Yield each dim of a parameter that the mesh shards."""
    if tensor.mesh is None or tensor.kind != "parameter":
        return
    over: dict[int, list[int]] = {}
    for index, placement in enumerate(tensor.placements or ()):
        dim = sharded_dim(placement)
        if dim is not None and tensor.shape[dim]:
            over.setdefault(dim, []).append(index)
    for dim, indices in over.items():
        yield _ShardedDim(tensor.name, dim, tensor.shape[dim], tensor.mesh.pairs, tuple(indices))
