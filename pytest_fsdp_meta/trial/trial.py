"""Run one loader in one world and observe everything that the selected checks need.

All observations are taken while the loader's fixtures are set up; the checks judge the recorded evidence afterwards.
An observation that cannot be taken is recorded with the reason, and affects only the checks that need it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from pytest_fsdp_meta.catalogue import Catalogue, Selection, judge
from pytest_fsdp_meta.evidence import Evidence, SmallerWorld, WorldFacts, combine_subjects
from pytest_fsdp_meta.judging.smaller_worlds import may_be_due_to_ranks
from pytest_fsdp_meta.loader.call import Call
from pytest_fsdp_meta.trial import on_ranks, simulation
from pytest_fsdp_meta.trial.giving import LOADER_OUTCOMES, Loads, describe_size
from pytest_fsdp_meta.trial.observations import ONE_LOAD, Stopwatch, with_needed
from pytest_fsdp_meta.trial.obstacles import add_hints, declared_otherwise, unknown_attribute, unsupported
from pytest_fsdp_meta.trial.reloading import MORE_LOADS, AllObservations
from pytest_fsdp_meta.worlds import DEFAULT_MESH_DIM, Engine, Listener, World, WorldError, WorldSpec
from pytest_fsdp_meta.worlds.system import processes

if TYPE_CHECKING:
    from pytest_fsdp_meta.checks.materialisation.observe import Loaded


class LoaderFailed(Exception):
    """The loader returned no subject, so there is nothing to observe.

    ``summary`` is one line and ``str()`` the full message. If every rank raised the same exception of
    ``LOADER_OUTCOMES`` (a skip, or an unsatisfied assumption of Hypothesis), ``unanimous_outcome`` is its qualified
    name. ``reason`` is the message of the first failure, and ``place`` its "path:line" in the user's code.
    """

    def __init__(
        self, summary: str, detail: str = "", unanimous_outcome: str = "", reason: str = "", place: str = ""
    ) -> None:
        self.summary = summary
        self.unanimous_outcome = unanimous_outcome
        self.reason = reason
        self.place = place
        super().__init__(detail or summary)


def world_facts(spec: WorldSpec) -> WorldFacts:
    """Return the facts that are known about a world before it starts."""
    return WorldFacts(
        spec.size,
        tuple(spec.mesh.items()),
        spec.device_type,
        spec.backend,
        simulated=spec.simulated,
        device_memory=spec.device_memory,
        memory_reserve=spec.memory_reserve,
    )


@dataclass
class Trial:
    """One loader in one world.

    ``selection`` has the ids of the checks that will be judged; None for all. With ``localise``, the first step is
    traced module by module even if no check finds that it departs. After ``observe``, ``outputs`` holds what
    each rank wrote and ``seconds`` the duration of each phase.
    """

    spec: WorldSpec
    engine: Engine
    steps: int
    tolerance: Mapping[str, float]
    listener: Listener | None = None
    selection: Container[str] | None = None
    localise: bool = False
    outputs: list[str] = field(default_factory=list, init=False)
    stopwatch: Stopwatch = field(default_factory=Stopwatch, init=False)

    @property
    def seconds(self) -> dict[str, float]:
        return self.stopwatch.seconds

    def observe(self, loader: Call, wanted: Collection[str]) -> Evidence:
        """Run the loader on every rank and take each wanted observation once.

        Raises LoaderFailed when the loader does not return a subject on every rank.
        """
        try:
            temporary = TemporaryDirectory(prefix=processes.folder_prefix("trial"), ignore_cleanup_errors=True)
        except OSError as error:
            raise LoaderFailed(f"cannot create a temporary folder: {error}; set TMPDIR to another folder") from error
        with temporary as folder:
            world = World(self.spec, self.engine, shared=Path(folder), listener=self.listener)
            observe = self._simulate if self.spec.simulated else self._observe
            try:
                return observe(world, loader, wanted, Path(folder))
            finally:
                world.close()
                self.outputs = world.outputs()

    def _simulate(self, world: World, loader: Call, wanted: Collection[str], folder: Path) -> Evidence:
        load = partial(_load, loader=loader)
        run = simulation.SimulatedRun(
            world=world,
            reference_world=self._single_rank_world("the reference"),
            loaded=self._load_first(world, load),
            load_again=partial(self._load_again, folder, load),
            facts=world_facts(self.spec),
            stopwatch=self.stopwatch,
        )
        evidence = run.evidence(self.tolerance, wanted)
        if problem := unknown_attribute(run.subject, run.inventory, evidence.reference, run.loaded[0].checkpoints):
            raise LoaderFailed(problem)
        return evidence

    def _load_first(self, world: World, load: Callable[[World], list[Loaded]]) -> list[Loaded]:
        try:
            with self.stopwatch.timing("starting"):
                world.start()
            with self.stopwatch.timing("loading"):
                loaded = load(world)
        except WorldError as error:
            unanimous_outcome = error.unanimous if error.unanimous in LOADER_OUTCOMES else ""
            message, summary = error.failures[0].message, add_hints(error.summary)
            detail = str(error).replace(error.summary, summary, 1)
            raise LoaderFailed(summary, detail, unanimous_outcome, message, error.place) from error
        if problem := declared_otherwise(loaded):
            raise LoaderFailed(problem)
        return loaded

    def _observe(self, world: World, loader: Call, wanted: Collection[str], folder: Path) -> Evidence:
        watch = sorted({"collectives", "draws", "memory", "values"} & set(wanted))
        loaded = self._load_first(world, partial(_load, loader=loader, watch=watch))
        reference_world = self._single_rank_world("the reference")
        gpus, library = tuple(rank.gpu for rank in loaded), loaded[0].library
        facts = replace(world_facts(self.spec), devices=gpus, library=library)
        inventory = tuple(rank.inventory for rank in loaded)
        subject = combine_subjects([rank.subject for rank in loaded], facts.mesh, inventory)
        loads = Loads(world, partial(self._load_again, folder, partial(_load, loader=loader)))
        run = AllObservations(
            seen=Evidence(facts, subject, inventory, tolerance=self.tolerance),
            unavailable=unsupported(loaded),
            wanted=with_needed(wanted, (*ONE_LOAD, *MORE_LOADS)),
            stopwatch=self.stopwatch,
            loads=loads,
            reference_world=reference_world,
            single_rank_world=self._single_rank_world,
            data_world=self._single_rank_world("data in a world of one rank"),
            loaded=loaded,
            folder=folder,
            steps=self.steps,
            selection=self.selection,
            localise=self.localise,
        )
        try:
            evidence = run.take_all()
        finally:
            reference_world.close()
            loads.close()
        if problem := unknown_attribute(subject, inventory, evidence.reference, loaded[0].checkpoints):
            raise LoaderFailed(problem)
        return evidence

    def _single_rank_world(self, label: str) -> World:
        """Return a world of one rank that has not been started; the first observation that needs it starts it."""
        devices = self.spec.devices[:1]
        simulated = (0,) if self.spec.simulated else ()
        mesh = {DEFAULT_MESH_DIM: 1}
        spec = replace(self.spec, mesh=mesh, devices=devices, process_group="plugin", simulated=simulated)
        return World(spec, self.engine, label=label, listener=self.listener)

    def _load_again(
        self, folder: Path, load: Callable[[World], list[Loaded]], spec: WorldSpec, label: str, worlds: list[World]
    ) -> tuple[World, list[Loaded]]:
        """Run the loader in another world. It is first added to ``worlds``, which the caller closes."""
        world = World(spec, self.engine, label, folder, self.listener)
        worlds.append(world)
        world.start()
        return world, load(world)


def _load(world: World, loader: Call, watch: Sequence[str] = ()) -> list[Loaded]:
    observer: Callable[..., Loaded] = on_ranks.loading.load
    given: tuple[object, ...] = loader, watch
    if world.spec.simulated:
        observer, given = on_ranks.simulation.load_simulated, (loader,)
    loaded: list[Loaded] = world.call(observer, given, doing="loading", unanimous_outcomes=LOADER_OUTCOMES)
    return loaded


PATIENCE, LEAST = 3, 20.0
"""A smaller world gets ``PATIENCE`` times the seconds that the loader's own world took, and ``LEAST`` seconds more."""


