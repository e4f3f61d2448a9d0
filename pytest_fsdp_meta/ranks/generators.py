"""The generators of a rank (torch's default ones, Python's, NumPy's), and steps that give the same bits again.

Deterministic mode with warnings leaves two fused attentions of CUDA as they are, which add up gradients in an order
that changes from run to run. And a loader may let float32 be computed as TensorFloat-32 or bfloat16: on the ranks,
while the reference never runs that line. Both are set for the time of a judged step only.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, backends

from pytest_fsdp_meta.ranks.bits import deterministic, digest

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


FULL_PRECISION = "ieee"
FUSED_ATTENTIONS: tuple[tuple[Callable[[], bool], Callable[[bool], None]], ...] = (
    (backends.cuda.flash_sdp_enabled, backends.cuda.enable_flash_sdp),
    (backends.cuda.mem_efficient_sdp_enabled, backends.cuda.enable_mem_efficient_sdp),
    (backends.cuda.cudnn_sdp_enabled, backends.cuda.enable_cudnn_sdp),
)
"""How to read and set whether an attention without deterministic gradients may be chosen. A model that asks for one of
them by ``torch.nn.attention.sdpa_kernel`` still gets it."""


@contextmanager
def reproducible(device: torch.device) -> Iterator[None]:
    """Compute float32 as such, and on CUDA let attention choose only what is deterministic; restore all afterwards."""
    with deterministic(), ExitStack() as stack:
        _compute_float32(stack)
        if device.type == "cuda":
            stack.callback(setattr, backends.cudnn, "benchmark", backends.cudnn.benchmark)
            backends.cudnn.benchmark = False  # what it picks depends on what else runs
            for enabled, enable in FUSED_ATTENTIONS:
                stack.callback(enable, enabled())
                enable(False)
        yield


def _compute_float32(stack: ExitStack) -> None:
    """Set what a loader may have set by either of torch's two interfaces, and let ``stack`` restore it.

    The older one is set too, because torch refuses to read it where the two disagree; its value may be unreadable then.
    """
    # From version 2.9 on, torch has a precision of float32 for each library and kind of operation.
    kinds = {backends.cuda: ("matmul",), backends.cudnn: ("conv", "rnn"), backends.mkldnn: ("matmul", "conv", "rnn")}
    places: list[Any] = [getattr(library, kind, None) for library, names in kinds.items() for kind in names]
    newer = [(place, before) for place in places if isinstance(before := getattr(place, "fp32_precision", None), str)]
    # Restored in the reverse order: the older interface overwrites the newer one.
    for place, before in newer:
        stack.callback(setattr, place, "fp32_precision", before)
    with suppress(RuntimeError):
        stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
    with suppress(RuntimeError):
        stack.callback(setattr, backends.cudnn, "allow_tf32", backends.cudnn.allow_tf32)
    torch.set_float32_matmul_precision("highest")
    backends.cudnn.allow_tf32 = False
    for place, _ in newer:
        place.fp32_precision = FULL_PRECISION
