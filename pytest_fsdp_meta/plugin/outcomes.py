"""Turn the result of a check into pytest's outcome, and attach it to pytest's report of the item.

The report of the run is written from these attachments. They consist of plain types, so xdist can send them from its
workers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import pytest

from pytest_fsdp_meta.catalogue import Verdict
from pytest_fsdp_meta.evidence import Evidence, WorldFacts, store
from pytest_fsdp_meta.evidence.codec import from_plain, to_plain
from pytest_fsdp_meta.plugin.collection import SKIPPED
from pytest_fsdp_meta.plugin.failure_lines import LINE, FailureLine
from pytest_fsdp_meta.plugin.markers import ConformanceSpec
from pytest_fsdp_meta.reports.failures import REMOVE, explain_pass
from pytest_fsdp_meta.reports.run_records import ItemContext, with_later_error
from pytest_fsdp_meta.reports.schema import SKIPS, CheckRecord
from pytest_fsdp_meta.reports.summary import evenness_of, record_findings, summarise
from pytest_fsdp_meta.reports.terminal import describe_error, describe_failure, describe_finding
from pytest_fsdp_meta.text import first_line, first_of

ATTRIBUTE = "fsdp_item"
REPEATS = "fsdp_repeats"
"""Attributes that the plugin adds to pytest's report; xdist sends plain data under any name."""
RECORD = pytest.StashKey[CheckRecord]()
MOST_DETAIL = 10_000
"""Characters to keep at each end of a long detail; the middle is cut out."""
DECIDING_OUTCOMES = {"setup": ("failed", "skipped"), "call": ("passed", "failed", "skipped"), "teardown": ("failed",)}
"""Phase -> the outcomes of this phase that decide the status of the item."""


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


class ReportAttacher:
    """Attaches the results of items to pytest's reports, and stores evidence. There is one per process.

    ``report`` is the folder of the report, in which evidence is stored, if one is written.
    """

    def __init__(self, report: Path | None) -> None:
        self._report = report
        self._attached: dict[str, Evidence | str] = {}
        """Key of a loader -> the evidence or error that its latest item attached."""
        self._shown: dict[tuple[str, str], str] = {}
        """(key of a loader, error of a fixture) -> node id of the item that has shown it in full."""

    def attach(
        self,
        item: pytest.Item,
        report: pytest.TestReport,
        context: ItemContext,
        spec: ConformanceSpec,
        outcome: Outcome | None,
        raised: BaseException | None,
        evidence: Evidence | None = None,
        known: Sequence[str] = (),
    ) -> None:
        """Attach the status of an item to the report of the phase that decides it.

        ``context.check`` has the id, node id and rerun command of the check; the status is added here. ``known``
        has the ids of the catalogue's checks. They are stored with the evidence; without them, nothing is stored.
        """
        assert decides_status(report)
        before = item.stash.get(RECORD, None)
        if report.when == "teardown" and before is not None:
            record = with_later_error(before, _describe_exception(raised))
        else:
            record = _check_record(report, context.check, spec, outcome, raised)
            record = replace(record, place=_place_of(outcome, item.config.rootpath))
            _stash_line(item, record, outcome)
        item.stash[RECORD] = record
        context = self._add_loader_results(replace(context, check=record), spec, evidence, known)
        for properties in (item.user_properties, report.user_properties):
            others = [(name, value) for name, value in properties if not name.startswith("fsdp_")]
            properties[:] = others + _user_properties(context)
        setattr(report, ATTRIBUTE, to_plain(context))
        repeats = outcome.repeats if outcome is not None else self._repeats_fixture_error(report, context.key, record)
        setattr(report, REPEATS, report.failed and repeats)

    def _repeats_fixture_error(self, report: pytest.TestReport, key: str, record: CheckRecord) -> bool:
        """Return whether an earlier item of the loader has shown this error of a fixture; then name that item alone."""
        if report.when != "setup" or not report.failed:
            return False
        first = self._shown.setdefault((key, record.reason), report.nodeid)
        if first != report.nodeid:
            report.longrepr = f"{record.check}: same error as {first}: {record.reason}"
        return first != report.nodeid

    def _add_loader_results(
        self, context: ItemContext, spec: ConformanceSpec, evidence: Evidence | None, known: Sequence[str]
    ) -> ItemContext:
        """Add the loader's evidence, error and durations to the context, unless its previous item attached them."""
        latest = evidence or context.error
        if not latest or self._attached.get(context.key) is latest:
            return replace(context, error="", seconds={})
        self._attached[context.key] = latest
        if evidence is None:
            return context
        if evidence.world.simulated:
            context = replace(context, sizes=evidence.simulation or ())
        else:
            context = replace(context, evenness=evenness_of(evidence.inventory))
        if self._report is None:
            return context
        file, problem = "", ""
        if known:
            try:
                file = _store_evidence(self._report / store.FOLDER, context.loader, spec, evidence, known)
            except OSError as error:
                problem = f"the evidence of {context.loader} was not stored: {error}"
        return replace(context, evidence=file, problem=problem, summary=summarise(evidence))


