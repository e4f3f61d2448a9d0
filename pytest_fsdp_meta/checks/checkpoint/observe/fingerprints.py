"""Reduce any value of a state dict to a short string that is equal for equal values."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from pytest_fsdp_meta.ranks.adapters.dtensor import local_part
from pytest_fsdp_meta.ranks.bits import digest

READABLE = 40
"""Most characters of a fingerprint that is not hashed."""


def fingerprint(value: Any, within: tuple[Any, ...] = ()) -> str:
    """Return a short string that is equal for equal values, however they were pickled.

    ``within`` are the values that contain this one; a value that contains itself is described as such.
    """
    if any(value is outer for outer in within):
        return f"the same {type(value).__name__} again"
    if isinstance(value, Tensor):
        local, dtype = local_part(value), str(value.dtype).removeprefix("torch.")
        is_number = not local.ndim and not local.is_quantized  # such as Adam's step, which messages show
        content = "on meta" if local.is_meta else repr(local.item()) if is_number else digest(local)
        return f"{dtype} {tuple(value.shape)} {content}"
    plain = isinstance(value, (bool, int, float, str, type(None)))
    text = repr(value) if plain else " ".join(_describe(value, (*within, value)))
    return text if len(text) <= READABLE else _hash(text.encode())


def _describe(value: Any, within: tuple[Any, ...]) -> Iterator[str]:
    # torch gathers a tuple, such as Adam's betas, as a list.
    yield "list" if isinstance(value, tuple) else type(value).__name__
    if isinstance(value, Mapping):
        yield from sorted(f"{key!r}={fingerprint(part, within)}" for key, part in value.items())
    elif isinstance(value, (list, tuple)):
        yield from (fingerprint(part, within) for part in value)
    elif isinstance(value, (set, frozenset)):
        yield from sorted(fingerprint(part, within) for part in value)
    elif isinstance(value, Enum):
        yield value.name
    elif isinstance(value, torch.Generator):
        yield digest(value.get_state())
    elif isinstance(value, io.BytesIO):
        yield _hash(value.getvalue())
    elif isinstance(value, (bytes, bytearray)):
        yield _hash(value)
    elif hasattr(value, "__dict__"):
        yield fingerprint(dict(vars(value)), within)
    elif not any("__repr__" in vars(kind) for kind in type(value).__mro__[:-1]):  # that of object shows the address
        slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
        yield fingerprint({name: getattr(value, name, None) for name in slots}, within)
    else:
        yield repr(value)


def _hash(data: bytes | bytearray) -> str:
    return hashlib.sha256(data, usedforsecurity=False).hexdigest()[:32]
