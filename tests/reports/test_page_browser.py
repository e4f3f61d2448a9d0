"""The page of a report in a real browser: requests, keyboard, filters, themes and widths."""

from __future__ import annotations

import importlib
import os
import re
import time

import pytest

from tests.reports import report_factory as factory
from tests.reports.conftest import DESKTOP, MANY, PAGES
from tests.reports.report_factory import EMBEDDING, ROTARY

pytestmark = pytest.mark.nightly

# In CI a missing package is an error: a test that is skipped there runs nowhere.
import_package = importlib.import_module if os.environ.get("CI") else pytest.importorskip
playwright = import_package("playwright.sync_api")
axe = import_package("axe_playwright_python.sync_playwright")

PHONE = 360
UNCOVERED = """document.activeElement.getBoundingClientRect().top >=
    document.querySelector('#filters').getBoundingClientRect().bottom"""
"""Whether the focused element is not hidden by the filters."""


def shown(page: playwright.Page, selector: str) -> list[str]:
    """Return the texts of visible elements, in one line each."""
    return [re.sub(r"\s+", " ", one.inner_text()) for one in page.locator(selector).all() if one.is_visible()]


def until(page: playwright.Page, condition: str) -> None:
    """Wait for a condition by polling: the page's policy forbids eval, which Playwright's own waiting needs."""
    deadline = time.monotonic() + 60
    while not page.evaluate(condition):
        assert time.monotonic() < deadline, condition
        page.wait_for_timeout(20)


def choose_tab(page: playwright.Page, tab: str) -> int:
    """Choose a tab, and return the number of checks that it says it has."""
    label = page.locator(".tabs label").filter(has=page.locator(f"[value='{tab}']"))
    label.click()
    until(page, f"location.hash === '{tab and f'#tab={tab}'}'")
    return int(label.locator("b").inner_text())


def focused(page: playwright.Page, what: str) -> str:
    return str(page.evaluate(f"document.activeElement.{what}"))


def accessibility_problems(page: playwright.Page) -> list[tuple[object, ...]]:
    return [
        (one["id"], node["target"], node["failureSummary"])
        for one in axe.Axe().run(page).response["violations"]
        for node in one["nodes"][:2]
    ]


@pytest.mark.parametrize("name", [name for name in PAGES if name not in MANY or name == "nightly"])
@pytest.mark.parametrize("width", [PHONE, DESKTOP])
def test_no_page_is_wider_than_the_screen(opened, name, width):
    page = opened(name, fragment="#rows=all", width=width)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.evaluate("typeof window.hacked") == "undefined"
    assert page.locator("h1").is_visible()


def test_the_header_of_a_narrow_page_is_as_wide_as_the_screen(opened):
    page = opened("failed", width=PHONE)
    assert page.locator("header.top > .bar").bounding_box()["width"] > PHONE - 40


@pytest.mark.parametrize(
    ("name", "theme"),
    [
        ("usual", "dark"),
        ("alone", "light"),
        ("failed", "dark"),
        ("table", "light"),
        ("compared", "dark"),
        ("nights", "light"),
        ("known", "light"),
        ("usual", "light"),
        ("hostile", "light"),
        ("empty", "dark"),
    ],
)
def test_axe_finds_no_accessibility_problem(opened, name, theme):
    page = opened(name, color_scheme=theme)
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true })")
    assert accessibility_problems(page) == []


@pytest.mark.parametrize("width", [PHONE, DESKTOP])
def test_losses_and_memory_are_tables(opened, width):
    page = opened(width=width)
    assert shown(page, ".chart tbody tr")[1].startswith("2 4.64 4.73 0.019 1e-05 ")
    page.locator("#by-rank").select_option("1")
    until(page, "location.hash === '#rank=1'")
    lines = page.locator(".chart").nth(1).locator("[data-ranks]").all()
    assert [one.is_visible() for one in lines] == [False, True, False, False]


def test_where_the_step_departs(opened):
    """It is marked on the rank that departs; a filter by rank leaves its column."""
    page = opened()
    [marked] = shown(page, ".step .starts")
    assert marked.startswith("▶ starts here model.layers.2.mlp.act_fn GELU")
    assert shown(page, ".step .starts td [aria-hidden]") == ["✓", "✕"]
    assert shown(page, ".step .stretch th")[0] == "⋮ 118 calls, model.embed_tokens to model.layers.2.self_attn.o_proj"
    page.locator("#by-rank").select_option("3")
    until(page, "location.hash === '#rank=3'")
    assert shown(page, ".step .starts td [aria-hidden]") == ["✕"]
    assert shown(page, ".step thead th") == ["module", "rank 3"] * 2


