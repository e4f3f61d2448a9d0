"""What training steps did to this rank's shards, beside what they should have done."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from pytest_fsdp_meta.evidence import Comparison, Measure, Movement
from pytest_fsdp_meta.loader.adapter import Part
from pytest_fsdp_meta.observers.adapters.dtensor import local_part
from pytest_fsdp_meta.observers.adapters.lookup import parts_of
from pytest_fsdp_meta.observers.gradients import gradients_of
from pytest_fsdp_meta.observers.inventory import named_tensors
from pytest_fsdp_meta.observers.support.reference_record import Record
from pytest_fsdp_meta.observers.values import beside, comparable, compare, measure, whole_index

GRAINS = 8.0
"""An update of fewer units in the last place may be rounded away on one side and not on the other."""
ROUNDING = 32.0
"""Gradients that are fewer roundings of a typical one are what rounding leaves of a zero."""

Due = Callable[[str, Tensor, Part, Tensor], Tensor]
"""Of a name, its parameter, this rank's part and that part before the steps: which elements must move."""


def shards(model: Module) -> dict[str, Tensor]:
    """A copy, on the CPU, of this rank's shard of every trainable parameter."""
    copies: dict[int, Tensor] = {}
    found = {}
    for name, kind, tensor in named_tensors(model):
        if kind == "parameter" and tensor.requires_grad and not tensor.is_meta:
            if id(tensor) not in copies:
                copies[id(tensor)] = local_part(tensor).to("cpu", copy=True)
            found[name] = copies[id(tensor)]
    return found


def noise(model: Module) -> float:
    """The size below which an element of the present gradients is rounding."""
    held = {g.local.data_ptr(): local_part(g.local) for _, g in gradients_of(model) if _readable(g.local)}
    parts = list(held.values())  # a tied gradient once
    if not parts:
        return 0.0
    total = math.fsum(root_mean_square(part) ** 2 * part.numel() for part in parts)
    coarsest = max(torch.finfo(part.dtype).eps for part in parts)
    return ROUNDING * float(coarsest) * math.sqrt(total / sum(part.numel() for part in parts))


def root_mean_square(tensor: Tensor) -> float:
    """Of the elements that this rank holds; zero where there are none, or torch cannot read them."""
    local = local_part(tensor)
    if not _readable(local):
        return 0.0
    return float(comparable(local).double().norm()) / math.sqrt(local.numel())


def _readable(local: Tensor) -> bool:
    return bool(local.numel() > 0 and local.layout == torch.strided)


def due_as_in(records: Mapping[str, Record], floor: float) -> Due:
    """An element must move where the reference's did, and had a gradient in the first step."""

    compared = [records[name] for name in ("values", "gradients", "updated")]

    def due(name: str, tensor: Tensor, part: Part, before: Tensor) -> Tensor:
        if not all(name in record and record.shape(name) == part.shape for record in compared):
            return torch.zeros_like(before, dtype=torch.bool)
        old, gradient, new = (beside(part, record, name) for record in compared)
        grain = torch.finfo(before.dtype).eps * torch.maximum(old.abs(), new.abs())
        return ((new - old).abs() > GRAINS * grain) & (gradient.abs() > floor)

    return due


def due_by(gradients: Mapping[str, Tensor], optimizer: Optimizer, floor: float) -> Due:
    """Without a reference: an element must move that had a gradient, and whose update rounding cannot swallow.

    An optimizer steps by its learning rate times the gradient, or times about one where it normalises.
    """
    rates = {id(p): float(group.get("lr", 0.0)) for group in optimizer.param_groups for p in group["params"]}

    def due(name: str, tensor: Tensor, part: Part, before: Tensor) -> Tensor:
        if name not in gradients or gradients[name].shape != before.shape:
            return torch.zeros_like(before, dtype=torch.bool)
        size = gradients[name].abs()
        grain = torch.finfo(before.dtype).eps * before.abs()
        return (size > floor) & (rates.get(id(tensor), 0.0) * size.clamp(max=1.0) > 2 * GRAINS * grain)

    return due


def movements(model: Module, before: Mapping[str, Tensor], due: Due) -> tuple[Movement, ...]:
    """Of each trainable parameter, how many rows of this rank's shard must move and do not."""
    found, parts = [], parts_of(model)
    for name, _, tensor in named_tensors(model):
        if name not in before or not before[name].numel():
            continue
        part = parts.of(name, tensor)
        now = local_part(part.local).cpu()
        if now.shape != before[name].shape:
            continue  # laid out anew: nothing to lay side by side
        must, moved = _by_row(due(name, tensor, part, before[name])), _by_row(now != before[name])
        still = (must & ~moved).nonzero()
        first = None
        if len(still) and now.ndim:
            first = whole_index(part, [int(still[0]), *[0] * (now.ndim - 1)])[0]
        found.append(Movement(name, int(must.sum()), len(still), first))
    return tuple(found)


def _by_row(mask: Tensor) -> Tensor:
    return mask.reshape(mask.shape[0] if mask.ndim else 1, -1).any(1)


def compare_updates(
    model: Module, before: Mapping[str, Tensor], values: Record, updated: Record
) -> tuple[Comparison, ...]:
    """The parameters after the steps beside the reference's, measured by how far each moved."""
    found, parts = [], parts_of(model)
    for name, kind, tensor in named_tensors(model):
        if kind == "parameter" and name in updated and not tensor.is_meta:
            part = parts.of(name, tensor)
            comparison = compare(name, part, updated, name)
            if name in before and comparison.problem is None and name in values:
                comparison = replace(comparison, measure=_moved(part, before[name], values, updated, name))
            found.append(comparison)
    return tuple(found)


def _moved(part: Part, before: Tensor, values: Record, updated: Record, name: str) -> Measure | None:
    if values.shape(name) != part.shape:
        return None
    old, new = beside(part, values, name), beside(part, updated, name)
    now = local_part(part.local).cpu()
    if not now.numel() or not old.shape == new.shape == now.shape == before.shape:
        return None
    ours, theirs = (comparable(a).double() - comparable(b).double() for a, b in ((now, before), (new, old)))
    grain = torch.finfo(now.dtype).eps * float(comparable(old).double().norm())
    return measure(ours, theirs, grain)
