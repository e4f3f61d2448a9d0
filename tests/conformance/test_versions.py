"""The table of results/versions.md, from runs written by hand, and its rows beside the files that they match."""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import asdict, replace

import pytest
from packaging.version import Version

from conformance import versions
from conformance.released import ROOT, replace_table
from conformance.versions import (
    BEGIN,
    ROWS,
    SHOWN,
    USUAL,
    Outcome,
    Runner,
    Stopped,
    add_tests,
    earlier,
    find_python,
    judge_readme,
    parse_ready,
    read_tests,
    render,
)

README = "\n38 passed, 18 skipped\n"
RIGHT = {f"{number}": ("passed" if number < 38 else "skipped", "") for number in range(56)}
BROKEN = {"test_llama::test_llama[no_uninitialized_memory]": ("failed", "no tensor is left uninitialised")}
OTHER = {"test_llama::test_llama[loss_parity]": ("failed", "values differ")}
DONE = Outcome("newest", "2026-11-25", "abc", {"Python": "3.13.0", "torch": "2.15.0 (CPU)"}, counts={"passed": 2})

JUNIT = """<testsuites><testsuite>
<testcase classname="conformance.test_forms" name="test_a_form_conforms[hsdp]" />
<testcase classname="conformance.test_forms" name="test_a_form_conforms[tp]"><error message="no&#10;more" /></testcase>
<testcase classname="conformance.test_forms" name="test_a_form_conforms[ep]"><failure message="assert 1" /></testcase>
<testcase classname="conformance.test_forms" name="test_a_form_conforms[ep]" />
<testcase classname="" name="tests.test_gone"><error message="collection failure">why</error></testcase>
<testcase classname="a.b" name="test_gpu"><skipped message="no GPU" /></testcase>
</testsuite></testsuites>"""


def test_a_report_of_pytest_is_read():
    assert read_tests(JUNIT) == {
        "test_forms::test_a_form_conforms[hsdp]": ("passed", ""),
        "test_forms::test_a_form_conforms[tp]": ("failed", "no"),
        "test_forms::test_a_form_conforms[ep]": ("failed", "assert 1"),
        "::tests.test_gone": ("failed", "collection failure"),
        "b::test_gpu": ("skipped", ""),
    }


@pytest.mark.parametrize(
    ("right", "broken", "problems"),
    [
        (RIGHT, BROKEN, {}),
        (RIGHT | {"0": ("failed", "why")}, BROKEN, {"README's example": "1 failed, 37 passed, 18 skipped: why"}),
        (RIGHT | {"0": ("skipped", "")}, BROKEN, {"README's example": "37 passed, 19 skipped"}),
        ({}, BROKEN, {"README's example": "no tests"}),
        (RIGHT, BROKEN | OTHER, {"README's broken example": "failed: no_uninitialized_memory, loss_parity"}),
        (RIGHT, RIGHT, {"README's broken example": "failed: nothing"}),
    ],
    ids=["as promised", "a failure", "another number", "no tests", "another failure", "not caught"],
)
def test_the_example_must_end_as_readme_says(right, broken, problems):
    outcome = replace(DONE, problems={})
    judge_readme(outcome, right, broken, README)
    assert outcome.problems == problems
    assert (outcome.broken == "`no_uninitialized_memory` alone") == ("README's broken example" not in problems)


def test_the_table_has_a_line_for_each_row_and_names_what_failed():
    failed = replace(DONE, row="2.9.1", versions={}, counts={}, problems={"pip install torch==2.9.1": "`no` such file"})
    add_tests(failed, {"a::test_x[1]": ("failed", ""), "a::test_y": ("passed", "")})
    text = render([failed, DONE])
    assert "Run on 2026-11-25, commit abc.\n" in text
    assert "| newest | 3.13.0 | 2.15.0 (CPU) | - | - | - | - | not run | not run | 2 | 0 | 0 | 0 |" in text
    assert "* 2.9.1: `pip install torch==2.9.1`: `'no' such file`\n* 2.9.1: `a::test_x[1]`: no message\n" in text
    assert "| 2.9.1 | - | - | - | - | - | - | not run | not run | 1 | 1 | 0 | 0 |" in text
    assert render([DONE]).endswith("\n\nNothing failed.\n")


def test_a_long_list_of_failures_is_cut():
    text = render([replace(DONE, problems={str(number): "why" for number in range(SHOWN + 480)})])
    assert text.count("why") == SHOWN
    assert text.endswith("* newest: and 480 more\n")


