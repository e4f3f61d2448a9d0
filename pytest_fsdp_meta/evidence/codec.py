"""Dataclasses as plain JSON and back, by their type hints; and the JSON schema of such a class.

Numbers that JSON does not have are written as strings: "NaN", "Infinity", "-Infinity". A field with its default is
written all the same, and one that is missing is read as its default.
"""

from __future__ import annotations

import math
import os
import types
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
ODD = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
PLAIN = {str: "string", bool: "boolean", int: "integer"}


def to_plain(value: Any) -> Any:
    """What ``json.dumps(..., allow_nan=False)`` takes. Sets become sorted lists."""
    if is_dataclass(value):
        return {one.name: to_plain(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(one) for key, one in value.items()}
    if isinstance(value, (tuple, list)):
        return [to_plain(one) for one in value]
    if isinstance(value, frozenset):
        return sorted(to_plain(one) for one in value)
    if isinstance(value, float) and not math.isfinite(value):
        return next(name for name, odd in ODD.items() if odd == value or (odd != odd and value != value))
    assert value is None or isinstance(value, (str, bool, int, float)), value
    return value


def from_plain(kind: type[T], data: Any) -> T:
    """The inverse of ``to_plain``. Raises ValueError that says where, and what should be there."""
    read: T = _read(kind, data, kind.__name__)
    return read


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _read(kind: Any, data: Any, where: str) -> Any:
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        assert inner[1:] == (type(None),), kind
        return None if data is None else _read(inner[0], data, where)
    if is_dataclass(kind):
        return _read_dataclass(kind, data, where)
    if origin is tuple:
        return _read_tuple(inner, data, where)
    if origin is frozenset:
        return frozenset(_read(inner[0], one, where) for one in _expect(list, data, where))
    if origin is not None and issubclass(origin, Mapping):
        return {key: _read(inner[1], one, f"{where}[{key!r}]") for key, one in _expect(dict, data, where).items()}
    if kind is float:
        if isinstance(data, str) and data in ODD:
            return ODD[data]
        return _float(data, where) if type(data) is int else _expect(float, data, where)
    assert kind in PLAIN, kind
    return _expect(kind, data, where)


def _float(data: int, where: str) -> float:
    try:
        return float(data)
    except OverflowError:
        raise ValueError(f"{where}: a number that is too large") from None


def _read_dataclass(kind: Any, data: Any, where: str) -> Any:
    _expect(dict, data, where)
    given = {}
    for one in fields(kind):
        if one.name in data:
            given[one.name] = _read(_hints(kind)[one.name], data[one.name], f"{where}.{one.name}")
        elif one.default is MISSING and one.default_factory is MISSING:
            raise ValueError(f"{where}: {one.name!r} is missing")
    return kind(**given)


def _read_tuple(inner: tuple[Any, ...], data: Any, where: str) -> tuple[Any, ...]:
    _expect(list, data, where)
    if len(inner) == 2 and inner[1] is Ellipsis:
        return tuple(_read(inner[0], one, f"{where}[{index}]") for index, one in enumerate(data))
    if len(data) != len(inner):
        raise ValueError(f"{where}: {len(data)} items, but should be {len(inner)}")
    pairs = zip(inner, data, strict=True)
    return tuple(_read(kind, one, f"{where}[{index}]") for index, (kind, one) in enumerate(pairs))


def _expect(kind: type, data: Any, where: str) -> Any:
    if type(data) is not kind:
        raise ValueError(f"{where}: {data!r:.60}, but should be {kind.__name__}")
    return data


def schema_of(kind: type, title: str) -> dict[str, Any]:
    """The JSON schema (draft 2020-12) of what ``to_plain`` makes of a dataclass."""
    known: dict[str, Any] = {}
    told = _schema(kind, known)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title, **told, "$defs": known}


def _schema(kind: Any, known: dict[str, Any]) -> dict[str, Any]:
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return {"anyOf": [_schema(inner[0], known), {"type": "null"}]}
    if is_dataclass(kind):
        assert isinstance(kind, type)
        if kind.__name__ not in known:
            known[kind.__name__] = {}  # it may hold itself
            known[kind.__name__] = _schema_of_fields(kind, known)
        return {"$ref": f"#/$defs/{kind.__name__}"}
    if origin is tuple and not (len(inner) == 2 and inner[1] is Ellipsis):
        parts = [_schema(one, known) for one in inner]
        return {"type": "array", "prefixItems": parts, "minItems": len(parts), "maxItems": len(parts)}
    if origin in (tuple, frozenset):
        return {"type": "array", "items": _schema(inner[0], known)}
    if origin is not None and issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": _schema(inner[1], known)}
    if kind is float:
        return {"anyOf": [{"type": "number"}, {"enum": list(ODD)}]}
    return {"type": PLAIN[kind]}


def _schema_of_fields(kind: type, known: dict[str, Any]) -> dict[str, Any]:
    hints = _hints(kind)
    needed = [one.name for one in fields(kind) if one.default is MISSING and one.default_factory is MISSING]
    properties = {one.name: _schema(hints[one.name], known) for one in fields(kind)}
    doc = (kind.__doc__ or "").strip().split("\n\n")[0].replace("\n    ", " ")
    return {"type": "object", "description": doc, "properties": properties, "required": needed}


def write_whole(path: Path, data: bytes) -> Path:
    """Whole or not at all. Raises OSError."""
    written = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        written.write_bytes(data)
        written.replace(path)
    except OSError:
        with suppress(OSError):
            written.unlink()
        raise
    return path
