"""Loaders with ``@given``: each example is loaded once for all checks."""

from __future__ import annotations

import pytest

from tests.conftest import Project
from tests.plugin.test_outcomes import CHECKS, outcomes, story

HEAD = """
import pytest
from hypothesis import assume, given, settings, strategies as st
few = settings(max_examples=6, database=None)
"""


def run(project: Project, text: str, *args: str) -> pytest.RunResult:
    project.loaders(HEAD + text)
    return project.run("-v", *args)


def test_each_example_is_loaded_once_and_the_smallest_failing_one_is_reported(project: Project) -> None:
    result = run(
        project,
        f"""
@fsdp_conformance(only={CHECKS})
@given(n=st.integers(1, 1000))
@few
def test_x(fsdp, n):
    if fsdp.rank == 0:
        note(f"{{n}}")
    return load(fsdp, reference=build)

@given(n=st.integers(0, 20))
@settings(database=None, max_examples=25)
@fsdp_conformance(only={CHECKS}, xfail={{"no_meta_buffers": "never"}})
def test_y(fsdp, n):
    model = load(fsdp, reference=build)
    if n >= 13:
        with torch.no_grad():
            model.model.bias.to_local().add_(1)
    return model
""",
    )
    assert outcomes(result) == {
        "test_x[no_meta_params]": "passed",
        "test_x[no_meta_buffers]": "passed",
        "test_x[params_equal_reference]": "passed",
        "test_y[no_meta_params]": "passed",
        "test_y[no_meta_buffers]": "failed",
        "test_y[params_equal_reference]": "failed",
    }
    drawn = project.notes
    assert len(drawn) == len(set(drawn)) <= 6
    lines = story(result, "test_y[params_equal_reference]")
    assert lines[0].startswith("params_equal_reference: ")
    assert "    n=13," in lines
    unexpected = story(result, "test_y[no_meta_buffers]")[0]
    assert unexpected.startswith("no_meta_buffers passes, but xfail expects it to fail")


@pytest.mark.nightly
def test_xfail_skip_assume_and_errors(project: Project) -> None:
    result = run(
        project,
        """
@fsdp_conformance(only=["params_equal_reference"], xfail={"params_equal_reference": "issue 7"})
@given(n=st.integers(0, 5))
@few
def test_xfail(fsdp, n):
    model = load(fsdp, reference=build)
    with torch.no_grad():
        model.model.bias.to_local().add_(1)
    return model

@fsdp_conformance(only=["params_equal_reference"])
@given(n=st.integers(0, 5))
@few
def test_undeclared(fsdp, n):
    return load(fsdp)

@fsdp_conformance(only=["no_meta_params"])
@given(n=st.integers(0, 5))
@few
def test_skip(fsdp, n):
    pytest.skip("not here")

@fsdp_conformance(only=["no_meta_params"])
@given(n=st.integers(0, 5))
@settings(phases=[])
def test_nothing(fsdp, n):
    return load(fsdp)

@fsdp_conformance(only=["no_meta_params"])
@given(n=st.integers(0, 100))
@few
def test_assume(fsdp, n):
    assume(n % 2)
    return load(fsdp)

@fsdp_conformance(only=["no_meta_params", "no_meta_buffers"], xfail={"no_meta_params": "no error is expected"})
@given(n=st.integers(0, 9))
@few
def test_error(fsdp, n):
    raise KeyError(n)
""",
    )
    assert outcomes(result) == {
        "test_xfail[params_equal_reference]": "xfail",
        "test_undeclared[params_equal_reference]": "not declared",
        "test_skip[no_meta_params]": "skipped",
        "test_nothing[no_meta_params]": "skipped",
        "test_assume[no_meta_params]": "passed",
        "test_error[no_meta_params]": "failed",
        "test_error[no_meta_buffers]": "same error",
    }
    lines = story(result, "test_error")
    assert lines[0] == "test_error: ranks 0, 1 raised KeyError: 0"
    assert "    n=0,  # or any other generated value" in lines
