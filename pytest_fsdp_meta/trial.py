"""The conductor: one loader in one world, one reference, each observation taken once.

All that the selected checks need is observed in one go, while the loader's fixtures are alive; the judges read it
afterwards. What cannot be observed is noted with its reason, and costs only the checks that need it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from pytest_fsdp_meta.evidence import (
    Comparison,
    Evidence,
    RankInventory,
    RankTraining,
    ReferenceFacts,
    SubjectFacts,
    Unavailable,
    WorldFacts,
)
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

    def __init__(self, error: WorldError, size: int) -> None:
        self.summary = error.summary
        agreed = len(error.failures) == size and all(failure.exception == SKIPPED for failure in error.failures)
        self.skipped = error.failures[0].message if agreed else None
        super().__init__(str(error))


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
            with tempfile.TemporaryDirectory(prefix="fsdp-record-") as folder:
                return self._observe(world, loader, wanted, Path(folder))
        finally:
            world.close()
            self.outputs = world.outputs()

    def _observe(self, world: World, loader: Loader, wanted: Collection[str], folder: Path) -> Evidence:
        try:
            world.start()
            loaded = world.run(f"{OBSERVERS}.loading:load", loader.function, dict(loader.arguments), loader.wants_rank)
        except WorldError as error:
            raise LoaderFailed(error, self.spec.size) from error
        session = _Observing(
            world=world,
            subject=loaded[0].subject,
            inventory=tuple(one.inventory for one in loaded),
            recipe=loaded[0].recipe,
            checkpoints=loaded[0].checkpoints,
            folder=folder,
            steps=self._steps,
        )
        single = replace(self.spec, mesh={DEFAULT_MESH_DIM: 1}, devices=self.spec.devices[:1], process_group="plugin")
        alone = World(single, self._preload, label="the reference")  # started by the first observation that needs it
        try:
            session.take(alone, set(wanted))
        finally:
            alone.close()
        return Evidence(
            world=self.facts,
            subject=session.subject,
            inventory=session.inventory,
            reference=session.reference,
            values=session.values,
            verifier=session.verifier,
            training=session.training,
            unavailable=session.unavailable,
            tolerance=self._tolerance,
        )

    @property
    def facts(self) -> WorldFacts:
        return WorldFacts(self.spec.size, tuple(self.spec.mesh.items()), self.spec.device_type, self.spec.backend)


@dataclass
class _Observing:
    """The observations of one trial while they are being taken."""

    world: World
    subject: SubjectFacts
    inventory: tuple[RankInventory, ...]
    recipe: Mapping[str, bytes]
    checkpoints: Mapping[str, str]
    folder: Path
    steps: int
    reference: ReferenceFacts | None = None
    values: tuple[tuple[Comparison, ...], ...] | None = None
    verifier: tuple[tuple[Comparison, ...], ...] | None = None
    training: tuple[RankTraining, ...] | None = None
    unavailable: dict[str, Unavailable] = field(default_factory=dict)

    def take(self, alone: World, wanted: set[str]) -> None:
        """Everything wanted beyond the inventory, the mutating observation last; ``alone`` is the reference's world."""
        if wanted & {"values", "verifier", "training"}:
            wanted = wanted | {"reference"}
        ended: Unavailable | None = None
        for name, observe in (
            ("reference", self._take_reference),
            ("values", self._take_values),
            ("verifier", self._take_verifier),
            ("training", self._take_training),
        ):
            if name not in wanted:
                self.unavailable[name] = NOT_ASKED
                continue
            try:
                why = observe(alone) if self.world.alive else ended
            except WorldError as error:
                why = ended = Unavailable(error.summary, error=True, detail=str(error))
            if why is not None:
                self.unavailable[name] = why

    def _take_reference(self, alone: World) -> Unavailable | None:
        if "reference" not in self.subject.declared:
            return Unavailable("Subject(reference=...) is not declared")
        if "reference" in self.checkpoints:
            self.reference = self.world.run(f"{OBSERVERS}.truth:checkpoint_facts", self.checkpoints["reference"])[0]
            return None
        alone.start()
        self.reference = alone.run(
            f"{OBSERVERS}.truth:record_reference",
            self.recipe,
            tuple(self.subject.frozen),
            self.subject.kept_attributes,
            str(self.folder),
        )[0]
        return None

    def _take_values(self, alone: World) -> Unavailable | None:
        if self.reference is None:
            return self.unavailable["reference"]
        self.values = tuple(self.world.run(f"{OBSERVERS}.values:observe_values", self._truth))
        return None

    def _take_verifier(self, alone: World) -> Unavailable | None:
        names = self._frozen()
        if not names:
            return Unavailable("nothing is frozen: neither Subject(frozen=...) nor the reference freezes anything")
        if "verifier" in self.subject.declared:
            source = self._record_verifier(alone, names)
        elif self.reference is None:
            why = self.unavailable["reference"]
            return why if why.error else Unavailable("neither Subject(verifier=...) nor a reference is declared")
        else:
            source = self._truth
            self.world.run(f"{OBSERVERS}.truth:check_checkpoint_names", source, names)
        self.verifier = tuple(self.world.run(f"{OBSERVERS}.values:observe_values", source, names))
        return None

    def _record_verifier(self, alone: World, names: Mapping[str, str]) -> str:
        if "verifier" in self.checkpoints:
            self.world.run(f"{OBSERVERS}.truth:check_checkpoint_names", self.checkpoints["verifier"], names)
            return self.checkpoints["verifier"]
        if not alone.alive:
            alone.start()
        alone.label = "the verifier"
        alone.run(f"{OBSERVERS}.truth:record_verifier", self.recipe, names, str(self.folder))
        return str(self.folder / "verifier.safetensors")

    def _frozen(self) -> dict[str, str]:
        """Declared frozen names, else those that the reference freezes."""
        if self.subject.frozen or self.reference is None or not self.reference.complete:
            return dict(self.subject.frozen)
        ours = self.inventory[0].by_name
        frozen = (t.name for t in self.reference.inventory.tensors if t.kind == "parameter" and not t.requires_grad)
        return {name: name for name in frozen if name in ours}

    def _take_training(self, alone: World) -> Unavailable | None:
        if self.reference is None:
            return self.unavailable["reference"]
        if not self.reference.complete:
            return Unavailable("a checkpoint directory cannot be trained; declare Subject(reference=<callable>)")
        if "batch" not in self.subject.declared:
            return Unavailable("Subject(batch=...) is not declared")
        if why := self._untrainable():
            return Unavailable(f"not trained: {why}")
        alone.label = "the reference"
        losses, again, batches = alone.run(f"{OBSERVERS}.truth:train_reference", self.steps, str(self.folder))[0]
        self.reference = replace(self.reference, losses=losses, losses_again=again, batches=batches)
        gradients, updated = (str(self.folder / f"{name}.safetensors") for name in ("gradients", "updated"))
        self.training = tuple(self.world.run(f"{OBSERVERS}.training:observe_training", self.steps, gradients, updated))
        return None

    def _untrainable(self) -> str:
        """Why a step would fail or hang for a reason that the inventory already shows; empty when it would not."""
        meta = [t.name for rank in self.inventory for t in rank.tensors if t.on_meta]
        if meta:
            return f"{meta[0]} is on meta"
        manifests = {
            tuple((t.name, t.shape, t.dtype, t.requires_grad) for t in rank.tensors) for rank in self.inventory
        }
        return "the ranks hold different tensors, so their collectives would not pair up" if len(manifests) > 1 else ""

    @property
    def _truth(self) -> str:
        return self.checkpoints.get("reference", str(self.folder / "values.safetensors"))
