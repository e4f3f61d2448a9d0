"""What became of every check of every loader, entered as pytest's reports come in, from whatever process they come."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from pytest_fsdp_meta.catalogue import Catalogue
from pytest_fsdp_meta.evidence import WorldFacts
from pytest_fsdp_meta.reports.schema import UNKNOWN, CheckRecord, LoaderRecord, Summary, ended_badly


@dataclass(frozen=True)
class Loaded:
    """What the items of a loader have in common; told with the first of them that knows it."""

    error: str = ""
    seconds: Mapping[str, float] = field(default_factory=dict)
    evidence: str = ""
    summary: Summary | None = None
    problem: str = ""
    """Why the evidence was not kept."""


@dataclass(frozen=True)
class Entry:
    """What an item says of itself, as plain data on pytest's report of it."""

    key: str
    """What tells its loader in its world from all others."""
    loader: str
    world: WorldFacts
    offered: tuple[str, ...]
    """The checks of the loader that its author did not leave out."""
    record: CheckRecord
    loaded: Loaded | None = None


@dataclass
class _Page:
    """One loader in one world."""

    loader: str
    world: WorldFacts = UNKNOWN
    offered: tuple[str, ...] | None = None
    checks: dict[str, CheckRecord] = field(default_factory=dict)
    loaded: Loaded = Loaded()


class RunRecords:
    """Of one run. Reports may come from several processes, several times (phases, reruns) or never."""

    def __init__(self) -> None:
        self._pages: dict[str, _Page] = {}
        self._planned: dict[str, tuple[str, str]] = {}
        """Node id -> key of the loader, and check."""
        self._struck: set[str] = set()

    def plan(
        self,
        key: str,
        check: str,
        nodeid: str,
        loader: str = "",
        world: WorldFacts = UNKNOWN,
        offered: tuple[str, ...] | None = None,
    ) -> None:
        """The item was selected."""
        if key in self._struck:
            return
        page = self._pages.setdefault(key, _Page(loader or key, world, offered))
        page.checks.setdefault(check, CheckRecord(check, "not run", nodeid))
        self._planned[nodeid] = key, check

    def enter(self, entry: Entry) -> None:
        page = self._pages.setdefault(entry.key, _Page(entry.loader))
        page.loader, page.world, page.offered = entry.loader, entry.world, entry.offered
        spent = page.checks[entry.record.check].seconds if entry.record.check in page.checks else 0.0
        page.checks[entry.record.check] = replace(entry.record, seconds=spent)
        if entry.loaded is not None:
            page.loaded = entry.loaded

    def key_of(self, nodeid: str) -> str:
        """The loader of a planned item; empty for any other."""
        return self._planned.get(nodeid, ("", ""))[0]

    def crashed(self, nodeid: str, told: str) -> str:
        """The process of an item has ended, before it could say anything or afterwards. Its status, if planned."""
        return self._change(nodeid, lambda before: ended_badly(before, told))

    def spend(self, nodeid: str, seconds: float) -> None:
        """One phase of an item is over."""
        self._change(nodeid, lambda before: replace(before, seconds=before.seconds + seconds))

    def _change(self, nodeid: str, change: Callable[[CheckRecord], CheckRecord]) -> str:
        """The status that it then has; empty where the item is not planned."""
        if nodeid not in self._planned:
            return ""
        key, check = self._planned[nodeid]
        checks = self._pages[key].checks
        checks[check] = change(checks[check])
        return checks[check].status

    def strike(self, nodeid: str) -> None:
        """The item only looked like a loader's, by its name."""
        if nodeid in self._planned:
            key, _ = self._planned[nodeid]
            self._struck.add(key)
            self._planned = {known: place for known, place in self._planned.items() if place[0] != key}
            del self._pages[key]

    @property
    def problems(self) -> list[str]:
        """Why evidence was not kept."""
        return [page.loaded.problem for page in self._pages.values() if page.loaded.problem]

    def loaders(self, catalogue: Catalogue) -> tuple[LoaderRecord, ...]:
        """All of them, each with every check of the catalogue, in the order in which they were planned."""
        return tuple(_record(page, catalogue.ids()) for page in self._pages.values())


def _record(page: _Page, ids: Iterable[str]) -> LoaderRecord:
    offered = page.offered if page.offered is not None else tuple(ids)

    def missing(check: str) -> CheckRecord:
        return CheckRecord(check, "unselected" if check in offered else "left out")

    return LoaderRecord(
        loader=page.loader,
        world=page.world,
        checks=tuple(page.checks.get(check) or missing(check) for check in ids),
        error=page.loaded.error,
        seconds=page.loaded.seconds,
        evidence=page.loaded.evidence,
        summary=page.loaded.summary,
    )
