"""The history of checks in a real browser: its strips, its marks in the table, and what a screen reader gets."""

from __future__ import annotations

import pytest

from tests.reports.test_page_browser import PHONE, files, opened, shown

pytestmark = pytest.mark.nightly

__all__ = ["files", "opened"]


@pytest.mark.parametrize("width", [PHONE, 1440])
def test_a_strip_is_drawn_and_said(opened, width):
    page = opened("nights", width=width)
    strip = page.locator(".result .strip").first
    assert strip.is_visible()
    assert strip.get_attribute("aria-label") == (
        "The last 14 runs, oldest first: 2 passed, 2 failed, 3 passed, 1 failed, 5 passed, 1 failed"
    )
    boxes = [strip.locator(f".h-{state}").bounding_box() for state in ("good", "bad")]
    assert boxes[0]["height"] < boxes[1]["height"], "failures stand out without colours"
    assert "last 14 runs: 9 passed, 5 failed" in " ".join(shown(page, ".result .history"))
    assert shown(page, "#history dt") == ["Broken since an earlier run: 1", "Flaky checks: 1"]


def test_marks_in_the_table_are_inside_it_and_have_words(opened):
    page = opened("nights")
    for kind, words in (("h-old", "broken since 2026-11-10 02:17"), ("h-flaky", "flaky: 10 passed and 4 failed")):
        cell = page.locator(f"#matrix .{kind}")
        assert cell.count() == 1
        assert words in cell.get_attribute("title")
        assert words in cell.get_attribute("aria-label")
        mark = "getComputedStyle(document.querySelector('#matrix .{}'), '::after').content"
        assert page.evaluate(mark.format(kind)) != "none"
    assert page.locator("#matrix .cell").count() > 2


def test_a_check_that_passes_has_its_history_in_the_list_of_all_checks(opened):
    page = opened("nights")
    page.locator("#loader-2 .checks summary").click()
    rows = shown(page, "#loader-2 .checks tbody tr")
    assert all("14 passed" in row for row in rows)
    assert page.locator("#loader-2 .strip").count() == 0, "words are enough where nothing changed"
