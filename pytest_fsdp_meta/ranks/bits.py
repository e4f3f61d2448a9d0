"""Hash the bits of a tensor, and count the elements that hold the poison value.

Every rank runs this over all its tensors, so both functions read the memory once, in pieces that fit the cache, and
allocate no mask as large as the tensor unless there is something to count.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import torch
from torch import Tensor

PIECE = 1 << 15
"""64-bit words per piece (256 KiB)."""


def digest(tensor: Tensor) -> str:
    """Return a hash of the bytes of a tensor, which is the same on every device.

    The hash is SHA-256 over one weighted sum modulo 2**64 per piece, with fixed odd weights. That is three times as
    fast as SHA-256 over the bytes, and unlike ``torch.hash_tensor`` it depends on the order of the elements. Raises
    TypeError for quantized tensors, because reading those as bytes ends the process.
    """
    if tensor.is_quantized:
        raise TypeError(f"{tensor.dtype} cannot be read as bytes")
    data = _bytes(tensor)
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


def _bytes(tensor: Tensor) -> Tensor:
    data = tensor.detach().contiguous()
    return (torch.view_as_real(data) if data.is_complex() else data).view(-1).view(torch.uint8)


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
            return (count := _count_nan(local)), count
        most = torch.iinfo(local.dtype).max
        return 0, int((local == most).sum()) if int(local.max()) == most else 0
    except (NotImplementedError, RuntimeError, TypeError):
        return 0, 0  # a packed dtype such as float4 or uint4, which torch cannot read element by element


def _count_nan(local: Tensor) -> int:
    values = local.float() if local.element_size() == 1 else local
    # One NaN makes the sum NaN. A sum that overflows is not finite either, and only costs the exact count.
    return 0 if bool(torch.isfinite(values.sum())) else int(torch.isnan(values).sum())
