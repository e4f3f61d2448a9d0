"""What an item of a loader tells whoever writes the run down: plain data on pytest's report, which xdist passes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import pytest

from pytest_fsdp_meta.catalogue import Verdict
from pytest_fsdp_meta.evidence import Evidence, WorldFacts, store
from pytest_fsdp_meta.evidence.codec import from_plain, to_plain
from pytest_fsdp_meta.plugin.collection import SKIPPED
from pytest_fsdp_meta.plugin.markers import ConformanceSpec
from pytest_fsdp_meta.reports.run_records import Entry, Loaded
from pytest_fsdp_meta.reports.schema import CheckRecord, ended_badly
from pytest_fsdp_meta.reports.summary import record_findings, summarise
from pytest_fsdp_meta.reports.terminal import describe_error, describe_failure, describe_finding
from pytest_fsdp_meta.text import first_line, first_of

ATTRIBUTE = "fsdp_entry"
REPEATS = "fsdp_repeats"
RECORD = pytest.StashKey[CheckRecord]()
LONG = 10_000
"""Letters of each end of a story."""
SETTLED = {"setup": ("failed", "skipped"), "call": ("passed", "failed", "skipped"), "teardown": ("failed",)}
"""The outcomes of each phase that settle what became of an item."""


@dataclass(frozen=True)
class Outcome:
    """What came of one item: "passed", "failed", "skipped" or "error"; the message, and the verdict where there is one.

    ``reason`` is one line, ``detail`` all that there is to say. What ``repeats``, another item of the loader
    has told.
    """

    status: str
    told: str = ""
    verdict: Verdict | None = None
    reason: str = ""
    detail: str = ""
    repeats: bool = False


@dataclass(frozen=True)
class ItemContext:
    """An item's place, which check of which loader in which world, and what is known of the loader by now."""

    key: str
    """What the items of one loader in one world have in common, and no other has."""
    loader: str
    check: str
    world: WorldFacts
    known: tuple[str, ...]
    """The checks of the catalogue."""
    order: ConformanceSpec
    again: str = ""
    evidence: Evidence | None = None
    error: str = ""
    seconds: Mapping[str, float] = field(default_factory=dict)
    keeps: bool = True
    """Whether its evidence may be kept: not that which was, and not that of an example, which is not all there is."""


class ReportAttacher:
    """One per process. ``report`` is the folder of the report, and ``keep`` whether evidence is kept there."""

    def __init__(self, report: Path | None, keep: bool) -> None:
        self._report = report
        self._keep = keep
        self._told: dict[str, Evidence | str] = {}
        """What the last item has told of a loader."""

    def tell(
        self,
        item: pytest.Item,
        report: pytest.TestReport,
        share: ItemContext,
        outcome: Outcome | None,
        raised: BaseException | None,
    ) -> None:
        """Puts on the report what its phase has settled."""
        assert settles(report)
        before = item.stash.get(RECORD, None)
        if report.when == "teardown" and before is not None:
            record = ended_badly(before, _said(raised))
        else:
            record = _record(report, share, outcome, raised)
            _shorten(report, record)
        item.stash[RECORD] = record
        for properties in (item.user_properties, report.user_properties):
            properties[:] = [one for one in properties if not one[0].startswith("fsdp_")] + _properties(record, share)
        entry = Entry(share.key, share.loader, share.world, share.order.expected, record, self._loaded(share))
        setattr(report, ATTRIBUTE, to_plain(entry))
        setattr(report, REPEATS, report.failed and outcome is not None and outcome.repeats)

    def _loaded(self, share: ItemContext) -> Loaded | None:
        """None where the last item has told it already."""
        known = share.evidence or share.error
        if not known or self._told.get(share.key) is known:
            return None
        self._told[share.key] = known
        if self._report is None or share.evidence is None:
            return Loaded(share.error, share.seconds)
        file, problem = "", ""
        try:
            file = self._kept(share, share.evidence)
        except OSError as error:
            problem = f"the evidence of {share.loader} is not kept: {error}"
        return Loaded(share.error, share.seconds, file, summarise(share.evidence), problem)

    def _kept(self, share: ItemContext, evidence: Evidence) -> str:
        if not (self._keep and share.keeps):
            return ""
        assert self._report is not None
        whole = store.StoredEvidence(
            schema=store.SCHEMA,
            loader=share.loader,
            known=share.known,
            offered=share.order.checks,
            evidence=evidence,
            skip=share.order.skip,
            xfail=share.order.xfail,
        )
        return f"{store.FOLDER}/{store.write_evidence(self._report / store.FOLDER, whole).name}"


def settles(report: pytest.TestReport) -> bool:
    """Whether this phase settles what has become of the item."""
    return report.outcome in SETTLED[report.when or ""]


