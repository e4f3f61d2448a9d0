"""Give the reference what only the ranks have: the buffers that their steps change, and their optimizer's state.

The ranks record their parts of it, and the world of the reference puts them together; see ``trial/giving.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from pytest_fsdp_meta.checks.materialisation.observe import loaded_subject
from pytest_fsdp_meta.checks.training.facts import GIVEN_BUFFERS, GIVEN_STATE, OWN_CHANGES, Moment, RecordedPart
from pytest_fsdp_meta.evidence import PartFacts
from pytest_fsdp_meta.loader.adapter import Part
from pytest_fsdp_meta.ranks.adapters.dtensor import local_part, own_part
from pytest_fsdp_meta.ranks.adapters.lookup import parts_of
from pytest_fsdp_meta.ranks.assembly import put_together, record_parts
from pytest_fsdp_meta.ranks.bits import digest
from pytest_fsdp_meta.ranks.inventory import named_tensors
from pytest_fsdp_meta.ranks.joined_optimizer import computing_optimizer, parts_of_optimizer
from pytest_fsdp_meta.ranks.optimizers import built_optimizer
from pytest_fsdp_meta.ranks.reference_record import Record, is_array, record_at, without_repetition
from pytest_fsdp_meta.worlds import current


def record_buffers(folder: str) -> dict[Moment, RecordedPart]:
    """Record this rank's parts of the buffers that its steps have changed by themselves, as they were then."""
    rank = current()
    model = loaded_subject(rank).model
    parts, tensors = parts_of(model), {name: tensor for name, _, tensor in named_tensors(model)}
    changed: Mapping[tuple[int, str], Mapping[str, Tensor]] = rank.state.get(OWN_CHANGES, {})
    found: dict[Moment, Part] = {}
    for when, values in changed.items():
        for name, value in values.items():
            if name in tensors and value.numel():
                part = parts.of(name, tensors[name])
                same = local_part(part.local).shape == value.shape
                found[Moment(*when, name)] = replace(part, local=value) if same else own_part(value)
    return _record(found, folder, GIVEN_BUFFERS)


def record_optimizer_state(folder: str) -> tuple[dict[Moment, RecordedPart], tuple[str, ...]]:
    """Record this rank's parts of the state of the optimizer that the loader has built, at moments named by its keys.

    Return them, and the parameters with other state: tensors of another shape than the parameter.
    """
    subject = loaded_subject(current())
    optimizer = built_optimizer(subject)
    assert optimizer is not None, "it has state"
    parts = parts_of(subject.model)
    found: dict[Moment, Part] = {}
    unknown: list[str] = []
    for name, _, parameter in named_tensors(subject.model):
        part = parts.of(name, parameter)
        for key, value in optimizer.state.get(parameter, {}).items():
            value = torch.tensor(value) if isinstance(value, (int, float)) else value
            moment, usable = Moment(0, str(key), name), isinstance(value, Tensor) and is_array(value)
            if usable and not value.ndim:
                found[moment] = own_part(value)
            elif usable and local_part(value).shape == local_part(part.local).shape:
                found |= {moment: replace(part, local=local_part(value))} if local_part(value).numel() else {}
            elif value is not None:
                unknown.append(name)
    return _record(found, folder, GIVEN_STATE), tuple(unknown)


def _record(found: Mapping[Moment, Part], folder: str, what: str) -> dict[Moment, RecordedPart]:
    path = record_at(folder, f"{what}{current().rank}")
    facts = record_parts({moment.key: part for moment, part in found.items()}, path)
    return {m: RecordedPart(facts[m.key], digest(local_part(part.local))) for m, part in found.items()}


def give(held_by_rank: Sequence[Mapping[Moment, PartFacts]], what: str, folder: str) -> None:
    """Let all later trainings of the reference have these buffers at these moments, or begin with this state."""
    moments = {moment.key: moment for held in held_by_rank for moment in held}
    by_key = [{moment.key: facts for moment, facts in held.items()} for held in held_by_rank]
    records = [Record(record_at(folder, f"{what}{rank}")) for rank in range(len(by_key))]
    given: dict[tuple[int, str], dict[str, Tensor]] = {}
    for key, whole in put_together(by_key, records):
        step, event, name = moments[key]
        given.setdefault((step, event), {})[name] = whole
    current().state[what] = given


def give_buffers(model: Module, step: int, event: str) -> None:
    """Set the buffers that are given for this moment; only the world of the reference has any."""
    if given := current().state.get(GIVEN_BUFFERS, {}).get((step, event)):
        set_values(model, given)


def set_values(model: Module, values: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, _, tensor in list(named_tensors(model)):
            if name in values and tensor.shape == values[name].shape:
                without_repetition(tensor).copy_(without_repetition(values[name], tensor))
            elif name in values:  # a step may replace a buffer by a larger one
                owner, _, own = name.rpartition(".")
                setattr(model.get_submodule(owner), own, values[name].to(tensor.device, copy=True))


def give_state(model: Module, optimizer: Optimizer) -> None:
    """Give a new optimizer of the reference the state that is given for it, if there is any."""
    given: Mapping[tuple[int, str], Mapping[str, Tensor]] = current().state.get(GIVEN_STATE, {})
    tensors = {name: tensor for name, _, tensor in named_tensors(model)}
    for part in map(computing_optimizer, parts_of_optimizer(optimizer)):
        held = {id(parameter) for group in part.param_groups for parameter in group["params"]}
        for (_, key), values in given.items():
            for name, value in values.items():
                if name in tensors and id(tensors[name]) in held:
                    # A copy, because trainings change it; counts of steps are on the CPU.
                    own = value.to(tensors[name].device if value.ndim else "cpu", copy=True)
                    part.state[tensors[name]][key] = own
