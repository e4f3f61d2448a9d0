"""Observe a loader at a size at which it does not run: some of its ranks, without values and without a network."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_fsdp_meta.catalogue.registry import OBSERVATIONS
from pytest_fsdp_meta.evidence import (
    Evidence,
    ReferenceFacts,
    SubjectFacts,
    Unavailable,
    WorldFacts,
    combine_subjects,
    not_declared,
    replicates,
    splits_model,
)
from pytest_fsdp_meta.evidence.simulation import SimulatedSize
from pytest_fsdp_meta.loader.call import Call
from pytest_fsdp_meta.trial import on_ranks
from pytest_fsdp_meta.trial.loads import LOADER_OUTCOMES
from pytest_fsdp_meta.trial.obstacles import NOT_WANTED, from_world_error
from pytest_fsdp_meta.trial.timing import Stopwatch
from pytest_fsdp_meta.worlds import World, WorldError, WorldSpec, choose_simulated

if TYPE_CHECKING:
    from pytest_fsdp_meta.observers.loading import Loaded

FACTORS = (8, 64)
"""By how much smaller the worlds are that a simulated one is compared with."""
WITHOUT_VALUES = Unavailable("simulated: the ranks have no values, and send nothing")


def load(world: World, loader: Call) -> list[Loaded]:
    """Run the loader on the simulated ranks."""
    loaded: list[Loaded] = world.call(on_ranks.simulation.load_simulated, (loader,), unanimous_outcomes=LOADER_OUTCOMES)
    return loaded


def observe(
    world: World,
    loaded: list[Loaded],
    load_in: Callable[[WorldSpec], World],
    reference_world: World,
    facts: WorldFacts,
    tolerance: Mapping[str, float],
    stopwatch: Stopwatch,
    wanted: Collection[str],
) -> Evidence:
    """Take the observations that need no values. ``load_in`` runs the loader in another world and returns it."""
    inventory = tuple(rank.inventory for rank in loaded)
    subject = combine_subjects([rank.subject for rank in loaded], facts.mesh, inventory)
    unavailable = dict.fromkeys((name for name in OBSERVATIONS if name != "inventory"), WITHOUT_VALUES)
    with stopwatch.timing("reference"):
        reference = _reference(reference_world, loaded[0], subject)
    simulation: tuple[SimulatedSize, ...] | Unavailable = NOT_WANTED
    if "simulation" in wanted:
        with stopwatch.timing("simulating steps"):
            simulation = _sizes(world, loaded[0].data_parallel[1], load_in)
    for name, observed in (("reference", reference), ("simulation", simulation)):
        if isinstance(observed, Unavailable):
            unavailable[name] = observed
        else:
            del unavailable[name]
    return Evidence(
        world=facts,
        subject=subject,
        inventory=inventory,
        reference=None if isinstance(reference, Unavailable) else reference,
        simulation=None if isinstance(simulation, Unavailable) else simulation,
        unavailable=unavailable,
        tolerance=tolerance,
    )


def _reference(world: World, first: Loaded, subject: SubjectFacts) -> ReferenceFacts | Unavailable:
    if "reference" not in subject.declared:
        return not_declared("reference")
    try:
        with world:
            if "reference" in first.checkpoints:
                return on_ranks.run_on(world, on_ranks.reference.checkpoint_facts, first.checkpoints["reference"])[0]
            build = on_ranks.simulation.observe_reference
            return on_ranks.run_on(world, build, first.recipe, tuple(subject.frozen), subject.kept_attributes)[0]
    except WorldError as error:
        return from_world_error(error)


def _sizes(world: World, shares: int, load_in: Callable[[WorldSpec], World]) -> tuple[SimulatedSize, ...] | Unavailable:
    try:
        sizes = [_size(world, shares)]
        for spec in smaller_worlds(world.spec):
            with closing(load_in(spec)) as smaller:
                sizes.append(_size(smaller, shares))
    except WorldError as error:
        return from_world_error(error)
    return tuple(sizes)


def _size(world: World, shares: int) -> SimulatedSize:
    spec = world.spec
    # One rank, because a step takes seconds, and ranks differ in the sizes of their shards only.
    ranks = on_ranks.run_on(world, on_ranks.simulated_step.observe_size, spec.simulated[0], shares)
    return SimulatedSize(tuple(spec.mesh.items()), tuple(ranks))


def smaller_worlds(spec: WorldSpec) -> Iterator[WorldSpec]:
    """Yield specs with an eighth and a sixty-fourth of the ranks, on the largest dimension that shards data."""
    sharding = {dim: size for dim, size in spec.mesh.items() if not splits_model(dim) and not replicates(dim)}
    grown = max(sharding, key=lambda dim: sharding[dim], default="")
    for factor in FACTORS:
        if grown and spec.mesh[grown] % factor == 0 and spec.mesh[grown] // factor > 1:
            mesh = {**spec.mesh, grown: spec.mesh[grown] // factor}
            ranks = choose_simulated(mesh)
            yield replace(spec, mesh=mesh, simulated=tuple(sorted({ranks[0], ranks[-1]})))
