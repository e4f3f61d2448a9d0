"""The reference, alone in a world of one: built twice, recorded, trained twice.

The first build is under poison and tells what the reference itself leaves uninitialised; the second is recorded. A
tensor whose bits differ between the two, or losses that differ between two trainings from the same weights, are not
the truth about anything, and are reported as such.
"""

from __future__ import annotations

import difflib
import pickle
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from pytest_fsdp_meta.evidence import Measure, RankInventory, ReferenceFacts, TensorFacts
from pytest_fsdp_meta.loader.adapter import Part
from pytest_fsdp_meta.loader.subject import Subject, SubjectError
from pytest_fsdp_meta.observers.accumulation import accumulate, micro_batches, not_shared
from pytest_fsdp_meta.observers.adapters.dtensor import local_part
from pytest_fsdp_meta.observers.gradients import gradient_norm, gradients_of
from pytest_fsdp_meta.observers.inventory import named_tensors, take_inventory
from pytest_fsdp_meta.observers.movement import noise, root_mean_square
from pytest_fsdp_meta.observers.optimizers import PackedOptimizer, make_optimizer
from pytest_fsdp_meta.observers.support.poison import NOTICES, poisoned_memory, restore_defaults
from pytest_fsdp_meta.observers.support.reference_record import Record, checkpoint_entries, record_at, write_record
from pytest_fsdp_meta.observers.support.sensitivity import sensitivity
from pytest_fsdp_meta.observers.training import train
from pytest_fsdp_meta.observers.values import compare_gradients
from pytest_fsdp_meta.worlds import SEED, current, doing, telling


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
    doing("recording its values")
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
        state_dict=tuple(model.state_dict()),
    )


def train_reference(
    recipe: Mapping[str, bytes], steps: int, folder: str, shares: int, facts: ReferenceFacts
) -> ReferenceFacts:
    """The facts with what training adds to them; trained a second time from the recorded values, for the losses.

    Records, in ``folder``, the gradients of the first step, the parameters after the last, and then the mean of the
    gradients of ``shares`` data-parallel ranks' micro-batches.
    """
    me = current()
    subject = _subject(me.state["reference"], recipe)
    model, seen = subject.model, _FirstGradients(record_at(folder, "gradients"))
    seen.look(model)  # where nothing is trainable there is no backward, and the ranks look for an empty record
    optimizer = make_optimizer(subject)
    run = train(subject, me.device, range(steps), (0, 1), optimizer, partial(seen.look, model))
    after = _inventory(model, ())
    write_record(record_at(folder, "updated"), ((n, t) for n, kind, t in named_tensors(model) if kind == "parameter"))
    amplified = 1.0
    if optimizer is not None and not not_shared(subject, shares):
        amplified = _accumulated(subject, shares, record_at(folder, "accumulated"))
    _restore(model, Record(record_at(folder, "values")))
    again = train(subject, me.device, range(steps), (0, 1), make_optimizer(subject))
    return replace(
        facts,
        losses=tuple(run.losses),
        losses_again=tuple(again.losses),
        batches=tuple(run.batches),
        gradients=seen.sizes,
        noise=seen.noise,
        norm=seen.norm,
        after=after,
        sensitivity=amplified,
    )


def _accumulated(subject: Subject, shares: int, path: Path) -> float:
    """Records the mean gradient at ``path``, and tells how sensitive it is; leaves the parameters changed."""
    model, device = subject.model, current().device
    slices = [share for index in range(shares) for share in micro_batches((index, shares))]
    accumulate(subject, device, slices)
    write_record(path, _whole(gradients_of(model)))

    def apart() -> Iterator[Measure | None]:
        accumulate(subject, device, slices)
        return (one.measure for one in compare_gradients(gradients_of(model), Record(path)))

    trained = (_once(tensor) for _, tensor in _tensors(model) if tensor.requires_grad)
    return sensitivity(trained, apart)


class _FirstGradients:
    """Recorded at ``path``, with their sizes and their norm."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.sizes: dict[str, float] = {}
        self.noise = 0.0
        self.norm: float | None = None

    def look(self, model: Module) -> None:
        gradients = gradients_of(model)
        write_record(self._path, _whole(gradients))
        self.sizes = {name: root_mean_square(gradient.local) for name, gradient in gradients}
        self.noise = noise(model)
        self.norm, _ = gradient_norm(model, None)


def _whole(gradients: Sequence[tuple[str, Part]]) -> list[tuple[str, Tensor]]:
    """Alone, a rank holds all of everything."""
    return [(name, part.local) for name, part in gradients]


def record_verifier(recipe: Mapping[str, bytes], path: str) -> None:
    """Records what the frozen weights were taken from."""
    write_record(Path(path), _tensors(_build("verifier", recipe)))


def checkpoint_facts(path: str) -> ReferenceFacts:
    """What the headers of a checkpoint directory say; they do not tell parameters from persistent buffers."""
    tensors = tuple(
        TensorFacts(name, "tensor", shape, shape, (), dtype, "disk")
        for name, (shape, dtype) in checkpoint_entries(path).items()
    )
    names = tuple(tensor.name for tensor in tensors)
    return ReferenceFacts("checkpoint", RankInventory(0, "disk", tensors), state_dict=names)


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
    doing(f"building the {field}")
    build = pickle.loads(recipe[field])
    with telling(NOTICES):
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
