"""The differences between the reports of two runs, their description, and whether the later run passes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pytest_fsdp_meta.reports.history import describe_moment, name_of, repeated_in, run_of
from pytest_fsdp_meta.reports.schema import (
    FAILED,
    JUDGED,
    PASSED,
    CheckRecord,
    FindingRecord,
    LoaderRecord,
    Outcome,
    Report,
    count_kinds,
    is_bad,
)
from pytest_fsdp_meta.reports.story import describe_counts_of, describe_failures, explain_pass
from pytest_fsdp_meta.reports.terminal import describe_finding, shorten_list
from pytest_fsdp_meta.text import counted, first_of, grouped, printable, without_numbers

MOST_CHECKS = 5
"""Checks of a loader that are named."""


@dataclass(frozen=True)
class Kind:
    """A kind of change: its headline, its number in one line, and what it means for the run."""

    headline: str
    number: str = ""
    """With "{}" for the number, and "(s)" for the ending of several."""
    mark: str = "neutral"
    """Or "worse" or "better"."""
    fails: tuple[str, ...] = ()
    """The values of ``--fsdp-fail-on`` for which such a change fails the run."""
    hint: str = ""


ALWAYS = ("regression", "any")
MISSING = " (removed or renamed on purpose? --fsdp-allow-missing accepts it)"
KINDS = {
    # The check did not fail before, or fails on other tensors, or with another error. Every failure fails "any".
    "failures": Kind("new failures", "{} new failure(s)", "worse", ("regression",)),
    # The check differs now, and neither differed nor failed before.
    "differing": Kind("new differences", "{} new difference(s)", "worse", ALWAYS),
    # Loaders that only the earlier run has: nothing judges them any more.
    "missing": Kind("missing loaders", "{} loader(s) missing", "worse", ALWAYS, MISSING),
    # Judged before. The check might have failed in a new way.
    "dependent": Kind("skipped because of a failed check", "{} skipped because of a failed check", "worse", ALWAYS),
    # Perhaps on purpose, but the promise may be broken unnoticed.
    "no_longer_judged": Kind("no longer judged", "{} no longer judged", fails=("any",)),
    "fixed": Kind("fixed", "{} fixed", "better"),
    # Failing in both runs: with other findings on the same tensors or on fewer, or with the same findings.
    "changed": Kind("known failures, other findings", "{} known with other findings"),
    "known": Kind("known failures, same findings", "{} known"),
    "expected": Kind("xfailed now", "{} xfailed now"),
    "added": Kind("new in this run", "{} new"),
    "allowed": Kind("missing loaders that are allowed", "{} loader(s) missing as allowed"),
    # Loaders that this run was not asked for.
    "unselected": Kind("not selected in this run", "{} loader(s) not selected", fails=("any",)),
    "removed": Kind("checks that this version lacks", "{} check(s) removed", fails=("any",)),
    "environment": Kind("environment changes"),
    "caveats": Kind("limits of this comparison"),
    "left_out": Kind("earlier reports left out"),
}
"""Every kind of change, in the order of lists and lines. A check has one change at most."""


@dataclass(frozen=True)
class Change:
    """One check of one loader in both runs; None where a run does not have the check."""

    loader: str
    check: str
    before: CheckRecord | None
    now: CheckRecord | None

    @property
    def identity(self) -> tuple[str, str]:
        """Errors of a loader with the same reason are one change: most often it crashed."""
        # What failed before and fails now is counted by what it is now.
        record = self.now if self.now is not None and self.now.status in FAILED else self.before
        is_error = record is not None and record.status == "error"
        return self.loader, f"error: {record.reason}" if record is not None and is_error else self.check


@dataclass(frozen=True)
class Comparison:
    """The changes from an earlier run, by kind."""

    before: Report
    now: Report
    changes: Mapping[str, tuple[Change | str, ...]]
    """Key of ``KINDS`` -> its changes, or a line for each."""
    which: str = ""
    """Which of several earlier runs ``before`` is."""

    def count(self, *kinds: str) -> int:
        """Return the number of changes of these kinds."""
        changes = (change for kind in kinds for change in self.changes.get(kind, ()))
        return len({change if isinstance(change, str) else change.identity for change in changes})

    def describe_numbers(self, kinds: Iterable[str] = KINDS) -> str:
        """Return how many changes of these kinds there are, such as "1 new failure, 2 fixed"."""
        counts = ((KINDS[kind].number, self.count(kind)) for kind in kinds)
        known = (text.format(number).replace("(s)", "s" * (number > 1)) for text, number in counts if number)
        return ", ".join(filter(None, known))

    def failing(self, on: str) -> str:
        """Return the changes for which the run fails with ``--fsdp-fail-on`` set to ``on``; "" for none."""
        return self.describe_numbers(kind for kind, one in KINDS.items() if on in one.fails)

    def fails(self, on: str) -> bool:
        """Return whether the run fails with ``--fsdp-fail-on`` set to ``on``."""
        if on == "regression":
            # A check that was not even run might have failed in a new way.
            return bool(self.failing(on) or count_kinds(self.now.loaders)["not run"])
        return bool(self.failing(on)) or is_bad(self.now.loaders)


def compare(
    before: Report,
    now: Report,
    is_selected: Callable[[str], bool] = lambda loader: True,
    is_allowed: Callable[[str], bool] = lambda loader: False,
    which: str = "",
    left_out: Iterable[str] = (),
) -> Comparison:
    """Compare two reports. Loaders are identified by node id, and changes are in the order of ``now``.

    Of a loader that ``now`` lacks, ``is_selected`` says whether the run was asked for it, and ``is_allowed`` whether it
    may be missing. ``left_out`` says why files that were given as earlier reports were not read.
    """
    repeated = repeated_in(before, now)
    old, new = _by_name(before, repeated), _by_name(now, repeated)
    in_both = [(old[name], new[name]) for name in new if name in old]
    changes: dict[str, list[Change | str]] = {}

    def add(kind: str, lines: Iterable[Change | str]) -> None:
        changes.setdefault(kind, []).extend(lines)

    for name, record in new.items():
        checks = {check.check: check for check in record.checks}
        earlier = {check.check: check for check in old[name].checks} if name in old else {}
        for check in dict.fromkeys((*checks, *earlier)):
            change = Change(name, check, earlier.get(check), checks.get(check))
            add(_classify(change), [change])
    ids, ids_now = ({check.check: None for check in report.header.catalogue} for report in (before, now))
    add("added", (name for name in new if name not in old))
    add("added", (id_ for id_ in ids_now if id_ not in ids))
    add("removed", (id_ for id_ in ids if id_ not in ids_now))
    for name in (name for name in old if name not in new):
        loader = old[name].loader
        add("unselected" if not is_selected(loader) else "allowed" if is_allowed(loader) else "missing", [name])
    add("environment", _environment_changes(before.header.versions, now.header.versions))
    add("caveats", _caveats(before, now, in_both))
    add("left_out", left_out)
    return Comparison(before, now, {kind: tuple(changes[kind]) for kind in KINDS if changes.get(kind)}, which)


def _by_name(report: Report, repeated: frozenset[str]) -> dict[str, LoaderRecord]:
    named: dict[str, LoaderRecord] = {}
    for record in report.loaders:
        name = name_of(record, repeated)
        while name in named:
            name += " again"
        named[name] = record
    return named


def _classify(change: Change) -> str:
    """Return the kind of a change; "" for one of no interest."""
    before, now = change.before, change.now
    was, kind = (check.kind if check is not None else "" for check in (before, now))
    if before is not None and now is not None and kind in FAILED and was in FAILED:
        if kind == "error" and was != "error":
            return "failures"
        if _without_numbers(before) == _without_numbers(now):
            return "known"
        # A finding on a new tensor is new, and another error may hide new findings.
        known = {finding.tensor for finding in before.findings}
        is_worse = _is_reason(now) or any(finding.tensor not in known for finding in now.findings)
        return "failures" if is_worse else "changed"
    if kind in FAILED:
        return "failures"
    if kind in PASSED:
        return "fixed" if was in (*FAILED, "xfailed", "differs") else ""
    if kind == "xfailed":
        return "expected" if was in (*FAILED, *PASSED, "differs") else ""
    if kind == "depends on a failed check":
        return "dependent" if was in JUDGED else ""
    if kind == "differs" and was not in (*FAILED, "xfailed"):
        return "" if was == "differs" else "differing"
    return "no_longer_judged" if was in (*FAILED, *JUDGED) else ""


def _is_reason(check: CheckRecord) -> bool:
    """Return whether the failure is its reason: an error, or a failure without findings, as with ``--fsdp-strict``."""
    return check.status == "error" or (check.status == "failed" and not check.findings)


def _without_numbers(check: CheckRecord) -> tuple[str, str, frozenset[FindingRecord]]:
    """Return what identifies a failure. Numbers are masked, because those of a broken model vary from run to run."""

    def mask(finding: FindingRecord) -> FindingRecord:
        actual, expected = map(without_numbers, (finding.actual, finding.expected))
        return replace(finding, actual=actual, expected=expected, detail="", origin="", since=None)

    reason = without_numbers(check.reason) if _is_reason(check) else ""
    return check.status, reason, frozenset(map(mask, check.findings))


def _caveats(before: Report, now: Report, in_both: Iterable[tuple[LoaderRecord, LoaderRecord]]) -> Iterator[str]:
    if not before.complete:
        yield "the earlier run was cut off, so loaders and checks that it lacks may not be new"
    if before.header.project != now.header.project:
        yield f"the earlier run was of project {before.header.project!r}, this one is of {now.header.project!r}"
    for old, new in in_both:
        if (old.world.size, old.world.mesh) != (new.world.size, new.world.mesh) and old.world.size and new.world.size:
            yield f"{new.loader}: {new.world}, before {old.world}"


def _environment_changes(before: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    for name in dict.fromkeys((*now, *before)):
        if name not in before:
            yield f"{name} added ({now[name]})"
        elif name not in now:
            yield f"{name} removed ({before[name]})"
        elif before[name] != now[name]:
            yield f"{name} {now[name]}, before {before[name]}"


def describe_comparison(comparison: Comparison) -> Iterator[tuple[str, str, list[str]]]:
    """Yield (kind, headline, lines) for each kind of change."""
    for name, changes in comparison.changes.items():
        kind, lines = KINDS[name], shorten_list(_describe_changes(changes))
        yield name, f"{kind.headline}: {comparison.count(name)}{kind.hint}", lines


def mark_of(kind: str) -> str:
    """Return "worse", "better" or "neutral" for a kind of change or of history."""
    return KINDS[kind].mark if kind in KINDS else "neutral"


def describe_verdict(comparison: Comparison) -> str:
    """Return a line such as "1 new failure, 2 fixed since 2026-11-19 21:04:00 (0123abc)"."""
    which = f", {comparison.which}" if comparison.which else ""
    since = printable(describe_moment(run_of(comparison.before)))
    return f"{comparison.describe_numbers() or 'no changes'} since {since}{which}"


def _describe_changes(changes: Sequence[Change | str]) -> Iterator[str]:
    """Yield a line for each loader with changes of its checks."""
    yield from (printable(change) for change in changes if isinstance(change, str))
    for loader, group in grouped((one.loader, one) for one in changes if not isinstance(one, str)).items():
        first, *others = (change.check for change in group)
        more = f", {first_of(others, MOST_CHECKS - 1)}" if others else ""
        yield f"{printable(loader)}: {first}{_describe_reason(group[0])}{more}"


def _describe_reason(change: Change) -> str:
    now = change.now
    if now is None:
        return ""
    if now.status == "xpassed":
        return f" {explain_pass(printable(now.reason))}"
    reason = describe_finding(now.findings[0]) if now.findings else now.reason
    return f" ({printable(reason)})" if reason else ""


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
