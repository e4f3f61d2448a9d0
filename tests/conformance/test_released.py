"""The table of docs/released.md, from reports written by hand."""

from __future__ import annotations

import pytest

from conformance import released
from conformance.released import PACKAGES, count_lines, read_row, recipe_of, replace_table, systems, table


def report(*statuses: tuple[str, str], complete: bool = True) -> dict[str, object]:
    checks = [{"check": check, "status": status} for check, status in statuses]
    return {"complete": complete, "seconds": 12.4, "loaders": [{"checks": checks}, {"checks": checks[:1]}]}


def test_a_row():
    row = read_row("trainer", report(("grad_parity", "xfailed"), ("loss_parity", "passed"), ("ties", "skipped")))
    assert row.release.startswith("transformers ")
    assert row.findings == ("grad_parity",)
    cells = row.cells()
    assert cells[0] == f"[{row.release}](frameworks/trainer.md)"
    assert cells[1:] == ["2", "3", "1", "`grad_parity`", "12", str(row.lines)]


def test_a_finding_that_nobody_expects_is_in_the_table():
    assert read_row("peft", report(("grad_parity", "failed"), ("ties", "error"))).findings == ("grad_parity", "ties")


def test_a_run_that_was_cut_short_has_no_row():
    with pytest.raises(ValueError, match="peft: the run was cut short"):
        read_row("peft", report(complete=False))
    with pytest.raises(ValueError, match="peft: no loader was judged"):
        read_row("peft", {"complete": True, "loaders": []})


def test_every_recipe_is_short_and_in_the_list_of_the_makefile():
    makefile = (released.ROOT / "Makefile").read_text("utf-8")
    assert f"WILD := {' '.join(systems())}\n" in makefile
    for system in systems():
        assert 5 < count_lines(recipe_of(released.PAGES.get(system, system))) <= 15
        assert released.released(system).startswith(PACKAGES.get(system, system))


def test_only_the_table_is_replaced():
    page = f"before\n{released.BEGIN}old\n{released.END}after\n"
    assert replace_table(page, "| new |\n") == f"before\n{released.BEGIN}\n| new |\n\n{released.END}after\n"
    with pytest.raises(ValueError, match="lacks the lines"):
        replace_table("no marks", "")


def test_the_table_has_a_heading_and_a_line_for_each_system():
    lines = table([read_row("peft", report(("ties", "passed")))]).splitlines()
    assert lines[1] == "| --- | --- | --- | --- | --- | --- | --- |"
    assert lines[2].startswith("| [peft ")
    assert "| none |" in lines[2]
