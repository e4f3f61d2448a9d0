"""Observe a loader at a size at which it does not run: some of its ranks, without values and without a network.

What the ranks that do not run would hold is proved from the placements on those that do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import prod
from statistics import median_low
from typing import TYPE_CHECKING

from pytest_fsdp_meta.checks.sharding.facts import (
    Order,
    mesh_and_place,
    order_of,
    place_of_rank,
    possible_orders,
    split_factor,
)
from pytest_fsdp_meta.checks.simulation.facts import FACTORS, NO_VALUES, BytesOfRanks, SimulatedSize
from pytest_fsdp_meta.checks.structure.facts import regions
from pytest_fsdp_meta.evidence import (
    Evidence,
    MeshFacts,
    RankInventory,
    ReferenceFacts,
    SubjectFacts,
    Unavailable,
    WorldFacts,
    combine_subjects,
    not_declared,
    sharded_dim,
    shards_data,
)
from pytest_fsdp_meta.judging.registry import OBSERVATIONS
from pytest_fsdp_meta.trial import on_ranks
from pytest_fsdp_meta.trial.giving import Load
from pytest_fsdp_meta.trial.observations import Stopwatch
from pytest_fsdp_meta.trial.obstacles import NOT_WANTED, from_world_error, unsupported
from pytest_fsdp_meta.worlds import World, WorldError, WorldSpec, choose_simulated

if TYPE_CHECKING:
    from pytest_fsdp_meta.checks.materialisation.observe import Loaded

WITHOUT_VALUES = Unavailable(NO_VALUES)
Cuts = tuple[tuple[int, int], ...]
"""The mesh dimensions, by index, that cut a dim of a tensor, each with its split factor."""
Shape = tuple[tuple[int, Cuts], ...]
"""The length of each dim of a tensor that is cut, with its cuts."""
Layout = tuple[MeshFacts | None, Shape]


@dataclass(frozen=True)
class SimulatedRun:
    """A loader on some ranks of a world. ``load_again`` runs it in another one, which it adds to its last argument."""

    world: World
    reference_world: World
    loaded: list[Loaded]
    load_again: Load
    facts: WorldFacts
    stopwatch: Stopwatch

    @cached_property
    def inventory(self) -> tuple[RankInventory, ...]:
        return tuple(rank.inventory for rank in self.loaded)

    @cached_property
    def subject(self) -> SubjectFacts:
        return combine_subjects([rank.subject for rank in self.loaded], self.facts.mesh, self.inventory)

    def evidence(self, tolerance: Mapping[str, float], wanted: Collection[str]) -> Evidence:
        """Take the observations that need no values."""
        unavailable = dict.fromkeys((name for name in OBSERVATIONS if name != "inventory"), WITHOUT_VALUES)
        with self.stopwatch.timing("reference"):
            reference = self._reference()
        simulation: tuple[SimulatedSize, ...] | Unavailable = NOT_WANTED
        if "simulation" in wanted:
            with self.stopwatch.timing("simulating steps"):
                simulation = self._sizes()
        for name, observed in (("reference", reference), ("simulation", simulation)):
            if isinstance(observed, Unavailable):
                unavailable[name] = observed
            else:
                del unavailable[name]
        unavailable |= unsupported(self.loaded)
        return Evidence(
            world=self.facts,
            subject=self.subject,
            inventory=self.inventory,
            reference=None if isinstance(reference, Unavailable) else reference,
            simulation=None if isinstance(simulation, Unavailable) else simulation,
            unavailable=unavailable,
            tolerance=tolerance,
        )

    def _reference(self) -> ReferenceFacts | Unavailable:
        if "reference" not in self.subject.declared:
            return not_declared("reference")
        first, world = self.loaded[0], self.reference_world
        try:
            with world:
                if "reference" in first.checkpoints:
                    read = on_ranks.reference.checkpoint_facts
                    return on_ranks.run_on(world, read, first.checkpoints["reference"])[0]
                build, frozen = on_ranks.simulation.observe_reference, tuple(self.subject.frozen)
                return on_ranks.run_on(world, build, first.recipe, frozen, self.subject.kept_attributes)[0]
        except WorldError as error:
            return from_world_error(error)

    def _sizes(self) -> tuple[SimulatedSize, ...] | Unavailable:
        try:
            own = self._size(self.world, self.inventory, {})
        except WorldError as error:
            return from_world_error(error)
        # A rank has the same rows in each world: batches that the ranks share would be smaller in a larger one.
        rows = {key: shape[0] for key, shape in own.step.assumed.batch.items()} if own.step is not None else {}
        return (own, *(self._smaller(spec, rows) for spec in smaller_worlds(self.world.spec)))

    def _smaller(self, spec: WorldSpec, rows: Mapping[str, int]) -> SimulatedSize:
        worlds: list[World] = []
        try:
            world, loaded = self.load_again(spec, f"the world of {spec.size}", worlds)
            return self._size(world, [rank.inventory for rank in loaded], rows)
        except WorldError as error:
            return SimulatedSize(tuple(spec.mesh.items()), (), problem=error.summary)
        finally:
            for world in worlds:
                world.close()

    def _size(self, world: World, inventories: Sequence[RankInventory], rows: Mapping[str, int]) -> SimulatedSize:
        spec, shares = world.spec, self.loaded[0].data_parallel[1]
        # One rank, because a step takes seconds, and ranks differ in the sizes of their shards only.
        observe = on_ranks.simulated_step.observe_size
        ranks = on_ranks.run_on(world, observe, spec.simulated[0], shares, rows)
        mesh, known = tuple(spec.mesh.items()), {rank.rank: rank.parameters for rank in ranks}
        return SimulatedSize(mesh, tuple(ranks), parameters=bytes_of_ranks(inventories, mesh, known))


def smaller_worlds(spec: WorldSpec) -> Iterator[WorldSpec]:
    """Yield specs with up to an eighth and a sixty-fourth of the ranks, on the largest dimension that shards data."""
    sharding = {dim: size for dim, size in spec.mesh.items() if shards_data(dim)}
    grown = max(sharding, key=lambda dim: sharding[dim], default="")
    known = {1}
    for most in FACTORS if grown else ():
        size = spec.mesh[grown]
        factor = max(n for n in range(1, most + 1) if size % n == 0 and (size > n or n == 1))
        if factor in known:
            continue
        known.add(factor)
        mesh = {**spec.mesh, grown: size // factor}
        ranks = choose_simulated(mesh)
        yield replace(spec, mesh=mesh, simulated=tuple(sorted({ranks[0], ranks[-1]})))


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
        shapes = {shape: n for (mesh, shape), n in layouts[0].items() if mesh == own_mesh}
        by_place = {
            place: sum(n * prod(_length(*dim, sizes, place) for dim in shape) for shape, n in shapes.items())
            for place in product(*map(range, sizes))
        }
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


def _length(length: int, cuts: Cuts, sizes: Sequence[int], place: Sequence[int]) -> int:
    """Return how much of a dim the rank at a place has."""
    own = [index for index, _ in cuts]
    shards = [(0, factor) for _, factor in cuts]
    [runs] = regions((length,), shards, [sizes[index] for index in own], [place[index] for index in own])
    return sum(stop - start for start, stop in runs)
