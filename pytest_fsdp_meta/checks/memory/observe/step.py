"""Observe what a training step holds: the groups that FSDP2 gathers, and the storages that autograd keeps for backward.

Storages are counted, so a CPU shows what a GPU's allocator would; what kernels allocate inside of one operator is not.
Ranks and reference compute reproducibly: on CUDA without fused attention, so that both keep the matrices of attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Module, Parameter
from torch.nn.modules.module import register_module_forward_pre_hook

from pytest_fsdp_meta.checks.memory.facts import GatheredGroup, StepMemory
from pytest_fsdp_meta.loader.subject import Subject
from pytest_fsdp_meta.ranks.adapters.dtensor import local_part
from pytest_fsdp_meta.ranks.batches import loss_of
from pytest_fsdp_meta.ranks.bits import is_low
from pytest_fsdp_meta.ranks.generators import seed_all
from pytest_fsdp_meta.ranks.inventory import named_tensors
from pytest_fsdp_meta.ranks.modes import comparable_modes
from pytest_fsdp_meta.ranks.module_watch import RunningModule
from pytest_fsdp_meta.ranks.torch_private import base_of, fsdp_groups, is_compiled
from pytest_fsdp_meta.ranks.watching import tensors_in
from pytest_fsdp_meta.text import first_line, grouped
from pytest_fsdp_meta.worlds import SEED

T = TypeVar("T")
COMPILED = "torch.compile decides what to compute again"
OWN_STEP = "train_step is watched on half of a rank's rows, and batch(0) does not divide into so few"


def observe_step_memory(
    subject: Subject, run: Callable[[AbstractContextManager[None]], T], problem: str = ""
) -> tuple[T | None, StepMemory]:
    """Return the result of ``run``, and what is kept in the context that it gets, for a forward and its backward.

    Code sees other tensors where a hook has seen what autograd saves, and some code refuses such hooks. Then, or with
    another ``problem``, there is neither a result nor a count, and some gradients may be left. An error after the
    context is raised.
    """
    model = subject.model
    groups = tuple(gathered_groups(model))
    if problem := COMPILED if any(map(is_compiled, model.modules())) else problem:
        return None, StepMemory(None, groups=groups, problem=problem)
    watch = StepMemoryWatch(model)
    try:
        result = run(watch.watching())
    except Exception as error:  # of any type: what the author's code raises where hooks are refused
        if watch.ended:
            raise
        cause = error.__cause__ or error
        return None, StepMemory(None, groups=groups, problem=f"{type(cause).__name__}: {first_line(cause)}")
    return result, StepMemory(watch.most, watch.modules(), groups)


def memory_of(subject: Subject, rows: dict[str, Any]) -> StepMemory:
    """Observe a forward of these rows and its backward, which leaves its gradients."""

    def step(watching: AbstractContextManager[None]) -> None:
        seed_all(SEED)  # layers that are skipped by chance are the same on ranks and reference
        with comparable_modes(subject.model), watching:
            loss_of(subject, rows).backward()

    return observe_step_memory(subject, step, OWN_STEP if subject.train_step is not None else "")[1]


@dataclass
class _Storage:
    nbytes: int
    module: str
    users: int = 0
    """How many saved tensors have this storage."""


class StepMemoryWatch:
    """Count the storages that autograd keeps."""

    def __init__(self, model: Module) -> None:
        self.most = 0
        """The most bytes at a time."""
        self.ended = False
        """Whether the block that was watched has ended without an error."""
        self._model = model
        self._running = RunningModule(model)
        self._weights: dict[int, StorageWeakRef] = {}
        """The storages that have parameters or buffers, also those that FSDP2 gathers into. While the weak references
        live, no other storage gets the same identity."""
        self._shapes: set[tuple[int, ...]] = set()
        """The shapes of parameters and of their transposes, which casts of them have as well."""
        self._storages: dict[int, _Storage] = {}
        self._bytes = 0
        self._at_most: tuple[_Storage, ...] = ()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count during the block."""
        for module in self._model.modules():
            self._note_weights(module)
        with ExitStack() as hooks:
            hooks.enter_context(self._running.watching())
            # The weights that FSDP2 has gathered for a module around the one that is called.
            hooks.callback(register_module_forward_pre_hook(self._note_weights).remove)
            hooks.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, lambda saved: saved.tensor))
            yield
        self.ended = True
        self._note_most()

    def modules(self) -> dict[str, int]:
        """Return the bytes that each module kept when most was kept, largest first."""
        modules: dict[str, int] = {}
        for storage in self._at_most:
            modules[storage.module] = modules.get(storage.module, 0) + storage.nbytes
        return dict(sorted(modules.items(), key=lambda item: -item[1]))

    def _note_weights(self, module: Module, _: Any = None) -> None:
        if torch.compiler.is_compiling():  # of a function that calls modules, which are not compiled themselves
            return
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
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
                self._storages[key] = _Storage(local.untyped_storage().nbytes(), self._running.name)
                self._bytes += self._storages[key].nbytes
            self._storages[key].users += 1
            saved.keys.append(key)
        return saved

    def _is_weight(self, tensor: Tensor) -> bool:
        """Return whether the tensor is a parameter, a view of one, or a cast of one as autocast makes and keeps it.

        FSDP2 registers what it gathers for a module only after ``_enter``, and code may use the weights of a module
        that it does not call.
        """
        whole = base_of(tensor)
        if whole.grad_fn is not None and whole.grad_fn.name() == "ToCopyBackward0":
            whole = getattr(whole.grad_fn.next_functions[0][0], "variable", whole)
        if isinstance(whole, Parameter):
            return True
        frozen = not tensor.requires_grad and not tensor.is_nested
        return frozen and is_low(tensor.dtype) and tuple(tensor.shape) in self._shapes

    def release(self, key: int) -> None:
        """Forget a saved tensor with this storage."""
        self._note_most()
        storage = self._storages[key]
        storage.users -= 1
        if not storage.users:
            self._bytes -= storage.nbytes
            del self._storages[key]

    def _note_most(self) -> None:
        if self._bytes > self.most:
            self.most, self._at_most = self._bytes, tuple(self._storages.values())


class _Saved:
    """A tensor as autograd keeps it: without its graph, which would keep itself alive."""

    def __init__(self, tensor: Tensor, watch: StepMemoryWatch) -> None:
        self.tensor = tensor.detach()
        self.keys: list[int] = []
        self._watch = watch

    def __del__(self) -> None:
        for key in self.keys:
            self._watch.release(key)


def gathered_groups(model: Module) -> Iterator[GatheredGroup]:
    names = grouped((id(tensor), name) for name, _, tensor in named_tensors(model))
    for group in fsdp_groups(model):
        shared = tuple(name for parameter in group.parameters for name in names.get(id(parameter), ()))
        yield GatheredGroup(shared, group.ranks)
