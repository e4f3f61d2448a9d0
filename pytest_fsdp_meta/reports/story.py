"""What broke in a run: one story per cause, with its places, its values, since when it is known; and how it ended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from pytest_fsdp_meta.reports.history import describe_moment, run_of, starts_of, time_of
from pytest_fsdp_meta.reports.schema import (
    BAD,
    FAILED,
    JUDGED,
    STATUSES,
    CheckRecord,
    FindingRecord,
    LoaderRecord,
    Report,
    count_kinds,
    describe_count,
    how_many,
)
from pytest_fsdp_meta.reports.terminal import Kinds, by_cause, describe_findings, fold_tensors, origins
from pytest_fsdp_meta.text import counted, first_of, grouped, printable, without_numbers, without_occasion

REMOVE = "remove it from xfail"
CRASH, FINDING, ERROR, STRICT, UNEXPECTED_PASS = "crash", "finding", "error", "strict", "unexpected pass"
IN_RESULT = tuple(status for status in STATUSES if status != "skipped" and status not in BAD)
KINDS = {
    CRASH: ("Crashed", "crash", "crash"),
    FINDING: ("Failed", "likely cause", "cause"),
    ERROR: ("Errors", "error", "error"),
    STRICT: ("Failed because of --fsdp-strict", "failed", "failure"),
    UNEXPECTED_PASS: ("Passed unexpectedly", "unexpected pass", "unexpected pass"),
}
"""Kind of a story -> the headline of its list, what stands before its cause, and the noun for several of them."""
MOST_STARTS = 2
"""Places named for one cause, where it starts."""
MOST_LOADERS = 10
"""Loaders named for one failure."""
MOST_NAMED = 6
"""Checks, and loaders, named for one reason."""


@dataclass(frozen=True)
class Occurrence:
    """Checks of one loader that failed for one cause: all that a crash or an error left without a result, else one."""

    loader: LoaderRecord
    checks: tuple[CheckRecord, ...]
    findings: tuple[FindingRecord, ...] = ()

    @property
    def check(self) -> CheckRecord | None:
        """The first of the checks; None if the loader crashed before any was planned."""
        return self.checks[0] if self.checks else None

    @property
    def kinds(self) -> Kinds:
        """The kinds of tensors of which the check has findings on all."""
        return self.check.all_of if self.check is not None else {}


@dataclass(frozen=True)
class Story:
    """Failures with one cause, in any number of loaders: what terminal, page and summary show of them."""

    number: int
    kind: str
    """One of ``KINDS``; ``STRICT`` is a failure without findings."""
    cause: str
    """The likely cause of findings; the reason of a crash, an error or an expectation."""
    remedy: str
    places: tuple[Occurrence, ...]
    since: str = ""
    """Since when it is broken, as far as earlier runs show; empty without any."""
    is_new: bool = False
    """Whether some of it is new."""

    @property
    def loaders(self) -> list[LoaderRecord]:
        return list({id(place.loader): place.loader for place in self.places}.values())

    @property
    def count(self) -> str:
        """How many loaders or checks it concerns, such as "3 loaders crashed"."""
        where = f" in {counted(len(self.loaders), 'loader')}" if len(self.loaders) > 1 else ""
        checks = sum(len(place.checks) for place in self.places)
        return {
            CRASH: f"{counted(len(self.loaders), 'loader')} crashed",
            FINDING: f"{counted(checks, 'check')} failed{where}",
            STRICT: f"{counted(checks, 'check')} failed{where}",
            UNEXPECTED_PASS: f"{counted(checks, 'unexpected pass')}{where}",
            ERROR: f"error of {counted(checks, 'check')}{where}",
        }[self.kind]

    @property
    def starts(self) -> tuple[str, ...]:
        """Where the differences that the findings describe start, for the first of them."""
        return origins(finding for place in self.places for finding in place.findings)[:MOST_STARTS]

    @property
    def lines(self) -> tuple[str, ...]:
        """The user's lines that the first of the errors point to."""
        found = dict.fromkeys(check.place for place in self.places for check in place.checks if check.place)
        return tuple(found)[:MOST_STARTS]

    @property
    def again(self) -> str:
        """A command that runs the first of the checks again; "" if none is known."""
        return next((check.again for place in self.places for check in place.checks if check.again), "")

    def describe_places(self, with_detail: bool = True) -> list[str]:
        """Return a line such as "CHECK in LOADERS: FINDINGS" for each check, with all loaders where it failed alike."""

        def describe(place: Occurrence) -> tuple[str, str]:
            checks = f"{first_of([check.check for check in place.checks])} in " if self.kind != CRASH else ""
            found = f": {describe_findings(place.findings, place.kinds, with_detail)}" if place.findings else ""
            return checks, found

        alike = grouped((describe(place), place.loader.loader) for place in self.places)
        return [f"{checks}{first_of(where, MOST_LOADERS)}{found}" for (checks, found), where in alike.items()]

    @property
    def subject(self) -> str:
        """The tensors of the findings, such as "lm_head.weight and 1 more"; "" if there are none."""
        names = (finding.tensor for place in self.places for finding in place.findings)
        named = [name for name in names if name is not None]
        # Tensors of several models have no number in common.
        kinds = self.places[0].kinds
        return first_of(list(fold_tensors(named, kinds if all(place.kinds == kinds for place in self.places) else {})))

    @property
    def headline(self) -> str:
        """The cause; for an unexpected pass what it means, and without a cause the check that failed."""
        first = self.places[0].check
        if first is not None and self.kind == UNEXPECTED_PASS:
            return explain_pass(self.cause, first.check)
        if self.cause or first is None:
            return self.cause
        return f"{first.check}: no cause is known"


