"""Overwrite tensors before a checkpoint is loaded into them; find what loading left untouched and saving changed."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from pytest_fsdp_meta.checks.checkpoint.facts import RankSaved
from pytest_fsdp_meta.ranks.bits import digest

MARK = -0.0123456789
"""The value that fills floating-point tensors; no weight has it by chance, let alone all elements of a tensor."""
SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""torch cannot invert the bits of these unsigned integers."""

ROUNDING = 4
"""Units in the last place of the largest element by which save() may change a tensor: there and back, each rounded."""


def overwrite(local: Tensor) -> None:
    """Replace all values: by ``MARK`` where the dtype can hold it, else by their bits inverted."""
    if _can_hold_mark(local):
        local.fill_(MARK)
    elif local.is_floating_point():
        local.view(torch.uint8).bitwise_not_()
    else:
        local.view(SIGNED.get(local.dtype, local.dtype)).bitwise_not_()


def is_untouched(local: Tensor) -> bool:
    """Return whether every element is ``MARK``; False if bits were inverted, which leaves no mark."""
    if not local.numel() or local.is_meta or not _can_hold_mark(local):
        return False
    mark = torch.full((), MARK, dtype=local.dtype, device=local.device)
    return bool(torch.eq(local, mark).all())


def _can_hold_mark(local: Tensor) -> bool:
    return bool(local.is_complex() or (local.is_floating_point() and local.element_size() > 1))


def with_changes(
    held: RankSaved,
    before: Mapping[str, Tensor],
    after: Mapping[str, Tensor],
    parameters: Collection[str],
    frozen: Collection[str],
) -> RankSaved:
    """Add what save() changed. An optimizer may average the weights to save them, and then take that back.

    That rounds them. Weights that train on may be rounded; frozen ones have to stay as they are.
    """
    digests = {name: digest(local) for name, local in after.items() if name in before}
    changed = [name for name, found in digests.items() if found != held.tensors[name]]
    rounded = tuple(name for name in changed if name not in frozen and _is_rounding(before[name], after[name]))
    tensors = {**held.tensors, **{name: digests[name] for name in rounded}}
    moved = tuple(name for name in changed if name in parameters and name not in rounded)
    return replace(held, tensors=tensors, moved=moved, rounded=rounded)


def _is_rounding(before: Tensor, after: Tensor) -> bool:
    if not after.is_floating_point() or (before.dtype, before.shape) != (after.dtype, after.shape):
        return False
    apart, largest = (after.double() - before.double()).abs().max(), before.double().abs().max()
    return bool(apart <= ROUNDING * torch.finfo(after.dtype).eps * largest)
