"""Checks as the page shows them: findings by cause, last runs as a strip of bars, and what was not checked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from pytest_fsdp_meta.reports.history import (
    BROKEN,
    GOOD,
    NAMES,
    describe_flaky,
    describe_moment,
    describe_results,
    describe_since,
    letter_of,
    run_of,
    starts_of,
)
from pytest_fsdp_meta.reports.schema import ABSENT, FAILED, CheckRecord, FindingRecord, Report
from pytest_fsdp_meta.reports.story import explain_pass
from pytest_fsdp_meta.reports.terminal import by_cause, group_similar, origins
from pytest_fsdp_meta.text import first_of, grouped

UNCHECKED = ("partly checked", "not declared")
"""Kinds of checks that check more if the test or the model changes, in the order in which the page shows them."""
STEP, BAR, HEIGHT = 8, 6, 16
"""Widths of a run and of its bar, and the height of the strip (px)."""
HEIGHTS = {"bad": HEIGHT, "good": 6, "other": 3}
"""The height of a bar (px) by the state of the run: failures stand out without colours."""


@dataclass(frozen=True)
class FindingLine:
    """Tensors with the same mismatch on the same ranks. ``names`` is empty for the whole model."""

    names: tuple[str, ...]
    ranks: tuple[int, ...]
    actual: str
    expected: str
    details: tuple[tuple[str, str], ...] = ()
    """(name, detail) of those that have one."""


def as_line(findings: Sequence[FindingRecord]) -> FindingLine:
    """Return findings that differ only in tensor and detail as one line."""
    first = findings[0]
    return FindingLine(
        names=tuple(dict.fromkeys(one.tensor for one in findings if one.tensor is not None)),
        ranks=first.ranks,
        actual=first.actual,
        expected=first.expected,
        details=tuple((one.tensor or "", one.detail) for one in findings if one.detail),
    )


@dataclass(frozen=True)
class HistoryView:
    """The history of one check, this run included."""

    record: CheckRecord
    results: str
    since: str
    """Since when it is broken, if it was broken before this run, for this cause or another one."""
    is_old: bool = False
    """Whether something that is wrong with it now was wrong before this run."""

    @property
    def width(self) -> int:
        return len(self.results) * STEP

    @property
    def is_steady(self) -> bool:
        """Whether all runs had the same result."""
        return len(set(self.results)) == 1

    @property
    def words(self) -> str:
        """The runs in words: their order where they differ little, else how many there were of each."""
        in_order = describe_results(self.results)
        if in_order.count(",") < 4:
            return in_order
        return ", ".join(f"{times} {NAMES[letter]}" for letter, times in Counter(self.results).most_common())

    @property
    def description(self) -> str:
        """All runs in order, for the picture's text."""
        return f"The last {len(self.results)} runs, oldest first: {describe_results(self.results)}"

    @property
    def flaky(self) -> str:
        return describe_flaky(self.results) if self.record.history and self.record.history.flaky else ""

    @cached_property
    def paths(self) -> tuple[tuple[str, str], ...]:
        """The bars as (state, path of an SVG)."""
        drawn = grouped(
            ("bad" if letter in BROKEN else "good" if letter in GOOD else "other", index * STEP)
            for index, letter in enumerate(self.results)
            if letter != ABSENT
        )
        return tuple(
            (state, "".join(f"M{left} {HEIGHT - HEIGHTS[state]}h{BAR}v{HEIGHTS[state]}h-{BAR}z" for left in places))
            for state, places in drawn.items()
        )


def history_view(check: CheckRecord, report: Report) -> HistoryView | None:
    """Return what the page shows of a check's history; None without earlier runs."""
    history = check.history
    if history is None:
        return None
    starts, this = starts_of(check), run_of(report)
    since, new = "", starts.pop(this, [])
    if starts:
        names = [one.tensor or "the model" for one in new]
        since = describe_since(next(iter(starts)), history) + (f"; new: {first_of(names)}" if new else "")
    elif history.broken_since is not None and history.broken_since != this:
        since = f"new cause; it failed for another one since {describe_moment(history.broken_since)}"
    return HistoryView(check, history.results + letter_of(check), since, bool(starts))


@dataclass(frozen=True)
class CheckView:
    """A check of one loader."""

    anchor: str
    record: CheckRecord
    promise: str
    history: HistoryView | None = None

    @property
    def mark(self) -> str:
        """The further class of its cell in the matrix, after a space."""
        if self.history is None:
            return ""
        return " h-flaky" if self.history.flaky else " h-old" if self.history.is_old else ""

    @property
    def note(self) -> str:
        """What its cell says after its status, such as ", broken since ..."."""
        said = "; ".join(filter(None, [self.history.since, self.history.flaky])) if self.history else ""
        return f", {said}" if said else ""

    @property
    def kind(self) -> str:
        return self.record.kind

    @property
    def reason(self) -> str:
        """Why it did not simply pass or fail."""
        is_unexpected = self.kind == "xpassed"
        return explain_pass(self.record.reason, self.record.check) if is_unexpected else self.record.reason

    @property
    def cell(self) -> str:
        """The id of its cell in the matrix."""
        return "cell" + self.anchor.removeprefix("loader")

    @property
    def has_details(self) -> bool:
        """Whether the page shows an article about the check: it failed, or was expected to."""
        return self.record.status in FAILED or bool(self.record.findings)

    @cached_property
    def causes(self) -> list[tuple[str, str, list[FindingLine]]]:
        """Each cause with its remedy and the findings that it explains, in the order of the judge."""
        groups = by_cause(self.record.findings).items()
        return [(*explained, [as_line(one) for one in group_similar(group)]) for explained, group in groups]

    @property
    def origins(self) -> tuple[str, ...]:
        return origins(self.record.findings)


@dataclass(frozen=True)
class Unchecked:
    """Checks that did not check everything, for the same reason, and the loaders with one of them."""

    kind: str
    reason: str
    checks: tuple[CheckView, ...]
    loaders: tuple[str, ...]


def group_by_reason(loaders: Iterable[tuple[str, Iterable[CheckView]]], kinds: Sequence[str]) -> list[Unchecked]:
    """Return each reason why checks are of these kinds, in their order. ``loaders`` has names and checks."""
    found = grouped(
        ((check.kind, check.record.reason), (name, check))
        for name, checks in loaders
        for check in checks
        if check.kind in kinds
    )
    groups = []
    for key, places in found.items():
        views: dict[str, CheckView] = {}
        for _, check in places:
            views.setdefault(check.record.check, check)
        groups.append(Unchecked(*key, tuple(views.values()), tuple(dict(places))))
    return sorted(groups, key=lambda group: kinds.index(group.kind))