def explain_pass(reason: str, check: str = "") -> str:
    """Return what an unexpected pass means, with the check as its subject; ``reason`` is that of the expectation."""
    return f"{check} passes, but xfail expects it to fail ({reason})".lstrip()


def _errors_by_reason(loader: LoaderRecord) -> dict[str, list[CheckRecord]]:
    """Return reason -> the checks with this error. Most often all checks of a loader share one reason."""
    errors = (check for check in loader.checks if check.status == "error" and not check.findings)
    return grouped((check.reason, check) for check in errors)


def describe_failures(loaders: Sequence[LoaderRecord], missing: int = 0) -> str:
    """Return a text such as "3 loaders crashed, 6 checks failed, 1 unexpected pass"; empty if nothing needs a fix.

    A crash is one failure of its loader, and an error that several checks of a loader share is one error, as in
    pytest's own summary. ``missing`` loaders are those that an earlier run had.
    """
    others = [loader for loader in loaders if not loader.is_crashed]
    with_findings = [check for one in others for check in one.checks if check.status == "error" and check.findings]
    errors = sum(len(_errors_by_reason(loader)) for loader in others) + len(with_findings)
    counts = count_kinds(loaders)
    crashed = len(loaders) - len(others)
    texts = (
        (crashed, f"{counted(crashed, 'loader')} crashed"),
        (counts["failed"], f"{counted(counts['failed'], 'check')} failed"),
        (errors, counted(errors, "error")),
        (counts["xpassed"], counted(counts["xpassed"], "unexpected pass")),
        (counts["not run"], f"{counts['not run']} not run"),
        (missing, f"{counted(missing, 'loader')} missing"),
    )
    return ", ".join(text for number, text in texts if number)


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


