"""A run beside an earlier one: on records made by hand, and on two real runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from markdown_it import MarkdownIt

from pytest_fsdp_meta.evidence import WorldFacts
from pytest_fsdp_meta.reports.badge import COLORS, badge, badge_json, badge_svg
from pytest_fsdp_meta.reports.compare import compare, counts, describe_comparison, verdict
from pytest_fsdp_meta.reports.io import write_whole
from pytest_fsdp_meta.reports.markdown import summarise_run
from pytest_fsdp_meta.reports.schema import BROKEN, KEPT, STATUSES, Curves
from tests.conftest import Project, errors
from tests.reports.report_factory import CATALOGUE, HOSTILE, LLAMA, check, finding, header, loader, report

CHECK = "no_meta_params"
KINDS = ("failures", "blocked", "unjudged", "expected", "fixed", "changed", "known")


def run(*records, name=LLAMA, **facts):
    """A run of one loader with these checks, the others passed."""
    return report(loader(name, checks={one.check: one for one in records}), **facts)


def kinds(comparison):
    """What became of the checks, as far as anything did."""
    return {kind: [one.check for one in getattr(comparison, kind)] for kind in KINDS if getattr(comparison, kind)}


@pytest.mark.parametrize(
    ("before", "now", "kind"),
    [
        ("passed", "passed", ""),
        ("passed", "failed", "failures"),
        ("passed", "error", "failures"),
        ("passed", "not run", "unjudged"),
        ("not run", "not run", ""),
        ("not run", "error", "failures"),
        ("not run", "passed", ""),
        ("xfailed", "xpassed", "failures"),
        ("undeclared", "failed", "failures"),
        ("blocked", "failed", "failures"),
        ("passed", "xfailed", "expected"),
        ("xfailed", "passed", "fixed"),
        ("failed", "passed", "fixed"),
        ("failed", "xfailed", "expected"),
        ("error", "passed", "fixed"),
        ("failed", "failed", "known"),
        ("failed", "error", "failures"),
        ("passed", "unselected", "unjudged"),
        ("passed", "undeclared", "unjudged"),
        ("failed", "left out", "unjudged"),
        ("failed", "blocked", "blocked"),
        ("passed", "blocked", "blocked"),
        ("undeclared", "passed", ""),
        ("skipped", "nothing", ""),
    ],
)
def test_what_became_of_a_check(before, now, kind):
    comparison = compare(run(check(CHECK, before)), run(check(CHECK, now)))
    assert kinds(comparison) == ({kind: [CHECK]} if kind else {})


@pytest.mark.parametrize("before", STATUSES)
@pytest.mark.parametrize("now", STATUSES)
def test_a_failure_is_new_known_or_changed_and_a_kept_promise_is_none_of_them(before, now):
    found = kinds(compare(run(check(CHECK, before)), run(check(CHECK, now))))
    assert len(found) <= 1
    assert bool({"failures", "known", "changed"} & set(found)) == (now in BROKEN)
    assert ("fixed" in found) == (before in (*BROKEN, "xfailed") and now in KEPT)


@pytest.mark.parametrize(
    ("before", "now", "kind"),
    [
        ([finding("a")], [finding("a")], "known"),
        ([finding("a", actual="off by 0.25")], [finding("a", actual="off by 3e-07")], "known"),
        ([finding("a")], [finding("a"), finding("b")], "failures"),
        ([finding("a")], [finding("b")], "failures"),
        ([finding("a"), finding("b")], [finding("a")], "changed"),
        ([finding("a", 0)], [finding("a", 1)], "changed"),
        ([finding("a", actual="transposed")], [finding("a", actual="uninitialised")], "changed"),
    ],
)
def test_a_failure_is_known_by_its_findings_and_not_by_their_numbers(before, now, kind):
    comparison = compare(run(check(CHECK, "failed", before)), run(check(CHECK, "failed", now)))
    assert kinds(comparison) == {kind: [CHECK]}


def test_an_error_is_known_by_its_reason_and_not_by_its_numbers():
    one, same, other = (
        run(check(CHECK, "error", reason=reason)) for reason in ("rank 1 hung, 30 s", "rank 0 hung, 31 s", "killed")
    )
    assert kinds(compare(one, same)) == {"known": [CHECK]}
    assert kinds(compare(one, other)) == {"failures": [CHECK]}


def test_a_loader_that_is_new_and_broken_is_a_new_failure_and_one_that_is_gone_is_told():
    before, now = run(name="t.py::old"), run(check(CHECK, "failed", name="t.py::new"), name="t.py::new")
    comparison = compare(before, now)
    assert (comparison.came, comparison.went) == (("t.py::new",), ("t.py::old",))
    assert [change.loader for change in comparison.failures] == ["t.py::new"]
    assert not comparison.unjudged, "told once"
    assert comparison.fails("any")


def test_a_loader_that_is_there_in_two_worlds_is_compared_in_each():
    small, large = (WorldFacts(size, (("dp_shard", size),), "cpu", "gloo") for size in (2, 3))
    good, broken = loader(), loader(checks={CHECK: check(CHECK, "failed", [finding("a")])})
    before = report(replace(good, world=small), replace(good, world=large))
    for first, second in ((broken, good), (good, broken)):
        now = report(replace(first, world=small), replace(second, world=large))
        (change,) = compare(before, now).failures
        assert change.loader == f"{LLAMA}, {large if second is broken else small}"


def test_checks_that_came_and_went_are_told():
    short = header(catalogue=CATALOGUE[1:])
    assert compare(run(header=short), run()).came == (CATALOGUE[0].check,)
    assert compare(run(), run(header=short)).went == (CATALOGUE[0].check,)


@pytest.mark.parametrize(
    ("before", "now", "told"), [(1.0, 1.9, False), (1.0, 2.1, True), (10.0, 14.0, False), (10.0, 16.0, True)]
)
def test_a_slower_load_is_told_beyond_what_runs_differ_by(before, now, told):
    then, today = ((replace(loader(), seconds={"loading": seconds}),) for seconds in (before, now))
    assert bool(compare(report(*then), report(*today)).slower) == told
    patched = header(versions={**header().versions, "system": "Linux-6.2"})
    assert bool(compare(report(*then), report(*today, header=patched)).slower) == told
    other = header(hardware={**header().hardware, "cpu": "Intel Xeon"})
    assert not compare(report(*then), report(*today, header=other)).slower
    elsewhere = (replace(today[0], world=WorldFacts(8, (("dp_shard", 8),), "cpu", "gloo")),)
    assert not compare(report(*then), report(*elsewhere)).slower


@pytest.mark.parametrize(
    ("before", "now", "told"),
    [(0.0, 5e-7, False), (0.0, 5e-6, True), (2e-6, 1e-5, False), (2e-6, 3e-5, True), (1e-5, float("nan"), False)],
)
def test_losses_that_drift_from_the_reference_are_told(before, now, told):
    def apart(distance):
        one = loader()
        return report(replace(one, summary=replace(one.summary, losses=Curves((1.0, 1 + distance), ((1.0,),), (1, 1)))))

    assert bool(compare(apart(before), apart(now)).drifted) == told


def test_what_makes_runs_less_than_comparable_is_said():
    before = run(complete=False, header=header(project="other", versions={"torch": "2.12.0", "gone": "1"}))
    now = run(header=header(versions={"torch": "2.13.0"}, hardware={"cpu": "Intel Xeon"}))
    assert compare(before, now).cautions == (
        "the earlier run was cut off: what it does not have may have been there",
        "the earlier run was of the project 'other', this one is of 'my-project'",
        "the earlier run was on other hardware, so times are not compared",
        "torch: 2.12.0 then, 2.13.0 now",
        "gone: 1 then, none now",
    )
    wider = report(loader(mesh={"dp_shard": 2}))
    assert compare(wider, run()).cautions == (f"{LLAMA}: world of 2 (gloo on cpu) then, world of 4 (gloo on cpu) now",)


@pytest.mark.parametrize(
    ("before", "now", "fails"),
    [
        ("passed", "passed", {"failure": False, "regression": False, "any": False}),
        ("passed", "failed", {"failure": True, "regression": True, "any": True}),
        ("failed", "failed", {"failure": True, "regression": False, "any": True}),
        ("failed", "passed", {"failure": False, "regression": False, "any": False}),
        ("passed", "undeclared", {"failure": False, "regression": False, "any": True}),
    ],
)
def test_what_fails_a_run(before, now, fails):
    comparison = compare(run(check(CHECK, before)), run(check(CHECK, now)))
    assert {on: comparison.fails(on) for on in fails} == fails


def test_a_loader_of_which_all_is_broken_is_told_in_one_line():
    now = run(*(check(one.check, "error", reason="rank 1 raised ValueError: no") for one in CATALOGUE))
    told = list(describe_comparison(compare(run(), now)))
    assert told == [
        (
            "worse",
            f"new failures: {len(CATALOGUE)}",
            [
                f"{LLAMA}: {CATALOGUE[0].check} (rank 1 raised ValueError: no), "
                f"{', '.join(one.check for one in CATALOGUE[1:5])} and {len(CATALOGUE) - 5} more"
            ],
        )
    ]
    assert verdict(compare(run(), now)) == f"{len(CATALOGUE)} new failures since 2026-11-20T22:30:00Z (0123abc+)"
    assert verdict(compare(run(), run())).startswith("nothing has changed since")


def test_the_verdict_counts_every_kind_of_change():
    before = run(check(CHECK, "failed", [finding("a")]))
    told = {
        "1 failing as expected now": run(check(CHECK, "xfailed")),
        "1 with other findings than before": run(check(CHECK, "failed", [finding("a", actual="transposed")])),
        "1 known": before,
        "1 not judged because of what fails": run(check(CHECK, "blocked")),
        "1 fixed, 1 new": report(*run().loaders, loader("t.py::test_new")),
        "1 not in this run": replace(before, loaders=()),
    }
    assert [counts(compare(before, now)) for now in told.values()] == list(told)


def test_many_loaders_are_cut_off_and_counted():
    many = report(*(loader(f"t.py::test_{n}", checks={CHECK: check(CHECK, "failed")}) for n in range(30)))
    ((_, headline, lines), *_) = describe_comparison(compare(report(loader("t.py::x")), many))
    assert headline == "new failures: 30"
    assert len(lines) == 21
    assert lines[-1] == "... and 10 more"
    page = summarise_run(many)
    assert page.count("* no_meta_params") == 20
    assert "* and 10 more" in page


def rendered(page: str) -> ElementTree.Element:
    """As GitHub renders it, tables and HTML included."""
    return ElementTree.fromstring(
        f"<page>{MarkdownIt('commonmark', {'html': True}).enable('table').render(page)}</page>"
    )


@pytest.mark.parametrize(
    "name", [*HOSTILE, "a|b`c`*d*_e_[f](g)~~h~~", "@someone #1 https://example.org", "\\|", "_a_ __b__ c_d"]
)
def test_names_are_no_markdown(name):
    broken = check(CHECK, "failed", [finding(name, actual=name, expected=name)], name=name)
    now, before = run(broken, name=name, header=header(project=name)), run(name=name)
    page = summarise_run(now, compare(before, now))
    html = rendered(page)
    tags = {one.tag for one in html.iter()}
    assert tags <= {"page", "h3", "table", "thead", "tbody", "tr", "th", "td", "p", "strong", "ul", "li"}
    assert len(html.findall(".//tbody/tr/td")) == 7, "one row of seven cells"
    assert "@" not in page
    assert "://" not in page
    for _, _, lines in describe_comparison(compare(before, now)):
        assert all(line.isprintable() for line in lines)


def test_the_summary_of_a_good_run_and_of_one_cut_off():
    good = rendered(summarise_run(run()))
    assert good.findtext("h3") == f"✅ fsdp conformance: {len(CATALOGUE)} kept"
    assert [cell.text for cell in good.findall(".//td")][:4] == [
        LLAMA,
        "world of 4 (gloo on cpu)",
        str(len(CATALOGUE)),
        "0",
    ]
    cut = summarise_run(report(complete=False), told="nothing is compared: | <b>")
    assert cut.startswith("### ⚠️")
    assert "The run was cut off" in cut
    assert "nothing is compared: &#124; &#60;b&#62;" in cut


@pytest.mark.parametrize(
    ("made", "message", "color"),
    [
        (run(), f"{len(CATALOGUE)} kept", "brightgreen"),
        (run(check(CHECK, "failed")), f"{len(CATALOGUE) - 1} kept, 1 broken", "red"),
        (run(complete=False), f"cut off, {len(CATALOGUE)} kept", "lightgrey"),
        (report(loaders=()), "nothing judged", "lightgrey"),
    ],
    ids=["good", "broken", "cut off", "empty"],
)
def test_the_badge(made, message, color):
    assert badge(made) == {
        "schemaVersion": 1,
        "label": "fsdp conformance",
        "message": message,
        "color": color,
        "isError": color == "red",
    }
    assert json.loads(badge_json(made)) == badge(made)
    picture = ElementTree.fromstring(badge_svg(made))
    assert picture.findtext("{*}title") == f"fsdp conformance: {message}"
    assert [text.text for text in picture.iter("{http://www.w3.org/2000/svg}text")] == ["fsdp conformance", message]
    assert picture.find("{*}path").get("fill") == COLORS[color]


LOADERS = """
@fsdp_conformance(only=["no_meta_params", "params_equal_reference", "requires_grad_matches_reference"])
def test_one(fsdp):
    subject = load(fsdp, reference=build)
    with torch.no_grad():
        subject.model.weight.to_local().add_({weight})
    subject.model.bias.requires_grad_({grad})
    return subject

