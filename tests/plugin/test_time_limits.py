"""pytest-timeout: it ends a loader once, and the message says where the ranks were.

A rank sends the signal of pytest-timeout itself, so that no test has to wait for a limit.
"""

from __future__ import annotations

import re

import pytest

from tests.conftest import Project
from tests.plugin.test_outcomes import story

pytest.importorskip("pytest_timeout")
HEAD = """
import os
import signal
import time

import pytest
from hypothesis import given, settings, strategies as st
from pytest_fsdp_meta import fsdp_spmd

pytestmark = pytest.mark.timeout(600)
CHECKS = ["no_meta_params", "no_meta_buffers", "params_equal_reference"]


@pytest.fixture(scope="session")
def pytest_pid():
    return os.getpid()


def reach_limit(pid, test):
    note(test)
    os.kill(pid, signal.SIGALRM)
    time.sleep(1000)

"""
LIMIT = r"Timeout \(>600.0s\) from pytest-timeout"


LIMITED = """
@fsdp_conformance(only=CHECKS)
def test_loading(fsdp, pytest_pid):
    fsdp.barrier()
    if fsdp.rank == 1:
        time.sleep(2)  # rank 0 has to wait in the barrier: a rank that has not reached it is behind as well
        reach_limit(pytest_pid, "loading")
    fsdp.barrier()
    return load(fsdp, reference=build)


@fsdp_conformance(only=CHECKS)
def test_goes_on(fsdp):
    return load(fsdp, reference=build)


@fsdp_conformance(only=[*CHECKS, "loss_parity"])
def test_training(fsdp, pytest_pid):
    return load(fsdp, reference=build, batch=lambda step: reach_limit(pytest_pid, "training"))


@fsdp_spmd(world_size=1)
def test_spmd(fsdp, pytest_pid):
    reach_limit(pytest_pid, "spmd")


@fsdp_spmd(world_size=1)
def test_spmd_goes_on(fsdp):
    pass


@fsdp_conformance(only=["no_meta_params", "no_meta_buffers"], world_size=1)
@given(n=st.integers(0, 1000))
@settings(max_examples=5, database=None)
def test_drawn(fsdp, n, pytest_pid):
    reach_limit(pytest_pid, "drawn")
"""


def test_a_limit_interrupts_each_test_once(project: Project) -> None:
    project.loaders(HEAD + LIMITED)
    result = project.run("-v", "-p", "no:randomly")
    # pytest-timeout writes the stacks of threads between the name of an item and its outcome.
    assert "2 failed, 4 passed, 2 errors, 6 same error" in result.outlines[-1]
    assert [project.notes.count(name) for name in ("loading", "drawn")] == [1, 1], "no example follows the limit"
    first, second, *rest = story(result, "test_loading")
    assert re.match(rf"test_loading: {LIMIT}; rank 1 was in reach_limit, test_it.py:\d+; rank 0 ", first)
    assert second == "(while loading)"
    assert any("in reach_limit" in line for line in rest)
    first = story(result, "test_training")[0]
    assert re.match(rf"test_training: {LIMIT}; .* in reach_limit, test_it.py:\d+", first)
    lines = story(result, "test_spmd")
    assert re.fullmatch(rf"{LIMIT}; rank 0 was in reach_limit, test_it.py:\d+", lines[0])
    assert any(line.startswith("rerun: ") for line in lines)
    first = story(result, "test_drawn")[0]
    assert re.fullmatch(rf"test_drawn: {LIMIT}; rank 0 was in reach_limit, test_it.py:\d+", first)
