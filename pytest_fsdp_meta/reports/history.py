"""What became of each check over the last runs: its results, since when it is broken, and whether it is flaky.

A check may fail for one cause after another, so each finding has a start of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from itertools import groupby

from pytest_fsdp_meta.reports.compare import Comparison, compare, name_of, repeated_in
from pytest_fsdp_meta.reports.schema import (
    ABSENT,
    FAILED,
    LETTERS,
    PASSED,
    CheckHistory,
    CheckRecord,
    EarlierRun,
    FindingRecord,
    LoaderRecord,
    Report,
)
from pytest_fsdp_meta.reports.terminal import shorten_list
from pytest_fsdp_meta.text import counted, first_of, printable, without_numbers

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
Failure = tuple[str, str | None, str]
"""What is the same from run to run: "finding", its tensor and its cause, or "reason", the status and the reason of a
failure without findings. Causes and reasons are without numbers."""
Before = tuple[EarlierRun, CheckRecord, dict[Failure, EarlierRun | None]]
"""An earlier run, what a check was in it, and its failures, each with its start as far as that report has it."""


@dataclass
class _Column:
    """The results of one run, as letters."""

    run: EarlierRun
    results: dict[Place, str] = field(default_factory=dict)


def time_of(started: str) -> datetime:
    """Return the time of a run, for sorting; ``UNKNOWN_TIME`` if the text is not a time."""
    try:
        time = datetime.fromisoformat(started.replace("Z", "+00:00"))
        return (time if time.tzinfo else time.replace(tzinfo=timezone.utc)).astimezone(timezone.utc)
    except (ValueError, OverflowError):  # the latter near the years 1 and 9999
        return UNKNOWN_TIME


def run_of(report: Report) -> EarlierRun:
    """Return the run as the reports of later ones name it."""
    return EarlierRun(report.header.started, report.header.commit, report.exit_status)


class Timeline:
    """Earlier runs, and the one of them with which a run is compared: of several, the last that passed.

    ``past`` needs the results of checks only. What is known from it is computed once, since the report is written many
    times during a run.
    """

    def __init__(
        self,
        past: Iterable[Report] = (),
        before: Report | None = None,
        which: str = "",
        notes: Sequence[str] = (),
        problem: str = "",
    ) -> None:
        self.past = tuple(sorted(past, key=lambda report: time_of(report.header.started)))
        self.before, self.which = before, which
        self.notes = tuple(notes)
        """One line for each file that was left out."""
        self.problem = problem
        """Why there is nothing to compare with."""
        self._repeated = repeated_in(*self.past)
        self._known: dict[frozenset[str], tuple[list[_Column], dict[Place, list[Before]]]] = {}
        """Loaders that ran in several worlds, here or in earlier runs -> what is known from earlier runs."""

    def compare(
        self, now: Report, is_selected: Callable[[str], bool], is_allowed: Callable[[str], bool]
    ) -> Comparison | None:
        """Compare the run with the earlier one, as ``compare`` does; None without one."""
        if self.before is None:
            return None
        return compare(self.before, now, is_selected, is_allowed, self.which, self.notes)

    def add_to(self, now: Report) -> Report:
        """Return the report with the history of each check, from earlier reports and from the histories in them."""
        if not self.past:
            return now
        repeated = self._repeated | repeated_in(now)
        if repeated not in self._known:
            self._known[repeated] = _columns(self.past, repeated), _by_place(self.past, repeated)
        columns, earlier = self._known[repeated]
        runs = [column.run for column in columns]
        this = run_of(now)

        def check_with_history(loader: LoaderRecord, check: CheckRecord) -> CheckRecord:
            place = name_of(loader, repeated), check.check
            results = "".join(column.results.get(place, ABSENT) for column in columns)
            before = earlier.get(place, [])
            carried = next((one.history for _, one, _ in before if one.history is not None), None)
            return _with_starts(replace(check, history=_history(check, runs, results, this, carried)), before, this)

        loaders = tuple(
            replace(loader, checks=tuple(check_with_history(loader, check) for check in loader.checks))
            for loader in now.loaders
        )
        return replace(now, loaders=loaders, earlier=tuple(runs))


def _columns(past: Sequence[Report], repeated: frozenset[str]) -> list[_Column]:
    """Return the last runs, oldest first. What a report says of itself counts more than what later ones say of it."""
    columns: dict[tuple[str, str], _Column] = {}
    for report in past:
        for index, run in enumerate(report.earlier):
            column = columns.setdefault((run.started, run.commit), _Column(run))
            for place, check in _places(report, repeated):
                letter = check.history.results[index : index + 1] if check.history else ABSENT
                if letter in NAMES and letter != ABSENT:
                    column.results.setdefault(place, letter)
    own = [
        _Column(run_of(report), {place: letter_of(check) for place, check in _places(report, repeated)})
        for report in past
    ]
    known = {(column.run.started, column.run.commit) for column in own}
    others = [column for key, column in columns.items() if key not in known]
    return sorted((*others, *own), key=lambda column: time_of(column.run.started))[-(MOST_RUNS - 1) :]


def _places(report: Report, repeated: frozenset[str]) -> Iterator[tuple[Place, CheckRecord]]:
    for loader in report.loaders:
        name = name_of(loader, repeated)
        for check in loader.checks:
            yield (name, check.check), check


def letter_of(check: CheckRecord) -> str:
    """Return the character of a check's result."""
    return LETTERS.get(check.status, ABSENT)


