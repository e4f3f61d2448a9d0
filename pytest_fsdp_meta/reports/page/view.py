"""The data of the templates: the report in the order in which the page shows it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, takewhile
from math import isfinite
from string import ascii_lowercase, digits
from typing import Any

from pytest_fsdp_meta.reports.page.checks import UNCHECKED, CheckView, Unchecked, group_by_reason, history_view
from pytest_fsdp_meta.reports.page.layouts import STATES, Layout, Mesh, drawn_mesh, group_layouts, own_meshes
from pytest_fsdp_meta.reports.page.traced import StepView, step_view
from pytest_fsdp_meta.reports.schema import (
    BAD,
    FAILED,
    JUDGED,
    SKIPS,
    STATUSES,
    UNACCOUNTED,
    CatalogueRecord,
    Curves,
    LoaderRecord,
    Report,
    Summary,
    count_kinds,
    describe_kind,
    how_many,
    is_bad,
)
from pytest_fsdp_meta.reports.sizes import Sizes, size_view
from pytest_fsdp_meta.reports.story import describe_failures, state_of
from pytest_fsdp_meta.reports.totals import describe_unseen
from pytest_fsdp_meta.text import counted, first_of, grouped, joined_runs

GLYPHS = {
    "passed": "✓",
    "differs": "Δ",
    "partly checked": "◐",
    "failed": "✕",
    "error": "!",
    "xfailed": "x",
    "xpassed": "‼",
    "not declared": "?",
    "not applicable": "·",
    "depends on a failed check": "⊘",
    "not supported": "≠",
    "left out": "-",
    "not selected": "○",
    "by the test": "»",
    "not run": "…",
}
"""Kind of a check (a status, or the kind of a skip) -> its character in the matrix."""
ANCHOR = re.compile(r"[A-Za-z][\w-]*")
PART = re.compile(r".*?(?:/|::)")
"""A folder, the file or a class in a node id."""
MOST_EXPANDED = 3
"""With more loaders than this, only those with failures are expanded when the page opens, and their checks are a table
in place of a list."""
BIG_LOADERS, BIG_DRAWINGS = 12, 500
"""With more loaders or drawings than this, the browser draws only what is on the screen. With more loaders, their
sections are closed and packed as well."""
MOST_CLEAN = 5
"""Rows of loaders without failures in the matrix that are not folded into one."""
TABS = {
    "failed": FAILED,
    "not run": ("not run",),
    "differs": ("differs",),
    "partly checked": ("partly checked",),
    "xfailed": ("xfailed",),
    "passed": ("passed",),
    "skipped": ("skipped", *SKIPS),
}
"""Tab at the top of the page -> the kinds of checks that it shows."""


@dataclass(frozen=True)
class LossRow:
    """One training step; without a reference, what is compared with it is None."""

    mean: float
    reference: float | None
    difference: float | None
    """Relative to the largest loss of the reference, as ``loss_parity`` judges it; infinite for a NaN."""
    allowed: float | None
    slices: tuple[float | None, ...]

    @property
    def is_off(self) -> bool:
        return self.difference is not None and self.allowed is not None and self.difference > self.allowed


@dataclass(frozen=True)
class LossTable:
    """The losses of all steps."""

    rows: tuple[LossRow, ...]
    slices: int

    @property
    def has_reference(self) -> bool:
        return any(row.reference is not None for row in self.rows)


@dataclass(frozen=True)
class LoaderView:
    """One loader in one world, with its checks by id."""

    number: int
    record: LoaderRecord
    title: str
    start: int
    """The length of the folders and the file that the titles of all loaders begin with."""
    checks: Mapping[str, CheckView]
    is_expanded: bool
    """Whether its panels are open when it is."""
    names: Mapping[str, int]
    """Every tensor that the page names, in any loader -> its index in the list that the filter searches."""
    sizes: Sizes | None = None
    """What it needs by world size, if it was simulated."""

    @property
    def short(self) -> str:
        """The title without what those of all loaders begin with."""
        return self.title[self.start :]

    @property
    def anchor(self) -> str:
        return f"loader-{self.number}"

    @property
    def cell(self) -> str:
        """The id of its row in the matrix."""
        return f"cell-{self.number}"

    @property
    def summary(self) -> Summary:
        return self.record.summary or Summary()

    @property
    def needs_attention(self) -> bool:
        return is_bad([self.record])

    @property
    def bundles(self) -> list[tuple[CheckView, ...]]:
        """The checks with details; errors with the same reason share one article."""

        def alike(check: CheckView) -> object:
            alone = check.causes or check.record.unjudged
            return check.anchor if alone else (check.kind, check.record.reason)

        bundles = grouped((alike(check), check) for check in self.checks.values() if check.has_details)
        return [tuple(bundle) for bundle in bundles.values()]

    @property
    def counts(self) -> dict[str, int]:
        return _in_order(count_kinds([self.record]))

    @cached_property
    def layouts(self) -> tuple[Layout, ...]:
        return group_layouts(self.record, self.mesh)

    @property
    def states(self) -> tuple[str, ...]:
        """The states of tensors that its drawings show, but those that are not filled."""
        shown = {state for layout in self.layouts for state in layout.states}
        return tuple(state for state in STATES if state in shown and state != "nothing")

    @cached_property
    def own_meshes(self) -> tuple[Mesh, ...]:
        return own_meshes(self.record)

    @property
    def mesh(self) -> Mesh:
        """The mesh in whose order ranks are drawn."""
        return drawn_mesh(self.record.world, self.own_meshes)

    @cached_property
    def traced(self) -> StepView | None:
        return step_view(self.summary.traced) if self.summary.traced else None

    @cached_property
    def losses(self) -> LossTable | None:
        return loss_table(self.summary.losses) if self.summary.losses else None

    @cached_property
    def tensors(self) -> tuple[str, ...]:
        """Every tensor that its section names."""
        tensors = (one.name for one in self.summary.tensors)
        in_findings = (one.tensor for check in self.record.checks for one in check.findings if one.tensor is not None)
        return tuple(dict.fromkeys((*tensors, *in_findings)))

    def numbered(self, names: Iterable[str]) -> str:
        return joined_runs(self.names[name] for name in names)

    @property
    def seconds(self) -> float:
        return sum(self.record.seconds.values())


@dataclass(frozen=True)
class PageView:
    """The whole page."""

    report: Report
    loaders: tuple[LoaderView, ...]
    """Those with failures first, then those with checks that differ."""
    families: tuple[tuple[str, tuple[CatalogueRecord, ...]], ...]
    """The columns of the matrix."""
    names: Mapping[str, int]

    @property
    def counts(self) -> dict[str, int]:
        """Kind -> the number of checks; those of crashed loaders are not counted, since none was judged."""
        return _in_order(count_kinds(loader for loader in self.report.loaders if not loader.is_crashed))

    @property
    def kinds(self) -> dict[str, int]:
        """The same with the checks of crashed loaders, for the filter."""
        return _in_order(count_kinds(self.report.loaders))

    @property
    def tabs(self) -> dict[str, int]:
        """Tab -> the number of its checks, which is not zero."""
        return {tab: times for tab, kinds in TABS.items() if (times := how_many(self.kinds, kinds))}

    @property
    def columns(self) -> list[str]:
        return [column.check for _, checks in self.families for column in checks]

    @property
    def failing(self) -> tuple[LoaderView, ...]:
        return tuple(loader for loader in self.loaders if loader.needs_attention)

    @property
    def clean(self) -> tuple[LoaderView, ...]:
        return tuple(loader for loader in self.loaders if not loader.needs_attention)

    @property
    def crashed(self) -> int:
        return sum(loader.is_crashed for loader in self.report.loaders)

    @property
    def ranks(self) -> int:
        return max((loader.record.world.size for loader in self.loaders), default=0)

    @property
    def is_big(self) -> bool:
        """Whether the browser should draw only what is on the screen; a screenshot of the whole page lacks the rest."""
        return self.is_packed or sum(len(one.layouts) for one in self.loaders) > BIG_DRAWINGS

    @property
    def is_packed(self) -> bool:
        """Whether sections of loaders are closed, and unpacked by the script when they are opened."""
        return len(self.loaders) > BIG_LOADERS

    @property
    def folds_clean(self) -> bool:
        """Whether the matrix opens with the rows and columns that have failures, and one row for all others."""
        return self.is_packed or len(self.clean) > MOST_CLEAN

    @property
    def is_list(self) -> bool:
        """Whether the checks are a list by family, which fits any screen, in place of a table of loaders and checks."""
        return len(self.loaders) <= MOST_EXPANDED

    @property
    def hides_clean(self) -> bool:
        """Whether rows and columns without failures can be hidden."""
        return not self.is_list and (self.folds_clean or bool(self.failing))

    @property
    def unseen(self) -> list[str]:
        """A sentence for each thing that no check could see, because of the sizes and values of the models."""
        return [line[:1].upper() + line[1:] + "." for line in describe_unseen(self.report.loaders)]

    @property
    def unchecked(self) -> list[Unchecked]:
        """What could be checked in addition."""
        return self._grouped(UNCHECKED)

    @property
    def differing(self) -> list[Unchecked]:
        """What is beyond its limit, and is not judged."""
        return self._grouped(("differs",))

    def _grouped(self, kinds: Sequence[str]) -> list[Unchecked]:
        return group_by_reason(((loader.short, loader.checks.values()) for loader in self.loaders), kinds)

    @property
    def _only_failing(self) -> str:
        """Return what the headline adds if one loader failed, and the check if it is a single one, such as ": a_b"."""
        if len(self.failing) != 1 or self.report.missing:
            return ""
        loader = self.failing[0]
        bad = [] if loader.record.is_crashed else [id for id, check in loader.checks.items() if check.kind in BAD]
        return f": {bad[0]} in {loader.title}" if len(bad) == 1 else f": {loader.title}"

    @property
    def verdict(self) -> tuple[str, str, str]:
        """(state, as state_of() has it; the headline; what it is about)."""
        state, counts = state_of(self.report), count_kinds(self.report.loaders)
        total = sum(counts.values())
        failures = describe_failures(self.report.loaders, len(self.report.missing))
        accounted = total - how_many(counts, UNACCOUNTED)
        account = f"{accounted} of {total} checks accounted for" if total else "no loader was judged"
        loaders = counted(len(self.loaders), "loader")
        if not self.report.complete:
            so_far = f"{account} · {failures} so far" if failures else account
            return state, "Incomplete report", so_far
        where = f"in {len(self.failing)} of {loaders}" if self.failing else loaders
        outcome = self.report.outcome
        if outcome is not None:
            what = f"{failures} {where}" if failures and self.failing else loaders
            text = str(outcome)
            account = f"{what} · {account} · --fsdp-fail-on={outcome.fail_on}"
            return state, text[:1].upper() + text[1:], account
        if failures:
            return state, failures + self._only_failing, f"{where} · {account}"
        if not how_many(counts, JUDGED):
            return state, "Nothing was judged", account
        if differing := list(dict.fromkeys(check.record.check for one in self.differing for check in one.checks)):
            verb = "differs" if len(differing) == 1 else "differ"
            return state, f"{first_of(differing, 2)} {verb}, no check failed", f"{loaders} · {account}"
        expected = counts.get("xfailed", 0)
        but = f" ({counted(expected, 'expected failure')})" if expected else ""
        return state, f"All judged checks passed{but}", f"{loaders} · {account}"

    @property
    def data(self) -> dict[str, Any]:
        """What the script reads: the kind of each check, and names to filter by."""
        kinds = list(self.kinds)
        return {
            "checks": self.columns,
            "kinds": kinds,
            "bad": BAD,
            "tabs": TABS,
            "glyphs": [GLYPHS.get(kind, "?") for kind in kinds],
            "labels": [describe_kind(kind) for kind in kinds],
            "names": list(self.names),
            "loaders": [_data(loader, self.columns, kinds) for loader in self.loaders],
        }


def build_view(report: Report) -> PageView:
    """Return the data of the whole page."""
    known = {one.check: one for one in report.header.catalogue}
    used = dict.fromkeys(check.check for loader in report.loaders for check in loader.checks)
    columns = [one for one in report.header.catalogue if one.check in used or not used]
    columns += [CatalogueRecord(id_, "others", "", "") for id_ in used if id_ not in known]
    known = {one.check: one for one in columns}
    names: dict[str, int] = {}
    loaders = tuple(_loaders(report, known, names))
    for name in (name for loader in loaders for name in loader.tensors):
        names.setdefault(name, len(names))
    families = tuple((family, tuple(members)) for family, members in groupby(columns, lambda one: one.family))
    return PageView(report, loaders, families, names)


def _loaders(report: Report, known: Mapping[str, CatalogueRecord], names: Mapping[str, int]) -> Iterator[LoaderView]:
    many = len({loader.loader for loader in report.loaders}) < len(report.loaders)
    titles = [f"{record.loader}, {record.world}" if many else record.loader for record in report.loaders]
    start = _shared_start(titles)
    few = len(report.loaders) <= MOST_EXPANDED

    def rank(pair: tuple[LoaderRecord, str]) -> tuple[bool, bool]:
        return is_bad([pair[0]]), count_kinds([pair[0]])["differs"] > 0

    in_order = sorted(zip(report.loaders, titles, strict=True), key=rank, reverse=True)
    for number, (record, title) in enumerate(in_order, 1):
        checks = {}
        for index, one in enumerate(record.checks):
            anchor = f"loader-{number}-{one.check if ANCHOR.fullmatch(one.check) else index}"
            checks[one.check] = CheckView(anchor, one, known[one.check].promise, history_view(one, report))
        yield LoaderView(
            number=number,
            record=record,
            title=title,
            start=start,
            checks=checks,
            is_expanded=few or is_bad([record]),
            names=names,
            sizes=size_view(record.sizes, record.world),
        )


def _shared_start(titles: Sequence[str]) -> int:
    """Return the length of the folders and the file that all node ids begin with."""
    heads = [PART.findall(title.partition("[")[0]) for title in titles]
    shared = takewhile(lambda parts: len(set(parts)) == 1, zip(*heads, strict=False))
    return sum(len(parts[0]) for parts in shared)


def _in_order(counts: Mapping[str, int]) -> dict[str, int]:
    """Return counts in the order of statuses and skips; kinds of a later version follow."""
    return {kind: counts[kind] for kind in (*STATUSES, *SKIPS, *counts) if counts.get(kind)}


def _data(loader: LoaderView, columns: Sequence[str], kinds: Sequence[str]) -> dict[str, Any]:
    """Return a digit for the kind of each check in the order of the columns, "." for none, and what filters need."""
    digit = dict(zip(kinds, digits + ascii_lowercase, strict=False))
    checks = {id_: digit.get(check.kind, ".") for id_, check in loader.checks.items()}
    marked = {check: [one.mark.strip(), one.note] for check, one in loader.checks.items() if one.mark or one.note}
    return {
        "kinds": "".join(checks.get(column, ".") for column in columns),
        "marked": {} if loader.needs_attention else marked,
        "names": loader.numbered(loader.tensors),
        "size": loader.record.world.size,
    }


def loss_table(losses: Curves) -> LossTable:
    """Return the losses, with their difference from the reference's if there is one."""
    largest = max([1e-12, *(abs(value) for value in losses.reference if isfinite(value))])
    rows = tuple(_row(losses, step, largest) for step in range(len(losses.mean)))
    return LossTable(rows, len(losses.ranks))


def _row(losses: Curves, step: int, largest: float) -> LossRow:
    mean, reference = losses.mean[step], _at(losses.reference, step)
    difference = None
    if reference is not None:
        difference = abs(mean - reference) / largest if isfinite(mean) and isfinite(reference) else float("inf")
    allowed = _at(losses.tolerance, step)
    return LossRow(mean, reference, difference, allowed, tuple(_at(one, step) for one in losses.ranks))


def _at(values: Sequence[float], step: int) -> float | None:
    return values[step] if step < len(values) else None
