"""Follow what a simulated rank holds through the phases of a step, and of what it consists where it is most."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from pytest_fsdp_meta.checks.memory.observe import Meter
from pytest_fsdp_meta.checks.simulation.facts import ACTIVATIONS, GATHERED, HELD, OPTIMIZER, TEMPORARY, PhasePeak
from pytest_fsdp_meta.ranks.torch_private import operator_name, tree_leaves


class Event(NamedTuple):
    """A storage, by number, that takes more or fewer bytes, and where the step was then."""

    storage: int
    change: int
    phase: str
    module: str


class PhaseMeter(Meter):
    """A watcher that logs when the storages of fake tensors come and go, and in which phase and module.

    ``where`` returns the phase and the module of now.
    """

    def __init__(self, held: Iterable[Tensor], where: Callable[[], tuple[str, str]]) -> None:
        super().__init__()
        self._where = where
        self._events: list[Event] = []
        self._numbers: dict[int, int] = {}
        """By the identity of a storage that is tracked now."""
        self._count = 0
        self._parts: dict[int, str] = {}
        """What storages are part of, by number."""
        self.label(held, HELD)

    def before(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        for tensor in leaves(args):
            self._track(tensor, maybe_mapped=False)

    def after(self, func: Any, args: Sequence[Any], out: Any) -> None:
        if func.namespace == "fsdp" and "all_gather" in operator_name(func):
            self.label(leaves(out), GATHERED)
        for tensor in leaves(out):
            self._track(tensor, maybe_mapped=False)

    def note_resized(self, storage: torch.UntypedStorage) -> None:
        super().note_resized(storage)
        if id(storage) in self._numbers:  # FSDP2 so frees what it has gathered
            self._parts[self._numbers[id(storage)]] = GATHERED

    def end_forward(self) -> None:
        """Take what has been computed and is held now for activations."""
        for number in (self._numbers[key] for key, size in self._sizes.items() if size):
            self._parts.setdefault(number, ACTIVATIONS)

    def peaks(self, state: int) -> Iterator[PhasePeak]:
        """Yield the peak of each phase, in the order in which they began.

        ``state`` is what the optimizer holds in addition, from its first step on.
        """
        alive, most = 0, dict[str, tuple[int, int]]()
        for number, event in enumerate(self._events):
            alive += event.change
            if alive > most.get(event.phase, (-1, 0))[0]:
                most[event.phase] = alive, number
        for phase, (_, last) in most.items():
            parts = self._bytes_after(last)
            yield PhasePeak(phase, self._events[last].module, {**parts, **({OPTIMIZER: state} if state else {})})

    def held_now(self) -> dict[str, int]:
        return self._bytes_after(len(self._events) - 1)

    def _bytes_after(self, last: int) -> dict[str, int]:
        parts = Counter[str]()
        for event in self._events[: last + 1]:
            parts[self._parts.get(event.storage, TEMPORARY)] += event.change
        return {name: nbytes for name, nbytes in parts.items() if nbytes}

    def label(self, tensors: Iterable[Tensor], part: str) -> None:
        """Note what the storages of these tensors are part of, unless that is known."""
        for tensor in tensors:
            self._track(tensor, maybe_mapped=False)
            self._parts.setdefault(self._numbers[id(tensor.untyped_storage())], part)

    def _track(self, tensor: Tensor, maybe_mapped: bool) -> None:
        key = id(tensor.untyped_storage())
        if key not in self._sizes:
            self._count += 1
            self._numbers[key] = self._count
        super()._track(tensor, maybe_mapped)

    def _log_size(self, key: int, size: int) -> None:
        if change := size - self._sizes[key]:
            self._events.append(Event(self._numbers[key], change, *self._where()))
        self._sizes[key] = size


def leaves(values: Any) -> Iterator[Tensor]:
    """Yield the tensors that stand for memory; of a DTensor, the operations on its part follow."""
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor))