@pytest.mark.parametrize("width", [PHONE, DESKTOP])
def test_the_names_of_modules_stay_in_sight(opened, width):
    page = opened(width=width)
    page.evaluate("document.querySelectorAll('.traced .scroller').forEach((one) => { one.scrollLeft = 1000 })")
    outside = page.evaluate(
        """[...document.querySelectorAll('.step th[scope=row]')].filter((one) => one.getBoundingClientRect().left <
            one.closest('.scroller').getBoundingClientRect().left - 1).length"""
    )
    assert outside == 0


def test_filter_by_tensor(opened):
    page = opened()
    page.locator("#by-tensor").fill("rotary")
    until(page, "location.hash === '#tensor=rotary'")
    assert [text.split(",")[0] for text in shown(page, ".lines > li p:first-child")] == [ROTARY]
    assert shown(page, ".drawing .names") == [ROTARY] * 2
    assert page.locator("#shown").inner_text() == ("Shown: 2 loaders, 1 of 4 groups of findings, 2 of 13 layouts")
    page.locator("#by-tensor").fill("model.layers.1.*")
    until(page, "document.querySelector('#shown').textContent.includes(' 8 of')")
    assert shown(page, ".lines .name") == ["model.layers.{0..3}.mlp.up_proj.weight"]
    page.locator("#by-tensor").fill("no such tensor")
    until(page, "document.querySelector('#shown').textContent.includes('0 of 2 loaders')")
    page.get_by_role("button", name="Reset").click()
    until(page, "location.hash === ''")
    assert page.locator("#shown").inner_text() == "Shown: 2 loaders, 4 groups of findings, 13 layouts"


def test_filter_by_status_check_rank_and_loader(opened):
    page = opened("table")
    assert choose_tab(page, "failed") == len(shown(page, ".result h3 code"))
    assert choose_tab(page, "failed") == page.locator("#matrix .cell:not(.dim)").count()
    assert shown(page, ".loader h2") == ["tests/test_llama.py::test_broken"]
    assert choose_tab(page, "passed") == len(shown(page, ".checks tbody tr"))
    assert shown(page, "#broke") == shown(page, ".result") == []
    page.get_by_role("button", name="Reset").click()
    page.locator("#by-rank").select_option("0")
    until(page, "location.hash === '#rank=0'")
    assert "params_equal_reference" not in shown(page, ".result h3 code")
    assert "nothing_left_unsharded" in shown(page, ".result h3 code")
    assert page.locator(".mesh .ring").count() == page.locator(".mesh").count()  # the box of the rank is marked
    page.locator("#by-check").select_option("nothing_left_unsharded")
    until(page, "location.hash === '#check=nothing_left_unsharded&rank=0'")
    assert shown(page, ".result h3 code") == ["nothing_left_unsharded"]
    page.get_by_role("button", name="Reset").click()
    page.locator("#by-loader").select_option("2")
    until(page, "location.hash === '#loader=2'")
    assert page.locator("#shown").inner_text().startswith("Shown: 1 of 4 loaders, 0 of 4 groups of findings, ")
    assert shown(page, ".loader h2") == ["tests/test_llama.py::test_0"]


def test_filters_apply_to_checks_that_share_an_article(opened):
    page = opened("raised")
    assert len(shown(page, ".result")) == 1
    page.get_by_text("the checks", exact=True).click()
    assert len(shown(page, ".same li")) == len(factory.CATALOGUE)
    page.locator("#by-check").select_option("loss_parity")
    until(page, "location.hash === '#check=loss_parity'")
    assert shown(page, ".same li") == ["loss_parity"]
    page.locator("#by-rank").select_option("0")
    until(page, "location.hash === '#check=loss_parity&rank=0'")
    assert shown(page, ".result") == []
    page.locator("#cause-1 .chips a").first.click()
    assert focused(page, "id") == "loader-1"


def test_a_link_restores_the_filters(opened):
    page = opened("table", fragment="#tab=failed&tensor=up_proj&at=loader-1-params_equal_reference")
    assert page.locator("#by-tensor").input_value() == "up_proj"
    assert page.locator("[name=tab][value=failed]").is_checked()
    assert shown(page, ".result h3 code") == ["params_equal_reference"]
    assert focused(page, "id") == "loader-1-params_equal_reference"
    until(page, UNCOVERED)
    page.get_by_role("link", name="Link to params_equal_reference").click()
    assert page.evaluate("location.hash") == "#tab=failed&tensor=up_proj&at=loader-1-params_equal_reference"


