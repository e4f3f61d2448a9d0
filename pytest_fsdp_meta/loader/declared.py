"""Describe, on a rank, the fields that name no tensors, in texts that are equal where ranks declare the same."""

from __future__ import annotations

import inspect
import os
from functools import partial
from hashlib import sha256
from types import CodeType
from typing import Any, NamedTuple

from pytest_fsdp_meta.loader.subject import Subject
from pytest_fsdp_meta.loader.validation import is_stateful

FROM_RANK_0 = ("reference", "verifier", "export_reference", "batch", "loss", "optimizer", "scheduler", "clip_grad_norm")
"""The fields that the reference gets from rank 0, whatever other ranks declare."""
OF_EACH_RANK = ("train_step", "save", "resume", "state_dict")
"""Functions that every rank calls as its own: those of two stages of a pipeline may differ, but each has one."""


class Declared(NamedTuple):
    """A declaration as messages show it, and what has to be equal on the ranks."""

    shown: str
    compared: str


def describe_fields(subject: Subject) -> dict[str, Declared]:
    """Describe the fields that are set, but neither ``data`` nor ``adapter``, which some ranks may lack."""
    values = {field: getattr(subject, field) for field in (*FROM_RANK_0, *OF_EACH_RANK)}
    fields = {field: _describe(value) for field, value in values.items() if value is not None}
    fields |= {field: Declared(fields[field].shown, "declared") for field in OF_EACH_RANK if field in fields}
    if subject.data_parallel is not None:  # the index is the rank's own
        size = f"a slice of {subject.data_parallel[1]}"
        fields["data_parallel"] = Declared(size, size)
    if subject.beside:
        kept = {name: _describe(subject.beside[name]) for name in sorted(subject.beside)}
        compared = {name: "" if is_stateful(subject.beside[name]) else kept[name].compared for name in kept}
        fields["beside"] = Declared(", ".join(f"{name}: {one.shown}" for name, one in kept.items()), str(compared))
    return fields


def _describe(value: Any) -> Declared:
    """Describe a path by itself, a function by its code, and another object by its class.

    What a function holds, and what is bound to it, is left out: a mesh, a device or a number may be the rank's own.
    """
    if isinstance(value, (str, os.PathLike)):
        path = os.path.abspath(value)
        return Declared(repr(path), path)
    while isinstance(value, partial):
        value = value.func
    function = inspect.unwrap(value)
    code = getattr(function, "__code__", None)
    named = function if hasattr(function, "__qualname__") else type(function)
    if not isinstance(code, CodeType):
        return Declared(named.__qualname__, f"{named.__module__}.{named.__qualname__}")
    digest = sha256(repr((function.__qualname__, _constant(code))).encode()).hexdigest()
    return Declared(f"{function.__name__} ({os.path.basename(code.co_filename)}:{code.co_firstlineno})", digest)


def _constant(value: object) -> object:
    """Return a constant of a function so that its repr is the same in every process; for code, what makes it up."""
    if isinstance(value, CodeType):
        names = (value.co_names, value.co_varnames, value.co_freevars)
        return value.co_code, names, [_constant(constant) for constant in value.co_consts]
    return sorted(map(repr, value)) if isinstance(value, frozenset) else value
