"""Build and record the reference in a world of one rank.

The first build runs under poison and shows which tensors the reference itself never writes; the second build is
recorded. Tensors that differ between the two builds cannot serve as a reference; the facts say so.

What only the ranks have is given to it: the buffers that their steps change, and their optimizer's state. The ranks
record their parts of it, and the world of the reference puts them together; see ``trial/giving.py``.
"""

from __future__ import annotations

import pickle
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from pytest_fsdp_meta.checks.materialisation.observe import loaded_subject
from pytest_fsdp_meta.checks.memory.observe import return_freed_memory
from pytest_fsdp_meta.checks.training.facts import GIVEN_BUFFERS, GIVEN_STATE, OWN_CHANGES, Moment, RecordedPart
from pytest_fsdp_meta.checks.training.observe.beside import declare_beside
from pytest_fsdp_meta.checks.values.observe import all_equal, own_values_of
from pytest_fsdp_meta.evidence import PartFacts, RankInventory, ReferenceFacts, TensorFacts
from pytest_fsdp_meta.loader.adapter import Part
from pytest_fsdp_meta.loader.subject import Subject, SubjectError
from pytest_fsdp_meta.loader.validation import shorten
from pytest_fsdp_meta.ranks.adapters.dtensor import local_part, own_part, plain
from pytest_fsdp_meta.ranks.adapters.lookup import parts_of
from pytest_fsdp_meta.ranks.assembly import put_together, record_parts
from pytest_fsdp_meta.ranks.batches import requiring_parameters
from pytest_fsdp_meta.ranks.bits import NOTICES, digest, poisoned_memory, restore_defaults
from pytest_fsdp_meta.ranks.inventory import named_tensors, take_inventory
from pytest_fsdp_meta.ranks.joined_optimizer import computing_optimizer, parts_of_optimizer
from pytest_fsdp_meta.ranks.optimizers import Rebuilding, built_optimizer
from pytest_fsdp_meta.ranks.reference_record import (
    Record,
    checkpoint_entries,
    is_array,
    record_at,
    without_repetition,
    write_record,
)
from pytest_fsdp_meta.text import describe_nearest
from pytest_fsdp_meta.worlds import SEED, current, doing, forward_warnings


def record_reference(
    recipe: Mapping[str, bytes], frozen: Collection[str], attributes: tuple[str, ...], path: str
) -> ReferenceFacts:
    """Build the reference twice and record the second build: every parameter and every buffer, persistent or not.

    The names that the subject declares ``frozen`` are frozen in the reference too, which is often just read from a
    checkpoint and freezes nothing itself.
    """
    with poisoned_memory():
        poisoned = _inventory(build("reference", recipe), attributes)
    model = build("reference", recipe)
    seed = torch.initial_seed()
    for name, kind, tensor in named_tensors(model):
        if kind == "parameter" and name in frozen:
            tensor.requires_grad_(False)
    doing("recording its values")
    clean = _inventory(model, attributes)
    write_record(Path(path), _tensors(model))
    current().state["reference"] = model
    return_freed_memory(current().device)
    differing = {
        name: facts
        for name, facts in poisoned.by_name.items()
        if name not in clean.by_name or clean.by_name[name].digest != facts.digest
    }
    uninitialised = tuple(name for name, facts in differing.items() if facts.poisoned)
    return ReferenceFacts(
        source="callable",
        inventory=clean,
        unstable=tuple(name for name in differing if name not in uninitialised),
        uninitialised=uninitialised,
        state_dict=tuple(model.state_dict()),
        seed=seed,
    )


def adopt_values(
    held_by_rank: Sequence[Mapping[str, PartFacts]], folder: str, attributes: tuple[str, ...]
) -> RankInventory:
    """Give the reference the values that each rank has recorded of its own; return its new inventory.

    ``held_by_rank`` has what ``record_own_values`` returned. The record of the reference's values is replaced.
    """
    model = current().state["reference"]
    restore(model, Record(record_at(folder, "values")))
    tensors = dict(_tensors(model))

    def start(name: str, *_: object) -> Tensor:
        # A copy, because the tensor may be a transposed view, or repeat one row.
        return tensors[name].detach().cpu().clone(memory_format=torch.contiguous_format)

    records = [Record(own_values_of(rank, folder)) for rank in range(len(held_by_rank))]
    with torch.no_grad():
        for name, whole in put_together(held_by_rank, records, start):
            without_repetition(tensors[name]).copy_(without_repetition(whole, tensors[name]))
    write_record(record_at(folder, "values"), _tensors(model))
    return _inventory(model, attributes)


def adopt_requires_grad(trainable: Mapping[str, bool]) -> None:
    """Freeze and unfreeze parameters of the reference as on the ranks."""
    for name, _, tensor in named_tensors(current().state["reference"]):
        tensor.requires_grad_(trainable.get(name, tensor.requires_grad))


