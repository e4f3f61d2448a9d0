"""The runs before this one, read from single reports or from a folder in which every run leaves one."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import cached_property
from pathlib import Path

from pytest_fsdp_meta.reports.history import (
    MOST_RUNS,
    UNKNOWN_TIME,
    History,
    describe_moment,
    repeated_in,
    run_of,
    time_of,
)
from pytest_fsdp_meta.reports.io import FILE, UnknownSchema, read_report
from pytest_fsdp_meta.reports.schema import EarlierRun, Report
from pytest_fsdp_meta.text import counted

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
