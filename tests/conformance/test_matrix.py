"""The detection matrix on hand-made rows: which rows are problems, and what the pages show."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

from conformance.matrix import Row, all_problems, entries, main, write_pages
from fixtures.defects import DEFECTS
from fixtures.needs import lacking

CHECKS = ["first", "second"]
SVG = "{http://www.w3.org/2000/svg}"


def row(name: str, caught_by: str, first: str, second: str, why: str = "") -> Row:
    return Row(name, "llama", {"dp_shard": 2}, caught_by, {"first": first, "second": second}, {"second": why})


GOOD = [row("bad", "first", "failed", "skipped", "it has a reason"), row("good", "", "passed", "passed")]


def test_expected_statuses_are_no_problem():
    assert all_problems(GOOD, ["first"]) == []


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        (row("bad", "first", "passed", "passed"), "bad: first should fail: passed"),
        (row("bad", "first", "skipped", "passed"), "bad: first should fail: skipped"),
        (row("bad", "third", "passed", "passed"), "bad: third should fail: does not exist"),
        (row("bad", "first", "failed", "failed"), "bad: second fails, but only first should"),
        (row("good", "", "passed", "failed"), "good: second fails, but no check should"),
        (row("good", "", "passed", "error", "why"), "good: second: error: why"),
    ],
)
def test_an_unexpected_status_is_a_problem(found, problem):
    assert all_problems([found], []) == [problem]


def test_a_check_without_a_defect_is_a_problem():
    assert all_problems(GOOD, CHECKS) == ["second: no defect covers it"]


def test_the_pages_show_every_loader_and_every_check(tmp_path):
    write_pages(tmp_path / "new", GOOD, CHECKS, ["a problem with <signs>"])
    matrix = json.loads((tmp_path / "new" / "matrix.json").read_text())
    assert [loader["status"] for loader in matrix["loaders"]] == [dict(found.status) for found in GOOD]
    page = (tmp_path / "new" / "matrix.md").read_text()
    assert "| bad (llama, dp_shard=2) | [X] | - |" in page
    assert "| good (llama, dp_shard=2) |  |  |" in page
    assert "* a problem with <signs>" in page
    assert "1. `first`\n2. `second`" in page
    picture = ElementTree.fromstring((tmp_path / "new" / "matrix.svg").read_text())
    cells = {cell.findtext(f"{SVG}title"): cell.get("fill") for cell in picture.iter(f"{SVG}rect")}
    cells.pop(None)
    assert cells == {
        "bad: first failed": "#2e7d32",
        "bad: second skipped it has a reason": "#e0e0e0",
        "good: first passed": "white",
        "good: second passed": "white",
    }


def test_every_defect_is_in_the_matrix_with_its_check():
    caught_by = {entry.name: entry.caught_by for entry in entries() if entry.caught_by}
    assert caught_by == {name: defect.caught_by for name, defect in DEFECTS.items() if not lacking(defect.needs)}


def test_the_command_line_writes_the_files(tmp_path, capfd):
    assert main(["--out", str(tmp_path), "-k", "norm_left_on_meta"]) == 0
    assert "[1/1] ok norm_left_on_meta (llama)" in capfd.readouterr().out
    assert [loader["name"] for loader in json.loads((tmp_path / "matrix.json").read_text())["loaders"]] == [
        "norm_left_on_meta"
    ]