def test_only_a_row_that_ran_today_on_this_commit_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(versions, "RESULTS", tmp_path)
    assert earlier("newest", DONE.date, "abc") is None
    (tmp_path / "newest.json").write_text(json.dumps(asdict(DONE)))
    assert earlier("newest", DONE.date, "abc") == DONE
    assert earlier("newest", "2026-11-26", "abc") is None
    assert earlier("newest", DONE.date, "def") is None
    (tmp_path / "newest.json").write_text(json.dumps(asdict(replace(DONE, commit="abc+"))))
    assert earlier("newest", DONE.date, "abc+") is None, "files differ from the commit, and may differ otherwise by now"
    (tmp_path / "newest.json").write_text(json.dumps(asdict(replace(DONE, versions={}))))
    assert earlier("newest", DONE.date, "abc") is None, "it could not be installed, perhaps for lack of a network"


def test_a_failed_command_is_a_problem_of_its_row_and_names_its_last_line(tmp_path):
    runner = Runner(tmp_path / "log", 2, {})
    outcome = replace(DONE, problems={})
    fails = tmp_path / "python"
    fails.write_text("#!/bin/sh\necho no torch here >&2\nexit 3\n")
    fails.chmod(0o755)
    with pytest.raises(Stopped) as stopped:
        runner.run(str(fails), "-m", "pip")
    assert stopped.value.args == ("-m pip", "exit status 3: no torch here")
    runner.try_row(ROWS["newest"], str(fails), outcome)
    assert outcome.problems == {"import torch": "no torch here"}


def test_a_ready_environment_is_named_with_its_row():
    assert parse_ready(f"2.9.1={sys.executable}") == ("2.9.1", sys.executable)
    for text in ("2.9.1", "2.9.1=no/such/python", f"2.0={sys.executable}"):
        with pytest.raises(argparse.ArgumentTypeError, match=r"is not ROW=PATH, with one of 2\.9\.1"):
            parse_ready(text)


def test_the_python_of_a_row_is_a_variable_or_on_path_or_else_this_one(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    monkeypatch.delenv("PYTHON310", raising=False)
    assert find_python("3.10") == sys.executable
    shim = tmp_path / "python3.10"
    shim.write_text("#!/bin/sh\nexit 127\n")
    shim.chmod(0o755)
    assert find_python("3.10") == sys.executable, "pyenv's shims fail for a version that is not active"
    shim.write_text("#!/bin/sh\n")
    assert find_python("3.10") == str(shim)
    monkeypatch.setenv("PYTHON310", "/bin/true")
    assert find_python("3.10") == "/bin/true"


def test_the_first_row_has_the_oldest_releases_that_are_allowed():
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    for pin in USUAL[0].others:
        package, _, pinned = pin.partition("==")
        allowed = re.search(rf'"{package}>=([\d.]+)"', project)
        assert allowed, f"pyproject.toml has no lower bound of {package}"
        assert Version(allowed[1]) <= Version(pinned), pin
        assert pinned.startswith(allowed[1]), pin


def test_the_rows_agree_with_the_classifiers_the_constraints_and_the_workflow():
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    assert sorted({row.python for row in USUAL}) == sorted(re.findall(r":: Python :: (3\.\d+)\"", project))
    oldest = re.search(r'requires-python = ">=(3\.\d+)"', project)[1]
    makefile = (ROOT / "Makefile").read_text("utf-8")
    assert f"--universal --python-version {oldest} " in makefile
    assert f"for python in {oldest}.0 " in makefile
    assert f"({oldest.replace('.', ', ')}) <= sys.version_info" in makefile
    assert f"{ROWS['2.13.0-cpu'].torch[0]}\n" in (ROOT / "constraints.txt").read_text("utf-8")
    assert "row: [newest, nightly]" in (ROOT / ".github/workflows/ci.yml").read_text("utf-8")
    assert {"newest", "nightly"} <= set(ROWS)


def test_the_page_has_a_line_for_each_row():
    page = (ROOT / "results" / "versions.md").read_text("utf-8")
    assert all(f"\n| {row.name} | " in page for row in USUAL)
    assert all(f"\n| {row.python}." in page for row in USUAL)
    assert render([DONE]) in replace_table(page, render([DONE]), BEGIN)
