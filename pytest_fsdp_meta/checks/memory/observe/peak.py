"""Measure the peak memory of the host and the device while the loader runs."""

from __future__ import annotations

import ctypes
import gc
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from pytest_fsdp_meta.checks.memory.facts import COPIES, RankMemory
from pytest_fsdp_meta.ranks.adapters.dtensor import own_memory
from pytest_fsdp_meta.ranks.inventory import MappedFiles, unwrapped
from pytest_fsdp_meta.ranks.joined_optimizer import parts_of_optimizer
from pytest_fsdp_meta.ranks.torch_private import operator_name
from pytest_fsdp_meta.ranks.watching import tensors_in

POINTS = 200
"""Most points of a timeline: a chart is hardly wider in pixels, and a report has one timeline per rank."""
HOST = "cpu"
META = "meta"


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
        self.times: list[float] = []
        """The time of each change in seconds, on the clock of ``perf_counter``."""
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
            self.times.append(perf_counter())
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


def find_peaks(changes: Iterable[Change], model: Module, optimizer: Optimizer | None = None) -> RankMemory:
    """Return the peaks of the memory that a loader held for this model, on the host and on the device together.

    Besides its shards, the state of the ``optimizer`` that it returns explains memory, with the gradients of the step
    that created it: torch steps an optimizer once to load its state.
    """
    whole = Counter(tensor.numel() for tensor in _non_empty_parameters(model))
    # With buffers, which are whole on every rank: a mask may be larger than all weights.
    shards = _count_storages((*_non_empty_parameters(model), *unwrapped(model).buffers()))
    states = [value for part in parts_of_optimizer(optimizer) for value in part.state.values()] if optimizer else []
    explained = Counter({size: COPIES * number for size, number in shards.items()})
    explained += _count_storages(value for state in states for value in state.values() if isinstance(value, Tensor))
    explained += shards if states else Counter()
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


def make_timeline(changes: Iterable[Change], times: Sequence[float], began: float) -> tuple[tuple[float, int], ...]:
    """Return (seconds since ``began``, bytes alive on the host) of every change there.

    Where there are more than ``POINTS`` changes, return the highest of each interval and the last one.
    """
    alive = 0
    points = []
    for (before, after, _, on_host), time in zip(changes, times, strict=False):  # storages may be freed meanwhile
        if on_host:
            alive += after - before
            points.append((round(time - began, 4), alive))
    if len(points) <= POINTS:
        return tuple(points)
    interval = points[-1][0] / (POINTS - 1) or 1
    highest: dict[int, tuple[float, int]] = {}
    for point in points:
        slot = int(point[0] / interval)
        highest[slot] = max(highest.get(slot, point), point, key=lambda seconds_and_bytes: seconds_and_bytes[1])
    return (*list(highest.values())[: POINTS - 1], points[-1])


def _step(counts: Counter[int], size: int, change: int, limit: int) -> int:
    """Change the count of a size by ``change``; return how much that changes the count when capped at the limit."""
    before = min(counts[size], limit)
    counts[size] += change
    return min(counts[size], limit) - before


def _count_storages(tensors: Iterable[Tensor]) -> Counter[int]:
    """Return the number of this rank's storages by bytes."""
    local = tensors_in([own_memory(tensor) for tensor in tensors])
    storages = (tensor.untyped_storage() for tensor in local if not tensor.is_meta)
    return Counter({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


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
        self._began = 0.0

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measure the block, which ``meter`` must watch as well."""
        if self._accelerator is not None:
            _allocate_workspaces(self._device)
            self._accelerator.reset_peak_memory_stats(self._device)
            self._before = self._accelerator.memory_allocated(self._device)
        self._began = perf_counter()
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
        """Return the peaks and the timeline of the block that built ``model`` and the optimizer, if it built one."""
        changes = self.meter.changes
        timeline = make_timeline(list(changes), self.meter.times, self._began)
        return replace(find_peaks(changes, model, optimizer), device=self._device_peak, timeline=timeline)


def _allocate_workspaces(device: torch.device) -> None:
    """Let the libraries allocate what they keep for their products, 32 MiB for cuBLAS, so that it is no loader's."""
    ones = torch.ones(8, 8, device=device)
    torch.nn.functional.linear(ones @ ones, ones, ones[0])
