"""Saving, and loading again: the state dict, torch.distributed.checkpoint, the optimizer, and the steps after it."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.optim import Optimizer

from pytest_fsdp_meta.evidence import Comparison, Export
from pytest_fsdp_meta.evidence.checkpoint import FirstStep, RankResumed, RankSaved, RankStateDict
from pytest_fsdp_meta.loader.adapter import Part
from pytest_fsdp_meta.loader.subject import Subject, SubjectError
from pytest_fsdp_meta.observers.adapters.dtensor import local_part, own_part
from pytest_fsdp_meta.observers.adapters.lookup import parts_of
from pytest_fsdp_meta.observers.batches import calling, own_share
from pytest_fsdp_meta.observers.inventory import named_tensors, non_persistent, reshard, unwrapped
from pytest_fsdp_meta.observers.loading import loaded_subject
from pytest_fsdp_meta.observers.optimizers import BY_NAME, make_optimizer
from pytest_fsdp_meta.observers.support.bits import digest
from pytest_fsdp_meta.observers.support.reference_record import Record, is_array, write_record
from pytest_fsdp_meta.observers.training import train
from pytest_fsdp_meta.observers.values import compare, compare_all
from pytest_fsdp_meta.text import clean_name, first_line
from pytest_fsdp_meta.worlds import Rank, current, doing

EXTRA_STATE = "_extra_state"
"""What torch calls the key under which a module saves whatever it likes."""
OTHER = -0.0123456789
"""No weight is that by chance, let alone all of a tensor."""


def observe_state_dict() -> RankStateDict:
    """The keys of what the author saves of the model."""
    subject = _resharded_subject()
    keys, refused = _torch_keys(subject.model)
    if subject.state_dict is not None:
        keys = tuple(_authors(subject))
    return RankStateDict(keys, refused)


def _authors(subject: Subject) -> Mapping[str, Any]:
    """The state dict as the author makes it."""
    assert subject.state_dict is not None
    with calling("Subject(state_dict=...)"):
        state: object = subject.state_dict(subject.model)
    if not isinstance(state, Mapping):
        raise SubjectError("state_dict", f"it gave {type(state).__name__}, but should give a dict by name")
    for key in state:
        if not isinstance(key, str):
            raise SubjectError(
                "state_dict",
                f"it gave a dict with a key of {type(key).__name__} ({key!r:.80}), but should give a dict by name",
            )
    return state


def _torch_keys(model: Module) -> tuple[tuple[str, ...], str]:
    try:
        return tuple(get_model_state_dict(model)), ""
    except Exception as error:  # of any kind: it looks up each key among the modules, and a hook may have renamed it
        keys = tuple(clean_name(key) for key in unwrapped(model).state_dict())
        return keys, f"{type(error).__name__}: {first_line(error, 200)}"


def save_model(folder: str) -> RankSaved:
    """Saves the model in the folder; what it held when it was saved."""
    subject = _resharded_subject()
    held = _held(subject)
    _save(subject, None, Path(folder))
    return held


def load_model(folder: str) -> RankSaved:
    """What this rank holds once the model in the folder has been loaded over other values."""
    load_over(folder)
    return _held_after(_resharded_subject())


def load_over(folder: str) -> None:
    """Loads the model in the folder over other values, and nothing more: what this raises, loading has raised."""
    subject = _resharded_subject()
    _overwrite(subject)
    _load(subject, None, Path(folder))


def compare_loaded(record: str) -> tuple[Comparison, ...]:
    """What a checkpoint keeps of the model, beside the record of the reference."""
    return compare_all(_parts(_resharded_subject().model).items(), Record(record))


def export(path: str) -> tuple[str, ...]:
    """Gathers the whole state dict, on rank 0, into a file at ``path``; the keys that it has there."""
    subject = _resharded_subject()
    doing("gathering the state dict")
    whole: Mapping[str, Any]
    if subject.state_dict is not None:
        whole = {key: _gathered(value) for key, value in _authors(subject).items()}
    else:
        whole = get_model_state_dict(subject.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if current().rank == 0:
        write_record(Path(path), ((key, value) for key, value in whole.items() if isinstance(value, Tensor)))
    return tuple(whole)


def _gathered(value: Any) -> Any:
    return value.full_tensor().cpu() if isinstance(value, DTensor) else value


def compare_export(path: str, record: str, keys: Collection[str]) -> Export:
    """Loads the export at ``path`` into the reference, strictly, and lays each of its tensors beside the record.

    Alone, where the reference is; it does not matter that it has been trained, since nothing of it is kept.
    """
    model, exported, truth = current().state["reference"], Record(path, "the export"), Record(record)
    names = [name for name in exported.names() if name in truth]
    fits = [name for name in names if exported.shape(name) == truth.shape(name)]
    state = {name: _whole(exported, name) for name in exported.names() if name in fits or name not in truth}
    known = {key for key in keys if key.endswith(EXTRA_STATE)} | set(names)
    loaded = model.load_state_dict(state, strict=False)
    return Export(
        missing=tuple(key for key in loaded.missing_keys if key not in known),
        unexpected=tuple(loaded.unexpected_keys),
        comparisons=tuple(compare(name, own_part(_whole(exported, name)), truth, name) for name in names),
    )


def first_step() -> FirstStep:
    """Makes the optimizer of ``save_all``, with a state, and tells what torch makes of that.

    The author's has been stepped in training; without one, SGD with momentum is, once.
    """
    me, subject = current(), _resharded_subject()
    trained = me.state.get("optimizer") if subject.optimizer is not None else None
    me.state["resumable"] = optimizer = trained or _optimizer(subject)
    if trained is None:
        _steps(me, subject, 1)
    names = _names(subject.model)
    due = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    without = sorted(names.get(id(p), "?") for p in due if not optimizer.state.get(p))
    # Where it keeps none of any, none is due.
    return FirstStep(_unloadable(optimizer), tuple(without) if any(optimizer.state.values()) else ())


def _unloadable(optimizer: Optimizer) -> str:
    for number, group in enumerate(optimizer.param_groups):
        if not group["params"]:
            return f"group {number} of the optimizer is empty, and torch loads no settings of an empty group"
    return ""


def save_all(folder: str) -> RankResumed:
    """Saves model and optimizer in the folder; what they held."""
    me, subject = current(), _resharded_subject()
    optimizer = me.state["resumable"]
    if subject.save is None:
        # Torch steps an optimizer without state once, by zero gradients, before it saves it; so it will when loading.
        get_optimizer_state_dict(subject.model, optimizer)
    held = _all_held(subject, optimizer, _held(subject))
    _save(subject, optimizer, Path(folder))
    return held


def load_all(folder: str) -> RankResumed:
    """What model and optimizer hold once those in the folder have been loaded over other values."""
    me, subject = current(), _resharded_subject()
    me.state["resumable"] = _optimizer(subject)
    _overwrite(subject)
    _load(subject, me.state["resumable"], Path(folder))
    return _all_held(subject, me.state["resumable"], _held_after(subject))


def go_on(steps: int) -> tuple[float, ...]:
    """Trains on from a checkpoint that was saved, as if nothing had been, or loaded."""
    me, subject = current(), _resharded_subject()
    return _steps(me, subject, steps)


def _resharded_subject() -> Subject:
    subject = loaded_subject(current())
    reshard(subject.model)
    return subject


def _persistent(model: Module) -> dict[str, Tensor]:
    transient = non_persistent(model)
    return {name: tensor for name, _, tensor in named_tensors(model) if name not in transient}


def _parts(model: Module) -> dict[str, Part]:
    """This rank's parts of what a checkpoint keeps, as far as torch reads them like any other."""
    parts = parts_of(model)
    found = {name: parts.of(name, tensor) for name, tensor in _persistent(model).items()}
    return {name: part for name, part in found.items() if is_array(part.local)}


