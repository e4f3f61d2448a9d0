"""The conductor: one loader in one world, one reference, each observation taken once.

All that the selected checks need is observed in one go, while the loader's fixtures are alive; the judges read it
afterwards. What cannot be observed is noted with its reason, and costs only the checks that need it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pytest_fsdp_meta.evidence import (
    Evidence,
    RankInventory,
    SubjectFacts,
    Unavailable,
    WorldFacts,
    frozen_sources,
)
from pytest_fsdp_meta.subject import SubjectError
from pytest_fsdp_meta.worlds import DEFAULT_MESH_DIM, Preload, World, WorldError, WorldSpec

OBSERVERS = "pytest_fsdp_meta.observers"
"""Observers are called by name: they import torch, and the pytest process need not."""
ON_RANKS = (f"{OBSERVERS}.training", f"{OBSERVERS}.truth")
"""What every rank needs imported."""
NOT_ASKED = Unavailable("no selected check asked for it")
SKIPPED = "builtins.Skipped"
"""``pytest.skip``, which hides its module."""


@dataclass(frozen=True)
class Loader:
    """A loader ready to be sent: the function and the values of its fixtures, each pickled by itself."""

    function: bytes
    arguments: Mapping[str, bytes] = field(default_factory=dict)
    wants_rank: str | None = None


class LoaderFailed(Exception):
    """The loader gave no subject, so there is nothing to observe. ``summary`` is one line, ``str()`` the full story.

    ``skipped`` is the reason when every rank called ``pytest.skip``.
    """

    def __init__(self, summary: str, story: str = "", skipped: str | None = None) -> None:
        self.summary = summary
        self.skipped = skipped
        super().__init__(story or summary)


class Trial:
    """One loader in one world. ``outputs`` is what its ranks wrote, once it is over."""

    def __init__(self, spec: WorldSpec, preload: Preload, steps: int, tolerance: Mapping[str, float]) -> None:
        self.spec = spec
        self.outputs: list[str] = []
        self._preload = preload
        self._steps = steps
        self._tolerance = tolerance

    def observe(self, loader: Loader, wanted: Collection[str]) -> Evidence:
        """Runs the loader on every rank and takes the observations that are wanted, each once.

        Raises LoaderFailed when the loader gives no subject on every rank.
        """
        world = World(self.spec, self._preload)
        try:
            loaded = self._load(world, loader)
            return self._observe(world, loaded, set(wanted))
        finally:
            world.close()
            self.outputs = world.outputs()

    def _load(self, world: World, loader: Loader) -> list[Any]:
        """One ``observers.loading.Loaded`` per rank."""
        try:
            world.start()
            return world.run(f"{OBSERVERS}.loading:load", loader.function, dict(loader.arguments), loader.wants_rank)
        except WorldError as error:
            agreed = len(error.failures) == self.spec.size and {f.exception for f in error.failures} == {SKIPPED}
            skipped = error.failures[0].message if agreed else None
            raise LoaderFailed(error.summary, str(error), skipped) from error

    def _observe(self, world: World, loaded: list[Any], wanted: set[str]) -> Evidence:
        alone = World(self._single, self._preload, label="the reference")  # started when it is needed
        session = _Session(
            world=world,
            alone=alone,
            verifying=World(self._single, self._preload, label="the verifier"),
            subject=loaded[0].subject,
            inventory=tuple(one.inventory for one in loaded),
            recipe=loaded[0].recipe,
            checkpoints=loaded[0].checkpoints,
            slices=loaded[0].data_parallel[1],
            folder=world.folder,
            steps=self._steps,
        )
        try:
            session.take(wanted)
        finally:
            alone.close()
        if unknown := session.unknown_attribute():
            raise LoaderFailed(unknown)
        return Evidence(
            world=self.facts,
            subject=session.subject,
            inventory=session.inventory,
            **session.seen,
            unavailable=session.unavailable,
            tolerance=self._tolerance,
        )

    @property
    def _single(self) -> WorldSpec:
        devices = self.spec.devices[:1]
        return replace(self.spec, mesh={DEFAULT_MESH_DIM: 1}, devices=devices, process_group="plugin")

    @property
    def facts(self) -> WorldFacts:
        return WorldFacts(self.spec.size, tuple(self.spec.mesh.items()), self.spec.device_type, self.spec.backend)


@dataclass
class _Session:
    """The observations of one trial while they are being taken: what was seen by name, and why the others were not.

    Each observer returns the field of ``Evidence`` that it is called after, or an ``Unavailable``.
    """

    world: World
    alone: World
    verifying: World
    subject: SubjectFacts
    inventory: tuple[RankInventory, ...]
    recipe: Mapping[str, bytes]
    checkpoints: Mapping[str, str]
    slices: int
    """Data-parallel ranks, which share the batch."""
    folder: Path
    steps: int
    seen: dict[str, Any] = field(default_factory=dict)
    unavailable: dict[str, Unavailable] = field(default_factory=dict)

    def take(self, wanted: set[str]) -> None:
        """Everything wanted beyond the inventory; the mutating observation comes last."""
        if wanted & {"values", "verifier", "training"}:
            wanted = wanted | {"reference"}
        ended = NOT_ASKED
        observers: dict[str, Callable[[], Any]] = {
            "reference": self._reference,
            "values": self._values,
            "verifier": self._verifier,
            "training": self._training,
        }
        for name, observe in observers.items():
            try:
                seen: Any = NOT_ASKED if name not in wanted else observe() if self.world.alive else ended
            except WorldError as error:
                seen = ended = Unavailable(error.summary, error=True, detail=_story(error))
            (self.unavailable if isinstance(seen, Unavailable) else self.seen)[name] = seen

    def unknown_attribute(self) -> str:
        """What is wrong with a kept attribute that no tensor has: sharding may lose it, but the reference does not."""
        reference = self.seen.get("reference")
        if reference is None and "reference" in self.subject.declared and "reference" not in self.checkpoints:
            return ""  # not asked, or failed: only it could tell
        sources = (*self.inventory, reference.inventory) if reference else self.inventory
        there = {name for source in sources for tensor in source.tensors for name in tensor.attributes}
        unknown = [name for name in self.subject.kept_attributes if name not in there]
        where = "the model or the reference" if reference and reference.complete else "the model"
        return str(SubjectError("kept_attributes", f"no tensor of {where} has {unknown[0]!r}")) if unknown else ""

    def _reference(self) -> Any:
        if "reference" not in self.subject.declared:
            return Unavailable("Subject(reference=...) is not declared")
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
            return why if why.error else Unavailable("neither Subject(verifier=...) nor a reference is declared")
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
            return Unavailable("Subject(batch=...) is not declared")
        if why := self._untrainable():
            return Unavailable(f"not trained: {why}")
        reference, truth = self.seen.get("reference"), tuple[Any, ...]()
        if reference is not None and reference.complete:
            arguments = self.recipe, self.steps, str(self.folder), self.slices, reference
            reference = self.alone.run(f"{OBSERVERS}.truth:train_reference", *arguments)[0]
            self.seen["reference"], truth = reference, (str(self.folder), reference.noise)
        return tuple(self.world.run(f"{OBSERVERS}.training:observe_training", self.steps, *truth))

    def _untrainable(self) -> str:
        """Why a step would fail or hang for a reason that the inventory already shows; empty when it would not."""
        meta = [t.name for rank in self.inventory for t in rank.tensors if t.on_meta]
        if meta:
            return f"{meta[0]} is on meta"
        manifests = {
            tuple((t.name, t.shape, t.dtype, t.requires_grad) for t in rank.tensors) for rank in self.inventory
        }
        return "the ranks hold different tensors, so their collectives would not pair up" if len(manifests) > 1 else ""

    def _compared(self, source: str, names: Mapping[str, str] | None = None) -> tuple[Any, ...]:
        return tuple(self.world.run(f"{OBSERVERS}.values:observe_values", source, names))

    def _ask(self, question: str, *arguments: Any) -> Any:
        """What needs torch to read files; every rank gives the same answer."""
        return self.world.run(f"{OBSERVERS}.truth:{question}", *arguments)[0]

    def _file(self, name: str) -> str:
        return str(self.folder / f"{name}.safetensors")

    @property
    def _truth(self) -> str:
        return self.checkpoints.get("reference", self._file("values"))


def _story(error: WorldError) -> str:
    """The error with what a world of one wrote; the output of the loader's ranks is shown with the item."""
    written = error.outputs[0].strip() if error.label and error.outputs else ""
    return f"{error}\n\noutput of {error.label}:\n{written}" if written else str(error)
