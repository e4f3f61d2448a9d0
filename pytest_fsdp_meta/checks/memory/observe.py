"""Measure the peak memory of host and device while the loader runs, and observe what a training step holds.

Of a step, that is the groups that FSDP2 gathers, and the storages that autograd keeps for backward. Storages are
counted, so a CPU shows what a GPU's allocator would; what kernels allocate inside of one operator is not. Ranks and
reference compute reproducibly: on CUDA without fused attention, so that both keep the matrices of attention.
"""

from __future__ import annotations

import ctypes
import gc
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Module, Parameter
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer

from pytest_fsdp_meta.checks.memory.facts import COPIES, GatheredGroup, RankMemory, StepMemory
from pytest_fsdp_meta.loader.subject import Subject
from pytest_fsdp_meta.ranks.adapters.dtensor import living_shards, local_part, own_memory
from pytest_fsdp_meta.ranks.batches import loss_of
from pytest_fsdp_meta.ranks.bits import is_low
from pytest_fsdp_meta.ranks.generators import seed_all
from pytest_fsdp_meta.ranks.inventory import MappedFiles, named_tensors, unwrapped
from pytest_fsdp_meta.ranks.joined_optimizer import parts_of_optimizer
from pytest_fsdp_meta.ranks.modes import comparable_modes
from pytest_fsdp_meta.ranks.module_watch import RunningModule
from pytest_fsdp_meta.ranks.torch_private import base_of, fsdp_groups, is_compiled, operator_name
from pytest_fsdp_meta.ranks.watching import tensors_in
from pytest_fsdp_meta.text import first_line, grouped
from pytest_fsdp_meta.worlds import SEED

HOST = "cpu"
META = "meta"
T = TypeVar("T")
COMPILED = "torch.compile decides what to compute again"
OWN_STEP = "train_step is watched on half of a rank's rows, and batch(0) does not divide into so few"


class Change(NamedTuple):
    """Bytes before, bytes after and bytes per element of a storage that was allocated, freed or resized."""

    before: int
    after: int
    width: int
    on_host: bool = True


def return_freed_memory(device: torch.device) -> None:
    """Give memory that tensors no longer use back to the system, because the next world needs as much.

    Without this, glibc's malloc keeps it: of a Llama of 120M parameters, 1.8 GiB on each of two ranks. The reference is
    on the device of rank 0, whose allocator keeps freed memory for its own process, as do tensors in reference cycles.
    """
    gc.collect()
    if (accelerator := accelerator_of(device)) is not None:
        accelerator.empty_cache()
    with suppress(OSError, AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)


def accelerator_of(device: torch.device) -> Any:
    """Return torch's module of the device, such as ``torch.cuda``, or None for the host."""
    return None if device.type in ("cpu", "meta") else torch.get_device_module(device)