def judge_smaller_worlds(
    trial: Trial, loader: Call, evidence: Evidence, catalogue: Catalogue, checks: Sequence[str], selection: Selection
) -> Evidence:
    """Return the evidence with what the failed checks find in smaller worlds.

    The first has one rank. If some failed check passes there, each dimension of a mesh of several is tried alone.
    Failures that are expected start nothing.
    """
    spec, wide = trial.spec, [name for name, size in trial.spec.mesh.items() if size > 1]
    failed = [
        id
        for id in checks
        if id not in selection.xfailing
        and may_be_due_to_ranks(catalogue[id])
        and judge(catalogue[id], evidence, catalogue, selection).status == "failed"
    ]
    if not failed or not wide or spec.simulated:
        return evidence
    # What is saved depends on what else is observed: a model that has not trained, or without an optimizer.
    saving = any(catalogue[id].family == "checkpoint" for id in failed)
    wanted = catalogue.observations(checks if saving else failed)
    with trial.stopwatch.timing("smaller worlds"):
        worlds = [_judge_along((), trial, loader, catalogue, failed, wanted)]
        if len(wide) > 1 and worlds[0].passed:
            worlds += [_judge_along((name,), trial, loader, catalogue, worlds[0].passed, wanted) for name in wide]
    return replace(evidence, smaller=tuple(worlds))


def _judge_along(
    dims: Sequence[str],
    trial: Trial,
    loader: Call,
    catalogue: Catalogue,
    checks: Sequence[str],
    wanted: Collection[str],
) -> SmallerWorld:
    mesh = {name: size if name in dims else 1 for name, size in trial.spec.mesh.items()}
    seen = tuple((name, mesh[name]) for name in dims)
    timeout = min(trial.spec.timeout, PATIENCE * sum(trial.seconds.values()) + LEAST)
    spec = replace(trial.spec, mesh=mesh, timeout=timeout)
    spec = replace(spec, devices=spec.devices[: spec.size])
    selection = Selection(frozenset(checks))
    smaller = Trial(spec, trial.engine, trial.steps, trial.tolerance, trial.listener, selection)
    try:
        evidence = smaller.observe(loader, wanted)
    except LoaderFailed as failure:
        return SmallerWorld(seen, problem=f"in {describe_size(spec)}, {failure.summary}")
    verdicts = {id: judge(catalogue[id], evidence, catalogue, selection) for id in checks}
    failed: Mapping[str, tuple[str, ...]] = {
        id: tuple(dict.fromkeys(finding.tensor or "" for finding in verdict.findings))
        for id, verdict in verdicts.items()
        if verdict.status == "failed"
    }
    passed = tuple(
        id for id, verdict in verdicts.items() if verdict.status == "passed" or verdict.why == "partly checked"
    )
    draws = evidence.draws[0].draws if evidence.draws else ()
    return SmallerWorld(seen, failed, passed, draws=draws)
