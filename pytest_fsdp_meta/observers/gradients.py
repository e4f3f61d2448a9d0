"""Gradients as a rank has them after backward, and their norm as clipping sees it."""

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
    """This rank's part of every gradient, laid out as its parameter is."""
    parts = parts_of(model)
    held = ((name, parts.gradient(name, tensor)) for name, kind, tensor in named_tensors(model) if kind == "parameter")
    return [(name, part) for name, part in held if part is not None]


def without_gradient(model: Module, seen: Iterable[tuple[str, Part]]) -> tuple[str, ...]:
    """Trainable parameters that this rank holds something of, and that are not among the gradients ``seen``."""
    parts, known = parts_of(model), {name for name, _ in seen}
    trainable = ((name, t) for name, kind, t in named_tensors(model) if kind == "parameter" and t.requires_grad)
    return tuple(name for name, t in trainable if name not in known and parts.of(name, t).local.numel())


def gradient_norm(model: Module, own: ClipGradNorm | None) -> tuple[float | None, str]:
    """(the norm of all gradients, why there is none), as ``own`` or torch tell it; the gradients stay as they are."""
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    if own is None and isinstance(model, FullyShardedDataParallel):
        own = partial(_norm_of_fsdp1, model)
    if own is not None:
        return _own_norm(own, parameters), ""
    by = next((part.by for _, part in gradients_of(model) if part.by and part.placements is None), "")
    if by:
        return None, f"each rank holds parts of some, as {by} says"
    try:
        with torch.no_grad():
            # What clip_grad_norm_ computes, and then multiplies the gradients by.
            return _number(torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])), ""
    except Exception as error:  # torch raises nearly anything for meshes or kinds of tensors that it cannot mix
        return None, f"{type(error).__name__}: {first_line(error)}"


def _norm_of_fsdp1(model: FullyShardedDataParallel, _: Iterable[Parameter], bound: float) -> Tensor:
    """Torch's own function takes flat parameters for whole ones."""
    return model.clip_grad_norm_(bound)


def _own_norm(own: ClipGradNorm, parameters: list[Parameter]) -> float:
    kept = [local_part(p.grad).clone() for p in parameters if p.grad is not None]
    with calling("Subject(clip_grad_norm=...)"):
        norm = own(parameters, float("inf"))
    with torch.no_grad():
        for parameter, before in zip(parameters, kept, strict=True):
            if parameter.grad is not None:
                local_part(parameter.grad).copy_(before)
    if isinstance(norm, (int, float)) or (isinstance(norm, Tensor) and norm.numel() == 1):
        return _number(norm)
    shown = tuple(norm.shape) if isinstance(norm, Tensor) else type(norm).__name__
    raise SubjectError("clip_grad_norm", f"it gave {shown}, but should give the norm before clipping, a number")


def _number(norm: Tensor | float) -> float:
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
