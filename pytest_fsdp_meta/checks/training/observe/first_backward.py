"""Watch what the author's first step differentiates: which rows, which losses, and what becomes of the gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module

from pytest_fsdp_meta.checks.training.facts import FirstBackward
from pytest_fsdp_meta.checks.values.observe import comparable, length
from pytest_fsdp_meta.ranks.adapters.dtensor import local_part
from pytest_fsdp_meta.ranks.batches import has_rows
from pytest_fsdp_meta.ranks.inventory import unwrapped
from pytest_fsdp_meta.ranks.module_watch import tensors_in
from pytest_fsdp_meta.ranks.watching import takes_hooks

SAMPLE, SAMPLE_OF_EACH = 65_536, 64
"""About so many elements are kept of the gradient of an output, and looked at of the gradient of each parameter."""
PARALLEL, FLOAT, MOST_STARTS = 1e-5, 4, 8
"""How far the cosine of a multiple may be from 1, the bytes of a loss that is exact enough to be added up, and how many
rows that begin alike are compared as a whole."""


class BackwardWatch:
    """Watches one step, in which the model gets some or all of the ``rows``.

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
