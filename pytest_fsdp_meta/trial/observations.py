"""Take the observations of one trial that need one load, row by row of a table. ``reloading`` takes the others as well.

What was seen is kept, or why it was not, and how long it took.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pytest_fsdp_meta.checks.collectives.facts import RankCollectives
from pytest_fsdp_meta.checks.memory.facts import RankMemory
from pytest_fsdp_meta.evidence import (
    Comparison,
    Evidence,
    RankDraws,
    RankInventory,
    RankTraining,
    ReferenceFacts,
    SubjectFacts,
    Unavailable,
    frozen_sources,
    not_declared,
)
from pytest_fsdp_meta.judging.registry import OBSERVATIONS
from pytest_fsdp_meta.ranks.reference_record import RECORDS, noise_of, record_at
from pytest_fsdp_meta.trial import on_ranks
from pytest_fsdp_meta.trial.departure import compare_objective, departing_step, departs, trace_step, with_noise
from pytest_fsdp_meta.trial.giving import Giving, Loads
from pytest_fsdp_meta.trial.obstacles import NOT_WANTED, from_world_error, no_training_declared, odd_model
from pytest_fsdp_meta.trial.on_ranks import run_on
from pytest_fsdp_meta.worlds import World, WorldError

if TYPE_CHECKING:
    from pytest_fsdp_meta.checks.materialisation.observe import Loaded

NOTHING_FROZEN = "nothing is frozen: neither Subject(frozen=...) nor the reference freezes anything"
NO_VERIFIER = "neither Subject(verifier=...) nor a reference is declared"
JUDGED_TO_TRACE = ("inventory", "reference", "values", "verifier", "draws", "training")
"""The observations by which checks say whether a step is traced."""
Run = TypeVar("Run")


@dataclass(frozen=True)
class Observation(Generic[Run]):
    """One row: ``take`` returns what the field of ``Evidence`` with this name holds, or an ``Unavailable``.

    As with checks, ``needs`` are the earlier observations without which this one cannot be taken, and ``uses`` those
    that it reads if they are available. Each row finds its world in the state that the rows before leave it in.
    """

    name: str
    take: Callable[[Run], Any]
    needs: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()


def with_needed(wanted: Iterable[str], rows: Iterable[Observation[Any]]) -> frozenset[str]:
    """Return the wanted observations and those that they need or use. ``rows`` are those of all tables, in order."""
    names = set(wanted)
    for row in reversed(list(rows)):
        if row.name in names:
            names.update(row.needs, row.uses)
    return frozenset(names)


@dataclass
class Stopwatch:
    """Seconds by phase, in the order in which the phases first began."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timing(self, phase: str) -> Iterator[None]:
        """Add the duration of the block to the phase, also when the block raises."""
        began = time.perf_counter()
        self.seconds.setdefault(phase, 0.0)
        try:
            yield
        finally:
            self.seconds[phase] += time.perf_counter() - began


