"""What became of every check of every loader, entered as pytest's reports come in, from whatever process they come."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from pytest_fsdp_meta.catalogue import Catalogue
from pytest_fsdp_meta.evidence import WorldFacts
from pytest_fsdp_meta.reports.record import UNKNOWN, CheckRecord, LoaderRecord, Summary


@dataclass(frozen=True)
class Loaded:
    """What the items of a loader have in common; told with the first of them that knows it."""

    error: str = ""
    seconds: Mapping[str, float] = field(default_factory=dict)
    evidence: str = ""
    summary: Summary | None = None


@dataclass(frozen=True)
class Entry:
    """What an item says of itself, as plain data on pytest's report of it."""

    loader: str
    world: WorldFacts
    offered: tuple[str, ...]
    """The checks of the loader that its author did not leave out."""
    record: CheckRecord
    loaded: Loaded | None = None


@dataclass
class _Page:
    """One loader in one world."""

    world: WorldFacts = UNKNOWN
    offered: tuple[str, ...] | None = None
    checks: dict[str, CheckRecord] = field(default_factory=dict)
    loaded: Loaded = Loaded()


class Ledger:
    """Of one run. Reports may come from several processes, several times (phases, reruns) or never."""

    def __init__(self) -> None:
        self._pages: dict[str, _Page] = {}
        self._planned: dict[str, tuple[str, str]] = {}
        """Node id -> loader and check."""

    def plan(self, loader: str, check: str, nodeid: str, world: WorldFacts = UNKNOWN) -> None:
        """The item was selected."""
        page = self._pages.setdefault(loader, _Page(world))
        page.checks.setdefault(check, CheckRecord(check, "not run", nodeid))
        self._planned[nodeid] = loader, check

    def knows(self, nodeid: str) -> bool:
        """Whether the item was planned: it is a loader's, or looks like one."""
        return nodeid in self._planned

    def enter(self, entry: Entry) -> None:
        page = self._pages.setdefault(entry.loader, _Page())
        page.world, page.offered = entry.world, entry.offered
        spent = page.checks[entry.record.check].seconds if entry.record.check in page.checks else 0.0
        page.checks[entry.record.check] = replace(entry.record, seconds=spent)
        if entry.loaded is not None:
            page.loaded = entry.loaded

    def crashed(self, nodeid: str, told: str) -> None:
        """The process of a planned item ended before the item could say anything."""
        if nodeid in self._planned:
            loader, check = self._planned[nodeid]
            self._pages[loader].checks[check] = CheckRecord(check, "error", nodeid, reason=told)

    def spend(self, nodeid: str, seconds: float) -> None:
        """One phase of an item is over."""
        if nodeid in self._planned:
            loader, check = self._planned[nodeid]
            checks = self._pages[loader].checks
            checks[check] = replace(checks[check], seconds=checks[check].seconds + seconds)

    def strike(self, nodeid: str) -> None:
        """The item only looked like a loader's, by its name."""
        if nodeid in self._planned:
            loader, _ = self._planned[nodeid]
            self._planned = {known: place for known, place in self._planned.items() if place[0] != loader}
            del self._pages[loader]

    def loaders(self, catalogue: Catalogue) -> tuple[LoaderRecord, ...]:
        """All of them, each with every check of the catalogue, in the order in which they were planned."""
        return tuple(_record(loader, page, catalogue.ids()) for loader, page in self._pages.items())


def _record(loader: str, page: _Page, ids: Iterable[str]) -> LoaderRecord:
    offered = page.offered if page.offered is not None else tuple(ids)

    def missing(check: str) -> CheckRecord:
        return CheckRecord(check, "unselected" if check in offered else "left out")

    return LoaderRecord(
        loader=loader,
        world=page.world,
        checks=tuple(page.checks.get(check) or missing(check) for check in ids),
        error=page.loaded.error,
        seconds=page.loaded.seconds,
        evidence=page.loaded.evidence,
        summary=page.loaded.summary,
    )
