"""A browser for the tests of pages."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.reports.chromium import QUIET, chromium


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
