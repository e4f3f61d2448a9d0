"""The line that says whether a run passes by ``--fsdp-fail-on``, and why: the same in all reports of a run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_fsdp_meta.reports.compare import compare, decide_outcome
from pytest_fsdp_meta.reports.io import read_report
from pytest_fsdp_meta.reports.markdown import summarise_run
from pytest_fsdp_meta.reports.page.rendering import render
from pytest_fsdp_meta.reports.page.view import build_view
from pytest_fsdp_meta.reports.schema import CheckRecord, Outcome, Report
from pytest_fsdp_meta.reports.story import state_of
from tests.conftest import Project
from tests.reports.report_factory import CATALOGUE, check, finding, loader, report

CHECK = "no_meta_params"
GOOD = report(loader())
FAILED = report(loader(checks={CHECK: check(CHECK, "failed", [finding("a")])}))
DIFFERS = check(CHECK, "differs", reason="0.065 apart, with a limit of 0.001")
PASSED = f"{len(CATALOGUE)} passed"


def one(record: CheckRecord) -> Report:
    return report(loader(checks={record.check: record}))


@pytest.mark.parametrize(
    ("before", "now", "fail_on", "expected"),
    [
        (GOOD, GOOD, "regression", f"passes: {PASSED}"),
        (FAILED, FAILED, "regression", "passes: 1 known failure"),
        (GOOD, FAILED, "regression", "fails: 1 new failure"),
        (FAILED, FAILED, "any", "fails: 1 check failed"),
        (report(loader(), loader("t.py::old")), GOOD, "regression", "fails: 1 loader missing"),
        (report(loader(), loader("t.py::old")), FAILED, "any", "fails: 1 check failed, 1 loader missing"),
        (GOOD, one(check(CHECK, "not run")), "regression", "fails: 1 not run"),
        (GOOD, one(check(CHECK, "not declared")), "any", "fails: 1 no longer judged"),
        (GOOD, one(DIFFERS), "regression", "fails: 1 new difference"),
        (GOOD, one(DIFFERS), "any", "fails: 1 new difference"),
        (one(DIFFERS), one(DIFFERS), "any", f"passes: {len(CATALOGUE) - 1} passed, 1 differs"),
        (None, FAILED, "regression", "fails: 1 check failed"),
        (None, GOOD, "regression", f"passes: {PASSED}"),
    ],
)
def test_the_outcome_and_its_reason(before, now, fail_on, expected):
    comparison = compare(before, now) if before is not None else None
    passes = not comparison.fails(fail_on) if comparison is not None else now is GOOD
    assert str(decide_outcome(now, comparison, fail_on, passes, others="")) == expected


def test_other_tests_and_missing_loaders_that_are_allowed_are_named():
    comparison = compare(report(loader(), loader("t.py::old")), FAILED, is_allowed=lambda name: True)
    failed = decide_outcome(FAILED, comparison, "regression", passes=False, others="pytest stopped early")
    assert str(failed) == "fails: 1 new failure, pytest stopped early"
    known = compare(report(*FAILED.loaders, loader("t.py::old")), FAILED, is_allowed=lambda name: True)
    passed = decide_outcome(FAILED, known, "regression", passes=True, others="")
    assert str(passed) == "passes: 1 known failure, 1 loader missing as allowed"


@pytest.mark.parametrize(
    ("made", "outcome", "state", "sign"),
    [
        (FAILED, Outcome(True, "1 known failure", "regression"), "known", "🟡"),
        (GOOD, Outcome(False, "1 loader missing", "regression"), "failed", "❌"),
        (GOOD, Outcome(True, PASSED, "any"), "passed", "✅"),
        (report(loader(checks={CHECK: DIFFERS})), Outcome(True, "1 differs", "any"), "differs", "🟡"),
        (report(replace(loader(), error="it raised")), Outcome(True, "1 known failure", "any"), "known", "🟡"),
    ],
)
def test_page_and_summary_have_the_line_and_its_colour(made, outcome, state, sign):
    now = replace(made, outcome=outcome, exit_status=int(not outcome.passes))
    assert state_of(now) == state
    found, headline, account = build_view(now).verdict
    assert (found, headline) == (state, str(outcome).capitalize())
    assert account.endswith(f" · --fsdp-fail-on={outcome.fail_on}")
    assert f'<div class="verdict {state}">' in render(now)
    assert summarise_run(now).startswith(f"### {sign} fsdp conformance {outcome}\n\n")


LOADERS = """
@fsdp_conformance(only=["no_meta_params", "params_equal_reference"])
def test_one(fsdp):
    subject = load(fsdp, reference=build)
    with torch.no_grad():
        subject.model.weight.to_local().add_(1)
    return subject
"""


def test_a_real_run_says_why_it_fails(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """As its options come from the environment and the ini file, the report names them."""
    project.loaders(LOADERS)
    project.write("pytest.ini", "[pytest]\nfsdp_fail_on = regression\naddopts = -p no:cacheprovider\n")
    monkeypatch.setenv("PYTEST_ADDOPTS", "--fsdp-compare=reports")
    (project.path / "reports").mkdir()
    result = project.run("--fsdp-report=reports/first")
    assert result.ret == pytest.ExitCode.TESTS_FAILED, "no earlier run"
    section = result.outlines[next(n for n, line in enumerate(result.outlines) if "compared ==" in line) :]
    assert "fails: 1 check failed (--fsdp-fail-on=regression)" in section
    first = read_report(project.path / "reports" / "first" / "report.json")
    assert first.outcome == Outcome(False, "1 check failed", "regression")
    assert first.header.settings == {
        "addopts": "-p no:cacheprovider",
        "PYTEST_ADDOPTS": "--fsdp-compare=reports",
        "fsdp_fail_on": "regression",
    }
    page = (project.path / "reports" / "first" / "index.html").read_text()
    assert "<code>PYTEST_ADDOPTS=--fsdp-compare=reports</code>" in page
