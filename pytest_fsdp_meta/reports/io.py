"""``report.json``: written while the run goes on, so that a run which is killed leaves what it knew."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pytest_fsdp_meta.evidence.codec import from_plain, schema_of, to_plain, write_whole
from pytest_fsdp_meta.reports.schema import SCHEMA, Report

FILE, PAGE = "report.json", "index.html"
GENERATOR = '<meta name="generator" content="pytest-fsdp-meta">'
"""In each page of ours."""
TITLE = f"report.json of pytest-fsdp-meta, schema {SCHEMA}"
PACE = 2.0
"""Seconds after which what is new is worth writing, ..."""
SHARE = 10
"""... or so many times what the last writing took, where that is more: a report of many loaders takes a second."""


class OtherSchema(ValueError):
    """A report that another version of this package has written."""


class Writer:
    """Writes a report into its folder, whole or not at all."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._due = 0.0

    @property
    def is_due(self) -> bool:
        """Whether it is time to write again. Before what may end the process, it is time all the same."""
        return time.monotonic() >= self._due

    @property
    def is_foreign(self) -> bool:
        """Whether a page of somebody else is there, which would be lost."""
        page = self.folder / PAGE
        try:
            return page.is_file() and GENERATOR not in page.read_text(encoding="utf-8", errors="replace")
        except OSError:  # told when it is written
            return False

    def clear(self, others: Iterable[str]) -> None:
        """Removes the report that is there, and these files beside it. Raises OSError."""
        for name in (FILE, *others):
            (self.folder / name).unlink(missing_ok=True)

    def write(self, report: Report) -> Path:
        """Raises OSError."""
        began = time.monotonic()
        self.folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(to_plain(report), allow_nan=False, indent=1)
        path = write_whole(self.folder / FILE, f"{text}\n".encode())
        ended = time.monotonic()
        self._due = ended + max(PACE, SHARE * (ended - began))
        return path


def read_report(path: Path) -> Report:
    """Raises ValueError, in one line that names the file, for what is no report of this schema.

    The report of a run that was cut off can be read; its ``complete`` is false.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: no JSON, or cut off: {error}") from None
    version = data.get("schema") if isinstance(data, dict) else None
    if version != SCHEMA:
        kind = OtherSchema if type(version) is int else ValueError
        raise kind(f"{path}: a report of schema {version!r:.60}, but should be {SCHEMA}")
    try:
        return from_plain(Report, data)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def schema() -> dict[str, Any]:
    """The JSON schema of ``report.json``."""
    told = schema_of(Report, TITLE)
    told["$defs"]["Report"]["properties"]["schema"] = {"const": SCHEMA}
    return told


if __name__ == "__main__":
    print(json.dumps(schema(), indent=1))
