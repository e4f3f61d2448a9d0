"""Compares a run with earlier ones: their reports are read before anything runs, and compared when it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timezone
from fnmatch import fnmatchcase

import pytest

from pytest_fsdp_meta.plugin.settings import Settings
from pytest_fsdp_meta.reports.compare import (
    Comparison,
    compare,
    decide_outcome,
    describe_comparison,
    describe_verdict,
    mark_of,
)
from pytest_fsdp_meta.reports.history import Timeline, describe_history, read_timeline
from pytest_fsdp_meta.reports.schema import Outcome, Report
from pytest_fsdp_meta.reports.terminal import shorten_list
from pytest_fsdp_meta.reports.totals import GREEN, RED, YELLOW, Styled

MARKUP = {"worse": RED, "better": GREEN, "neutral": YELLOW}


class Comparer:
    """Compares the run with earlier reports.

    Raises UsageError if a file that was named is not a report. A report of an unknown schema is not an error, since
    every nightly run may meet one after an update: ``problem`` then says so, and the run fails as it would without a
    comparison. Neither is anything that lies in a folder of reports.
    """

    def __init__(self, settings: Settings) -> None:
        self._fail_on = settings.fail_on
        self._allowed = settings.allow_missing
        self._timeline = Timeline()
        self.comparison: Comparison | None = None
        self._now: Report | None = None
        self.is_requested = bool(settings.compare)
        if settings.compare:
            try:
                self._timeline = read_timeline(settings.compare, datetime.now(timezone.utc))
            except ValueError as error:
                raise pytest.UsageError(f"--fsdp-compare: {error}") from None
        self._outcome: Outcome | None = None

    @property
    def problem(self) -> str:
        """Why there is no comparison although one was requested."""
        return self._timeline.problem

    def add_earlier(self, report: Report) -> Report:
        """Return the report with what is known from the earlier runs: history, missing loaders, and the outcome."""
        changes = self.comparison.changes if self.comparison is not None and self._fail_on != "failure" else {}
        missing = tuple(map(str, changes.get("missing", ())))
        return replace(self._timeline.add_to(report), missing=missing, outcome=self._outcome_for(report.exit_status))

    def _outcome_for(self, exit_status: int | None) -> Outcome | None:
        """Return the outcome unless pytest exits otherwise, as when nothing was judged or the report is incomplete."""
        outcome = self._outcome
        if outcome is None or exit_status != (pytest.ExitCode.OK if outcome.passes else pytest.ExitCode.TESTS_FAILED):
            return None
        return outcome

    def compare(self, report: Report, status: int, others: str, is_selected: Callable[[str], bool]) -> int:
        """Compare the report with the earlier one, and return the exit status of a run that would exit with ``status``.

        ``others`` says what failed that is not in the report, or was not run after a failure; "" if nothing.
        ``is_selected`` says whether the run was asked for a loader.
        """
        self._now = report
        timeline = self._timeline
        if timeline.before is not None:
            allowed = self._allowed
            self.comparison = compare(
                timeline.before,
                report,
                is_selected,
                lambda loader: any(loader == one or fnmatchcase(loader, one) for one in allowed),
                timeline.which,
                timeline.notes,
            )
        if self._fail_on == "failure" or status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            return status
        bad = status != pytest.ExitCode.OK
        if self.comparison is not None:
            bad = bool(others) or self.comparison.fails(self._fail_on)
        self._outcome = decide_outcome(report, self.comparison, self._fail_on, not bad, others)
        return int(pytest.ExitCode.TESTS_FAILED if bad else pytest.ExitCode.OK)

    def lines(self, exit_status: int | None) -> Iterator[Styled]:
        """Yield the lines of the section in the terminal; the last says whether the run passes."""
        if self.problem:
            yield self.problem, RED
            yield from ((f"  {note}", {}) for note in shorten_list(self._timeline.notes))
        changes = describe_comparison(self.comparison) if self.comparison is not None else ()
        history = describe_history(self._now) if self._now is not None else ()
        for kind, headline, lines in (*changes, *history):
            yield headline, MARKUP[mark_of(kind)]
            yield from ((f"  {line}", {}) for line in lines)
        if self.comparison is not None:
            yield describe_verdict(self.comparison), RED if self.comparison.fails(self._fail_on) else GREEN
        outcome = self._outcome_for(exit_status)
        if outcome is not None:
            yield f"{outcome} (--fsdp-fail-on={outcome.fail_on})", {"bold": True} | (GREEN if outcome.passes else RED)
