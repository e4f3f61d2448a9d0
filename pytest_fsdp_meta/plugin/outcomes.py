"""What a check's result is for pytest and for the report: an outcome, a record, and a failure in one line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from pytest_fsdp_meta.catalogue import Finding, Verdict
from pytest_fsdp_meta.evidence import WorldFacts
from pytest_fsdp_meta.evidence.codec import from_plain
from pytest_fsdp_meta.plugin.markers import ConformanceSpec
from pytest_fsdp_meta.reports.run_records import ItemContext
from pytest_fsdp_meta.reports.schema import LETTERS, SKIPS, UNSETTLED, CheckRecord, FindingRecord
from pytest_fsdp_meta.reports.story import explain_pass
from pytest_fsdp_meta.reports.terminal import (
    complete_kinds,
    describe_error,
    describe_failure,
    describe_finding,
    describe_findings,
)
from pytest_fsdp_meta.text import first_line

ATTRIBUTE = "fsdp_item"
KIND = "fsdp_kind"
REPEATS = "fsdp_repeats"
"""Attributes that the plugin adds to pytest's report; xdist sends plain data under any name."""
MOST_DETAIL = 10_000
"""Characters to keep at each end of a long detail; the middle is cut out."""
DECIDING_OUTCOMES = {"setup": ("failed", "skipped"), "call": ("passed", "failed", "skipped"), "teardown": ("failed",)}
"""Phase -> the outcomes of this phase that decide the status of the item."""


@dataclass(frozen=True)
class FailureLine:
    """A failure in one line, for ``--tb=line``, pytest's short summary and plugins that annotate.

    pytest takes these from where an exception was raised in its own process, which is a line of this plugin.
    ``subject`` is what failed; pytest's summary has it in the node id. ``place`` is "path:line" in the user's code; ""
    for the line of the test.
    """

    subject: str
    message: str
    place: str = ""

    def point(self, report: pytest.TestReport, item: pytest.Item) -> None:
        """Let the report of a failed phase point to the user's code; with ``--tb=line``, it is that line alone."""
        crash = getattr(report.longrepr, "reprcrash", None)
        if crash is None or not report.failed:
            return
        path, _, number = self.place.rpartition(":")
        crash.path, crash.lineno = (path, int(number)) if path else (str(item.path), (item.location[1] or 0) + 1)
        crash.message = self.message
        if item.config.getoption("tbstyle", "auto") != "line":
            return
        crash.message = f"{self.subject}: {self.message}"
        entries = report.longrepr.reprtraceback.reprentries  # type: ignore[union-attr]
        # pytest prints this line of a test that failed, but of an error in its setup the entries.
        del entries[0 if report.when == "call" else 1 :]
        if entries:
            entries[0].lines = [f"{crash.path}:{crash.lineno}: {crash.message}"]


@dataclass(frozen=True)
class Outcome:
    """The result of one item.

    ``status`` is "passed", "failed", "skipped" or "error"; ``message`` is what pytest shows; ``reason`` is one
    line and ``detail`` the full text. ``line`` is for pytest's one-line forms. ``repeats`` is True if an earlier item
    of the loader has shown the same error in full.
    """

    status: str
    message: str = ""
    verdict: Verdict | None = None
    reason: str = ""
    detail: str = ""
    line: FailureLine | None = None
    repeats: bool = False

    @property
    def kind(self) -> str:
        """The status, or the kind of a skip, as in ``CheckRecord.kind``."""
        if self.status != "skipped":
            return self.status
        return self.verdict.why if self.verdict is not None else "by the test"


def status_of(report: pytest.TestReport | pytest.CollectReport) -> tuple[str, str, str] | None:
    """Return pytest's category, letter and word for an item's report; None where those of pytest are right.

    An error that an earlier item has shown has a category of its own, so that pytest counts a loader that raises as one
    error, not as one error per check. So have the ``UNSETTLED``, which are skips for other plugins.
    """
    # pytest-rerunfailures changes the outcome of a report whose item it runs again.
    if report.failed and getattr(report, REPEATS, False):
        return "same error", "e", "SAME ERROR"
    kind = getattr(report, KIND, "") if report.skipped else ""
    if kind in UNSETTLED:
        return kind, LETTERS[kind], kind.upper()
    # -v shows the kind in place of "SKIPPED", because pytest cuts the reason to what a line has left.
    is_own = kind in SKIPS and kind != "by the test"
    return ("skipped", LETTERS["skipped"], kind.upper()) if is_own else None


