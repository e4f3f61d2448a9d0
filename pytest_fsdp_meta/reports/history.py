"""The runs before this one, and what became of each check: since when it is broken, and whether it is flaky.

Runs are read from single reports or from a folder in which every run leaves one. A check may fail for one cause after
another, so each finding has a start of its own.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, timezone
from functools import cached_property
from itertools import groupby
from pathlib import Path

from pytest_fsdp_meta.reports.io import FILE, UnknownSchema, read_report
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
from pytest_fsdp_meta.text import counted, first_of, grouped, printable, without_numbers

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
CheckKey = tuple[str, str]
"""A loader's name and a check."""
Results = dict[CheckKey, tuple[str, CheckRecord | None]]
"""The letter of each check in a run, and its record if the report of the run is known."""
Failure = tuple[str, str | None, str]
"""What is the same from run to run: "finding", its tensor and its cause, or "reason", the status and the reason of a
failure without findings. Causes and reasons are without numbers."""


def time_of(run: EarlierRun) -> datetime:
    """Return the time of a run, for sorting; ``UNKNOWN_TIME`` if its text is not a time."""
    try:
        time = datetime.fromisoformat(run.started.replace("Z", "+00:00"))
        return (time if time.tzinfo else time.replace(tzinfo=timezone.utc)).astimezone(timezone.utc)
    except (ValueError, OverflowError):  # the latter near the years 1 and 9999
        return UNKNOWN_TIME


def run_of(report: Report) -> EarlierRun:
    """Return the run as the reports of later ones name it."""
    return EarlierRun(report.header.started, report.header.commit, report.exit_status)


def repeated_in(*reports: Report) -> frozenset[str]:
    """Return the loaders that one of the reports has in several worlds."""
    counts = [Counter(record.loader for record in report.loaders) for report in reports]
    return frozenset(name for count in counts for name, times in count.items() if times > 1)


def name_of(loader: LoaderRecord, repeated: frozenset[str]) -> str:
    """Return what identifies a loader in several reports: it has the world where one of them has it in several."""
    return f"{loader.loader}, {loader.world}" if loader.loader in repeated else loader.loader


@dataclass(frozen=True)
class Course:
    """What is known of a check after some runs, oldest first."""

    broken_since: EarlierRun | None = None
    last_passed: EarlierRun | None = None
    starts: Mapping[Failure, EarlierRun] = field(default_factory=dict)
    """What was wrong when it was last judged -> the run in which that began."""

    def after(self, run: EarlierRun, letter: str, check: CheckRecord | None) -> Course:
        """Return what is known after one more run. Without its report, only the letter of the check is known."""
        if letter in GOOD:
            return Course(last_passed=run)
        if letter not in BROKEN:
            return self
        since, passed = self.broken_since or run, self.last_passed
        history = check.history if check is not None else None
        if passed is None and history is not None and history.broken_since is not None:
            # No run before it that is known here passed, so those that it knew count.
            since, passed = min(since, history.broken_since, key=time_of), history.last_passed
        starts = dict(self.starts)
        if check is not None:
            found = failures_of(check)
            starts = {failure: start for failure, start in starts.items() if not _decides(check, failure)}
            starts |= {failure: start or self.starts.get(failure, run) for failure, start in found.items()}
        return Course(since, passed, {failure: max(start, since, key=time_of) for failure, start in starts.items()})


def failures_of(check: CheckRecord) -> dict[Failure, EarlierRun | None]:
    """Return what is wrong with a failing check, and since when, as far as its report says."""
    if check.status not in FAILED:
        return {}
    if check.findings:
        return {_failure_of(found): found.since for found in check.findings}
    since = check.history.reason_since if check.history is not None else None
    return {("reason", check.status, without_numbers(check.reason)): since}


def _failure_of(finding: FindingRecord) -> Failure:
    return "finding", finding.tensor, without_numbers(finding.cause)


def _decides(check: CheckRecord, failure: Failure) -> bool:
    """Return whether a check that failed in other ways was without the failure: it was judged, this tensor included."""
    kind, tensor, _ = failure
    if kind == "reason":
        return check.status in FAILED
    return check.status == "failed" and not any(tensor in tensors for tensors in check.unjudged.values())


