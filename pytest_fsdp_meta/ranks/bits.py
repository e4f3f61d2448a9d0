"""Fill memory that a loader never writes with a poison value, count it, and hash the bits of tensors.

The poison is NaN (integers: their maximum, bools: True), so that uninitialised memory is always found, also where it
would have been zero by chance. Every rank reads all its tensors, so the memory is read once, in pieces that fit the
cache, and no mask as large as the tensor is allocated unless there is something to count.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from pytest_fsdp_meta.worlds.rank.reset import forget_default_device

PIECE = 1 << 15
"""64-bit words per piece (256 KiB)."""
COMPUTED = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
"""Dtypes in which models compute, and to which FSDP2 casts without a scale. float8 is a form of storage."""


def digest(tensor: Tensor) -> str:
    """Return a hash of the bytes of a tensor, which is the same on every device.

    The hash is SHA-256 over one weighted sum modulo 2**64 per piece, with fixed odd weights. That is three times as
    fast as SHA-256 over the bytes, and unlike ``torch.hash_tensor`` it depends on the order of the elements. Raises
    TypeError for quantized tensors, because reading those as bytes ends the process.
    """
    if tensor.is_quantized:
        raise TypeError(f"{tensor.dtype} cannot be read as bytes")
    data = tensor.detach().contiguous()
    data = (torch.view_as_real(data) if data.is_complex() else data).view(-1).view(torch.uint8)
    words = data[: data.numel() // 8 * 8]
    if words.storage_offset() % 8:
        words = words.clone()  # a view of 8-byte elements must begin at a multiple of 8 bytes
    pieces = words.view(torch.int64).split(PIECE)
    weights, room = _weights(data.device), torch.empty(PIECE, dtype=torch.int64, device=data.device)
    sums = torch.empty(len(pieces), dtype=torch.int64, device=data.device)
    for number, piece in enumerate(pieces):
        size = piece.numel()
        torch.sum(torch.mul(piece, weights[:size], out=room[:size]), 0, out=sums[number])
    rest = bytes(data[words.numel() :].tolist())
    hashed = hashlib.sha256(f"{data.numel()} {sums.tolist()} ".encode() + rest, usedforsecurity=False)
    return hashed.hexdigest()[:32]


@lru_cache(maxsize=4)
def _weights(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return (torch.randint(-(2**62), 2**62, (PIECE,), generator=generator) * 2 + 1).to(device)


def count_poison(local: Tensor) -> tuple[int, int]:
    """Return the number of NaN, and the number of elements that hold the value that unwritten memory is filled with."""
    if local.dtype == torch.bool or not local.numel():
        return 0, 0  # bools are filled with True, which proves nothing
    try:
        if local.is_floating_point() or local.is_complex():
            values = local.float() if local.element_size() == 1 else local
            # One NaN makes the sum NaN. A sum that overflows is not finite either, and only costs the exact count.
            count = 0 if bool(torch.isfinite(values.sum())) else int(torch.isnan(values).sum())
            return count, count
        most = torch.iinfo(local.dtype).max
        return 0, int((local == most).sum()) if int(local.max()) == most else 0
    except (NotImplementedError, RuntimeError, TypeError):
        return 0, 0  # a packed dtype such as float4 or uint4, which torch cannot read element by element


NOTICES = (
    r"torch\.use_deterministic_algorithms\(True, warn_only=True\)|Deterministic behavior was enabled|"
    r"Using `torch\.compile\(module\)` when there are global hooks"
)
"""Torch's warnings about what the observers do: deterministic mode, and hooks on the modules of a compiled model."""


@dataclass
class Poison:
    """Whether the poison was still active at the end of its block."""

    active: bool = False


@contextmanager
def poisoned_memory() -> Iterator[Poison]:
    """Activate the poison in the block; torch fills ``torch.empty`` in deterministic mode only.

    Within the block ``torch.use_deterministic_algorithms`` does nothing, because seeding helpers of loaders call it.
    """
    poison, setter = Poison(), torch.use_deterministic_algorithms
    with deterministic(fill=True):
        torch.use_deterministic_algorithms = lambda mode, *, warn_only=False: None
        try:
            yield poison
        finally:
            torch.use_deterministic_algorithms = setter
            poison.active = bool(
                torch.are_deterministic_algorithms_enabled() and torch.utils.deterministic.fill_uninitialized_memory
            )


@contextmanager
def deterministic(fill: bool = False) -> Iterator[None]:
    """Use deterministic algorithms where torch has them (warnings elsewhere); restore the earlier state afterwards."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = fill
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = filled


def restore_defaults() -> None:
    """Reset torch's default dtype, default device and gradient mode, which a loader or a reference may have changed."""
    torch.set_default_dtype(torch.float32)
    forget_default_device()
    torch.set_grad_enabled(True)


def is_low(dtype: torch.dtype) -> bool:
    """Whether the dtype is a floating one of a lower precision than float32."""
    return bool(dtype.is_floating_point and torch.finfo(dtype).eps > torch.finfo(torch.float32).eps)
