"""Record how long each test takes, by rank if each rank runs its own pytest."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

NAMES = ("RANK", "OMPI_COMM_WORLD_RANK", "PYTEST_XDIST_WORKER")
_outcomes: dict[str, str] = {}


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    began = time.perf_counter()
    result = yield
    seconds = time.perf_counter() - began
    me = next((f"{name[0]}{os.environ[name]}" for name in NAMES if name in os.environ), "main")
    with Path(os.environ["BENCH_MARKS"], f"times.{me}").open("a") as file:
        record = {"test": item.nodeid, "seconds": seconds, "outcome": _outcomes.get(item.nodeid)}
        file.write(json.dumps(record) + "\n")
    return result


def pytest_runtest_logreport(report):
    if report.failed or report.nodeid not in _outcomes:
        _outcomes[report.nodeid] = report.outcome
