"""Observe the random numbers of one step in training mode, from the random state that the loader left on each rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pytest_fsdp_meta.checks.materialisation.observe import LEFT_BY_LOADER, resharded_subject
from pytest_fsdp_meta.checks.random_numbers.facts import RandomState, RankTrainingMode
from pytest_fsdp_meta.checks.random_numbers.observe.draws import watching_draws
from pytest_fsdp_meta.checks.training.observe.author_step import run_author_step
from pytest_fsdp_meta.checks.training.observe.beside import make_beside
from pytest_fsdp_meta.loader.subject import Subject
from pytest_fsdp_meta.ranks.batches import batch_slice, global_batch, loss_of, own_rows
from pytest_fsdp_meta.ranks.generators import (
    describe_state,
    draw_from_all,
    read_states,
    seed_of,
    set_states,
)
from pytest_fsdp_meta.ranks.inventory import drop_gradients, reshard
from pytest_fsdp_meta.ranks.optimizers import make_optimizer
from pytest_fsdp_meta.ranks.poison import deterministic
from pytest_fsdp_meta.worlds import Rank, current, doing


def observe_training_mode() -> RankTrainingMode:
    """Run the author's step in training mode, or only a forward, which draws all that a plain step draws.

    The author's step changes the model, so no other observation may follow on it.
    """
    rank, subject = current(), resharded_subject()
    data_parallel = batch_slice(subject, rank)
    rows = own_rows(global_batch(subject, 0), 0, data_parallel, rank.device)
    drop_gradients(subject.model)
    subject.model.train()
    doing("a step in training mode")
    set_states(rank.state[LEFT_BY_LOADER].torch, rank.device)  # batch() draws, too
    with deterministic(), watching_draws(subject.model, rank.device) as watch:
        _run_step(subject, rank, rows)
        hidden = watch.hidden
    reshard(subject.model)
    return RankTrainingMode(data_parallel, tuple(watch.draws), hidden)


def _run_step(subject: Subject, rank: Rank, rows: dict[str, object]) -> None:
    # What is "beside" belongs to the optimizer that was made last.
    made = rank.state.get("resumable") or rank.state.get("optimizer")
    optimizer = None if subject.train_step is None else made or make_optimizer(subject)
    if optimizer is None:
        with torch.set_grad_enabled(any(parameter.requires_grad for parameter in subject.model.parameters())):
            loss_of(subject, rows)
    else:
        beside = rank.state.get("beside") or make_beside(subject, optimizer)
        handed = beside.arguments(subject, subject.train_step)
        run_author_step(subject, optimizer, rows, 0, lambda: None, handed, training=True)


@contextmanager
def observing_save(subject: Subject, rank: Rank, found: dict[str, RandomState]) -> Iterator[None]:
    """Enter into ``found`` the generators before and after the author's save().

    They have the state of a training: that of the loader, advanced by another amount on each slice of the batch, since
    rows of other lengths draw other amounts. Ranks of one slice stay as alike as the loader left them.
    """
    index, _ = batch_slice(subject, rank)
    with _observing_generators(subject, rank, found, draws=1 + index):
        yield


@contextmanager
def observing_resume(subject: Subject, rank: Rank, found: dict[str, RandomState]) -> Iterator[None]:
    """Enter into ``found`` the generators before and after the author's resume(), which finds them as loaded."""
    with _observing_generators(subject, rank, found, draws=0):
        yield


@contextmanager
def _observing_generators(subject: Subject, rank: Rank, found: dict[str, RandomState], draws: int) -> Iterator[None]:
    if subject.save is None:  # torch.distributed.checkpoint keeps no random state
        yield
        return
    set_states(rank.state[LEFT_BY_LOADER].torch, rank.device)
    draw_from_all(draws, rank.device)
    before = read_states(rank.device)
    yield
    for kind, state in read_states(rank.device).items():
        found[kind] = RandomState(describe_state(before[kind]), describe_state(state), seed_of(kind))
