"""Give a loader tensors without values where it reads a checkpoint of shapes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from pytest_fsdp_meta.ranks.mapped import MappedFiles
from pytest_fsdp_meta.ranks.torch_private import TorchDispatchMode, is_operator, operator_name, tree_map

WRAPPING = ("set_", "select", "_local_scalar_dense")
"""How ``torch.asarray``, which safetensors calls, wraps the memory of a file; it looks at the first element."""


@contextmanager
def without_values_of_shapes(folder: str) -> Iterator[None]:
    """Put tensors on meta that are read from files in ``folder``, and leave tensors there that are moved from it."""
    with _OnMeta(folder):
        yield


class _OnMeta(TorchDispatchMode):  # type: ignore[misc]
    def __init__(self, folder: str) -> None:
        super().__init__()
        self._folder = folder
        self._files = MappedFiles(folder)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not is_operator(func):
            return func(*args, **kwargs)
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor runs first, and dispatches plain tensors to this mode
        if operator_name(func) in WRAPPING:
            self._files.refresh()
            return func(*args, **kwargs)
        args, kwargs = tree_map(self._on_meta, (args, kwargs))
        if operator_name(func) == "_to_copy" and args[0].is_meta:
            kwargs = {**kwargs, "device": torch.device("meta")}
        return func(*args, **kwargs)

    def _on_meta(self, value: Any) -> Any:
        if type(value) is not Tensor or value.is_meta or not self._files.hold(value.untyped_storage()):
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
