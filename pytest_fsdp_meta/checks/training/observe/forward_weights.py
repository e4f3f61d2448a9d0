"""Observe whether the forwards of training steps compute with the weights that the optimizer's last step left.

Each rank compares its own shards with its own slices of what was gathered, so that no hook communicates.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.nn import Module

from pytest_fsdp_meta.checks.training.facts import ForwardWeights, StaleWeight
from pytest_fsdp_meta.checks.values.observe import all_equal
from pytest_fsdp_meta.loader.subject import Subject
from pytest_fsdp_meta.ranks.batches import loss_of
from pytest_fsdp_meta.ranks.bits import COMPUTED, is_low
from pytest_fsdp_meta.ranks.inventory import named_modules, named_tensors
from pytest_fsdp_meta.ranks.torch_private import ManagedWeight, managed_weights, sequence_number
from pytest_fsdp_meta.ranks.watching import takes_hooks
from pytest_fsdp_meta.text import clean_name

PADDED_APART, GATHERED, COPIED = "padded apart", "gathered", "copied"
COPYING = ("ToCopy", "Clone", "Mul", "Div", "Add", "Sub", "Cat", "Stack")
"""Beginnings of the names of autograd nodes whose result has its own memory, and which a second backward can pass.
Views have the memory of the weight, and with it the current values."""


class WeightWatch:
    """Watch the weights in the forward of each training step; steps are numbered from 0 in the order of the calls."""

    def __init__(self, model: Module) -> None:
        self._model = model
        self._weights = managed_weights(model)
        self._step = -1
        self._stale: dict[str, StaleWeight] = {}
        self._was_current: set[tuple[int, int, str]] = set()
        """The weights, modules and names whose values in the first forward were the shard's. Where they differ even
        there, the module changes the weight on purpose, for example by adding noise."""

    def loss_of(self, subject: Subject, rows: dict[str, Any]) -> Tensor:
        """Return the loss of the next step's rows as ``batches.loss_of`` does, and watch its forward."""
        with torch.enable_grad():
            node = torch.zeros(1, requires_grad=True).view(1).grad_fn
        assert node is not None
        begin = sequence_number(node) + 1
        with self.next_step():
            loss = loss_of(subject, rows)
        if self._step == 1 and loss.grad_fn is not None:
            self._find_copies(loss.grad_fn, begin)
        return loss

    @contextmanager
    def next_step(self) -> Iterator[None]:
        """Watch all forwards of the next step."""
        self._step += 1
        with ExitStack() as hooks:
            for weight in self._weights:
                for module, name in ((module, name) for module, name in weight.places if takes_hooks(module)):
                    # The last hook of a module runs after FSDP2's, which gathers.
                    hooks.callback(module.register_forward_pre_hook(partial(self._compare, weight, name)).remove)
            yield

    def observed(self) -> ForwardWeights:
        """Return what was observed. Call this after the last step."""
        for weight in self._weights:
            if weight.trainable and weight.whole is not None and not weight.gathers_from_shard():
                for module, name in weight.places:
                    self._add(self._fqn(module, name), PADDED_APART, step=1)
        return ForwardWeights(self._step + 1, tuple(self._stale.values()))

    def _compare(self, weight: ManagedWeight, name: str, module: Module, _: Any) -> None:
        """Compare this rank's slice of what the module registers now with this rank's shard."""
        if torch.compiler.is_compiling() or module._parameters.get(name) is None:
            return
        shard = weight.shard
        if not _is_comparable(shard):
            return  # subclasses may lack the operators even to be sliced
        with torch.no_grad():
            held = weight.own_slice(module._parameters[name])
            if held is None or not held.numel() or not _is_comparable(held):
                return
            current = any(all_equal(held, own.to(held.device, held.dtype)) for own in _as_gathered(shard))
        key = id(weight), id(module), name
        if current and self._step == 0:
            self._was_current.add(key)
        elif not current and key in self._was_current:
            self._add(self._fqn(module, name), GATHERED, self._step)

    def _find_copies(self, loss: Node, begin: int) -> None:
        """Find parameters whose copies, made before the node number ``begin``, are what the loss depends on."""
        names = {id(tensor): name for name, _, tensor in named_tensors(self._model)}
        # Between forwards, modules register the shards of these leaves.
        names |= {id(weight.whole): self._fqn(*weight.places[0]) for weight in self._weights}
        for leaf in _copied_leaves(loss, begin):
            if id(leaf) in names:
                self._add(names[id(leaf)], COPIED, self._step)

    def _fqn(self, module: Module, name: str) -> str:
        prefix = next((path for path, other in named_modules(self._model) if other is module), "")
        return clean_name(f"{prefix}.{name}".removeprefix("."))

    def _add(self, name: str, how: str, step: int) -> None:
        """Record a stale weight once, with its first step; the memory that a group gathers from explains the values."""
        known = self._stale.get(name)
        if known is None or how == PADDED_APART:
            first = step if known is None else known.step
            self._stale[name] = StaleWeight(name, name.rpartition(".")[0], first, how)


def _as_gathered(shard: Tensor) -> Iterator[Tensor]:
    """Yield the shard and, where it has torch's extension that gathers it by its own rules, its roundings."""
    yield shard
    if hasattr(shard, "fsdp_pre_all_gather"):
        yield from (shard.to(dtype) for dtype in COMPUTED if is_low(dtype))


def _is_comparable(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.dtype in COMPUTED and not tensor.is_meta


def _copied_leaves(loss: Node, begin: int) -> Iterator[Tensor]:
    """Yield the leaves that the graph reaches through a copy whose node is older than ``begin``."""
    pending, seen = [(loss, False)], {(loss, False)}
    while pending:
        node, copied = pending.pop()
        leaf = getattr(node, "variable", None)  # of AccumulateGrad, which has the highest number
        if leaf is not None:
            if copied:
                yield leaf
            continue
        copied = copied or (sequence_number(node) < begin and node.name().startswith(COPYING))
        for following, _ in node.next_functions:
            if following is not None and (following, copied) not in seen:
                seen.add((following, copied))
                pending.append((following, copied))
