"""The modes in which modules run: which are in ``eval()`` while others train."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import takewhile
from typing import Any

import torch
from torch import nn
from torch.nn import Module
from torch.nn.modules.module import register_module_forward_hook

from pytest_fsdp_meta.ranks.modes import batch_norms, kept_in_evaluation
from pytest_fsdp_meta.ranks.module_watch import codes_of, innermost_modules

DROPOUT_MODULES = nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout


class ModeWatch:
    """Note the mode of each module whenever it runs with gradients."""

    def __init__(self, model: Module) -> None:
        self._model = model
        self._own = {id(module) for module in model.modules()}
        self._trained: dict[int, bool] = {}
        """Identity of a module -> whether it ever ran in ``train()``."""
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
        if id(module) in self._own and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self._trained[id(module)] = self._trained.get(id(module), False) or module.training
            self._asked_before = self._asked

    def evaluating(self) -> tuple[str, ...]:
        """Return the modules that ``RankTrainingMode.evaluating`` describes."""
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

    def fallen(self) -> bool:
        """Return whether anything that ran in ``train()`` is in ``eval()`` now."""
        return any(not module.training for module in self._model.modules() if self._trained.get(id(module)))

    def left(self, later: ModeWatch) -> tuple[str, ...]:
        """Return the modules that ``RankTrainingMode.left`` describes; ``later`` has watched the next step.

        A step that calls ``train()`` leaves out what it puts into ``eval()`` afterwards.
        """
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
    """Return the modules that ``RankResumed.kept`` describes."""
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