def record_verifier(recipe: Mapping[str, bytes], path: str) -> None:
    """Build the verifier and record its values."""
    write_record(Path(path), _tensors(build("verifier", recipe)))


def record_export_reference(recipe: Mapping[str, bytes], path: str) -> None:
    """Build what the export should equal and record its state dict."""
    built = build_export_reference(recipe)
    state = built.state_dict() if isinstance(built, Module) else built
    write_record(Path(path), ((key, value) for key, value in state.items() if isinstance(value, Tensor)))


def checkpoint_facts(path: str) -> ReferenceFacts:
    """Return the facts in the headers of a checkpoint directory, which do not distinguish parameters from buffers."""
    tensors = tuple(
        TensorFacts(name, "tensor", shape, shape, (), dtype, "disk")
        for name, (shape, dtype) in checkpoint_entries(path).items()
    )
    names = tuple(tensor.name for tensor in tensors)
    return ReferenceFacts("checkpoint", RankInventory(0, "disk", tensors), state_dict=names)


def missing_from_verifier(path: str, names: Mapping[str, str]) -> str:
    """Return which of the frozen names the verifier at ``path`` lacks; empty where it has all."""
    known = Record(path).names()
    for name, source in names.items():
        if source not in known:
            hint = describe_nearest(source, known, "tensor")
            return str(SubjectError("frozen", f"the verifier has no tensor {source!r} (for {name!r}){hint}"))
    return ""


def build_export_reference(recipe: Mapping[str, bytes]) -> Module | dict[str, Tensor]:
    """Return the model, or the tensors by name, such as those of adapters alone."""
    built = _call("export_reference", recipe)
    if isinstance(built, Module):
        return _with_values("export_reference", built)
    items = built.items() if isinstance(built, Mapping) else ()
    named = [(name, local_part(value)) for name, value in items if isinstance(name, str) and isinstance(value, Tensor)]
    tensors = {name: value for name, value in named if not value.is_meta}
    if not tensors:
        wanted = "the model (a torch.nn.Module), or a dict of tensors with values by name"
        raise SubjectError("export_reference", f"the callable returned {shorten(built)}, but should return {wanted}")
    return tensors


def build(field: str, recipe: Mapping[str, bytes]) -> Module:
    model = _call(field, recipe)
    if not isinstance(model, Module):
        raise SubjectError(
            field, f"the callable returned {type(model).__name__}, but should return the model (a torch.nn.Module)"
        )
    return _with_values(field, model)


def _call(field: str, recipe: Mapping[str, bytes]) -> Any:
    torch.manual_seed(SEED)
    doing(f"building the {field}")
    build = pickle.loads(recipe[field])
    with forward_warnings(NOTICES), requiring_parameters(f"Subject({field}=...)", f"{field}()"):
        model = build()
    restore_defaults()
    return model


def _with_values(field: str, model: Module) -> Module:
    meta = [name for name, tensor in _tensors(model) if local_part(tensor).is_meta]
    if meta:
        raise SubjectError(field, f"the callable built a model with {meta[0]!r} on meta; build it with real weights")
    return model.to(current().device)


def declared_subject(model: Module, recipe: Mapping[str, bytes]) -> Subject:
    declared: dict[str, Any] = {field: pickle.loads(recipe[field]) for field in ("batch", "loss", "optimizer")}
    if isinstance(declared["optimizer"], tuple):  # of PackedOptimizer
        declared["optimizer"] = Rebuilding(declared["optimizer"], model, give_state)
    subject = Subject(model, **declared)
    subject.max_grad_norm = pickle.loads(recipe["max_grad_norm"])  # the ranks' train_step clips to it
    declare_beside(subject, pickle.loads(recipe["scheduler"]), pickle.loads(recipe["beside"]))
    return subject


def _inventory(model: Module, attributes: tuple[str, ...]) -> RankInventory:
    return take_inventory(model, 0, str(current().device), attributes)


def _tensors(model: Module) -> list[tuple[str, Tensor]]:
    return [(name, tensor) for name, _, tensor in named_tensors(model)]


def restore(model: Module, record: Record) -> None:
    with torch.no_grad():
        for name, tensor in _tensors(model):
            if name not in record:  # sparse, nested or quantised
                continue
            values = record.read_whole(name)
            if values.shape != tensor.shape:
                set_values(model, {name: values})
            elif plain(tensor) is tensor or not all_equal(plain(tensor).cpu(), values):  # quantised again, it changes
                without_repetition(tensor).copy_(without_repetition(values, tensor))


# What only the ranks have: recorded by them, and given to the reference.


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