def unjudged(report: pytest.TestReport | pytest.CollectReport) -> tuple[str, str, str] | None:
    """pytest's count, letter and word for what another item has told: one mistake of a loader is one error."""
    return ("unjudged", "u", "UNJUDGED") if getattr(report, REPEATS, False) else None


def outcome_of(verdict: Verdict, world: WorldFacts, again: Callable[[], str]) -> Outcome:
    """``again`` gives the command that runs the item again."""
    told = verdict.reason
    if verdict.status == "failed":
        told = describe_failure(verdict, str(world), again())
    elif verdict.status == "error":
        told = describe_error(verdict.check, verdict.reason, verdict.detail, again())
    return Outcome(verdict.status, told, verdict, verdict.reason, verdict.detail)


def skip(item: pytest.Item, reason: str) -> NoReturn:
    """Told at the place of the test."""
    item.stash[SKIPPED] = reason
    pytest.skip(reason)


def settle(item: pytest.Item, outcome: Outcome, check: str, expected: str | None) -> None:
    """Turns what came of a check into pytest's outcome. ``expected`` to fail, for this reason, are findings only."""
    if outcome.status == "skipped":
        skip(item, outcome.told)
    if outcome.status == "failed" and expected is not None:
        pytest.xfail(expected)
    if outcome.status in ("failed", "error"):
        pytest.fail(outcome.told, pytrace=False)
    if expected is not None:
        pytest.fail(f"{check} passes, but xfail expects it to fail ({expected}); remove it from xfail", pytrace=False)


def told(report: pytest.TestReport) -> Entry | None:
    """What the item of the report has told, if this phase of it has."""
    data = getattr(report, ATTRIBUTE, None)
    return None if data is None else from_plain(Entry, data)


def _record(
    report: pytest.TestReport, share: ItemContext, outcome: Outcome | None, raised: BaseException | None
) -> CheckRecord:
    status, reason = _status(report, share, outcome, raised)
    verdict = outcome.verdict if outcome is not None else None
    return CheckRecord(
        check=share.check,
        status=status,
        nodeid=report.nodeid,
        reason=reason,
        detail=_whole(outcome.detail) if outcome is not None else "",
        findings=record_findings(verdict) if verdict else (),
        unjudged=verdict.unjudged if verdict else {},
        again=share.again,
    )


def _whole(detail: str) -> str:
    """In one line it says no more than the reason; a story of tens of thousands of letters loses its middle."""
    if "\n" not in detail:
        return ""
    return detail if len(detail) <= 2 * LONG else f"{detail[:LONG]}\n...\n{detail[-LONG:]}"


def _said(raised: BaseException | None) -> str:
    return f"{type(raised).__name__}: {first_line(raised or '')}"


def _status(
    report: pytest.TestReport, share: ItemContext, outcome: Outcome | None, raised: BaseException | None
) -> tuple[str, str]:
    """One of ``record.STATUSES``, and the reason in one line."""
    if report.when == "setup" and report.skipped and share.check in share.order.skip:
        return "left out", share.order.skip[share.check]
    if outcome is None:  # a mark, a fixture, or somebody else's hook
        return ("skipped", first_line(raised or "")) if report.skipped else ("error", _said(raised))
    if outcome.status == "failed" and hasattr(report, "wasxfail") and report.skipped:
        return "xfailed", report.wasxfail.removeprefix("reason: ")
    if outcome.status == "skipped":
        return (outcome.verdict.why if outcome.verdict else "skipped"), outcome.reason
    if outcome.status == "passed" and report.failed:
        return _failed_all_the_same(report, share, raised)
    return outcome.status, outcome.reason


def _failed_all_the_same(
    report: pytest.TestReport, share: ItemContext, raised: BaseException | None
) -> tuple[str, str]:
    """Though the judge found nothing: a failure was expected, or a warning is an error."""
    if share.check in share.order.xfail:
        return "xpassed", f"expected to fail: {share.order.xfail[share.check]}"
    if raised is None:  # pytest's own mark, and strict
        return "xpassed", first_line(report.longreprtext)
    return "error", _said(raised)


def _shorten(report: pytest.TestReport, record: CheckRecord) -> None:
    """pytest's short summary tells what follows the node id, which has the check: so what was found, or why not."""
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is None:
        return
    if record.status == "failed" and record.findings:
        crash.message = first_of(list(map(describe_finding, record.findings)))
    elif record.status == "error" and record.reason:
        crash.message = record.reason


def _properties(record: CheckRecord, share: ItemContext) -> list[tuple[str, object]]:
    """For pytest's own JUnit XML, where each becomes a property of the test case."""
    found = [("fsdp_finding", describe_finding(one)) for one in record.findings]
    why = [("fsdp_reason", record.reason)] if record.reason else []
    return [
        ("fsdp_loader", share.loader),
        ("fsdp_world", str(share.world)),
        ("fsdp_check", record.check),
        ("fsdp_status", record.status),
        *why,
        *found,
    ]
