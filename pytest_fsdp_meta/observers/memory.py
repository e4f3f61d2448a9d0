"""The most memory that was alive at one time while the loader ran."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from pytest_fsdp_meta.evidence.collectives import RankMemory
from pytest_fsdp_meta.observers.adapters.dtensor import local_part
from pytest_fsdp_meta.observers.inventory import unwrapped
from pytest_fsdp_meta.observers.support.mapped import MappedFiles
from pytest_fsdp_meta.observers.support.torch_private import operator_name
from pytest_fsdp_meta.observers.support.watching import tensors_in

POINTS = 200
"""The most that a timeline has: a picture is not much wider, and a report holds one for every rank."""
COPIES = 2
"""A loader may hold its shards twice: those of the model, and those that it copies into them."""


class Meter:
    """A watcher that keeps a diary of the storages of this process' tensors on the host.

    Storages are followed by weak references. What was there before counts from when an operation first meets it, so
    weights that a file reader allocates count as soon as the loader does anything with them.
    """

    def __init__(self) -> None:
        self.diary: list[tuple[int, int, int]] = []
        """Bytes before, bytes after and bytes per element of each storage that began, ended or changed its size."""
        self.times: list[float] = []
        """When that was, on the clock of ``perf_counter``."""
        self._over = False
        self._sizes: dict[int, int] = {}
        self._elements: dict[int, int] = {}
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._files = MappedFiles()
        self._lock = threading.RLock()  # garbage may be collected, and a storage end, within its own lines

    def before(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        # A loader may end with a forward to warm up: what FSDP2 gathers for it says nothing of loading.
        self._over = self._over or func.namespace == "fsdp"
        for tensor in tensors_in(args):
            self._meet(tensor, met=True)

    def after(self, func: Any, args: Sequence[Any], out: Any) -> None:
        # What is new here was allocated, unless the operation took memory that is somebody else's.
        for tensor in tensors_in(out):
            self._meet(tensor, met=operator_name(func) in ("set_", "from_file"))

    def resized(self, storage: torch.UntypedStorage) -> None:
        with self._lock:
            if not self._over and id(storage) in self._sizes:
                self._count(id(storage), storage.nbytes())

    def _meet(self, tensor: Tensor, met: bool) -> None:
        if self._over or tensor.device.type != "cpu":
            return
        storage = tensor.untyped_storage()
        key = id(storage)
        with self._lock:
            if key not in self._sizes:
                mapped = met and self._in_file(storage)
                self._references[key] = weakref.ref(storage, self._ended(key))
                self._sizes[key], self._elements[key] = 0, tensor.element_size()
                self._count(key, 0 if mapped else storage.nbytes())
            elif self._sizes[key] and self._sizes[key] != storage.nbytes():
                self._count(key, storage.nbytes())  # an operator resized it

    def _in_file(self, storage: torch.UntypedStorage) -> bool:
        if not self._files.hold(storage):
            self._files.look_again()  # it may have been mapped since
        return self._files.hold(storage)

    def _ended(self, key: int) -> Callable[[object], None]:
        def end(_: object) -> None:
            with self._lock:
                self._count(key, 0)
                del self._sizes[key], self._elements[key], self._references[key]

        return end

    def _count(self, key: int, size: int) -> None:
        if size != self._sizes[key]:
            self.diary.append((self._sizes[key], size, self._elements[key]))
            self.times.append(perf_counter())
            self._sizes[key] = size


def read_diary(diary: Iterable[tuple[int, int, int]], model: Module) -> RankMemory:
    """What the diary of a loader tells, now that the model is known that it was about."""
    whole, shards = _sizes(model)
    least = sum(tensor.numel() * tensor.element_size() for tensor in _distinct(model))
    most = RankMemory(0)
    alive = held = beyond = 0
    elements: Counter[int] = Counter()
    bytes_: Counter[int] = Counter()
    for before, after, width in diary:
        for size, change in ((before, -1), (after, 1)):
            alive += change * size
            # Of the storages of one size, as many as there are whole parameters of that size are held for these.
            held += size // width * _step(elements, size // width, change, whole[size // width])
            beyond += change * size - size * _step(bytes_, size, change, COPIES * shards[size])
        most = RankMemory(
            max(most.host, alive), max(most.whole, held), max(most.beyond, beyond if alive >= least else 0)
        )
    return most


def read_timeline(
    diary: Iterable[tuple[int, int, int]], times: Sequence[float], began: float
) -> tuple[tuple[float, int], ...]:
    """What was alive at each time since the load ``began``; where that is much, the highest of each stretch of time."""
    alive = 0
    changes = []
    for (before, after, _), time in zip(diary, times, strict=False):  # storages may end meanwhile
        alive += after - before
        changes.append((round(time - began, 4), alive))
    if len(changes) <= POINTS:
        return tuple(changes)
    stretch = changes[-1][0] / (POINTS - 1) or 1
    highest: dict[int, tuple[float, int]] = {}
    for change in changes:
        slot = int(change[0] / stretch)
        highest[slot] = max(highest.get(slot, change), change, key=lambda one: one[1])
    return (*list(highest.values())[: POINTS - 1], changes[-1])


def _step(counts: Counter[int], size: int, change: int, limit: int) -> int:
    """Counts one more or one less of a size; how much that changes the count as far as the limit."""
    before = min(counts[size], limit)
    counts[size] += change
    return min(counts[size], limit) - before


def _sizes(model: Module) -> tuple[Counter[int], Counter[int]]:
    """How many parameters of each number of elements there are, and how many of this rank's storages of each size.

    Buffers are whole on every rank: masks and tables of decay may be larger than all weights.
    """
    whole = Counter(tensor.numel() for tensor in _distinct(model))
    local = tensors_in([local_part(tensor) for tensor in (*_distinct(model), *unwrapped(model).buffers())])
    storages = {
        storage.data_ptr(): storage.nbytes() for storage in (t.untyped_storage() for t in local if not t.is_meta)
    }
    return whole, Counter(storages.values())


def _distinct(model: Module) -> list[Tensor]:
    return [parameter for parameter in unwrapped(model).parameters() if parameter.numel()]


class Peak:
    """Measures one block."""

    def __init__(self, device: torch.device) -> None:
        self.meter = Meter()
        self._device = device if device.type == "cuda" else None
        self._most: int | None = None
        self._began = 0.0

    @contextmanager
    def measured(self) -> Iterator[None]:
        """The block; the meter has to watch it. Storages that Python resizes are told by no operation."""
        before = 0
        if self._device is not None:
            torch.cuda.reset_peak_memory_stats(self._device)
            before = torch.cuda.memory_allocated(self._device)
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            done = resize(storage, size)
            self.meter.resized(storage)
            return done

        torch.UntypedStorage.resize_ = resized
        self._began = perf_counter()
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = resize
            if self._device is not None:
                self._most = torch.cuda.max_memory_allocated(self._device) - before

    def facts(self, model: Module) -> RankMemory:
        diary, times = self.meter.diary, self.meter.times
        return replace(
            read_diary(diary, model), device=self._most, timeline=read_timeline(list(diary), times, self._began)
        )
