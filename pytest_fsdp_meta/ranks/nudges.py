"""Round a model's training otherwise: nudge weights, outputs of modules and gradients by one unit in the last place.

What these nudges change in losses, gradients and updates is the noise of the training: another order of summation,
other slices of the batch, or a lower precision change as much. TTrace (arXiv 2506.09280) sets its thresholds so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from pytest_fsdp_meta.ranks.bits import COMPUTED, is_low
from pytest_fsdp_meta.ranks.reference_record import without_repetition
from pytest_fsdp_meta.ranks.torch_private import operator_name, write_count
from pytest_fsdp_meta.ranks.watching import takes_hooks, watching

NONE: Mapping[Tensor, Tensor] = MappingProxyType({})
PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm"})


class Nudges:
    """Nudges of one training of ``model``; another ``seed`` gives others.

    ``computing`` and ``reducing`` are the relative sizes of one unit in the last place of the coarsest dtypes in which
    the loader computes, and reduces gradients. An output of a coarser dtype, as under autocast, is nudged by its own.
    A gradient is reduced from ``addends``, by parameter: the mean size of the gradients that are added up. Where these
    cancel, the error of their rounding is large beside the sum.
    """

    def __init__(
        self, model: Module, computing: float, reducing: float, seed: int, addends: Mapping[Tensor, Tensor] = NONE
    ) -> None:
        self._model = model
        self._unit = computing
        self._reducing = reducing
        self._addends = addends
        self._generators: dict[torch.device, torch.Generator] = {}
        self._seed = seed

    @contextmanager
    def outputs(self) -> Iterator[None]:
        """Nudge the outputs of all modules in each forward, and the gradients of these outputs in each backward."""
        hooks = [
            module.register_forward_hook(self._nudge_output) for module in filter(takes_hooks, self._model.modules())
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @contextmanager
    def weights(self) -> Iterator[None]:
        """Nudge the trainable parameters during the block, and their gradients at its end."""
        trained = [p for p in self._model.parameters() if p.requires_grad and _is_nudged(p)]
        before = [(parameter, parameter.detach().clone()) for parameter in trained]
        with torch.no_grad():
            for parameter, _ in before:
                own = without_repetition(parameter)
                own.copy_(self._nudged(own, self._unit))
        writes = [write_count(parameter) for parameter in trained]
        try:
            yield
            if writes != [write_count(parameter) for parameter in trained]:
                raise RuntimeError("the forward or the backward writes to parameters")
        finally:
            with torch.no_grad():
                for parameter, values in before:
                    without_repetition(parameter).copy_(without_repetition(values, parameter))
        for parameter in trained:
            if parameter.grad is not None and _is_nudged(parameter.grad):
                parameter.grad = self._nudged(
                    parameter.grad, max(self._unit, self._reducing), self._addends.get(parameter)
                )

    def products(self) -> AbstractContextManager[None]:
        """Nudge matrix products in a lower precision than float32, which an optimizer such as Muon computes."""
        return watching(self)

    def before(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Nothing: a watcher's method."""

    def after(self, func: Any, args: Sequence[Any], out: Any) -> None:
        if isinstance(out, Tensor) and _is_nudged(out) and is_low(out.dtype) and operator_name(func) in PRODUCTS:
            out.copy_(self._nudged(out, torch.finfo(out.dtype).eps))

    def _nudge_output(self, module: Module, args: Any, output: Any) -> Any:
        if isinstance(output, Tensor):
            return self._nudge(output)
        if type(output) in (tuple, list):
            return type(output)(self._nudge(part) if isinstance(part, Tensor) else part for part in output)
        return output

    def _nudge(self, output: Tensor) -> Tensor:
        if not _is_nudged(output):
            return output
        unit = max(self._unit, torch.finfo(output.dtype).eps)
        self._unit = unit  # the gradients of weights pass through this dtype as well
        nudged: Tensor = _Nudge.apply(output, self, unit)
        return nudged

    def _nudged(self, tensor: Tensor, unit: float, size: Tensor | None = None) -> Tensor:
        """Return the tensor with each element changed by up to one unit in its last place, or in that of ``size``."""
        if tensor.device not in self._generators:
            self._generators[tensor.device] = torch.Generator(tensor.device).manual_seed(self._seed)
        wide = tensor.double() if tensor.dtype == torch.float64 else tensor.float()
        share = torch.empty_like(wide).uniform_(-1, 1, generator=self._generators[tensor.device])
        # Later steps have other gradients than those that were added up: B = 0 leaves LoRA's A none in the first.
        scale = wide if size is None else torch.maximum(wide.abs(), size)
        return (wide + unit * share * scale).to(tensor.dtype)


class _Nudge(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, nudges: Nudges, unit: float) -> Tensor:
        ctx.nudges, ctx.unit = nudges, unit
        return nudges._nudged(tensor, unit)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.nudges._nudged(gradient, ctx.unit), None, None


def _is_nudged(tensor: Tensor) -> bool:
    """Whether it is an array in a dtype that models compute in."""
    return tensor.dtype in COMPUTED and tensor.layout == torch.strided and not tensor.is_quantized
