"""The reference, alone in a world of one: built twice, recorded, trained twice.

The first build is under poison and tells what the reference itself leaves uninitialised; the second is recorded. A
tensor whose bits differ between the two, or losses that differ between two trainings from the same weights, are not
the truth about anything, and are reported as such.
"""

from __future__ import annotations

import difflib
import pickle
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from pytest_fsdp_meta.evidence import RankInventory, ReferenceFacts, TensorFacts
from pytest_fsdp_meta.observers.inventory import clean_name, local_part, named_tensors, take_inventory
from pytest_fsdp_meta.observers.loading import SEED
from pytest_fsdp_meta.observers.poison import poisoned_memory
from pytest_fsdp_meta.observers.training import gradients_of, train
from pytest_fsdp_meta.reference import Record, checkpoint_entries, write_record
from pytest_fsdp_meta.subject import Subject, SubjectError
from pytest_fsdp_meta.worlds import current

VALUES, GRADIENTS, UPDATED, VERIFIER = (
    f"{name}.safetensors" for name in ("values", "gradients", "updated", "verifier")
)


def record_reference(
    recipe: Mapping[str, bytes], frozen: Collection[str], attributes: tuple[str, ...], folder: str
) -> ReferenceFacts:
    """Builds the reference twice and records the second: every parameter and every buffer, persistent or not.

    What the subject declares ``frozen`` is frozen here too: a reference is often just read from a checkpoint.
    """
    me = current()
    with poisoned_memory():
        poisoned = _inventory(_build("reference", recipe), attributes)
    model = _build("reference", recipe)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        parameter.requires_grad_(parameter.requires_grad and clean_name(name) not in frozen)
    clean = _inventory(model, attributes)
    write_record(Path(folder, VALUES), _tensors(model))
    me.state["subject"] = _subject(model, recipe)
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


def train_reference(steps: int, folder: str) -> tuple[tuple[float, ...], tuple[float, ...], tuple[str, ...]]:
    """(losses, losses of a second training from the recorded weights, hashes of the batches); records the first."""
    me = current()
    subject: Subject = me.state["subject"]

    def record() -> None:
        write_record(Path(folder, GRADIENTS), gradients_of(subject.model))

    record()
    losses, batches = train(subject, me.device, steps, (0, 1), record)
    updated = ((name, tensor) for name, kind, tensor in named_tensors(subject.model) if kind == "parameter")
    write_record(Path(folder, UPDATED), updated)
    _restore(subject.model, Record(Path(folder, VALUES)))
    again, _ = train(subject, me.device, steps, (0, 1))
    return losses, again, batches


def record_verifier(recipe: Mapping[str, bytes], names: Mapping[str, str], folder: str) -> None:
    """Records what the frozen weights were taken from; ``names`` maps frozen names to names in the verifier."""
    tensors = dict(_tensors(_build("verifier", recipe)))
    check_verifier_names(names, list(tensors))
    write_record(Path(folder, VERIFIER), ((name, tensors[name]) for name in dict.fromkeys(names.values())))


def checkpoint_facts(path: str) -> ReferenceFacts:
    """What the headers of a checkpoint directory say; they do not tell parameters from persistent buffers."""
    tensors = tuple(
        TensorFacts(name, "tensor", shape, shape, (), dtype, "disk")
        for name, (shape, dtype) in checkpoint_entries(path).items()
    )
    return ReferenceFacts("checkpoint", RankInventory(0, "disk", tensors))


def check_checkpoint_names(path: str, names: Mapping[str, str]) -> None:
    check_verifier_names(names, list(checkpoint_entries(path)))


def check_verifier_names(names: Mapping[str, str], there: list[str]) -> None:
    """Raises SubjectError for a frozen name that the verifier does not have."""
    for name, source in names.items():
        if source not in there:
            near = difflib.get_close_matches(source, there, n=1)
            hint = f"; the nearest is {near[0]!r}" if near else ""
            raise SubjectError("frozen", f"the verifier has no tensor {source!r} (for {name!r}){hint}")


def _build(field: str, recipe: Mapping[str, bytes]) -> Module:
    torch.manual_seed(SEED)
    build = pickle.loads(recipe[field])
    model = build()
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
    return Subject(model, **declared)


def _inventory(model: Module, attributes: tuple[str, ...]) -> RankInventory:
    return take_inventory(model, 0, str(current().device), attributes)


def _tensors(model: Module) -> list[tuple[str, Tensor]]:
    return [(name, tensor) for name, _, tensor in named_tensors(model)]


def _restore(model: Module, record: Record) -> None:
    with torch.no_grad():
        for name, tensor in _tensors(model):
            tensor.copy_(record.read(name, [((0, size),) for size in tensor.shape]))