def test_a_link_reveals_a_folded_or_filtered_target(opened):
    page = opened("table", fragment="#tensor=rotary&at=loader-1-loss_parity")
    assert focused(page, "id") == "loader-1-loss_parity"
    assert page.locator("#by-tensor").input_value() == ""
    page.evaluate("location.hash = '#loader-2-no_meta_params'")
    until(page, "document.activeElement.id === 'loader-2-no_meta_params'")
    assert page.locator("#loader-2-no_meta_params").is_visible()
    page.evaluate("location.hash = '#%E0%A4%A&check=none&rank=99&at=<img>'")
    until(page, "document.querySelector('#by-check').selectedIndex === 0")
    assert page.locator("h1").is_visible()


def test_everything_can_be_reached_with_keys(opened):
    page = opened()
    stops = []
    for _ in range(400):
        page.keyboard.press("Tab")
        where = page.evaluate(
            """(() => {
            const one = document.activeElement, seen = one.matches('.chip input') ? one.parentElement : one;
            const style = getComputedStyle(seen);
            one.dataset.stopped = (one.dataset.stopped ?? 0) - -1;
            return [one.tagName, one.className, one.dataset.stopped, style.outlineStyle !== 'none']; })()"""
        )
        if where[0] == "BODY" or int(where[2]) > 1:
            break
        stops.append(where)
    assert stops[0][:2] == ["A", "skip"]
    assert all(visible for *_, visible in stops), [one for one in stops if not one[3]]
    missed = page.evaluate(
        """[...document.querySelectorAll('a[href], button, input, select, summary, [tabindex="0"]')]
            .filter((one) => one.checkVisibility() && !one.dataset.stopped && !one.closest('#matrix') &&
                    (one.type !== 'radio' || one.checked))
            .map((one) => one.outerHTML.slice(0, 120))"""
    )
    assert missed == []
    assert sum("cell" in kind for _, kind, *_ in stops) == 1  # the matrix is one stop


def test_the_skip_link_leads_to_the_results(opened):
    page = opened()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert focused(page, "id") == "main"


def test_arrow_keys_move_within_the_matrix(opened):
    page = opened("table")
    page.locator("#matrix td a[tabindex='0']").focus()
    assert focused(page, "dataset.c") == "no_uninitialized_memory"
    page.keyboard.press("ArrowRight")
    assert focused(page, "dataset.c") == "params_on_rank_device"
    page.keyboard.press("ArrowDown")
    assert focused(page, "dataset.s") == "passed"
    for _ in range(3):  # there is no row below the last one
        page.keyboard.press("ArrowDown")
    assert focused(page, "hash") == "#loader-4-params_on_rank_device"
    page.keyboard.press("End")
    assert focused(page, "dataset.c") == factory.CATALOGUE[-1].check
    page.keyboard.press("ArrowLeft")
    assert focused(page, "dataset.c") == "communication_scales"
    for _ in range(3):
        page.keyboard.press("ArrowUp")
    assert focused(page, "dataset.s") == "not run"
    page.keyboard.press("Enter")
    until(page, "document.activeElement.id === 'loader-1-communication_scales'")
    until(page, UNCOVERED)
    page.go_back()
    assert page.evaluate("location.hash") == ""


@pytest.mark.parametrize("width", [PHONE, 390, 1400])
@pytest.mark.parametrize("name", ["alone", "usual"])
def test_the_checks_of_few_loaders_are_a_list_inside_the_screen(opened, name, width):
    page = opened(name, width=width)
    names = page.locator(".list ul li").all()
    assert [one.inner_text().split()[-1] for one in names] == [one.check for one in factory.CATALOGUE]
    assert shown(page, ".list .family") == list(dict.fromkeys(one.family for one in factory.CATALOGUE))
    outside = """[...document.querySelectorAll('.list *:not(.vh)')].filter((one) =>
        one.checkVisibility() && one.getBoundingClientRect().right > innerWidth - 10).map((one) => one.outerHTML)"""
    assert page.evaluate(outside) == []
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.locator(".matrix-scroller").count() == 0


