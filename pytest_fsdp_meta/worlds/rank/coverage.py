"""Coverage of what runs on ranks: where the parent measures, they do too, and send what they find.

Coverage is asked for what its user set through its public options. It is neither imported nor asked where the parent
has not imported it.
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
"""Of the notes."""
OPTIONS = (
    *("branch", "concurrency", "context", "core", "cover_pylib", "include", "omit", "plugins", "relative_files"),
    *("source", "source_pkgs", "source_dirs", "timid"),
)
"""Of the section [run]; the others are about files and processes, which are ours here."""
OURS: Mapping[str, Any] = {"sigterm": False, "dynamic_context": None, "patch": []}
"""What must not be as a configuration file has it."""
WARNINGS = ["no-data-collected", "module-not-imported", "module-not-measured", "module-not-python", "trace-changed"]
"""What coverage says of the whole program, which a rank is not."""
_before: list[bytes] = []
"""What the fork server measured while it imported; its ranks find it here."""


@dataclass(frozen=True)
class Measuring:
    """How the parent measures; ``folder`` is what its relative paths are relative to."""

    options: Mapping[str, Any]
    config_file: str
    folder: str


def wanted() -> Measuring | None:
    """How this process measures; None where it does not."""
    coverage = sys.modules.get("coverage")
    current = None if coverage is None else coverage.Coverage.current()
    if current is None:
        return None
    options: dict[str, Any] = {}
    for name in OPTIONS:
        with suppress(Exception):  # an earlier or later coverage may not know it
            options[name] = current.get_option(f"run:{name}")
    options["concurrency"] = [kind for kind in options.get("concurrency") or () if kind != "multiprocessing"]
    return Measuring(options, getattr(current.config, "config_file", None) or "", os.getcwd())


class Measurement:
    """Coverage of this process, from now on; kept in memory."""

    def __init__(self, how: Measuring) -> None:
        import coverage

        self._coverage = coverage.Coverage(data_file=None, config_file=how.config_file or False)
        for name, value in how.options.items():
            self._coverage.set_option(f"run:{name}", value)
        self._coverage.set_option("run:disable_warnings", WARNINGS)
        for name, value in OURS.items():
            with suppress(Exception):  # as above
                self._coverage.set_option(f"run:{name}", value)
        self._told = b""
        with _working_in(how.folder):
            self._coverage.start()

    def stop(self) -> None:
        self._coverage.stop()

    def news(self) -> bytes:
        """All that was measured so far; empty where that was told."""
        packed = bytes(self._coverage.get_data().dumps())
        if packed == self._told:
            return b""
        self._told = packed
        return packed


@contextmanager
def preloading(how: Mapping[str, Any] | None) -> Iterator[None]:
    """Around what the fork server imports; ``how`` are the fields of a ``Measuring``, or None."""
    if how is None:
        yield
        return
    measurement = Measurement(Measuring(**how))
    try:
        yield
    finally:
        measurement.stop()
        _before.append(measurement.news())


def before_the_fork() -> bytes:
    """What the fork server has measured; empty where it has not."""
    return _before[0] if _before else b""


class Sum:
    """In the parent: what ranks have measured, until it is added to what the parent itself has."""

    def __init__(self) -> None:
        self._latest: dict[object, bytes] = {}
        self._data: Any = None

    def add(self, source: object, packed: bytes) -> None:
        """What comes from the same source replaces what it has told before."""
        self._latest[source] = packed

    def collect(self) -> None:
        """Nothing more is to come from these sources."""
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
        """Adds all to what this process measures, before that is saved."""
        self.collect()
        coverage = sys.modules.get("coverage")
        current = None if coverage is None else coverage.Coverage.current()
        if current is not None and self._data is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what it says of the whole it says again when that is saved
                data = current.get_data()
            data.update(self._data)
            self._data = None


@contextmanager
def _working_in(folder: str) -> Iterator[None]:
    before = os.getcwd()
    with suppress(OSError):  # on another machine it need not be there
        os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
