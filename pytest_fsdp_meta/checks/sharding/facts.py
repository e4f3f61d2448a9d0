"""The conventions behind the names of mesh dimensions, and what follows from them: stages, and the places of ranks.

A mesh does not record what its dimensions are for; only their names say that ``tp`` splits the model, ``dp_shard`` the
batch, and ``pp`` the ranks into stages.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import permutations
from math import prod

from pytest_fsdp_meta.checks.structure.facts import MeshFacts, RankInventory, TensorFacts

BATCH_PARTS = frozenset({"dp", "ddp", "fsdp", "hsdp", "edp", "data", "shard", "replicate"})
"""Parts of a dimension's name that mean data parallelism, also within ``dp_shard_cp`` or ``dp_shard_mod_ep``."""
EXPERT_DIMS = frozenset({"ep", "etp", "expert"})
SEQUENCE_DIMS = frozenset({"cp", "context", "sp"})
STAGE_DIMS = frozenset({"pp", "pipe", "pipeline"})
MODEL_DIMS = frozenset({"tp", "tensor", "tensor_parallel", "model", "mp"}) | STAGE_DIMS | EXPERT_DIMS | SEQUENCE_DIMS


def splits_model(dim: str | None) -> bool:
    """Return whether a mesh dimension of this name splits the model rather than the batch.

    Its ranks see the same rows, and the author's plan decides how each parameter is placed on it.
    """
    return dim is not None and (dim.lower() in MODEL_DIMS or _ends(dim, "tp", "cp", "pp", "ep"))


def splits_batch(dim: str | None) -> bool:
    """Return whether the name of a mesh dimension says that its ranks see different rows."""
    return dim is not None and bool(BATCH_PARTS.intersection(dim.lower().split("_")))


def splits_stages(dim: str | None) -> bool:
    """Return whether ranks along a mesh dimension of this name hold different layers: the stages of a pipeline."""
    return dim is not None and (dim.lower() in STAGE_DIMS or _ends(dim, "pp"))


def splits_experts(dim: str | None) -> bool:
    """Return whether a mesh dimension of this name splits experts; such meshes group the ranks independently."""
    return dim is not None and (dim.lower() in EXPERT_DIMS or _ends(dim, "ep"))


def is_expert(tensor: TensorFacts) -> bool:
    """Return whether a tensor is an expert's, by its name or by the dimensions of its mesh."""
    return "expert" in tensor.name or (tensor.mesh is not None and any(map(splits_experts, tensor.mesh.dims)))


def splits_sequence(dim: str) -> bool:
    """Return whether ranks along a mesh dimension of this name may see different parts of the same rows.

    That includes flattened dimensions, such as ``dp_shard_cp``.
    """
    return bool(SEQUENCE_DIMS & set(dim.lower().split("_")))


def replicates(dim: str | None) -> bool:
    """Return whether ranks along a mesh dimension of this name should hold the same values."""
    return dim is not None and ("replica" in dim.lower() or dim.lower() == "ddp")


def shards_data(dim: str | None) -> bool:
    """Return whether a mesh dimension of this name shards parameters, each of whose ranks sees other rows."""
    return not splits_model(dim) and not replicates(dim)


def _ends(dim: str, *endings: str) -> bool:
    """Return whether a name ends in one of these parts (``my_tp`` in ``tp``) and has no part of ``BATCH_PARTS``."""
    parts = dim.lower().split("_")
    return len(parts) > 1 and parts[-1] in endings and not BATCH_PARTS & set(parts)


def sharded_dim(placement: str) -> int | None:
    """Return the tensor dim that a placement shards (0 for ``S(0)`` and ``_S(0, 2)``), or None if it shards none."""
    found = re.match(r"_?S\((\d+)", placement)
    return int(found[1]) if found else None


def split_factor(placement: str) -> int:
    """Return the split factor of a placement that shards: 2 for ``_S(0, 2)``, 1 for ``S(0)``."""
    found = re.match(r"_S\(\d+, (\d+)", placement)
    return int(found[1]) if found else 1


