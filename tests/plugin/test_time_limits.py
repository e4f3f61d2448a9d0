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


def reach_limit(pid):
    note("reached")
    os.kill(pid, signal.SIGALRM)
    time.sleep(1000)

"""
LIMIT = r"Timeout \(>600.0s\) from pytest-timeout"


def run(project: Project, text: str) -> pytest.RunResult:
    project.loaders(HEAD + text)
    return project.run("-v")


def test_a_loader_is_interrupted_once(project: Project) -> None:
    result = run(
        project,
        """
@fsdp_conformance(only=CHECKS)
def test_loading(fsdp, pytest_pid):
    fsdp.barrier()
    if fsdp.rank == 1:
        time.sleep(2)  # rank 0 has to wait in the barrier: a rank that has not reached it is behind as well
        reach_limit(pytest_pid)
    fsdp.barrier()
    return load(fsdp, reference=build)


@fsdp_conformance(only=CHECKS)
def test_goes_on(fsdp):
    return load(fsdp, reference=build)
""",
    )
    # pytest-timeout writes the stacks of threads between the name of an item and its outcome.
    assert "3 passed, 1 error, 2 same error" in result.outlines[-1]
    assert project.notes == ["reached"]
    first, second, *rest = story(result, "test_loading[no_meta_params]")
    assert re.match(rf"test_loading: {LIMIT}; rank 1 was in reach_limit, test_it.py:\d+; rank 0 ", first)
    assert second == "(while loading)"
    assert any("in reach_limit" in line for line in rest)


def test_a_limit_during_training_ends_all_checks_of_the_loader(project: Project) -> None:
    result = run(
        project,
        """
@fsdp_conformance(only=[*CHECKS, "loss_parity"])
def test_training(fsdp, pytest_pid):
    return load(fsdp, reference=build, batch=lambda step: reach_limit(pytest_pid))
""",
    )
    assert "1 error, 3 same error" in result.outlines[-1]
    first = story(result, "test_training[no_meta_params]")[0]
    assert re.match(rf"test_training: {LIMIT}; .* in reach_limit, test_it.py:\d+", first)


def test_a_test_on_ranks(project: Project) -> None:
    result = run(
        project,
        """
@fsdp_spmd(world_size=1)
def test_spmd(fsdp, pytest_pid):
    reach_limit(pytest_pid)


@fsdp_spmd(world_size=1)
def test_goes_on(fsdp):
    pass
""",
    )
    assert "1 failed, 1 passed" in result.outlines[-1]
    lines = story(result, "test_spmd")
    assert re.fullmatch(rf"{LIMIT}; rank 0 was in reach_limit, test_it.py:\d+", lines[0])
    assert any(line.startswith("rerun: ") for line in lines)


def test_an_example_of_hypothesis_is_interrupted_once(project: Project) -> None:
    result = run(
        project,
        """
@fsdp_conformance(only=["no_meta_params", "no_meta_buffers"], world_size=1)
@given(n=st.integers(0, 1000))
@settings(max_examples=5, database=None)
def test_drawn(fsdp, n, pytest_pid):
    reach_limit(pytest_pid)
""",
    )
    assert "1 failed, 1 same error" in result.outlines[-1]
    assert project.notes == ["reached"], "no example is tried after the limit"
    first = story(result, "test_drawn[no_meta_params]")[0]
    assert re.fullmatch(rf"test_drawn: {LIMIT}; rank 0 was in reach_limit, test_it.py:\d+", first)
