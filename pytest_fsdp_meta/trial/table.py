"""Take observations row by row of a table, and keep what was seen, or why it was not, and how long it took."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from pytest_fsdp_meta.evidence import Evidence, RankInventory, SubjectFacts, Unavailable
from pytest_fsdp_meta.judging.registry import OBSERVATIONS
from pytest_fsdp_meta.trial.obstacles import NOT_WANTED, from_world_error
from pytest_fsdp_meta.worlds import WorldError

Run = TypeVar("Run")


@dataclass(frozen=True)
class Observation(Generic[Run]):
    """One row: ``take`` returns what the field of ``Evidence`` with this name holds, or an ``Unavailable``.

    As with checks, ``needs`` are the earlier observations without which this one cannot be taken, and ``uses`` those
    that it reads if they are available. Each row finds its world in the state that the rows before leave it in.
    """

    name: str
    take: Callable[[Run], Any]
    needs: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()


def with_needed(wanted: Iterable[str], rows: Iterable[Observation[Any]]) -> frozenset[str]:
    """Return the wanted observations and those that they need or use. ``rows`` are those of all tables, in order."""
    names = set(wanted)
    for row in reversed(list(rows)):
        if row.name in names:
            names.update(row.needs, row.uses)
    return frozenset(names)


@dataclass
class Stopwatch:
    """Seconds by phase, in the order in which the phases first began."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timing(self, phase: str) -> Iterator[None]:
        """Add the duration of the block to the phase, also when the block raises."""
        began = time.perf_counter()
        self.seconds.setdefault(phase, 0.0)
        try:
            yield
        finally:
            self.seconds[phase] += time.perf_counter() - began


@dataclass
class Taken:
    """What was observed in a trial so far: ``seen`` has an observation, or ``unavailable`` the reason."""

    seen: Evidence
    wanted: frozenset[str]
    stopwatch: Stopwatch
    unavailable: dict[str, Unavailable] = field(default_factory=dict)


@dataclass
class TableRun:
    """Takes the rows of a table; a subclass has what they need, and the functions that they name."""

    taken: Taken

    @property
    def seen(self) -> Evidence:
        return self.taken.seen

    @property
    def subject(self) -> SubjectFacts:
        return self.taken.seen.subject

    @property
    def inventory(self) -> tuple[RankInventory, ...]:
        return self.taken.seen.inventory

    @property
    def unavailable(self) -> dict[str, Unavailable]:
        return self.taken.unavailable

    def take(self, row: Observation[Any]) -> None:
        """Take an observation if a check wants it and nothing rules it out."""
        if row.name not in self.taken.wanted:
            self.unavailable[row.name] = NOT_WANTED
        if row.name in self.unavailable:
            return
        try:
            with self.taken.stopwatch.timing(row.name):
                observed = self.ruled_out(row) or row.take(self)
        except WorldError as error:
            observed = self.describe_error(error)
        if isinstance(observed, Unavailable):
            self.unavailable[row.name] = observed
        elif row.name in OBSERVATIONS:
            self.see(**{row.name: observed})

    def see(self, **observed: Any) -> None:
        self.taken.seen = replace(self.taken.seen, **observed)

    def ruled_out(self, row: Observation[Any]) -> Unavailable | None:
        """Return why something that the row needs was not taken."""
        return next((self.unavailable[need] for need in row.needs if need in self.unavailable), None)

    def describe_error(self, error: WorldError) -> Unavailable:
        models = (*self.inventory, *([self.seen.reference.inventory] if self.seen.reference is not None else []))
        return from_world_error(error, {name for model in models for name in model.by_name})
