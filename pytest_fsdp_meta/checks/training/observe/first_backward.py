"""Watch what the author's first step differentiates: which rows, from which loss, and how long the gradients become."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module

from pytest_fsdp_meta.checks.training.facts import FirstBackward
from pytest_fsdp_meta.checks.values.observe import comparable
from pytest_fsdp_meta.ranks.adapters.dtensor import local_part
from pytest_fsdp_meta.ranks.inventory import unwrapped
from pytest_fsdp_meta.ranks.module_watch import tensors_in
from pytest_fsdp_meta.ranks.watching import takes_hooks

SAMPLE = 65_536
"""Elements that are kept of the gradient of an output."""
SAMPLE_OF_EACH, PARALLEL = 64, 1e-5
"""Elements that are looked at of the gradient of each parameter, and how far the cosine of a multiple may be from 1."""


class BackwardWatch:
    """Watches one step, in which the model gets some or all of the ``rows``."""

    def __init__(self, model: Module, rows: Mapping[str, Any]) -> None:
        self.samples: dict[str, Tensor] = {}
        """Samples of the gradients that reach what the first forward returned, by path."""
        self._model, self._rows = model, rows
        self._parameters = [*model.parameters()]  # FSDP2 gives the modules others while they are gathered
        self._pieces: list[tuple[int, int] | None] = []
        self._value: float | None = None
        self._lengths: list[tuple[float, bool]] = []
        self._gradients = torch.zeros(1)

    @contextmanager
    def watching(self) -> Iterator[None]:
        module = unwrapped(self._model)
        hook = module.register_forward_hook(self._after_forward, with_kwargs=True) if takes_hooks(module) else None
        with hook or nullcontext():
            yield

    def begin(self, root: Any) -> None:
        """Look at a backward from ``root`` before it runs."""
        self.note_gradients()
        if self._value is None:
            plain = isinstance(root, Tensor) and root.numel() == 1 and not isinstance(root, DTensor)
            self._value = float(root.detach()) if plain else math.nan

    def note_gradients(self) -> None:
        """Note how long the gradients are on this rank, and whether they are a multiple of those noted before."""
        gradients = [p.grad for p in self._parameters if p.grad is not None and not p.grad.is_sparse]
        found = [comparable(local_part(gradient.detach())).float() for gradient in gradients]
        length = float(torch.nn.utils.get_total_norm(found)) if found else 0.0
        sample = torch.cat([torch.zeros(1), *(own.flatten()[:SAMPLE_OF_EACH].cpu() for own in found)])
        before, self._gradients = self._gradients, sample
        alike = before.shape == sample.shape and float(torch.cosine_similarity(before, sample, dim=0)) > 1 - PARALLEL
        self._lengths.append((length, alike))

    def observed(self) -> FirstBackward | None:
        """Return what was seen; None unless the rows of each forward are known, and each micro-batch has a backward."""
        pieces = [piece for piece, _ in groupby(self._pieces) if piece is not None]  # some losses take two forwards
        if None in self._pieces or self._value is None or len(self._lengths) != 2 * len(pieces) + 1:
            return None
        return FirstBackward(tuple(pieces), self._value, tuple(self._lengths))

    def __deepcopy__(self, _: object) -> BackwardWatch:
        return self  # a step may copy a module with its hooks

    def _after_forward(self, module: Module, args: Any, kwargs: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        inputs = [tensor for _, tensor in tensors_in({**dict(enumerate(args)), **kwargs})]
        self._pieces.append(next(filter(None, (_find_rows(own, self._rows) for own in inputs)), None))
        if len(self._pieces) == 1:
            self._keep_gradients(output)

    def _keep_gradients(self, output: Any) -> None:
        def keep(path: str, gradient: Tensor) -> None:
            flat = comparable(local_part(gradient.detach())).flatten()
            self.samples.setdefault(path, flat[:: max(1, len(flat) // SAMPLE)].double().cpu())

        for path, tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient, path=path: keep(path, gradient))


def _find_rows(tensor: Tensor, rows: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the half-open range of the rows that begin like those of the tensor; None if there is none, or several."""
    for value in rows.values():
        plain = type(value) is type(tensor) is Tensor and value.device == tensor.device
        if not plain or not value.ndim == tensor.ndim > 0 or not 0 < len(tensor) <= len(value):
            continue
        begun = value[tuple(map(slice, (len(value), *tensor.shape[1:])))].to(tensor.dtype)  # labels may be shifted
        starts = range(len(value) - len(tensor) + 1) if begun.shape[1:] == tensor.shape[1:] else ()
        found = [start for start in starts if torch.equal(begun[start : start + len(tensor)], tensor)]
        if len(found) == 1:
            return found[0], found[0] + len(tensor)
    return None
