"""How a run ended, in one line and in one state, which terminal, page and summary share."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_fsdp_meta.reports.compare import Comparison
from pytest_fsdp_meta.reports.schema import (
    BAD,
    JUDGED,
    STATUSES,
    Outcome,
    Report,
    count_kinds,
    describe_count,
    how_many,
)
from pytest_fsdp_meta.reports.story import describe_failures
from pytest_fsdp_meta.text import counted

IN_RESULT = tuple(status for status in STATUSES if status != "skipped" and status not in BAD)


def decide_outcome(report: Report, comparison: Comparison | None, fail_on: str, passes: bool, others: str) -> Outcome:
    """Return whether the run passes by ``--fsdp-fail-on``, and why. Without a comparison, every failure fails it.

    ``others`` says what failed that is not in the report, or was not run after a failure; "" if nothing.
    """
    reasons = _why_it_passes(comparison) if passes else (*_why_it_fails(report, comparison, fail_on), others)
    return Outcome(passes, ", ".join(filter(None, reasons)) or describe_counts_of(report), fail_on)


def _why_it_passes(comparison: Comparison | None) -> Iterator[str]:
    if comparison is not None:
        known = comparison.count("known", "changed")
        yield counted(known, "known failure") if known else ""
        yield comparison.describe_numbers(["allowed"])


def _why_it_fails(report: Report, comparison: Comparison | None, fail_on: str) -> Iterator[str]:
    if comparison is None or fail_on == "any":
        yield describe_failures(report.loaders)
    if comparison is not None:
        yield comparison.failing(fail_on)
        not_run = count_kinds(report.loaders)["not run"]
        yield f"{not_run} not run" if not_run and fail_on == "regression" else ""


def describe_counts_of(report: Report) -> str:
    """Return a text such as "3 loaders crashed, 2 checks failed, 41 passed". Skipped checks are not counted."""
    counts = count_kinds(report.loaders)
    others = [describe_count(counts[status], status) for status in IN_RESULT if counts[status]]
    failures = describe_failures(report.loaders, len(report.missing))
    return ", ".join(filter(None, [failures, *others])) or "nothing judged"


def describe_result(report: Report) -> str:
    """Return the counts of a run, and the exit status where they do not explain it."""
    counts = describe_counts_of(report)
    return f"{counts}, pytest exited with {report.exit_status}" if state_of(report) == "otherwise" else counts


def state_of(report: Report) -> str:
    """Return the state that decides the colour of a run.

    It is "incomplete", "failed", "known" (it passes with known failures), "otherwise" (it failed for a reason that no
    check shows: another test, a crash, an incomplete report), "empty" (nothing was judged), "differs" (nothing else is
    wrong) or "passed".
    """
    if not report.complete:
        return "incomplete"
    outcome = report.outcome
    if outcome is not None and not outcome.passes:
        return "failed"
    if report.is_bad:
        return "known" if outcome is not None else "failed"
    if report.exit_status:
        return "otherwise"
    counts = count_kinds(report.loaders)
    if counts["differs"]:
        return "differs"
    return "passed" if how_many(counts, JUDGED) else "empty"
