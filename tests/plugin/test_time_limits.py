"""pytest-timeout: it ends a loader once, and the message says where the ranks were."""

from __future__ import annotations

import re

import pytest

from tests.conftest import Project
from tests.plugin.test_outcomes import story

pytest.importorskip("pytest_timeout")
LIMITED = """
import time

import pytest
from pytest_fsdp_meta import fsdp_spmd

CHECKS = ["no_meta_params", "no_meta_buffers", "params_equal_reference"]


@fsdp_conformance(only=["no_meta_params"])
def test_before(fsdp):  # so that the next test need not wait for the fork server
    return load(fsdp)


@pytest.mark.timeout(10)
@fsdp_conformance(only=CHECKS)
def test_loading(fsdp):
    note("loading")
    if fsdp.rank == 0:
        fsdp.barrier()
    return load(fsdp, reference=build)


def sleep(step):
    note("training")
    time.sleep(1000)


@pytest.mark.timeout(10)
@fsdp_conformance(only=[*CHECKS, "loss_parity"])
def test_training(fsdp):
    return load(fsdp, reference=build, batch=sleep)


@pytest.mark.timeout(10)
@fsdp_spmd(world_size=2)
def test_spmd(fsdp):
    time.sleep(1000)


@fsdp_conformance(only=["no_meta_params"])
def test_after(fsdp):
    return load(fsdp)
"""


def test_a_loader_is_interrupted_once(project: Project) -> None:
    project.loaders(LIMITED)
    result = project.run("-v", "-p", "timeout")
    # pytest-timeout writes the stacks of threads between the name of an item and its outcome.
    assert "1 failed, 2 passed, 2 errors, 5 same error" in result.outlines[-1]
    assert sorted(set(project.notes)) == ["loading", "training"]
    assert project.notes.count("loading") == 2, "each rank has loaded once"
    limit = r"Timeout \(>10.0s\) from pytest-timeout"
    loading = story(result, "test_loading[no_meta_params]")
    assert re.fullmatch(
        rf"test_loading: {limit}; rank 0 was in barrier, test_it.py:\d+; rank 1 had returned", loading[0]
    )
    assert loading[1] == "(while loading)"
    assert any("in test_loading" in line for line in loading)
    training = story(result, "test_training[no_meta_params]")
    assert re.match(rf"test_training: {limit}; .* in sleep, test_it.py:\d+", training[0])
    spmd = story(result, "test_spmd")
    assert re.fullmatch(rf"{limit}; ranks 0, 1 were in test_spmd, test_it.py:\d+", spmd[0])


def test_an_example_of_hypothesis_is_interrupted_once(project: Project) -> None:
    project.loaders(
        """
        import time

        import pytest
        from hypothesis import given, settings, strategies as st

        @pytest.mark.timeout(30)
        @fsdp_conformance(only=["no_meta_params", "no_meta_buffers"])
        @given(n=st.integers(0, 1000))
        @settings(max_examples=5, database=None)
        def test_drawn(fsdp, n):
            note(f"{n}")
            time.sleep(1000)
        """
    )
    result = project.run("-v", "-p", "timeout")
    assert "1 failed, 1 same error" in result.outlines[-1]
    assert len(project.notes) == 2, "each rank has run one example"
    (first, *_) = story(result, "test_drawn[no_meta_params]")
    assert re.fullmatch(
        r"test_drawn: Timeout \(>30.0s\) from pytest-timeout; ranks 0, 1 were in test_drawn, test_it.py:\d+", first
    )
