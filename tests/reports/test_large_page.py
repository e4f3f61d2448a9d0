"""The page of a nightly run of 130 loaders, in a real browser: what broke, the matrix, packed sections and paper."""

from __future__ import annotations

from typing import Any

import pytest

from tests.reports.conftest import HEIGHT, MANY
from tests.reports.report_factory import CATALOGUE
from tests.reports.test_page_browser import accessibility_problems, focused, shown, until

pytestmark = pytest.mark.nightly

A4 = 718
"""Width (px) between the margins of the page on paper."""
MOST_NODES = {"nightly": 10_000, "failing": 30_000}
"""Elements of the page when it opens, which decide how long that takes; with all sections it would have 174,000."""


def test_it_is_small(files):
    assert [name for name in MANY if files(name).stat().st_size >= 4_000_000] == []


@pytest.mark.parametrize("name", MOST_NODES)
def test_it_is_at_most_ten_screens_tall_and_opens_with_few_elements(opened, name):
    page = opened(name)
    assert page.evaluate("document.documentElement.scrollHeight") <= 10 * HEIGHT
    assert page.locator("#broke").bounding_box()["y"] < HEIGHT / 2
    assert page.evaluate("document.querySelectorAll('*').length") < MOST_NODES[name]


def test_a_card_leads_to_the_details_and_to_the_cell(opened):
    page = opened("nightly")
    page.locator("#cause-2 .chips a").first.click()
    assert focused(page, "id") == "loader-1-no_uninitialized_memory"
    page.locator("#cause-4 .in-table").click()
    assert focused(page, "id") == "cell-7-grad_parity"
    assert page.locator("#cell-7-grad_parity").is_visible()
    page.locator("#cause-1 .in-table").click()
    assert focused(page, "id") == "cell-2"


def test_a_crash_is_one_bar_in_the_matrix(opened):
    page = opened("nightly")
    assert page.locator("#cell-2 td").count() == 1
    assert shown(page, "#cell-2 td")[0].startswith("! crashed: ranks 0, 1 raised FileNotFoundError")
    assert not page.locator("#matrix .s-error").count()


def columns(page: Any) -> int:
    return len(shown(page, "#matrix [data-column]"))


def test_the_matrix_opens_with_what_has_failures(opened):
    page = opened("nightly")
    assert len(shown(page, "#matrix tr[data-row]")) == 9
    assert columns(page) == 5
    assert shown(page, "#matrix .fold") == [
        f"121 loaders without failures and {len(CATALOGUE) - 5} checks without failures"
    ]
    page.locator("#unfold").click()
    until(page, "location.hash === '#rows=all'")
    assert len(shown(page, "#matrix tr[data-row]")) == 130
    assert columns(page) == len(CATALOGUE)
    assert page.locator("#cell-77 td").count() == len(CATALOGUE)
    page.reload()
    assert len(shown(page, "#matrix tr[data-row]")) == 130
    page.get_by_text("only rows and columns with failures").click()
    until(page, "location.hash === ''")
    assert columns(page) == 5


def test_few_loaders_are_not_folded(opened):
    page = opened("passing")
    assert page.locator("h1").inner_text().startswith("1 check failed: no_uninitialized_memory in ")
    assert len(shown(page, "#matrix tr[data-row]")) == 1
    page.get_by_text("only rows and columns with failures").click()
    until(page, "location.hash === '#rows=all'")
    assert len(shown(page, "#matrix tr[data-row]")) == 12


def test_both_headers_of_the_matrix_stay_in_sight(opened):
    page = opened("nightly", fragment="#rows=all", width=1000)
    page.evaluate("document.querySelector('.matrix-scroller').scrollTo(400, 1500)")
    inside = """(selector) => {
        const box = document.querySelector('.matrix-scroller').getBoundingClientRect();
        const one = [...document.querySelectorAll(selector)].at(-20).getBoundingClientRect();
        return [Math.round(one.top - box.top), Math.round(one.left - box.left)]; }"""
    assert page.evaluate(inside, "#matrix thead [data-column]")[0] in range(20, 40)
    assert page.evaluate(inside, "#matrix tbody th")[1] in (0, 1)
    assert page.evaluate("document.querySelector('.matrix-scroller').scrollTop") == 1500


def test_a_link_into_a_packed_section_opens_it(opened):
    page = opened("nightly", fragment="#loader-77-no_meta_params")
    until(page, "document.activeElement.id === 'loader-77-no_meta_params'")
    assert page.locator("#loader-77-no_meta_params").is_visible()
    assert page.locator("#loader-77 .chart").count() == 2
    until(page, "document.querySelectorAll('#loader-78 script.packed').length === 1")


def test_a_browser_that_cannot_unpack_a_section_says_so(opened):
    page = opened("nightly", fragment="#loader-77-no_meta_params", script="delete window.DecompressionStream")
    until(page, "document.querySelectorAll('#loader-77 script.packed').length === 0")
    assert shown(page, "#loader-77 .warn") == ["This browser cannot unpack this section; see report.json."]


def test_arrow_keys_reach_the_fold(opened):
    page = opened("nightly")
    page.locator("#cell-9-dcp_reshards").focus()
    page.keyboard.press("ArrowDown")
    assert focused(page, "id") == "unfold"
    page.keyboard.press("Enter")
    until(page, "location.hash === '#rows=all'")


def test_paper_has_everything_of_the_loaders_that_failed(opened):
    page = opened("nightly", color_scheme="dark")
    until(page, "document.documentElement.dataset.ready === ''")
    page.set_viewport_size({"width": A4, "height": 1000})
    page.emulate_media(media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    until(page, "document.querySelectorAll('.loader[data-failing] .chart').length === 12")
    assert page.locator(".loader[data-failing] script.packed").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= A4
    cut = """[...document.querySelectorAll('main *')].filter((one) => one.checkVisibility() && !one.closest('.vh') &&
        one.getBoundingClientRect().right > innerWidth + 1).map((one) => one.outerHTML.slice(0, 90)).slice(0, 5)"""
    assert page.evaluate(cut) == []
    assert page.evaluate("getComputedStyle(document.querySelector('.s-failed')).printColorAdjust") == "exact"
    assert page.evaluate("getComputedStyle(document.querySelector('.card')).backgroundColor") == "rgb(255, 255, 255)"
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.evaluate("document.documentElement.dataset.theme") is None
    assert not shown(page, ".loader[data-failing] .panel")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_no_accessibility_problem(opened, theme):
    page = opened("nightly", fragment="#loader-8-loss_parity", color_scheme=theme)
    until(page, "document.querySelectorAll('#loader-8 .chart').length === 2")
    assert accessibility_problems(page) == []


def test_failures_are_readable_without_javascript(opened):
    page = opened("nightly", java_script_enabled=False)
    assert len(shown(page, ".card")) == 6
    assert page.locator("noscript").is_visible()
    page.locator("#loader-1 summary").first.click()
    assert "never written" in shown(page, "#loader-1 .result")[0]


def test_rows_that_are_built_later_have_the_marks_of_the_history(opened):
    page = opened("flaky", "#rows=all")
    assert page.locator("#matrix .h-flaky").count() == 1
    assert "flaky" in page.locator("#matrix .h-flaky").get_attribute("aria-label")
