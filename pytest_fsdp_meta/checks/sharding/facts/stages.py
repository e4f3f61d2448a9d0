"""The stages of a pipeline: which ranks each has, and which tensors whole stages hold.

A mesh says by the name of a dimension that it divides the ranks into stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from pytest_fsdp_meta.checks.sharding.facts.mesh_dims import splits_stages
from pytest_fsdp_meta.checks.structure.facts import RankInventory


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
    names = dict.fromkeys(tensor.name for rank in inventory for tensor in rank.tensors)
    return tuple(name for name in names if _is_by_stage(name, stages, inventory))


def holding_stages(name: str, stages: Sequence[Sequence[int]], inventory: Sequence[RankInventory]) -> list[int]:
    """Return the numbers of the stages that have the tensor, on some rank at least."""
    holding = {rank.rank for rank in inventory if name in rank.by_name}
    return [number for number, ranks in enumerate(stages) if holding.intersection(ranks)]


def _is_by_stage(name: str, stages: Sequence[Sequence[int]], inventory: Sequence[RankInventory]) -> bool:
    by_rank = {rank.rank: name in rank.by_name for rank in inventory}  # of a simulated world, some ranks
    held = [{by_rank[rank] for rank in ranks if rank in by_rank} for ranks in stages]
    return {True} in held and {False} in held and {True, False} not in held