@dataclass
class ObservationRun:
    """The observations of one trial, each taken at most once; those that change the model are taken last."""

    seen: Evidence
    unavailable: dict[str, Unavailable]
    """Why an observation is not in ``seen``."""
    wanted: frozenset[str]
    stopwatch: Stopwatch
    loads: Loads
    reference_world: World
    single_rank_world: Callable[[str], World]
    """Return a world with this label that is not started."""
    data_world: World
    loaded: list[Loaded]
    folder: Path
    steps: int
    selection: Container[str] | None = None
    """The checks that will be judged; None for all."""
    localise: bool = False
    """Whether the first step is traced although no check fails."""
    _unwritten_draws: frozenset[str] = frozenset()
    """The drawn tensors that the reference itself never writes."""
    _watched_steps: list[Any] = field(default_factory=list)
    """The collectives of the steps of the first load, which alone is watched, if another one has trained since."""
    _world_failure: Unavailable = NOT_WANTED
    """The error that ended a world; later observations that need this world are unavailable for the same reason."""

    @property
    def subject(self) -> SubjectFacts:
        return self.seen.subject

    @property
    def inventory(self) -> tuple[RankInventory, ...]:
        return self.seen.inventory

    @property
    def world(self) -> World:
        return self.loads.first

    def take_all(self) -> Evidence:
        for row in ONE_LOAD:
            self.take(row)
        self._trace()  # it may end the world, which is then loaded again
        # Checkpoints need the disk, and its cache, for themselves; only the training is compared with these.
        for name in set(RECORDS) - {"values"}:
            for record in (name, noise_of(name)):
                record_at(self.folder, record).unlink(missing_ok=True)
        return replace(self.seen, unavailable=self.unavailable)

    def take(self, row: Observation[Any]) -> None:
        """Take an observation if a check wants it and nothing rules it out."""
        if row.name not in self.wanted:
            self.unavailable[row.name] = NOT_WANTED
        if row.name in self.unavailable:
            return
        try:
            with self.stopwatch.timing(row.name):
                observed = self.ruled_out(row) or row.take(self)
        except WorldError as error:
            observed = self.describe_error(error)
        if isinstance(observed, Unavailable):
            self.unavailable[row.name] = observed
        elif row.name in OBSERVATIONS:
            self.see(**{row.name: observed})

    def see(self, **observed: Any) -> None:
        self.seen = replace(self.seen, **observed)

    def ruled_out(self, row: Observation[Any]) -> Unavailable | None:
        """Return why the world of the row, or something else that it needs, is not there."""
        # The collectives of loading are known even if training has ended the world.
        if row in ONE_LOAD and not self.world.alive and row.name != "collectives":
            return self._world_failure
        return next((self.unavailable[need] for need in row.needs if need in self.unavailable), None)

    def describe_error(self, error: WorldError) -> Unavailable:
        models = (*self.inventory, *([self.seen.reference.inventory] if self.seen.reference is not None else []))
        self._world_failure = from_world_error(error, {name for model in models for name in model.by_name})
        return self._world_failure

    def _measure_memory(self) -> tuple[RankMemory, ...] | Unavailable:
        measured = tuple(rank.memory for rank in self.loaded if rank.memory is not None)
        if len(measured) < len(self.loaded):
            return Unavailable(
                "memory is measured on Linux only, where /proc distinguishes mapped files from other memory"
            )
        return measured

    def _record_reference(self) -> ReferenceFacts | Unavailable:
        if "reference" not in self.subject.declared:
            return not_declared("reference")
        if "reference" in self._checkpoints:
            return run_on(self.world, on_ranks.reference.checkpoint_facts, self._checkpoints["reference"])[0]
        recorded = self._build_reference("values")
        # The reference may draw other values each time as well, or leave them unwritten.
        drawn = set(self.subject.drawn)
        self._unwritten_draws = frozenset(drawn.intersection(recorded.uninitialised))
        return replace(
            recorded,
            unstable=tuple(name for name in recorded.unstable if name not in drawn),
            uninitialised=tuple(name for name in recorded.uninitialised if name not in drawn),
        )

    def _build_reference(self, record: str) -> ReferenceFacts:
        self.reference_world.start()
        return run_on(
            self.reference_world,
            on_ranks.reference.record_reference,
            self._recipe,
            tuple(self.subject.frozen),
            self.subject.kept_attributes,
            self._record_path(record),
        )[0]

    def _compare_with_reference(self) -> tuple[tuple[Comparison, ...], ...]:
        # The reference itself never writes these tensors, so none of their rows can be compared.
        rows = dict(self.subject.drawn_rows) | dict.fromkeys(self._unwritten_draws, (None, None))
        return tuple(run_on(self.world, on_ranks.values.observe_values, self._reference_path, None, rows))

    def _compare_with_verifier(self) -> tuple[tuple[Comparison, ...], ...] | Unavailable:
        names = frozen_sources(self.subject, self.seen.reference)
        if not names:
            return Unavailable(NOTHING_FROZEN, error="verifier" in self.subject.declared)
        if "verifier" not in self.subject.declared and self.seen.reference is None:
            reason = self.unavailable["reference"]
            return reason if reason.error else Unavailable(NO_VERIFIER, kind="undeclared")
        record = self._path_of("verifier", on_ranks.reference.record_verifier)
        missing = run_on(self.world, on_ranks.reference.missing_from_verifier, record, names)[0]
        # The reference has what it freezes, even if its record leaves out sparse and quantized tensors.
        if missing and ("verifier" in self.subject.declared or self.subject.frozen):
            return Unavailable(missing, error=True)
        return tuple(run_on(self.world, on_ranks.values.observe_values, record, names))

    def _describe_draws(self) -> tuple[RankDraws, ...] | Unavailable:
        if not self.subject.drawn:
            return not_declared("drawn")
        path = None if self.seen.reference is None else self._reference_path
        observe = on_ranks.drawn_weights.observe_draws
        declared = (self.subject.drawn, self._unwritten_draws, self.subject.drawn_rows)
        return tuple(run_on(self.world, observe, path, *declared))

    def _path_of(self, field: str, record: Callable[[Mapping[str, bytes], str], None]) -> str:
        """Return the path of the values of a model, by default the reference; ``record`` what a callable builds."""
        if field in self._checkpoints:
            return self._checkpoints[field]
        if field not in self.subject.declared:
            return self._reference_path
        path = self._record_path(field)
        with self.single_rank_world(f"the {field}") as world:
            run_on(world, record, self._recipe, path)
        return path

    def _train(self) -> tuple[RankTraining, ...] | Unavailable:
        if reason := no_training_declared(self.subject):
            return reason
        if reason := odd_model(self.inventory, self.subject, "not trained"):
            return reason
        if self.seen.reference is None or not self.seen.reference.complete:
            return tuple(run_on(self.world, on_ranks.training.observe_training, self.steps))
        reference = self._giving().as_loaded(self.seen.reference)
        self.see(reference=reference)  # also if the training fails
        runs = self._train_beside(reference)
        if self._departs(runs):
            facts, steering = self._giving().own_changes(reference, runs)
            if steering:
                self._watched_steps = run_on(self.world, on_ranks.step_collectives.observe_step)
                self.loads.begin_again()
                runs = self._train_beside(self._giving().as_loaded(replace(reference, **facts)))
            else:  # nothing to train otherwise for
                self.see(reference=replace(self.seen.reference, **facts))
        trained = self.seen.reference
        if not self._departs(runs):
            return runs
        train_again = on_ranks.reference_training.train_reference_again
        alone, folder = self.reference_world, self.folder
        losses = run_on(alone, train_again, self._recipe, self.steps, str(folder))[0]
        self.see(reference=replace(trained, losses_again=losses))
        return with_noise(runs, self.inventory[0], self.seen.reference, self.world, alone, self._recipe, folder)

    def _train_beside(self, reference: ReferenceFacts) -> tuple[RankTraining, ...]:
        """Train the reference, and then the ranks, which compare themselves with its records."""
        data_parallel_size, folder = self.loaded[0].data_parallel[1], str(self.folder)
        compiled = any(rank.compiled for rank in self.inventory)
        evaluating = tuple(dict.fromkeys(name for rank in self.inventory for name in rank.evaluating))
        given = self._recipe, self.steps, folder, data_parallel_size, reference, evaluating
        train, short = on_ranks.reference_training.train_reference, "train_step" in self.subject.declared
        reference = run_on(self.reference_world, train, *given, compiled, short=short)[0]
        self.see(reference=reference)
        observe_training = on_ranks.training.observe_training
        if reference.losses is None:
            return tuple(run_on(self.world, observe_training, self.steps))
        known = (reference.noise, reference.norm, reference.own_clipping, bool(reference.evaluated))
        return tuple(run_on(self.world, observe_training, self.steps, folder, *known))

    def _departs(self, runs: tuple[RankTraining, ...]) -> bool:
        reference = self.seen.reference
        assert reference is not None
        summed = self.subject.loss_over_ranks == "sum"
        return reference.losses is not None and departs(runs, reference, self.inventory[0], summed)

    def _giving(self) -> Giving:
        return Giving(self.seen, self.world, self.reference_world, self.folder, self._recipe, self.selection)

    def _trace(self) -> None:
        """Trace the first step that departs from the reference's, or step 0 on request."""
        reference = self.seen.reference
        if "traces" in self.unavailable or self.seen.training is None or reference is None or not reference.losses:
            return
        others: dict[str, Any] = {name: None for name in OBSERVATIONS if name not in JUDGED_TO_TRACE}
        unavailable = dict.fromkeys(others, NOT_WANTED) | self.unavailable
        evidence = replace(self.seen, **others, unavailable=unavailable)
        step = departing_step(evidence, self.selection)
        if step is None and not self.localise:
            return
        worlds = self.world, self.reference_world
        with self.stopwatch.timing("localising"):
            self.see(traces=trace_step(evidence, self._recipe, *worlds, self.folder, step or 0))
            if step == 0:
                self.see(training=compare_objective(evidence, self.world, self.folder))

    def _collect_collectives(self) -> tuple[RankCollectives, ...]:
        if self.seen.training is None:
            return tuple(
                RankCollectives(rank.collectives or (), unknown=rank.unknown_operators) for rank in self.loaded
            )
        steps = self._watched_steps or run_on(self.world, on_ranks.step_collectives.observe_step)
        recorded = [step or (None, None, ()) for step in steps]
        return tuple(
            RankCollectives(rank.collectives or (), step, groups, (*rank.unknown_operators, *unknown))
            for rank, (step, groups, unknown) in zip(self.loaded, recorded, strict=True)
        )

    @property
    def _recipe(self) -> Mapping[str, bytes]:
        return self.loaded[0].recipe

    @property
    def _checkpoints(self) -> Mapping[str, str]:
        return self.loaded[0].checkpoints

    def _record_path(self, name: str) -> str:
        return str(record_at(self.folder, name))

    @property
    def _reference_path(self) -> str:
        """The path of the reference's values: its checkpoint, or the record of the model that it built."""
        return self._checkpoints.get("reference", self._record_path("values"))


ONE_LOAD = (
    Observation("memory", ObservationRun._measure_memory),
    Observation("reference", ObservationRun._record_reference),
    Observation("values", ObservationRun._compare_with_reference, needs=("reference",)),
    Observation("verifier", ObservationRun._compare_with_verifier, uses=("reference",)),
    Observation("draws", ObservationRun._describe_draws, uses=("reference",)),
    Observation("training", ObservationRun._train, uses=("reference",)),
    Observation("collectives", ObservationRun._collect_collectives),
)
