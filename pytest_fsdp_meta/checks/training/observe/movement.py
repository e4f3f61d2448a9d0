"""Observe how training steps moved this rank's shards, compared with how they should have moved.

The reference is recorded at the moments in ``SNAPSHOTS``, and ranks and noise are compared with these records.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from pytest_fsdp_meta.checks.training.facts import FIRST_BUFFERS, LAST_BUFFERS, Followed
from pytest_fsdp_meta.checks.training.observe.beside import Beside
from pytest_fsdp_meta.checks.training.observe.gradients import gradients_of
from pytest_fsdp_meta.checks.training.observe.trained_buffers import compare_buffers, readable_buffers
from pytest_fsdp_meta.checks.values.facts import UPDATE_TOLERANCE
from pytest_fsdp_meta.checks.values.observe import (
    comparable,
    compare_gradients,
    compare_measured,
    differing,
    length,
    measure,
    read_part,
    whole_index,
)
from pytest_fsdp_meta.evidence import Comparison, Measure, Movement
from pytest_fsdp_meta.loader.adapter import Part
from pytest_fsdp_meta.ranks.adapters.dtensor import local_part
from pytest_fsdp_meta.ranks.adapters.lookup import parts_of
from pytest_fsdp_meta.ranks.bits import is_low
from pytest_fsdp_meta.ranks.generators import read_states
from pytest_fsdp_meta.ranks.inventory import named_tensors
from pytest_fsdp_meta.ranks.joined_optimizer import computing_optimizer, parts_of_optimizer
from pytest_fsdp_meta.ranks.reference_record import Record
from pytest_fsdp_meta.text import clean_name

GRAINS = 8.0
"""Units in the last place; a smaller update may be rounded away on one side only, subject or reference."""
CERTAIN = -math.log(1e-6)
"""Elements: if stochastic rounding moves this many on average, the chance that it moves none is below 1e-6."""
ROUNDING = 32.0
"""Units in the last place of a typical gradient; a smaller gradient may be a zero with rounding errors."""

DUE_BY = ("values", "gradients", "updates")
"""The records that say how far the reference moved each element, and by which gradient."""

DueElements = Callable[[str, Tensor, Part, Tensor], Tensor]
"""Given a name, its parameter, this rank's part and that part before the steps, the mask of elements that must move."""


def copy_shards(model: Module) -> dict[str, Tensor]:
    """Return a copy, on the CPU, of this rank's shard of every trainable parameter."""
    copies: dict[int, Tensor] = {}
    shards, parts = {}, parts_of(model)
    for name, kind, tensor in named_tensors(model):
        if kind == "parameter" and tensor.requires_grad and not tensor.is_meta:
            if id(tensor) not in copies:
                copies[id(tensor)] = local_part(parts.of(name, tensor).local).to("cpu", copy=True)
            shards[name] = copies[id(tensor)]
    return shards


def gradient_noise(model: Module) -> float:
    """Return the size below which an element of the present gradients is rounding."""
    # By address, so that a tied gradient counts once.
    by_address = {g.local.data_ptr(): local_part(g.local) for _, g in gradients_of(model) if _readable(g.local)}
    parts = list(by_address.values())
    if not parts:
        return 0.0
    total = math.fsum(root_mean_square(part) ** 2 * part.numel() for part in parts)
    coarsest = max(torch.finfo(part.dtype).eps for part in parts)
    return ROUNDING * float(coarsest) * math.sqrt(total / sum(part.numel() for part in parts))


def root_mean_square(tensor: Tensor) -> float:
    """Return the root mean square of this rank's elements; zero where there are none, or torch cannot read them."""
    local = local_part(tensor)
    if not _readable(local):
        return 0.0
    return length(comparable(local)) / math.sqrt(local.numel())


def _readable(local: Tensor) -> bool:
    return bool(local.numel() > 0 and local.layout == torch.strided)


def due_by_reference(records: Mapping[str, Record], noise: float) -> DueElements:
    """Return a function that requires an element to move where the reference's moved and had a gradient above noise."""
    compared = [records[name] for name in DUE_BY]

    def due(name: str, tensor: Tensor, part: Part, before: Tensor) -> Tensor:
        if not all(name in record and record.shape(name) == part.shape for record in compared):
            return torch.zeros_like(before, dtype=torch.bool)
        old, gradient, new = (read_part(part, record, name) for record in compared)
        grain = torch.finfo(before.dtype).eps * torch.maximum(old.abs(), new.abs())
        return ((new - old).abs() > GRAINS * grain) & (gradient.abs() > noise)

    return due


