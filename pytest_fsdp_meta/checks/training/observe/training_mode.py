"""Run one more step as production runs it: in the author's modes, with dropout, from the random state of the loader."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import takewhile
from typing import Any

import torch
from torch import nn
from torch.nn import Module
from torch.nn.modules.module import register_module_forward_hook
from torch.optim import Optimizer

from pytest_fsdp_meta.checks.materialisation.observe import LEFT_BY_LOADER, LEFT_IN_TRAINING, resharded_subject
from pytest_fsdp_meta.checks.random_numbers.facts import Draw
from pytest_fsdp_meta.checks.random_numbers.observe import watching_draws
from pytest_fsdp_meta.checks.training.facts import RankTrainingMode
from pytest_fsdp_meta.checks.training.observe.author_step import describe_cause, on_any_rank, run_author_step
from pytest_fsdp_meta.checks.training.observe.beside import last_beside, last_optimizer
from pytest_fsdp_meta.loader.subject import Subject
from pytest_fsdp_meta.ranks.batches import batch_slice, has_stages, loss_of, rows_of_step
from pytest_fsdp_meta.ranks.bits import deterministic
from pytest_fsdp_meta.ranks.generators import States, changed_generators, describe_state, read_states, set_all
from pytest_fsdp_meta.ranks.inventory import drop_gradients, reshard, take_inventory
from pytest_fsdp_meta.ranks.joined_optimizer import train_optimizer
from pytest_fsdp_meta.ranks.modes import (
    batch_norms,
    evaluating,
    in_frozen_parts,
    kept_in_evaluation,
    train_model,
    with_dropout,
)
from pytest_fsdp_meta.ranks.module_watch import codes_of, innermost_modules
from pytest_fsdp_meta.worlds import Rank, current, doing

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
        frozen = in_frozen_parts(subject.model)  # the author's first step may have put such a part into eval() for good
        for module in rank.state[LEFT_IN_TRAINING]:  # earlier steps may have ended there
            module.training |= id(module) not in frozen
    doing("a step with dropout")
    set_all(rank.state[LEFT_BY_LOADER], rank.device)  # batch() draws, too
    modes, trains = ModeWatch(subject.model), any(p.requires_grad for p in subject.model.parameters())
    with ExitStack() as kept:
        with modes.watching(), watching_draws(subject.model, rank.device, trains) as watch:
            optimizer = _step_with_dropout(subject, rank, rows, kept)
            hidden = watch.hidden
        reshard(subject.model)
        after = None if optimizer is None else take_inventory(subject.model, rank.rank, str(rank.device))
        left, repeating, norms = _compare_with_next_step(subject, rank, next_rows, modes, watch.draws, trains)
    drew = (watch.draws or hidden) and not has_stages(rank)
    dropping, problem = _drop_in_evaluation(subject, rank, rows) if drew else ((), "")
    draws = tuple(watch.draws)
    mode = RankTrainingMode(data_parallel, draws, hidden, modes.evaluating(), left, dropping, problem, after, repeating)
    return replace(
        mode,
        frozen_in_train=modes.frozen_in_train(),
        frozen_dropping=modes.frozen_dropping(),
        norms_in_eval=norms,
    )


def _compare_with_next_step(
    subject: Subject, rank: Rank, rows: dict[str, Any], modes: ModeWatch, draws: Sequence[Draw], trains: bool
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Return ``left``, ``repeating`` and ``norms_in_eval``, by one more of the author's steps if needed."""
    norms = modes.norms_in_eval()
    if subject.train_step is None:
        return (), (), norms
    fallen = on_any_rank(trains and modes.fallen())
    if not fallen and not on_any_rank(trains and bool(draws)):
        return (), (), norms
    doing("a second step with dropout")
    next_modes, begun = ModeWatch(subject.model), read_states(rank.device)
    with next_modes.watching(), watching_draws(subject.model, rank.device, trains) as watch:
        _step_with_dropout(subject, rank, rows)
    moved = changed_generators(rank.state[LEFT_BY_LOADER].torch, begun)
    repeating = _repeated(draws, watch.draws, moved) or _returning(watch.draws, moved, begun, read_states(rank.device))
    return modes.left(next_modes) if fallen else (), repeating, (*norms, *next_modes.norms_in_eval())


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
        return (), describe_cause(error)
    finally:
        reshard(model)
    if not changed_generators(before, read_states(rank.device)):
        return (), ""
    return tuple(dict.fromkeys(draw.module for draw in watch.draws if _drops(draw))), ""


def _drops(draw: Draw) -> bool:
    return any(part in draw.operator for part in DROPPING)


DROPOUT_MODULES = nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout


