"""How the ranks of a world are numbered on the meshes of its tensors, so that the places of all ranks are known."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import permutations
from math import prod

from pytest_fsdp_meta.checks.structure.facts import MeshFacts, RankInventory, TensorFacts

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
    if any(sizes.get(str(dim)) != size for dim, size in zip(mesh.dims, mesh.shape, strict=True)):
        return False
    place = place_of_rank(rank, order)
    return mesh.coordinate == tuple(place[str(dim)] for dim in mesh.dims)
