"""Take the observations that need more than one load: a second load, and checkpoints that another load reads.

The loader's own world takes part after its training, so whatever goes wrong here cannot affect earlier observations.
Each world ends with its last observation: the ranks never hold two loads of one size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from pytest_fsdp_meta.checks.checkpoint.facts import RankResumed, RankSaved, RankStateDict
from pytest_fsdp_meta.checks.training.facts import RankTrainingMode, StepNotFinite
from pytest_fsdp_meta.evidence import (
    Comparison,
    Epoch,
    Evidence,
    Export,
    RankBatches,
    RankInventory,
    Resharded,
    Unavailable,
    not_declared,
)
from pytest_fsdp_meta.trial.checkpoints import (
    Recorded,
    read_epoch,
    record_saved,
    reshard_all,
    reshard_model,
    restored_if_deleted,
    resume_epoch,
    resume_last_epoch,
    save_over,
)
from pytest_fsdp_meta.trial.giving import describe_size, other_size
from pytest_fsdp_meta.trial.observations import Observation, ObservationRun
from pytest_fsdp_meta.trial.obstacles import (
    DECLARE,
    NOT_WANTED,
    beside_not_loaded_by_torch,
    explain_missing_state,
    exported_in_parts,
    failed_or_refused,
    no_training_declared,
    not_gathered_by_gloo,
    not_saved_by_torch,
    odd_model,
    optimizer_not_loaded_by_torch,
    refuses_checkpoint,
)
from pytest_fsdp_meta.trial.on_ranks import (
    author_step,
    checkpoint,
    reference,
    run_on,
    saved_state,
    state_dict,
    training_mode,
)
from pytest_fsdp_meta.worlds import World, WorldError

P = ParamSpec("P")
R = TypeVar("R")
STEPS = 2
"""Steps after a checkpoint: the loss of the second one shows what the first, and its optimizer's state, did."""
SCHEDULED_STEPS = 4
"""The same with a scheduler, which two steps do not show: of a schedule that is one step off, they see one rate."""
SECOND_LOAD_FAILED = "the loader succeeded once, and failed when it ran again in a fresh world with the same fixtures"
SAVE_NOT_RETRIED = "saving hung or ended a rank, and is not tried again"
NO_MODEL = "a checkpoint directory is not a model to load into; declare Subject(reference=<callable>)"
MODEL_ALONE = {"saved": "continued", "kept": "continued", "restored": "resumed", "resharded": "resumed"}
"""Where the second of these fails, the author's functions are called for the model alone. Many expect an optimizer, and
raise other errors without one: the earlier failure is reported instead."""