def _save(subject: Subject, optimizer: Optimizer | None, folder: Path) -> None:
    doing("saving")
    folder.mkdir(parents=True, exist_ok=True)
    if subject.save is not None:
        with calling("Subject(save=...)"):
            subject.save(subject.model, optimizer, folder)
        return
    dcp.save(_states(subject.model, optimizer), checkpoint_id=folder)


def _load(subject: Subject, optimizer: Optimizer | None, folder: Path) -> None:
    doing("loading what was saved")
    if subject.resume is not None:
        with calling("Subject(resume=...)"):
            subject.resume(subject.model, optimizer, folder)
        return
    states = _states(subject.model, optimizer)
    # A new optimizer has a state of all that is trainable, a checkpoint none of what never had a gradient.
    unsaved = {} if optimizer is None else _unsaved(states["optimizer"]["state"], folder)
    dcp.load(states, checkpoint_id=folder)
    # What the state dict leaves out is told by its own check.
    complete = not _left_out(subject.model, states["model"])
    set_model_state_dict(subject.model, states["model"], options=StateDictOptions(strict=complete))
    if optimizer is not None:
        states["optimizer"]["state"].update(unsaved)  # without them torch refuses the rest
        set_optimizer_state_dict(subject.model, optimizer, states["optimizer"])
        names = _names(subject.model)
        for parameter in [p for p in optimizer.state if names.get(id(p)) in unsaved]:
            del optimizer.state[parameter]