def _by_place(past: Sequence[Report], repeated: frozenset[str]) -> dict[Place, list[Before]]:
    """Return what the reports have of each check, newest first."""
    earlier: dict[Place, list[Before]] = {}
    for report in reversed(past):
        for place, check in _places(report, repeated):
            earlier.setdefault(place, []).append((run_of(report), check, failures_of(check)))
    return earlier


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


def failures_of(check: CheckRecord) -> dict[Failure, EarlierRun | None]:
    """Return what is wrong with a failing check, and since when, as far as its report says."""
    if check.status not in FAILED:
        return {}
    if check.findings:
        return {failure_of(found): found.since for found in check.findings}
    since = check.history.reason_since if check.history is not None else None
    return {("reason", check.status, without_numbers(check.reason)): since}


def failure_of(finding: FindingRecord) -> Failure:
    """Return what identifies a finding from run to run."""
    return "finding", finding.tensor, without_numbers(finding.cause)


def _with_starts(check: CheckRecord, before: Sequence[Before], this: EarlierRun) -> CheckRecord:
    """Return the check, whose history is known, with the first run of each of its findings."""
    history = check.history
    if history is None or history.broken_since is None:
        return check
    starts = {failure: _start(failure, before, this, history.broken_since) for failure in failures_of(check)}
    if check.findings:
        found = tuple(replace(one, since=starts[failure_of(one)]) for one in check.findings)
        return replace(check, findings=found)
    return replace(check, history=replace(history, reason_since=next(iter(starts.values()))))


def _start(failure: Failure, before: Sequence[Before], this: EarlierRun, broken_since: EarlierRun) -> EarlierRun:
    """Return the first run since which the check has failed in this way, which is not before ``broken_since``."""
    since, bound = this, time_of(broken_since.started)
    for run, check, known in before:
        if time_of(run.started) < bound:
            break
        if failure in known:
            since = known[failure] or run
            if known[failure] is not None:
                break
        elif _decides(check, failure):
            break
    return max(since, broken_since, key=lambda run: time_of(run.started))


def _decides(check: CheckRecord, failure: Failure) -> bool:
    """Return whether a check that failed in other ways was without the failure: it was judged, this tensor included."""
    kind, tensor, _ = failure
    if kind == "reason":
        return check.status in FAILED
    return check.status == "failed" and not any(tensor in tensors for tensors in check.unjudged.values())


def starts_of(check: CheckRecord) -> dict[EarlierRun, list[FindingRecord]]:
    """Return the run in which each part of a failure began -> its findings, oldest first; {} without earlier runs."""
    history = check.history
    if history is None or history.broken_since is None:
        return {}
    starts: dict[EarlierRun, list[FindingRecord]] = {}
    for finding in check.findings:
        starts.setdefault(finding.since or history.broken_since, []).append(finding)
    starts = starts or {history.reason_since or history.broken_since: []}
    return dict(sorted(starts.items(), key=lambda item: time_of(item[0].started)))


def is_flaky(results: str) -> bool:
    """Return whether a check passed and failed in turn at least twice. Runs that decided neither do not count."""
    outcomes = [letter in GOOD for letter in results if letter in GOOD or letter in BROKEN]
    return sum(1 for _ in groupby(outcomes)) >= FLAKY_STRETCHES


def describe_moment(run: EarlierRun) -> str:
    """Return a text such as "2026-11-18 02:17:00 (0123abcde)"."""
    time = time_of(run.started)
    when = run.started if time == UNKNOWN_TIME else f"{time:%Y-%m-%d %H:%M:%S}"
    changed = "+" if run.commit.endswith("+") else ""
    commit = f" ({run.commit.rstrip('+')[:SHORT_COMMIT]}{changed})" if run.commit else ""
    return f"{when}{commit}"


def describe_since(start: EarlierRun, history: CheckHistory) -> str:
    """Return a text such as "broken since 2026-11-18 02:17:00 (0123abcde), last passed ..." of a part of a failure."""
    is_first = history.broken_since is not None and start.started == history.broken_since.started
    passed = f", last passed {describe_moment(history.last_passed)}" if history.last_passed and is_first else ""
    return f"broken since {describe_moment(start)}{passed}"


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
            old = {start: found for start, found in starts_of(check).items() if start != run_of(report)}
            for start, found in old.items():
                tensors = [str(finding.tensor or "the model") for finding in found]
                part = f" ({first_of(tensors)})" if len(found) < len(check.findings) else ""
                where = since.setdefault(describe_since(start, check.history), {})
                where.setdefault(loader.loader, []).append(check.check + part)
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