def outcome_of(verdict: Verdict, world: WorldFacts, rerun_command: Callable[[], str], strict: bool) -> Outcome:
    """Return the outcome of an item with this verdict; if ``strict``, the ``UNSETTLED`` have failed."""
    message = verdict.reason
    if strict and verdict.why in UNSETTLED:
        reason = f"{verdict.why}: {verdict.reason} (a failure with --fsdp-strict)"
        return Outcome("failed", describe_error(verdict.check.id, reason, "", rerun_command()), verdict, reason)
    if verdict.status == "failed":
        message = describe_failure(verdict, str(world), rerun_command())
    elif verdict.status == "error":
        message = describe_error(f"{verdict.check.id}: error", verdict.reason, verdict.detail, rerun_command())
    return Outcome(verdict.status, message, verdict, verdict.reason, verdict.detail)


def attached_context(report: pytest.TestReport) -> ItemContext | None:
    """Return what the item has attached to the report of this phase, if anything."""
    data = getattr(report, ATTRIBUTE, None)
    return None if data is None else from_plain(ItemContext, data)


def check_record(
    report: pytest.TestReport,
    check: CheckRecord,
    spec: ConformanceSpec,
    outcome: Outcome | None,
    raised: BaseException | None,
    root: Path,
) -> CheckRecord:
    """Return the record of a check with what this phase, which decides it, shows. Places are relative to ``root``."""
    kind, reason = _kind_and_reason(report, check.check, spec, outcome, raised)
    verdict = outcome.verdict if outcome is not None else None
    place = outcome.line.place if outcome is not None and outcome.line is not None else ""
    if Path(place.rpartition(":")[0]).is_relative_to(root):
        place = Path(place).relative_to(root).as_posix()
    return replace(
        check,
        status="skipped" if kind in SKIPS else kind,
        skip=kind if kind in SKIPS else "",
        nodeid=report.nodeid,
        reason=reason,
        detail=_shorten_detail(outcome.detail) if outcome is not None else "",
        findings=tuple(map(_record_finding, verdict.findings)) if verdict else (),
        unjudged=verdict.unjudged if verdict else {},
        all_of=complete_kinds((one.tensor for one in verdict.findings if one.tensor), verdict.model) if verdict else {},
        missing_field=verdict.missing_field if verdict else "",
        place=place,
    )


def _record_finding(one: Finding) -> FindingRecord:
    return FindingRecord(one.tensor, one.ranks, one.actual, one.expected, one.detail, one.cause, one.remedy, one.origin)


def _shorten_detail(detail: str) -> str:
    """Cut the middle out of a very long detail; return "" for a single line, which the reason already contains."""
    if "\n" not in detail:
        return ""
    return detail if len(detail) <= 2 * MOST_DETAIL else f"{detail[:MOST_DETAIL]}\n...\n{detail[-MOST_DETAIL:]}"


def describe_exception(raised: BaseException | None) -> str:
    return f"{type(raised).__name__}: {first_line(raised or '')}"


def _kind_and_reason(
    report: pytest.TestReport, check: str, spec: ConformanceSpec, outcome: Outcome | None, raised: BaseException | None
) -> tuple[str, str]:
    if report.when == "setup" and report.skipped and check in spec.skip:
        return "left out", spec.skip[check]
    if outcome is None:  # a mark, a fixture or a hook of another plugin ended the item
        return ("by the test", first_line(raised or "")) if report.skipped else ("error", describe_exception(raised))
    if outcome.status == "failed" and hasattr(report, "wasxfail") and report.skipped:
        return "xfailed", report.wasxfail.removeprefix("reason: ")
    if outcome.status == "passed" and report.failed:
        if check in spec.xfail:
            return "xpassed", spec.xfail[check]
        if raised is None:  # pytest.mark.xfail(strict=True)
            return "xpassed", first_line(report.longreprtext).removeprefix("[XPASS(strict)] ")
        return "error", describe_exception(raised)
    return outcome.kind, outcome.reason


def failure_line(record: CheckRecord, outcome: Outcome | None) -> FailureLine | None:
    """Return the findings or the reason as what pytest says of the item in one line."""
    if outcome is None:  # the exception of a fixture or of another plugin, with a line of its own
        return None
    if outcome.line is not None:
        return outcome.line
    if record.status == "failed" and record.findings:
        return FailureLine(record.check, describe_findings(record.findings, record.all_of))
    if record.status == "xpassed":
        return FailureLine(record.check, explain_pass(record.reason))
    failed = record.status in ("failed", "error")
    return FailureLine(record.check, record.reason) if failed and record.reason else None


def user_properties(context: ItemContext) -> list[tuple[str, object]]:
    """Return user properties; pytest writes each as a property of the test case in JUnit XML."""
    record = context.check
    return [
        ("fsdp_loader", context.loader.loader),
        ("fsdp_world", str(context.loader.world)),
        ("fsdp_check", record.check),
        ("fsdp_status", record.status),
        *([("fsdp_skip", record.skip)] if record.skip else []),
        *([("fsdp_reason", record.reason)] if record.reason else []),
        *(("fsdp_finding", describe_finding(finding)) for finding in record.findings),
    ]
