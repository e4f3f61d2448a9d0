"""A run beside an earlier one: what is told of it, and what exit status comes of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_fsdp_meta.plain import write_whole
from pytest_fsdp_meta.reports.badge import badge_json, badge_svg
from pytest_fsdp_meta.reports.changes import describe_comparison, verdict
from pytest_fsdp_meta.reports.compare import Comparison, compare
from pytest_fsdp_meta.reports.markdown import summarise_run
from pytest_fsdp_meta.reports.record import Report
from pytest_fsdp_meta.reports.totals import GREEN, RED, YELLOW, Line
from pytest_fsdp_meta.reports.writing import OtherSchema, read_report
from pytest_fsdp_meta.settings import Settings

PAGES = ("summary.md", "badge.json", "badge.svg")
MARKUP = {"worse": RED, "better": GREEN, "odd": YELLOW}


class Comparer:
    """The earlier report is read before anything runs: raises UsageError where there is none in the file.

    A report of another schema is the fate of every nightly run once, after an update: nothing is compared then, which
    is told, and what fails a run is what does without a comparison.
    """

    def __init__(self, settings: Settings) -> None:
        self._fail_on = settings.fail_on
        self._before: Report | None = None
        self.comparison: Comparison | None = None
        self.problem = ""
        """Why nothing is compared, though it was asked for."""
        if settings.compare:
            try:
                self._before = read_report(Path(settings.compare))
            except OtherSchema as error:
                self.problem = f"nothing is compared: {error}"
            except ValueError as error:
                raise pytest.UsageError(f"--fsdp-compare: {error}") from None

    @property
    def asked(self) -> bool:
        return self._before is not None or bool(self.problem)

    def settle(self, report: Report, status: int, others_failed: bool) -> int:
        """The exit status, where the run would end with ``status``.

        ``others_failed``: a test that is no loader did, or has not run because another failed.
        """
        if self._before is None:
            return status
        self.comparison = compare(self._before, report)
        if self._fail_on == "failure" or status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            return status
        bad = others_failed or self.comparison.fails(self._fail_on)
        return int(pytest.ExitCode.TESTS_FAILED if bad else pytest.ExitCode.OK)

    def lines(self) -> Iterator[Line]:
        """For the terminal."""
        if self.problem:
            yield self.problem, RED
        if self.comparison is None:
            return
        for mark, headline, lines in describe_comparison(self.comparison):
            yield headline, MARKUP[mark]
            yield from ((f"  {line}", {}) for line in lines)
        yield verdict(self.comparison), RED if self.comparison.fails(self._fail_on) else GREEN

    def write(self, report: Report, folder: Path) -> None:
        """The summary and the badge. Raises OSError."""
        write_whole(folder / "summary.md", summarise_run(report, self.comparison, self.problem).encode())
        write_whole(folder / "badge.json", badge_json(report).encode())
        write_whole(folder / "badge.svg", badge_svg(report).encode())
