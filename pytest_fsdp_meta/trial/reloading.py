"""Take the observations that need more than one load: a second load, and checkpoints that another load reads.

The loader's own world takes part after its training, so whatever goes wrong here cannot affect earlier observations.
Each world ends with its last observation: the ranks never hold two loads of one size.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import ParamSpec, TypeVar

from pytest_fsdp_meta.checks.checkpoint.facts import RankResumed, RankSaved, RankStateDict
from pytest_fsdp_meta.checks.random_numbers.facts import RankTrainingMode
from pytest_fsdp_meta.evidence import (
    Comparison,
    Epoch,
    Export,
    RankBatches,
    RankInventory,
    ReferenceFacts,
    Resharded,
    SubjectFacts,
    Unavailable,
    not_declared,
)
from pytest_fsdp_meta.trial.author_data import read_epoch, resume_epoch
from pytest_fsdp_meta.trial.checkpoint_files import restored_if_deleted
from pytest_fsdp_meta.trial.loads import Loads
from pytest_fsdp_meta.trial.obstacles import (
    DECLARE,
    NOT_WANTED,
    describe_odd_model,
    exported_in_parts,
    from_world_error,
    no_training_declared,
    not_gathered_by_gloo,
    not_saved_by_torch,
    optimizer_not_loaded_by_torch,
)
from pytest_fsdp_meta.trial.on_ranks import checkpoint, export, random_numbers, run_on, state_dict
from pytest_fsdp_meta.trial.resharding import Recorded, record_saved, reshard_all, reshard_model
from pytest_fsdp_meta.trial.timing import Stopwatch
from pytest_fsdp_meta.trial.world_sizes import describe_size, other_size
from pytest_fsdp_meta.worlds import World, WorldError

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
STEPS = 2
"""Steps after a checkpoint: the loss of the second one shows what the first, and its optimizer's state, did."""
SCHEDULED_STEPS = 4
"""The same with a scheduler, which two steps do not show: of a schedule that is one step off, they see one rate."""
SECOND_LOAD_FAILED = "the loader succeeded once, and failed when it ran again in a fresh world with the same fixtures"
SAVE_NOT_RETRIED = "saving hung or ended a rank, and is not tried again"
NO_MODEL = "a checkpoint directory is not a model to load into; declare Subject(reference=<callable>)"
NEEDS = {
    "batches_resumed": ("batches",),
    "restored_again": ("saved_again",),
    "saved_again": ("continued",),
    "restored": ("saved",),
    "resumed": ("continued",),
    "resharded": ("kept",),
    "saved": ("state_dict",),
    "continued": ("state_dict",),
    "kept": ("state_dict",),
    "export": ("state_dict",),
}
"""The observations that each needs, in an order in which what an entry adds is looked up later."""


