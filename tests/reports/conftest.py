"""A browser for the tests of pages, and the pages that it opens."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_fsdp_meta.reports.compare import compare
from pytest_fsdp_meta.reports.page import write_page
from pytest_fsdp_meta.reports.schema import CheckHistory, LoaderRecord, Outcome, Report
from tests.reports import report_factory as factory
from tests.reports.chromium import QUIET, chromium
from tests.reports.many_loaders import nightly, yesterday
from tests.reports.report_factory import check, finding, header, report

DESKTOP, HEIGHT = 1440, 1080


def all_failing() -> Report:
    """Return a run in which every loader fails, each for a cause of its own."""
    made = nightly(broken=False)

    def broken(number: int) -> dict[str, Any]:
        cause = f"cause {chr(65 + number % 26)}{chr(65 + number // 26)}"
        return {"loss_parity": check("loss_parity", "failed", [finding(None, cause=cause)])}

    loaders = [
        replace(one, checks=tuple(broken(number).get(each.check, each) for each in one.checks))
        for number, one in enumerate(made.loaders)
    ]
    return replace(made, loaders=tuple(loaders))


def flaky() -> Report:
    """Return a nightly run in which a check of one loader is flaky."""
    made = nightly()
    history = CheckHistory(".F.F.", flaky=True)
    loaders = (
        replace(one, checks=(replace(one.checks[0], history=history), *one.checks[1:]))
        if one.loader == "tests/test_zoo.py::test_loads[bert-tp]"
        else one
        for one in made.loaders
    )
    return replace(made, loaders=tuple(loaders))


def with_others(*loaders: LoaderRecord) -> Report:
    """Return a run of these loaders and three that pass, which are enough for a table in place of a list."""
    return report(*loaders, *(factory.loader(f"tests/test_llama.py::test_{number}") for number in range(3)))


def alone() -> Report:
    """Return a run of one loader that passes, without some of what could be checked."""
    reason = "Subject(data=...) is not declared"
    data = ("batches_follow_the_mesh", "batches_resume")
    checks = {one: check(one, "not declared", reason=reason) for one in data}
    checks["dcp_round_trip"] = check("dcp_round_trip", "partly checked", reason="not judged: 1 buffer")
    return report(replace(factory.loader(checks=checks), notes={"even shards": ("lm_head.weight (128 on dim 0)",)}))


def failed() -> Report:
    """Return a run of one loader with three findings, and so few tensors that its page has no filters."""
    checks = {}
    for one in ("no_uninitialized_memory", "unsharded_modules_are_not_gathered", "loss_parity"):
        checks[one] = check(one, "failed", [finding("a.weight", cause=f"cause of {one}", remedy="fix it")])
    checks["batches_resume"] = check("batches_resume", "not declared", reason="Subject(data=...) is not declared")
    return report(factory.loader(checks=checks, tensors=[]))


PAGES: dict[str, Callable[[], Report]] = {
    "usual": report,
    "alone": alone,
    "failed": failed,
    "table": lambda: with_others(factory.broken_loader()),
    "narrow": lambda: with_others(*failed().loaders),
    "hostile": factory.hostile,
    "empty": lambda: replace(report(), loaders=()),
    "cut": lambda: report(complete=False, exit_status=None),
    "raised": lambda: with_others(factory.raised()),
    "compared": report,
    "nights": factory.nights,
    "known": lambda: report(
        outcome=Outcome(True, "1 known failure", "regression"),
        header=header(settings={"PYTEST_ADDOPTS": "--fsdp-compare=reports"}),
    ),
    "nightly": nightly,
    "failing": all_failing,
    "passing": lambda: report(*nightly(broken=False).loaders[1:13]),
    "flaky": flaky,
}
MANY = ("nightly", "failing", "passing", "flaky")
"""The pages of a run of 130 loaders, or of some of them."""
BEFORE: dict[str, Callable[[Report], Report]] = {
    "compared": factory.passing,
    "hostile": factory.passing,
    "nightly": lambda now: yesterday(),
}
"""The earlier run that a page is compared with."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    # In CI a missing package is an error: a test that is skipped there runs nowhere.
    import_package = importlib.import_module if os.environ.get("CI") else pytest.importorskip
    with import_package("playwright.sync_api").sync_playwright() as started:
        found = chromium(started)
        if found is None:
            message = "no Chromium: `make browser` installs it, or says how"
            (pytest.fail if os.environ.get("CI") else pytest.skip)(message)
        opened = started.chromium.launch(executable_path=found, args=QUIET)
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("pages")

    def file(name: str) -> Path:
        path = folder / f"{name}.html"
        if not path.exists():
            now = PAGES[name]()
            before = BEFORE[name](now) if name in BEFORE else None
            now = now if before is None else factory.with_history(now, [before])
            write_page(now, path, compare(before, now) if before else None)
        return path

    return file


@pytest.fixture
def opened(browser, files) -> Iterator[Callable[..., Any]]:
    """Yield a function that opens a page. Any network request, message or error of the page fails the test."""
    contexts, requests, messages = [], [], []

    def open_page(
        name: str = "usual", fragment: str = "", width: int = DESKTOP, script: str = "", **settings: Any
    ) -> Any:
        context = browser.new_context(viewport={"width": width, "height": HEIGHT}, **settings)
        context.set_default_timeout(60_000)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: messages.append(message.text))
        page.on("pageerror", lambda error: messages.append(str(error)))
        page.on("dialog", lambda dialog: messages.append(dialog.message))
        page.on("request", lambda request: requests.append(request.url))
        if script:
            page.add_init_script(script)
        page.goto(files(name).as_uri() + fragment)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert messages == []
    assert [url for url in requests if not url.startswith(("file://", "data:"))] == []
    assert {Path(url.split("#")[0]).suffix for url in requests if url.startswith("file://")} == {".html"}
