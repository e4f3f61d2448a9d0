"""Writes the diary of the soak, see ``benchmarks/soak.py``: what became of each test, and what each worker has open."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(os.environ["FSDP_SOAK"])


def diary(name: str, *words: object) -> None:
    with (FOLDER / name).open("a") as file:
        file.write(" ".join(map(str, words)) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        from pytest_fsdp_meta.worlds.leases.device_leases import Leases

        take = Leases._acquire

        def timed(self: Leases, *arguments: Any) -> None:
            began = time.monotonic()
            take(self, *arguments)
            diary("log", "waited", round(time.monotonic() - began, 3), os.getpid(), time.monotonic())

        Leases._acquire = timed  # type: ignore[method-assign]


@pytest.fixture(autouse=True, scope="session")
def _open_files() -> None:
    """Before the first test of a worker, and once more when its kept worlds have ended as well."""
    files()


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        files()


def files() -> None:
    diary("log", "files", len(os.listdir("/proc/self/fd")), os.getpid(), time.monotonic())


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ or (report.when in ("setup", "teardown") and report.passed):
        return
    number = re.search(r"\[(\d+)", report.nodeid)
    assert number is not None, report.longrepr
    diary("outcomes", number[1], report.outcome)
