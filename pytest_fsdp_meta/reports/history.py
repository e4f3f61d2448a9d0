"""What became of each check over the last runs: its results, since when it is broken, and whether it is flaky."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from itertools import groupby

from pytest_fsdp_meta.reports.schema import (
    ABSENT,
    FAILED,
    LETTERS,
    PASSED,
    CheckHistory,
    CheckRecord,
    EarlierRun,
    LoaderRecord,
    Report,
)
from pytest_fsdp_meta.reports.terminal import printable, shorten_list
from pytest_fsdp_meta.text import counted, first_of

MOST_RUNS = 14
"""Runs that a history has, with the one that it belongs to."""
FLAKY_STRETCHES = 4
"""A check is flaky if its runs, without those that decide nothing, are at least this many stretches of passing and
failing in turn."""
GOOD = frozenset(LETTERS[status] for status in PASSED)
BROKEN = frozenset(LETTERS[status] for status in FAILED)
NAMES = {letter: status for status, letter in LETTERS.items()} | {ABSENT: "not in the run"}
SHORT_COMMIT = 9
"""Digits of a commit that a line shows."""
UNKNOWN_TIME = datetime.min.replace(tzinfo=timezone.utc)
Place = tuple[str, str]
"""A loader's name and a check."""


@dataclass
class _Column:
    """The results of one run, as letters."""

    run: EarlierRun
    results: dict[Place, str] = field(default_factory=dict)


def time_of(started: str) -> datetime:
    """Return the time of a run, for sorting; ``UNKNOWN_TIME`` if the text is not a time."""
    try:
        time = datetime.fromisoformat(started.replace("Z", "+00:00"))
    except ValueError:
        return UNKNOWN_TIME
    return time if time.tzinfo else time.replace(tzinfo=timezone.utc)


def run_of(report: Report) -> EarlierRun:
    """Return the run as the reports of later ones name it."""
    return EarlierRun(report.header.started, report.header.commit, report.exit_status)


class PastRuns:
    """The results of earlier runs. They are computed once, since the report is written many times during a run."""

    def __init__(self, earlier: Iterable[Report]) -> None:
        self._past = sorted(earlier, key=lambda report: time_of(report.header.started))
        self._repeated = frozenset().union(*map(_repeated_names, self._past))
        self._known: dict[frozenset[str], tuple[list[_Column], dict[Place, CheckHistory]]] = {}
        """Names of loaders in several worlds; this run may have more of them -> what is known from earlier runs."""

    def add_to(self, now: Report) -> Report:
        """Return the report with the history of each check, from earlier reports and from the histories in them."""
        if not self._past:
            return now
        names = _Names(self._repeated | _repeated_names(now))
        if names.repeated not in self._known:
            self._known[names.repeated] = _columns(self._past, names), _carried(self._past, names)
        columns, carried = self._known[names.repeated]
        runs = [column.run for column in columns]
        this = run_of(now)

        def check_with_history(loader: LoaderRecord, check: CheckRecord) -> CheckRecord:
            place = names.of(loader), check.check
            results = "".join(column.results.get(place, ABSENT) for column in columns)
            return replace(check, history=_history(check, runs, results, this, carried.get(place)))

        loaders = tuple(
            replace(loader, checks=tuple(check_with_history(loader, check) for check in loader.checks))
            for loader in now.loaders
        )
        return replace(now, loaders=loaders, earlier=tuple(runs))


def with_history(now: Report, earlier: Iterable[Report]) -> Report:
    """Return the report with the history of each check in these earlier ones."""
    return PastRuns(earlier).add_to(now)


def _repeated_names(report: Report) -> frozenset[str]:
    count = Counter(loader.loader for loader in report.loaders)
    return frozenset(name for name, times in count.items() if times > 1)


class _Names:
    """Names loaders in the same way in all reports: with the world where some report has the loader in several."""

    def __init__(self, repeated: frozenset[str]) -> None:
        self.repeated = repeated

    def of(self, loader: LoaderRecord) -> str:
        return f"{loader.loader}, {loader.world}" if loader.loader in self.repeated else loader.loader


def _columns(past: Sequence[Report], names: _Names) -> list[_Column]:
    """Return the last runs, oldest first. What a report says of itself counts more than what later ones say of it."""
    columns: dict[tuple[str, str], _Column] = {}
    for report in past:
        for index, run in enumerate(report.earlier):
            column = columns.setdefault((run.started, run.commit), _Column(run))
            for place, check in _places(report, names):
                letter = check.history.results[index : index + 1] if check.history else ABSENT
                if letter in NAMES and letter != ABSENT:
                    column.results.setdefault(place, letter)
    own = [_Column(run_of(report), _own_results(report, names)) for report in past]
    known = {(column.run.started, column.run.commit) for column in own}
    others = [column for key, column in columns.items() if key not in known]
    return sorted((*others, *own), key=lambda column: time_of(column.run.started))[-(MOST_RUNS - 1) :]


