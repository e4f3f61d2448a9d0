"""Read, set and describe the random number generators of a rank: torch's default ones, Python's and NumPy's."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pytest_fsdp_meta.ranks.bits import digest

States = Mapping[str, Tensor]
"""Device type -> state of its default generator."""


@dataclass(frozen=True)
class AllStates:
    """The states of all generators; that of NumPy only if it has been imported."""

    torch: States
    python: Any
    numpy: Any = None


def read_all(device: torch.device) -> AllStates:
    numpy = sys.modules.get("numpy")
    return AllStates(read_states(device), random.getstate(), None if numpy is None else numpy.random.get_state())


def set_all(states: AllStates, device: torch.device) -> None:
    set_states(states.torch, device)
    random.setstate(states.python)
    if states.numpy is not None:
        sys.modules["numpy"].random.set_state(states.numpy)


def seed_all(seed: int) -> None:
    """Seed torch, Python and, if it has been imported, NumPy."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed)


def read_states(device: torch.device) -> States:
    """Return the states of the rank's default generators."""
    return {kind: _module(kind).get_rng_state(*_index(device, kind)) for kind in dict.fromkeys(("cpu", device.type))}


def set_states(states: States, device: torch.device) -> None:
    for kind, state in states.items():
        _module(kind).set_rng_state(state, *_index(device, kind))


def changed_generators(before: States, after: States) -> list[str]:
    """Return the generators, by device type, that have another state after than before."""
    return [kind for kind, state in before.items() if not torch.equal(state, after[kind])]


def draw_from_all(times: int, device: torch.device) -> None:
    """Advance each generator, by as many draws."""
    for kind in dict.fromkeys(("cpu", device.type)):
        for _ in range(times):
            torch.rand(1, device=device if kind == device.type else kind)


def seed_of(kind: str) -> int:
    """Return the seed that the default generator of this device type was last given."""
    return int(_module(kind).initial_seed())


def describe_state(state: Tensor) -> str:
    return digest(state)[:16]


def _module(kind: str) -> Any:
    return torch.random if kind == "cpu" else torch.get_device_module(kind)


def _index(device: torch.device, kind: str) -> tuple[torch.device, ...]:
    return () if kind == "cpu" else (device,)
