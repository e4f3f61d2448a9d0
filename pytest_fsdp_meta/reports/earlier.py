"""The reports of earlier runs that a run is compared with: single ones, or a folder in which every run leaves one."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path

from pytest_fsdp_meta.reports.history import MOST_RUNS, UNKNOWN_TIME, Timeline, describe_moment, run_of, time_of
from pytest_fsdp_meta.reports.io import FILE, UnknownSchema, read_report
from pytest_fsdp_meta.reports.schema import Report
from pytest_fsdp_meta.text import counted

MOST_READ = 60
"""Reports that are read to find one that passed."""
HEAD = 4096
"""Bytes at the start of a report that have the time of its run."""
STARTED = re.compile(rb'"started":\s*"([^"\\]*)"')
AHEAD = timedelta(hours=1)
"""How far the clocks of two machines may differ."""


@dataclass(frozen=True)
class _Source:
    """A file that may be a report. One that was named on its own has to be."""

    path: Path
    named: bool


def read_earlier(paths: Sequence[str], now: datetime) -> Timeline:
    """Read the reports at these paths: files, folders of one report, or folders of many.

    Raises ValueError, in one line, for a named file that is not a report. In a folder, such a file is noted.
    """
    sources = list(dict.fromkeys(source for path in paths for source in _find(Path(path))))
    reports, notes = _read_last(sources, now)
    is_single = len(sources) == 1 and sources[0].named
    if is_single and notes:
        return Timeline(problem=f"no comparison: {notes[0]}")
    # Several runs are compared with the last that passed, so that what broke since then stays new until it is fixed.
    for path, chosen in reversed(list(reports.items())):
        if is_single or _passed(chosen):
            try:
                before = read_report(path)
            except ValueError as error:
                notes.append(str(error))
                del reports[path]
                continue
            which = "" if is_single else f"the last run that passed ({len(reports)} read)"
            return Timeline(reports.values(), before, which, notes)
    problem = f"no earlier run passed ({len(reports)} read), so every failure counts"
    if not reports:
        left_out = f" ({counted(len(notes), 'file')} left out)" if notes else ""
        problem = f"no report in {', '.join(paths)}{left_out}, so every failure counts"
    return Timeline(reports.values(), notes=notes, problem=f"no comparison: {problem}")


def _find(path: Path) -> Iterator[_Source]:
    if not path.is_dir():
        yield _Source(path, named=True)
    elif (path / FILE).is_file():
        yield _Source(path / FILE, named=True)
    else:
        for folder, folders, files in os.walk(path):
            folders.sort()
            top = Path(folder) == path
            for name in sorted(files):
                wanted = name == FILE or (top and name.endswith(".json"))
                if wanted and Path(folder, name).is_file():  # to open a named pipe would wait forever
                    yield _Source(Path(folder, name), named=False)


def _read_last(sources: Iterable[_Source], now: datetime) -> tuple[dict[Path, Report], list[str]]:
    """Return the last runs, oldest first, with a note on each file that was left out."""
    reports: dict[Path, Report] = {}
    notes: list[str] = []
    for source in sorted(sources, key=lambda source: _time_in(source.path), reverse=True):
        enough = len(reports) >= MOST_RUNS - 1 and any(map(_passed, reports.values()))
        if (enough or len(reports) >= MOST_READ) and not source.named:
            continue  # a report that was named may follow
        try:
            report = read_report(source.path, brief=True)
        except UnknownSchema as error:
            notes.append(str(error))
            continue
        except ValueError as error:
            if source.named:
                raise
            notes.append(str(error))
            continue
        started = time_of(report.header.started)
        same = next((path for path, known in reports.items() if _is_same_run(known, report)), None)
        if same is not None:
            notes.append(f"{source.path}: the same run as {same}")
        elif started > now + AHEAD and not source.named:
            notes.append(f"{source.path}: started {describe_moment(run_of(report))}, later than this run")
        else:
            reports[source.path] = report
    return dict(sorted(reports.items(), key=lambda one: time_of(one[1].header.started))), notes


def _is_same_run(one: Report, other: Report) -> bool:
    return replace(one, seconds=0.0) == replace(other, seconds=0.0)


def _time_in(path: Path) -> datetime:
    """Return the time of the run, from the start of the file; the earliest time if it is not there."""
    try:
        with path.open("rb") as file:
            found = STARTED.search(file.read(HEAD))
    except OSError:
        return UNKNOWN_TIME
    return time_of(found[1].decode(errors="replace")) if found else UNKNOWN_TIME


def _passed(report: Report) -> bool:
    return report.complete and report.exit_status == 0
