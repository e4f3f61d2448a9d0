"""What is seen by loading again: a second load, and checkpoints that are saved in one load and read in another.

The loader's own world is asked last of all it is asked, after its training; whatever goes wrong here costs nothing
that was seen before. Then it lets go of its model, so that no two loads of one size are held at a time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pytest_fsdp_meta.evidence import (
    RankInventory,
    ReferenceFacts,
    Resharded,
    SubjectFacts,
    TensorFacts,
    Unavailable,
    not_declared,
    replicates,
    sharded_dim,
    splits_model,
)
from pytest_fsdp_meta.evidence.checkpoint import FirstStep, RankResumed, RankSaved
from pytest_fsdp_meta.trial.timing import Stopwatch
from pytest_fsdp_meta.worlds import World, WorldError, WorldSpec

OBSERVER = "pytest_fsdp_meta.observers.checkpoint"
NOT_ASKED = Unavailable("no selected check asked for it", kind="unselected")
STEPS = 2
"""Trained after a checkpoint: the second shows what the first did to the optimizer."""
AGAIN = "the loader gave a model once, and fails when it runs again in a fresh world with the same fixtures"
UNSAVED = "saving gave no answer, and is not tried again"
DECLARE = "declare Subject(save=..., resume=...)"
NO_MODEL = "a checkpoint directory is no model to load into; declare Subject(reference=<callable>)"


@dataclass
class Reloading:
    """The observations of one trial that take more than one load. ``load`` starts a world and runs the loader there."""

    first: World
    alone: World
    load: Callable[[WorldSpec, str, list[World]], tuple[World, list[Any]]]
    subject: SubjectFacts
    inventory: tuple[RankInventory, ...]
    folder: Path
    watch: Stopwatch = field(default_factory=Stopwatch)
    reference: ReferenceFacts | None = None
    training: Unavailable | None = None
    """Why it was not trained, where that went wrong."""
    record: str = ""
    """Where the truth is recorded."""
    wanted: set[str] = field(default_factory=set)
    seen: dict[str, Any] = field(default_factory=dict)
    unavailable: dict[str, Unavailable] = field(default_factory=dict)
    worlds: list[World] = field(default_factory=list)
    _whole: tuple[RankResumed, ...] = ()
    """Model and optimizer when they were saved together, and when that was loaded."""
    _whole_again: tuple[RankResumed, ...] = ()
    _second: tuple[World, list[Any]] | None = None
    _failure: WorldError | None = None
    _save_failure: WorldError | None = None
    """How saving ended a world without a word: it took all the time that there is, and would do so again."""
    _released: bool = False

    def take(self, wanted: set[str]) -> None:
        """Everything wanted of it, in an order in which each finds its world as it needs it."""
        for name, others in NEEDS.items():
            wanted = wanted | set(others) if name in wanted else wanted
        self.wanted = wanted
        observers: Mapping[str, Callable[[], Any]] = {
            "state_dict": self._state_dict,
            "continued": self._continued,
            "saved": self._saved,
            "repetition": self._repetition,
            "export": self._export,
            "kept": self._kept,
            "resumed": self._resumed,
            "restored": self._restored,
            "resharded": self._resharded,
        }
        try:
            for name, observe in observers.items():
                self._take(name, observe)
        finally:
            for world in self.worlds:
                world.close()
        for results in (self.seen, self.unavailable):
            results.pop("kept", None)

    def _take(self, name: str, observe: Callable[[], Any]) -> None:
        if name not in self.wanted:
            self.unavailable[name] = NOT_ASKED
            return
        try:
            with self.watch.timing(name):
                seen: Any = observe()
        except WorldError as error:
            seen = unavailable(error)
            if error is self._failure:
                seen = replace(seen, detail=f"{AGAIN}:\n\n{seen.detail}")
            elif error is self._save_failure:
                seen = replace(seen, detail=f"{UNSAVED}:\n\n{seen.detail}")
        (self.unavailable if isinstance(seen, Unavailable) else self.seen)[name] = seen

    def _state_dict(self) -> Any:
        return tuple(self._run_first("observe_state_dict"))

    def _continued(self) -> Any:
        if "batch" not in self.subject.declared:
            return not_declared("batch")
        if self.training is not None:
            return self.training
        if why := self._unsavable() or self._nothing_trainable():
            return why
        unloadable = _unloadable(self._run_first("first_step"))
        if unloadable and not self._saves_itself:
            return Unavailable(f"{unloadable}; {DECLARE}", kind="undeclared")
        self._whole = self._saving(self._first_world, "save_all", self._at("continued"))
        return self._gone_on(self._whole, self._run_first)

    def _saved(self) -> Any:
        """One checkpoint does for both, where there is one of model and optimizer."""
        if self._whole:
            return _models(self._whole)
        return self._unsavable() or self._saving(self._first_world, "save_model", self._at("saved"))

    def _repetition(self) -> Any:
        return tuple(one.inventory for one in self._load_second()[1])

    def _export(self) -> Any:
        if self.reference is None or not self.reference.complete:
            return Unavailable(NO_MODEL, kind="undeclared")
        if not self.alone.alive:
            return Unavailable("the reference has ended")
        why = self._unsavable(by_torch=True) or self._ungatherable()
        if why is not None:
            return why
        path = self._at("export.safetensors")
        keys = self._run_second("export", path)[0]
        return self.alone.run(f"{OBSERVER}:compare_export", path, self.record, keys)[0]

    def _kept(self) -> Any:
        """A checkpoint of the model as it was loaded, while the second load is as it was loaded."""
        return self._unsavable() or self._saving(self._second_world, "save_model", self._at("kept"))

    def _resumed(self) -> Any:
        if (why := self._after("continued")) is not None:
            return why
        self._whole_again = tuple(self._run_second("load_all", self._at("continued")))
        return self._gone_on(self._whole_again, self._run_second)

    def _restored(self) -> Any:
        if (why := self._after("saved")) is not None:
            return why
        if self._whole_again:
            return _models(self._whole_again)
        return tuple(self._run_second("load_model", self._at("continued" if self._whole else "saved")))

    def _gone_on(self, held: tuple[RankResumed, ...], run: Callable[..., list[Any]]) -> tuple[RankResumed, ...]:
        return tuple(replace(one, losses=losses) for one, losses in zip(held, run("go_on", STEPS), strict=True))

    def _resharded(self) -> Any:
        if (why := self._after("kept")) is not None:
            return why
        if self.reference is None:
            return not_declared("reference")
        spec = other_size(self.first.spec)
        if isinstance(spec, Unavailable):
            return spec
        shown = f"a world of {spec.size} ({', '.join(f'{name}={size}' for name, size in spec.mesh.items())})"
        self._end_second()
        try:
            world, _ = self.load(spec, f"the load in {shown}", self.worlds)
        except WorldError as error:
            return Unavailable(f"the loader gives no model in {shown}: {error.summary}")
        mesh = tuple(spec.mesh.items())
        try:
            world.run(f"{OBSERVER}:load_over", self._at("kept"))
        except WorldError as error:
            if not _refuses(error) or not self._loads_here():
                raise
            first = error.failures[0]
            ranks = sorted(one.rank for one in error.failures if (one.kind, one.summary) == (first.kind, first.summary))
            return Resharded(mesh, refused=first.summary.removeprefix("raised "), ranks=tuple(ranks))
        return Resharded(mesh, tuple(world.run(f"{OBSERVER}:compare_loaded", self.record)))

    def _loads_here(self) -> bool:
        """Whether the very checkpoint is loaded in a world of the size that saved it."""
        try:
            self._run_second("load_over", self._at("kept"))
        except WorldError:
            return False
        return True

    def _after(self, name: str) -> Unavailable | None:
        return self.unavailable.get(name)

    def _saving(self, world: Callable[[], World], observer: str, *arguments: Any) -> tuple[Any, ...]:
        """Saves, unless that has hung or ended a rank before; an error that it raised may be another next time."""
        if self._save_failure is not None:
            raise self._save_failure
        there = world()  # outside of it: a loader that hangs is not taken for a save() that does
        try:
            return tuple(there.run(f"{OBSERVER}:{observer}", *arguments))
        except WorldError as error:
            # What was saved once can be, and the last of the checkpoints is not tried again in any case.
            if error.failures[0].kind in ("hung", "exited", "killed") and "saved" not in self.seen:
                self._save_failure = error
            raise

    def _first_world(self) -> World:
        """The loader's own world; where training has ended that, another load."""
        if not self.first.alive:
            self.first, _ = self.load(self.first.spec, "another load", self.worlds)
        return self.first

    def _second_world(self) -> World:
        return self._load_second()[0]

    def _run_first(self, observer: str, *arguments: Any) -> list[Any]:
        return self._first_world().run(f"{OBSERVER}:{observer}", *arguments)

    def _run_second(self, observer: str, *arguments: Any) -> list[Any]:
        return self._second_world().run(f"{OBSERVER}:{observer}", *arguments)

    def _load_second(self) -> tuple[World, list[Any]]:
        """The second load; anew where an observation has ended it, but a load that failed is not tried again."""
        if self._failure is not None:
            raise self._failure
        if self._second is None or not self._second[0].alive:
            self._release_first()
            try:
                self._second = self.load(self.first.spec, "the second load", self.worlds)
            except WorldError as error:
                self._failure = error
                raise
        return self._second

    def _release_first(self) -> None:
        if self.first.alive and not self._released:
            self._released = True
            self.first.run("pytest_fsdp_meta.observers.loading:release")

    def _end_second(self) -> None:
        if self._second is not None:
            self._second[0].close()

    def _unsavable(self, by_torch: bool = False) -> Unavailable | None:
        """Why saving would fail or hang, for a reason that is seen already; an author's own way is tried."""
        if why := odd_model(self.inventory):
            return Unavailable(f"not saved: {why}", kind="blocked")
        if self._saves_itself and not by_torch:
            return None
        tensors = [t for rank in self.inventory for t in rank.tensors if t.persistent]
        if odd := [t.name for t in tensors if t.unreadable or _sharded_otherwise(t)]:
            unfit = f"{odd[0]} is no DTensor and no whole plain tensor, which is all that torch"
            if by_torch:
                return Unavailable(f"{unfit} gathers")
            return Unavailable(f"{unfit}.distributed.checkpoint saves; {DECLARE}", kind="undeclared")
        refused = [rank.refused for rank in self.seen.get("state_dict", ()) if rank.refused]
        if not refused:
            return None
        why = f"torch's get_model_state_dict refuses the model ({refused[0]}); {DECLARE}"
        return Unavailable(why, kind="undeclared")

    @property
    def _saves_itself(self) -> bool:
        return "save" in self.subject.declared

    def _nothing_trainable(self) -> Unavailable | None:
        trainable = any(t.requires_grad for t in self.inventory[0].tensors)
        return None if trainable else Unavailable("nothing is trainable, so there is no optimizer")

    def _ungatherable(self) -> Unavailable | None:
        """gloo hangs when it gathers along another dim than 0 and a rank holds nothing (torch 2.13)."""
        if self.first.spec.backend != "gloo":
            return None
        for rank in self.inventory:
            for tensor in rank.tensors:
                if not tensor.numel and any(sharded_dim(placement) for placement in tensor.placements or ()):
                    return Unavailable(
                        f"{tensor.name} is sharded on another dim than 0 and rank {rank.rank} holds nothing of it, "
                        "which gloo cannot gather"
                    )
        return None

    def _at(self, name: str) -> str:
        return str(self.folder / name)


