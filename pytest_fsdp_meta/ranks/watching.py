"""Watch every operation of this rank's threads without changing any."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.jit import ScriptModule
from torch.nn import Module

from pytest_fsdp_meta.ranks.adapters.dtensor import is_wrapper
from pytest_fsdp_meta.ranks.torch_private import TorchDispatchMode, is_operator, is_wrapped_by_functorch


class Watcher(Protocol):
    """An object whose methods are called before and after every operation."""

    def before(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None: ...

    def after(self, func: Any, args: Sequence[Any], out: Any) -> None: ...


class DTensorDraws:
    """Notes whether torch draws numbers for DTensors: it then knows the whole tensor, and the part of each rank."""

    def __init__(self) -> None:
        self.seen = False

    def note(self, func: Any) -> None:
        self.seen = self.seen or torch.Tag.nondeterministic_seeded in func.tags


class _Watching(TorchDispatchMode):  # type: ignore[misc]
    """Call the watchers around each operation, which itself runs unchanged.

    torch's own CommDebugMode is a dispatch mode, too: unlike wrapped Python functions, a mode sees the operations that
    C++ issues for DTensor, FSDP2's backward and DDP's reducer.
    """

    # Without this attribute, flex attention and other higher-order operators refuse to run.
    supports_higher_order_operators = True

    def __init__(self, watchers: Sequence[Watcher], draws: DTensorDraws | None) -> None:
        super().__init__()
        self._watchers = watchers
        self._draws = draws
        self.over = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        # Without this method, torch.compile falls back to eager wherever a mode is active.
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.over or not is_operator(func):
            return func(*args, **kwargs)
        if any(issubclass(kind, DTensor) for kind in types):
            if self._draws is not None:
                self._draws.note(func)
            return NotImplemented  # DTensor runs first, and dispatches plain tensors and collectives to this mode
        for watcher in self._watchers:
            watcher.before(func, args, kwargs)
        out = func(*args, **kwargs)
        for watcher in self._watchers:
            watcher.after(func, args, out)
        return out


@contextmanager
def watching(*watchers: Watcher, draws: DTensorDraws | None = None) -> Iterator[None]:
    """Call the watchers for every operation of the block, also in threads that the block starts.

    Of an operation on a DTensor they see what it runs on local tensors; ``draws`` sees the operation itself.
    """
    if not watchers and draws is None:
        yield
        return
    mode, run = _Watching(watchers, draws), threading.Thread.run
    thread_modes: list[_Watching] = []

    def run_watched(thread: threading.Thread) -> None:
        # A mode is active in one thread only, and loaders read with thread pools. A pool may outlive the block, and
        # leaving a mode sets flags that all threads share: so the mode stays on, and does nothing after the block.
        thread_modes.append(_Watching(watchers, draws))
        thread_modes[-1].__enter__()
        run(thread)

    threading.Thread.run = run_watched  # type: ignore[method-assign,assignment]
    try:
        with mode:
            yield
    finally:
        threading.Thread.run = run  # type: ignore[method-assign]
        for entered in (mode, *thread_modes):
            entered.over = True


WITHOUT_STORAGE = frozenset({"meta", "lazy", "xla"})
"""Devices whose tensors have no storage; asking lazy tensors for one ends the process."""


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the plain tensors with a storage in an operation's arguments or results, also inside tensor subclasses."""
    if isinstance(value, Tensor):
        if is_wrapper(value):
            for name in value.__tensor_flatten__()[0]:
                yield from tensors_in(getattr(value, name))
        elif (
            value.layout == torch.strided
            and value.device.type not in WITHOUT_STORAGE
            and not is_wrapped_by_functorch(value)
            # DTensor makes tensors with a device and the global shape, to try a new operation.
            and value.untyped_storage().device.type != "meta"
        ):
            yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from tensors_in(part)


def takes_hooks(module: Module) -> bool:
    """Return whether hooks can be registered for the module; those of TorchScript refuse them."""
    return not isinstance(module, ScriptModule)
