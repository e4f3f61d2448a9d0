"""Write the log of the soak (``benchmarks/soak.py``): outcomes, open files of workers and waits for leases."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(os.environ["FSDP_SOAK"])


def write_log(name: str, *words: object) -> None:
    with (FOLDER / name).open("a") as file:
        file.write(" ".join(map(str, words)) + "\n")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        config.add_cleanup(log_open_files)  # first, so that it runs after the plugin has ended all worlds
        from pytest_fsdp_meta.worlds import Lease

        acquire = Lease.acquire

        def timed(self: Lease, *arguments: Any) -> None:
            began, held = time.monotonic(), bool(self._locks)
            acquire(self, *arguments)
            if not held:
                write_log("log", "waited", round(time.monotonic() - began, 3), os.getpid(), time.monotonic())

        Lease.acquire = timed  # type: ignore[method-assign]


@pytest.fixture(autouse=True, scope="session")
def _open_files() -> None:
    """Log the open files before the first test; they are logged again after all worlds have ended."""
    log_open_files()


def log_open_files() -> None:
    write_log("log", "files", len(os.listdir("/proc/self/fd")), os.getpid(), time.monotonic())


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ or (report.when in ("setup", "teardown") and report.passed):
        return
    number = re.search(r"\[(\d+)", report.nodeid)
    assert number is not None, report.longrepr
    write_log("outcomes", number[1], report.outcome)
