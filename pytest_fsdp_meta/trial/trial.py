"""The conductor: one loader in one world, one reference, each observation taken once.

All that the selected checks need is observed in one go, while the loader's fixtures are alive; the judges read it
afterwards. What cannot be observed is noted with its reason, and costs only the checks that need it.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pytest_fsdp_meta.evidence import (
    Evidence,
    RankInventory,
    SubjectFacts,
    Unavailable,
    WorldFacts,
    frozen_sources,
    not_declared,
)
from pytest_fsdp_meta.evidence.collectives import Collective, RankCollectives, RankMemory
from pytest_fsdp_meta.loader.call import ASSUME, SKIPS, Call
from pytest_fsdp_meta.loader.subject import SubjectError
from pytest_fsdp_meta.observers.support.reference_record import record_at
from pytest_fsdp_meta.trial.reloading import NOT_ASKED, Reloading, odd_model, other_size, unavailable
from pytest_fsdp_meta.trial.timing import Stopwatch
from pytest_fsdp_meta.worlds import DEFAULT_MESH_DIM, Engine, Listener, World, WorldError, WorldSpec
from pytest_fsdp_meta.worlds.system import temp_folders

OBSERVERS = "pytest_fsdp_meta.observers"
"""Observers are called by name: they import torch, and the pytest process need not."""
ON_RANKS = (
    *(f"{OBSERVERS}.checkpoint", f"{OBSERVERS}.training", f"{OBSERVERS}.truth"),
    f"{OBSERVERS}.loading:warm_up",
)
"""What every rank needs imported, and done."""
NO_VERIFIER = "neither Subject(verifier=...) nor a reference is declared"
UNANIMOUS_OUTCOMES = (*SKIPS, ASSUME)
"""What a loader may raise on every rank; an expected failure is said by the marker."""


class LoaderFailed(Exception):
    """The loader gave no subject, so there is nothing to observe. ``summary`` is one line, ``str()`` the full story.

    ``vote`` is what every rank raised to leave the loader, one of ``VOTES``: a skip, an assumption of Hypothesis.
    ``reason`` is what it said.
    """

    def __init__(self, summary: str, story: str = "", vote: str = "", reason: str = "") -> None:
        self.summary = summary
        self.vote = vote
        self.reason = reason
        super().__init__(story or summary)


def world_facts(spec: WorldSpec) -> WorldFacts:
    """What is known of a world before it starts."""
    return WorldFacts(spec.size, tuple(spec.mesh.items()), spec.device_type, spec.backend)


def ranks_of(spec: WorldSpec, wanted: Collection[str]) -> int:
    """The size of the largest world of a trial; its worlds work one after the other."""
    other = other_size(spec) if "resharded" in wanted else spec
    return spec.size if isinstance(other, Unavailable) else max(spec.size, other.size)


class Trial:
    """One loader in one world. Afterwards ``outputs`` is what its ranks wrote, ``seconds`` where the time went."""

    def __init__(
        self,
        spec: WorldSpec,
        engine: Engine,
        steps: int,
        tolerance: Mapping[str, float],
        listener: Listener | None = None,
    ) -> None:
        self.spec = spec
        self.outputs: list[str] = []
        self._watch = Stopwatch()
        self.seconds = self._watch.seconds
        self._engine = engine
        self._steps = steps
        self._tolerance = tolerance
        self._listener = listener

    def observe(self, loader: Call, wanted: Collection[str]) -> Evidence:
        """Runs the loader on every rank and takes the observations that are wanted, each once.

        Raises LoaderFailed when the loader gives no subject on every rank.
        """
        try:
            temporary = TemporaryDirectory(prefix=temp_folders.prefix("trial"), ignore_cleanup_errors=True)
        except OSError as error:
            raise LoaderFailed(f"no temporary folder can be made: {error}; TMPDIR says where") from error
        with temporary as folder:
            world = World(self.spec, self._engine, shared=Path(folder), listener=self._listener)
            try:
                loaded = self._load(world, loader, sorted({"collectives", "memory"} & set(wanted)))
                return self._observe(world, loaded, loader, set(wanted), Path(folder))
            finally:
                world.close()
                self.outputs = world.outputs()

    def _load(self, world: World, loader: Call, watch: list[str]) -> list[Any]:
        """One ``observers.loading.Loaded`` per rank."""
        try:
            with self._watch.timing("starting"):
                world.start()
            with self._watch.timing("loading"):
                return _load(world, loader, watch)
        except WorldError as error:
            vote = error.unanimous if error.unanimous in UNANIMOUS_OUTCOMES else ""
            raise LoaderFailed(error.summary, str(error), vote, error.failures[0].message) from error

    def _observe(self, world: World, loaded: list[Any], loader: Call, wanted: set[str], folder: Path) -> Evidence:
        # Started when they are needed.
        alone = World(self._single, self._engine, label="the reference", listener=self._listener)
        verifying = World(self._single, self._engine, label="the verifier", listener=self._listener)
        session = ObservationRun(
            world=world,
            alone=alone,
            verifying=verifying,
            subject=loaded[0].subject,
            inventory=tuple(one.inventory for one in loaded),
            loading=tuple(one.collectives for one in loaded),
            memory=tuple(one.memory for one in loaded),
            recipe=loaded[0].recipe,
            checkpoints=loaded[0].checkpoints,
            slices=loaded[0].data_parallel[1],
            folder=folder,
            steps=self._steps,
            load_again=partial(self._load_again, loader),
            watch=self._watch,
        )
        try:
            session.take(wanted)
        finally:
            alone.close()
        if unknown := session.unknown_attribute():
            raise LoaderFailed(unknown)
        return Evidence(
            world=self._facts(loaded),
            subject=session.subject,
            inventory=session.inventory,
            **session.seen,
            unavailable=session.unavailable,
            tolerance=self._tolerance,
        )

    def _load_again(self, loader: Call, spec: WorldSpec, label: str, worlds: list[World]) -> tuple[World, list[Any]]:
        """Another world with what the loader gives there. The world is noted first: it is closed with the others."""
        world = World(spec, self._engine, label, listener=self._listener)
        worlds.append(world)
        world.start()
        return world, _load(world, loader)

    @property
    def _single(self) -> WorldSpec:
        devices = self.spec.devices[:1]
        return replace(self.spec, mesh={DEFAULT_MESH_DIM: 1}, devices=devices, process_group="plugin")

    def _facts(self, loaded: list[Any]) -> WorldFacts:
        return replace(world_facts(self.spec), devices=tuple(one.gpu for one in loaded), library=loaded[0].library)


@dataclass
class ObservationRun:
    """The observations of one trial while they are being taken: what was seen by name, and why the others were not.

    Each observer returns the field of ``Evidence`` that it is called after, or an ``Unavailable``.
    """

    world: World
    alone: World
    verifying: World
    subject: SubjectFacts
    inventory: tuple[RankInventory, ...]
    loading: tuple[tuple[Collective, ...] | None, ...]
    memory: tuple[RankMemory | None, ...]
    recipe: Mapping[str, bytes]
    checkpoints: Mapping[str, str]
    slices: int
    """Data-parallel ranks, which share the batch."""
    folder: Path
    steps: int
    load_again: Callable[[WorldSpec, str, list[World]], tuple[World, list[Any]]]
    watch: Stopwatch = field(default_factory=Stopwatch)
    seen: dict[str, Any] = field(default_factory=dict)
    unavailable: dict[str, Unavailable] = field(default_factory=dict)

    def take(self, wanted: set[str]) -> None:
        """Everything wanted beyond the inventory; the mutating observations come last."""
        if wanted & {"values", "verifier", "training", "export", "resharded"}:
            wanted = wanted | {"reference"}
        ended = NOT_ASKED
        observers: dict[str, Callable[[], Any]] = {
            "memory": self._memory,
            "reference": self._reference,
            "values": self._values,
            "verifier": self._verifier,
            "training": self._training,
        }
        for name, observe in observers.items():
            if name not in wanted:
                self.unavailable[name] = NOT_ASKED
                continue
            try:
                with self.watch.timing(name):
                    seen: Any = observe() if self.world.alive else ended
            except WorldError as error:
                seen = ended = unavailable(error)
            (self.unavailable if isinstance(seen, Unavailable) else self.seen)[name] = seen
        # What loading said stays known, whatever became of the training.
        kept = self.seen if "collectives" in wanted else self.unavailable
        kept["collectives"] = self._collectives() if "collectives" in wanted else NOT_ASKED
        self._reload(wanted)

    def _reload(self, wanted: set[str]) -> None:
        training = self.unavailable.get("training")
        again = Reloading(
            first=self.world,
            alone=self.alone,
            load=self.load_again,
            subject=self.subject,
            inventory=self.inventory,
            folder=self.folder,
            watch=self.watch,
            reference=self.seen.get("reference"),
            training=training if training is not None and training.error else None,
            record=self._truth,
        )
        again.take(wanted)
        self.seen |= again.seen
        self.unavailable |= again.unavailable

    def unknown_attribute(self) -> str:
        """What is wrong with a kept attribute that no tensor has: sharding may lose it, but the reference does not."""
        reference = self.seen.get("reference")
        if reference is None and "reference" in self.subject.declared and "reference" not in self.checkpoints:
            return ""  # not asked, or failed: only it could tell
        sources = (*self.inventory, reference.inventory) if reference else self.inventory
        there = {name for source in sources for tensor in source.tensors for name in tensor.attributes}
        unknown = [name for name in self.subject.kept_attributes if name not in there]
        if not unknown:
            return ""
        where = "the model or the reference" if reference and reference.complete else "the model"
        carried = sorted({name for source in sources for name in source.custom_attributes})
        near = difflib.get_close_matches(unknown[0], carried, n=1)
        hint = f"; the nearest is {near[0]!r}" if near else ""
        return str(SubjectError("kept_attributes", f"no tensor of {where} has {unknown[0]!r}{hint}"))

    def _reference(self) -> Any:
        if "reference" not in self.subject.declared:
            return not_declared("reference")
        if "reference" in self.checkpoints:
            return self._ask("checkpoint_facts", self.checkpoints["reference"])
        self.alone.start()
        arguments = tuple(self.subject.frozen), self.subject.kept_attributes, self._file("values")
        return self.alone.run(f"{OBSERVERS}.truth:record_reference", self.recipe, *arguments)[0]

    def _values(self) -> Any:
        return self._compared(self._truth) if "reference" in self.seen else self.unavailable["reference"]

    def _verifier(self) -> Any:
        names = frozen_sources(self.subject, self.seen.get("reference"))
        if not names:
            return Unavailable("nothing is frozen: neither Subject(frozen=...) nor the reference freezes anything")
        if "verifier" not in self.subject.declared and "reference" not in self.seen:
            why = self.unavailable["reference"]
            return why if why.error else Unavailable(NO_VERIFIER, kind="undeclared")
        source = self._truth
        if "verifier" in self.checkpoints:
            source = self.checkpoints["verifier"]
        elif "verifier" in self.subject.declared:
            source = self._file("verifier")
            with self.verifying:
                self.verifying.run(f"{OBSERVERS}.truth:record_verifier", self.recipe, source)
        missing = self._ask("missing_from_verifier", source, names)
        return Unavailable(missing, error=True) if missing else self._compared(source, names)

    def _training(self) -> Any:
        if "batch" not in self.subject.declared:
            return not_declared("batch")
        if why := odd_model(self.inventory):
            return Unavailable(f"not trained: {why}", kind="blocked")
        reference, truth = self.seen.get("reference"), tuple[Any, ...]()
        if reference is not None and reference.complete:
            arguments = self.recipe, self.steps, str(self.folder), self.slices, reference
            reference = self.alone.run(f"{OBSERVERS}.truth:train_reference", *arguments)[0]
            self.seen["reference"], truth = reference, (str(self.folder), reference.noise)
        return tuple(self.world.run(f"{OBSERVERS}.training:observe_training", self.steps, *truth))

    def _collectives(self) -> Any:
        steps = [None for _ in self.loading]
        if "training" in self.seen:
            with self.watch.timing("collectives"):
                steps = self.world.run(f"{OBSERVERS}.training:observe_step")
        return tuple(
            RankCollectives(loading or (), *(step or ())) for loading, step in zip(self.loading, steps, strict=True)
        )

    def _memory(self) -> Any:
        unknown = Unavailable("memory is only measured on Linux, which tells mapped files from memory")
        return unknown if None in self.memory else self.memory

    def _compared(self, source: str, names: Mapping[str, str] | None = None) -> tuple[Any, ...]:
        return tuple(self.world.run(f"{OBSERVERS}.values:observe_values", source, names))

    def _ask(self, question: str, *arguments: Any) -> Any:
        """What needs torch to read files; every rank gives the same answer."""
        return self.world.run(f"{OBSERVERS}.truth:{question}", *arguments)[0]

    def _file(self, name: str) -> str:
        return str(record_at(self.folder, name))

    @property
    def _truth(self) -> str:
        return self.checkpoints.get("reference", self._file("values"))


def _load(world: World, loader: Call, watch: Sequence[str] = ()) -> list[Any]:
    return world.call(f"{OBSERVERS}.loading:load", (loader, watch), unanimous_outcomes=UNANIMOUS_OUTCOMES)
