"""What an item of a loader tells whoever writes the run down: plain data on pytest's report, which xdist passes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from pytest_fsdp_meta import kept
from pytest_fsdp_meta.catalogue import Verdict
from pytest_fsdp_meta.evidence import Evidence, WorldFacts
from pytest_fsdp_meta.plain import from_plain, to_plain
from pytest_fsdp_meta.reports.ledger import Entry, Loaded
from pytest_fsdp_meta.reports.record import CheckRecord
from pytest_fsdp_meta.reports.summary import record_findings, summarise
from pytest_fsdp_meta.reports.terminal import describe_finding
from pytest_fsdp_meta.words import first_line

ATTRIBUTE = "fsdp_entry"
SETTLED = {"setup": ("failed", "skipped"), "call": ("passed", "failed", "skipped"), "teardown": ("failed",)}
"""The outcomes of each phase that settle what became of an item."""


@dataclass(frozen=True)
class Outcome:
    """What came of one item: "passed", "failed", "skipped" or "error"; the message, and the verdict where there is one.

    ``reason`` is one line.
    """

    status: str
    told: str = ""
    verdict: Verdict | None = None
    reason: str = ""


@dataclass(frozen=True)
class Share:
    """An item's place, which check of which loader in which world, and what is known of the loader by now."""

    loader: str
    check: str
    world: WorldFacts
    offered: tuple[str, ...]
    skip: Mapping[str, str] = field(default_factory=dict)
    xfail: Mapping[str, str] = field(default_factory=dict)
    again: str = ""
    evidence: Evidence | None = None
    error: str = ""
    seconds: Mapping[str, float] = field(default_factory=dict)
    keeps: bool = True
    """Whether its evidence may be kept: that which was, is."""


class Teller:
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
        share: Share,
        outcome: Outcome | None,
        raised: BaseException | None,
    ) -> None:
        """Puts on the report what its phase has settled, if anything."""
        if report.outcome not in SETTLED[report.when or ""]:
            return
        status, reason = _status(report, share, outcome, raised)
        verdict = outcome.verdict if outcome is not None else None
        record = CheckRecord(
            check=share.check,
            status=status,
            nodeid=report.nodeid,
            reason=reason,
            findings=record_findings(verdict) if verdict else (),
            unjudged=verdict.unjudged if verdict else {},
            again=share.again,
        )
        item.user_properties += _properties(record, share)
        _shorten(report, record)
        try:
            loaded = self._loaded(share)
        except OSError as error:
            item.warn(pytest.PytestWarning(f"--fsdp-keep-evidence: not kept: {error}"))
            loaded = Loaded(share.error, share.seconds)
        entry = Entry(share.loader, share.world, share.offered, record, loaded)
        setattr(report, ATTRIBUTE, to_plain(entry))

    def _loaded(self, share: Share) -> Loaded | None:
        """None where the last item has told it already."""
        known = share.evidence or share.error
        if not known or self._told.get(share.loader) is known:
            return None
        self._told[share.loader] = known
        if self._report is None or share.evidence is None:
            return Loaded(share.error, share.seconds)
        return Loaded(share.error, share.seconds, self._kept(share, share.evidence), summarise(share.evidence))

    def _kept(self, share: Share, evidence: Evidence) -> str:
        if not (self._keep and share.keeps):
            return ""
        assert self._report is not None
        whole = kept.Kept(kept.SCHEMA, share.loader, share.offered, evidence, share.skip, share.xfail, share.seconds)
        return f"{kept.FOLDER}/{kept.write(self._report / kept.FOLDER, whole).name}"


def told(report: pytest.TestReport) -> Entry | None:
    """What the item of the report has told, if this phase of it has."""
    data = getattr(report, ATTRIBUTE, None)
    return None if data is None else from_plain(Entry, data)


def _status(
    report: pytest.TestReport, share: Share, outcome: Outcome | None, raised: BaseException | None
) -> tuple[str, str]:
    """One of ``record.STATUSES``, and the reason in one line."""
    why = first_line(raised) if raised is not None else ""
    if report.when == "setup" and report.skipped and share.check in share.skip:
        return "left out", share.skip[share.check]
    if outcome is None or report.when == "teardown":  # a mark, a fixture, or somebody else's hook
        return ("skipped", why) if report.skipped else ("error", f"{type(raised).__name__}: {why}")
    if hasattr(report, "wasxfail") and report.skipped:
        return "xfailed", report.wasxfail.removeprefix("reason: ")
    if outcome.status == "skipped":
        return _skipped(outcome.verdict), outcome.reason
    if outcome.status == "passed" and report.failed:
        return (
            ("xpassed", f"expected to fail: {share.xfail[share.check]}")
            if share.check in share.xfail
            else ("error", why)
        )
    return outcome.status, outcome.reason


def _shorten(report: pytest.TestReport, record: CheckRecord) -> None:
    """pytest's short summary tells what follows the node id, which has the check: so what was found, or why not."""
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is None:
        return
    if record.status == "failed" and record.findings:
        more = f" and {len(record.findings) - 1} more" if len(record.findings) > 1 else ""
        crash.message = describe_finding(record.findings[0]) + more
    elif record.status == "error" and record.reason:
        crash.message = record.reason


def _skipped(verdict: Verdict | None) -> str:
    if verdict is None:
        return "skipped"
    return "undeclared" if verdict.undeclared else "blocked" if verdict.blocked else "nothing"


def _properties(record: CheckRecord, share: Share) -> Sequence[tuple[str, object]]:
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
