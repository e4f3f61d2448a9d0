"""Coverage on ranks: if the parent measures, ranks measure as well, each into a file that the parent combines.

A rank saves its data with every answer, because it is killed without warning. The settings are read from the parent's
``Coverage`` object through its public options. If the parent has not imported coverage, nothing here does.
"""

from __future__ import annotations

import glob
import os
import secrets
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

OPTIONS = (
    *("branch", "concurrency", "context", "core", "cover_pylib", "include", "omit", "plugins", "relative_files"),
    *("source", "source_pkgs", "source_dirs", "timid"),
)
"""Options of the section [run] that ranks take over; the others are about data files and processes."""
OURS: Mapping[str, Any] = {"sigterm": False, "dynamic_context": None, "patch": []}
"""Options of [run] that ranks override, whatever a configuration file says."""
WARNINGS = ["no-data-collected", "module-not-imported", "module-not-measured", "module-not-python", "trace-changed"]
"""Warnings to disable, because they judge the whole program and a rank runs only a part of it."""
_TOKEN = secrets.token_hex(4)
"""Marks the files of this process' ranks: the workers of pytest-xdist have the same data file."""


@dataclass(frozen=True)
class CoverageSettings:
    """How the parent measures. ``folder`` is the base of its relative paths."""

    options: Mapping[str, Any]
    config_file: str
    folder: str
    data_file: str
    """The absolute path to which coverage appends the suffix of each process."""


def current_settings() -> CoverageSettings | None:
    """Return how this process measures, or None if it does not."""
    current = _measuring_here()
    if current is None:
        return None
    options: dict[str, Any] = {}
    for name in OPTIONS:
        with suppress(Exception):  # other versions of coverage may not have this option
            options[name] = current.get_option(f"run:{name}")
    options["concurrency"] = [kind for kind in options.get("concurrency") or () if kind != "multiprocessing"]
    config_file = getattr(current.config, "config_file", None) or ""
    return CoverageSettings(options, config_file, os.getcwd(), _data_file(current))


def _measuring_here() -> Any:
    coverage = sys.modules.get("coverage")
    return None if coverage is None else coverage.Coverage.current()


@lru_cache(maxsize=1)
def _data_file(current: Any) -> str:
    """Return the path that the files of ranks begin with; asked once, because tests may change the folder."""
    return f"{os.path.abspath(current.get_option('run:data_file'))}.fsdp-{_TOKEN}"


class Measurement:
    """Measures coverage of this process from now on."""

    def __init__(self, settings: CoverageSettings) -> None:
        import coverage

        self._coverage = coverage.Coverage(settings.data_file, True, config_file=settings.config_file or False)
        for name, value in settings.options.items():
            self._coverage.set_option(f"run:{name}", value)
        self._coverage.set_option("run:disable_warnings", WARNINGS)
        for name, value in OURS.items():
            with suppress(Exception):  # other versions of coverage may not have this option
                self._coverage.set_option(f"run:{name}", value)
        before = os.getcwd()
        with suppress(OSError):  # the folder may not exist on another machine
            os.chdir(settings.folder)
        try:
            self._coverage.start()
        finally:
            os.chdir(before)

    def save(self) -> None:
        with suppress(Exception):  # the disk is full: only data are missing
            self._coverage.save()

    def stop(self) -> None:
        self._coverage.stop()
        self.save()


@contextmanager
def measuring_imports(settings: Mapping[str, Any] | None) -> Iterator[None]:
    """Measure what the fork server imports. ``settings`` has the fields of a ``CoverageSettings``, or is None."""
    if settings is None:
        yield
        return
    measurement = Measurement(CoverageSettings(**settings))
    try:
        yield
    finally:
        measurement.stop()


def combine() -> None:
    """Add the data of this process' ranks and fork server to its own, before that is saved, and delete their files."""
    current = _measuring_here()
    files = [] if current is None else glob.glob(f"{glob.escape(_data_file(current))}.*")
    if files:
        with warnings.catch_warnings():
            # coverage warns again when it saves the data, and of the file of a rank that was killed while it wrote it.
            warnings.simplefilter("ignore")
            current.combine(files)
        for file in files:
            Path(file).unlink(missing_ok=True)