NEEDS = {
    "restored": ("saved",),
    "resumed": ("continued",),
    "resharded": ("kept",),
    "saved": ("state_dict",),
    "continued": ("state_dict",),
    "kept": ("state_dict",),
    "export": ("state_dict",),
}
"""What is taken with it; in an order in which what is added is looked at later."""


def odd_model(inventory: tuple[RankInventory, ...]) -> str:
    """Why ranks cannot work on the model together, for a reason that the inventory shows; empty where they can."""
    meta = [t.name for rank in inventory for t in rank.tensors if t.on_meta]
    if meta:
        return f"{meta[0]} is on meta"
    manifests = {tuple((t.name, t.shape, t.dtype, t.requires_grad) for t in rank.tensors) for rank in inventory}
    return "the ranks hold different tensors, so their collectives would not pair up" if len(manifests) > 1 else ""


NOT_THE_CHECKPOINT = re.compile(r"(OutOfMemoryError|MemoryError|DistBackendError|DistNetworkError|\.Skipped)$")
"""What raises in a world of another size for the sake of its machine or its network, or because it was told to skip."""


def _refuses(error: WorldError) -> bool:
    """Whether a rank raised first, and what it raised may be about the checkpoint."""
    first = error.failures[0]
    return (
        first.kind == "raised"
        and not first.user
        and not first.lost_peer
        and not NOT_THE_CHECKPOINT.search(first.exception)
        and "out of memory" not in first.message
    )


