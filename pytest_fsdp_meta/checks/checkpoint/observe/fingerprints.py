"""Reduce any value of a state dict to a fingerprint, and find the float32 copies of parameters in an optimizer."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from pytest_fsdp_meta.checks.checkpoint.facts import Fingerprint
from pytest_fsdp_meta.ranks.adapters.dtensor import local_part
from pytest_fsdp_meta.ranks.bits import digest, is_low
from pytest_fsdp_meta.ranks.inventory import named_tensors
from pytest_fsdp_meta.ranks.joined_optimizer import parts_of_optimizer

READABLE = 40
"""Most characters of a text that is not hashed."""


def fingerprint(value: Any) -> Fingerprint:
    """Describe a value so that equal ones have equal descriptions, however they were pickled.

    A tensor of one number, such as Adam's step, keeps the number, which messages show, and others a hash of the
    elements.
    """
    if not isinstance(value, Tensor):
        return Fingerprint(_as_text(value, ()), _number(value))
    dtype, shape, local = str(value.dtype).removeprefix("torch."), tuple(value.shape), local_part(value)
    if local.is_meta:
        return Fingerprint("on meta", None, dtype, shape)
    if local.ndim or local.is_quantized:
        return Fingerprint(digest(local), None, dtype, shape)
    number = local.item()
    return Fingerprint(repr(number), _number(number), dtype, shape)


def _number(value: Any) -> float | None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(repr(value)) if is_number else None  # that of an int too large for a float is infinite


def _as_text(value: Any, within: tuple[Any, ...]) -> str:
    """``within`` are the values that contain this one; a value that contains itself is described as such."""
    if any(value is outer for outer in within):
        return f"the same {type(value).__name__} again"
    if isinstance(value, Tensor):
        return str(fingerprint(value))
    plain = isinstance(value, (bool, int, float, str, type(None)))
    text = repr(value) if plain else " ".join(_describe(value, (*within, value)))
    return text if len(text) <= READABLE else _hash(text.encode())


def _describe(value: Any, within: tuple[Any, ...]) -> Iterator[str]:
    # torch gathers a tuple, such as Adam's betas, as a list.
    yield "list" if isinstance(value, tuple) else type(value).__name__
    if isinstance(value, Mapping):
        yield from sorted(f"{key!r}={_as_text(part, within)}" for key, part in value.items())
    elif isinstance(value, (list, tuple)):
        yield from (_as_text(part, within) for part in value)
    elif isinstance(value, (set, frozenset)):
        yield from sorted(_as_text(part, within) for part in value)
    elif isinstance(value, Enum):
        yield value.name
    elif isinstance(value, torch.Generator):
        yield digest(value.get_state())
    elif isinstance(value, io.BytesIO):
        yield _hash(value.getvalue())
    elif isinstance(value, (bytes, bytearray)):
        yield _hash(value)
    elif hasattr(value, "__dict__"):
        yield _as_text(dict(vars(value)), within)
    elif not any("__repr__" in vars(kind) for kind in type(value).__mro__[:-1]):  # that of object shows the address
        slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
        yield _as_text({name: getattr(value, name, None) for name in slots}, within)
    else:
        yield repr(value)


def _hash(data: bytes | bytearray) -> str:
    return hashlib.sha256(data, usedforsecurity=False).hexdigest()[:32]


def float_copies(model: Module, optimizer: Optimizer, beside: Iterable[tuple[str, Any]]) -> dict[str, bool]:
    """Return ``RankResumed.copies``: whatever rounds to a parameter, element by element, is a copy of it.

    The values that are declared to be ``beside`` the model are compared as such.
    """
    named = ((name, local_part(tensor)) for name, kind, tensor in named_tensors(model) if kind == "parameter")
    low = [(name, local) for name, local in named if is_low(local.dtype) and local.numel() and not local.is_meta]
    declared = {local_part(value).data_ptr() for _, value in beside if isinstance(value, Tensor)} if low else ()
    names, found = {digest(local): name for name, local in low}, dict[str, bool]()
    for dtype in {local.dtype for _, local in low}:
        for key, value in _float_tensors([vars(part) for part in parts_of_optimizer(optimizer)], "", set()):
            rounded = value.to(dtype)
            if value.data_ptr() not in declared and (name := names.get(digest(rounded))):
                entry = f"{name}: {key}"
                found[entry] = found.get(entry, False) or not torch.equal(rounded.to(value.dtype), value)
    return found


def _float_tensors(value: object, key: str, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor in nested containers and optimizers with the last name that leads to it."""
    if isinstance(value, Tensor):
        if value.dtype in (torch.float32, torch.float64) and value.ndim and not value.is_meta:
            yield key, local_part(value)
        return
    if isinstance(value, Optimizer):
        value = vars(value)
    if not isinstance(value, (Mapping, list, tuple)) or id(value) in seen:
        return
    seen.add(id(value))
    for name, item in value.items() if isinstance(value, Mapping) else ((None, item) for item in value):
        yield from _float_tensors(item, name if isinstance(name, str) else key, seen)