def _store_evidence(folder: Path, loader: str, spec: ConformanceSpec, evidence: Evidence, known: Sequence[str]) -> str:
    """Write the evidence and return its file, relative to the report. Raises OSError."""
    stored = store.StoredEvidence(
        schema=store.SCHEMA,
        loader=loader,
        known=tuple(known),
        offered=spec.checks,
        evidence=evidence,
        skip=spec.skip,
        xfail=spec.xfail,
    )
    return f"{folder.name}/{store.write_evidence(folder, stored).name}"


def decides_status(report: pytest.TestReport) -> bool:
    """Return whether this phase decides the status of the item."""
    return report.outcome in DECIDING_OUTCOMES[report.when or ""]


def repeated_error_status(report: pytest.TestReport | pytest.CollectReport) -> tuple[str, str, str] | None:
    """Return pytest's category, letter and word for an error that an earlier item has shown; None for other reports.

    With this category, pytest counts a loader that raises as one error, not as one error per check.
    """
    # pytest-rerunfailures changes the outcome of a report whose item it runs again.
    repeats = report.failed and getattr(report, REPEATS, False)
    return ("same error", "e", "SAME ERROR") if repeats else None


def outcome_of(verdict: Verdict, world: WorldFacts, rerun_command: Callable[[], str]) -> Outcome:
    """Return the outcome of an item with this verdict."""
    message = verdict.reason
    if verdict.status == "failed":
        message = describe_failure(verdict, str(world), rerun_command())
    elif verdict.status == "error":
        message = describe_error(f"{verdict.check.id}: error", verdict.reason, verdict.detail, rerun_command())
    return Outcome(verdict.status, message, verdict, verdict.reason, verdict.detail)


def skip(item: pytest.Item, reason: str) -> NoReturn:
    """Skip the item; pytest then reports the location of the test, not of this line."""
    item.stash[SKIPPED] = reason
    pytest.skip(reason)


def raise_outcome(item: pytest.Item, outcome: Outcome, check: str, expected: str | None) -> None:
    """Raise pytest's outcome for the outcome of a check; return if the check passed.

    ``expected`` is the reason from ``xfail=``. It makes findings an xfail, but not errors.
    """
    if outcome.status == "skipped":
        skip(item, outcome.message)
    if outcome.status == "failed" and expected is not None:
        pytest.xfail(expected)
    if outcome.status in ("failed", "error"):
        pytest.fail(outcome.message, pytrace=False)
    if expected is not None:
        pytest.fail(f"{explain_pass(expected, check)}; {REMOVE}", pytrace=False)


def attached_context(report: pytest.TestReport) -> ItemContext | None:
    """Return what the item has attached to the report of this phase, if anything."""
    data = getattr(report, ATTRIBUTE, None)
    return None if data is None else from_plain(ItemContext, data)


