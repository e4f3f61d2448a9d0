"""While a loader runs, memory that is allocated and not written is NaN (integers: their maximum, bools: True).

Uninitialised memory is then a certain finding instead of a lucky zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Poison for the time of the block; torch fills ``torch.empty`` only in deterministic mode."""
    with deterministic(fill=True):
        yield


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