class History:
    """What earlier reports say of each check. It is computed once, since a report is written many times in a run."""

    def __init__(self, past: Iterable[Report], repeated: frozenset[str]) -> None:
        self._repeated = repeated
        self._courses: dict[CheckKey, Course] = {}
        self._letters: list[tuple[EarlierRun, dict[CheckKey, str]]] = []
        for run, results in _runs(past, repeated):
            self._letters.append((run, {place: letter for place, (letter, _) in results.items()}))
            for place, result in results.items():
                self._courses[place] = self._courses.get(place, Course()).after(run, *result)
        del self._letters[: 1 - MOST_RUNS]

    def add_to(self, now: Report) -> Report:
        """Return the report with the history of each check, and the start of each finding."""
        loaders = []
        for loader in now.loaders:
            name = name_of(loader, self._repeated)
            checks = (self._with_history(check, (name, check.check), run_of(now)) for check in loader.checks)
            loaders.append(replace(loader, checks=tuple(checks)))
        return replace(now, loaders=tuple(loaders), earlier=tuple(run for run, _ in self._letters))

    def _with_history(self, check: CheckRecord, place: CheckKey, this: EarlierRun) -> CheckRecord:
        results, letter = "".join(letters.get(place, ABSENT) for _, letters in self._letters), letter_of(check)
        history = CheckHistory(results, flaky=is_flaky(results + letter))
        if check.status not in FAILED:
            return replace(check, history=history)
        course = self._courses.get(place, Course()).after(this, letter, check)
        history = replace(history, broken_since=course.broken_since, last_passed=course.last_passed)
        if check.findings:
            found = tuple(replace(one, since=course.starts[_failure_of(one)]) for one in check.findings)
            return replace(check, history=history, findings=found)
        (failure,) = failures_of(check)
        return replace(check, history=replace(history, reason_since=course.starts[failure]))


def _runs(past: Iterable[Report], repeated: frozenset[str]) -> list[tuple[EarlierRun, Results]]:
    """Return each known run, oldest first. What a report says of itself counts more than what later ones say of it."""
    own: list[tuple[EarlierRun, Results]] = []
    others: dict[tuple[str, str], tuple[EarlierRun, Results]] = {}
    for report in past:
        checks = {(name_of(loader, repeated), one.check): one for loader in report.loaders for one in loader.checks}
        own.append((run_of(report), {place: (letter_of(check), check) for place, check in checks.items()}))
        for index, run in enumerate(report.earlier):
            _, results = others.setdefault((run.started, run.commit), (run, {}))
            for place, check in checks.items():
                letter = check.history.results[index : index + 1] if check.history is not None else ""
                if letter in LETTERS.values():
                    results.setdefault(place, (letter, None))
    for run, _ in own:
        others.pop((run.started, run.commit), None)
    return sorted((*others.values(), *own), key=lambda one: time_of(one[0]))


def letter_of(check: CheckRecord) -> str:
    """Return the character of a check's result."""
    return LETTERS.get(check.status, ABSENT)


def starts_of(check: CheckRecord) -> dict[EarlierRun, list[FindingRecord]]:
    """Return the run in which each part of a failure began -> its findings, oldest first; {} without earlier runs."""
    history = check.history
    if history is None or history.broken_since is None:
        return {}
    starts = grouped((finding.since or history.broken_since, finding) for finding in check.findings)
    starts = starts or {history.reason_since or history.broken_since: []}
    return dict(sorted(starts.items(), key=lambda item: time_of(item[0])))


def is_flaky(results: str) -> bool:
    """Return whether a check passed and failed in turn at least twice. Runs that decided neither do not count."""
    outcomes = [letter in GOOD for letter in results if letter in GOOD or letter in BROKEN]
    return sum(1 for _ in groupby(outcomes)) >= FLAKY_STRETCHES


def describe_moment(run: EarlierRun) -> str:
    """Return a text such as "2026-11-18 02:17:00 (0123abcde)"."""
    time = time_of(run)
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
    since: list[tuple[str, tuple[str, str]]] = []
    flaky: list[tuple[str, tuple[str, str]]] = []
    for loader in report.loaders:
        for check in loader.checks:
            if check.history is None:
                continue
            old = {start: found for start, found in starts_of(check).items() if start != run_of(report)}
            for start, found in old.items():
                tensors = [str(finding.tensor or "the model") for finding in found]
                part = f" ({first_of(tensors)})" if len(found) < len(check.findings) else ""
                since.append((describe_since(start, check.history), (loader.loader, check.check + part)))
            if check.history.flaky:
                flaky.append((describe_flaky(check.history.results + letter_of(check)), (loader.loader, check.check)))
    for kind, headline, entries in (("broken", "broken since an earlier run", since), ("flaky", "flaky checks", flaky)):
        if entries:
            yield kind, f"{headline}: {len(entries)}", shorten_list(map(printable, _describe_groups(entries)))


def _describe_groups(found: Iterable[tuple[str, tuple[str, str]]]) -> Iterator[str]:
    for what, where in grouped(found).items():
        first, *others = (f"{first_of(checks)} in {loader}" for loader, checks in grouped(where).items())
        more = f" and in {counted(len(others), 'more loader')}" if others else ""
        yield f"{first}{more}: {what}"


