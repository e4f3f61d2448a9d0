"""RunRecords, and the totals in the terminal at the end of a run."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from pytest_fsdp_meta import Subject
from pytest_fsdp_meta.catalogue import built_in
from pytest_fsdp_meta.evidence import Evidence, OptimizerFacts, RankInventory, WorldFacts
from pytest_fsdp_meta.reports.run_records import ItemContext, RunRecords
from pytest_fsdp_meta.reports.schema import SKIPS, CheckRecord, FindingRecord, LoaderRecord, describe_counts
from pytest_fsdp_meta.reports.summary import notes_on
from pytest_fsdp_meta.reports.totals import (
    CHECKS_NAMED_FIRST,
    FIELDS_TO_SUGGEST,
    describe_totals,
    nothing_judged,
)
from tests.checks.evidence_factory import (
    PARAMETERS,
    change,
    declare,
    from_checkpoint,
    healthy,
    parameter,
    undeclared,
)

WORLD = WorldFacts(2, (("dp_shard", 2),), "cpu", "gloo")
CATALOGUE = built_in()
IDS = CATALOGUE.ids()
FOUND = FindingRecord("a.weight", (0, 1), "on meta", "on a device", cause="nobody loads it", remedy="load it")


def item(check: str, status: str = "passed", **facts: object) -> ItemContext:
    record = CheckRecord(check, status, f"t.py::test_x[{check}]")
    loader = LoaderRecord("t.py::test_x", WORLD, (), **facts)  # type: ignore[arg-type]
    return ItemContext("t.py::test_x", loader, record, tuple(IDS[:3]), describes_loader=bool(facts))


def record(check: str, kind: str) -> CheckRecord:
    return CheckRecord(check, "skipped", skip=kind) if kind in SKIPS else CheckRecord(check, kind)


def loader_with(*kinds: str, name: str = "t.py::test_x") -> LoaderRecord:
    return LoaderRecord(name, WORLD, tuple(record(id, kind) for id, kind in zip(IDS, kinds, strict=False)))


def planned(*checks: str) -> RunRecords:
    records = RunRecords()
    for check in checks:
        records.plan(replace(item(check, "not run"), offered=None))
    return records


def kinds(records: RunRecords) -> dict[str, str]:
    (loader,) = records.loaders(CATALOGUE)
    return {check.check: check.kind for check in loader.checks}


def test_every_check_of_the_catalogue_has_a_status() -> None:
    records = planned(IDS[0], IDS[1])
    records.add(item(IDS[0]))
    assert kinds(records) == {
        IDS[0]: "passed",
        IDS[1]: "not run",
        IDS[2]: "not selected",
        **dict.fromkeys(CATALOGUE.ids_for(simulated=False)[3:], "left out"),
    }


def test_a_later_phase_replaces_the_status_and_adds_its_time() -> None:
    records = planned(IDS[0])
    records.add_seconds(f"t.py::test_x[{IDS[0]}]", 1.5)
    records.add(item(IDS[0], seconds={"loading": 1.0}))
    records.add_seconds(f"t.py::test_x[{IDS[0]}]", 0.5)
    records.add(item(IDS[0], "error"))
    (loader,) = records.loaders(CATALOGUE)
    assert (loader.checks[0].status, loader.checks[0].seconds) == ("error", 2.0)
    assert loader.seconds == {"loading": 1.0}


def test_an_item_whose_process_crashed_is_an_error() -> None:
    records = planned(IDS[0], IDS[1])
    records.add_crash(f"t.py::test_x[{IDS[1]}]", "worker 'gw0' crashed")
    (loader,) = records.loaders(CATALOGUE)
    assert (loader.checks[1].status, loader.checks[1].reason) == ("error", "worker 'gw0' crashed")


def test_an_ordinary_test_named_like_one_of_a_loader_is_forgotten() -> None:
    records = planned(IDS[0], IDS[1])
    records.forget_loader(f"t.py::test_x[{IDS[0]}]")
    records.add_seconds(f"t.py::test_x[{IDS[1]}]", 1.0)
    assert records.loaders(CATALOGUE) == ()


def test_facts_of_a_loader_stay_when_a_later_item_does_not_repeat_them() -> None:
    records = planned(*IDS[:3])
    records.add(item(IDS[0], "error", error="rank 1 raised OSError", seconds={"loading": 1.0}))
    records.add(item(IDS[1], "error"))
    (loader,) = records.loaders(CATALOGUE)
    assert (loader.error, loader.seconds) == ("rank 1 raised OSError", {"loading": 1.0})
    records.add(item(IDS[2], seconds={"loading": 2.0}))
    (loader,) = records.loaders(CATALOGUE)
    assert (loader.error, loader.seconds) == ("", {"loading": 2.0})


def test_counts_of_statuses_with_the_kinds_of_skips() -> None:
    counts = {"passed": 34, "not declared": 4, "not applicable": 5, "error": 2, "partly checked": 1, "differs": 2}
    assert describe_counts(counts) == (
        "34 passed, 2 differ, 1 partly checked, 2 errors, 9 skipped (4 not declared, 5 not applicable)"
    )
    assert describe_counts({"error": 1, "skipped": 2}) == "1 error, 2 skipped"
    assert describe_counts({"depends on a failed check": 2}) == "2 skipped (2 depend on a failed check)"


def test_a_line_for_each_loader_and_one_for_all_checks() -> None:
    clean = replace(loader_with("passed", "not declared"), seconds={"loading": 0.3, "training": 1.2, "values": 0.01})
    clean = replace(clean, checks=(replace(clean.checks[0], seconds=2.0), clean.checks[1]))
    failing = loader_with("failed", "depends on a failed check", name="t.py::test_y")
    failing = replace(
        failing,
        checks=(
            replace(failing.checks[0], findings=(replace(FOUND, origin="blocks.0.norm"), FOUND), seconds=2.0),
            failing.checks[1],
        ),
    )
    assert list(describe_totals([clean, failing])) == [
        (
            "t.py::test_x, world of 2 (gloo on cpu): 1 passed, 1 skipped (1 not declared); 2.0 s "
            "(training 1.2, loading 0.3)",
            {"green": True},
        ),
        (
            "t.py::test_y, world of 2 (gloo on cpu): 1 failed, 1 skipped (1 depends on a failed check); 2.0 s",
            {"red": True},
        ),
        ("", {}),
        ("1. likely cause: nobody loads it", {"bold": True}),
        ("   where it starts: blocks.0.norm", {}),
        ("   remedy: load it", {}),
        (
            f"   {IDS[0]} in t.py::test_y: a.weight, ranks 0, 1: on meta, but should be on a device; 1 more finding",
            {},
        ),
        ("", {}),
        ("1 check failed in 1 of 2 loaders", {"red": True}),
        ("4 of 4 checks accounted for in 2 loaders", {"red": True}),
    ]


def test_a_single_failed_check_that_pytest_shows_is_not_explained_again() -> None:
    names = [f"layers.{number}.weight" for number in range(4)]
    findings = tuple(replace(FOUND, tensor=name, cause=f"cause of {name[:8]}") for name in names)
    one = loader_with("failed", "passed")
    one = replace(one, checks=(replace(one.checks[0], findings=findings), one.checks[1]))
    where = f"{IDS[0]} in t.py::test_x"

    def lines(*loaders: LoaderRecord, is_shown: bool = True) -> list[str]:
        return [line for line, _ in describe_totals(loaders, is_shown=is_shown)]

    assert lines(one)[1:-1] == [
        f"failed: {where}: layers.{{0..3}}.weight, ranks 0, 1: on meta, but should be on a device"
    ]
    whole = replace(one, checks=(replace(one.checks[0], all_of={"parameter": tuple(names)}), one.checks[1]))
    assert lines(whole)[1].startswith(f"failed: {where}: all 4 parameters, ranks 0, 1: ")
    assert any("likely cause: " in line for line in lines(one, is_shown=False))
    several = lines(one, replace(one, loader="t.py::test_y"))
    assert any("likely cause: " in line for line in several)
    assert not any("remedy: " in line for line in several)


@pytest.mark.parametrize(
    ("rows", "mesh", "placements", "expected"),
    [
        ((8, 6), {"dp_shard": 2}, "S(0)", ("w0 (8 on dim 0)", "w1 (6 on dim 0)")),
        ((8, 7), {"dp_shard": 2}, "S(0)", ()),
        ((6,), {"dp_replicate": 4, "dp_shard": 1}, "R S(0)", None),
        ((0,), {"dp_shard": 2}, "S(0)", None),
        ((6,), {"dp_shard": 2, "tp": 2}, "S(0) S(1)", ("w0 (6 on dim 0)", "w0 (4 on dim 1)")),
        ((6,), {"dp_shard": 2, "tp": 2}, "_S(0,2) S(0)", ()),
    ],
)
def test_what_is_sharded_is_noted_if_all_shards_are_even(rows, mesh, placements, expected):
    place = mesh, placements.split(), (0,) * len(mesh)
    tensors = tuple(parameter(f"w{number}", (size, 4), *place) for number, size in enumerate(rows))
    notes = notes_on(replace(healthy(), values=None, inventory=(RankInventory(0, "cpu", tensors),)))
    assert notes.get("even shards") == expected


def test_even_shards_are_named_if_no_loader_has_uneven_ones() -> None:
    line = "every shard was even, so padding was not tested; try a number of ranks that does not divide a (8 on dim "
    line += "0) of t.py::test_x"
    even = replace(loader_with("passed"), notes={"even shards": ("a (8 on dim 0)",)})
    assert (line, {}) in list(describe_totals([loader_with("passed"), even]))
    uneven = replace(loader_with("failed"), notes={"even shards": ()})
    assert not any("padding" in text for text, _ in describe_totals([even, uneven]))


NORMS, EXPERTS = ("a.norm", "b.norm", "c.bias"), "experts.up"


def hidden(shape: tuple[int, ...] = (4, 8, 8)) -> Evidence:
    """Return the evidence of a model with two norms and a bias that are equal, and of experts of this shape."""
    evidence = healthy(parameters={**PARAMETERS, **dict.fromkeys(NORMS, (8,)), EXPERTS: shape})
    for name in NORMS[:2]:
        evidence = change(evidence, name, digest="ones")
    return change(evidence, NORMS[2], digest="zeros")


def test_mistakes_that_values_and_sizes_hide_are_named() -> None:
    notes = notes_on(hidden())
    del notes["even shards"]
    assert notes == {"equal vectors": NORMS, "square experts": ("experts.up (4, 8, 8)",)}
    failing = replace(loader_with("failed"), notes=notes)
    assert not any("would pass" in line for line, _ in describe_totals([failing]))
    loaders = [replace(loader_with("passed", name=name), notes=notes) for name in ("t.py::test_x", "t.py::test_y")]
    lines = [line for line, _ in describe_totals([*loaders, failing, loader_with("passed")])]
    assert [line for line in lines if "would pass" in line] == [
        "a loader that mixes up a.norm and 2 more of t.py::test_x and 1 more would pass, because their values are "
        "equal; unless they are copies on purpose, draw norms and biases at random, in the reference and in its "
        "checkpoint",
        "a loader that transposes experts.up (4, 8, 8) of t.py::test_x and 1 more would pass where the reference is "
        "converted by the same code, because they are square; let the intermediate size differ, as "
        "tiny_checkpoint(..., revealing=True) does",
    ]


def test_what_training_compares_with_nothing_is_named() -> None:
    evidence = healthy()
    assert evidence.reference is not None
    reference = replace(evidence.reference, batch_norms=("bn", "kept"))
    modes = tuple(replace(step, norms_in_eval=("kept",)) for step in evidence.training_mode or ())
    adamw = OptimizerFacts("AdamW", settings={"a": {"weight_decay": "0.1"}, "b": {"weight_decay": "0.0"}})
    built = tuple(replace(rank, optimizer=adamw) for rank in evidence.inventory)
    notes = notes_on(replace(evidence, reference=reference, training_mode=modes, inventory=built))
    assert {kind: notes[kind] for kind in ("norms in eval", "norms kept", "own groups")} == {
        "norms in eval": ("bn",),
        "norms kept": ("kept",),
        "own groups": ("AdamW (1 parameter with weight_decay=0.1; 1 parameter with weight_decay=0.0)",),
    }


@pytest.mark.parametrize(("rates", "said"), [((0.1, 0.1), "0.1 in 2 steps of t.py::test_x"), ((0.1, 0.2), "")])
def test_a_schedule_that_keeps_one_rate_was_not_compared(rates: tuple[float, ...], said: str) -> None:
    evidence = declare(healthy(), declared=frozenset({"scheduler"}))
    runs = tuple(replace(run, rates=tuple((rate,) for rate in rates)) for run in evidence.training or ())
    loader = replace(loader_with("passed"), notes=notes_on(replace(evidence, training=runs)))
    lines = [line for line, _ in describe_totals([loader]) if "one learning rate" in line]
    assert lines == [
        f"the schedule was compared at one learning rate, {said}; pass more steps=, or let it change within them"
    ] * bool(said)


def test_what_a_check_that_passed_has_to_say_is_shown_at_v() -> None:
    loader = loader_with("passed")
    noted = replace(loader, checks=(replace(loader.checks[0], reason="AdamW: 2 parameters"), *loader.checks[1:]))
    lines = [[line for line, _ in describe_totals([noted], verbosity)] for verbosity in (0, 1)]
    assert [line for line in lines[1] if line not in lines[0]] == [
        f"passed: {loader.checks[0].check} in t.py::test_x: AdamW: 2 parameters"
    ]


def undeclared_in(name: str, *fields: str) -> LoaderRecord:
    """Return a loader whose checks lack these fields, one each, but the last, which passed."""
    loader = loader_with(*(["not declared"] * len(fields)), "passed", name=name)
    checks = [replace(check, missing_field=field) for check, field in zip(loader.checks, fields, strict=False)]
    return replace(loader, checks=(*checks, loader.checks[-1]))


def next_lines(*loaders: LoaderRecord, verbosity: int = 0) -> list[str]:
    return [line for line, _ in describe_totals(loaders, verbosity) if "declare in" in line]


def test_the_fields_worth_declaring_next_are_named_after_a_pass() -> None:
    most = undeclared_in("t.py::test_y", "data", "drawn", "optimizer", "batch", *["reference"] * 3)
    loaders = [undeclared_in("t.py::test_x", "data", "data"), most]
    assert next_lines(*loaders) == [
        f"to check more of t.py::test_y, declare in its Subject: reference ({IDS[4]}, {IDS[5]} and 1 more), "
        f"batch ({IDS[3]}), optimizer ({IDS[2]})"
    ]
    assert next_lines(*loaders, verbosity=-2) == []
    assert next_lines(*loaders, loader_with("failed")) == []
    assert next_lines(undeclared_in("t.py::test_x", "drawn", "kept_attributes")) == [], "few loaders need these"


def test_the_checks_that_say_most_of_a_field_are_named_first() -> None:
    ids = ["no_meta_params", "names_match_reference", "loss_parity", "params_equal_reference"]
    lacking = tuple(CheckRecord(id, "skipped", skip="not declared", missing_field="reference") for id in ids)
    (line,) = next_lines(replace(loader_with(), checks=(CheckRecord("dcp_reshards", "passed"), *lacking)))
    assert line.endswith(": reference (params_equal_reference, loss_parity and 2 more)")


def test_the_fields_and_checks_to_name_exist() -> None:
    assert set(FIELDS_TO_SUGGEST) <= {field.name for field in fields(Subject)}
    assert set(CHECKS_NAMED_FIRST) <= set(IDS)


def test_why_checks_differ_or_are_partly_checked_is_said_once_for_each_reason() -> None:
    def because(reason: str, *kinds: str, name: str = "t.py::test_x") -> LoaderRecord:
        loader = loader_with(*kinds, name=name)
        return replace(loader, checks=tuple(replace(check, reason=reason) for check in loader.checks))

    step, lost = "no step was recorded", "0.5\nis lost"
    loaders = [
        because(step, *["partly checked"] * 8),
        because(step, "partly checked", "passed", name="t.py::test_y"),
        because(step, "partly checked", name="t.py::test_z"),
        because(lost, "differs", name="t.py::test_w"),
    ]
    lines = list(describe_totals(loaders))
    differs = (f"differs: {IDS[0]} in t.py::test_w: 0.5\\nis lost", {"yellow": True})
    assert lines[4:6] == [
        differs,
        (
            f"partly checked: {', '.join(IDS[:6])} and 2 more in t.py::test_x; "
            f"{IDS[0]} in t.py::test_y, t.py::test_z: {step}",
            {"yellow": True},
        ),
    ]
    assert [markup for _, markup in lines[:4]] == [{"green": True}] * 3 + [{"yellow": True}]
    assert list(describe_totals(loaders, verbosity=-1)) == [differs, lines[-1]]


def test_checks_without_an_item_are_not_counted_as_skipped() -> None:
    loader = loader_with("not selected", "passed", "left out", "left out", "not declared")
    loader = replace(loader, checks=(*loader.checks[:3], replace(loader.checks[3], reason="slow"), loader.checks[4]))
    (line, _), *_ = describe_totals([loader])
    assert "1 passed, 2 skipped (1 not declared, 1 left out), 1 left out, 1 not selected; " in line


def test_values_and_sizes_that_hide_nothing_are_not_named() -> None:
    apart = hidden((4, 16, 8))
    for name in NORMS:
        for rank in (0, 1):
            apart = change(apart, name, [rank], digest=f"part {rank} of {name}")
    assert notes_on(apart).keys() == {"even shards"}
    assert notes_on(declare(hidden((4, 16, 8)), drawn=NORMS)).keys() == {"even shards"}
    assert notes_on(undeclared(hidden(), "values", why="-")).keys() == {"even shards"}
    assert "square experts" not in notes_on(from_checkpoint(hidden()))
    tied = apart
    for name in NORMS[:2]:
        tied = change(tied, name, digest="of both", regions=((0, 8),), local_shape=(8,), storage="one", identity=1)
    assert notes_on(tied).keys() == {"even shards"}


def test_checks_without_a_result_are_named() -> None:
    lines = list(describe_totals([loader_with("passed", "not selected", "not run", "left out")]))
    assert lines[-1] == ("2 of 4 checks accounted for (1 not selected, 1 not run)", {"red": True})
    lines = list(describe_totals([loader_with("passed", "not selected")]))
    assert lines[-1] == ("1 of 2 checks accounted for (1 not selected)", {"green": True})


def test_nothing_judged_is_never_a_pass() -> None:
    lines = list(describe_totals([loader_with("not declared", "left out")]))
    assert lines[-1] == ("2 of 2 checks accounted for; nothing was judged, so nothing has passed", {"red": True})


def test_when_a_run_without_judged_checks_is_bad() -> None:
    assert not nothing_judged([], others_passed=False)
    assert not nothing_judged([loader_with("by the test", "passed")], others_passed=False)
    assert not nothing_judged([loader_with("by the test", "xfailed")], others_passed=False)
    assert nothing_judged([loader_with("by the test", "left out")], others_passed=False)
    assert not nothing_judged([loader_with("by the test", "left out")], others_passed=True)
    assert nothing_judged([loader_with("by the test", "not declared")], others_passed=True)


def test_many_causes_and_many_errors_are_both_shortened() -> None:
    failing = [
        replace(
            loader_with("failed"), checks=(CheckRecord(IDS[0], "failed", findings=(replace(FOUND, cause=f"c{n}"),)),)
        )
        for n in range(25)
    ]
    errors = [
        replace(loader_with("error"), checks=(CheckRecord(IDS[0], "error", reason=f"GPU {chr(65 + n)} is gone"),))
        for n in range(30)
    ]
    lines = [line for line, _ in describe_totals([*failing, *errors])]
    assert sum("likely cause: " in line for line in lines) == sum("error: GPU" in line for line in lines)
    assert "... and 5 more causes" in lines
    assert "26. error: GPU A is gone" in lines
    assert "... and 10 more errors" in lines


def test_an_error_is_shown_once_with_its_reason() -> None:
    loader = loader_with("error", "error")
    reason = "ranks 0, 1 raised ValueError: no file"
    loader = replace(loader, checks=tuple(replace(check, reason=reason) for check in loader.checks))
    lines = [line for line, _ in describe_totals([loader])]
    assert lines[1:] == [
        "",
        f"1. error: {reason}",
        f"   {IDS[0]} and 1 more in t.py::test_x",
        "",
        "2 of 2 checks accounted for; nothing was judged, so nothing has passed",
    ]
