"""What ranks write, as pytest shows it: with the failing item, or live under -s."""

from __future__ import annotations

import pytest

from tests.conftest import Project

TALKING = """
def say(fsdp):
    print("hello from", fsdp.rank)
    print("and more", end="")

@fsdp_conformance(only=["no_meta_params", "no_meta_buffers"])
def test_passes(fsdp):
    say(fsdp)
    return load(fsdp)

@fsdp_conformance(only=["no_meta_params", "no_meta_buffers"])
def test_fails(fsdp):
    say(fsdp)
    raise RuntimeError("boom")

def other():
    print("hello from one world more")
    return build()

@fsdp_conformance(only=["params_equal_reference"])
def test_reference(fsdp):
    return load(fsdp, reference=other)
"""


def test_output_is_shown_with_the_first_failing_item(project: Project) -> None:
    project.loaders(TALKING)
    result = project.run()
    text = result.stdout.str()
    result.assert_outcomes(passed=3, errors=2)
    assert text.count("Captured rank 0 setup") == 1
    assert text.count("Captured rank 1 setup") == 1
    assert text.count("hello from 0") == 1
    assert "[rank" not in text


@pytest.mark.parametrize("verbose", ["-v", "-q"])
def test_output_is_live_under_s(project: Project, verbose: str) -> None:
    project.loaders(TALKING)
    result = project.run("-s", verbose)
    result.assert_outcomes(passed=3, errors=2)
    lines = result.outlines
    for rank in (0, 1):
        assert lines.count(f"[rank {rank}] hello from {rank}") == 2
        assert lines.count(f"[rank {rank}] and more") == 2
    assert lines.count("[the reference] hello from one world more") == 2, "it is built twice"
    assert "Captured rank" not in result.stdout.str(), "it was seen already"


def test_s_under_xdist(project: Project) -> None:
    project.loaders(TALKING)
    result = project.run("-s", "-n1")
    result.assert_outcomes(passed=3, errors=2)
    assert result.stdout.str().count("Captured rank 0 setup") == 1
