"""Reduce a batch of the author's own loader to one digest for each row."""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor

from pytest_fsdp_meta.loader.subject import SubjectError
from pytest_fsdp_meta.ranks.adapters.dtensor import local_part
from pytest_fsdp_meta.ranks.bits import digest

MOST_ROWS = 1024
"""Rows of one batch. With more, dim 0 is that of packed tokens, and the whole batch counts as one row."""
PACKED = "cu_seq"
"""Part of the name of an entry with the boundaries of sequences that are packed along dim 0."""
MASK = "attention_mask"
SCALARS = (str, bytes, bool, int, float, type(None))
RAGGED = (torch.jagged, torch.sparse_coo, torch.sparse_csr)


def digest_rows(batch: Any, number: int) -> tuple[str, ...]:
    """Return a short hash of each row, of all its entries together; ``number`` is that of the batch, for errors.

    Where there is an ``attention_mask``, what it masks is left out: padding depends on the other rows of a batch.
    """
    samples = _samples(batch)
    if samples is not None:
        return tuple(_hash(_describe(sample)) for sample in samples)
    entries = dict(_entries(batch))
    sizes = Counter(value.shape[0] for value in entries.values() if isinstance(value, Tensor) and value.ndim)
    if not sizes:
        raise SubjectError(
            "data",
            f"batch {number} is {type(batch).__name__} without a tensor that has rows, but should be a tensor, or a "
            "dict or sequence of tensors with its rows in dim 0",
        )
    rows = sizes.most_common(1)[0][0]
    if not rows:
        raise SubjectError("data", f"batch {number} has no rows")
    if rows > MOST_ROWS or any(PACKED in path for path in entries):
        return (_hash(_describe(batch)),)
    columns = {path: value for path, value in entries.items() if _length(value) == rows}
    kept = _unmasked(columns)
    return tuple(_hash(_describe_row(columns, row, kept)) for row in range(rows))


def _samples(batch: Any) -> list[Any] | None:
    """Return the rows of a batch that was not collated: a list of dicts with the same keys."""
    if not isinstance(batch, list) or len(batch) < 2 or not all(isinstance(sample, Mapping) for sample in batch):
        return None
    return batch if len({frozenset(sample) for sample in batch}) == 1 else None


def _entries(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each tensor, and each list of plain values, with its path in the batch."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        value = torch.as_tensor(value) if value.dtype.kind in "biufc" else value.tolist()
    if isinstance(value, Tensor):
        if value.layout not in RAGGED and not value.is_quantized:
            yield path, local_part(value).detach().cpu()
    elif hasattr(value, "items"):
        for key, part in value.items():
            yield from _entries(part, f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        if value and all(isinstance(part, SCALARS) for part in value):
            yield path, list(value)
            return
        for key, part in enumerate(value):
            yield from _entries(part, f"{path}.{key}")
    elif is_dataclass(value):
        yield from _entries(vars(value), path)


def _length(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.shape[0] if value.ndim else -1
    return len(value)


def _unmasked(columns: Mapping[str, Any]) -> Tensor | None:
    masks = [value for path, value in columns.items() if path.rpartition(".")[2] == MASK and isinstance(value, Tensor)]
    return masks[0] != 0 if len(masks) == 1 and masks[0].ndim == 2 else None


def _describe_row(columns: Mapping[str, Any], row: int, kept: Tensor | None) -> Iterator[str]:
    for path, value in columns.items():
        if not isinstance(value, Tensor):
            yield f"{path}={value[row]!r}"
            continue
        own = value[row]
        if kept is not None and value.shape[: kept.ndim] == kept.shape:
            own = own[kept[row]]
        yield f"{path}={tuple(own.shape)} {digest(own)}"


def _describe(value: Any) -> Iterator[str]:
    for path, part in _entries(value):
        yield f"{path}={tuple(part.shape)} {digest(part)}" if isinstance(part, Tensor) else f"{path}={part!r}"


def _hash(parts: Iterator[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode(), usedforsecurity=False).hexdigest()[:16]
