"""Train in the author's modes, and yet so that N ranks and one device can be compared: dropout has probability zero.

Everything else that hangs on ``Module.training`` runs as in training: routers that count, auxiliary losses,
checkpointing that is switched on only there. Functions are patched, because a TorchFunctionMode would be off while a
backward runs, where checkpointing computes again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.nn import Module, functional

from pytest_fsdp_meta.ranks.generators import reproducible
from pytest_fsdp_meta.ranks.module_watch import innermost_modules
from pytest_fsdp_meta.ranks.watching import takes_hooks
from pytest_fsdp_meta.worlds import current

IN_EVALUATION = "in evaluation"
"""A key of a rank's state, present where ranks and reference have to be compared in ``eval()``."""

EVALUATING = "modules in evaluation"
"""A key of the reference's state: the modules that the ranks have in ``eval()`` when they train."""

_BY_NAME = "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"
_BUILT_IN = "dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout"
DROPOUT_FUNCTIONS = (
    *((functional, name) for name in _BY_NAME),
    *((torch, f"{name}{in_place}") for name in _BUILT_IN for in_place in ("", "_")),
    (torch, "native_dropout"),
)
"""(module, name) of functions whose second parameter, ``p``, is the probability to drop an element."""
SKIPPING = "layerdrop", "encoder_layerdrop", "decoder_layerdrop"
"""Attributes of modules, or of their ``config``: the probability to skip a whole layer in training."""
SYNCHRONISING = "cuda", "xpu", "hpu"
"""The types of devices with torch's kernels for SyncBatchNorm."""
BATCH_NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm


@contextmanager
def comparable_modes(model: Module) -> Iterator[None]:
    """Compute what ranks and reference have in common: reproducibly, in the author's modes, without dropout."""
    rank = current()
    with reproducible(rank.device), (evaluating if IN_EVALUATION in rank.state else without_dropout)(model):
        yield


def train_model(model: Module) -> None:
    """Call ``train()``, as a trainer does before plain steps; what the ranks keep in ``eval()`` stays there."""
    named = innermost_modules(model)
    kept = [named[name] for name in (*kept_in_evaluation(model), *current().state.get(EVALUATING, ())) if name in named]
    model.train()
    for module in kept:
        module.training = False


def kept_in_evaluation(model: Module) -> tuple[str, ...]:
    """Return the modules of frozen parts that the loader has put into ``eval()``, beside others that train."""
    frozen = in_frozen_parts(model) if model.training else ()
    return tuple(name for name, inner in innermost_modules(model).items() if id(inner) in frozen and not inner.training)


def in_frozen_parts(model: Module) -> set[int]:
    """Return the identities of the modules whose parameters are all frozen, and of what they contain."""
    frozen = (module for module in model.modules() if {p.requires_grad for p in module.parameters()} == {False})
    return {id(inside) for module in frozen for inside in module.modules()}


@contextmanager
def evaluating(model: Module) -> Iterator[None]:
    """Put the model into ``eval()``, and give ``train()`` of its modules no effect; restore all modes at the end."""
    own, train = {id(module) for module in model.modules()}, Module.train
    with ExitStack() as stack:
        # What trains on from here, as after a checkpoint, is in the author's modes again.
        for module in model.modules():
            stack.callback(setattr, module, "training", module.training)
        model.eval()
        _patch(stack, Module, "train", lambda module, mode=True: module if id(module) in own else train(module, mode))
        yield


