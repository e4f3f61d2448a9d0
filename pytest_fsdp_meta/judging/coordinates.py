"""Find where a rank is on the meshes of the world and of its tensors, and which ranks see the same tokens."""

from __future__ import annotations

from collections.abc import Iterable

from pytest_fsdp_meta.evidence import Evidence, MeshFacts, RankInventory, splits_experts, splits_model, splits_sequence

Place = tuple[tuple[str, int], ...]
"""The index of a rank along each of some mesh dimensions."""


def coordinates(evidence: Evidence) -> dict[int, dict[str, int]]:
    """Return each rank's index along the named dimensions of the world's mesh and of all meshes of its tensors."""
    return {rank.rank: _in_world(evidence, rank) | _in_meshes(_meshes_of(rank)) for rank in evidence.inventory}


def _in_world(evidence: Evidence, rank: RankInventory) -> dict[str, int]:
    place, left = {}, rank.rank
    for dim, size in reversed(evidence.world.mesh):
        left, place[dim] = divmod(left, size)
    return place


def _meshes_of(rank: RankInventory) -> set[MeshFacts]:
    return {tensor.mesh for tensor in rank.tensors if tensor.mesh is not None}


def _in_meshes(meshes: Iterable[MeshFacts]) -> dict[str, int]:
    pairs = ((mesh.dims, mesh.coordinate) for mesh in meshes if mesh.coordinate is not None)
    return {dim: i for dims, coordinate in pairs for dim, i in zip(dims, coordinate, strict=True) if dim is not None}


def sequence_places(evidence: Evidence) -> dict[int, Place]:
    """Return each rank's place along the dimensions that divide the sequence.

    Of the ranks that see the same rows, those with the same place see the same tokens.
    """
    return {
        rank: tuple(sorted((dim, index) for dim, index in place.items() if splits_sequence(dim)))
        for rank, place in coordinates(evidence).items()
    }


def share_places(evidence: Evidence) -> dict[int, Place]:
    """Return each rank's place along the dimensions whose ranks have different shares of a summed loss.

    The ranks along other dimensions, such as tensor-parallel ones, compute the same share together. Meshes of experts
    divide the ranks differently. The loader's own meshes replace the world's, as for slices of the batch.
    """
    places = {}
    for rank in evidence.inventory:
        meshes = [mesh for mesh in _meshes_of(rank) if not any(map(splits_experts, mesh.dims))]
        place = _in_meshes(meshes) or _in_world(evidence, rank)
        shares = ((dim, i) for dim, i in place.items() if splits_sequence(dim) or not splits_model(dim))
        places[rank.rank] = tuple(sorted(shares))
    return places
