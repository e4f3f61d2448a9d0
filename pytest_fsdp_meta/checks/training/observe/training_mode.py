"""Run one more step as production runs it: in the author's modes, with dropout, from the random state of the loader."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.optim import Optimizer

from pytest_fsdp_meta.checks.materialisation.observe import LEFT_BY_LOADER, LEFT_IN_TRAINING, resharded_subject
from pytest_fsdp_meta.checks.random_numbers.facts import Draw
from pytest_fsdp_meta.checks.random_numbers.observe import watching_draws
from pytest_fsdp_meta.checks.training.facts import RankTrainingMode
from pytest_fsdp_meta.checks.training.observe.author_step import on_any_rank, run_author_step
from pytest_fsdp_meta.checks.training.observe.beside import last_beside, last_optimizer
from pytest_fsdp_meta.checks.training.observe.mode_watch import ModeWatch
from pytest_fsdp_meta.loader.subject import Subject
from pytest_fsdp_meta.ranks.batches import batch_slice, has_stages, loss_of, rows_of_step
from pytest_fsdp_meta.ranks.generators import States, changed_generators, describe_state, read_states, set_all
from pytest_fsdp_meta.ranks.inventory import drop_gradients, reshard, take_inventory
from pytest_fsdp_meta.ranks.joined_optimizer import train_optimizer
from pytest_fsdp_meta.ranks.modes import evaluating, train_model, with_dropout
from pytest_fsdp_meta.ranks.poison import deterministic
from pytest_fsdp_meta.text import first_line
from pytest_fsdp_meta.worlds import Rank, cause_of, current, doing

DROPPING = ("dropout", "bernoulli_", "attention")
"""Parts of the names of the operators by which a dropout draws. ``bernoulli``, by given probabilities, is none."""


def observe_training_mode() -> RankTrainingMode:
    """Run the step, the author's or a plain one; it changes the model, which nothing is compared with afterwards.

    A module that the author's step leaves in ``eval()`` shows in a second one, and so does a seed that it sets.
    """
    rank, subject = current(), resharded_subject()
    data_parallel = batch_slice(subject, rank)
    # Both now, because batch() is called under a seed; others for the next step, which may seed by its rows.
    rows, next_rows = (rows_of_step(subject, step, data_parallel, rank.device) for step in range(2))
    drop_gradients(subject.model)
    if subject.train_step is None:
        train_model(subject.model)
    else:
        for module in rank.state[LEFT_IN_TRAINING]:  # earlier steps may have ended in eval()
            module.training = True
    doing("a step with dropout")
    set_all(rank.state[LEFT_BY_LOADER], rank.device)  # batch() draws, too
    modes, trains = ModeWatch(subject.model), any(p.requires_grad for p in subject.model.parameters())
    with ExitStack() as kept:
        with modes.watching(), watching_draws(subject.model, rank.device, trains) as watch:
            optimizer = _step_with_dropout(subject, rank, rows, kept)
            hidden = watch.hidden
        reshard(subject.model)
        after = None if optimizer is None else take_inventory(subject.model, rank.rank, str(rank.device))
        left, repeating = _compare_with_next_step(subject, rank, next_rows, modes, watch.draws, trains)
    drew = (watch.draws or hidden) and not has_stages(rank)
    dropping, problem = _drop_in_evaluation(subject, rank, rows) if drew else ((), "")
    draws = tuple(watch.draws)
    return RankTrainingMode(data_parallel, draws, hidden, modes.evaluating(), left, dropping, problem, after, repeating)


def _compare_with_next_step(
    subject: Subject, rank: Rank, rows: dict[str, Any], modes: ModeWatch, draws: Sequence[Draw], trains: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return what ``RankTrainingMode.left`` and ``repeating`` describe, by one more of the author's steps if needed."""
    if subject.train_step is None:
        return (), ()
    fallen = on_any_rank(trains and modes.fallen())
    if not fallen and not on_any_rank(trains and bool(draws)):
        return (), ()
    doing("a second step with dropout")
    next_modes, begun = ModeWatch(subject.model), read_states(rank.device)
    with next_modes.watching(), watching_draws(subject.model, rank.device, trains) as watch:
        _step_with_dropout(subject, rank, rows)
    moved = changed_generators(rank.state[LEFT_BY_LOADER].torch, begun)
    repeating = _repeated(draws, watch.draws, moved) or _returning(watch.draws, moved, begun, read_states(rank.device))
    return modes.left(next_modes) if fallen else (), repeating


def _step_with_dropout(
    subject: Subject, rank: Rank, rows: dict[str, Any], kept: ExitStack | None = None
) -> Optimizer | None:
    """Run a step as in production; return the optimizer, or None if nothing is trainable.

    With ``kept``, the schedule begins again until that stack is closed, so that the next step continues it.
    """
    with deterministic(), with_dropout(subject.model, rank.device):
        optimizer = last_optimizer(subject, rank)
        if optimizer is None:
            with torch.no_grad():
                loss_of(subject, rows)
        elif subject.train_step is None:
            train_optimizer(optimizer)
            loss_of(subject, rows).backward()
            optimizer.step()
        else:
            beside = last_beside(subject, rank, optimizer)
            if kept is not None:
                kept.enter_context(beside.kept_schedule(optimizer))
            run_author_step(subject, optimizer, rows, 0, lambda: None, beside)
    return optimizer


def _repeated(first: Sequence[Draw], second: Sequence[Draw], generators: Collection[str]) -> tuple[str, ...]:
    """Return the modules that draw in the second step, if all draws from these generators repeat those of the first.

    Of other generators, which are in their first state again as after fork_rng(), only dropouts count: noise may be
    fixed.
    """
    states, later = (
        {
            (d.module, d.call, d.operator, d.shape): d.state
            for d in draws
            if not d.again and (d.generator in generators or _drops(d))
        }
        for draws in (first, second)
    )
    repeated = all(states.get(key) == state for key, state in later.items())
    return tuple(dict.fromkeys(module for module, *_ in later)) if repeated else ()


def _returning(draws: Sequence[Draw], generators: Collection[str], begun: States, ended: States) -> tuple[str, ...]:
    """Return the modules that draw from a generator that the step leaves as it was: the next step draws the same."""
    first = {draw.generator: draw.state for draw in reversed(draws)}
    left = changed_generators(begun, ended)
    back = [kind for kind in generators if kind not in left and first.get(kind) == describe_state(begun[kind])]
    return tuple(dict.fromkeys(draw.module for draw in draws if draw.generator in back and not draw.again))


def _drop_in_evaluation(subject: Subject, rank: Rank, rows: dict[str, Any]) -> tuple[tuple[str, ...], str]:
    """Return the modules that drop elements in ``eval()``, or why the forward fails there."""
    model, before = subject.model, read_states(rank.device)
    doing("a forward in eval()")
    try:
        with deterministic(), evaluating(model), torch.no_grad(), watching_draws(model, rank.device) as watch:
            loss_of(subject, rows)
    except Exception as error:  # of any type: some models return no loss in eval()
        cause = cause_of(error)
        return (), f"{type(cause).__name__}: {first_line(cause)}"
    finally:
        reshard(model)
    if not changed_generators(before, read_states(rank.device)):
        return (), ""
    return tuple(dict.fromkeys(draw.module for draw in watch.draws if _drops(draw))), ""


def _drops(draw: Draw) -> bool:
    return any(part in draw.operator for part in DROPPING)
