"""Failures grouped by cause, their number in words, and what a summary says of limits."""

from __future__ import annotations

from dataclasses import replace

from pytest_fsdp_meta.reports import story
from pytest_fsdp_meta.reports.compare import compare, describe_comparison
from pytest_fsdp_meta.reports.page.rendering import render
from pytest_fsdp_meta.reports.page.view import build_view
from pytest_fsdp_meta.reports.schema import LoaderRecord
from pytest_fsdp_meta.reports.story import CRASH, ERROR, FINDING, UNEXPECTED_PASS, stories_of
from pytest_fsdp_meta.reports.summary import summarise
from pytest_fsdp_meta.reports.totals import describe_totals
from tests.checks.test_memory import WHOLE, WIDTH, stored
from tests.reports.many_loaders import LOST, nightly
from tests.reports.report_factory import check, finding, loader, raised, report

ROTARY = {"cause": "a non-persistent buffer", "remedy": "recompute it"}


def named(name: str, **checks: object) -> LoaderRecord:
    return loader(name, checks={id_: check(id_, *kind, name=name) for id_, kind in checks.items()})  # type: ignore[misc]


def shape(*loaders: LoaderRecord) -> list[tuple[str, str, list[tuple[str, int]]]]:
    """Return kind, cause, and the loaders with their number of checks."""
    return [
        (one.kind, one.cause, [(place.loader.loader, len(place.checks)) for place in one.places])
        for one in stories_of(loaders)
    ]


def test_loaders_with_the_same_finding_share_a_cause():
    found = [finding("scale", **ROTARY), finding("other.scale", **ROTARY)]
    failed = {"no_uninitialized_memory": ("failed", found)}
    assert shape(named("a", **failed), named("b", **failed), named("c")) == [
        (FINDING, ROTARY["cause"], [("a", 1), ("b", 1)])
    ]


def test_without_a_cause_each_check_is_one_of_its_own():
    failed = {id_: ("failed", [finding("scale")]) for id_ in ("no_meta_params", "loss_parity")}
    stories = stories_of([named("a", **failed), named("b", **failed)])
    assert [(one.headline, len(one.places)) for one in stories] == [
        ("no_meta_params: no cause is known", 2),
        ("loss_parity: no cause is known", 2),
    ]
    lines = [line for line, _ in describe_totals([named("a", **failed)])]
    assert "1. no_meta_params: no cause is known" in lines
    assert not any("likely cause" in line for line in lines)


def test_crashes_come_first_and_differ_only_in_numbers():
    crash = [replace(raised(), loader=name, error=f"rank 1 waited {time} s") for name, time in (("a", 5), ("b", 12))]
    failed = named("c", no_meta_params=("failed", [finding("scale", **ROTARY)]))
    total = len(crash[0].checks)
    assert shape(failed, *crash) == [
        (CRASH, "rank 1 waited 5 s", [("a", total), ("b", total)]),
        (FINDING, ROTARY["cause"], [("c", 1)]),
    ]


def test_an_error_of_several_checks_is_one():
    lost = {one: check(one, "error", reason="rank 0 hangs") for one in ("loss_parity", "grad_parity")}
    one = loader(checks=lost)
    assert shape(one) == [(ERROR, "rank 0 hangs", [(one.loader, 2)])]
    assert story.describe_failures([one]) == "1 error"


def test_an_unexpected_pass_reads_the_same_everywhere():
    passed = check("dcp_reshards", "xpassed", reason="issue 7")
    one = loader(checks={"dcp_reshards": passed})
    sentence = "dcp_reshards passes, but xfail expects it to fail (issue 7)"
    assert shape(one) == [(UNEXPECTED_PASS, "issue 7", [(one.loader, 1)])]
    assert stories_of([one])[0].headline == sentence
    assert f"1. unexpected pass: {sentence}" in [line for line, _ in describe_totals([one])]
    assert f": {sentence}" in str(list(describe_comparison(compare(report(loader()), report(one)))))
    assert sentence in render(report(one))


def test_a_crash_counts_as_one_loader():
    crashed, failed = raised(), named("b", loss_parity=("failed", [finding(None)]))
    assert story.describe_failures([crashed, failed]) == "1 loader crashed, 1 check failed"
    assert story.describe_failures([loader()]) == ""


def test_page_and_summary_agree():
    run = nightly()
    failures = "3 loaders crashed, 6 checks failed, 1 unexpected pass"
    assert story.describe_result(run).startswith(f"{failures}, ")
    assert build_view(run).verdict[1] == failures
    assert [len(one.places) for one in stories_of(run.loaders) if one.cause == LOST] == [3]


def test_a_summary_has_the_limits_of_losses_and_memory():
    summary = summarise(stored(4))
    assert summary.losses is not None
    assert summary.losses.tolerance == (1e-5,) * len(summary.losses.reference)
    largest = 4096 * 16 * WIDTH
    assert (summary.model_bytes, summary.load_budget) == (WHOLE, 3 * WHOLE // 4 + 3 * largest)
    untrained = replace(stored(4), training=None)
    assert summarise(untrained).losses is None