def due_by_gradients(gradients: Mapping[str, Tensor], optimizer: Optimizer, noise: float) -> DueElements:
    """Return a function that requires an element to move where its own gradient is above noise.

    Used if there is no reference. Elements need not move if rounding may cancel their update: an
    optimizer steps by its learning rate times the gradient, or times about one if it normalises the gradient.
    """
    rates = {id(p): _rate(group, 0.0) for group in optimizer.param_groups for p in group["params"]}

    def due(name: str, tensor: Tensor, part: Part, before: Tensor) -> Tensor:
        if name not in gradients or gradients[name].shape != before.shape:
            return torch.zeros_like(before, dtype=torch.bool)
        size = gradients[name].abs()
        grain = torch.finfo(before.dtype).eps * before.abs()
        return (size > noise) & (rates.get(id(tensor), 0.0) * size.clamp(max=1.0) > 2 * GRAINS * grain)

    return due


def _rate(group: Mapping[str, Any], default: float) -> float:
    rate = group.get("lr")  # None where the optimizer chooses its own
    return default if rate is None else float(rate)


def moved_rows(model: Module, before: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return, for each trainable parameter, a mask of the rows of this rank's shard that differ from ``before``."""
    moved, parts = {}, parts_of(model)
    for name, _, tensor in named_tensors(model):
        if name in before and before[name].numel():
            now = local_part(parts.of(name, tensor).local).cpu()
            if now.shape == before[name].shape:
                moved[name] = _any_by_row(now != before[name])
    return moved


def movements(
    model: Module, before: Mapping[str, Tensor], due: DueElements, earlier: Mapping[str, Tensor]
) -> tuple[Movement, ...]:
    """Count, for each trainable parameter, the rows of this rank's shard that must move, and those that do not.

    ``earlier`` are the rows that had moved after the first step: later steps may take a row back, bit for bit.
    After the first tensor with a row that must move, a tensor whose rows all moved is not looked up: all count as due.
    """
    found, parts = list[Movement](), parts_of(model)
    moved = moved_rows(model, before)  # without those whose layout training changed: there is nothing to compare with
    for name, _, tensor in named_tensors(model):
        if name not in moved:
            continue
        part, rows = parts.of(name, tensor), moved[name] | earlier.get(name, False)
        # To read how the reference moved takes long, and where all rows moved none stands still.
        known = bool(rows.all()) and any(movement.due for movement in found)
        must = rows if known else _any_by_row(due(name, tensor, part, before[name]))
        still = (must & ~rows).nonzero()
        first = None
        if len(still) and before[name].ndim:
            first = whole_index(part, [int(still[0]), *[0] * (before[name].ndim - 1)])[0]
        found.append(Movement(name, int(must.sum()), len(still), first))
    return tuple(found)


def swallowed(
    model: Module,
    before: Mapping[str, Tensor],
    records: Mapping[str, Record],
    noise: float,
    optimizer: Optimizer,
    earlier: Mapping[str, Tensor],
    by_chance: bool,
) -> tuple[str, ...]:
    """Return the parameters in a low precision that neither this rank nor the reference moved, despite gradients.

    A learning rate of zero is not rounding, and gradients below ``noise`` are. If the optimizer may round ``by_chance``
    (stochastically), parameters that may stay in place by chance are left out.
    """
    rates = {id(p): _rate(group, 1.0) for group in optimizer.param_groups for p in group["params"]}
    parts, compared = parts_of(model), [records[name] for name in DUE_BY]
    # Other state than that of torch's own optimizers may keep the update: float32 copies, or what rounding left over.
    low = {
        name: tensor
        for name, _, tensor in named_tensors(model)
        if is_low(tensor.dtype) and rates.get(id(tensor)) and not set(optimizer.state.get(tensor, {})) - MOMENTS
    }
    found = []
    for name, moved in moved_rows(model, {name: old for name, old in before.items() if name in low}).items():
        part = parts.of(name, low[name])
        if moved.any() or (name in earlier and earlier[name].any()):
            continue
        if all(name in record and record.shape(name) == part.shape for record in compared):
            old, gradient, new = (read_part(part, record, name) for record in compared)
            still = torch.equal(old, new) and bool((gradient.abs() > noise).any())
            if still and not (by_chance and _expected_moves(old, gradient, rates[id(low[name])]) < CERTAIN):
                found.append(name)
    return tuple(found)


def _expected_moves(old: Tensor, gradient: Tensor, rate: float) -> float:
    """Return at least how many elements one step moves on average with stochastic rounding.

    An element's chance is its update, as ``due_by_gradients`` assumes it, in units in the last place.
    """
    unit = torch.finfo(old.dtype).eps * old.abs().float() + torch.finfo(torch.float32).tiny
    return float((rate * gradient.abs().float().clamp(max=1.0) / unit).clamp(max=1.0).sum())


def random_states(optimizer: Optimizer, device: torch.device) -> list[Tensor]:
    """Return the states of the generators that an optimizer may draw from: torch's default ones, and its own."""
    held = (value for part in parts_of_optimizer(optimizer) for value in vars(computing_optimizer(part)).values())
    own = (generator.get_state() for generator in held if isinstance(generator, torch.Generator))
    return [*read_states(device).values(), *own]


MOMENTS = frozenset({"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "sum"})
"""The state of torch's own optimizers."""


def _any_by_row(mask: Tensor) -> Tensor:
    return mask.reshape(mask.shape[0] if mask.ndim else 1, -1).any(1)


def compare_updates(
    model: Module, before: Mapping[str, Tensor], records: Mapping[str, Record], name: str
) -> tuple[Comparison, ...]:
    """Compare the parameters after the steps with the reference's; the measure is of how far each moved."""
    parts = parts_of(model)
    parameters = ((name, tensor) for name, kind, tensor in named_tensors(model) if kind == "parameter")
    own = ((name, parts.of(name, tensor)) for name, tensor in parameters if not tensor.is_meta)
    return _compare_moved(own, before, records["values"], records[name])


def copy_beside(beside: Beside) -> dict[str, Tensor]:
    """Return a copy, on the CPU, of this rank's part of each tensor beside the model that the reference has as well."""
    floating = ((name, part.local) for name, part in beside.tensors() if part.local.is_floating_point())
    return {name: local_part(local).to("cpu", copy=True) for name, local in floating}


def compare_beside(
    beside: Beside, before: Mapping[str, Tensor], records: Mapping[str, Record]
) -> tuple[tuple[Comparison, ...], tuple[str, ...]]:
    """Compare what is kept beside the model with what the reference keeps; the measure is of how far it moved.

    Return as well the names of which the reference keeps nothing.
    """
    if "updated_beside" not in records:
        return (), ()
    values, updated = records["beside"], records["updated_beside"]
    parts = list(beside.tensors())
    theirs = {name: _counterpart(name, updated) for name, _ in parts}
    known = [(theirs[name], part) for name, part in parts if theirs[name]]
    renamed = {theirs[name]: kept for name, kept in before.items() if theirs[name]}
    return _compare_moved(known, renamed, values, updated), tuple(name for name in theirs if not theirs[name])


def _counterpart(name: str, updated: Record) -> str:
    """Return the name in the unwrapped reference, without what torch's wrappers and DDP add; "" if there is none."""
    clean = clean_name(name)
    owner, _, path = clean.partition(".")
    without_ddp = f"{owner}.{path.replace('module.', '', 1)}"
    return next((own for own in (name, clean, without_ddp) if own in updated), "")


def count_followed(
    beside: Beside, kept: Mapping[str, Tensor], model: Module, before: Mapping[str, Tensor]
) -> tuple[Followed, ...]:
    """Return ``RankTraining.followed``; ``kept`` and ``before`` are the copies that were made before the training."""
    found: dict[tuple[str, str], tuple[int, int]] = {}
    low = [(name, part.local) for name, part in beside.tensors() if name in kept and is_low(part.local.dtype)]
    parameters = copy_shards(model) if low else {}
    for name, local in low:
        owner = max((own for own in parameters if name.endswith(f".{own}")), key=len, default="")
        if owner and parameters[owner].shape == kept[name].shape:
            entry = (name.partition(".")[0], str(local.dtype).removeprefix("torch."))
            pairs = ((local_part(local).cpu(), kept[name]), (parameters[owner], before[owner]))
            moved, due = (int(differing(comparable(new), comparable(old)).sum()) for new, old in pairs)
            counted = found.get(entry, (0, 0))
            found[entry] = counted[0] + moved, counted[1] + due
    return tuple(Followed(*entry, *counts) for entry, counts in found.items())


def _compare_moved(
    parts: Iterable[tuple[str, Part]], before: Mapping[str, Tensor], values: Record, updated: Record
) -> tuple[Comparison, ...]:
    comparisons = []
    for name, part in parts:
        if name in updated and not part.local.is_meta:
            measured = _measure_update(part, before[name], values, updated, name) if name in before else None
            comparisons.append(compare_measured(name, part, updated, UPDATE_TOLERANCE, measured))
    return tuple(comparisons)


def _measure_update(part: Part, before: Tensor, values: Record, updated: Record, name: str) -> Measure | None:
    if name not in values or not values.shape(name) == updated.shape(name) == part.shape:
        return None
    old, new = read_part(part, values, name), read_part(part, updated, name)
    now = local_part(part.local).cpu()
    if not now.numel() or not old.shape == new.shape == now.shape == before.shape:
        return None
    ours, theirs, since = comparable(now), comparable(new), (comparable(before), comparable(old))
    grain = torch.finfo(now.dtype).eps * length(since[1])
    return measure(ours, theirs, grain, since=since)


# The moments at which the reference is recorded.


@dataclass(frozen=True)
class Kind:
    """Tensors of a model that training changes, and how a rank compares its parts with a record.

    A rank needs its shards from before the training, all records, and the name of one. If the tensors have ``values``
    before the training, what counts is how far they are from those.
    """

    of: Callable[[Module], Iterable[tuple[str, Tensor]]]
    compare: Callable[[Module, Mapping[str, Tensor], Mapping[str, Record], str], tuple[Comparison, ...]]
    values: bool = True


@dataclass(frozen=True)
class Snapshot:
    """Tensors at one moment: after a "backward", "update" or "accumulation", a "short" step, or at the "end"."""

    name: str
    """The name of the record, and of the field of ``Noise`` that says how far it moves."""
    kind: Kind
    after: str
    step: int = 0
    """Counted from 0, or from the last step if it is negative."""
    noisy: bool = True
    """False if ``Noise`` has no such field."""


def whole_gradients(model: Module) -> list[tuple[str, Tensor]]:
    """Return the gradients as tensors: in a world of one rank every part is whole."""
    return [(name, part.local) for name, part in gradients_of(model)]


def parameters_of(model: Module) -> Iterator[tuple[str, Tensor]]:
    return ((name, tensor) for name, kind, tensor in named_tensors(model) if kind == "parameter")


GRADIENTS = Kind(
    whole_gradients, lambda model, _, records, name: compare_gradients(gradients_of(model), records[name]), values=False
)
PARAMETERS = Kind(parameters_of, compare_updates)
BUFFERS = Kind(readable_buffers, compare_buffers)

SNAPSHOTS = (
    Snapshot("gradients", GRADIENTS, "backward", 0),
    Snapshot("second", GRADIENTS, "backward", 1),
    Snapshot("first_updates", PARAMETERS, "update", 0),
    Snapshot(FIRST_BUFFERS, BUFFERS, "update", 0),
    Snapshot("late", PARAMETERS, "update", -2, noisy=False),
    Snapshot("updates", PARAMETERS, "end"),
    Snapshot(LAST_BUFFERS, BUFFERS, "end"),
    Snapshot("accumulated", GRADIENTS, "accumulation"),
    Snapshot("short", GRADIENTS, "short"),
)


def snapshots_after(event: str, step: int = 0, steps: int = 1) -> list[Snapshot]:
    """Return the snapshots that are due after this event of the ``step`` of so many ``steps``."""
    return [s for s in SNAPSHOTS if s.after == event and step == (s.step + steps if s.step < 0 else s.step)]
