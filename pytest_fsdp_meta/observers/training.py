"""Train a few steps on this rank, and observe losses, gradients of the first step, and what the steps changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from pytest_fsdp_meta.evidence import Accumulation, Comparison, Movement, RankTraining
from pytest_fsdp_meta.loader.subject import Subject
from pytest_fsdp_meta.observers.accumulation import accumulate, indivisible_batch, micro_batches
from pytest_fsdp_meta.observers.adapters.dtensor import local_part
from pytest_fsdp_meta.observers.adapters.lookup import parts_of
from pytest_fsdp_meta.observers.batches import (
    batch_digest,
    batch_slice,
    count_labels,
    global_batch,
    loss_of,
    own_rows,
    scalar,
)
from pytest_fsdp_meta.observers.forward_weights import WeightWatch
from pytest_fsdp_meta.observers.gradients import gradient_norm, gradients_of, without_gradient
from pytest_fsdp_meta.observers.inventory import named_tensors, reshard, take_inventory
from pytest_fsdp_meta.observers.loading import loaded_subject
from pytest_fsdp_meta.observers.movement import (
    compare_updates,
    copy_shards,
    due_by_gradients,
    due_by_reference,
    gradient_noise,
    moved_rows,
    movements,
)
from pytest_fsdp_meta.observers.optimizers import make_optimizer, optimizer_facts
from pytest_fsdp_meta.observers.step_collectives import watching_step
from pytest_fsdp_meta.observers.support.poison import deterministic
from pytest_fsdp_meta.observers.support.reference_record import RECORDS, Record, record_at
from pytest_fsdp_meta.observers.values import compare_gradients
from pytest_fsdp_meta.worlds import SEED, Rank, current, doing


def observe_training(steps: int, records_folder: str | None = None, noise: float = 0.0) -> RankTraining:
    """Train this rank's subject for ``steps`` steps and compare it with the reference's own training.

    ``records_folder`` has the records of the reference's training; it is None if no reference can be trained. Smaller
    elements of the reference's gradients than ``noise`` are rounding errors. The rank's state keeps the "optimizer"
    for observers that continue the training.
    """
    rank = current()
    subject = loaded_subject(rank)
    data_parallel = batch_slice(subject, rank)
    before = copy_shards(subject.model)
    optimizer = make_optimizer(subject)
    first = _FirstBackward(subject, _open_records(records_folder))
    held = None if optimizer is None else optimizer_facts(optimizer, subject.model)

    @contextmanager
    def around_step(step: int) -> Iterator[None]:
        with watching_step(rank, subject.model, steps, step):
            yield
        if step == 0:
            first.after_step(before)

    watch = WeightWatch(subject.model)
    run = train(subject, rank.device, range(steps), data_parallel, optimizer, first.observe, around_step, watch.loss_of)
    reshard(subject.model)
    rank.state["optimizer"] = optimizer
    after = take_inventory(subject.model, rank.rank, str(rank.device))
    return RankTraining(
        losses=tuple(run.losses),
        batches=tuple(run.batches),
        data_parallel=data_parallel,
        gradients=first.gradients,
        parameters=_compare_updates(subject.model, before, first.records),
        unreduced=_is_unreduced(subject.model),
        labels=tuple(run.labels),
        without_gradient=first.without_gradient,
        norm=first.norm,
        norm_problem=first.norm_problem,
        after=after,
        optimizer=held,
        movements=first.movements(before, optimizer, noise),
        accumulation=_observe_accumulation(subject, rank, data_parallel, first.records, optimizer),
        forward=watch.observed(),
    )


@dataclass
class TrainingRun:
    """What ``train`` observed: one entry per step."""

    losses: list[float] = field(default_factory=list)
    batches: list[str] = field(default_factory=list)
    """Digests of the global batches."""
    labels: list[tuple[int, int]] = field(default_factory=list)
    """Results of ``count_labels``."""


def train(
    subject: Subject,
    device: torch.device,
    steps: range,
    data_parallel: tuple[int, int],
    optimizer: Optimizer | None,
    after_first_backward: Callable[[], None] = lambda: None,
    around_step: Callable[[int], AbstractContextManager[None]] = lambda step: nullcontext(),
    forward: Callable[[Subject, dict[str, Any]], Tensor] = loss_of,
) -> TrainingRun:
    """Train the ``steps`` with dropout off, deterministic algorithms, and a seed per step.

    ``data_parallel`` is the (index, size) of the slice of each batch. ``after_first_backward`` is called before the
    optimizer's first step, ``around_step`` is entered around each step, and ``forward`` returns the loss of its rows.
    Without an optimizer, because nothing is trainable, only the forward runs.
    """
    model, run = subject.model, TrainingRun()
    model.eval()  # switches dropout off, including F.dropout(training=self.training)
    model.zero_grad(set_to_none=True)  # a loader may have run a warm-up backward
    with deterministic():
        for step in steps:
            doing(f"training step {step - steps.start + 1} of {len(steps)}")
            batch = global_batch(subject, step)
            run.batches.append(batch_digest(batch))
            rows = own_rows(batch, step, data_parallel, device)
            run.labels.append(count_labels(rows))
            torch.manual_seed(SEED + step)
            with around_step(step):
                with torch.set_grad_enabled(optimizer is not None):
                    loss = forward(subject, rows)
                run.losses.append(scalar(loss))
                if optimizer is not None:
                    loss.backward()
                    if step == steps.start:
                        after_first_backward()
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
    return run


class _FirstBackward:
    """Observe the gradients between the first backward and the optimizer's first step."""

    def __init__(self, subject: Subject, records: Mapping[str, Record]) -> None:
        self.records = records
        self.gradients: tuple[Comparison, ...] = ()
        self.without_gradient: tuple[str, ...] = ()
        self.norm: float | None = None
        self.norm_problem = ""
        self._subject = subject
        self._own_gradients: dict[str, Tensor] = {}
        """Copies on the CPU, made only if there is no reference to compare with."""
        self._own_noise = 0.0
        self._moved: dict[str, Tensor] = {}

    def observe(self) -> None:
        model = self._subject.model
        gradients = gradients_of(model)
        self.without_gradient = without_gradient(model, gradients)
        self.norm, self.norm_problem = gradient_norm(model, self._subject.clip_grad_norm)
        if self.records:
            self.gradients = compare_gradients(gradients, self.records["gradients"])
        else:
            self._own_gradients = {name: local_part(part.local).to("cpu", copy=True) for name, part in gradients}
            self._own_noise = gradient_noise(model)

    def after_step(self, before: Mapping[str, Tensor]) -> None:
        self._moved = moved_rows(self._subject.model, before)

    def movements(
        self, before: Mapping[str, Tensor], optimizer: Optimizer | None, reference_noise: float
    ) -> tuple[Movement, ...]:
        """Return how far each parameter moved, and how far the reference or its own gradients say it should."""
        if optimizer is None:
            return ()
        model = self._subject.model
        if self.records:
            return movements(model, before, due_by_reference(self.records, reference_noise), self._moved)
        due = due_by_gradients(self._own_gradients, optimizer, self._own_noise)
        return movements(model, before, due, self._moved)


