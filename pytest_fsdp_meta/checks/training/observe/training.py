"""Train a few steps on this rank, and observe losses, gradients and what the steps changed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from pytest_fsdp_meta.checks.collectives.observe import watching_step
from pytest_fsdp_meta.checks.materialisation.observe import loaded_subject
from pytest_fsdp_meta.checks.random_numbers.observe import DrawsWithoutDropout
from pytest_fsdp_meta.checks.training.facts import (
    FIRST_BACKWARD,
    FIRST_BUFFERS,
    LAST_BUFFERS,
    OWN_CHANGES,
    FirstBackward,
    OwnClipping,
    SecondStep,
    TrainedBuffers,
)
from pytest_fsdp_meta.checks.training.observe.beside import Beside, make_beside
from pytest_fsdp_meta.checks.training.observe.first_batch_again import FirstBatchAgain
from pytest_fsdp_meta.checks.training.observe.gradients import (
    ADDED,
    LEFT_OVER,
    clip_on_rank,
    contains,
    gradient_norm,
    gradients_of,
    without_gradient,
)
from pytest_fsdp_meta.checks.training.observe.movement import (
    compare_beside,
    copy_beside,
    copy_shards,
    count_followed,
    due_by_gradients,
    due_by_reference,
    gradient_noise,
    moved_rows,
    movements,
    random_states,
    root_mean_square,
    snapshots_after,
    swallowed,
)
from pytest_fsdp_meta.checks.training.observe.step_watches import BackwardWatch, WeightWatch
from pytest_fsdp_meta.checks.training.observe.steps import StepObserver, train
from pytest_fsdp_meta.checks.training.observe.trained_buffers import BufferWatch, broadcast_buffers
from pytest_fsdp_meta.checks.training.observe.training_mode import ModeWatch
from pytest_fsdp_meta.evidence import Clipping, Comparison, Movement, RankTraining
from pytest_fsdp_meta.loader.subject import Subject
from pytest_fsdp_meta.ranks.adapters.dtensor import local_part
from pytest_fsdp_meta.ranks.batches import batch_slice
from pytest_fsdp_meta.ranks.bits import is_low
from pytest_fsdp_meta.ranks.inventory import reshard, take_inventory
from pytest_fsdp_meta.ranks.modes import IN_EVALUATION, dropout_fractions
from pytest_fsdp_meta.ranks.optimizers import make_optimizer, optimizer_facts
from pytest_fsdp_meta.ranks.reference_record import RECORDS, Record, record_at
from pytest_fsdp_meta.worlds import Rank, current


def observe_training(
    steps: int,
    records_folder: str | None = None,
    noise: float = 0.0,
    norm: float | None = None,
    own_clipping: OwnClipping | None = None,
    in_evaluation: bool = False,
) -> RankTraining:
    """Train this rank's subject for ``steps`` steps and compare it with the reference's own training.

    ``records_folder`` has the records of the reference's training; it is None if no reference can be trained. Smaller
    elements of the reference's gradients than ``noise`` are rounding errors, ``norm`` is their norm, and
    ``own_clipping`` says what the author's function did to them. With ``in_evaluation`` it was trained in ``eval()``.
    The rank's state keeps the "optimizer", and what is "beside" it, for observers that continue the training.
    """
    rank = current()
    if in_evaluation:
        rank.state[IN_EVALUATION] = True
    subject = loaded_subject(rank)
    data_parallel = batch_slice(subject, rank)
    optimizer = make_optimizer(subject)
    seen = _RankSteps(subject, rank, steps, _open_records(records_folder), (norm, own_clipping), optimizer)
    dropouts = dropout_fractions(subject.model)
    held = None if optimizer is None else optimizer_facts(optimizer, subject)
    seen.beside = beside = make_beside(subject, optimizer)
    kept = copy_beside(beside) if "updated_beside" in seen.records else {}
    run = train(subject, rank.device, range(steps), data_parallel, optimizer, seen, beside)
    reshard(subject.model)
    # Before the accumulation, whose forwards and steps change both again.
    seen.take("end")
    (averages, alone), moved = compare_beside(beside, kept, seen.records), seen.movements(noise)
    followed = count_followed(beside, kept, subject.model, seen.before)
    broadcast = broadcast_buffers(subject.model)
    swallowed_updates = seen.swallowed(noise)
    seen.before.clear()  # what follows needs the memory
    rank.state.update(optimizer=optimizer, beside=beside)
    after = take_inventory(subject.model, rank.rank, str(rank.device))
    if optimizer is not None:
        after = replace(after, optimizer=optimizer_facts(optimizer, subject))
    rank.state[OWN_CHANGES] = dict(seen.buffers.moments)
    again = FirstBatchAgain(subject, rank, data_parallel, seen.records, optimizer)
    again.observe()
    assert again.memory is not None
    return RankTraining(
        losses=tuple(run.losses),
        loss_dtype=run.loss_dtype,
        autocast=run.autocast,
        left=next(filter(None, (seen.modes[0].left(later) for later in seen.modes[1:])), ()),
        batches=tuple(run.batches),
        backwards=tuple(run.backwards),
        data_parallel=data_parallel,
        first_backward=seen.first_backward,
        gradients=seen.compared["gradients"],
        parameters=seen.compared["updates"],
        labels=tuple(run.labels),
        rows=run.rows,
        without_gradient=seen.without_gradient,
        only_here=seen.only_here,
        norm=seen.norm,
        norm_problem=seen.norm_problem,
        after=after,
        optimizer=held,
        movements=moved,
        accumulation=again.accumulation,
        short=again.short,
        unclipped=again.unclipped,
        unclipped_refused=again.unclipped_refused,
        clipped=seen.clipped,
        second=seen.second,
        late=seen.compared["late"],
        swallowed=swallowed_updates,
        steps_by_chance=seen.steps_by_chance,
        forward=seen.weights.observed(),
        rates=tuple(run.rates),
        beside=averages,
        beside_alone=alone,
        beside_aliases=beside.aliases(subject.model),
        followed=followed,
        drawing=seen.draws.modules,
        dropouts=dropouts,
        buffers=replace(seen.trained_buffers(), broadcast=broadcast),
        memory=again.memory,
    )


class _RankSteps(StepObserver):
    """Observe the gradients of the first two steps, what clipping leaves of the first, and what steps change."""

    buffers: BufferWatch

    def __init__(
        self,
        subject: Subject,
        rank: Rank,
        steps: int,
        records: Mapping[str, Record],
        clipping: tuple[float | None, OwnClipping | None],
        optimizer: Optimizer | None,
    ) -> None:
        self.records = records
        self.without_gradient: tuple[str, ...] = ()
        self.only_here: dict[str, float] = {}
        self.norm: float | None = None
        self.norm_problem = ""
        self.clipped: Clipping | None = None
        self.first_backward: FirstBackward | None = None
        self.second: SecondStep | None = None
        self._clipping = clipping
        """The norm of the reference's gradients, and what the author's function did to them."""
        self._optimizer = optimizer
        self._random_states: list[Tensor] = []
        self.steps_by_chance = False
        self._subject = subject
        self._model = subject.model
        self.weights = WeightWatch(subject.model)
        self.draws = DrawsWithoutDropout(subject.model, rank.device)
        self.buffers = BufferWatch(subject.model)
        self.modes: list[ModeWatch] = []
        """Of the author's steps."""
        self._steps = steps
        self._rank = rank
        self.before = copy_shards(subject.model)
        self._own_gradients: dict[str, Tensor] = {}
        """Copies on the CPU, made only if there is no reference to compare with."""
        self._own_noise = 0.0
        self.beside = Beside()
        self._moved: dict[str, Tensor] = {}
        self.compared: defaultdict[str, tuple[Comparison, ...]] = defaultdict(tuple)
        """By snapshot; empty if it was not taken."""

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        with watching_step(self._rank, self._model, self._steps, step), self.draws.around(step):
            yield

    def loss_of(self, subject: Subject, rows: dict[str, Any]) -> Tensor:
        return self.weights.loss_of(subject, rows)

    @contextmanager
    def during_forwards(self, step: int, rows: dict[str, Any]) -> Iterator[None]:
        self.modes.append(ModeWatch(self._model))
        self.watch = BackwardWatch(self._model, rows) if step == 0 else None
        first = nullcontext() if self.watch is None else self.watch.watching()
        with self.modes[-1].watching(), self.weights.next_step(), self.buffers.during(step), first:
            yield
        if self.watch is not None:
            self.first_backward = self.watch.observed()
            self._rank.state[FIRST_BACKWARD] = self.first_backward, self.watch.samples, self.watch.modes

    def after_backward(self, step: int) -> None:
        if step == 0:
            self._observe_first_gradients()
        elif step == 1 and "second" in self.records:
            self._observe_second_gradients()
        if self._optimizer is not None:
            self._random_states = random_states(self._optimizer, self._rank.device)

    def take(self, event: str, step: int = 0) -> None:
        """Compare the snapshots that are due after this event with those that the reference recorded."""
        if (event, step) == ("update", 0):
            self._moved = moved_rows(self._model, self.before)
        if event == "update" and self._optimizer is not None:
            states = random_states(self._optimizer, self._rank.device)
            self.steps_by_chance |= not all(map(torch.equal, self._random_states, states))
        for snapshot in snapshots_after(event, step, self._steps):
            if snapshot.name in self.records:
                compare = snapshot.kind.compare
                self.compared[snapshot.name] = compare(self._model, self.before, self.records, snapshot.name)

    def trained_buffers(self) -> TrainedBuffers:
        return TrainedBuffers(
            first=self.compared[FIRST_BUFFERS],
            last=self.compared[LAST_BUFFERS],
            forwards=self.buffers.forwards,
            by_step=self.buffers.by_step,
            by_evaluation=tuple(self.buffers.by_evaluation),
            written_parameters=tuple(self.buffers.written_parameters),
        )

    def movements(self, reference_noise: float) -> tuple[Movement, ...]:
        """Return how far each parameter moved, and how far the reference or its own gradients say it should."""
        if self._optimizer is None:
            return ()
        if self.records:
            due = due_by_reference(self.records, reference_noise)
        else:
            due = due_by_gradients(self._own_gradients, self._optimizer, self._own_noise)
        return movements(self._model, self.before, due, self._moved)

    def swallowed(self, noise: float) -> tuple[str, ...]:
        if self._optimizer is None or not self.records:
            return ()
        copied = [
            name for name, value in self.beside.entries() if isinstance(value, Tensor) and not is_low(value.dtype)
        ]
        found = swallowed(
            self._model, self.before, self.records, noise, self._optimizer, self._moved, self.steps_by_chance
        )
        # Copies in float32 beside the model keep what rounding takes away.
        return tuple(name for name in found if not any(entry.endswith(f".{name}") for entry in copied))

    def _observe_first_gradients(self) -> None:
        if self.watch is not None:
            self.watch.note_gradients()
        gradients = gradients_of(self._model)
        self.without_gradient = without_gradient(self._model, gradients)
        self.norm, self.norm_problem = gradient_norm(self._model, self._subject.clip_grad_norm)
        if self.records:
            known = self.records["gradients"]
            sizes = ((name, root_mean_square(part.local)) for name, part in gradients if name not in known)
            self.only_here = {name: size for name, size in sizes if size}
            self.take("backward")
            clip, (norm, own) = self._subject.clip_grad_norm, self._clipping
            if clip is not None and norm:
                self.clipped = clip_on_rank(self._model, clip, (norm, self.norm), own, self.records)
        else:
            self._own_gradients = {name: local_part(part.local).to("cpu", copy=True) for name, part in gradients}
            self._own_noise = gradient_noise(self._model)

    def _observe_second_gradients(self) -> None:
        self.take("backward", 1)
        gradients, first, second = gradients_of(self._model), self.records["gradients"], self.records["second"]
        comparisons = self.compared["second"]
        sizes = {c.name: c.measure.truth for c in self.compared["gradients"] if c.measure is not None}
        measured = ((c.name, c.measure.apart) for c in comparisons if c.measure is not None)
        clipped = self._subject.max_grad_norm is not None  # which makes what is left over small
        least = LEFT_OVER if clipped else ADDED
        off = {name for name, apart in measured if apart > least * sizes.get(name, 0.0)}
        kept = (name for name, part in gradients if name in off and contains(part, name, first, second, clipped))
        self.second = SecondStep(
            parameters=self.compared["first_updates"],
            gradients=comparisons,
            without_gradient=without_gradient(self._model, gradients),
            left_over=tuple(kept),
        )


def _open_records(folder: str | None) -> dict[str, Record]:
    if folder is None:
        return {}
    files = {name: record_at(folder, name) for name in RECORDS}
    return {name: Record(file) for name, file in files.items() if file.exists()}
