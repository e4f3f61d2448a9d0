"""Keep the state of the random number generators, so that what the author draws does not depend on the observers."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


def random_state() -> tuple[Any, ...]:
    """Return the state of Python's, NumPy's and torch's generators; of NumPy only if it has been imported."""
    numpy = sys.modules.get("numpy")
    gpu = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    return random.getstate(), None if numpy is None else numpy.random.get_state(), torch.get_rng_state(), gpu


def restore_random_state(state: tuple[Any, ...]) -> None:
    """Set the generators to a state that ``random_state`` has returned."""
    python, numpy, cpu, gpu = state
    random.setstate(python)
    if numpy is not None:
        sys.modules["numpy"].random.set_state(numpy)
    torch.set_rng_state(cpu)
    if gpu is not None:
        torch.cuda.set_rng_state(gpu)
