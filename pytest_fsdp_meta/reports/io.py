"""Reading and writing ``report.json``, which is also written during the run, so that a killed run leaves a report."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path

from pytest_fsdp_meta.evidence.codec import from_plain, to_plain, write_whole
from pytest_fsdp_meta.reports.schema import SCHEMA, Report

FILE, PAGE = "report.json", "index.html"
GENERATOR = '<meta name="generator" content="pytest-fsdp-meta">'
"""Every page that this package writes contains this element."""
REMEDY = "pass a report.json that --fsdp-report has written"
LARGEST = 512 * 2**20
"""Most bytes that are read from a file."""
INTERVAL = 2.0
"""Least time (s) between two writes during a run, ..."""
INTERVAL_PER_WRITE = 10
"""... or this many times the duration of the last write, if that is longer: a large report takes a second to write."""


class UnknownSchema(ValueError):
    """The report has a schema that this version cannot read."""


class ReportWriter:
    """Writes a report into its folder, atomically."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._next_write = 0.0

    @property
    def is_due(self) -> bool:
        """Whether enough time has passed since the last write."""
        return time.monotonic() >= self._next_write

    @property
    def is_foreign(self) -> bool:
        """Whether the folder has a page that this package did not write, and must not overwrite."""
        page = self.folder / PAGE
        try:
            return page.is_file() and GENERATOR not in page.read_text(encoding="utf-8", errors="replace")
        except OSError:  # writing the page raises it again
            return False

    def clear(self, others: Iterable[str]) -> None:
        """Delete the report in the folder, and the named files next to it. Raises OSError."""
        for name in (FILE, *others):
            (self.folder / name).unlink(missing_ok=True)

    def write(self, report: Report) -> Path:
        """Write the report and return its path. Raises OSError."""
        began = time.monotonic()
        self.folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(to_plain(report), allow_nan=False, indent=1)
        path = write_whole(self.folder / FILE, f"{text}\n".encode())
        ended = time.monotonic()
        self._next_write = ended + max(INTERVAL, INTERVAL_PER_WRITE * (ended - began))
        return path


def read_report(path: Path, brief: bool = False) -> Report:
    """Return the report in a file.

    If ``brief``, of summaries only the losses, which is several times as fast.

    Raises ValueError if the file is not a report, and its subclass UnknownSchema if it has an unknown schema; the
    message is one line that names the file. The report of a killed run can be read; its ``complete`` is false.
    """
    try:
        with path.open("rb") as file:
            text = file.read(LARGEST + 1)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    if len(text) > LARGEST:
        raise ValueError(f"{path}: more than {LARGEST / 2**20:g} MiB of JSON, which is the limit")
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON, or truncated: {error}; {REMEDY}") from None
    version = data.get("schema") if isinstance(data, dict) else None
    if type(version) is not int:
        raise ValueError(f"{path}: not a report of pytest-fsdp-meta; {REMEDY}")
    if version != SCHEMA:
        remedy = "upgrade pytest-fsdp-meta, or " if version > SCHEMA else ""
        raise UnknownSchema(
            f"{path}: a report of schema {version!r:.60}, but this version reads schema {SCHEMA}; "
            f"{remedy}write the report again with --fsdp-report"
        )
    loaders = data.get("loaders") if brief else None
    for loader in loaders if isinstance(loaders, list) else ():  # the codec says what is wrong with other data
        if isinstance(loader, dict) and isinstance(summary := loader.get("summary"), dict):
            loader["summary"] = {"losses": summary.get("losses")}
    try:
        return from_plain(Report, data)
    except ValueError as error:
        raise ValueError(f"{path}: {error}; {REMEDY}") from None
