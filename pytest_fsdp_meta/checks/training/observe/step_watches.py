"""Observe which weights the forwards of training steps compute with, and what the author's first step differentiates.

Forwards should compute with the weights that the optimizer's last step left. Each rank compares its own shards with its
own slices of what was gathered, so that no hook communicates. Of a backward: which rows and which losses it is of, and
what becomes of the gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.distributed.tensor import DTensor
from torch.nn import Module

from pytest_fsdp_meta.checks.training.facts import FirstBackward, ForwardWeights, StaleWeight
from pytest_fsdp_meta.checks.values.observe import all_equal, comparable, length
from pytest_fsdp_meta.loader.subject import Subject
from pytest_fsdp_meta.ranks.adapters.dtensor import local_part
from pytest_fsdp_meta.ranks.batches import has_rows, loss_of
from pytest_fsdp_meta.ranks.bits import COMPUTED, is_low
from pytest_fsdp_meta.ranks.inventory import named_modules, named_tensors, unwrapped
from pytest_fsdp_meta.ranks.module_watch import tensors_in
from pytest_fsdp_meta.ranks.torch_private import ManagedWeight, managed_weights, sequence_number
from pytest_fsdp_meta.ranks.watching import takes_hooks
from pytest_fsdp_meta.text import clean_name

PADDED_APART, GATHERED, COPIED = "padded apart", "gathered", "copied"
COPYING = ("ToCopy", "Clone", "Mul", "Div", "Add", "Sub", "Cat", "Stack")
"""Beginnings of the names of autograd nodes whose result has its own memory, and which a second backward can pass.
Views have the memory of the weight, and with it the current values."""
SAMPLE, SAMPLE_OF_EACH = 65_536, 64
"""About so many elements are kept of the gradient of an output, and looked at of the gradient of each parameter."""
PARALLEL, FLOAT, MOST_STARTS = 1e-5, 4, 8
"""How far the cosine of a multiple may be from 1, the bytes of a loss that is exact enough to be added up, and how many
rows that begin alike are compared as a whole."""


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


# What the first step of the author's differentiates.


class BackwardWatch:
    """Watch one step, in which the model gets some or all of the ``rows``.

    What it cannot look at is not known: an error of its own would be one of the author's step.
    """

    def __init__(self, model: Module, rows: Mapping[str, Any]) -> None:
        self.samples: dict[str, Tensor] = {}
        """Samples of the gradients that reach what the first forward returned, by path."""
        self.modes: list[tuple[Module, bool]] = []
        """Which modules were in ``train()`` in the first forward."""
        self._model, self._rows = model, rows
        self._parameters = [*model.parameters()]  # FSDP2 gives the modules others while they are gathered
        self._pieces: list[tuple[int, int] | None] = []
        self._values: list[float] = []
        self._norms: list[tuple[float, bool]] = []
        self._gradients = torch.zeros(1, dtype=torch.float64)

    @contextmanager
    def watching(self) -> Iterator[None]:
        module = unwrapped(self._model)
        hook = module.register_forward_hook(self._after_forward, with_kwargs=True) if takes_hooks(module) else None
        with hook or nullcontext():
            yield

    def begin(self, root: Any) -> None:
        """Look at a backward from ``root`` before it runs."""
        self.note_gradients()
        self._values.append(math.nan)
        with suppress(Exception):
            if root.numel() == 1 and not isinstance(root, DTensor) and root.element_size() >= FLOAT:
                self._values[-1] = float(root.detach())

    def note_gradients(self) -> None:
        """Note the norm of this rank's gradients, and whether they are a multiple of those noted before."""
        norm, sample = math.nan, [torch.zeros(1, dtype=torch.float64)]
        with suppress(Exception):
            found = [comparable(local_part(p.grad.detach())) for p in self._parameters if p.grad is not None]
            sample += [own.flatten()[:SAMPLE_OF_EACH].double().cpu() for own in found]
            norm = math.hypot(*map(length, found))
        before, self._gradients = self._gradients, torch.cat(sample)
        lengths = float(before.norm() * self._gradients.norm())
        alike = before.shape == self._gradients.shape and float(before @ self._gradients) > (1 - PARALLEL) * lengths
        self._norms.append((norm, alike))

    def observed(self) -> FirstBackward:
        """Return what was seen: the pieces only if the rows of each forward are known, and each has a backward."""
        pieces = [piece for piece in self._pieces if piece is not None]
        rows = {len(value) for value in self._rows.values() if has_rows(value)}
        known = len(rows) == 1 and len(pieces) == len(self._pieces)
        if len(pieces) > len(self._values):  # several forwards of the same rows, as of two views, for one backward
            pieces = [piece for piece, _ in groupby(pieces)]
        known = known and len(pieces) == len(self._values)
        return FirstBackward(tuple(pieces) if known else (), tuple(self._values), tuple(self._norms))

    def __deepcopy__(self, _: object) -> BackwardWatch:
        return self  # a step may copy a module with its hooks

    def _after_forward(self, module: Module, args: Any, kwargs: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        self._pieces.append(None)
        with suppress(Exception):
            inputs = [tensor for _, tensor in tensors_in({**dict(enumerate(args)), **kwargs})]
            self._pieces[-1] = next(filter(None, (_find_rows(own, self._rows) for own in inputs)), None)
            if len(self._pieces) == 1:
                self.modes = [(module, module.training) for module in self._model.modules()]
            for path, tensor in tensors_in(output) if len(self._pieces) == 1 else ():
                if tensor.grad_fn is not None:  # a hook on a leaf would stay
                    tensor.register_hook(lambda gradient, path=path: self._keep(path, gradient))

    def _keep(self, path: str, gradient: Tensor) -> None:
        with suppress(Exception):
            if path not in self.samples:
                flat = comparable(local_part(gradient.detach())).flatten()
                self.samples[path] = flat[:: len(flat) // SAMPLE | 1].double().cpu()  # an odd stride visits all columns


def _find_rows(tensor: Tensor, rows: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the half-open range of the rows that begin like those of the tensor; None if there is none, or several."""
    for value in rows.values():
        plain = type(value) is type(tensor) is Tensor and value.device == tensor.device
        numbers = plain and torch.bool not in (value.dtype, tensor.dtype)
        if not numbers or not value.ndim == tensor.ndim > 0 or not 0 < len(tensor) <= len(value):
            continue
        begun = value[tuple(map(slice, (len(value), *tensor.shape[1:])))].to(tensor.dtype)  # labels may be shifted
        if begun.shape[1:] != tensor.shape[1:] or value.is_floating_point() != tensor.is_floating_point():
            continue
        alike = (begun.flatten(1) == tensor[:1].flatten(1)).all(dim=1) if tensor.ndim > 1 else begun == tensor[:1]
        starts = alike[: len(value) - len(tensor) + 1].nonzero().flatten()[:MOST_STARTS].tolist()
        found = [start for start in starts if torch.equal(begun[start : start + len(tensor)], tensor)]
        if len(found) == 1 and len(starts) < MOST_STARTS:
            return found[0], found[0] + len(tensor)
    return None
