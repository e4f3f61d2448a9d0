"""The comparison of two runs: of handmade reports, and of real runs."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from xml.etree import ElementTree

import pytest
from markdown_it import MarkdownIt

from pytest_fsdp_meta.evidence import WorldFacts
from pytest_fsdp_meta.evidence.codec import to_plain
from pytest_fsdp_meta.reports.compare import compare, describe_comparison, describe_verdict
from pytest_fsdp_meta.reports.markdown import escaped, summarise_run
from pytest_fsdp_meta.reports.page.view import build_view
from pytest_fsdp_meta.reports.schema import FAILED, PASSED, SKIPS, STATUSES
from tests.conftest import Project, errors
from tests.reports.report_factory import (
    CATALOGUE,
    HOSTILE,
    LLAMA,
    check,
    finding,
    header,
    loader,
    raised,
    report,
    with_history,
)

CHECK = "no_meta_params"
KINDS = (*(status for status in STATUSES if status != "skipped"), *SKIPS)


FAILS = {
    "": [],
    "fixed": [],
    "expected": [],
    "dependent": ["regression", "any"],
    "no_longer_judged": ["any"],
    "known": ["failure", "any"],
    "failures": ["failure", "regression", "any"],
    "differing": ["regression", "any"],
}
"""The kind of a change -> the values of --fsdp-fail-on for which it fails the run, as a check that was not run does."""


def run(*records, name=LLAMA, **facts):
    """Return a run of one loader in which all checks but these have passed."""
    return report(loader(name, checks={one.check: one for one in records}), **facts)


def changes(comparison):
    """Return the kinds of changes, with the checks or the lines."""
    return {
        kind: [one if isinstance(one, str) else one.check for one in found]
        for kind, found in comparison.changes.items()
    }


@pytest.mark.parametrize(
    ("before", "now", "kind"),
    [
        ("passed", "passed", ""),
        ("passed", "failed", "failures"),
        ("passed", "not run", "no_longer_judged"),
        ("not run", "not run", ""),
        ("not run", "passed", ""),
        ("passed", "xfailed", "expected"),
        ("failed", "passed", "fixed"),
        ("failed", "xfailed", "expected"),
        ("failed", "failed", "known"),
        ("failed", "error", "failures"),
        ("passed", "not declared", "no_longer_judged"),
        ("failed", "left out", "no_longer_judged"),
        ("failed", "depends on a failed check", "dependent"),
        ("passed", "depends on a failed check", "dependent"),
        ("partly checked", "depends on a failed check", "dependent"),
        ("error", "depends on a failed check", ""),
        ("not declared", "passed", ""),
        ("by the test", "not applicable", ""),
        ("passed", "differs", "differing"),
        ("not run", "differs", "differing"),
        ("differs", "differs", ""),
        ("differs", "xfailed", "expected"),
        ("differs", "not declared", "no_longer_judged"),
        ("xfailed", "differs", "no_longer_judged"),
    ],
)
def test_the_change_of_one_check(before, now, kind):
    comparison = compare(run(check(CHECK, before)), run(check(CHECK, now)))
    assert changes(comparison) == ({kind: [CHECK]} if kind else {})
    assert [on for on in ("failure", "regression", "any") if comparison.fails(on)] == FAILS[
        "failures" if now == "not run" else kind
    ]


def test_every_failure_is_new_known_or_changed_and_nothing_else_is():
    runs = {kind: run(check(CHECK, kind)) for kind in KINDS}
    for before, now in product(KINDS, repeat=2):
        found = changes(compare(runs[before], runs[now]))
        assert len(found) <= 1, (before, now)
        assert bool({"failures", "known", "changed"} & set(found)) == (now in FAILED), (before, now)
        assert ("fixed" in found) == (before in (*FAILED, "xfailed", "differs") and now in PASSED), (before, now)


@pytest.mark.parametrize(
    ("before", "now", "kind"),
    [
        ([finding("a")], [finding("a")], "known"),
        ([finding("a", actual="off by 0.25")], [finding("a", actual="off by 3e-07")], "known"),
        ([finding("a")], [finding("a"), finding("b")], "failures"),
        ([finding("a")], [finding("b")], "failures"),
        ([finding("a"), finding("b")], [finding("a")], "changed"),
        ([finding("a", 0)], [finding("a", 1)], "changed"),
        ([finding("a", actual="transposed")], [finding("a", actual="never written")], "changed"),
    ],
)
def test_a_known_failure_has_the_same_findings_apart_from_numbers(before, now, kind):
    comparison = compare(run(check(CHECK, "failed", before)), run(check(CHECK, "failed", now)))
    assert changes(comparison) == {kind: [CHECK]}


@pytest.mark.parametrize("status", ["error", "failed"])
def test_a_known_error_has_the_same_reason_apart_from_numbers(status):
    """So has a check that --fsdp-strict fails, without findings."""
    one, same, other = (
        run(check(CHECK, status, reason=reason)) for reason in ("rank 1 hung, 30 s", "rank 0 hung, 31 s", "killed")
    )
    assert changes(compare(one, same)) == {"known": [CHECK]}
    assert changes(compare(one, other)) == {"failures": [CHECK]}


def test_checks_of_a_loader_that_crashed_before_are_counted_one_by_one_if_they_fail_now():
    ids = ("no_meta_params", "loss_parity", "grad_parity")
    now = run(*(check(one, "failed", [finding("a")]) for one in ids))
    assert compare(report(raised()), now).describe_numbers() == "3 new failures, 1 fixed", "the crash is one failure"


def test_lists_and_verdict_count_the_same():
    """An error that several checks share is one, in the headline of its list as well."""
    ids = ("loss_parity", "grad_parity")
    before = run(*(check(one, "error", reason="rank 0 hung") for one in ids))
    comparison = compare(before, run(*(check(one, "not applicable") for one in ids)))
    assert [headline for _, headline, _ in describe_comparison(comparison)] == ["no longer judged: 1"]
    assert comparison.describe_numbers() == "1 no longer judged"


def test_a_new_loader_that_fails_is_a_new_failure_and_a_removed_one_is_listed():
    before, now = run(name="t.py::old"), run(check(CHECK, "failed", name="t.py::new"), name="t.py::new")
    comparison = compare(before, now)
    assert changes(comparison) == {"failures": [CHECK], "missing": ["t.py::old"], "added": ["t.py::new"]}
    assert [change.loader for change in comparison.changes["failures"]] == ["t.py::new"]
    assert comparison.fails("any")


def test_a_loader_that_vanished_fails_a_run_that_was_asked_for_it():
    before, now = report(loader("t.py::old"), loader("t.py::kept")), run(name="t.py::kept")
    missing = compare(before, now)
    assert changes(missing) == {"missing": ["t.py::old"]}
    assert [missing.fails(on) for on in ("failure", "regression", "any")] == [False, True, True]
    assert next(describe_comparison(missing)) == (
        "missing",
        "missing loaders: 1 (removed or renamed on purpose? --fsdp-allow-missing accepts it)",
        ["t.py::old"],
    )
    allowed = compare(before, now, is_allowed=lambda name: name == "t.py::old")
    assert changes(allowed) == {"allowed": ["t.py::old"]}
    assert not any(allowed.fails(on) for on in ("failure", "regression", "any"))
    unselected = compare(before, now, lambda name: name != "t.py::old", lambda name: True)
    assert changes(unselected) == {"unselected": ["t.py::old"]}
    assert [unselected.fails(on) for on in ("failure", "regression", "any")] == [False, False, True]
    assert unselected.describe_numbers() == "1 loader not selected"


def test_a_world_that_vanished_is_missing():
    small, large = (WorldFacts(size, (("dp_shard", size),), "cpu", "gloo") for size in (2, 3))
    before = report(replace(loader(), world=small), replace(loader(), world=large))
    assert changes(compare(before, report(replace(loader(), world=small)))) == {"missing": [f"{LLAMA}, {large}"]}


def test_a_run_without_a_loader_that_it_needs_is_red_everywhere():
    gone = report(loader(), missing=("t.py::old",), exit_status=1)
    assert summarise_run(gone).startswith(f"### ❌ fsdp conformance: 1 loader missing, {len(CATALOGUE)} passed\n")
    assert build_view(gone).verdict[:2] == ("failed", "1 loader missing")
    both = report(loader(checks={CHECK: check(CHECK, "failed")}), missing=("t.py::old", "t.py::older"), exit_status=1)
    assert build_view(both).verdict[1] == "1 check failed, 2 loaders missing"


def test_a_loader_in_two_worlds_is_compared_in_each():
    small, large = (WorldFacts(size, (("dp_shard", size),), "cpu", "gloo") for size in (2, 3))
    good, failing = loader(), loader(checks={CHECK: check(CHECK, "failed", [finding("a")])})
    before = report(replace(good, world=small), replace(good, world=large))
    for first, second in ((failing, good), (good, failing)):
        now = report(replace(first, world=small), replace(second, world=large))
        (change,) = compare(before, now).changes["failures"]
        assert change.loader == f"{LLAMA}, {large if second is failing else small}"


def test_added_and_removed_checks_are_listed():
    short = header(catalogue=CATALOGUE[1:])
    assert changes(compare(run(header=short), run()))["added"] == [CATALOGUE[0].check]
    assert changes(compare(run(), run(header=short)))["removed"] == [CATALOGUE[0].check]


def test_limits_of_a_comparison_and_changes_of_the_environment_are_listed():
    before = run(complete=False, header=header(project="other", versions={"torch": "2.12.0", "gone": "1"}))
    now = run(header=header(versions={"torch": "2.13.0", "pytest-xdist": "3.8.0"}))
    comparison = compare(before, now)
    assert comparison.changes["caveats"] == (
        "the earlier run was cut off, so loaders and checks that it lacks may not be new",
        "the earlier run was of project 'other', this one is of 'my-project'",
    )
    assert comparison.changes["environment"] == (
        "torch 2.13.0, before 2.12.0",
        "pytest-xdist added (3.8.0)",
        "gone removed (1)",
    )
    assert [headline for _, headline, _ in describe_comparison(comparison)] == [
        "environment changes: 3",
        "limits of this comparison: 2",
    ]
    wider = report(loader(mesh={"dp_shard": 2}))
    assert compare(wider, run()).changes["caveats"] == (
        f"{LLAMA}: world of 4 (gloo on cpu), before world of 2 (gloo on cpu)",
    )


def test_a_loader_with_only_errors_is_one_line():
    now = run(*(check(one.check, "error", reason="rank 1 raised ValueError: no") for one in CATALOGUE))
    assert list(describe_comparison(compare(run(), now))) == [
        (
            "failures",
            "new failures: 1",
            [
                f"{LLAMA}: {CATALOGUE[0].check} (rank 1 raised ValueError: no), "
                f"{', '.join(one.check for one in CATALOGUE[1:5])} and {len(CATALOGUE) - 5} more"
            ],
        )
    ]
    assert describe_verdict(compare(run(), now)) == "1 new failure since 2026-11-20 22:30:00 (0123abc+)"
    assert describe_verdict(compare(run(), run())).startswith("no changes since")


def test_the_verdict_counts_every_kind_of_change():
    before = run(check(CHECK, "failed", [finding("a")]))
    runs = {
        "1 xfailed now": run(check(CHECK, "xfailed")),
        "1 known with other findings": run(check(CHECK, "failed", [finding("a", actual="transposed")])),
        "1 known": before,
        "1 skipped because of a failed check": run(check(CHECK, "depends on a failed check")),
        "1 fixed, 1 new": report(*run().loaders, loader("t.py::test_new")),
        "1 loader missing": replace(before, loaders=()),
    }
    assert [compare(before, now).describe_numbers() for now in runs.values()] == list(runs)


def test_long_lists_of_loaders_are_shortened():
    many = report(*(loader(f"t.py::test_{n}", checks={CHECK: check(CHECK, "failed")}) for n in range(30)))
    ((_, headline, lines), *_) = describe_comparison(compare(report(loader("t.py::x")), many))
    assert headline == "new failures: 30"
    assert len(lines) == 21
    assert lines[-1] == "... and 10 more"
    page = summarise_run(many)
    named = ", ".join(f"t.py::test_{n}" for n in range(10))
    assert f"* no_meta_params: no cause is known\n  * no_meta_params in {named} and 20 more\n" in page
    causes = run(*(check(one.check, "failed") for one in CATALOGUE[:22]))
    assert summarise_run(causes).count(": no cause is known\n") == 20
    assert "\n* and 2 more\n" in summarise_run(causes)


def rendered(page: str) -> ElementTree.Element:
    """Render Markdown as GitHub does, with tables and HTML."""
    return ElementTree.fromstring(
        f"<page>{MarkdownIt('commonmark', {'html': True}).enable('table').render(page)}</page>"
    )


@pytest.mark.parametrize(
    "name", [*HOSTILE, "a|b`c`*d*_e_[f](g)~~h~~", "@someone #1 https://example.org", "\\|", "_a_ __b__ c_d"]
)
def test_names_are_escaped_in_markdown(name):
    failed = check(CHECK, "failed", [finding(name, actual=name, expected=name)], name=name)
    now, before = run(failed, name=name, header=header(project=name)), run(name=name)
    page = summarise_run(now, compare(before, now))
    html = rendered(page)
    tags = {one.tag for one in html.iter()}
    assert tags <= {"page", "h3", "table", "thead", "tbody", "tr", "th", "td", "p", "strong", "ul", "li"}
    assert len(html.findall(".//tbody/tr/td")) == 10, "one row of ten cells"
    assert "@" not in page
    assert "://" not in page
    for _, _, lines in describe_comparison(compare(before, now)):
        assert all(line.isprintable() for line in lines)


def test_the_summary_has_each_failure_once_with_its_cause_and_its_start():
    old, new = (
        finding("norm.weight", cause="nothing wrote to it", remedy="load it", origin="norm"),
        finding("head.bias"),
    )
    partly = check("grad_parity", "partly checked", reason="not checked: 1 tensor")
    before = run(check(CHECK, "failed", [old]), header=header(started="2026-11-19T22:30:00Z"))
    now = with_history(run(check(CHECK, "failed", [old, new]), partly), [before])
    page = summarise_run(now, compare(before, now))
    moment = "2026-11-19 22:30:00 (0123abc&#43;)"
    mismatch = "ranks 0-3: wrong, but should be right"
    assert page.partition("**Failed**\n\n")[2].partition("**Compared")[0].splitlines() == [
        f"* **norm.weight**, likely cause: nothing wrote to it (broken since {moment})",
        "  * where it starts: norm",
        "  * remedy: load it",
        f"  * {CHECK} in {LLAMA}: norm.weight, {mismatch}",
        f"* **head.bias**, {CHECK}: no cause is known (new since the run of {moment})",
        f"  * {CHECK} in {LLAMA}: head.bias, {mismatch}",
        "",
        "**Partly checked**",
        "",
        f"* grad_parity in {LLAMA}: not checked: 1 tensor",
        "",
    ]
    assert page.count("norm.weight, ranks") == page.count("head.bias, ranks") == 1


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("t.py::test_a[untied-no_meta]", "t.py::test_a[untied-no_meta]"),
        ("not checked; layers.{0..3}.w", "not checked; layers.{0..3}.w"),
        ("the module's __init__", "the module's \\_\\_init\\_\\_"),
        ("t.py::a[b](c)", "t.py::a[b\\](c)"),
        ("[x] done", "\\[x] done"),
        ("a|b & <c>", "a&#124;b &#38; &#60;c&#62;"),
    ],
)
def test_only_what_markdown_reads_is_escaped(name, source):
    assert escaped(name) == source
    assert "".join(rendered(f"* {escaped(name)}\n").find(".//li").itertext()) == name


def test_the_summary_of_a_good_run_and_of_one_cut_off():
    good = rendered(summarise_run(run()))
    assert good.findtext("h3") == f"✅ fsdp conformance: {len(CATALOGUE)} passed"
    assert [cell.text for cell in good.findall(".//td")][:4] == [
        LLAMA,
        "world of 4 (gloo on cpu)",
        str(len(CATALOGUE)),
        "0",
    ]
    others = summarise_run(run(exit_status=1))
    assert others.startswith(f"### ⚠️ fsdp conformance: {len(CATALOGUE)} passed, pytest exited with 1\n")
    cut = summarise_run(report(complete=False), problem="no comparison: | <b>")
    assert cut.startswith("### ⚠️")
    assert "The run was cut off" in cut
    assert "no comparison: &#124; &#60;b&#62;" in cut


def test_a_report_of_an_unknown_schema_is_reported_and_excuses_no_failure(project: Project) -> None:
    project.write("old/report.json", '{"schema": 99, "complete": true}')
    project.loaders("@fsdp_conformance(only=['nothing_left_unsharded'])\ndef test_one(fsdp): return build()\n")
    result = project.run("--fsdp-report=report", "--fsdp-compare=old", "--fsdp-fail-on=regression")
    assert result.ret == 1
    assert (
        "no comparison: old/report.json: a report of schema 99, but this version reads schema 2; "
        "upgrade pytest-fsdp-meta, or write the report again with --fsdp-report"
    ) in result.outlines
    assert "no comparison" in (project.path / "report" / "summary.md").read_text()


SEVERAL = "(expected an existing report.json, a folder of reports, or several, separated by commas)"


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--fsdp-compare=cut", "--fsdp-compare: cut/report.json: not JSON, or truncated: "),
        ("--fsdp-compare=odd/report.json", "--fsdp-compare: odd/report.json: Report.header: 3, but should be dict"),
        ("--fsdp-compare=cut/report.json,cut", "--fsdp-compare: cut/report.json: not JSON, or truncated: "),
        ("--fsdp-compare=nowhere", f"--fsdp-compare: invalid value 'nowhere' {SEVERAL}"),
        ("--fsdp-compare=cut,nowhere", f"--fsdp-compare: invalid value 'cut,nowhere' {SEVERAL}"),
        ("--fsdp-compare=,", f"--fsdp-compare: invalid value ',' {SEVERAL}"),
        (
            "--fsdp-fail-on=regression",
            "--fsdp-fail-on=regression requires an earlier run: --fsdp-compare=OLD/report.json",
        ),
        ("--fsdp-fail-on=bad", "--fsdp-fail-on: invalid value 'bad' (choose failure, regression or any)"),
    ],
)
def test_invalid_options_are_refused_before_anything_runs(project: Project, option, message) -> None:
    project.write("cut/report.json", '{"schema": 2, "header": {')
    project.write("odd/report.json", '{"schema": 2, "header": 3}')
    (line,) = errors(project.collect(option))
    assert line.startswith(message)


def test_a_name_of_a_folder_may_have_a_comma(project: Project) -> None:
    project.write("a, b/report.json", json.dumps(to_plain(run())))
    found = project.collect("--collect-only", "--fsdp-compare=a, b/report.json")
    assert found.ret == pytest.ExitCode.NO_TESTS_COLLECTED
