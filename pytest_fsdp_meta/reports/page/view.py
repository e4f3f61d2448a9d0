"""What the templates are given: the report, put in the order in which a reader looks at it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any

from pytest_fsdp_meta.evidence.collectives import Collective
from pytest_fsdp_meta.reports.page.findings import Cause, causes
from pytest_fsdp_meta.reports.page.layouts import Layout, layouts
from pytest_fsdp_meta.reports.page.traffic import Kind, Row, kinds, rows
from pytest_fsdp_meta.reports.schema import (
    BROKEN,
    JUDGED,
    STATUSES,
    UNACCOUNTED,
    VIOLATED,
    WORDS,
    CatalogueRecord,
    CheckRecord,
    LoaderRecord,
    Report,
    how_many,
    is_bad,
    statuses,
)
from pytest_fsdp_meta.text import counted, joined_runs

GLYPHS = {
    "passed": "✓",
    "failed": "✕",
    "error": "!",
    "xfailed": "x",
    "xpassed": "‼",
    "partly": "◐",
    "blocked": "⊘",
    "undeclared": "?",
    "nothing": "·",
    "skipped": "»",
    "left out": "-",
    "unselected": "○",
    "not run": "…",
}
ANCHOR = re.compile(r"[A-Za-z][\w-]*")
FEW = 3
"""Loaders that are all shown in full; of more, only those that are broken."""

MANY, MANY_DRAWINGS = 12, 500


@dataclass(frozen=True)
class CheckView:
    """A check of one loader."""

    anchor: str
    record: CheckRecord
    promise: str
    family: str

    @property
    def status(self) -> str:
        return self.record.status

    @property
    def told(self) -> bool:
        """Whether there is more to say of it than its status: it is broken, or was expected to be."""
        return self.record.status in BROKEN or bool(self.record.findings)

    @cached_property
    def causes(self) -> tuple[Cause, ...]:
        return causes(self.record.findings)


@dataclass(frozen=True)
class TrafficView:
    """The collectives of ranks that issued the same, in one stretch of time."""

    title: str
    ranks: tuple[int, ...]
    kinds: tuple[Kind, ...]
    rows: tuple[Row, ...]
    left: int
    total: int


@dataclass(frozen=True)
class LoaderView:
    """One loader in one world. ``checks`` has those of this loader by their ids."""

    number: int
    record: LoaderRecord
    title: str
    checks: Mapping[str, CheckView]
    show: bool
    """Whether it is shown in full at once."""

    @property
    def anchor(self) -> str:
        return f"loader-{self.number}"

    @property
    def told(self) -> list[tuple[CheckView, ...]]:
        """What is told at length; together what could not be judged for one and the same reason."""
        bundles: dict[object, list[CheckView]] = {}
        for check in self.checks.values():
            if check.told:
                alone = check.causes or check.record.unjudged
                key = check.anchor if alone else (check.status, check.record.reason)
                bundles.setdefault(key, []).append(check)
        return [tuple(bundle) for bundle in bundles.values()]

    @property
    def counts(self) -> dict[str, int]:
        return _in_order(statuses([self.record]))

    @cached_property
    def layouts(self) -> tuple[Layout, ...]:
        return layouts(self.record)

    @cached_property
    def traffic(self) -> tuple[TrafficView, ...]:
        told = self.record.summary.traffic if self.record.summary else ()
        stretches = {
            "in one training step": [(one.ranks, one.step) for one in told],
            "while loading": [(one.ranks, one.loading) for one in told],
        }
        return tuple(one for title, issued in stretches.items() for one in _traffic(title, issued))

    @cached_property
    def numbers(self) -> dict[str, int]:
        """Every tensor that the page names, with its number in the list that filters search."""
        tensors = (one.name for one in (self.record.summary.tensors if self.record.summary else ()))
        found = (one.tensor for check in self.record.checks for one in check.findings if one.tensor is not None)
        moved = (name for one in self.traffic for row in one.rows for name in row.tensors)
        return {name: number for number, name in enumerate(dict.fromkeys((*tensors, *found, *moved)))}

    def numbered(self, names: Iterable[str]) -> str:
        return joined_runs(self.numbers[name] for name in names)

    @property
    def losses_without_number(self) -> int:
        """Of the curves that a chart has."""
        losses = self.record.summary.losses if self.record.summary else None
        curves = (losses.mean, losses.reference, *losses.ranks) if losses else ()
        return sum(not math.isfinite(value) for curve in curves for value in curve)

    @property
    def seconds(self) -> float:
        return sum(self.record.seconds.values())


@dataclass(frozen=True)
class PageView:
    """The whole page."""

    report: Report
    loaders: tuple[LoaderView, ...]
    """Broken ones first."""
    families: tuple[tuple[str, tuple[CatalogueRecord, ...]], ...]
    """The columns of the matrix."""

    @property
    def counts(self) -> dict[str, int]:
        return _in_order(statuses(self.report.loaders))

    @property
    def ranks(self) -> int:
        return max((loader.record.world.size for loader in self.loaders), default=0)

    @property
    def big(self) -> bool:
        """Whether a browser should draw only what is on the screen; a picture of the whole page then lacks the rest."""
        return len(self.loaders) > MANY or sum(len(loader.layouts) for loader in self.loaders) > MANY_DRAWINGS

    @property
    def verdict(self) -> tuple[str, str, str]:
        """(how it went: "cut", "broken", "empty" or "kept"; the headline; what accounts for every check)."""
        counts = self.counts
        total = sum(counts.values())
        found = self._found(counts)
        accounted = total - how_many(counts, UNACCOUNTED)
        account = f"{accounted} of {total} checks accounted for" if total else "no loader was judged"
        if not self.report.complete:
            so_far = f"{account} · {found} so far" if found else account
            return "cut", "Cut off: this report is not complete", so_far
        bad = sum(_broken(loader.record) for loader in self.loaders)
        if bad:
            where = f"{bad} of {counted(len(self.loaders), 'loader')}"
            return "broken", f"{found}, in {where}" if found else f"{where} gave no model to judge", account
        if not how_many(counts, JUDGED):
            return "empty", "Nothing was judged", account
        expected = counts.get("xfailed", 0)
        but = f", but for {counted(expected, 'expected failure')}" if expected else ""
        return "kept", f"Every promise that was judged is kept{but}", account

    @staticmethod
    def _found(counts: Mapping[str, int]) -> str:
        """ "4 checks broken, 1 could not be judged"; empty where all is well."""
        numbers = {"broken": how_many(counts, VIOLATED)}
        numbers |= {WORDS[status]: counts.get(status, 0) for status in ("error", "not run")}
        first, *others = [(number, words) for words, number in numbers.items() if number] or [(0, "")]
        rest = "".join(f", {number} {words}" for number, words in others)
        return f"{counted(first[0], 'check')} {first[1]}{rest}" if first[0] else ""

    @property
    def data(self) -> dict[str, Any]:
        """What the script reads: names to filter by, and the points of the charts."""
        return {"loaders": [_data(loader) for loader in self.loaders]}


def view(report: Report) -> PageView:
    known = {one.check: one for one in report.header.catalogue}
    used = (check.check for loader in report.loaders for check in loader.checks)
    columns = [*report.header.catalogue, *(_unknown(id_) for id_ in dict.fromkeys(used) if id_ not in known)]
    known = {one.check: one for one in columns}
    several = {loader.loader for loader in report.loaders}
    loaders = tuple(
        LoaderView(
            number=number,
            record=record,
            title=record.loader if len(several) == len(report.loaders) else f"{record.loader}, {record.world}",
            checks=_checks(number, record, known),
            show=_broken(record) or len(report.loaders) <= FEW,
        )
        for number, record in enumerate(sorted(report.loaders, key=_broken, reverse=True), 1)
    )
    families = tuple((family, tuple(members)) for family, members in groupby(columns, lambda one: one.family))
    return PageView(report, loaders, families)


def _broken(record: LoaderRecord) -> bool:
    return bool(record.error) or is_bad([record])


def _unknown(check: str) -> CatalogueRecord:
    return CatalogueRecord(check, "others", "", "")


def _checks(number: int, record: LoaderRecord, known: Mapping[str, CatalogueRecord]) -> dict[str, CheckView]:
    checks = {}
    for index, one in enumerate(record.checks):
        part = one.check if ANCHOR.fullmatch(one.check) else str(index)
        of = known[one.check]
        checks[one.check] = CheckView(f"loader-{number}-{part}", one, of.promise, of.family)
    return checks


def _traffic(title: str, issued: Iterable[tuple[tuple[int, ...], tuple[Collective, ...]]]) -> Iterator[TrafficView]:
    """Ranks that differ while loading may issue the same in a step. Which group it is does not count, but its size."""
    alike: dict[object, tuple[list[int], tuple[Collective, ...]]] = {}
    for ranks, collectives in issued:
        key = tuple(replace(one, group="", ranks=(), root=len(one.ranks)) for one in collectives)
        alike.setdefault(key, ([], collectives))[0].extend(ranks)
    for same, collectives in alike.values():
        if collectives:
            told, left = rows(collectives)
            yield TrafficView(title, tuple(sorted(same)), kinds(collectives), told, left, len(collectives))


def _in_order(counts: Mapping[str, int]) -> dict[str, int]:
    """That of ``STATUSES``; those of a later version follow."""
    return {status: counts[status] for status in (*STATUSES, *counts) if counts.get(status)}


def _data(loader: LoaderView) -> dict[str, Any]:
    summary = loader.record.summary
    losses = summary.losses if summary else None
    data: dict[str, Any] = {"names": list(loader.numbers), "size": loader.record.world.size}
    if losses:
        data["losses"] = {
            "mean": _finite(losses.mean),
            "ranks": [_finite(one) for one in losses.ranks],
            "reference": _finite(losses.reference),
        }
    if summary and any(one.timeline for one in summary.memory):
        data["memory"] = [one.timeline for one in summary.memory]
    return data


def _finite(values: Iterable[float]) -> list[float | None]:
    """A chart has a gap where a loss is no number; the table beside it says which it was."""
    return [value if math.isfinite(value) else None for value in values]