def stages_of(mesh: Sequence[tuple[str, int]]) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each stage; empty if the (name, size) pairs of the mesh have no stages."""
    if not any(splits_stages(name) and size > 1 for name, size in mesh):
        return ()
    stages: dict[tuple[int, ...], list[int]] = {}
    sizes = [size for _, size in mesh]
    for rank in range(prod(sizes)):
        place = [rank // prod(sizes[dim + 1 :]) % size for dim, size in enumerate(sizes)]
        stage = tuple(at for at, (name, _) in zip(place, mesh, strict=True) if splits_stages(name))
        stages.setdefault(stage, []).append(rank)
    return tuple(map(tuple, stages.values()))


def held_by_stages(stages: Sequence[Sequence[int]], inventory: Sequence[RankInventory]) -> tuple[str, ...]:
    """Return the tensors that all ranks of some stages have, and no rank of the others."""
    found = []
    for name in dict.fromkeys(tensor.name for rank in inventory for tensor in rank.tensors):
        by_rank = {rank.rank: name in rank.by_name for rank in inventory}  # of a simulated world, some ranks
        held = [{by_rank[rank] for rank in ranks if rank in by_rank} for ranks in stages]
        if {True} in held and {False} in held and {True, False} not in held:
            found.append(name)
    return tuple(found)


def holding_stages(name: str, stages: Sequence[Sequence[int]], inventory: Sequence[RankInventory]) -> list[int]:
    """Return the numbers of the stages that have the tensor, on some rank at least."""
    holding = {rank.rank for rank in inventory if name in rank.by_name}
    return [number for number, ranks in enumerate(stages) if holding.intersection(ranks)]


Order = Sequence[tuple[str, int]]
"""The dimensions of a mesh with their sizes."""
Facts = Sequence[tuple[int, TensorFacts]]
"""A tensor on some ranks."""


def mesh_and_place(tensor: TensorFacts) -> tuple[MeshFacts | None, tuple[int, ...] | None]:
    """Return the mesh of a tensor as all ranks see it, and where this rank is in it."""
    mesh = tensor.mesh
    return (None, None) if mesh is None else (replace(mesh, coordinate=None), mesh.coordinate)


def possible_orders(mesh: Order, inventories: Iterable[RankInventory]) -> list[Order]:
    """Return the ways in which the ranks may be numbered dimension by dimension.

    The dimensions are the world's, in any order, or those of a mesh of the loader's own that has all ranks.
    """
    size = prod(size for _, size in mesh)
    meshes = {mesh_and_place(tensor)[0] for rank in inventories for tensor in rank.tensors}
    own = [(*zip(map(str, one.dims), one.shape, strict=True),) for one in meshes if one is not None]
    return [*permutations(mesh), *(dims for dims in own if prod(size for _, size in dims) == size)]


def order_of(facts: Facts, orders: Sequence[Order]) -> Order | None:
    """Return the first of the orders by which these ranks are numbered on the tensor's mesh; None if none fits."""
    return next((order for order in orders if all(_fits(rank, tensor, order) for rank, tensor in facts)), None)


def place_of_rank(rank: int, order: Order) -> dict[str, int]:
    """Return the coordinate of a rank by dimension."""
    coordinate = dict[str, int]()
    for dim, size in reversed(order):  # the last dimension runs fastest
        rank, coordinate[dim] = divmod(rank, size)
    return coordinate


def _fits(rank: int, tensor: TensorFacts, order: Order) -> bool:
    mesh, sizes = tensor.mesh, dict(order)
    if mesh is None or mesh.coordinate is None:
        return True
    if any(sizes.get(str(dim)) != size for dim, size in mesh.pairs):
        return False
    place = place_of_rank(rank, order)
    return mesh.coordinate == tuple(place[str(dim)] for dim in mesh.dims)
