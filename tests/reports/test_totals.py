"""The ledger of a run, and what the terminal says of it at the end."""

from __future__ import annotations

from dataclasses import replace

from pytest_fsdp_meta.catalogue import built_in
from pytest_fsdp_meta.evidence import WorldFacts
from pytest_fsdp_meta.reports.run_records import Entry, Loaded, RunRecords
from pytest_fsdp_meta.reports.schema import STATUSES, WORDS, CheckRecord, FindingRecord, LoaderRecord
from pytest_fsdp_meta.reports.totals import describe_totals, nothing_judged

WORLD = WorldFacts(2, (("dp_shard", 2),), "cpu", "gloo")
CATALOGUE = built_in()
IDS = CATALOGUE.ids()
FOUND = FindingRecord("a.weight", (0, 1), "on meta", "on a device", cause="nobody loads it", remedy="load it")


def entry(check: str, status: str = "passed", loaded: Loaded | None = None) -> Entry:
    return Entry(
        "t.py::test_x",
        "t.py::test_x",
        WORLD,
        tuple(IDS[:3]),
        CheckRecord(check, status, f"t.py::test_x[{check}]"),
        loaded,
    )


def of_loader(*statuses: str, name: str = "t.py::test_x") -> LoaderRecord:
    return LoaderRecord(name, WORLD, tuple(CheckRecord(id, status) for id, status in zip(IDS, statuses, strict=False)))


def planned(*checks: str) -> RunRecords:
    ledger = RunRecords()
    for check in checks:
        ledger.plan("t.py::test_x", check, f"t.py::test_x[{check}]", world=WORLD)
    return ledger


def statuses(ledger: RunRecords) -> dict[str, str]:
    (loader,) = ledger.loaders(CATALOGUE)
    return {check.check: check.status for check in loader.checks}


def test_every_check_of_the_catalogue_has_a_status() -> None:
    ledger = planned(IDS[0], IDS[1])
    ledger.enter(entry(IDS[0]))
    assert statuses(ledger) == {
        IDS[0]: "passed",
        IDS[1]: "not run",
        IDS[2]: "unselected",
        **dict.fromkeys(IDS[3:], "left out"),
    }


def test_what_a_later_phase_says_replaces_what_an_earlier_one_said_and_time_adds_up() -> None:
    ledger = planned(IDS[0])
    ledger.spend(f"t.py::test_x[{IDS[0]}]", 1.5)
    ledger.enter(entry(IDS[0], loaded=Loaded(seconds={"loading": 1.0})))
    ledger.spend(f"t.py::test_x[{IDS[0]}]", 0.5)
    ledger.enter(entry(IDS[0], "error"))
    (loader,) = ledger.loaders(CATALOGUE)
    assert (loader.checks[0].status, loader.checks[0].seconds) == ("error", 2.0)
    assert loader.seconds == {"loading": 1.0}


def test_an_item_whose_process_crashed_is_an_error() -> None:
    ledger = planned(IDS[0], IDS[1])
    ledger.crashed(f"t.py::test_x[{IDS[1]}]", "worker 'gw0' crashed")
    (loader,) = ledger.loaders(CATALOGUE)
    assert (loader.checks[1].status, loader.checks[1].reason) == ("error", "worker 'gw0' crashed")


def test_a_test_that_is_no_loader_though_it_is_called_so() -> None:
    ledger = planned(IDS[0], IDS[1])
    ledger.strike(f"t.py::test_x[{IDS[0]}]")
    ledger.spend(f"t.py::test_x[{IDS[1]}]", 1.0)
    assert ledger.loaders(CATALOGUE) == ()


def test_each_status_has_words() -> None:
    assert set(WORDS) == set(STATUSES)


def test_a_line_for_each_loader_and_an_account_of_all() -> None:
    clean = replace(of_loader("passed", "undeclared"), seconds={"loading": 0.3, "training": 1.2, "values": 0.01})
    clean = replace(clean, checks=(replace(clean.checks[0], seconds=2.0), clean.checks[1]))
    broken = of_loader("failed", "blocked", name="t.py::test_y")
    broken = replace(broken, checks=(replace(broken.checks[0], findings=(FOUND, FOUND), seconds=2.0), broken.checks[1]))
    assert list(describe_totals([clean, broken])) == [
        (
            "t.py::test_x, world of 2 (gloo on cpu): 1 passed, 1 not declared; 2.0 s (training 1.2, loading 0.3)",
            {"green": True},
        ),
        ("t.py::test_y, world of 2 (gloo on cpu): 1 failed, 1 blocked by what failed; 2.0 s", {"red": True}),
        ("", {}),
        ("1. likely cause: nobody loads it", {"bold": True}),
        ("   remedy: load it", {}),
        (
            f"   {IDS[0]} in t.py::test_y: a.weight, ranks 0, 1: on meta, but should be on a device and 1 more",
            {},
        ),
        ("", {}),
        ("4 of 4 checks accounted for in 2 runs of loaders", {"red": True}),
    ]


def test_what_is_not_accounted_for_is_said() -> None:
    told = list(describe_totals([of_loader("passed", "unselected", "not run", "left out")]))
    assert told[-1] == ("2 of 4 checks accounted for (1 not selected, 1 not run)", {"red": True})
    told = list(describe_totals([of_loader("passed", "unselected")]))
    assert told[-1] == ("1 of 2 checks accounted for (1 not selected)", {"green": True})


def test_nothing_judged_is_never_a_pass() -> None:
    told = list(describe_totals([of_loader("undeclared", "left out")]))
    assert told[-1] == ("2 of 2 checks accounted for; nothing was judged, so nothing has passed", {"red": True})


def test_when_nothing_judged_ends_the_run_as_bad() -> None:
    assert not nothing_judged([], others_passed=False)
    assert not nothing_judged([of_loader("skipped", "passed")], others_passed=False)
    assert not nothing_judged([of_loader("skipped", "xfailed")], others_passed=False)
    assert nothing_judged([of_loader("skipped", "left out")], others_passed=False)
    assert not nothing_judged([of_loader("skipped", "left out")], others_passed=True)
    assert nothing_judged([of_loader("skipped", "undeclared")], others_passed=True)


def test_of_many_causes_and_many_errors_both_are_told_and_how_many_are_left() -> None:
    broken = [
        replace(of_loader("failed"), checks=(CheckRecord(IDS[0], "failed", findings=(replace(FOUND, cause=f"c{n}"),)),))
        for n in range(25)
    ]
    errors = [
        replace(of_loader("error"), checks=(CheckRecord(IDS[0], "error", reason=f"GPU {n} is gone"),))
        for n in range(30)
    ]
    told = [line for line, _ in describe_totals([*broken, *errors])]
    assert sum("likely cause: " in line for line in told) == sum("could not be judged: GPU" in line for line in told)
    assert "... and 5 causes more" in told
    assert "26. could not be judged: GPU 0 is gone" in told
    assert "... and 10 reasons more" in told


def test_an_error_is_told_once_with_its_reason() -> None:
    loader = of_loader("error", "error")
    reason = "ranks 0, 1 raised ValueError: no file"
    loader = replace(loader, checks=tuple(replace(check, reason=reason) for check in loader.checks))
    told = [line for line, _ in describe_totals([loader])]
    assert told[1:] == [
        "",
        f"1. could not be judged: {reason}",
        f"   {IDS[0]} and 1 more in t.py::test_x",
        "",
        "2 of 2 checks accounted for; nothing was judged, so nothing has passed",
    ]