def _open_records(folder: str | None) -> dict[str, Record]:
    if folder is None:
        return {}
    files = {name: record_at(folder, name) for name in RECORDS}
    return {name: Record(file) for name, file in files.items() if file.exists()}


def _compare_updates(
    model: Module, before: Mapping[str, Tensor], records: Mapping[str, Record]
) -> tuple[Comparison, ...]:
    return compare_updates(model, before, records["values"], records["updated"]) if records else ()


def _observe_accumulation(
    subject: Subject,
    rank: Rank,
    data_parallel: tuple[int, int],
    records: Mapping[str, Record],
    optimizer: Optimizer | None,
) -> Accumulation | None:
    """Compare accumulated gradients. Call this after the steps, so that a failure disturbs no other observation."""
    if optimizer is None or not records:
        return None
    if problem := indivisible_batch(subject, data_parallel[1]):
        return Accumulation(problem=problem)
    early = accumulate(subject, rank.device, micro_batches(data_parallel))
    gradients = gradients_of(subject.model)
    missing = without_gradient(subject.model, gradients)
    accumulated = Accumulation(compare_gradients(gradients, records["accumulated"]), missing, early)
    optimizer.zero_grad(set_to_none=True)  # model.zero_grad() does not reach gradient buffers of a wrapper
    subject.model.zero_grad(set_to_none=True)
    reshard(subject.model)
    return accumulated


def _is_unreduced(model: Module) -> bool:
    """Return whether nothing reduces gradients: every parameter is a plain tensor and no DDP wraps the model."""
    parts = parts_of(model)
    plain = not any(isinstance(p, DTensor) or parts.of(name, p).by for name, _, p in named_tensors(model))
    return plain and not any(isinstance(module, DistributedDataParallel) for module in model.modules())
