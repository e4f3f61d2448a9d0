"""Observe the state dict of the model: its keys, and fingerprints of what the author's function returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.nn import Module

from pytest_fsdp_meta.checks.checkpoint.facts import RankStateDict
from pytest_fsdp_meta.checks.checkpoint.observe.fingerprints import fingerprint
from pytest_fsdp_meta.checks.materialisation.observe import resharded_subject
from pytest_fsdp_meta.loader.subject import Subject, SubjectError
from pytest_fsdp_meta.ranks.adapters import zero3
from pytest_fsdp_meta.ranks.batches import calling_field
from pytest_fsdp_meta.ranks.inventory import unwrapped
from pytest_fsdp_meta.text import clean_name, first_line

EXTRA_STATE = "_extra_state"
"""The last part of the key under which torch saves the extra state of a module."""


def observe_state_dict() -> RankStateDict:
    """Return the keys of the author's state dict, or else of torch's."""
    subject = resharded_subject()
    keys, refused = _torch_keys(subject.model)
    if subject.state_dict is not None:
        keys = tuple(author_state_dict(subject))
    return RankStateDict(keys, refused)


def fingerprint_state_dict() -> dict[str, str]:
    """Return fingerprints of what the author's ``state_dict(model)`` returns now, by key."""
    return {key: fingerprint(value) for key, value in author_state_dict(resharded_subject()).items()}


def author_state_dict(subject: Subject) -> Mapping[str, Any]:
    """Return what the author's ``state_dict(model)`` returns. Raises SubjectError for anything but a dict by name."""
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
    """Return torch's keys, and why ``get_model_state_dict`` refuses the model; empty where it does not.

    torch does not know DeepSpeed's engine, which saves what is inside it.
    """
    model = unwrapped(model) if zero3.is_wrapper(model) else model
    try:
        return tuple(get_model_state_dict(model)), ""
    except Exception as error:  # many types: torch looks up each key in the modules, and a hook may have renamed it
        keys = tuple(clean_name(key) for key in unwrapped(model).state_dict())
        return keys, f"{type(error).__name__}: {first_line(error, 200)}"
