"""Observe a loader at a size at which it does not run: some of its ranks, without values and without a network."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from pytest_fsdp_meta.checks.simulation.facts import FACTORS, NO_VALUES, SimulatedSize
from pytest_fsdp_meta.evidence import (
    Evidence,
    RankInventory,
    ReferenceFacts,
    SubjectFacts,
    Unavailable,
    WorldFacts,
    combine_subjects,
    not_declared,
    shards_data,
)
from pytest_fsdp_meta.judging.registry import OBSERVATIONS
from pytest_fsdp_meta.loader.call import Call
from pytest_fsdp_meta.trial import on_ranks
from pytest_fsdp_meta.trial.all_ranks import bytes_of_ranks
from pytest_fsdp_meta.trial.loads import LOADER_OUTCOMES
from pytest_fsdp_meta.trial.obstacles import NOT_WANTED, from_world_error, unsupported
from pytest_fsdp_meta.trial.timing import Stopwatch
from pytest_fsdp_meta.worlds import World, WorldError, WorldSpec, choose_simulated

if TYPE_CHECKING:
    from pytest_fsdp_meta.checks.materialisation.observe import Loaded

WITHOUT_VALUES = Unavailable(NO_VALUES)


def load(world: World, loader: Call) -> list[Loaded]:
    """Run the loader on the simulated ranks."""
    loaded: list[Loaded] = world.call(on_ranks.simulation.load_simulated, (loader,), unanimous_outcomes=LOADER_OUTCOMES)
    return loaded


@dataclass(frozen=True)
class SimulatedRun:
    """A loader on some ranks of a world. ``load_again`` runs it in another one, which it adds to its last argument."""

    world: World
    reference_world: World
    loaded: list[Loaded]
    load_again: Callable[[WorldSpec, str, list[World]], tuple[World, list[Loaded]]]
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
                    return on_ranks.run_on(world, on_ranks.reference.checkpoint_facts, first.checkpoints["reference"])[
                        0
                    ]
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
        rows = own.step.rows if own.step is not None else {}
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
