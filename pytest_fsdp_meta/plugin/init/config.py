"""Choose what the test passes for each part of a config: of those that are read, and of the fields of its class."""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from typing import Any

from pytest_fsdp_meta.plugin.init.reads import EMPTY, Reads, signature_of
from pytest_fsdp_meta.plugin.init.values import PATHS, guess, role_of

VARIABLES = {
    "fsdp": ("fsdp", "None", "fsdp"),
    "mesh": ("mesh", "None", "fsdp.mesh"),
    "group": ("group", "None", "fsdp.mesh.get_group()"),
    "local_rank": ("local_rank", "0", "fsdp.local_rank"),
    "rank": ("rank", "0", "fsdp.rank"),
    "world_size": ("world_size", "1", "fsdp.world_size"),
    "device_type": ("device", '"cpu"', "fsdp.device.type"),
    "device": ("device", '"cpu"', "fsdp.device.type"),
}
"""Role -> the parameter of ``make_config`` for it, its value outside of ranks, and its value on a rank."""
NO_CONFIGS = {"builtins", "types", "typing", "argparse", "inspect", "omegaconf", "ml_collections", "collections"}
"""Packages whose classes take no fields as arguments."""
LARGE = 64
"""The largest default of an integer of unknown meaning that the test leaves as it is."""
DEPTH = 4


def is_config_class(kind: Any) -> bool:
    """Return whether a config of this class is made by passing its fields."""
    return (
        inspect.isclass(kind) and kind.__module__.partition(".")[0] not in NO_CONFIGS and not typing.is_typeddict(kind)
    )


def add_fields(reads: Reads, kind: Any, depth: int = DEPTH) -> None:
    """Replace the parts by the fields of the class, with their annotations and defaults."""
    hints = hints_of(kind) or hints_of(kind.__init__)
    made = {field.name: field for field in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else {}
    reads.kind, reads.attributes, fields = kind, True, {}
    for name, one in signature_of(kind).items():
        part = fields[name] = reads.parts.get(name, Reads())
        part.annotation, part.default = hints.get(name, one.annotation), one.default
        factory = made[name].default_factory if name in made else dataclasses.MISSING
        if inspect.isclass(factory):
            part.annotation = factory
        is_union = typing.get_origin(part.annotation) in (typing.Union, types.UnionType) and part.parts
        for annotation in typing.get_args(part.annotation) if is_union else (part.annotation,):
            if _is_nested(annotation) and depth:
                add_fields(part, annotation, depth - 1)
    reads.parts = fields


def _is_nested(kind: Any) -> bool:
    known = ("__dataclass_fields__", "model_fields", "__attrs_attrs__")  # dataclasses, pydantic, attrs
    return inspect.isclass(kind) and any(hasattr(kind, name) for name in known)


def hints_of(kind: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(kind)
    except Exception:  # a name that only type checkers import
        return {}


def choose_values(reads: Reads, *, has_mesh: bool) -> None:
    """Choose the expression for each part, or leave the default of its class; neither where nothing is known."""
    for name, part in reads.parts.items():
        has_parts = bool(part.parts or part.unpacked or part.kind)
        if has_parts and role_of(name, part.annotation) not in VARIABLES:
            choose_values(part, has_mesh=has_mesh)
            part.is_kept = part.default is not EMPTY and all(below.is_kept for below in part.parts.values())
        else:
            _choose(name, part, has_mesh)


def _choose(name: str, part: Reads, has_mesh: bool) -> None:
    role, default = role_of(name, part.annotation), part.default
    has_default = default is not EMPTY
    if default is None or (has_default and role in ("fsdp", "mesh", "group")):
        part.is_kept = True
    elif role in VARIABLES:
        if has_mesh or role not in ("mesh", "group"):
            is_object = bool(part.parts) or getattr(part.annotation, "__module__", "") == "torch"
            variable = VARIABLES[role][0]
            part.role = role
            part.expression = f"torch.device({variable})" if is_object and role == "device" else variable
        part.parts = {}
    elif part.expression:
        pass  # the size of the tiny checkpoint
    elif not has_default:
        part.expression = guess(name, part.annotation, "folder")
    elif isinstance(default, int) and not isinstance(default, bool):
        part.expression = guess(name, int, "folder") if default > 1 else ""  # 0 and 1 switch something off
        part.is_kept = not part.expression and (default <= LARGE or not part.reader)
    elif isinstance(default, str) and role == "checkpoint" and _is_path(name, default):
        part.expression = guess(name, part.annotation, "folder")
    else:
        part.is_kept = True


def _is_path(name: str, default: str) -> bool:
    return "/" in default or name.lower().split("_")[-1] in {*PATHS, "id", "name"}


def roles_of(reads: Reads) -> set[str]:
    """Return the roles of all parts that the test sets."""
    found = {reads.role} - {""}
    return found.union(*(roles_of(part) for part in reads.parts.values()))