@contextmanager
def without_dropout(model: Module) -> Iterator[None]:
    """Give every dropout probability zero, whatever the mode, and keep ``batch_norms`` in ``eval()``."""
    with ExitStack() as stack:
        for holder, name in DROPOUT_FUNCTIONS:
            _patch(stack, holder, name, _never_dropping(getattr(holder, name)))
        attention, by_batch = functional.scaled_dot_product_attention, functional.batch_norm
        _patch(stack, functional, "scaled_dot_product_attention", _attending_to_all(attention))
        _patch(stack, functional, "batch_norm", _normalising_as_kept(by_batch))
        for module in filter(takes_hooks, model.modules()):
            if isinstance(module, nn.RNNBase):
                _patch(stack, module, "dropout", 0.0)
            for holder in (module, _read(module, "config")):
                for name in SKIPPING:
                    if isinstance(_read(holder, name), float):
                        # What cannot be written, such as a frozen config, shows by what it draws.
                        with suppress(Exception):
                            _patch(stack, holder, name, 0.0)
        for module in batch_norms(model).values():
            stack.enter_context(_in_evaluation(module))
        yield


@contextmanager
def with_dropout(model: Module, device: torch.device) -> Iterator[None]:
    """Change nothing, but for SyncBatchNorm where torch cannot train it, as on the CPU: it stays in ``eval()``."""
    with ExitStack() as stack:
        for module in batch_norms(model).values():
            if isinstance(module, nn.SyncBatchNorm) and device.type not in SYNCHRONISING:
                stack.enter_context(_in_evaluation(module))
        yield


def batch_norms(model: Module) -> dict[str, Module]:
    """Return the modules that normalise by statistics of the rows in training, and by kept ones in ``eval()``."""
    kept = ((name, module) for name, module in model.named_modules() if isinstance(module, BATCH_NORMS))
    return {name: module for name, module in kept if getattr(module, "running_mean", None) is not None}


def dropout_fractions(model: Module) -> dict[str, float]:
    """Return the settings of dropouts by the names of the modules and attributes: ``p``, ``attention_dropout``."""
    return {
        f"{name}.{attribute}".removeprefix("."): float(value)
        for name, module in innermost_modules(model).items()
        for attribute, value in vars(module).items()
        if _is_dropout(module, attribute, value)
    }


def _is_dropout(module: Module, attribute: str, value: object) -> bool:
    """Return whether an attribute is the fraction that a dropout drops; an int, 0 or 1, only where it is ``p``."""
    if attribute == "p":
        dropping = type(module).__name__.lower()
        return isinstance(value, (int, float)) and 0 <= value <= 1 and ("drop" in dropping or "depth" in dropping)
    return isinstance(value, float) and 0 <= value <= 1 and "drop" in attribute


@contextmanager
def _in_evaluation(module: Module) -> Iterator[None]:
    """Run the module as in ``eval()``, whatever mode the author sets in the block."""
    modes: list[bool] = []

    def evaluate(*_: Any) -> None:
        modes.append(module.training)
        module.training = False

    def restore(*_: Any) -> None:
        module.training = modes.pop()

    with ExitStack() as hooks:
        hooks.callback(module.register_forward_pre_hook(evaluate).remove)
        hooks.callback(module.register_forward_hook(restore, always_call=True).remove)
        yield


def _read(holder: Any, name: str) -> Any:
    """Return an attribute, or None where reading it raises anything, as in a mapping whose keys are attributes."""
    try:
        return getattr(holder, name, None)
    except Exception:
        return None


def _never_dropping(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def dropout(input: Any, p: Any = 0.5, *args: Any, **kwargs: Any) -> Any:
        return original(input, 0.0, *args, **kwargs)

    return dropout


def _attending_to_all(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def attention(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: Any = 0.0, *args: Any, **kwargs: Any
    ) -> Any:
        return original(query, key, value, attn_mask, 0.0, *args, **kwargs)

    return attention


def _normalising_as_kept(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def batch_norm(
        input: Any,
        running_mean: Any,
        running_var: Any,
        weight: Any = None,
        bias: Any = None,
        training: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        training = training and running_mean is None
        return original(input, running_mean, running_var, weight, bias, training, *args, **kwargs)

    return batch_norm


def _patch(stack: ExitStack, holder: Any, name: str, value: object) -> None:
    before = getattr(holder, name)
    setattr(holder, name, value)
    stack.callback(setattr, holder, name, before)
