"""Describe what one rank declares in short texts, which are equal on ranks that declare the same."""

from __future__ import annotations

import inspect
import os
from functools import partial
from types import CodeType
from typing import Any
from zlib import crc32

from pytest_fsdp_meta.evidence import SubjectFacts
from pytest_fsdp_meta.loader.subject import Subject
from pytest_fsdp_meta.loader.validation import is_stateful

FROM_RANK_0 = ("reference", "verifier", "export_reference", "batch", "loss", "optimizer", "scheduler")
"""What is sent from rank 0 to the reference as it is, whatever other ranks declare."""
OF_EACH_RANK = ("train_step", "save", "resume", "state_dict")
"""Functions that every rank needs, and calls as its own: those of two stages of a pipeline may differ."""


def describe_declarations(subject: Subject, facts: SubjectFacts) -> dict[tuple[str, tuple[str, ...]], str]:
    """Return a text of each declaration, by the field and the tensors that it is about.

    ``data``, ``adapter``, ``whole_while_loading`` and the index of ``data_parallel`` are a rank's own, and left out.
    """
    share, kept = subject.data_parallel, sorted(subject.beside.items())
    plain = {
        **{field: _describe(getattr(subject, field)) for field in (*FROM_RANK_0, "clip_grad_norm")},
        **{field: "declared" for field in OF_EACH_RANK if getattr(subject, field) is not None},
        "beside": ", ".join(name if is_stateful(one) else f"{name}: {_describe(one)}" for name, one in kept),
        "data_parallel": f"a slice of {share[1]}" if share else "",
        "loss_over_ranks": "" if facts.loss_over_ranks == "mean" else facts.loss_over_ranks,
        "max_grad_norm": str(facts.max_grad_norm or ""),
        "kept_attributes": ", ".join(sorted(facts.kept_attributes)),
    }
    by_name = {
        "unsharded": dict.fromkeys(facts.unsharded, "declared"),
        "offloaded": dict.fromkeys(facts.offloaded, "declared"),
        "on_some_ranks": dict.fromkeys(facts.on_some_ranks, "declared"),
        "frozen": {name: "declared" if source == name else source for name, source in facts.frozen.items()},
        "drawn": {name: str(facts.drawn_rows.get(name, "declared")) for name in facts.drawn},
        "placements": {name: ", ".join(placements) for name, placements in facts.placements.items()},
    }
    return {
        **{(field, ()): text for field, text in plain.items() if text},
        **{("tied", tuple(sorted(group))): "declared" for group in facts.tied},
        **{(field, (name,)): text for field, names in by_name.items() for name, text in names.items()},
    }


def _describe(value: Any) -> str:
    """Describe a path by itself, a function by its place and its code, and another object by its class.

    What a function holds or is bound to is left out: a mesh, a device or a number may be the rank's own.
    """
    if value is None or isinstance(value, (str, os.PathLike)):
        return "" if value is None else os.path.abspath(value)
    while isinstance(value, partial):
        value = value.func
    function = inspect.unwrap(value)
    code = getattr(function, "__code__", None)
    if not isinstance(code, CodeType):
        return str(getattr(function, "__qualname__", type(function).__qualname__))
    constants = [repr(one) for one in code.co_consts if not isinstance(one, (CodeType, frozenset))]
    digest = crc32(repr((code.co_code, code.co_names, constants)).encode())  # two functions may be on one line
    return f"{function.__name__} ({os.path.basename(code.co_filename)}:{code.co_firstlineno}, code {digest:08x})"