class Meter:
    """A watcher that logs the size changes of the storages of this process' tensors, on the host and on its device.

    Storages are tracked by weak references. An existing storage counts from the first operation that uses it, so
    weights that a file reader allocates count as soon as the loader does anything with them.
    """

    def __init__(self) -> None:
        self.changes: list[Change] = []
        self.on_end: Callable[[], None] = lambda: None
        """Called when the rest of the block no longer counts as loading."""
        self._over = False
        self._sizes: dict[int, int] = {}
        self._kinds: dict[int, tuple[int, bool]] = {}
        """Bytes per element, and whether it is on the host."""
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._files = MappedFiles()
        self._lock = threading.RLock()  # reentrant: garbage collection may free a storage while the lock is held

    def before(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        # A loader may run a forward to warm up; what FSDP2 gathers for it is not part of loading.
        if func.namespace == "fsdp" and not self._over:
            self._over = True
            self.on_end()
        for tensor in tensors_in(args):
            self._track(tensor, maybe_mapped=True)

    def after(self, func: Any, args: Sequence[Any], out: Any) -> None:
        # A new storage in the output was allocated by the operation, unless that adopts existing memory.
        for tensor in tensors_in(out):
            self._track(tensor, maybe_mapped=operator_name(func) in ("set_", "from_file"))

    def note_resized(self, storage: torch.UntypedStorage) -> None:
        with self._lock:
            if not self._over and id(storage) in self._sizes:
                self._log_size(id(storage), storage.nbytes())

    def _track(self, tensor: Tensor, maybe_mapped: bool) -> None:
        if self._over or tensor.device.type == META:
            return
        storage = tensor.untyped_storage()
        key = id(storage)
        with self._lock:
            if key not in self._sizes:
                on_host = tensor.device.type == HOST
                mapped = maybe_mapped and on_host and self._is_mapped(storage)
                self._references[key] = weakref.ref(storage, partial(self._forget, key))
                self._sizes[key], self._kinds[key] = 0, (tensor.element_size(), on_host)
                self._log_size(key, 0 if mapped else storage.nbytes())
            elif self._sizes[key] and self._sizes[key] != storage.nbytes():
                self._log_size(key, storage.nbytes())  # an operator resized it

    def _is_mapped(self, storage: torch.UntypedStorage) -> bool:
        if not self._files.hold(storage):
            self._files.refresh()  # the file may have been mapped since the last time
        return self._files.hold(storage)

    def _forget(self, key: int, _: object) -> None:
        with self._lock:
            self._log_size(key, 0)
            del self._sizes[key], self._kinds[key], self._references[key]

    def _log_size(self, key: int, size: int) -> None:
        if size != self._sizes[key]:
            self.changes.append(Change(self._sizes[key], size, *self._kinds[key]))
            self._sizes[key] = size


@contextmanager
def noting_resizes(meter: Meter) -> Iterator[None]:
    """Tell the meter of ``UntypedStorage.resize_``, which is not an operator."""
    resize = torch.UntypedStorage.resize_

    def resized(storage: torch.UntypedStorage, size: int) -> Any:
        done = resize(storage, size)
        meter.note_resized(storage)
        return done

    torch.UntypedStorage.resize_ = resized
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize


def find_peaks(
    changes: Iterable[Change], model: Module, optimizer: Optimizer | None = None, others: Iterable[Tensor] = ()
) -> RankMemory:
    """Return the peaks of the memory that a loader held for this model, on the host and on the device together.

    Besides its shards, the state of the ``optimizer`` that it returns explains memory, with the gradients of the step
    that created it: torch steps an optimizer once to load its state. So do ``others``, which may be of a second model.
    """
    whole = Counter(tensor.numel() for tensor in _non_empty_parameters(model))
    # With buffers, which are whole on every rank: a mask may be larger than all weights.
    shards = _storages((*_non_empty_parameters(model), *unwrapped(model).buffers()))
    states = [value for part in parts_of_optimizer(optimizer) for value in part.state.values()] if optimizer else []
    kept = _storages(value for state in states for value in state.values() if isinstance(value, Tensor))
    explained = Counter((_storages(others) | kept | shards).values())
    for _ in range(COPIES - 1 + bool(states)):
        explained += Counter(shards.values())
    model_bytes = sum(tensor.numel() * tensor.element_size() for tensor in _non_empty_parameters(model))
    peaks = RankMemory(0)
    alive = host = held_whole = beyond = 0
    elements: Counter[int] = Counter()
    sizes: Counter[int] = Counter()
    for before, after, width, on_host in changes:
        for size, change in ((before, -1), (after, 1)):
            alive += change * size
            host += change * size if on_host else 0
            # No more storages count as whole parameters than the model has parameters of this size.
            held_whole += size // width * _step(elements, size // width, change, whole[size // width])
            beyond += change * size - size * _step(sizes, size, change, explained[size])
        peaks = RankMemory(
            host=max(peaks.host, host),
            whole=max(peaks.whole, held_whole),
            beyond=max(peaks.beyond, beyond if alive >= model_bytes else 0),
        )
    return peaks


def _step(counts: Counter[int], size: int, change: int, limit: int) -> int:
    """Change the count of a size by ``change``; return how much that changes the count when capped at the limit."""
    before = min(counts[size], limit)
    counts[size] += change
    return min(counts[size], limit) - before


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return the bytes of this rank's storages by their address."""
    local = tensors_in([own_memory(tensor) for tensor in tensors])
    storages = (tensor.untyped_storage() for tensor in local if not tensor.is_meta)
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def _non_empty_parameters(model: Module) -> list[Tensor]:
    return [parameter for parameter in unwrapped(model).parameters() if parameter.numel()]


class Peak:
    """Measure the memory that one block needs."""

    def __init__(self, device: torch.device) -> None:
        self.meter = Meter()
        self.meter.on_end = self._note_device_peak
        self._device = device
        self._accelerator = accelerator_of(device)
        self._device_peak: int | None = None
        self._before = 0

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measure the block, which ``meter`` must watch as well."""
        if self._accelerator is not None:
            _allocate_workspaces(self._device)
            self._accelerator.reset_peak_memory_stats(self._device)
            self._before = self._accelerator.memory_allocated(self._device)
        try:
            with noting_resizes(self.meter):
                yield
        finally:
            if self._device_peak is None:
                self._note_device_peak()

    def _note_device_peak(self) -> None:
        if self._accelerator is not None:
            self._device_peak = self._accelerator.max_memory_allocated(self._device) - self._before

    def facts(self, model: Module, optimizer: Optimizer | None = None) -> RankMemory:
        """Return the peaks of the block that built ``model`` and the optimizer, if it built one."""
        changes = [*self.meter.changes]
        peaks = find_peaks(changes, model, optimizer)
        if peaks.beyond:  # only then, because Python has about a million objects
            peaks = find_peaks(changes, model, optimizer, living_shards())
        return replace(peaks, device=self._device_peak)


def _allocate_workspaces(device: torch.device) -> None:
    """Let libraries allocate what they keep for products (cuBLAS: 32 MiB) before the loader's memory is measured."""
    ones = torch.ones(8, 8, device=device)
    torch.nn.functional.linear(ones @ ones, ones, ones[0])


# A training step.


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
