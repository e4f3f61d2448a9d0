"""Seeing every operation of this rank's threads without changing any."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from pytest_fsdp_meta.observers.support.torch_private import (
    TorchDispatchMode,
    is_operator,
    is_traceable_wrapper_subclass,
)


class Watcher(Protocol):
    """What is told of every operation, before and after it."""

    def before(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None: ...

    def after(self, func: Any, args: Sequence[Any], out: Any) -> None: ...


class _Watching(TorchDispatchMode):  # type: ignore[misc]
    """Tells the watchers; the operation itself runs as it would.

    A mode is how torch's own CommDebugMode counts: it sees what C++ issues as well, of DTensor, FSDP2's backward and
    DDP's reducer, which wrapping Python functions does not.
    """

    # Without it flex attention and other higher-order operators refuse to run.
    supports_higher_order_operators = True

    def __init__(self, watchers: Sequence[Watcher]) -> None:
        super().__init__()
        self._watchers = watchers
        self.over = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        # Without it torch.compile gives up wherever a mode is active.
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.over or not is_operator(func):
            return func(*args, **kwargs)
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor's turn: it comes back with plain tensors and collectives
        for watcher in self._watchers:
            watcher.before(func, args, kwargs)
        out = func(*args, **kwargs)
        for watcher in self._watchers:
            watcher.after(func, args, out)
        return out


@contextmanager
def watching(*watchers: Watcher) -> Iterator[None]:
    """Tells the watchers of every operation of the block, in threads that it starts as well; nothing without any."""
    if not watchers:
        yield
        return
    mode, run = _Watching(watchers), threading.Thread.run
    workers: list[_Watching] = []

    def watched(thread: threading.Thread) -> None:
        # A mode belongs to its thread, and loaders read with pools of them. A pool may outlive the block, and leaving
        # a mode sets flags that all threads share: so it is left on, and does nothing once the block is over.
        workers.append(_Watching(watchers))
        workers[-1].__enter__()
        run(thread)

    threading.Thread.run = watched  # type: ignore[method-assign,assignment]
    try:
        with mode:
            yield
    finally:
        threading.Thread.run = run  # type: ignore[method-assign]
        for one in (mode, *workers):
            one.over = True


WITHOUT_STORAGE = frozenset({"meta", "lazy", "xla"})
"""Devices whose tensors have no storage to look at; asking the lazy ones for it ends the process."""


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The plain tensors with a storage in arguments or results of an operation, taken out of subclasses around them."""
    if isinstance(value, Tensor):
        if is_traceable_wrapper_subclass(value):
            for name in value.__tensor_flatten__()[0]:
                yield from tensors_in(getattr(value, name))
        elif value.layout == torch.strided and value.device.type not in WITHOUT_STORAGE and not _is_fake(value):
            yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from tensors_in(part)


def _is_fake(tensor: Tensor) -> bool:
    """DTensor tries each new operation on fake tensors of the global shape, which claim a device but have no memory."""
    return bool(tensor.untyped_storage().device.type == "meta")
