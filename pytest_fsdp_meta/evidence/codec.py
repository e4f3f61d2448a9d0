"""Convert dataclasses to plain JSON values and back by their type hints.

Floats that JSON cannot represent are written as strings: "NaN", "Infinity", "-Infinity". All fields are written,
including those with their default value; when reading, a missing field gets its default and an unknown one is ignored.
"""

from __future__ import annotations

import math
import secrets
import types
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from pytest_fsdp_meta.text import LINES, printable

T = TypeVar("T")
NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
PLAIN = (str, bool, int)
MOST = 2**64
"""The largest int that is read: no size or seed is larger, and arithmetic with floats would overflow."""


def to_plain(value: Any) -> Any:
    """Return values that ``json.dumps(..., allow_nan=False)`` accepts; sets become sorted lists."""
    if is_dataclass(value):
        return {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [to_plain(item) for item in value]
    if isinstance(value, frozenset):
        return sorted(to_plain(item) for item in value)
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    assert value is None or isinstance(value, (str, bool, int, float)), value
    return value


def from_plain(kind: type[T], data: Any) -> T:
    """Build a dataclass from the output of ``to_plain``. Its texts are made printable: they are shown in terminals.

    Raises ValueError with the path of the first wrong value and what it should be.
    """
    value: T = _parse(kind, data, kind.__name__)
    return value


_hints = cache(get_type_hints)


def _parse(kind: Any, data: Any, path: str) -> Any:
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        assert inner[1:] == (type(None),), kind
        return None if data is None else _parse(inner[0], data, path)
    if is_dataclass(kind):
        return _parse_dataclass(kind, data, path)
    if origin is tuple:
        return _parse_tuple(inner, data, path)
    if origin is frozenset:
        return frozenset(_parse(inner[0], item, path) for item in _require(list, data, path))
    if origin is not None and issubclass(origin, Mapping):
        items = _require(dict, data, path).items()
        return {printable(key, LINES): _parse(inner[1], item, f"{path}[{key!r}]") for key, item in items}
    if kind is float:
        if isinstance(data, str) and data in NON_FINITE:
            return NON_FINITE[data]
        if type(data) is not int:
            return _require(float, data, path)
        try:
            return float(data)
        except OverflowError:
            raise ValueError(f"{path}: the number is too large for a float") from None
    assert kind in PLAIN, kind
    value = _require(kind, data, path)
    if kind is int and abs(value) > MOST:
        raise ValueError(f"{path}: the number is too large")
    return printable(value, LINES) if kind is str else value


def _parse_dataclass(kind: Any, data: Any, path: str) -> Any:
    _require(dict, data, path)
    arguments = {}
    for field in fields(kind):
        if field.name in data:
            arguments[field.name] = _parse(_hints(kind)[field.name], data[field.name], f"{path}.{field.name}")
        elif field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"{path}: {field.name!r} is missing")
    try:
        read = kind(**arguments)
        if hasattr(read, "check_stored"):
            read.check_stored()
        return read
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _parse_tuple(inner: tuple[Any, ...], data: Any, path: str) -> tuple[Any, ...]:
    _require(list, data, path)
    if len(inner) == 2 and inner[1] is Ellipsis:
        return tuple(_parse(inner[0], item, f"{path}[{index}]") for index, item in enumerate(data))
    if len(data) != len(inner):
        raise ValueError(f"{path}: {len(data)} items, but should be {len(inner)}")
    pairs = zip(inner, data, strict=True)
    return tuple(_parse(kind, item, f"{path}[{index}]") for index, (kind, item) in enumerate(pairs))


def _require(kind: type, data: Any, path: str) -> Any:
    if type(data) is not kind:
        raise ValueError(f"{path}: {data!r:.60}, but should be {kind.__name__}")
    return data


def write_whole(path: Path, data: bytes) -> Path:
    """Write a file atomically: to a temporary name first, then renamed. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with temporary.open("xb") as file:  # another user of the folder cannot have put a link there
            file.write(data)
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise
    return path
