"""Run torch's functional collectives on copies in host memory, where gloo would take a GPU's memory for the host's.

DTensors are gathered by them. gloo's coalesced all-gather has no variant for CUDA (pytorch#132471), and ranks that
share a GPU have no other backend.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

OPERATORS = (
    "all_gather_into_tensor",
    "all_gather_into_tensor_coalesced",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced",
    "all_to_all_single",
)
"""Those that gloo runs by a coalesced call, or not at all, on tensors of a device."""


def use_host(key: str = "CUDA") -> torch.library.Library:
    """Let the collectives of tensors with this dispatch key go through the host, while the returned library lives.

    They end before they return, so that there is nothing to wait for.
    """
    import torch

    library = torch.library.Library("_c10d_functional", "IMPL")
    for name in OPERATORS:
        library.impl(name, through_host(name), key)
    return library


def through_host(name: str) -> Callable[..., Any]:
    """Return a function that copies its tensors to the host, runs the collective there, and copies the result back."""
    import torch

    functional = torch.ops._c10d_functional
    collective = getattr(functional, name)

    def run(tensors: Tensor | list[Tensor], *args: Any) -> Tensor | list[Tensor]:
        one = not isinstance(tensors, list)
        given = tensors if isinstance(tensors, list) else [tensors]
        device = given[0].device
        on_host = [tensor.cpu() for tensor in given]
        out = collective(on_host[0] if one else on_host, *args)
        done = [functional.wait_tensor(tensor).to(device) for tensor in ([out] if one else out)]
        return done[0] if one else done

    return run
