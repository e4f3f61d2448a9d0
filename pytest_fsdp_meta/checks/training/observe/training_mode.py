"""Run one more step as production runs it: in the author's modes, with dropout, from the random state of the loader."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import Module
from torch.nn.modules.module import register_module_forward_pre_hook

from pytest_fsdp_meta.checks.materialisation.observe import LEFT_BY_LOADER, resharded_subject
from pytest_fsdp_meta.checks.random_numbers.observe import watching_draws
from pytest_fsdp_meta.checks.training.facts import RankTrainingMode
from pytest_fsdp_meta.checks.training.observe.author_step import run_author_step
from pytest_fsdp_meta.checks.training.observe.beside import last_beside, last_optimizer
from pytest_fsdp_meta.loader.subject import Subject
from pytest_fsdp_meta.ranks.batches import batch_slice, has_stages, loss_of, rows_of_step
from pytest_fsdp_meta.ranks.generators import changed_generators, read_states, set_states
from pytest_fsdp_meta.ranks.inventory import drop_gradients, reshard, take_inventory
from pytest_fsdp_meta.ranks.joined_optimizer import train_optimizer
from pytest_fsdp_meta.ranks.modes import batch_norms, evaluating, train_model, with_dropout
from pytest_fsdp_meta.ranks.module_watch import innermost_modules
from pytest_fsdp_meta.ranks.poison import deterministic
from pytest_fsdp_meta.text import first_line
from pytest_fsdp_meta.worlds import Rank, cause_of, current, doing

DROPOUT_MODULES = nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout
DROPPING = ("dropout", "bernoulli", "attention")
"""Parts of the names of the operators by which a dropout draws."""


def observe_training_mode() -> RankTrainingMode:
    """Run the step, the author's or a plain one; it changes the model, which nothing is compared with afterwards."""
    rank, subject = current(), resharded_subject()
    data_parallel = batch_slice(subject, rank)
    rows = rows_of_step(subject, 0, data_parallel, rank.device)
    drop_gradients(subject.model)
    if subject.train_step is None:
        train_model(subject.model)
    doing("a step with dropout")
    set_states(rank.state[LEFT_BY_LOADER].torch, rank.device)  # batch() draws, too
    modes = ModeWatch(subject.model)
    with (
        deterministic(),
        with_dropout(subject.model, rank.device),
        modes.watching(),
        watching_draws(subject.model, rank.device) as watch,
    ):
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
            with beside.kept_schedule(optimizer):
                run_author_step(subject, optimizer, rows, 0, lambda: None, beside)
        hidden = watch.hidden
    reshard(subject.model)
    after = None if optimizer is None else take_inventory(subject.model, rank.rank, str(rank.device))
    drew = (watch.draws or hidden) and not has_stages(rank)
    dropping, problem = _drop_in_evaluation(subject, rank, rows) if drew else ((), "")
    draws = tuple(watch.draws)
    return RankTrainingMode(data_parallel, draws, hidden, modes.evaluating(), modes.left(), dropping, problem, after)


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
    draws = (draw for draw in watch.draws if any(part in draw.operator for part in DROPPING))
    return tuple(dict.fromkeys(draw.module for draw in draws)), ""


class ModeWatch:
    """Note the mode of each module whenever it runs with gradients."""

    def __init__(self, model: Module) -> None:
        self._model = model
        self._trained: dict[int, bool] = {}
        """Identity of a module -> whether it ever ran in ``train()``."""
        self._asked = self._asked_before = False
        """Whether ``train()`` was called and had an effect on what learns, at all and before the last forward."""
        self._set = False
        """Whether anybody set a mode before the first forward."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        original, own = Module.train, {id(module) for module in self._model.modules()}
        learning = [module for module in self._model.modules() if _learns(module, recurse=False)]

        def train(module: Module, mode: bool = True) -> Module:
            trained = original(module, mode)
            self._asked |= mode and id(module) in own and any(own.training for own in learning)
            self._set |= id(module) in own and not self._trained
            return trained

        with ExitStack() as stack:
            stack.callback(register_module_forward_pre_hook(self._note).remove)
            stack.callback(setattr, Module, "train", original)
            Module.train = train
            yield

    def _note(self, module: Module, _: Any) -> None:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self._trained[id(module)] = self._trained.get(id(module), False) or module.training
            self._asked_before = self._asked

    def left(self) -> bool:
        """Return what ``RankTrainingMode.left`` describes."""
        return bool(self._trained) and not self._set and not self._model.training

    def evaluating(self) -> tuple[str, ...]:
        """Return the modules that ``RankTrainingMode.evaluating`` describes."""
        modules, norms = innermost_modules(self._model), set(map(id, batch_norms(self._model).values()))
        learning = [name for name, module in modules.items() if _learns(module, recurse=False)]
        ran = {name: self._trained[id(modules[name])] for name in learning if id(modules[name]) in self._trained}
        if not any(ran.values()):
            return ("",) if ran and self._asked_before else ()
        dropouts = {
            name: self._trained[id(module)]
            for name, module in modules.items()
            if isinstance(module, DROPOUT_MODULES) and module.p and id(module) in self._trained
        }
        for name in dropouts if any(dropouts.values()) else ():  # with all of them off, dropout is not wanted
            around = modules.get(name.rpartition(".")[0])  # None where it takes no hooks
            if around is not None and _learns(around, recurse=True):
                ran[name] = dropouts[name]
        own = [f"{name}." for name, module in modules.items() if type(module).train is not Module.train]
        # A batch norm alone is often kept in eval() on purpose.
        left = [name for name, trained in ran.items() if not trained and id(modules[name]) not in norms]
        left = [name for name in left if not any(name.startswith(prefix.lstrip(".")) for prefix in own)]
        return tuple(dict.fromkeys(_outermost(name, ran) for name in left))


def _learns(module: Module, recurse: bool) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters(recurse))


def _outermost(name: str, trained: dict[str, bool]) -> str:
    """Return the outermost module around this one in which nothing trained."""
    parts = name.split(".")
    for end in range(1, len(parts)):
        around = ".".join(parts[:end])
        if not any(own for inside, own in trained.items() if inside.startswith(f"{around}.")):
            return around
    return name