def _unloadable(ranks: Sequence[FirstStep]) -> str:
    """Why torch.distributed.checkpoint cannot load the optimizer's state; empty where it can."""
    if refused := next((one.unloadable for one in ranks if one.unloadable), ""):
        return refused
    for rank, one in enumerate(ranks):
        if one.stateless != ranks[0].stateless:
            name = min(set(one.stateless) ^ set(ranks[0].stateless))
            has, has_not = (0, rank) if name in one.stateless else (rank, 0)
            return (
                f"{name} got a gradient on rank {has} and none on rank {has_not}, so the optimizer keeps a state of it "
                "on one only, and torch.distributed.checkpoint loads it on all"
            )
    return ""


def other_size(spec: WorldSpec) -> WorldSpec | Unavailable:
    """A world with half the ranks along one dimension: the largest that shards data, else any; of one rank, two."""
    sharding = {dim: size for dim, size in spec.mesh.items() if not splits_model(dim) and not replicates(dim)}
    dim = next((max(sizes, key=lambda one: sizes[one]) for sizes in (sharding, spec.mesh) if _most(sizes) > 1), None)
    if dim is not None:
        mesh = {**spec.mesh, dim: spec.mesh[dim] // 2}
    elif spec.backend == "nccl":
        return Unavailable("a world of 2 takes another GPU than that of this world of 1")
    else:
        mesh = {**spec.mesh, next(iter(sharding or spec.mesh)): 2}
    smaller = replace(spec, mesh=mesh)
    devices = spec.devices[: smaller.size] if smaller.size <= len(spec.devices) else spec.devices * smaller.size
    return replace(smaller, devices=devices)


def unavailable(error: WorldError) -> Unavailable:
    """The error with what its world wrote; the output of the loader's own ranks is shown with the item."""
    written = [(rank, text.strip()) for rank, text in enumerate(error.outputs) if text.strip()] if error.label else []
    who = {rank: error.label if len(error.outputs) == 1 else f"rank {rank} of {error.label}" for rank, _ in written}
    story = "\n\n".join([str(error), *(f"output of {who[rank]}:\n{text}" for rank, text in written)])
    return Unavailable(error.summary, error=True, detail=story)


def _models(runs: tuple[RankResumed, ...]) -> tuple[RankSaved, ...]:
    return tuple(run.model for run in runs)


def _most(sizes: Mapping[str, int]) -> int:
    return max(sizes.values(), default=0)


def _sharded_otherwise(tensor: TensorFacts) -> bool:
    return bool(tensor.sharded_by) or (tensor.placements is None and not tensor.whole)
