"""Read the gradients that a rank has after a backward, and their norm as gradient clipping computes it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter

from pytest_fsdp_meta.loader.adapter import Part
from pytest_fsdp_meta.loader.subject import SubjectError
from pytest_fsdp_meta.observers.adapters.dtensor import local_part
from pytest_fsdp_meta.observers.adapters.lookup import parts_of
from pytest_fsdp_meta.observers.batches import calling
from pytest_fsdp_meta.observers.inventory import named_tensors
from pytest_fsdp_meta.text import first_line

ClipGradNorm = Callable[[Iterable[Parameter], float], object]


def gradients_of(model: Module) -> list[tuple[str, Part]]:
    """Return this rank's part of every gradient, laid out like its parameter."""
    parts = parts_of(model)
    named = ((name, parts.gradient(name, tensor)) for name, kind, tensor in named_tensors(model) if kind == "parameter")
    return [(name, part) for name, part in named if part is not None]


def without_gradient(model: Module, gradients: Iterable[tuple[str, Part]]) -> tuple[str, ...]:
    """Return the trainable parameters with a non-empty shard on this rank that are not among the ``gradients``."""
    parts, known = parts_of(model), {name for name, _ in gradients}
    trainable = ((name, t) for name, kind, t in named_tensors(model) if kind == "parameter" and t.requires_grad)
    return tuple(name for name, t in trainable if name not in known and parts.of(name, t).local.numel())


def gradient_norm(model: Module, own: ClipGradNorm | None) -> tuple[float | None, str]:
    """Return (the norm of all gradients, why there is none) and leave the gradients unchanged.

    ``own`` is the author's function, which clips like ``clip_grad_norm_``; without it torch computes the norm.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    if own is None and isinstance(model, FullyShardedDataParallel):
        own = partial(_clip_fsdp1, model)
    if own is not None:
        return _norm_by_clipping(own, parameters), ""
    by = next((part.by for _, part in gradients_of(model) if part.by and part.placements is None), "")
    if by:
        return None, f"ranks hold parts of some gradients, as {by} says"
    try:
        with torch.no_grad():
            # clip_grad_norm_ computes this norm and then scales the gradients by it.
            return _as_number(torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])), ""
    except Exception as error:  # torch raises many types for meshes or kinds of tensors that it cannot mix
        return None, f"{type(error).__name__}: {first_line(error)}"


def _clip_fsdp1(model: FullyShardedDataParallel, _: Iterable[Parameter], bound: float) -> Tensor:
    """Clip with FSDP1's own method: torch's function would take this rank's parts of flat parameters for all."""
    return model.clip_grad_norm_(bound)


def _norm_by_clipping(clip: ClipGradNorm, parameters: list[Parameter]) -> float:
    copies = [local_part(p.grad).clone() for p in parameters if p.grad is not None]
    with calling("Subject(clip_grad_norm=...)"):
        norm = clip(parameters, float("inf"))
    with torch.no_grad():
        for parameter, before in zip(parameters, copies, strict=True):
            if parameter.grad is not None:
                local_part(parameter.grad).copy_(before)
    if isinstance(norm, (int, float)) or (isinstance(norm, Tensor) and norm.numel() == 1):
        return _as_number(norm)
    shown = tuple(norm.shape) if isinstance(norm, Tensor) else type(norm).__name__
    raise SubjectError("clip_grad_norm", f"it returned {shown}, but should return the norm before clipping, a number")


def _as_number(norm: Tensor | float) -> float:
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
