"""Fill memory that a loader allocates but never writes with NaN (integers: their maximum, bools: True).

Uninitialised memory is then always found, also where it would have been zero by chance.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from pytest_fsdp_meta.worlds.rank.reset import forget_default_device

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