def test_other():
    assert {other}
"""


def nightly(project: Project, *options: str, weight: int = 0, grad: bool = True, other: bool = True):
    project.loaders(LOADERS.format(weight=weight, grad=grad, other=other))
    return project.run("--fsdp-report=report", *options)


def compared(result: pytest.RunResult) -> list[str]:
    lines = result.outlines
    return lines[next(n for n, line in enumerate(lines) if "fsdp conformance, compared" in line) + 1 : -1]


def test_nights_one_after_another(project: Project) -> None:
    regression = ("--fsdp-compare=report", "--fsdp-fail-on=regression")
    assert nightly(project, weight=1).ret == 1
    known = nightly(project, *regression, weight=1)
    assert known.ret == 0, "a known failure is forgiven"
    assert any(line.startswith("1 known since ") for line in compared(known))
    assert "1 new failure" not in known.stdout.str()
    assert nightly(project, "--fsdp-compare=report", weight=1).ret == 1, "unless nobody said so"
    assert nightly(project, *regression, weight=1, other=False).ret == 1, "no test that is no loader is forgiven"
    stopped = nightly(project, *regression, "-x", weight=1)
    assert stopped.ret == 1, "nobody knows of the tests that have not run"
    worse = nightly(project, *regression, weight=1, grad=False)
    assert worse.ret == 1
    told = compared(worse)
    assert told[:2] == [
        "new failures: 1",
        "  test_it.py::test_one: requires_grad_matches_reference (bias, ranks 0, 1: frozen, but should be trainable)",
    ]
    fixed = nightly(project, *regression)
    assert fixed.ret == 0
    assert "fixed: 2" in compared(fixed)
    folder = project.path / "report"
    assert "2 fixed since" in (folder / "summary.md").read_text()
    assert json.loads((folder / "badge.json").read_text())["message"] == "3 kept"
    assert json.loads((folder / "report.json").read_text())["exit_status"] == 0
    assert "3 kept" in (folder / "badge.svg").read_text()


def test_a_report_of_another_schema_is_told_and_forgives_nothing(project: Project) -> None:
    project.write("old/report.json", '{"schema": 99, "complete": true}')
    result = nightly(project, "--fsdp-compare=old", "--fsdp-fail-on=regression", weight=1)
    assert result.ret == 1
    (told,) = compared(result)[:1]
    assert told == "nothing is compared: old/report.json: a report of schema 99, but should be 1"
    assert "nothing is compared" in (project.path / "report" / "summary.md").read_text()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"schema": 1, "header": {', "report.json: no JSON, or cut off: "),
        ('{"schema": 1, "header": 3}', "report.json: Report.header: 3, but should be dict"),
        ("\x00\x01", "report.json: no JSON, or cut off: "),
    ],
)
def test_what_is_no_report_is_told_before_anything_runs(project: Project, text, told) -> None:
    write_whole(Path(project.path) / "report.json", text.encode())
    (line,) = errors(project.collect("--fsdp-compare=report.json"))
    assert line.startswith(f"--fsdp-compare: {told}")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--fsdp-compare=nowhere"], "invalid value 'nowhere' (expected an existing report.json, or its folder)"),
        (["--fsdp-fail-on=regression"], "requires an earlier run: --fsdp-compare=OLD/report.json"),
        (["--fsdp-fail-on=bad"], "invalid value 'bad' (choose failure, regression or any)"),
    ],
)
def test_options_that_mean_nothing_are_refused(project: Project, options, told) -> None:
    (line,) = errors(project.collect(*options))
    assert told in line
