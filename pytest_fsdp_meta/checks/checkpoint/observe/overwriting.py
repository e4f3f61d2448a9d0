"""Overwrite tensors before a checkpoint is loaded into them, and find out what loading left untouched."""

from __future__ import annotations

import torch
from torch import Tensor

MARK = -0.0123456789
"""The value that fills floating-point tensors; no weight has it by chance, let alone all elements of a tensor."""
SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""torch cannot invert the bits of these unsigned integers."""


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