@dataclass
class AllObservations(ObservationRun):
    """All observations of one trial: those of one load, then those that need more."""

    _saved_with_optimizer: tuple[RankResumed, ...] = ()
    _loaded_with_optimizer: tuple[RankResumed, ...] = ()
    _recorded: Recorded = field(default_factory=Recorded)
    """What each rank has recorded of what it saved with its optimizer."""
    _stateless: tuple[str, ...] = ()
    """The trainable parameters without a gradient: the optimizer has no state for them to save."""
    _trained: tuple[float | str, ...] = ()
    """The loss on each rank after the training, whose export was recorded."""
    _save_failure: WorldError | None = None
    """How saving hung or ended a rank; another attempt would cost the same time."""

    def take_all(self) -> Evidence:
        super().take_all()
        try:
            for row in MORE_LOADS:
                self.take(row)
                if row.name == "export":  # the last that needs the reference
                    self.reference_world.close()
        finally:
            self.loads.close()
        for name in ("kept", "trained"):  # they are only there for other observations
            self.unavailable.pop(name, None)
        return replace(self.seen, unavailable=self.unavailable)

    def take(self, row: Observation[Any]) -> None:
        super().take(row)
        failed, earlier = (self.unavailable.get(name, NOT_WANTED) for name in (row.name, MODEL_ALONE.get(row.name, "")))
        if self._author_saves and failed.error and earlier.error:
            self.unavailable[row.name] = earlier

    def describe_error(self, error: WorldError) -> Unavailable:
        reason = super().describe_error(error)
        if error is self.loads.failure:
            return replace(reason, detail=f"{SECOND_LOAD_FAILED}:\n\n{reason.detail}")
        if error is self._save_failure:
            return replace(reason, detail=f"{SAVE_NOT_RETRIED}:\n\n{reason.detail}")
        return replace(reason, summary=explain_missing_state(reason.summary, self._stateless))

    # Observations of the first load, which may have been trained.

    def _observe_state_dict(self) -> tuple[RankStateDict, ...]:
        return tuple(self.loads.run_first(state_dict.observe_state_dict))

    def _export_trained(self) -> tuple[float | str, ...]:
        """Export what was trained, where the author does."""
        declared = "state_dict" in self.subject.declared and not exported_in_parts(self.inventory, self.subject)
        source = "export_reference" if "export_reference" in self.subject.declared else "reference"
        if declared and self.seen.training and source not in self._checkpoints:  # which compute no loss
            self._trained = tuple(self.loads.run_first(state_dict.export_trained, str(self.folder)))
        return self._trained

    def _save_and_continue(self) -> tuple[RankResumed, ...] | Unavailable:
        if reason := self._not_trained() or self._unsavable():
            return reason
        if not any(t.requires_grad for t in self.inventory[0].tensors):
            return Unavailable("nothing is trainable, so there is no optimizer")
        steps = self.loads.run_first(checkpoint.first_step)
        self._stateless = tuple(dict.fromkeys(name for step in steps for name in step.stateless))
        problem = optimizer_not_loaded_by_torch(steps, self.subject)
        if problem and not self._author_saves:
            return Unavailable(f"{problem}; {DECLARE}", kind="undeclared")
        self._saved_with_optimizer = self._save_all("continued")
        if "resharded" in self.wanted and not isinstance(other_size(self.loads.first.spec), Unavailable):
            self._recorded = record_saved(self.loads.first_world(), str(self.folder))
        return _with_steps(self._saved_with_optimizer, self.loads.run_first(checkpoint.train_on, self._steps_on))

    def _save_again(self) -> tuple[RankResumed, ...]:
        """Save a second checkpoint; the model has been trained since the first one."""
        with restored_if_deleted(Path(self._path("continued")), self.folder / "kept"):
            return self._save_all("again")

    def _save_all(self, name: str) -> tuple[RankResumed, ...]:
        """Save model and optimizer; add the fingerprints of the author's state dict if a check compares them."""
        saved = self._save(self.loads.first_world, checkpoint.save_all, self._path(name))
        compared = "saved_again" in self.wanted and "state_dict" in self.subject.declared
        if not compared or self.seen.state_dict is None or self._ungatherable():
            return saved
        exported = self.loads.run_first(state_dict.fingerprint_state_dict)
        return tuple(replace(rank, exported=own) for rank, own in zip(saved, exported, strict=True))

    def _save_model(self) -> tuple[RankSaved, ...] | Unavailable:
        if self._saved_with_optimizer:  # that checkpoint has the model as well
            return _models(self._saved_with_optimizer)
        return self._unsavable() or self._save(self.loads.first_world, checkpoint.save_model, self._path("saved"))

    def _observe_training_mode(self) -> tuple[RankTrainingMode, ...] | Unavailable:
        """Observe a step with dropout. It changes the model, so only a step that is not finite may follow on it."""
        return self._no_more_steps() or tuple(self.loads.run_first(training_mode.observe_training_mode))

    def _observe_not_finite(self) -> tuple[StepNotFinite, ...] | Unavailable:
        """Observe a step of the author's that is not finite, after which the first load is of no use."""
        if "train_step" not in self.subject.declared:
            return not_declared("train_step")
        if reason := self._no_more_steps():
            return reason
        if not any(t.requires_grad for t in self.inventory[0].tensors):
            return Unavailable("nothing is trainable")
        try:
            return tuple(self.loads.run_first(author_step.observe_not_finite))
        except WorldError as error:
            if error.failures[0].kind in ("hung", "killed"):  # gloo aborts a rank whose collective meets another one
                return tuple(StepNotFinite((0, 1), waiting=error.summary) for _ in self.inventory)
            return failed_or_refused(f"the step in which the model returns NaN fails: {error.summary}", error)

    def _read_batches(self) -> Epoch | Unavailable:
        if "data" not in self.subject.declared:
            return not_declared("data")
        folder = self._path("batches") if "batches_resumed" in self.wanted else None
        failure = None if self._save_failure is None else self.describe_error(self._save_failure)
        if folder is not None and self._author_saves and (problem := failure or self._unsavable()):
            folder, self.unavailable["batches_resumed"] = None, problem
        try:
            with self._keeping_checkpoints("before batches"):
                return read_epoch(self.loads.first_world(), self.data_world, folder)
        except WorldError as error:
            if folder is None or error.failures[0].kind == "hung":
                raise
            self.unavailable["batches_resumed"] = self.describe_error(error)
            return read_epoch(self.loads.first_world(), self.data_world, None)  # it may be saving that fails

    # Observations of the second load; "export" and "kept" need its model as it was loaded.

    def _repeat_load(self) -> tuple[RankInventory, ...]:
        return tuple(rank.inventory for rank in self.loads.second()[1])

    def _export(self) -> Export | Unavailable:
        declared = "export_reference" in self.subject.declared
        if self.seen.reference is None or not (declared or self.seen.reference.complete):
            return Unavailable(NO_MODEL, kind="undeclared")
        if reason := self._unsavable(gathering=True) or self._ungatherable():
            return reason
        if (failed := self.unavailable.get("trained", NOT_WANTED)).error:
            return failed
        if not self.reference_world.alive:
            # Its training, or measuring its noise, has ended its world; or the reference is a checkpoint.
            self.reference_world.start() if declared else self._build_reference("rebuilt")
        folder, from_parts = str(self.folder), exported_in_parts(self.inventory, self.subject)
        exports = self.loads.run_second(state_dict.export, folder, from_parts)
        path, plain = self._path_of("export_reference", reference.record_export_reference), self._reference_path
        found = run_on(self.reference_world, state_dict.compare_export, folder, path, exports, plain * declared)[0]
        if from_parts and self.seen.training and "state_dict" in self.subject.declared:
            return replace(found, no_losses="it is put together from parts")
        if not self._trained:
            return replace(found, as_loaded=declared and "export_reference" in self._checkpoints)
        loaded = tuple(own.loss for own in exports)
        computed = run_on(self.reference_world, state_dict.losses_of_exported, self._recipe, folder, declared)
        losses, rounding = computed[0]
        if not losses:
            return replace(found, as_loaded=True)
        if unknown := [loss for loss in (*loaded, *self._trained, *losses) if isinstance(loss, str)]:
            return replace(found, no_losses=unknown[0])
        live, known = (tuple(map(float, loaded)), tuple(map(float, self._trained))), tuple(map(float, losses))
        return replace(found, live=live, losses=known, rounding=rounding)

    def _save_second_load(self) -> tuple[RankSaved, ...] | Unavailable:
        if self._recorded.model:  # the checkpoint with the optimizer has the model as well
            return _models(self._saved_with_optimizer)
        return self._unsavable() or self._save(self.loads.second_world, checkpoint.save_model, self._path("kept"))

    def _resume(self) -> tuple[RankResumed, ...] | Unavailable:
        if reason := beside_not_loaded_by_torch(self._saved_with_optimizer, self.subject):
            return reason
        self._loaded_with_optimizer = tuple(self.loads.run_second(checkpoint.load_all, self._path("continued")))
        return _with_steps(self._loaded_with_optimizer, self.loads.run_second(checkpoint.train_on, self._steps_on))

    def _restore_model(self) -> tuple[RankSaved, ...]:
        if self._loaded_with_optimizer:
            return _models(self._loaded_with_optimizer)
        name = "continued" if self._saved_with_optimizer else "saved"
        return tuple(self.loads.run_second(checkpoint.load_model, self._path(name)))

    def _restore_again(self) -> tuple[RankResumed, ...] | Unavailable:
        if reason := beside_not_loaded_by_torch(self._saved_with_optimizer, self.subject):
            return reason
        for earlier in ("resumed", "restored"):
            if (reason := self.unavailable.get(earlier, NOT_WANTED)).error:
                return reason  # loading the first checkpoint raised or hung, and would do so again
        if self._author_saves and (self.seen.resumed or self.seen.restored):
            self.loads.close_second()  # a job that starts again calls resume() once for each load
        pairs = zip(self.seen.continued or (), self.seen.saved_again or (), strict=True)
        held = [(first.model.tensors, second.model.tensors) for first, second in pairs]
        changed = frozenset(name for first, second in held for name in second if first.get(name) != second[name])
        return tuple(self.loads.run_second(checkpoint.load_all, self._path("again"), changed))

    def _resume_batches(self) -> tuple[RankBatches, ...] | Unavailable:
        assert self.seen.batches is not None
        with self._keeping_checkpoints("before batches_resumed"):
            return resume_epoch(self.seen.batches, self.loads.new_second_world, self._path("batches"))

    def _reshard_batches(self) -> tuple[RankBatches, ...] | Unavailable:
        assert self.seen.batches is not None
        if not self._author_saves:
            return not_declared("save")
        spec = other_size(self.loads.first.spec)
        if isinstance(spec, Unavailable):
            return spec
        self.loads.close_second()
        try:
            world = self.loads.of_size(spec, f"the load in {describe_size(spec)}")
            times = max(1, self.loads.first.spec.size // spec.size)
            return resume_last_epoch(world, self.seen.batches, self._path("batches"), times)
        except WorldError as error:
            summary = f"resuming within an epoch fails in {describe_size(spec)}: {error.summary}"
            return Unavailable(summary, error=not refuses_checkpoint(error), detail=str(error), kind="refused")

    def _keeping_checkpoints(self, name: str) -> AbstractContextManager[None]:
        kept = self.folder / name
        return restored_if_deleted(Path(self._path("")), kept) if self._author_saves else nullcontext()

    # The observation of a load in a world of another size.

    def _reshard(self) -> Resharded | Unavailable:
        if self.seen.reference is None:
            return not_declared("reference")
        spec = other_size(self.loads.first.spec)
        if isinstance(spec, Unavailable):
            return spec
        self.loads.close_second()
        label = f"the load in {describe_size(spec)}"
        try:
            world = self.loads.of_size(spec, label)
        except WorldError as error:
            return failed_or_refused(f"the loader fails in {describe_size(spec)}: {error.summary}", error)
        name, compare = ("continued", self._recorded.compare_model) if self._recorded.model else ("kept", self._compare)
        saved = self._path(name)
        if self.seen.resumed and self._recorded.state:
            load_again = partial(self.loads.of_size, spec, label)
            found = reshard_all(world, load_again, saved, self._recorded)
            # torch's own checkpoint lists its files, so it reads no others.
            loaded = not (found.refused or found.optimizer_problem)
            if not (loaded and self._author_saves and spec.size < self.loads.first.spec.size):
                return found
            return replace(found, saved_over=save_over(world, load_again, self._steps_on, saved, self._recorded.folder))
        resharded = reshard_model(world, saved, compare, partial(self._loads_in_same_size, saved))
        return replace(resharded, optimizer_problem=self._recorded.problem)

    def _compare(self, world: World) -> list[tuple[Comparison, ...]]:
        return run_on(world, saved_state.compare_loaded, self._reference_path)

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
            if error.failures[0].kind in ("hung", "exited", "killed") and self.seen.saved is None:
                self._save_failure = error
            raise

    # What rules out an observation.

    def _unsavable(self, gathering: bool = False) -> Unavailable | None:
        """Return why saving would fail or hang; the author's own save() is tried, unless torch does the gathering."""
        if reason := odd_model(self.inventory, self.subject, "not saved"):
            return reason
        if self._author_saves and not gathering:
            return None
        by_author = gathering and "state_dict" in self.subject.declared
        refused = () if by_author else self.seen.state_dict or ()
        return not_saved_by_torch(self.inventory, self.subject, refused, gathering=gathering)

    def _not_trained(self) -> Unavailable | None:
        """Return what has to be declared before anything is trained, or the error that training raised."""
        training = self.unavailable.get("training", NOT_WANTED)
        return no_training_declared(self.subject) or (training if training.error else None)

    def _no_more_steps(self) -> Unavailable | None:
        return self._not_trained() or odd_model(self.inventory, self.subject, "not trained")

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


def _with_steps(ranks: tuple[RankResumed, ...], runs: list[Mapping[str, Any]]) -> tuple[RankResumed, ...]:
    return tuple(replace(rank, **own) for rank, own in zip(ranks, runs, strict=True))


MORE_LOADS = (
    Observation("state_dict", AllObservations._observe_state_dict),
    Observation("trained", AllObservations._export_trained),
    Observation("continued", AllObservations._save_and_continue, uses=("state_dict",)),
    Observation("saved_again", AllObservations._save_again, needs=("continued",)),
    Observation("saved", AllObservations._save_model, uses=("state_dict",)),
    Observation("batches", AllObservations._read_batches),
    Observation("training_mode", AllObservations._observe_training_mode),
    Observation("not_finite", AllObservations._observe_not_finite),
    Observation("repetition", AllObservations._repeat_load),
    Observation("export", AllObservations._export, uses=("reference", "state_dict", "trained")),
    Observation("kept", AllObservations._save_second_load, uses=("state_dict",)),
    Observation("resumed", AllObservations._resume, needs=("continued",)),
    Observation("restored", AllObservations._restore_model, needs=("saved",)),
    Observation("restored_again", AllObservations._restore_again, needs=("saved_again",)),
    Observation("batches_resumed", AllObservations._resume_batches, needs=("batches",)),
    Observation("batches_resharded", AllObservations._reshard_batches, needs=("batches_resumed",)),
    Observation("resharded", AllObservations._reshard, needs=("kept",), uses=("reference",)),
)
