"""Observe what a training step holds: the groups that FSDP2 gathers, and the storages that autograd keeps for backward.

Storages are counted, so a CPU shows what a GPU's allocator would; what kernels allocate inside of one operator is not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Module, Parameter
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from pytest_fsdp_meta.evidence.step_memory import GatheredGroup, StepMemory
from pytest_fsdp_meta.observers.adapters.dtensor import local_part
from pytest_fsdp_meta.observers.inventory import named_tensors, unwrapped
from pytest_fsdp_meta.observers.support.precision import is_low
from pytest_fsdp_meta.observers.support.torch_private import (
    fsdp_groups,
    is_compiled,
    without_hooks_in_torch_func,
)
from pytest_fsdp_meta.observers.support.watching import tensors_in
from pytest_fsdp_meta.text import clean_name

CHANGED = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: a {shape} tensor "
    "is at version {now}, but version {saved} is needed"
)
"""What torch says itself, where no hook sees the tensors that it saves."""


@dataclass
class _Storage:
    nbytes: int
    module: str
    fixed: bool
    users: int = 0
    """How many saved tensors have this storage."""


class StepMemoryWatch:
    """Watch the first step of a training; steps are numbered from 0."""

    def __init__(self, model: Module, rows: int = 0) -> None:
        self.rows = rows
        """The number of rows of the batch, if it is known: what is not in rows has a size of its own."""
        self._model = model
        self._compiled = any(map(is_compiled, model.modules()))
        self._names = {id(module): clean_name(name) for name, module in unwrapped(model).named_modules()}
        self._running: list[str] = []
        self._weights: dict[int, StorageWeakRef] = {}
        """The storages that have parameters or buffers, also those that FSDP2 gathers into. While the weak references
        live, no other storage gets the same identity."""
        self._shapes: set[tuple[int, ...]] = set()
        """The shapes of parameters and of their transposes: a cast weight is saved, and is as large for any rows."""
        self._storages: dict[int, _Storage] = {}
        self._bytes = 0
        self._most = 0
        self._at_most: tuple[_Storage, ...] = ()

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        """Watch the step of the block, if it is the first; hooks on a compiled module would compile it twice."""
        if step or self._compiled:
            yield
            return
        for module in self._model.modules():
            self._note_weights(module)
        with ExitStack() as hooks:
            hooks.callback(register_module_forward_pre_hook(self._enter).remove)
            hooks.callback(register_module_forward_hook(self._leave, always_call=True).remove)
            hooks.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack))
            hooks.enter_context(without_hooks_in_torch_func(self._pack))
            yield
        self._note_most()

    def observed(self) -> StepMemory:
        """Return what was observed. Call this after the first step."""
        modules: dict[str, int] = {}
        for storage in self._at_most:
            modules[storage.module] = modules.get(storage.module, 0) + storage.nbytes
        return StepMemory(
            kept=None if self._compiled else self._most,
            fixed=sum(storage.nbytes for storage in self._at_most if storage.fixed),
            modules=dict(sorted(modules.items(), key=lambda item: -item[1])),
            groups=tuple(_groups(self._model)),
        )

    def _enter(self, module: Module, _: Any) -> None:
        if torch.compiler.is_compiling():  # of a function that calls modules, which are not compiled themselves
            return
        self._running.append(self._names.get(id(module), self._running[-1] if self._running else ""))
        self._note_weights(module)  # those that FSDP2 has gathered for a module around this one

    def _leave(self, *_: Any) -> None:
        if self._running and not torch.compiler.is_compiling():
            self._running.pop()

    def _note_weights(self, module: Module) -> None:
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if isinstance(tensor, Tensor):
                self._note_weight(tensor)

    def _note_weight(self, tensor: Tensor) -> None:
        for local in tensors_in(local_part(tensor)):
            ref = StorageWeakRef(local.untyped_storage())
            self._weights[ref.cdata] = ref
            self._shapes |= {tuple(local.shape), tuple(local.shape)[::-1]}

    def _pack(self, tensor: Tensor) -> _Saved:
        saved = _Saved(tensor, self)
        if self._is_weight(tensor):
            self._note_weight(tensor)
            return saved
        for local in tensors_in(local_part(tensor)):
            key = StorageWeakRef(local.untyped_storage()).cdata
            if local.is_meta or key in self._weights:
                continue
            if key not in self._storages:
                self._storages[key] = self._describe(local)
                self._bytes += self._storages[key].nbytes
            self._storages[key].users += 1
            saved.keys.append(key)
        return saved

    def _is_weight(self, tensor: Tensor) -> bool:
        """Return whether the tensor is a parameter, a view of one, or a cast of one as autocast makes and keeps it.

        FSDP2 registers what it gathers for a module only after ``_enter``, and code may use the weights of a module
        that it does not call.
        """
        whole = tensor if tensor._base is None else tensor._base
        if whole.grad_fn is not None and whole.grad_fn.name() == "ToCopyBackward0":
            whole = getattr(whole.grad_fn.next_functions[0][0], "variable", whole)
        if isinstance(whole, Parameter):
            return True
        frozen = not tensor.requires_grad and not tensor.is_nested
        return frozen and is_low(tensor.dtype) and tuple(tensor.shape) in self._shapes

    def _describe(self, tensor: Tensor) -> _Storage:
        in_rows = bool(self.rows and tensor.ndim and not tensor.is_nested and tensor.shape[0] % self.rows == 0)
        fixed = not in_rows or tuple(tensor.shape) in self._shapes
        return _Storage(tensor.untyped_storage().nbytes(), self._running[-1] if self._running else "", fixed)

    def release(self, key: int) -> None:
        """Forget a saved tensor with this storage."""
        self._note_most()
        storage = self._storages[key]
        storage.users -= 1
        if not storage.users:
            self._bytes -= storage.nbytes
            del self._storages[key]

    def _note_most(self) -> None:
        if self._bytes > self._most:
            self._most, self._at_most = self._bytes, tuple(self._storages.values())


class _Saved:
    """A tensor as autograd keeps it: without its graph, which would keep itself alive."""

    def __init__(self, tensor: Tensor, watch: StepMemoryWatch) -> None:
        self.tensor = tensor.detach()
        self.version = _version(tensor)
        self.keys: list[int] = []
        self._watch = watch

    def __del__(self) -> None:
        for key in self.keys:
            self._watch.release(key)


def _unpack(saved: _Saved) -> Tensor:
    now = _version(saved.tensor)
    if now != saved.version:
        raise RuntimeError(CHANGED.format(shape=list(saved.tensor.shape), now=now, saved=saved.version))
    return saved.tensor


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else int(tensor._version)


def _groups(model: Module) -> Iterator[GatheredGroup]:
    names: dict[int, list[str]] = {}
    for name, _, tensor in named_tensors(model):
        names.setdefault(id(tensor), []).append(name)
    for group in fsdp_groups(model):
        shared = tuple(name for parameter in group.parameters for name in names.get(id(parameter), ()))
        yield GatheredGroup(shared, group.ranks)
