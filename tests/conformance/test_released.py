"""The tables of results/released.md, from reports written by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from conformance import released
from conformance.field import judged
from conformance.field_page import Run
from conformance.field_results import ArchitectureResult
from conformance.released import (
    HISTORY_BEGIN,
    PACKAGES,
    PAGE,
    count_lines,
    read_row,
    recipe_of,
    record,
    replace_table,
    systems,
    table,
    written_history,
)
from conformance.released_history import Judged, history_table, read_history, with_runs, write_history

FIRST = Judged("2026-11-23", "peft", "peft 0.21.2", "2.13.0", ("grad_parity", "loss_parity"))
NEXT = Judged("2026-12-01", "peft", "peft 0.22.0", "2.14.1", ("grad_parity",))


def report(*statuses: tuple[str, str], complete: bool = True) -> dict[str, object]:
    checks = [{"check": check, "status": status} for check, status in statuses]
    header = {"started": "2026-11-27T23:04:00Z"}
    return {
        "complete": complete,
        "header": header,
        "seconds": 12.4,
        "loaders": [{"checks": checks}, {"checks": checks[:1]}],
    }


def test_a_row():
    row = read_row("trainer", report(("grad_parity", "xfailed"), ("loss_parity", "passed"), ("ties", "skipped")))
    assert row.release.startswith("transformers ")
    assert row.findings == ("grad_parity",)
    cells = row.cells()
    assert cells[0] == f"[{row.release}](frameworks/trainer.md)"
    assert cells[1:] == ["2026-11-27", "2", "3", "1", "`grad_parity`", "12", str(row.lines)]


def test_a_finding_that_nobody_expects_is_in_the_table():
    assert read_row("peft", report(("grad_parity", "failed"), ("ties", "error"))).findings == ("grad_parity", "ties")


def test_a_run_that_was_cut_short_has_no_row():
    with pytest.raises(ValueError, match="peft: the run was cut short"):
        read_row("peft", report(complete=False))
    with pytest.raises(ValueError, match="peft: no loader was judged"):
        read_row("peft", {"complete": True, "loaders": []})


def test_every_recipe_is_short():
    assert systems()
    for system in systems():
        compile(recipe_of(system), system, "exec")
        assert 5 < count_lines(recipe_of(system)) <= 15
        assert released.released(system).startswith(PACKAGES.get(system, system))


def test_only_the_table_is_replaced():
    page = f"before\n{released.BEGIN}old\n{released.END}after\n"
    assert replace_table(page, "| new |\n") == f"before\n{released.BEGIN}\n| new |\n\n{released.END}after\n"
    with pytest.raises(ValueError, match="lacks the lines"):
        replace_table("no marks", "")


def test_the_table_has_a_heading_and_a_line_for_each_system():
    page = PAGE.read_text("utf-8")
    lines = table([read_row("peft", report(("ties", "passed")))], page).splitlines()
    assert lines[1] == "| --- | --- | --- | --- | --- | --- | --- | --- |"
    [line] = [line for line in lines if line.startswith("| [peft ")]
    assert "| none | 12 |" in line
    assert set(lines[2:]) - {line} < set(page.splitlines()), "a system that was not judged keeps its line"
    with pytest.raises(ValueError, match="accelerate was never judged"):
        table([], "")


def test_a_finding_stays_in_the_history_when_a_release_has_it_no_more():
    rows = history_table([FIRST, NEXT], {"peft": "[peft](peft.md)"}).splitlines()[2:]
    first, last = "2026-11-23, peft 0.21.2 with torch 2.13.0", "2026-12-01, peft 0.22.0 with torch 2.14.1"
    assert rows == [
        f"| [`grad_parity`](../docs/catalogue.md#grad_parity) | [peft](peft.md) | {first} | {last} | yes |",
        f"| [`loss_parity`](../docs/catalogue.md#loss_parity) | [peft](peft.md) | {first} | {last} | **no** |",
    ]


def test_a_run_replaces_an_earlier_one_of_the_same_day():
    again, other = replace(FIRST, findings=()), replace(FIRST, system="verl")
    assert with_runs([FIRST, NEXT], [other, again]) == [again, other, NEXT]


def test_a_run_of_the_field_is_a_run_of_transformers():
    rows = [ArchitectureResult("llama"), ArchitectureResult("gpt2", findings={"step_memory_bounded": ["late"]})]
    entry = judged(Run("transformers", {"torch": "2.13.0+cpu", "transformers": "5.23.0"}, 1.0, 1.0, 0, 1, rows))
    assert entry.findings == ("step_memory_bounded",)
    assert (entry.system, entry.release, entry.torch) == ("field", "transformers 5.23.0", "2.13.0")


def test_runs_are_added_to_the_history_and_to_the_page(tmp_path, monkeypatch):
    page, history = tmp_path / "released.md", tmp_path / "history.json"
    page.write_text(f"before\n{HISTORY_BEGIN}{released.END}after\n")
    write_history([FIRST], history)
    monkeypatch.setattr(released, "PAGE", page)
    monkeypatch.setattr(released, "HISTORY", history)
    record([NEXT])
    assert read_history(history) == [FIRST, NEXT]
    assert page.read_text() == f"before\n{HISTORY_BEGIN}\n{written_history([FIRST, NEXT])}\n{released.END}after\n"


def test_the_page_shows_the_history():
    page = PAGE.read_text("utf-8")
    assert replace_table(page, written_history(read_history(released.HISTORY)), HISTORY_BEGIN) == page