@dataclass
class Reloading:
    """The observations of one trial that need more than one load.

    Each observation has the same name here and in ``Evidence``. If one is None, ``unavailable`` has the reason.
    """

    loads: Loads
    reference_world: World
    data_world: World
    rebuild_reference: Callable[[], object]
    """Start the world of the reference again, and build the reference in it."""
    subject: SubjectFacts
    inventory: tuple[RankInventory, ...]
    folder: Path
    stopwatch: Stopwatch
    reference: ReferenceFacts | None
    training_error: Unavailable | None
    """The error that training raised, if any."""
    reference_path: str
    """The path of the reference's values."""
    steps: int
    """The steps of training, for which the author has batches."""
    state_dict: tuple[RankStateDict, ...] | None = None
    saved: tuple[RankSaved, ...] | None = None
    restored: tuple[RankSaved, ...] | None = None
    continued: tuple[RankResumed, ...] | None = None
    resumed: tuple[RankResumed, ...] | None = None
    saved_again: tuple[RankResumed, ...] | None = None
    restored_again: tuple[RankResumed, ...] | None = None
    repetition: tuple[RankInventory, ...] | None = None
    export: Export | None = None
    resharded: Resharded | None = None
    training_mode: tuple[RankTrainingMode, ...] | None = None
    batches: Epoch | None = None
    batches_resumed: tuple[RankBatches, ...] | None = None
    unavailable: dict[str, Unavailable] = field(default_factory=dict)
    _wanted: set[str] = field(default_factory=set)
    _saved_with_optimizer: tuple[RankResumed, ...] = ()
    _loaded_with_optimizer: tuple[RankResumed, ...] = ()
    _recorded: Recorded = field(default_factory=Recorded)
    """What each rank has recorded of what it saved with its optimizer."""
    _save_failure: WorldError | None = None
    """How saving hung or ended a rank; another attempt would cost the same time."""

    def take_all(self, wanted: set[str]) -> None:
        """Take the wanted observations in an order in which each finds its world in the state that it needs."""
        for name, needed in NEEDS.items():
            wanted = wanted | set(needed) if name in wanted else wanted
        self._wanted = wanted
        try:
            self.state_dict = self._take("state_dict", self._observe_state_dict)
            self.continued = self._take("continued", self._save_and_continue)
            self.saved_again = self._take("saved_again", self._save_again)
            self.saved = self._take("saved", self._save_model)
            self.batches = self._take("batches", self._read_batches)
            self.training_mode = self._take("training_mode", self._observe_training_mode)
            self.repetition = self._take("repetition", self._repeat_load)
            self.export = self._take("export", self._export)
            self.reference_world.close()
            self._take("kept", self._save_second_load)
            self.resumed = self._take("resumed", self._resume)
            self.restored = self._take("restored", self._restore_model)
            self.restored_again = self._take("restored_again", self._restore_again)
            self.batches_resumed = self._take("batches_resumed", self._resume_batches)
            self.resharded = self._take("resharded", self._reshard)
        finally:
            self.loads.close()
        self.unavailable.pop("kept", None)  # it is only there for "resharded"

    def _take(self, name: str, observe: Callable[[], T | Unavailable]) -> T | None:
        if name not in self._wanted:
            self.unavailable[name] = NOT_WANTED
        if name in self.unavailable:
            return None
        try:
            with self.stopwatch.timing(name):
                observed = observe()
        except WorldError as error:
            observed = self._describe_error(error)
        if isinstance(observed, Unavailable):
            self.unavailable[name] = observed
            return None
        return observed

    def _describe_error(self, error: WorldError) -> Unavailable:
        reason = from_world_error(error)
        if error is self.loads.failure:
            return replace(reason, detail=f"{SECOND_LOAD_FAILED}:\n\n{reason.detail}")
        if error is self._save_failure:
            return replace(reason, detail=f"{SAVE_NOT_RETRIED}:\n\n{reason.detail}")
        return reason

    # Observations of the first load, which may have been trained.

    def _observe_state_dict(self) -> tuple[RankStateDict, ...]:
        return tuple(self.loads.run_first(state_dict.observe_state_dict))

    def _save_and_continue(self) -> tuple[RankResumed, ...] | Unavailable:
        if reason := no_training_declared(self.subject):
            return reason
        if self.training_error is not None:
            return self.training_error
        if reason := self._unsavable() or self._nothing_trainable():
            return reason
        problem = optimizer_not_loaded_by_torch(self.loads.run_first(checkpoint.first_step), self.subject)
        if problem and not self._author_saves:
            return Unavailable(f"{problem}; {DECLARE}", kind="undeclared")
        self._saved_with_optimizer = self._save_all("continued")
        if "resharded" in self._wanted and not isinstance(other_size(self.loads.first.spec), Unavailable):
            self._recorded = record_saved(self.loads.first_world(), str(self.folder))
        return _with_steps(self._saved_with_optimizer, self.loads.run_first(checkpoint.train_on, self._steps_on))

    def _save_again(self) -> tuple[RankResumed, ...] | Unavailable:
        """Save a second checkpoint; the model has been trained since the first one."""
        if (reason := self.unavailable.get("continued")) is not None:
            return reason
        with restored_if_deleted(Path(self._path("continued")), self.folder / "kept"):
            return self._save_all("again")

    def _save_all(self, name: str) -> tuple[RankResumed, ...]:
        saved = self._save(self.loads.first_world, checkpoint.save_all, self._path(name))
        return tuple(replace(rank, exported=own) for rank, own in zip(saved, self._fingerprints(), strict=True))

    def _fingerprints(self) -> list[dict[str, str]]:
        """Return those of the author's state dict, by rank, if a check compares them and nothing rules it out."""
        wanted = "saved_again" in self._wanted and "state_dict" in self.subject.declared and self.state_dict is not None
        if not wanted or self._ungatherable():
            return [{} for _ in self.inventory]
        return self.loads.run_first(state_dict.fingerprint_state_dict)

    def _save_model(self) -> tuple[RankSaved, ...] | Unavailable:
        if self._saved_with_optimizer:  # that checkpoint has the model as well
            return _models(self._saved_with_optimizer)
        return self._unsavable() or self._save(self.loads.first_world, checkpoint.save_model, self._path("saved"))

    def _observe_training_mode(self) -> tuple[RankTrainingMode, ...] | Unavailable:
        """Observe a step in training mode, the last that the first load is needed for: the step changes the model."""
        if reason := no_training_declared(self.subject):
            return reason
        if self.training_error is not None:
            return self.training_error
        if problem := describe_odd_model(self.inventory, self.subject):
            return Unavailable(f"not trained: {problem}", kind="blocked")
        return tuple(self.loads.run_first(random_numbers.observe_training_mode))

    def _read_batches(self) -> Epoch | Unavailable:
        if "data" not in self.subject.declared:
            return not_declared("data")
        folder = self._path("batches") if "batches_resumed" in self._wanted else None
        failure = None if self._save_failure is None else self._describe_error(self._save_failure)
        if folder is not None and self._author_saves and (problem := failure or self._unsavable()):
            folder, self.unavailable["batches_resumed"] = None, problem
        try:
            with self._keeping_checkpoints("before batches"):
                return read_epoch(self.loads.first_world(), self.data_world, folder)
        except WorldError as error:
            if folder is None or error.failures[0].kind == "hung":
                raise
            self.unavailable["batches_resumed"] = self._describe_error(error)
            return read_epoch(self.loads.first_world(), self.data_world, None)  # it may be saving that fails

    # Observations of the second load; "export" and "kept" need its model as it was loaded.

    def _repeat_load(self) -> tuple[RankInventory, ...]:
        return tuple(rank.inventory for rank in self.loads.second()[1])

    def _export(self) -> Export | Unavailable:
        if self.reference is None or not self.reference.complete:
            return Unavailable(NO_MODEL, kind="undeclared")
        if reason := self._unsavable(gathering=True) or self._ungatherable():
            return reason
        if not self.reference_world.alive:
            self.rebuild_reference()  # its training, or measuring its noise, has ended its world
        folder, from_parts = str(self.folder), exported_in_parts(self.inventory, self.subject)
        exports = self.loads.run_second(export.export, folder, from_parts)
        return run_on(self.reference_world, export.compare_export, folder, self.reference_path, exports)[0]

    def _save_second_load(self) -> tuple[RankSaved, ...] | Unavailable:
        if self._recorded.model:  # the checkpoint with the optimizer has the model as well
            return _models(self._saved_with_optimizer)
        return self._unsavable() or self._save(self.loads.second_world, checkpoint.save_model, self._path("kept"))

    def _resume(self) -> tuple[RankResumed, ...] | Unavailable:
        if (reason := self.unavailable.get("continued")) is not None:
            return reason
        self._loaded_with_optimizer = tuple(self.loads.run_second(checkpoint.load_all, self._path("continued")))
        return _with_steps(self._loaded_with_optimizer, self.loads.run_second(checkpoint.train_on, self._steps_on))

    def _restore_model(self) -> tuple[RankSaved, ...] | Unavailable:
        if (reason := self.unavailable.get("saved")) is not None:
            return reason
        if self._loaded_with_optimizer:
            return _models(self._loaded_with_optimizer)
        name = "continued" if self._saved_with_optimizer else "saved"
        return tuple(self.loads.run_second(checkpoint.load_model, self._path(name)))

    def _restore_again(self) -> tuple[RankResumed, ...] | Unavailable:
        if (reason := self.unavailable.get("saved_again")) is not None:
            return reason
        for earlier in ("resumed", "restored"):
            if (reason := self.unavailable.get(earlier, NOT_WANTED)).error:
                return reason  # loading the first checkpoint raised or hung, and would do so again
        return tuple(self.loads.run_second(checkpoint.load_all, self._path("again"), self._changed_between_saves()))

    def _resume_batches(self) -> tuple[RankBatches, ...] | Unavailable:
        for reason in map(self.unavailable.get, ("batches", "batches_resumed")):
            if reason is not None:
                return reason
        assert self.batches is not None
        with self._keeping_checkpoints("before batches_resumed"):
            return resume_epoch(self.batches, self.loads.new_second_world, self._path("batches"))

    def _keeping_checkpoints(self, name: str) -> AbstractContextManager[None]:
        kept = self.folder / name
        return restored_if_deleted(Path(self._path("")), kept) if self._author_saves else nullcontext()

    def _changed_between_saves(self) -> frozenset[str]:
        pairs = zip(self.continued or (), self.saved_again or (), strict=True)
        held = [(first.model.tensors, second.model.tensors) for first, second in pairs]
        return frozenset(name for first, second in held for name in second if first.get(name) != second[name])

    # The observation of a load in a world of another size.

    def _reshard(self) -> Resharded | Unavailable:
        if (reason := self.unavailable.get("kept")) is not None:
            return reason
        if self.reference is None:
            return not_declared("reference")
        spec = other_size(self.loads.first.spec)
        if isinstance(spec, Unavailable):
            return spec
        self.loads.close_second()
        label = f"the load in {describe_size(spec)}"
        try:
            world = self.loads.of_size(spec, label)
        except WorldError as error:
            return Unavailable(f"the loader fails in {describe_size(spec)}: {error.summary}")
        name, compare = ("continued", self._recorded.compare_model) if self._recorded.model else ("kept", self._compare)
        saved = self._path(name)
        if self.resumed and self._recorded.state:
            return reshard_all(world, partial(self.loads.of_size, spec, label), saved, self._recorded)
        resharded = reshard_model(world, saved, compare, partial(self._loads_in_same_size, saved))
        return replace(resharded, optimizer_problem=self._recorded.problem)

    def _compare(self, world: World) -> list[tuple[Comparison, ...]]:
        return run_on(world, checkpoint.compare_loaded, self.reference_path)

    def _loads_in_same_size(self, saved: str) -> bool:
        """Load the same checkpoint in a world of the size that saved it; return whether that works."""
        try:
            self.loads.run_second(checkpoint.load_over_other_values, saved)
        except WorldError:
            return False
        return True

    # Worlds and loads.

    def _save(
        self, world: Callable[[], World], observer: Callable[P, R], *args: P.args, **kwargs: P.kwargs
    ) -> tuple[R, ...]:
        """Save with this observer, unless saving has hung or ended a rank before.

        An exception may not be raised again: saving is tried again after one.
        """
        if self._save_failure is not None:
            raise self._save_failure
        ranks = world()  # outside of the try: a loader that hangs is not a save() that hangs
        try:
            return tuple(run_on(ranks, observer, *args, **kwargs))
        except WorldError as error:
            # Once "saved" is there, saving has worked before, and only the last checkpoint is left to save.
            if error.failures[0].kind in ("hung", "exited", "killed") and self.saved is None:
                self._save_failure = error
            raise

    # What rules out an observation.

    def _unsavable(self, gathering: bool = False) -> Unavailable | None:
        """Return why saving would fail or hang; the author's own save() is tried, unless torch does the gathering."""
        if problem := describe_odd_model(self.inventory, self.subject):
            return Unavailable(f"not saved: {problem}", kind="blocked")
        if self._author_saves and not gathering:
            return None
        by_author = gathering and "state_dict" in self.subject.declared
        refused = () if by_author else self.state_dict or ()
        return not_saved_by_torch(self.inventory, self.subject, refused, gathering=gathering)

    def _nothing_trainable(self) -> Unavailable | None:
        trainable = any(t.requires_grad for t in self.inventory[0].tensors)
        return None if trainable else Unavailable("nothing is trainable, so there is no optimizer")

    def _ungatherable(self) -> Unavailable | None:
        return not_gathered_by_gloo(self.inventory) if self.loads.first.spec.backend == "gloo" else None

    @property
    def _steps_on(self) -> list[int]:
        """The steps to train after a checkpoint; of a short training, they repeat the batches."""
        steps = SCHEDULED_STEPS if "scheduler" in self.subject.declared else STEPS
        return [step % max(self.steps, STEPS) for step in range(steps)]

    @property
    def _author_saves(self) -> bool:
        return "save" in self.subject.declared

    def _path(self, name: str) -> str:
        return str(self.folder / "checkpoints" / name)


def _models(ranks: tuple[RankResumed, ...]) -> tuple[RankSaved, ...]:
    return tuple(rank.model for rank in ranks)


def _with_steps(
    ranks: tuple[RankResumed, ...], runs: list[tuple[tuple[float, ...], tuple[tuple[float, ...], ...]]]
) -> tuple[RankResumed, ...]:
    """Add the losses and the learning rates of the steps that follow."""
    return tuple(replace(rank, losses=own[0], rates=own[1]) for rank, own in zip(ranks, runs, strict=True))
