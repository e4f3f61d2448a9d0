"""The results of a run's loaders, accumulated as pytest's reports of their items arrive, from any process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from pytest_fsdp_meta.catalogue import Catalogue
from pytest_fsdp_meta.checks.simulation.facts import SimulatedSize
from pytest_fsdp_meta.evidence import WorldFacts
from pytest_fsdp_meta.reports.schema import PASSED, UNKNOWN, CheckRecord, Evenness, LoaderRecord, Summary

COMMON = ("error", "seconds", "evidence", "summary", "evenness", "notes", "sizes", "problem")
"""The fields of an item that are the same for all items of its loader; the first item that knows them reports them."""


@dataclass(frozen=True)
class ItemContext:
    """One item of a loader, as it reports itself: plain data, which xdist passes on from a worker."""

    key: str
    """Identifies one loader in one world: all its items have this key, and no other item has it."""
    loader: str
    check: CheckRecord
    world: WorldFacts = UNKNOWN
    offered: tuple[str, ...] | None = None
    """The checks that the marker leaves to pytest to select; None where they are not known."""
    loads: int = 1
    """How often the loader has run, because items were run again."""
    error: str = ""
    """Why the loader returned no model to check, in one line."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    evidence: str = ""
    """The file of the stored evidence, relative to the report."""
    summary: Summary | None = None
    evenness: Evenness | None = None
    notes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    sizes: tuple[SimulatedSize, ...] = ()
    problem: str = ""
    """Why the evidence was not stored."""

    @property
    def describes_loader(self) -> bool:
        """Whether the item reports the fields that all items of its loader have in common."""
        return any(getattr(self, name) for name in COMMON)

    def with_loader_of(self, other: ItemContext) -> ItemContext:
        """Return this item with the common fields of another item of the loader."""
        return replace(self, **{name: getattr(other, name) for name in COMMON})


class RunRecords:
    """The records of one run. Items may report several times (phases, reruns), from several processes, or never."""

    def __init__(self) -> None:
        self._loaders: dict[str, ItemContext] = {}
        """Key -> the latest item of the loader, with the fields that its items have in common."""
        self._checks: dict[str, dict[str, CheckRecord]] = {}
        """Key -> check -> its record."""
        self._planned: dict[str, tuple[str, str]] = {}
        """Node id -> key, and check."""
        self._forgotten: set[str] = set()

    def plan(self, item: ItemContext) -> None:
        """Record a selected item as not run yet."""
        if item.key in self._forgotten:
            return
        self._loaders.setdefault(item.key, item)
        self._checks.setdefault(item.key, {}).setdefault(item.check.check, item.check)
        self._planned[item.check.nodeid] = item.key, item.check.check

    def add(self, item: ItemContext) -> None:
        """Record what an item reports."""
        latest = self._loaders.get(item.key)
        self._loaders[item.key] = item if latest is None or item.describes_loader else item.with_loader_of(latest)
        checks = self._checks.setdefault(item.key, {})
        check = item.check.check
        checks[check] = replace(item.check, seconds=checks[check].seconds if check in checks else 0.0)

    def key_of(self, nodeid: str) -> str:
        """Return the key of a planned item's loader; "" for any other item."""
        return self._planned.get(nodeid, ("", ""))[0]

    def add_crash(self, nodeid: str, error: str) -> str:
        """Record that the process of an item crashed. Return the item's status; "" if it was not planned."""
        return self._change(nodeid, lambda check: with_later_error(check, error))

    def add_seconds(self, nodeid: str, seconds: float) -> None:
        """Add the duration of one phase of an item."""
        self._change(nodeid, lambda check: replace(check, seconds=check.seconds + seconds))

    def _change(self, nodeid: str, change: Callable[[CheckRecord], CheckRecord]) -> str:
        if nodeid not in self._planned:
            return ""
        key, check = self._planned[nodeid]
        changed = self._checks[key][check] = change(self._checks[key][check])
        return changed.status

    def forget_loader(self, nodeid: str) -> None:
        """Drop the loader of an item that turns out to be an ordinary test, named like one of a loader."""
        key = self.key_of(nodeid)
        if key:
            self._forgotten.add(key)
            self._planned = {known: place for known, place in self._planned.items() if place[0] != key}
            del self._loaders[key], self._checks[key]

    @property
    def problems(self) -> list[str]:
        """Why evidence was not stored, for each loader where it was not."""
        return [item.problem for item in self._loaders.values() if item.problem]

    def loaders(self, catalogue: Catalogue) -> tuple[LoaderRecord, ...]:
        """Return a record of each loader, in the order of planning, with every check for worlds of its kind."""
        return tuple(
            _loader_record(item, self._checks[key], _ids(catalogue, item)) for key, item in self._loaders.items()
        )


def _ids(catalogue: Catalogue, item: ItemContext) -> list[str]:
    """Return the checks for worlds of this kind, and those that the marker asks for."""
    concerned = {*catalogue.ids_for(bool(item.world.simulated)), *(item.offered or ())}
    return [id for id in catalogue.ids() if id in concerned]


def _loader_record(item: ItemContext, checks: Mapping[str, CheckRecord], ids: Iterable[str]) -> LoaderRecord:
    def not_reported(check: str) -> CheckRecord:
        offered = item.offered is None or check in item.offered
        return CheckRecord(check, "skipped", skip="not selected" if offered else "left out")

    return LoaderRecord(
        loader=item.loader,
        world=item.world,
        checks=tuple(checks.get(check) or not_reported(check) for check in ids),
        error=item.error,
        loads=item.loads,
        seconds=item.seconds,
        evidence=item.evidence,
        summary=item.summary,
        evenness=item.evenness,
        notes=item.notes,
        sizes=item.sizes,
    )


def with_later_error(check: CheckRecord, error: str) -> CheckRecord:
    """Return the record of a check after an error in a later phase of its item, such as a fixture's teardown.

    Only a pass or a difference becomes an error: findings and reasons that are already known stay.
    """
    status = "error" if check.status in (*PASSED, "differs", "not run") else check.status
    return replace(check, status=status, reason=join_reasons(check.reason, error))


def join_reasons(reason: str, later: str) -> str:
    """Return both reasons as one line."""
    return "; and then ".join(filter(None, [reason, later]))