class ModeWatch:
    """Note in which mode each module runs, and apart from that in which it runs with gradients."""

    def __init__(self, model: Module) -> None:
        self._model = model
        self._own = {id(module) for module in model.modules()}
        self._trained: dict[int, bool] = {}
        """Identity of a module -> whether it ever ran in ``train()``, with gradients."""
        self._ran_in_train = set[int]()
        self._asked = self._asked_before = False
        """Whether ``train()`` was called and had an effect on what learns, at all and before the last forward."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        original = Module.train
        learning = [module for module in self._model.modules() if _learns(module, recurse=False)]

        def train(module: Module, mode: bool = True) -> Module:
            trained = original(module, mode)
            self._asked |= mode and id(module) in self._own and any(own.training for own in learning)
            return trained

        with ExitStack() as stack:
            stack.callback(register_module_forward_hook(self._note).remove)
            stack.callback(setattr, Module, "train", original)
            Module.train = train
            yield

    def _note(self, module: Module, *_: Any) -> None:
        """Note the mode after the forward: hooks before it may set it."""
        if id(module) not in self._own or torch.compiler.is_compiling():
            return
        if module.training:
            self._ran_in_train.add(id(module))
        if torch.is_grad_enabled():
            self._trained[id(module)] = self._trained.get(id(module), False) or module.training
            self._asked_before = self._asked

    def evaluating(self) -> tuple[str, ...]:
        ran, between = self._ran()
        if not any(ran.values()):
            return ("",) if ran and self._asked_before else ()
        if any(between.values()):  # with all of them off, dropout is not wanted
            ran |= between
        return self._parts([name for name, trained in ran.items() if not trained], ran)

    def ran_in_eval(self) -> tuple[str, ...]:
        """Return the outermost modules that act by their mode and ran in ``eval()``, whatever the others did."""
        learning, between = self._ran()
        ran = learning | between
        return self._parts([name for name, trained in ran.items() if not trained], ran)

    def frozen_in_train(self) -> tuple[str, ...]:
        ran = ((name, m) for name, m in innermost_modules(self._model).items() if id(m) in self._ran_in_train)
        return tuple(name for name, module in ran if module._buffers and not _learns(module, recurse=True))

    def frozen_dropping(self) -> tuple[str, ...]:
        frozen, modules = in_frozen_parts(self._model), innermost_modules(self._model).items()
        ran = ((name, m) for name, m in modules if id(m) in frozen and id(m) in self._ran_in_train)
        return tuple(name for name, module in ran if _acts_by_mode(module))

    def norms_in_eval(self) -> tuple[str, ...]:
        norms = {*batch_norms(self._model).values()}
        modules = innermost_modules(self._model)
        ran = ((name, m) for name, m in modules.items() if m in norms and self._trained.get(id(m)) is False)
        around = ((name, m, modules.get(name.rpartition(".")[0], m)) for name, m in ran)
        return tuple(n for n, m, part in around if _learns(part, True) and not isinstance(m, nn.SyncBatchNorm))

    def fallen(self) -> bool:
        """Return whether anything that ran in ``train()`` is in ``eval()`` now."""
        return any(not module.training for module in self._model.modules() if self._trained.get(id(module)))

    def left(self, later: ModeWatch) -> tuple[str, ...]:
        """``later`` has watched the next step; where that calls ``train()``, what is in ``eval()`` is left out."""
        if later._asked_before:
            return ()
        before, (ran, between) = ChainMap(*self._ran()), later._ran()
        if ran and not any(ran.values()) and any(before.values()):
            return ("",)
        ran |= between
        return self._parts([name for name, trained in ran.items() if before.get(name) and not trained], ran)

    def _ran(self) -> tuple[dict[str, bool], dict[str, bool]]:
        """Map what ran to whether it did in ``train()``: what learns, and what acts by its mode between that."""
        modules = innermost_modules(self._model)
        ran = {name: self._trained[id(module)] for name, module in modules.items() if id(module) in self._trained}
        learning = {name: trained for name, trained in ran.items() if _learns(modules[name], recurse=False)}
        between = {
            name: trained
            for name, trained in ran.items()
            if not any(True for _ in modules[name].parameters())
            and _acts_by_mode(modules[name])
            and (around := modules.get(name.rpartition(".")[0])) is not None  # it is where it takes no hooks
            and _learns(around, recurse=True)
        }
        return learning, between

    def _parts(self, names: Sequence[str], ran: Mapping[str, bool]) -> tuple[str, ...]:
        """Return the outermost modules around these in which nothing trained, if anything in them acts by its mode."""
        if not names:
            return ()
        modules, norms = innermost_modules(self._model), set(map(id, batch_norms(self._model).values()))
        # A batch norm alone is often kept in eval() on purpose.
        kept = norms | _kept_by_own_train(self._model)
        parts = dict.fromkeys(_outermost(name, ran) for name in names if id(modules[name]) not in kept)
        return tuple(part for part in parts if part not in modules or any(map(_acts_by_mode, modules[part].modules())))


def kept_by_mode(model: Module) -> tuple[str, ...]:
    modules, norms = innermost_modules(model), set(batch_norms(model).values())
    return tuple(name for name in kept_in_evaluation(model) if modules[name] in norms or _acts_by_mode(modules[name]))


def _learns(module: Module, recurse: bool) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters(recurse))


def _kept_by_own_train(model: Module) -> set[int]:
    """Return the modules that are in ``eval()`` after ``train()`` of a class that overrides it."""
    if all(type(module).train is Module.train for module in model.modules()):
        return set()
    before = {module: module.training for module in model.modules()}
    model.train()
    kept = {id(module) for module in model.modules() if not module.training}
    for module, mode in before.items():
        module.training = mode
    return kept


def _acts_by_mode(module: Module) -> bool:
    """Return whether the module itself does something else in ``train()``; batch norms do not count."""
    if isinstance(module, DROPOUT_MODULES):
        return bool(module.p)
    if isinstance(module, (nn.RNNBase, nn.MultiheadAttention)):
        return bool(module.dropout)
    bases = takewhile(lambda base: base is not Module, type(module).__mro__)
    authors = [base for base in bases if not base.__module__.startswith("torch.")]
    functions = (own for base in authors for own in vars(base).values() if callable(own))
    return any("training" in code.co_names for function in functions for code in codes_of(function))


def _outermost(name: str, trained: Mapping[str, bool]) -> str:
    """Return the outermost module around this one in which nothing trained."""
    parts = name.split(".")
    for end in range(1, len(parts)):
        around = ".".join(parts[:end])
        if not any(own for inside, own in trained.items() if inside.startswith(f"{around}.")):
            return around
    return name
