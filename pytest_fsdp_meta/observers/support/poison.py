"""While a loader runs, memory that is allocated and not written is NaN (integers: their maximum, bools: True).

Uninitialised memory is then a certain finding instead of a lucky zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from pytest_fsdp_meta.worlds.rank.reset import forget_default_device

NOTICES = r"torch\.use_deterministic_algorithms\(True, warn_only=True\)|Deterministic behavior was enabled"
"""What torch says of operations without a deterministic algorithm: it is us who asked for them."""


@dataclass
class Poison:
    """Whether the poison was on until the end of its block."""

    kept: bool = False


@contextmanager
def poisoned_memory() -> Iterator[Poison]:
    """Poison for the time of the block; torch fills ``torch.empty`` only in deterministic mode.

    Seeding helpers of loaders switch that mode on and off: for the time of the block their calls change nothing.
    """
    poison, setter = Poison(), torch.use_deterministic_algorithms
    with deterministic(fill=True):
        torch.use_deterministic_algorithms = lambda mode, *, warn_only=False: None
        try:
            yield poison
        finally:
            torch.use_deterministic_algorithms = setter
            poison.kept = bool(
                torch.are_deterministic_algorithms_enabled() and torch.utils.deterministic.fill_uninitialized_memory
            )


@contextmanager
def deterministic(fill: bool = False) -> Iterator[None]:
    """Deterministic algorithms where torch has them (warnings elsewhere), the earlier state afterwards."""
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
    """What a loader or a reference may leave behind, and the observers' own tensors must not depend on."""
    torch.set_default_dtype(torch.float32)
    forget_default_device()
    torch.set_grad_enabled(True)
