"""Collectives of tensors on the stand-in: gloo's, on CPU tensors that share the memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from pytest_fsdp_meta.standin.build import NAME

OPERATORS = (
    *("broadcast_", "reduce_", "gather_", "scatter_", "send", "recv_", "recv_any_source_", "barrier"),
    *("allreduce_", "allreduce_coalesced_", "alltoall_", "alltoall_base_"),
    *("allgather_", "_allgather_base_", "allgather_coalesced_", "allgather_into_tensor_coalesced_"),
    *("reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_"),
)
"""torch's operators of c10d; each gets its tensors, and a process group."""

_libraries: list[torch.library.Library] = []


def register() -> None:
    """Let this process send tensors of the stand-in."""
    library = torch.library.Library("c10d", "IMPL")
    with warnings.catch_warnings():
        # torch has its own for this dispatch key, which look for a backend of the device.
        warnings.filterwarnings("ignore", message="Warning only once for all operators", category=UserWarning)
        for name in OPERATORS:
            library.impl(name, _on_cpu(name), "PrivateUse1", allow_override=True)
    _libraries.append(library)  # torch uses the implementations as long as it is referenced


def _on_cpu(name: str) -> Callable[..., Any]:
    """Return a function that runs the operator on CPU tensors with the same memory, and returns the given tensors."""
    operator = getattr(torch.ops.c10d, name).default
    as_cpu = torch.get_device_module(NAME).as_cpu

    def run(*args: Any, **kwargs: Any) -> Any:
        devices = {tensor.device for tensor in _tensors(args)}
        if len(devices) > 1:
            raise RuntimeError(f"c10d::{name}: all tensors should be on one device, not {sorted(map(str, devices))}")
        given = args[0]
        done = operator(*[_lowered(arg, as_cpu) for arg in args], **kwargs)
        # Operators that change tensors return them beside the work that is to be waited for.
        return (given, done[1]) if isinstance(done, tuple) else done

    return run


def _lowered(value: Any, as_cpu: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return as_cpu(value)
    return [_lowered(each, as_cpu) for each in value] if isinstance(value, (list, tuple)) else value


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)
