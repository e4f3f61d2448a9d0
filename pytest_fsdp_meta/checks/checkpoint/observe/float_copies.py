"""Find the copies of low-precision parameters that an optimizer keeps in float32, wherever it keeps them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from pytest_fsdp_meta.checks.training.observe.beside import Beside
from pytest_fsdp_meta.ranks.adapters.dtensor import local_part
from pytest_fsdp_meta.ranks.bits import digest
from pytest_fsdp_meta.ranks.inventory import named_tensors
from pytest_fsdp_meta.ranks.joined_optimizer import parts_of_optimizer
from pytest_fsdp_meta.ranks.precision import is_low


def float_copies(model: Module, optimizer: Optimizer, beside: Beside) -> dict[str, bool]:
    """Return ``RankResumed.copies``: whatever rounds to a parameter, element by element, is a copy of it.

    Those that are declared to be ``beside`` the model are compared as such.
    """
    named = ((name, local_part(tensor)) for name, kind, tensor in named_tensors(model) if kind == "parameter")
    low = [(name, local) for name, local in named if is_low(local.dtype) and local.numel() and not local.is_meta]
    declared = (
        {local_part(value).data_ptr() for _, value in beside.entries() if isinstance(value, Tensor)} if low else ()
    )
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