def stories_of(loaders: Sequence[LoaderRecord]) -> list[Story]:
    """Return what broke, one story per cause: crashes first, then findings, errors and the others."""
    groups: dict[tuple[str, str, str, str], list[tuple[str, Occurrence]]] = {}

    def add(kind: str, cause: str, remedy: str, place: Occurrence) -> None:
        # Without a cause, only failures of one check are surely the same problem.
        check = place.check.check if place.check is not None and not cause and not remedy else ""
        # Reasons that differ only in numbers, such as a port or the time that a rank waited, have one cause.
        key = kind, cause if kind in (FINDING, STRICT) else without_numbers(without_occasion(cause)), remedy, check
        groups.setdefault(key, []).append((cause, place))

    for loader in loaders:
        if loader.is_crashed:
            errors = tuple(check for check in loader.checks if check.status == "error")
            add(CRASH, loader.error, "", Occurrence(loader, errors))
    for loader in loaders:
        for check in loader.checks:
            for (cause, remedy), found in by_cause(check.findings if check.status in FAILED else ()).items():
                add(FINDING, cause, remedy, Occurrence(loader, (check,), tuple(found)))
    for loader in loaders:
        if not loader.is_crashed:
            for reason, checks in _errors_by_reason(loader).items():
                add(ERROR, reason, "", Occurrence(loader, tuple(checks)))
    for loader in loaders:
        for check in loader.checks:
            if check.status == "xpassed" or (check.status == "failed" and not check.findings):
                kind = UNEXPECTED_PASS if check.status == "xpassed" else STRICT
                add(kind, check.reason, REMOVE if kind == UNEXPECTED_PASS else "", Occurrence(loader, (check,)))
    return [
        Story(number, kind, places[0][0], remedy, tuple(place for _, place in places))
        for number, ((kind, _, remedy, _), places) in enumerate(groups.items(), 1)
    ]


def describe_reasons(loaders: Sequence[LoaderRecord], status: str) -> Iterator[str]:
    """Yield "CHECKS in LOADERS: REASON" for each reason why checks have this status."""
    by_reason = grouped(
        (check.reason, (loader.loader, check.check))
        for loader in loaders
        for check in loader.checks
        if check.status == status and check.reason
    )
    for reason, pairs in by_reason.items():
        found = {name: dict.fromkeys(checks) for name, checks in grouped(pairs).items()}
        alike = grouped((tuple(checks), name) for name, checks in found.items())
        where = (f"{first_of(checks, MOST_NAMED)} in {first_of(names, MOST_NAMED)}" for checks, names in alike.items())
        yield printable(f"{'; '.join(where)}: {reason}")


def with_starts(stories: Sequence[Story], report: Report) -> list[Story]:
    """Return the stories with since when each cause is known, as far as earlier runs show."""
    starts = (_describe_start(story.places, report) for story in stories)
    return [replace(story, since=since, is_new=new) for story, (since, new) in zip(stories, starts, strict=True)]


def _describe_start(places: Sequence[Occurrence], report: Report) -> tuple[str, bool]:
    """Return since when a cause is known, and whether some of it is new; ("", False) without earlier runs."""
    starts = [
        # Only the findings with this cause.
        [starts_of(replace(check, findings=place.findings or check.findings)) for check in place.checks]
        for place in places
    ]
    runs = [run for checks in starts for check in checks for run in check]
    if not runs:
        return "", False
    this = run_of(report)
    fresh = [place for place, checks in zip(places, starts, strict=True) if any(this in check for check in checks)]
    if not fresh:
        return f"broken since {describe_moment(min(runs, key=time_of))}", False
    if len(fresh) < len(places):
        loaders, all_loaders = (len({id(place.loader) for place in some}) for some in (fresh, places))
        if loaders < all_loaders:
            return f"new in {loaders} of {counted(all_loaders, 'loader')}", True
        return f"new in {len(fresh)} of {counted(len(places), 'check')}", True
    new = sum(len(check.get(this, ())) for checks in starts for check in checks)
    found = sum(len(place.findings) for place in places)
    if new < found:
        return f"new in {new} of {counted(found, 'finding')}", True
    return f"new since the run of {describe_moment(report.earlier[-1])}", True