def test_a_list_of_several_loaders_has_a_mark_for_each(opened):
    page = opened()
    assert shown(page, ".list .heads li") == ["1 test_broken", "2 test_llama"]
    families = dict.fromkeys(one.family for one in factory.CATALOGUE)
    assert [text.split() for text in shown(page, ".list .title")] == [["1", "2", *one.split()] for one in families]
    marks = page.locator(".list li", has_text="loss_parity").locator(".cell").all()
    assert [one.get_attribute("aria-label") for one in marks] == [
        "test_broken, loss_parity: failed",
        "test_llama, loss_parity: passed",
    ]
    for number, head in enumerate(shown(page, ".list .members:first-of-type .head")):
        place = "document.querySelectorAll('.list .members:first-of-type {}')[{}].getBoundingClientRect().left"
        assert head == str(number + 1)
        assert page.evaluate(place.format(".head", number)) == page.evaluate(place.format(".cell", number))
    page.locator("#cause-1 .in-table").click()
    assert focused(page, "id") == "cell-1-no_uninitialized_memory"


def test_screen_readers_get_the_list_as_a_list(opened):
    family, (first, second) = factory.CATALOGUE[0].family, [one.check for one in factory.CATALOGUE[:2]]
    members = opened("alone").locator("#matrix .members").first.aria_snapshot()
    assert members.splitlines()[:6] == [
        f'- heading "{family}" [level=3]',
        "- list:",
        "  - listitem:",
        f"""    - 'link "{first}: passed"':""",
        f'      - /url: "#loader-1-{first}"',
        f"      - text: ✓ {first}",
    ]
    page = opened()
    loaders = page.locator("#matrix .heads").aria_snapshot()
    assert loaders.startswith('- list "Loaders, in the order of their marks":\n  - listitem:\n    - text: "1"\n')
    assert page.locator("#matrix").get_by_role("listitem").count() == 2 + len(factory.CATALOGUE)
    assert page.locator("#matrix").get_by_role("link", name=f"test_llama, {second}: passed").count() == 1
    assert opened("table").get_by_role("grid").get_by_role("gridcell").count() > len(factory.CATALOGUE)


def test_arrow_keys_move_within_a_list(opened):
    page = opened("alone")
    assert page.locator("#matrix a[tabindex='0']").count() == 1
    page.locator("#matrix a[tabindex='0']").focus()
    assert focused(page, "hash") == "#loader-1-same_manifest_on_every_rank"
    page.keyboard.press("ArrowDown")
    assert focused(page, "hash") == "#loader-1-names_match_reference"
    for _ in factory.CATALOGUE:
        page.keyboard.press("ArrowDown")
    last = factory.CATALOGUE[-1]
    assert focused(page, "ariaLabel") == f"{last.check}: passed"
    page.keyboard.press("Enter")
    until(page, f"document.activeElement.id === 'loader-1-{last.check}'")
    assert last.promise in shown(page, f"#loader-1-{last.check}")[0]


def test_filters_are_there_where_there_is_something_to_filter(opened):
    def fields(name: str) -> list[str]:
        chosen = opened(name).locator("#filters [name]").all()
        return list(dict.fromkeys(str(one.get_attribute("name")) for one in chosen))

    assert fields("usual") == ["tensor", "rank"]
    assert fields("table") == ["tensor", "check", "rank", "loader", "only"]


def test_a_tab_leaves_what_has_its_status(opened):
    page = opened("alone")
    assert choose_tab(page, "skipped") == 2
    assert shown(page, "#matrix ul li") == ["? batches_follow_the_mesh", "? batches_resume"]
    assert [text.split(" ")[0] for text in shown(page, ".checks tbody tr")] == [
        "batches_follow_the_mesh",
        "batches_resume",
    ]
    assert shown(page, "#unchecked dt") == ["? Subject(data=...) is not declared"]
    choose_tab(page, "")
    assert len(shown(page, "#unchecked dt")) == 2


def test_findings_are_shown_once_until_they_are_opened(opened):
    page = opened()
    assert page.locator("main").inner_text().count("never written (poison value NaN)") == 1
    page.locator("#cause-1 .chips a").first.click()
    assert focused(page, "id") == "loader-1-no_uninitialized_memory"
    assert "never written (poison value NaN)" in shown(page, "#loader-1-no_uninitialized_memory")[0]
    assert page.locator(".result .full[open]").count() == 1


def test_a_copied_link_or_command_is_announced(opened):
    page = opened("failed", permissions=["clipboard-read", "clipboard-write"])
    link = page.locator(".result .link").first
    link.click()
    until(page, "document.querySelector('#said').textContent === 'The link is copied.'")
    assert link.inner_text() == "link copied"
    assert page.evaluate("navigator.clipboard.readText()") == page.url
    page.locator("#cause-1 .copy").click()
    until(page, "document.querySelector('#said').textContent === 'The command is copied.'")
    assert str(page.evaluate("navigator.clipboard.readText()")).startswith("python -m pytest 'tests/test_llama.py::")
    assert page.get_by_role("status").count() == 2  # and what the filters show
    until(page, "document.querySelector('.result .link').textContent === 'link'")


