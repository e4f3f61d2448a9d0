"""Prove from placements what each rank of a simulated world holds, the ranks that do not run included."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import product
from math import prod
from statistics import median_low

from pytest_fsdp_meta.checks.sharding.facts import (
    Order,
    mesh_and_place,
    order_of,
    place_of_rank,
    possible_orders,
    split_factor,
)
from pytest_fsdp_meta.checks.simulation.facts import BytesOfRanks
from pytest_fsdp_meta.evidence import MeshFacts, RankInventory, sharded_dim
from pytest_fsdp_meta.ranks.layout import regions

Place = tuple[int, ...]
Cuts = tuple[tuple[int, int], ...]
"""The mesh dimensions, by index, that cut a dim of a tensor, each with its split factor."""
Shape = tuple[tuple[int, Cuts], ...]
"""The length of each dim of a tensor that is cut, with its cuts."""
Layout = tuple[MeshFacts | None, Shape]


def bytes_of_ranks(inventories: Sequence[RankInventory], mesh: Order, known: Mapping[int, int]) -> BytesOfRanks | None:
    """Return the bytes of parameters on all ranks.

    None if they do not follow from those that run, whose bytes are ``known``: ranks may hold other tensors than these,
    or be numbered in another way.
    """
    layouts = [_bytes_by_layout(inventory) for inventory in inventories]
    if layouts[0] is None or any(other != layouts[0] for other in layouts):
        return None
    held = [0] * prod(size for _, size in mesh)
    orders = possible_orders(mesh, inventories)
    for own_mesh in {mesh for mesh, _ in layouts[0]}:
        facts = [(i.rank, t) for i in inventories for t in i.tensors if mesh_and_place(t)[0] == own_mesh]
        order = order_of(facts, orders)
        if order is None or any(tensor.mesh and tensor.mesh.coordinate is None for _, tensor in facts):
            return None
        dims, sizes = (own_mesh.dims, own_mesh.shape) if own_mesh is not None else ((), ())
        by_place = _bytes_by_place({shape: n for (mesh, shape), n in layouts[0].items() if mesh == own_mesh}, sizes)
        for rank in range(len(held)):
            place = place_of_rank(rank, order)
            held[rank] += by_place[tuple(place[str(dim)] for dim in dims)]
    if any(held[rank] != nbytes for rank, nbytes in known.items()):
        return None
    return BytesOfRanks(min(held), median_low(held), max(held))


def _bytes_by_layout(inventory: RankInventory) -> Counter[Layout] | None:
    """Return the bytes of one element of the dims that are cut, of all parameters of a layout together.

    None if a parameter has parts that no placements describe.
    """
    parameters = {tensor.identity: tensor for tensor in inventory.tensors if tensor.kind == "parameter"}.values()
    if any(tensor.placements is None and tensor.sharded_by for tensor in parameters):
        return None
    nbytes = Counter[Layout]()
    for tensor in parameters:
        cuts: dict[int, Cuts] = {}
        for index, placement in enumerate(tensor.placements or ()):
            if (dim := sharded_dim(placement)) is not None:
                cuts[dim] = (*cuts.get(dim, ()), (index, split_factor(placement)))
        shape = tuple((tensor.shape[dim], cuts[dim]) for dim in sorted(cuts))
        whole = prod(length for dim, length in enumerate(tensor.shape) if dim not in cuts)
        nbytes[mesh_and_place(tensor)[0], shape] += whole * tensor.width
    return nbytes


def _bytes_by_place(layouts: Mapping[Shape, int], sizes: Sequence[int]) -> dict[Place, int]:
    return {
        place: sum(nbytes * prod(_length(*dim, sizes, place) for dim in shape) for shape, nbytes in layouts.items())
        for place in product(*map(range, sizes))
    }


def _length(length: int, cuts: Cuts, sizes: Sequence[int], place: Place) -> int:
    """Return how much of a dim the rank at a place has."""
    own = [index for index, _ in cuts]
    shards = [(0, factor) for _, factor in cuts]
    [runs] = regions((length,), shards, [sizes[index] for index in own], [place[index] for index in own])
    return sum(stop - start for start, stop in runs)