def _unsaved(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Takes out of an optimizer's state what the checkpoint in the folder has no key for."""
    saved = {
        key[:end]
        for key in dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        for end, letter in enumerate(key)
        if letter == "."
    }
    return {name: state.pop(name) for name in list(state) if f"optimizer.state.{name}" not in saved}


def _states(model: Module, optimizer: Optimizer | None) -> dict[str, Any]:
    states: dict[str, Any] = {"model": get_model_state_dict(model)}
    if optimizer is not None:
        states["optimizer"] = get_optimizer_state_dict(model, optimizer)
    return states


def _left_out(model: Module, keys: Collection[str]) -> tuple[str, ...]:
    return tuple(name for name in _persistent(model) if name not in keys)


def _held(subject: Subject) -> RankSaved:
    model = subject.model
    tensors = {name: digest(local_part(part.local)) for name, part in _parts(model).items()}
    if subject.save is not None:
        return RankSaved(tensors)
    state = get_model_state_dict(model)
    extra = {key: _sum(value) for key, value in state.items() if key.endswith(EXTRA_STATE)}
    return RankSaved(tensors, extra, _left_out(model, state))


def _held_after(subject: Subject) -> RankSaved:
    """What is held once it is loaded, and which of it is what ``_overwrite`` put there."""
    held = _held(subject)
    parts = {name: local_part(part.local) for name, part in _parts(subject.model).items()}
    return replace(held, untouched=tuple(name for name, local in parts.items() if _is_filled(local)))


def _overwrite(subject: Subject) -> None:
    """Puts other values into all that a checkpoint has to bring back, so that loading nothing does not pass.

    What authors who save by themselves do not train, they may well take from where the loader took it.
    """
    done: set[int] = set()  # what is tied must not be turned round twice
    with torch.no_grad():
        trained = {name for name, tensor in _persistent(subject.model).items() if tensor.requires_grad}
        for name, part in _parts(subject.model).items():
            if subject.save is not None and name not in trained:
                continue
            local = part.local
            if local.numel() and local.data_ptr() not in done and 0 not in local.stride():
                done.add(local.data_ptr())
                _fill(local)


def _is_filled(local: Tensor) -> bool:
    """Whether it is all ``OTHER``; of what is turned round bit by bit, that does not show."""
    if not local.numel() or local.is_meta or not _takes_other(local):
        return False
    other = torch.full((), OTHER, dtype=local.dtype, device=local.device)
    return bool(torch.eq(local, other).all())


def _takes_other(local: Tensor) -> bool:
    return bool(local.is_complex() or (local.is_floating_point() and local.element_size() > 1))


def _fill(local: Tensor) -> None:
    if _takes_other(local):
        local.fill_(OTHER)
    elif local.is_floating_point():
        local.view(torch.uint8).bitwise_not_()
    else:
        local.bitwise_not_()


def _optimizer(subject: Subject) -> Optimizer:
    """The author's; where none is declared, the usual SGD with a state to save."""
    trainable = [parameter for parameter in subject.model.parameters() if parameter.requires_grad]
    if subject.optimizer is None:
        return torch.optim.SGD(trainable, lr=0.1, momentum=0.9, foreach=False)
    optimizer = make_optimizer(subject)
    assert optimizer is not None, "something is trainable"
    return optimizer


def _steps(me: Rank, subject: Subject, steps: int) -> tuple[float, ...]:
    """The losses of the first batches, which an author is sure to have."""
    run = train(subject, me.device, range(steps), own_share(subject, me), me.state["resumable"])
    reshard(subject.model)
    return tuple(run.losses)


def _all_held(subject: Subject, optimizer: Optimizer, model: RankSaved) -> RankResumed:
    names = _names(subject.model)
    state: dict[str, Mapping[str, str]] = {}
    for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        if kept := optimizer.state.get(parameter):
            name = names.get(id(parameter), f"(parameter {number} of the optimizer)")
            state[name] = {str(key): _sum(_lying_as(parameter, value)) for key, value in kept.items()}
    groups = tuple(
        {key: _sum(value) for key, value in group.items() if key not in BY_NAME} for group in optimizer.param_groups
    )
    return RankResumed(model, state, groups)


def _lying_as(parameter: Tensor, value: Any) -> Any:
    """A state as its parameter lies: made of a gradient, it may lie otherwise until it is loaded, and be the same."""
    if isinstance(parameter, DTensor) and isinstance(value, DTensor) and value.placements != parameter.placements:
        return value.redistribute(placements=parameter.placements)
    return value


def _names(model: Module) -> dict[int, str]:
    """Of tied names the first."""
    return {id(tensor): name for name, _, tensor in reversed(list(named_tensors(model)))}


def _sum(value: Any) -> str:
    """A value in few characters: equal for equal ones, however they are pickled."""
    if isinstance(value, Tensor):
        kind = str(value.dtype).removeprefix("torch.")
        return f"{kind} {tuple(value.shape)} {'on meta' if local_part(value).is_meta else digest(local_part(value))}"
    told = repr(value) if isinstance(value, (bool, int, float, str, type(None))) else " ".join(_told(value))
    return told if len(told) <= 40 else hashlib.sha256(told.encode(), usedforsecurity=False).hexdigest()[:32]


def _told(value: Any) -> Iterator[str]:
    # Torch gathers a tuple, such as Adam's betas, as a list.
    yield "list" if isinstance(value, tuple) else type(value).__name__
    if isinstance(value, Mapping):
        yield from sorted(f"{key!r}={_sum(part)}" for key, part in value.items())
    elif isinstance(value, (list, tuple)):
        yield from map(_sum, value)
    elif isinstance(value, (set, frozenset)):
        yield from sorted(map(_sum, value))
    elif isinstance(value, io.BytesIO):
        yield hashlib.sha256(value.getvalue(), usedforsecurity=False).hexdigest()[:32]
    elif isinstance(value, (bytes, bytearray)):
        yield hashlib.sha256(value, usedforsecurity=False).hexdigest()[:32]
    elif hasattr(value, "__dict__"):
        yield _sum(dict(vars(value)))
    else:
        yield repr(value)


def _whole(record: Record, name: str) -> Tensor:
    return record.read(name, [((0, size),) for size in record.shape(name)])