def test_a_phone_shows_names_of_checks_in_one_line(opened):
    page = opened("failed", width=390)
    lines = """[...document.querySelectorAll('.result h3 code')].map((one) =>
        Math.round(one.getBoundingClientRect().height / parseFloat(getComputedStyle(one).lineHeight)))"""
    assert page.evaluate(lines) == [1, 1, 1]


def test_a_phone_shows_times_without_scrolling(opened):
    page = opened(width=390)
    page.locator(".time > summary").first.click()
    scrolling = """[...document.querySelectorAll('.time .scroller')].filter((one) =>
        one.checkVisibility()).map((one) => one.scrollWidth > one.clientWidth)"""
    assert set(page.evaluate(scrolling)) == {False}


def test_a_narrow_table_shows_the_names_of_families_whole(opened):
    inside = """[...document.querySelectorAll('#matrix .family:not([hidden]) span')].map((one) => {
        const range = document.createRange();
        range.selectNodeContents(one);
        return range.getBoundingClientRect().right <= one.parentElement.getBoundingClientRect().right; })"""
    assert opened("narrow", fragment="#rows=failures").evaluate(inside) == [True] * 3


@pytest.mark.parametrize("width", [390, 1400])
def test_a_table_scrolls_inside_its_box_and_says_so(opened, width):
    page = opened("table", width=width)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    until(page, "!document.querySelector('#outside').hidden")
    box = page.locator(".matrix-scroller").bounding_box()
    assert box["x"] + box["width"] <= width
    page.locator("#matrix thead th").last.scroll_into_view_if_needed()
    assert page.evaluate("document.querySelector('.matrix-scroller').scrollLeft") > 0
    page.get_by_text("only rows and columns with failures").click()
    until(page, "document.querySelectorAll('#matrix [data-column]:not([hidden])').length === 7")


def ground(page: playwright.Page) -> str:
    return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))


def test_themes(opened):
    page = opened(color_scheme="dark")
    dark = ground(page)
    stroke = "getComputedStyle(document.querySelector('.drawing path, .drawing rect')).stroke"
    before = page.evaluate(stroke)
    page.get_by_role("button", name="Switch to the light theme").click()
    light = ground(page)
    assert dark != light
    assert page.evaluate(stroke) != before
    page.reload()
    assert ground(page) == light
    assert opened(color_scheme="light").evaluate("getComputedStyle(document.body).backgroundColor") == light
    page.get_by_role("button", name="Switch to the dark theme").click()
    assert ground(page) == dark


def test_changes_are_folded(opened):
    page = opened("compared")
    assert shown(page, "#changes h2") == ["Since 2026-11-19 21:04:00 UTC, commit 0123abc+"]
    assert not shown(page, "#changes li"), "what broke has the new failures"
    page.locator("#changes .c-worse summary").first.click()
    assert shown(page, "#changes .c-worse li")
    page.locator("#changes .c-neutral summary").first.click()
    assert shown(page, "#changes .c-neutral li")


def test_readable_without_javascript(opened):
    page = opened(java_script_enabled=False)
    assert page.locator("#filters").is_hidden()
    assert page.locator("noscript").is_visible()
    assert len(shown(page, ".result")) == 5  # four with findings, and one error
    assert page.locator(".chart").first.is_visible()
    assert EMBEDDING in shown(page, ".drawing .names")
    page.locator("#matrix .s-error").click()
    assert page.url.endswith("#loader-1-dcp_reshards")


@pytest.mark.parametrize("width", [PHONE, DESKTOP])
def test_a_strip_is_drawn(opened, width):
    page = opened("nights", width=width)
    strip = page.locator(".result .strip").first
    assert strip.is_visible()
    boxes = [strip.locator(f".h-{state}").bounding_box() for state in ("good", "bad")]
    assert boxes[0]["height"] < boxes[1]["height"], "failures stand out without colours"


def test_marks_in_the_table_are_drawn(opened):
    page = opened("nights")
    for kind in ("h-old", "h-flaky"):
        assert page.locator(f"#matrix .{kind}").count() == 1
        mark = "getComputedStyle(document.querySelector('#matrix .{}'), '::after').content"
        assert page.evaluate(mark.format(kind)) != "none"
    assert page.locator("#matrix .cell").count() > 2
