"""Observe the state dict of the model: its keys, and the full state dict that is gathered for other programs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor
from torch.nn import Module

from pytest_fsdp_meta.evidence import Export
from pytest_fsdp_meta.evidence.checkpoint import RankStateDict
from pytest_fsdp_meta.loader.subject import Subject, SubjectError
from pytest_fsdp_meta.observers.adapters.dtensor import own_part
from pytest_fsdp_meta.observers.batches import calling_field
from pytest_fsdp_meta.observers.fingerprints import fingerprint
from pytest_fsdp_meta.observers.inventory import unwrapped
from pytest_fsdp_meta.observers.loading import resharded_subject
from pytest_fsdp_meta.observers.support.reference_record import Record, write_record
from pytest_fsdp_meta.observers.values import compare
from pytest_fsdp_meta.text import clean_name, first_line
from pytest_fsdp_meta.worlds import current, doing

EXTRA_STATE = "_extra_state"
"""The last part of the key under which torch saves the extra state of a module."""


def observe_state_dict() -> RankStateDict:
    """Return the keys of the author's state dict, or else of torch's."""
    subject = resharded_subject()
    keys, refused = _torch_keys(subject.model)
    if subject.state_dict is not None:
        keys = tuple(_author_state_dict(subject))
    return RankStateDict(keys, refused)


def fingerprint_state_dict() -> dict[str, str]:
    """Return fingerprints of what the author's ``state_dict(model)`` returns now, by key."""
    return {key: fingerprint(value) for key, value in _author_state_dict(resharded_subject()).items()}


def export(path: str) -> tuple[str, ...]:
    """Gather the full state dict into a file that rank 0 writes to ``path``; return its keys."""
    subject = resharded_subject()
    doing("gathering the state dict")
    full: Mapping[str, Any]
    if subject.state_dict is not None:
        full = {key: _gather(value) for key, value in _author_state_dict(subject).items()}
    else:
        full = get_model_state_dict(subject.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if current().rank == 0:
        write_record(Path(path), ((key, value) for key, value in full.items() if isinstance(value, Tensor)))
    return tuple(full)


def compare_export(path: str, record: str, keys: Collection[str]) -> Export:
    """Load the export at ``path`` into the reference, and compare each of its tensors with the ``record``.

    Runs in the world of the reference. ``keys`` are all keys of the export; the file has its tensors only.
    """
    model, exported, reference = current().state["reference"], Record(path, "the export"), Record(record)
    common = [name for name in exported.names() if name in reference]
    fitting = [name for name in common if exported.shape(name) == reference.shape(name)]
    loadable = [name for name in exported.names() if name in fitting or name not in reference]
    loaded = model.load_state_dict({name: exported.read_whole(name) for name in loadable}, strict=False)
    known = {key for key in keys if key.endswith(EXTRA_STATE)} | set(common)
    return Export(
        missing=tuple(key for key in loaded.missing_keys if key not in known),
        unexpected=tuple(loaded.unexpected_keys),
        comparisons=tuple(compare(name, own_part(exported.read_whole(name)), reference, name) for name in common),
        rounded={name: exported.dtype(name) for name in fitting if _rounds(exported.dtype(name), reference, name)},
    )


def _rounds(dtype: str, reference: Record, name: str) -> bool:
    """Return whether this dtype cannot hold the values that the reference has."""
    if dtype == reference.dtype(name):
        return False
    values = reference.read_whole(name)
    held = values.to(getattr(torch, dtype)).to(values.dtype)
    return bool(((held != values) & (values == values)).any())


def _author_state_dict(subject: Subject) -> Mapping[str, Any]:
    assert subject.state_dict is not None
    with calling_field("state_dict"):
        state: object = subject.state_dict(subject.model)
    wanted = "but should return a dict with names as keys"
    if not isinstance(state, Mapping):
        raise SubjectError("state_dict", f"it returned {type(state).__name__}, {wanted}")
    for key in state:
        if not isinstance(key, str):
            kind = type(key).__name__
            raise SubjectError("state_dict", f"it returned a dict with a key of {kind} ({key!r:.80}), {wanted}")
    return state


def _torch_keys(model: Module) -> tuple[tuple[str, ...], str]:
    """Return torch's keys, and why ``get_model_state_dict`` refuses the model; empty where it does not."""
    try:
        return tuple(get_model_state_dict(model)), ""
    except Exception as error:  # many types: torch looks up each key in the modules, and a hook may have renamed it
        keys = tuple(clean_name(key) for key in unwrapped(model).state_dict())
        return keys, f"{type(error).__name__}: {first_line(error, 200)}"


def _gather(value: Any) -> Any:
    return value.full_tensor().cpu() if isinstance(value, DTensor) else value
