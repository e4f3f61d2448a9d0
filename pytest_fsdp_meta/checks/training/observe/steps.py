"""Train a model for some steps, and let an observer look at each of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from pytest_fsdp_meta.checks.training.facts import BETWEEN, END, FORWARD, UNKNOWN_DTYPE, UPDATE
from pytest_fsdp_meta.checks.training.observe.author_step import AuthorStep, run_author_step
from pytest_fsdp_meta.checks.training.observe.beside import Beside, make_beside, rates_of
from pytest_fsdp_meta.checks.training.observe.reference import give_buffers
from pytest_fsdp_meta.checks.training.observe.step_watches import BackwardWatch
from pytest_fsdp_meta.checks.training.observe.trained_buffers import BufferWatch
from pytest_fsdp_meta.loader.subject import Subject
from pytest_fsdp_meta.ranks.batches import (
    batch_digest,
    count_labels,
    count_rows,
    global_batch,
    loss_of,
    own_rows,
    scalar,
)
from pytest_fsdp_meta.ranks.generators import seed_all
from pytest_fsdp_meta.ranks.inventory import drop_gradients
from pytest_fsdp_meta.ranks.joined_optimizer import before_steps, parts_of_optimizer, steps_after, train_optimizer
from pytest_fsdp_meta.ranks.modes import comparable_modes, train_model
from pytest_fsdp_meta.worlds import SEED, doing


@dataclass
class TrainingRun:
    """What ``train`` returns: one entry per step."""

    losses: list[float] = field(default_factory=list)
    batches: list[str] = field(default_factory=list)
    """Digests of the global batches."""
    labels: list[tuple[int, int]] = field(default_factory=list)
    """Results of ``count_labels``."""
    rows: int = 0
    """How many rows the slice of the first batch has."""
    loss_dtype: str = ""
    rates: list[tuple[float, ...]] = field(default_factory=list)
    """The learning rate of each parameter group."""
    backwards: list[int] = field(default_factory=list)
    autocast: tuple[str, ...] = ()
    """As in ``RankTraining``."""


class StepObserver:
    """Looks at the steps of ``train``, numbered from 0; this one sees nothing.

    If the author declares the whole step, ``during_forwards`` replaces ``loss_of``, and all gradients are multiplied by
    ``gradient_scale``.
    """

    gradient_scale = 1.0
    buffers: BufferWatch | None = None
    """Hears of what the author's step does."""
    watch: BackwardWatch | None = None
    """Hears of the backwards of the author's step."""

    def around(self, step: int) -> AbstractContextManager[None]:
        """Return a context for the forward, the backward and the optimizer's step."""
        return nullcontext()

    def loss_of(self, subject: Subject, rows: dict[str, Any]) -> Tensor:
        """Return the loss of these rows."""
        return loss_of(subject, rows)

    def during_forwards(self, step: int, rows: dict[str, Any]) -> AbstractContextManager[None]:
        """Return a context for the author's step on these rows, with all its forwards."""
        return nullcontext()

    def after_backward(self, step: int) -> None:
        """Look at the gradients that the optimizer steps with, before its step and its hooks."""

    def take(self, event: str, step: int = 0) -> None:
        """Take the snapshots that are due after this event; after an "update" the gradients are gone."""


