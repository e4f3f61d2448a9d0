"""The data of the templates: the report in the order in which the page shows it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any

from pytest_fsdp_meta.evidence.collectives import Collective
from pytest_fsdp_meta.reports.page.findings import Cause, group_by_cause
from pytest_fsdp_meta.reports.page.history import HistoryView, history_view
from pytest_fsdp_meta.reports.page.layouts import Layout, group_layouts
from pytest_fsdp_meta.reports.page.sizes import Sizes, size_view
from pytest_fsdp_meta.reports.page.traced import StepView, step_view
from pytest_fsdp_meta.reports.page.traffic import Kind, Row, fold_rows, group_by_kind
from pytest_fsdp_meta.reports.schema import (
    BAD,
    FAILED,
    JUDGED,
    SKIPS,
    STATUSES,
    UNACCOUNTED,
    CatalogueRecord,
    CheckRecord,
    LoaderRecord,
    Report,
    count_kinds,
    describe_count,
    how_many,
    is_bad,
)
from pytest_fsdp_meta.reports.terminal import origins
from pytest_fsdp_meta.text import counted, joined_runs

GLYPHS = {
    "passed": "✓",
    "partly checked": "◐",
    "failed": "✕",
    "error": "!",
    "xfailed": "x",
    "xpassed": "‼",
    "not declared": "?",
    "not applicable": "·",
    "depends on a failed check": "⊘",
    "left out": "-",
    "not selected": "○",
    "by the test": "»",
    "not run": "…",
}
"""Kind of a check (a status, or the kind of a skip) -> its character in the matrix."""
ANCHOR = re.compile(r"[A-Za-z][\w-]*")
MOST_EXPANDED = 3
"""With more loaders than this, only those with failures are expanded when the page opens."""
BIG_LOADERS, BIG_DRAWINGS = 12, 500
"""With more loaders or drawings than this, the browser draws only what is on the screen."""


@dataclass(frozen=True)
class CheckView:
    """A check of one loader."""

    anchor: str
    record: CheckRecord
    promise: str
    family: str
    history: HistoryView | None = None

    @property
    def mark(self) -> str:
        """The further class of its cell in the matrix, after a space."""
        return f" {self.history.mark}" if self.history and self.history.mark else ""

    @property
    def note(self) -> str:
        """What its cell says beside its status, after a comma."""
        return f", {self.history.note}" if self.history and self.history.note else ""

    @property
    def kind(self) -> str:
        return self.record.kind

    @property
    def has_details(self) -> bool:
        """Whether the page shows an article about the check: it failed, or was expected to."""
        return self.record.status in FAILED or bool(self.record.findings)

    @cached_property
    def causes(self) -> tuple[Cause, ...]:
        return group_by_cause(self.record.findings)

    @property
    def origins(self) -> tuple[str, ...]:
        return origins(self.record.findings)


@dataclass(frozen=True)
class TrafficView:
    """The collectives of ranks that issued the same ones, while loading or in one training step."""

    title: str
    ranks: tuple[int, ...]
    kinds: tuple[Kind, ...]
    rows: tuple[Row, ...]
    left: int
    total: int


@dataclass(frozen=True)
class LoaderView:
    """One loader in one world, with its checks by id."""

    number: int
    record: LoaderRecord
    title: str
    checks: Mapping[str, CheckView]
    is_expanded: bool
    """Whether its panels are open when the page opens."""
    sizes: Sizes | None = None
    """What it needs by world size, if it was simulated."""

    @property
    def anchor(self) -> str:
        return f"loader-{self.number}"

    @property
    def bundles(self) -> list[tuple[CheckView, ...]]:
        """The checks with details; errors with the same reason share one article."""
        bundles: dict[object, list[CheckView]] = {}
        for check in self.checks.values():
            if check.has_details:
                alone = check.causes or check.record.unjudged
                key = check.anchor if alone else (check.kind, check.record.reason)
                bundles.setdefault(key, []).append(check)
        return [tuple(bundle) for bundle in bundles.values()]

    @property
    def counts(self) -> dict[str, int]:
        return _in_order(count_kinds([self.record]))

    @cached_property
    def layouts(self) -> tuple[Layout, ...]:
        return group_layouts(self.record)

    @cached_property
    def traced(self) -> StepView | None:
        traced = self.record.summary.traced if self.record.summary else None
        return step_view(traced) if traced else None

    @cached_property
    def traffic(self) -> tuple[TrafficView, ...]:
        traffic = self.record.summary.traffic if self.record.summary else ()
        phases = {
            "in one training step": [(one.ranks, one.step) for one in traffic],
            "while loading": [(one.ranks, one.loading) for one in traffic],
        }
        return tuple(part for title, issued in phases.items() for part in _traffic(title, issued))

    @cached_property
    def numbers(self) -> dict[str, int]:
        """Every tensor that the page names -> its index in the list that the filter searches."""
        tensors = (one.name for one in (self.record.summary.tensors if self.record.summary else ()))
        in_findings = (one.tensor for check in self.record.checks for one in check.findings if one.tensor is not None)
        in_traffic = (name for one in self.traffic for row in one.rows for name in row.tensors)
        return {name: number for number, name in enumerate(dict.fromkeys((*tensors, *in_findings, *in_traffic)))}

    def numbered(self, names: Iterable[str]) -> str:
        return joined_runs(self.numbers[name] for name in names)

    @property
    def losses_not_plotted(self) -> int:
        """The number of losses that are NaN or infinite."""
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
    """Those with failures first."""
    families: tuple[tuple[str, tuple[CatalogueRecord, ...]], ...]
    """The columns of the matrix."""

    @property
    def counts(self) -> dict[str, int]:
        return _in_order(count_kinds(self.report.loaders))

    @property
    def ranks(self) -> int:
        return max((loader.record.world.size for loader in self.loaders), default=0)

    @property
    def is_big(self) -> bool:
        """Whether the browser should draw only what is on the screen; a screenshot of the whole page lacks the rest."""
        return len(self.loaders) > BIG_LOADERS or sum(len(one.layouts) for one in self.loaders) > BIG_DRAWINGS

    @property
    def verdict(self) -> tuple[str, str, str]:
        """(state: "incomplete", "failed", "empty" or "passed"; the headline; how many checks are accounted for)."""
        counts = self.counts
        total = sum(counts.values())
        failures = ", ".join(describe_count(counts[status], status) for status in counts if status in BAD)
        accounted = total - how_many(counts, UNACCOUNTED)
        account = f"{accounted} of {total} checks accounted for" if total else "no loader was judged"
        if not self.report.complete:
            so_far = f"{account} · {failures} so far" if failures else account
            return "incomplete", "Incomplete report", so_far
        bad = sum(_needs_attention(loader.record) for loader in self.loaders)
        problems = [f"{counted(len(self.report.missing), 'loader')} missing"] if self.report.missing else []
        if bad:
            where = f"{bad} of {counted(len(self.loaders), 'loader')}"
            problems.insert(0, f"{failures} in {where}" if failures else f"{where} returned no model")
        if problems:
            return "failed", ", ".join(problems), account
        if not how_many(counts, JUDGED):
            return "empty", "Nothing was judged", account
        expected = counts.get("xfailed", 0)
        but = f" ({counted(expected, 'expected failure')})" if expected else ""
        return "passed", f"All judged checks passed{but}", account

    @property
    def data(self) -> dict[str, Any]:
        """What the script reads: names to filter by, and the points of the charts."""
        return {"loaders": [_data(loader) for loader in self.loaders]}


def build_view(report: Report) -> PageView:
    """Return the data of the whole page."""
    known = {one.check: one for one in report.header.catalogue}
    used = dict.fromkeys(check.check for loader in report.loaders for check in loader.checks)
    columns = [one for one in report.header.catalogue if one.check in used or not used]
    columns += [_unknown(id_) for id_ in used if id_ not in known]
    known = {one.check: one for one in columns}
    names = {loader.loader for loader in report.loaders}
    loaders = tuple(
        LoaderView(
            number=number,
            record=record,
            title=record.loader if len(names) == len(report.loaders) else f"{record.loader}, {record.world}",
            checks=_checks(number, record, known, report),
            is_expanded=_needs_attention(record) or len(report.loaders) <= MOST_EXPANDED,
            sizes=size_view(record.sizes, report.header.device_memory),
        )
        for number, record in enumerate(sorted(report.loaders, key=_needs_attention, reverse=True), 1)
    )
    families = tuple((family, tuple(members)) for family, members in groupby(columns, lambda one: one.family))
    return PageView(report, loaders, families)


def _needs_attention(record: LoaderRecord) -> bool:
    return bool(record.error) or is_bad([record])


def _unknown(check: str) -> CatalogueRecord:
    """Return a column for a check that the report's catalogue lacks."""
    return CatalogueRecord(check, "others", "", "")