def _check_record(
    report: pytest.TestReport,
    check: CheckRecord,
    spec: ConformanceSpec,
    outcome: Outcome | None,
    raised: BaseException | None,
) -> CheckRecord:
    kind, reason = _kind_and_reason(report, check.check, spec, outcome, raised)
    verdict = outcome.verdict if outcome is not None else None
    return replace(
        check,
        status="skipped" if kind in SKIPS else kind,
        skip=kind if kind in SKIPS else "",
        nodeid=report.nodeid,
        reason=reason,
        detail=_shorten_detail(outcome.detail) if outcome is not None else "",
        findings=record_findings(verdict) if verdict else (),
        unjudged=verdict.unjudged if verdict else {},
    )


def _place_of(outcome: Outcome | None, root: Path) -> str:
    """Return the user's line that an error points to, relative to ``root`` if it is inside; else ""."""
    if outcome is None or outcome.line is None or not outcome.line.place:
        return ""
    path, _, line = outcome.line.place.rpartition(":")
    inside = Path(path).is_relative_to(root)
    return f"{Path(path).relative_to(root).as_posix() if inside else path}:{line}"


def _shorten_detail(detail: str) -> str:
    """Cut the middle out of a very long detail; return "" for a single line, which the reason already contains."""
    if "\n" not in detail:
        return ""
    return detail if len(detail) <= 2 * MOST_DETAIL else f"{detail[:MOST_DETAIL]}\n...\n{detail[-MOST_DETAIL:]}"


def _describe_exception(raised: BaseException | None) -> str:
    return f"{type(raised).__name__}: {first_line(raised or '')}"


def _kind_and_reason(
    report: pytest.TestReport,
    check: str,
    spec: ConformanceSpec,
    outcome: Outcome | None,
    raised: BaseException | None,
) -> tuple[str, str]:
    """Return the ``CheckRecord.kind`` of the item, and the reason in one line."""
    if report.when == "setup" and report.skipped and check in spec.skip:
        return "left out", spec.skip[check]
    if outcome is None:  # a mark, a fixture or a hook of another plugin ended the item
        return ("by the test", first_line(raised or "")) if report.skipped else ("error", _describe_exception(raised))
    if outcome.status == "failed" and hasattr(report, "wasxfail") and report.skipped:
        return "xfailed", report.wasxfail.removeprefix("reason: ")
    if outcome.status == "skipped":
        return (outcome.verdict.why if outcome.verdict else "by the test"), outcome.reason
    if outcome.status == "passed" and report.failed:
        return _failed_after_pass(report, check, spec, raised)
    return outcome.status, outcome.reason


def _failed_after_pass(
    report: pytest.TestReport, check: str, spec: ConformanceSpec, raised: BaseException | None
) -> tuple[str, str]:
    """Return kind and reason of an item that failed although its check passed."""
    if check in spec.xfail:
        return "xpassed", spec.xfail[check]
    if raised is None:  # pytest.mark.xfail(strict=True)
        return "xpassed", first_line(report.longreprtext).removeprefix("[XPASS(strict)] ")
    return "error", _describe_exception(raised)


def _stash_line(item: pytest.Item, record: CheckRecord, outcome: Outcome | None) -> None:
    """Stash the findings or the reason as what pytest says of the item in one line."""
    if outcome is None:  # the exception of a fixture or of another plugin, with a line of its own
        return
    if outcome.line is not None:
        item.stash[LINE] = outcome.line
    elif record.status == "failed" and record.findings:
        item.stash[LINE] = FailureLine(record.check, first_of(list(map(describe_finding, record.findings))))
    elif record.status == "xpassed":
        item.stash[LINE] = FailureLine(record.check, explain_pass(record.reason))
    elif record.status == "error" and record.reason:
        item.stash[LINE] = FailureLine(record.check, record.reason)


def _user_properties(context: ItemContext) -> list[tuple[str, object]]:
    """Return user properties; pytest writes each as a property of the test case in JUnit XML."""
    record = context.check
    return [
        ("fsdp_loader", context.loader),
        ("fsdp_world", str(context.world)),
        ("fsdp_check", record.check),
        ("fsdp_status", record.status),
        *([("fsdp_skip", record.skip)] if record.skip else []),
        *([("fsdp_reason", record.reason)] if record.reason else []),
        *(("fsdp_finding", describe_finding(finding)) for finding in record.findings),
    ]