MOST_READ = 60
"""Reports that are read to find one that passed."""
HEAD = 4096
"""Bytes at the start of a report that have the time of its run."""
STARTED = re.compile(rb'"started":\s*"([^"\\]*)"')
AHEAD = timedelta(hours=1)
"""How far the clocks of two machines may differ."""


@dataclass
class Timeline:
    """Earlier runs, and the one of them with which a run is compared. The losses are all that it needs of summaries."""

    past: Sequence[Report] = ()
    before: Report | None = None
    which: str = ""
    """Which of several runs ``before`` is."""
    notes: Sequence[str] = ()
    """One line for each file that was left out."""
    problem: str = ""
    """Why there is nothing to compare with."""
    _histories: dict[frozenset[str], History] = field(default_factory=dict, init=False)
    """Loaders that ran in several worlds, here or in earlier runs -> what is known from earlier runs."""

    @cached_property
    def _repeated(self) -> frozenset[str]:
        return repeated_in(*self.past)

    def add_to(self, now: Report) -> Report:
        """Return the report with the history of each check, from earlier reports and from the histories in them."""
        if not self.past:
            return now
        repeated = self._repeated | repeated_in(now)
        if repeated not in self._histories:
            self._histories[repeated] = History(self.past, repeated)
        return self._histories[repeated].add_to(now)


def read_timeline(paths: Sequence[str], now: datetime) -> Timeline:
    """Read the reports at these paths: files, folders of one report, or folders of many.

    Of several runs, the last that passed is the one to compare with, so that what broke since then stays new until it
    is fixed. Raises ValueError, in one line, for a named file that is not a report. In a folder, such a file is noted.
    """
    found = (source for path in paths for source in _find(Path(path)))
    sources = dict(sorted(found, key=lambda source: source[1]))  # also in a folder, a file that was named is named
    reports, notes = _read_last(sources, now)
    if list(sources.values()) == [True]:
        return Timeline(reports, reports[0]) if reports else Timeline(problem=f"no comparison: {notes[0]}")
    if passed := next(filter(_passed, reversed(reports)), None):
        return Timeline(reports, passed, f"the last run that passed ({len(reports)} read)", notes)
    problem = f"no earlier run passed ({len(reports)} read), so every failure counts"
    if not reports:
        left_out = f" ({counted(len(notes), 'file')} left out)" if notes else ""
        problem = f"no report in {', '.join(paths)}{left_out}, so every failure counts"
    return Timeline(reports, notes=notes, problem=f"no comparison: {problem}")


def _find(path: Path) -> Iterator[tuple[Path, bool]]:
    """Yield each file that may be a report, and whether it was named on its own, so that it has to be one."""
    if not path.is_dir():
        yield path, True
    elif (path / FILE).is_file():
        yield path / FILE, True
    else:
        for folder, folders, files in os.walk(path):
            folders.sort()
            top = Path(folder) == path
            for name in sorted(files):
                wanted = name == FILE or (top and name.endswith(".json"))
                if wanted and Path(folder, name).is_file():  # to open a named pipe would wait forever
                    yield Path(folder, name), False


def _read_last(sources: Mapping[Path, bool], now: datetime) -> tuple[list[Report], list[str]]:
    """Return the last runs, oldest first, with a note on each file that was left out."""
    reports: dict[Path, Report] = {}
    notes: list[str] = []
    for path in sorted(sources, key=_time_in, reverse=True):
        is_named = sources[path]
        enough = len(reports) >= MOST_RUNS - 1 and any(map(_passed, reports.values()))
        if (enough or len(reports) >= MOST_READ) and not is_named:
            continue  # a report that was named may follow
        try:
            report = read_report(path, brief=True)
        except ValueError as error:
            if is_named and not isinstance(error, UnknownSchema):
                raise
            notes.append(str(error))
            continue
        run = run_of(report)
        same = next((path for path, known in reports.items() if replace(known, seconds=report.seconds) == report), None)
        if same is not None:
            notes.append(f"{path}: the same run as {same}")
        elif time_of(run) > now + AHEAD and not is_named:
            notes.append(f"{path}: started {describe_moment(run)}, later than this run")
        else:
            reports[path] = report
    return sorted(reports.values(), key=lambda report: time_of(run_of(report))), notes


def _time_in(path: Path) -> datetime:
    """Return the time of the run, from the start of the file; the earliest time if it is not there."""
    try:
        with path.open("rb") as file:
            found = STARTED.search(file.read(HEAD))
    except OSError:
        return UNKNOWN_TIME
    return time_of(EarlierRun(found[1].decode(errors="replace"))) if found else UNKNOWN_TIME


def _passed(report: Report) -> bool:
    return report.complete and report.exit_status == 0
