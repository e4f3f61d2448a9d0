"""Read, set and describe torch's default generators of a rank: that of the CPU, and that of its device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pytest_fsdp_meta.observers.support.bits import digest

States = Mapping[str, Tensor]
"""Device type -> state of its default generator."""


def read_states(device: torch.device) -> States:
    """Return the states of the rank's default generators."""
    return {kind: _module(kind).get_rng_state(*_index(device, kind)) for kind in dict.fromkeys(("cpu", device.type))}


def set_states(states: States, device: torch.device) -> None:
    for kind, state in states.items():
        _module(kind).set_rng_state(state, *_index(device, kind))


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