def _checks(
    number: int, record: LoaderRecord, known: Mapping[str, CatalogueRecord], report: Report
) -> dict[str, CheckView]:
    checks = {}
    for index, one in enumerate(record.checks):
        part = one.check if ANCHOR.fullmatch(one.check) else str(index)
        column = known[one.check]
        history = history_view(one, report)
        checks[one.check] = CheckView(f"loader-{number}-{part}", one, column.promise, column.family, history)
    return checks


def _traffic(title: str, issued: Iterable[tuple[tuple[int, ...], tuple[Collective, ...]]]) -> Iterator[TrafficView]:
    """Group ranks that issued the same collectives in one phase; of process groups, only the size counts."""
    groups: dict[object, tuple[list[int], tuple[Collective, ...]]] = {}
    for ranks, collectives in issued:
        key = tuple(replace(one, group="", ranks=(), root=len(one.ranks)) for one in collectives)
        groups.setdefault(key, ([], collectives))[0].extend(ranks)
    for same, collectives in groups.values():
        if collectives:
            rows, left = fold_rows(collectives)
            yield TrafficView(title, tuple(sorted(same)), group_by_kind(collectives), rows, left, len(collectives))


def _in_order(counts: Mapping[str, int]) -> dict[str, int]:
    """Return counts in the order of statuses and skips; kinds of a later version follow."""
    return {kind: counts[kind] for kind in (*STATUSES, *SKIPS, *counts) if counts.get(kind)}


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
    """Return losses for the chart, which has a gap where one is NaN or infinite."""
    return [value if math.isfinite(value) else None for value in values]
