"""The page of bug reports lists every report that is re-created, with the check that finds it."""

from __future__ import annotations

import re

import pytest

from fixtures import reports
from fixtures.reports import PAIRS
from tests.docs.markdown_help import ROOT

ROW = re.compile(r"^\| \[[^]]+\]\(https://github\.com/([^/]+/[^/]+)/(?:pull|issues)/(\d+)\)[^|]*\|[^|]*\| `(\w+)`")
OWN = {name: pair for name, pair in PAIRS.items() if pair.defective.__module__.startswith(f"{reports.__name__}.")}


def listed() -> list[tuple[str, str]]:
    rows = map(ROW.match, (ROOT / "results" / "reports.md").read_text("utf-8").splitlines())
    return [(f"{row[1]}#{row[2]}", row[3]) for row in rows if row is not None]


def test_the_page_lists_the_reports_that_are_re_created():
    assert sorted(listed()) == sorted((pair.pull_request, check) for pair in OWN.values() for check in pair.caught_by)


@pytest.mark.parametrize("name", OWN)
def test_a_report_has_a_fixed_twin_of_its_own_module(name):
    pair = OWN[name]
    assert pair.defective is not pair.repaired
    assert pair.repaired.__module__ == pair.defective.__module__
