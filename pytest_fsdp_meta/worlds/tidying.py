"""On a rank that is kept for another test: what a test left behind is put back, and what cannot be is told."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_fsdp_meta.worlds.rank import current, seed

if TYPE_CHECKING:
    import torch

DESCRIPTORS = 256
"""More open files than this above those at the beginning are a leak that would end in an error of some later test."""


@dataclass(frozen=True)
class Left:
    """What a test has left on a rank. ``stays`` names what cannot be put back, so that the rank is of no more use."""

    collectives: int
    stays: tuple[str, ...]


@dataclass(frozen=True)
class _Beginning:
    environ: Mapping[str, str]
    folder: str
    threads: frozenset[int | None]
    descriptors: int
    group: object
    dtype: torch.dtype
    deterministic: tuple[bool, bool, bool]


_BEGINNING: _Beginning | None = None


def remember() -> None:
    """Notes how this rank is before its first test."""
    import torch
    import torch.distributed as dist

    global _BEGINNING
    _BEGINNING = _Beginning(
        environ=dict(os.environ),
        folder=os.getcwd(),
        threads=_threads(),
        descriptors=_descriptors(),
        group=dist.group.WORLD,
        dtype=torch.get_default_dtype(),
        deterministic=_deterministic(),
    )


def tidy() -> Left:
    """Puts back environment, folder, state, seeds and torch's modes; calls no collective."""
    import torch
    import torch.distributed as dist

    before = _BEGINNING
    assert before is not None, "remember() comes first"
    if os.environ != before.environ:
        os.environ.clear()
        os.environ.update(before.environ)
    os.chdir(before.folder)
    current().state.clear()
    torch.set_default_dtype(before.dtype)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    mode, warn_only, torch.utils.deterministic.fill_uninitialized_memory = before.deterministic
    torch.use_deterministic_algorithms(mode, warn_only=warn_only)
    seed(current().device.type)
    stays = {
        "threads": not _threads() <= before.threads,
        "another process group": dist.group.WORLD is not before.group,
        "open files": _descriptors() > before.descriptors + DESCRIPTORS,
    }
    return Left(_collectives(dist.group.WORLD), tuple(name for name, stayed in stays.items() if stayed))


def _threads() -> frozenset[int | None]:
    return frozenset(thread.ident for thread in threading.enumerate())


def _descriptors() -> int:
    listed = Path("/proc/self/fd")
    return len(os.listdir(listed)) if listed.exists() else 0


def _deterministic() -> tuple[bool, bool, bool]:
    import torch

    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
    )


def _collectives(group: Any) -> int:
    """How many collectives this rank has begun in a group; every backend counts them, and torch has no public name."""
    return 0 if group is None else int(group._get_sequence_number_for_group())
