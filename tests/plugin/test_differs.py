"""Checks that differ or are partly checked: they are shown by default, and fail with ``--fsdp-strict``."""

from __future__ import annotations

import xml.etree.ElementTree as ET

from pytest_fsdp_meta.reports.io import read_report
from tests.conftest import Project
from tests.plugin.test_outcomes import outcomes, story

WHY = "0.065 apart, with a limit of 0.001: the router draws noise"
CHECKS = f"""
from pytest_fsdp_meta.catalogue import Differs, PartlyJudged, check

def own(judge):
    return check(promise="it holds", family="own", needs=["inventory"], why="", cause="", remedy="")(judge)

@own
def far_off(view):
    if view.holders("weight")[0][1].shape != (2, 4):
        raise Differs("{WHY}")
    return []

@own
def first_part(view):
    raise PartlyJudged("no step was recorded")

@own
def second_part(view):
    raise PartlyJudged("no step was recorded")

def pytest_fsdp_checks():
    return [far_off, first_part, second_part]
"""
"""A conftest.py whose first check differs for all models but that of one size."""
LOADER = """
@fsdp_conformance(only=["no_meta_params", "far_off", "first_part", "second_part"]{})
def test_x(fsdp): return load(fsdp)
"""


def test_what_differs_is_shown_everywhere_and_fails_nothing(project: Project) -> None:
    project.write("conftest.py", CHECKS)
    project.loaders(LOADER.format(""))
    result = project.run("-q", "--fsdp-report=out", "--junitxml=junit.xml")
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        [
            ".dpp *",
            f"differs: far_off in test_it.py::test_x: {WHY}",
            "1 passed, 1 differs, 2 partly checked in *",
        ]
    )
    (loader,) = read_report(project.path / "out" / "report.json").loaders
    assert {check.check: (check.status, check.reason) for check in loader.checks if check.check == "far_off"} == {
        "far_off": ("differs", WHY)
    }
    properties = [one.attrib for one in ET.parse(project.path / "junit.xml").iter("property")]
    assert {"name": "fsdp_status", "value": "differs"} in properties
    assert {"name": "fsdp_reason", "value": WHY} in properties
    summary = (project.path / "out" / "summary.md").read_text()
    assert summary.startswith("### 🟡 fsdp conformance: 1 passed, 1 differs, 2 partly checked\n")
    assert f"**Differs**\n\n* far_off in test_it.py::test_x: {WHY}\n" in summary
    page = (project.path / "out" / "index.html").read_text()
    assert '<div class="verdict differs">\n<h1>far_off differs, no check failed</h1>' in page
    assert page.index("What differs") < page.index(WHY) < page.index("What could be checked in addition")


def test_strict_makes_it_fail_unless_that_is_expected(project: Project) -> None:
    project.write("conftest.py", CHECKS)
    project.loaders(LOADER.format("") + LOADER.format(', xfail={"far_off": "noise"}').replace("test_x", "test_known"))
    result = project.run("-v", "--fsdp-report=out", "--fsdp-strict")
    assert result.ret == 1
    assert outcomes(result) == {
        "test_x[no_meta_params]": "passed",
        "test_known[no_meta_params]": "passed",
        "test_x[far_off]": "failed",
        "test_known[far_off]": "xfail",
        **{f"test_{one}[{part}_part]": "failed" for one in ("x", "known") for part in ("first", "second")},
    }
    message = f"differs: {WHY} (a failure with --fsdp-strict)"
    assert story(result, "test_x[far_off]")[0] == f"far_off: {message}"
    rerun = next(line for line in result.outlines if line.startswith("rerun: ") and "test_x[far_off]" in line)
    assert rerun.endswith(" --fsdp-strict")
    result.stdout.fnmatch_lines(
        [
            f"1. failed: {message}",
            "   far_off in test_it.py::test_x",
            "FAILED test_it.py::test_x[[]far_off[]] - differs: 0.065 apart*",
        ]
    )
    assert f"**Failed because of --fsdp-strict**\n\n* {message}\n" in (project.path / "out/summary.md").read_text()


def test_an_example_that_passes_hides_none_that_differs(project: Project) -> None:
    project.write("conftest.py", CHECKS)
    project.loaders(
        """
        from hypothesis import given, settings, strategies as st

        @fsdp_conformance(only=["far_off"])
        @given(rows=st.sampled_from([2, 4]))
        @settings(database=None, max_examples=4)
        def test_x(fsdp, rows):
            return fully_shard(nn.Linear(4, rows), mesh=fsdp.mesh)
        """
    )
    result = project.run("-q")
    assert result.ret == 0
    assert f"differs: far_off in test_it.py::test_x: {WHY}" in result.outlines
