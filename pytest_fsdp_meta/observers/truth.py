"""The reference, alone in a world of one: built twice, recorded, trained twice.

The first build is under poison and tells what the reference itself leaves uninitialised; the second is recorded. A
tensor whose bits differ between the two, or losses that differ between two trainings from the same weights, are not
the truth about anything, and are reported as such.
"""

from __future__ import annotations

import difflib
import pickle
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from pytest_fsdp_meta.evidence import RankInventory, ReferenceFacts, TensorFacts
from pytest_fsdp_meta.observers.inventory import local_part, named_tensors, take_inventory
from pytest_fsdp_meta.observers.optimizers import PackedOptimizer
from pytest_fsdp_meta.observers.poison import poisoned_memory, restore_defaults
from pytest_fsdp_meta.observers.training import gradients_of, train
from pytest_fsdp_meta.reference import Record, checkpoint_entries, write_record
from pytest_fsdp_meta.subject import Subject, SubjectError
from pytest_fsdp_meta.worlds import SEED, current


def record_reference(
    recipe: Mapping[str, bytes], frozen: Collection[str], attributes: tuple[str, ...], path: str
) -> ReferenceFacts:
    """Builds the reference twice and records the second: every parameter and every buffer, persistent or not.

    What the subject declares ``frozen`` is frozen here too: a reference is often just read from a checkpoint.
    """
    with poisoned_memory():
        poisoned = _inventory(_build("reference", recipe), attributes)
    model = _build("reference", recipe)
    for name, kind, tensor in named_tensors(model):
        if kind == "parameter" and name in frozen:
            tensor.requires_grad_(False)
    clean = _inventory(model, attributes)
    write_record(Path(path), _tensors(model))
    current().state["reference"] = model
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
    )


def train_reference(
    recipe: Mapping[str, bytes], steps: int, values: str, gradients: str, updated: str
) -> tuple[tuple[float, ...], tuple[float, ...], tuple[str, ...]]:
    """(losses, losses of a second training from the recorded ``values``, hashes of the batches).

    Records the gradients of the first step and the parameters after the last.
    """
    me = current()
    subject = _subject(me.state["reference"], recipe)

    def record() -> None:
        write_record(Path(gradients), gradients_of(subject.model))

    record()  # where nothing is trainable there is no backward, and the ranks look for an empty record
    losses, batches = train(subject, me.device, steps, (0, 1), record)
    after = ((name, tensor) for name, kind, tensor in named_tensors(subject.model) if kind == "parameter")
    write_record(Path(updated), after)
    _restore(subject.model, Record(values))
    again, _ = train(subject, me.device, steps, (0, 1))
    return losses, again, batches


def record_verifier(recipe: Mapping[str, bytes], path: str) -> None:
    """Records what the frozen weights were taken from."""
    write_record(Path(path), _tensors(_build("verifier", recipe)))


def checkpoint_facts(path: str) -> ReferenceFacts:
    """What the headers of a checkpoint directory say; they do not tell parameters from persistent buffers."""
    tensors = tuple(
        TensorFacts(name, "tensor", shape, shape, (), dtype, "disk")
        for name, (shape, dtype) in checkpoint_entries(path).items()
    )
    return ReferenceFacts("checkpoint", RankInventory(0, "disk", tensors))


def missing_from_verifier(path: str, names: Mapping[str, str]) -> str:
    """What is wrong with a frozen name that the verifier at ``path`` does not have; empty when it has all."""
    there = Record(path).names()
    for name, source in names.items():
        if source not in there:
            near = difflib.get_close_matches(source, there, n=1, cutoff=0.4)
            hint = f"; the nearest is {near[0]!r}" if near else ""
            return str(SubjectError("frozen", f"the verifier has no tensor {source!r} (for {name!r}){hint}"))
    return ""


def _build(field: str, recipe: Mapping[str, bytes]) -> Module:
    torch.manual_seed(SEED)
    build = pickle.loads(recipe[field])
    model = build()
    restore_defaults()
    if not isinstance(model, Module):
        raise SubjectError(
            field, f"it returned {type(model).__name__}, but should return the model (a torch.nn.Module)"
        )
    meta = [name for name, tensor in _tensors(model) if local_part(tensor).is_meta]
    if meta:
        raise SubjectError(field, f"{meta[0]!r} of the model that it built is on meta; it should build the real model")
    return model.to(current().device)


def _subject(model: Module, recipe: Mapping[str, bytes]) -> Subject:
    declared: dict[str, Any] = {field: pickle.loads(recipe[field]) for field in ("batch", "loss", "optimizer")}
    if isinstance(declared["optimizer"], PackedOptimizer):
        declared["optimizer"] = partial(declared["optimizer"].rebuild, model)
    return Subject(model, **declared)


def _inventory(model: Module, attributes: tuple[str, ...]) -> RankInventory:
    return take_inventory(model, 0, str(current().device), attributes)


def _tensors(model: Module) -> list[tuple[str, Tensor]]:
    return [(name, tensor) for name, _, tensor in named_tensors(model)]


def _restore(model: Module, record: Record) -> None:
    with torch.no_grad():
        for name, tensor in _tensors(model):
            if name in record:
                _once(tensor).copy_(_once(record.read(name, [((0, size),) for size in tensor.shape]), tensor))


def _once(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """Without the repetitions that ``expand`` made in ``like`` (the tensor itself), which cannot be written to."""
    repeated = (tensor if like is None else like).stride()
    for dim, stride in enumerate(repeated):
        if not stride and tensor.shape[dim]:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor
