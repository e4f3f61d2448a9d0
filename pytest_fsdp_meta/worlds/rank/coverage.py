"""Coverage on ranks: if the parent measures, ranks measure as well, and send their data to it.

The settings are read from the parent's ``Coverage`` object through its public options. If the parent has not imported
coverage, nothing here does.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

KIND = "coverage"
"""The kind of the notes that carry coverage data."""
OPTIONS = (
    *("branch", "concurrency", "context", "core", "cover_pylib", "include", "omit", "plugins", "relative_files"),
    *("source", "source_pkgs", "source_dirs", "timid"),
)
"""Options of the section [run] that ranks take over; the others are about data files and processes."""
OURS: Mapping[str, Any] = {"sigterm": False, "dynamic_context": None, "patch": []}
"""Options of [run] that ranks override, whatever a configuration file says."""
WARNINGS = ["no-data-collected", "module-not-imported", "module-not-measured", "module-not-python", "trace-changed"]
"""Warnings to disable, because they judge the whole program and a rank runs only a part of it."""
_fork_server_data: list[bytes] = []
"""What the fork server measured during its imports; ranks inherit it through the fork."""


@dataclass(frozen=True)
class CoverageSettings:
    """How the parent measures. ``folder`` is the base of its relative paths."""

    options: Mapping[str, Any]
    config_file: str
    folder: str


def current_settings() -> CoverageSettings | None:
    """Return how this process measures, or None if it does not."""
    coverage = sys.modules.get("coverage")
    current = None if coverage is None else coverage.Coverage.current()
    if current is None:
        return None
    options: dict[str, Any] = {}
    for name in OPTIONS:
        with suppress(Exception):  # other versions of coverage may not have this option
            options[name] = current.get_option(f"run:{name}")
    options["concurrency"] = [kind for kind in options.get("concurrency") or () if kind != "multiprocessing"]
    return CoverageSettings(options, getattr(current.config, "config_file", None) or "", os.getcwd())


class Measurement:
    """Measures coverage of this process from now on, in memory."""

    def __init__(self, settings: CoverageSettings) -> None:
        import coverage

        self._coverage = coverage.Coverage(data_file=None, config_file=settings.config_file or False)
        for name, value in settings.options.items():
            self._coverage.set_option(f"run:{name}", value)
        self._coverage.set_option("run:disable_warnings", WARNINGS)
        for name, value in OURS.items():
            with suppress(Exception):  # other versions of coverage may not have this option
                self._coverage.set_option(f"run:{name}", value)
        self._sent = b""
        with _working_in(settings.folder):
            self._coverage.start()

    def stop(self) -> None:
        self._coverage.stop()

    def new_data(self) -> bytes:
        """Return all data measured so far, or nothing if it has not changed since the last call."""
        packed = bytes(self._coverage.get_data().dumps())
        if packed == self._sent:
            return b""
        self._sent = packed
        return packed


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
        _fork_server_data.append(measurement.new_data())


def data_of_fork_server() -> bytes:
    """Return what the fork server has measured; empty if it has not."""
    return _fork_server_data[0] if _fork_server_data else b""


class Sum:
    """Collects in the parent what ranks have measured, and adds it to the parent's own data."""

    def __init__(self) -> None:
        self._latest: dict[object, bytes] = {}
        self._data: Any = None

    def add(self, source: object, packed: bytes) -> None:
        """Store data of a source, instead of what the same source sent before."""
        self._latest[source] = packed

    def collect(self) -> None:
        """Merge the data of all sources; nothing more comes from them."""
        latest, self._latest = self._latest, {}
        if not latest:
            return
        import coverage

        if self._data is None:
            self._data = coverage.CoverageData(no_disk=True)
        for packed in latest.values():
            one = coverage.CoverageData(no_disk=True)
            one.loads(packed)
            self._data.update(one)

    def hand_over(self) -> None:
        """Add all data to what this process has measured, before that is saved."""
        self.collect()
        coverage = sys.modules.get("coverage")
        current = None if coverage is None else coverage.Coverage.current()
        if current is not None and self._data is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # coverage warns again when it saves the data
                data = current.get_data()
            data.update(self._data)
            self._data = None


@contextmanager
def _working_in(folder: str) -> Iterator[None]:
    before = os.getcwd()
    with suppress(OSError):  # the folder may not exist on another machine
        os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