def _own_results(report: Report, names: _Names) -> dict[Place, str]:
    return {place: letter_of(check) for place, check in _places(report, names)}


def _places(report: Report, names: _Names) -> Iterator[tuple[Place, CheckRecord]]:
    for loader in report.loaders:
        name = names.of(loader)
        for check in loader.checks:
            yield (name, check.check), check


def letter_of(check: CheckRecord) -> str:
    """Return the character of a check's result."""
    return LETTERS.get(check.status, ABSENT)


def _carried(past: Sequence[Report], names: _Names) -> dict[Place, CheckHistory]:
    """Return the histories of the newest reports, which may reach further back than the runs that are known."""
    carried: dict[Place, CheckHistory] = {}
    for report in past:
        for place, check in _places(report, names):
            if check.history is not None:
                carried[place] = check.history
    return carried


def _history(
    check: CheckRecord, runs: Sequence[EarlierRun], results: str, this: EarlierRun, carried: CheckHistory | None
) -> CheckHistory:
    if check.status not in FAILED:
        return CheckHistory(results, flaky=is_flaky(results + letter_of(check)))
    since, passed = this, None
    for run, letter in zip(reversed(runs), reversed(results), strict=True):
        if letter in GOOD:
            passed = run
            break
        since = run if letter in BROKEN else since
    known = carried.broken_since if carried is not None else None
    if carried is not None and known is not None and passed is None:
        # No listed run passed, so those before them count.
        since = min(known, since, key=lambda run: time_of(run.started))
        passed = carried.last_passed
    return CheckHistory(results, since, passed, is_flaky(results + letter_of(check)))


def is_flaky(results: str) -> bool:
    """Return whether a check passed and failed in turn at least twice. Runs that decided neither do not count."""
    outcomes = [letter in GOOD for letter in results if letter in GOOD or letter in BROKEN]
    return sum(1 for _ in groupby(outcomes)) >= FLAKY_STRETCHES


def is_new(check: CheckRecord, report: Report) -> bool:
    """Return whether a failing check has not failed since an earlier run."""
    return check.history is None or check.history.broken_since == run_of(report)


def describe_moment(run: EarlierRun) -> str:
    """Return a text such as "2026-11-18 02:17 (0123abcde)"."""
    time = time_of(run.started)
    when = run.started if time == UNKNOWN_TIME else f"{time.astimezone(timezone.utc):%Y-%m-%d %H:%M}"
    changed = "+" if run.commit.endswith("+") else ""
    commit = f" ({run.commit.rstrip('+')[:SHORT_COMMIT]}{changed})" if run.commit else ""
    return f"{when}{commit}"


def describe_since(history: CheckHistory) -> str:
    """Return a text such as "broken since 2026-11-18 02:17 (0123abcde), passed on ..."; "" for a check that is not."""
    if history.broken_since is None:
        return ""
    passed = f", last passed {describe_moment(history.last_passed)}" if history.last_passed else ""
    return f"broken since {describe_moment(history.broken_since)}{passed}"


def describe_results(results: str) -> str:
    """Return the runs in words, oldest first, such as "9 passed, 1 failed, 4 passed"."""
    return ", ".join(f"{len(list(same))} {NAMES[letter]}" for letter, same in groupby(results))


def describe_flaky(results: str) -> str:
    """Return a text such as "flaky: 9 passed and 5 failed, in turn, of the last 14 runs"."""
    good, bad = (sum(letter in letters for letter in results) for letters in (GOOD, BROKEN))
    return f"flaky: {good} passed and {bad} failed, in turn, of the last {len(results)} runs"


def describe_history(report: Report) -> Iterator[tuple[str, str, list[str]]]:
    """Yield (kind, headline, lines) of what is broken since an earlier run, and of what is flaky."""
    since: dict[str, dict[str, list[str]]] = {}
    flaky: dict[str, dict[str, list[str]]] = {}
    for loader in report.loaders:
        for check in loader.checks:
            if check.history is None:
                continue
            if check.history.broken_since is not None and not is_new(check, report):
                since.setdefault(describe_since(check.history), {}).setdefault(loader.loader, []).append(check.check)
            if check.history.flaky:
                what = describe_flaky(check.history.results + letter_of(check))
                flaky.setdefault(what, {}).setdefault(loader.loader, []).append(check.check)
    for kind, headline, groups in (("broken", "broken since an earlier run", since), ("flaky", "flaky checks", flaky)):
        if groups:
            number = sum(len(checks) for where in groups.values() for checks in where.values())
            yield kind, f"{headline}: {number}", shorten_list(map(printable, _describe_groups(groups)))


def _describe_groups(groups: Mapping[str, Mapping[str, Sequence[str]]]) -> Iterator[str]:
    for what, where in groups.items():
        first, *others = (f"{first_of(checks)} in {loader}" for loader, checks in where.items())
        more = f" and in {counted(len(others), 'more loader')}" if others else ""
        yield f"{first}{more}: {what}"