def train(
    subject: Subject,
    device: torch.device,
    steps: Sequence[int],
    data_parallel: tuple[int, int],
    optimizer: Optimizer | None,
    observer: StepObserver | None = None,
    beside: Beside | None = None,
    until_loss: bool = False,
) -> TrainingRun:
    """Train the ``steps`` in ``comparable_modes``, with a seed per step.

    The author's step sets the modes itself, if it does; before plain steps, ``train()`` is called as a trainer does.
    ``data_parallel`` is the (index, size) of the slice of each batch. Without an optimizer, because nothing is
    trainable, only the forward runs. What is ``beside`` the model is built where it is not given. With ``until_loss``,
    the last step ends with its loss, unless it is the author's own.
    """
    model, run, observer = subject.model, TrainingRun(), observer or StepObserver()
    beside = beside or make_beside(subject, optimizer)
    step_of = _plain_step if subject.train_step is None or optimizer is None else _author_step
    drop_gradients(model)  # a loader may have run a warm-up backward
    if step_of is _plain_step:
        train_model(model)
        if optimizer is not None:
            train_optimizer(optimizer)
    with comparable_modes(model), noting_autocast(device) as autocast:
        for number, step in enumerate(steps):
            doing(f"training step {number + 1} of {len(steps)}")
            batch = global_batch(subject, step)
            run.batches.append(batch_digest(batch))
            rows = own_rows(batch, step, data_parallel, device)
            run.labels.append(count_labels(rows))
            run.rows = run.rows or count_rows(rows)
            seed_all(SEED + step)
            ended = until_loss and number == len(steps) - 1 and step_of is _plain_step
            updating = None if ended else optimizer
            rates_before = () if optimizer is None else rates_of(optimizer)
            with observer.around(number):
                loss, backwards, rates = step_of(subject, updating, rows, number, observer, beside)
            run.backwards.append(backwards)
            run.rates.append(rates or rates_before)
            run.losses.append(scalar(loss) if isinstance(loss, Tensor) else loss)
            run.loss_dtype = str(loss.dtype).removeprefix("torch.") if isinstance(loss, Tensor) else UNKNOWN_DTYPE
            if updating is not None:
                observer.take("update", number)
                beside.after_step(subject)
    run.autocast = tuple(sorted(autocast))
    if optimizer is not None and step_of is _author_step:
        optimizer.zero_grad(set_to_none=True)  # the author's step may do it first, and leave gradients behind
    return run


def _plain_step(
    subject: Subject, optimizer: Optimizer | None, rows: dict[str, Any], number: int, observer: StepObserver, _: Beside
) -> AuthorStep:
    model = subject.model
    give_buffers(model, number, FORWARD)
    with torch.set_grad_enabled(optimizer is not None):
        loss = observer.loss_of(subject, rows)
    if optimizer is not None:
        looked = list[Optimizer]()  # at the gradients, once: after the backward, before its hooks step optimizers

        def look(part: Optimizer) -> None:
            if looked:
                return
            if subject.max_grad_norm is not None:  # on the reference, because the ranks then have a train_step
                assert subject.clip_grad_norm is not None
                gradients = [parameter for parameter in model.parameters() if parameter.grad is not None]
                subject.clip_grad_norm(gradients, subject.max_grad_norm)
            looked.append(part)
            observer.after_backward(number)

        with ExitStack() as watched:
            for part in parts_of_optimizer(optimizer):
                watched.enter_context(before_steps(part, look))
            with steps_after(optimizer):
                loss.backward()
            look(optimizer)
        give_buffers(model, number, BETWEEN)  # not before the backward, which may need the buffers as they were
        give_buffers(model, number, UPDATE)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        give_buffers(model, number, END)
    return AuthorStep(loss.detach(), int(optimizer is not None))


def _author_step(
    subject: Subject,
    optimizer: Optimizer | None,
    rows: dict[str, Any],
    number: int,
    observer: StepObserver,
    beside: Beside,
) -> AuthorStep:
    assert optimizer is not None
    with observer.during_forwards(number, rows):
        look, scale = partial(observer.after_backward, number), observer.gradient_scale
        return run_author_step(subject, optimizer, rows, number, look, beside, scale, observer.buffers, observer.watch)


@contextmanager
def noting_autocast(device: torch.device) -> Iterator[set[str]]:
    """Yield the dtypes of each ``torch.autocast`` for the device that is entered where gradients are computed."""
    found: set[str] = set()
    enter = torch.autocast.__enter__

    def noting(autocast: torch.autocast) -> Any:
        entered = enter(autocast)
        if torch.is_grad_enabled() and torch.is_autocast_enabled(device.type):
            found.add(str(torch.get_autocast_dtype(device.type)).removeprefix("torch."))
        return entered

    torch.autocast.__enter__ = noting
    try:
        yield found
    finally:
        torch.autocast.__enter__ = enter
