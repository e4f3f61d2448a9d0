"""What broke in a run: failures grouped by cause, and how many there are, for terminal, page, summary and badge."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pytest_fsdp_meta.reports.schema import (
    FAILED,
    CheckRecord,
    FindingRecord,
    LoaderRecord,
    count_kinds,
    describe_count,
)
from pytest_fsdp_meta.reports.terminal import by_cause
from pytest_fsdp_meta.text import counted, first_of, fold_names, without_numbers

CRASH, FINDING, ERROR, UNEXPECTED_PASS = "crash", "finding", "error", "unexpected pass"
REMOVE = "remove it from xfail"


@dataclass(frozen=True)
class Place:
    """Checks of one loader that failed for one cause: all that a crash or an error left without a result, else one."""

    loader: LoaderRecord
    checks: tuple[CheckRecord, ...]
    findings: tuple[FindingRecord, ...] = ()

    @property
    def check(self) -> CheckRecord | None:
        """The first of the checks; None if the loader crashed before any was planned."""
        return self.checks[0] if self.checks else None


@dataclass(frozen=True)
class FailureGroup:
    """Failures with one cause, in any number of loaders."""

    kind: str
    """One of ``CRASH``, ``FINDING``, ``ERROR`` and ``UNEXPECTED_PASS``."""
    cause: str
    """The likely cause of findings; the reason of a crash, an error or an expectation."""
    remedy: str
    places: tuple[Place, ...]

    @property
    def subject(self) -> str:
        """The tensors of the findings, such as "lm_head.weight and 1 more"; "" if there are none."""
        names = (finding.tensor for place in self.places for finding in place.findings)
        return first_of(list(fold_names(name for name in names if name is not None)))

    @property
    def headline(self) -> str:
        """The cause; for an unexpected pass what it means, and without a cause the check that failed."""
        first = self.places[0].check
        if first is not None and self.kind == UNEXPECTED_PASS:
            return explain_pass(self.cause, first.check)
        if self.cause or first is None:
            return self.cause
        return f"{first.check}: no cause is known"


def is_crashed(loader: LoaderRecord) -> bool:
    """Return whether the loader crashed, so that all its errors are one."""
    return bool(loader.error)


def group_failures(loaders: Sequence[LoaderRecord]) -> list[FailureGroup]:
    """Return what broke, one group per cause: crashes first, then findings, errors and unexpected passes."""
    groups: dict[tuple[str, str, str, str], list[tuple[str, Place]]] = {}

    def add(kind: str, cause: str, remedy: str, place: Place) -> None:
        # Without a cause, only failures of one check are surely the same problem.
        check = place.check.check if place.check is not None and not cause and not remedy else ""
        # Reasons that differ only in numbers, such as a port or the time that a rank waited, have one cause.
        key = kind, cause if kind == FINDING else without_numbers(cause), remedy, check
        groups.setdefault(key, []).append((cause, place))

    for loader in filter(is_crashed, loaders):
        add(CRASH, loader.error, "", Place(loader, tuple(check for check in loader.checks if check.status == "error")))
    for loader in loaders:
        for check in loader.checks:
            for (cause, remedy), found in by_cause(check.findings if check.status in FAILED else ()).items():
                add(FINDING, cause, remedy, Place(loader, (check,), tuple(found)))
    for loader in loaders:
        if not is_crashed(loader):
            for (reason, _), ids in errors_by_reason([loader]).items():
                add(ERROR, reason, "", Place(loader, tuple(check for check in loader.checks if check.check in ids)))
    for loader in loaders:
        for check in loader.checks:
            if check.status == "xpassed" or (check.status == "failed" and not check.findings):
                kind = UNEXPECTED_PASS if check.status == "xpassed" else FINDING
                add(kind, check.reason, REMOVE if kind == UNEXPECTED_PASS else "", Place(loader, (check,)))
    return [
        FailureGroup(kind, places[0][0], remedy, tuple(place for _, place in places))
        for (kind, _, remedy, _), places in groups.items()
    ]


def errors_by_reason(loaders: Iterable[LoaderRecord]) -> dict[tuple[str, str], list[str]]:
    """Return (reason, loader) -> the checks with this error. Most often all checks of a loader share one reason."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for loader in loaders:
        for check in loader.checks:
            if check.status == "error" and not check.findings:
                reasons.setdefault((check.reason, loader.loader), []).append(check.check)
    return reasons


def count_failures(loaders: Sequence[LoaderRecord]) -> dict[str, int]:
    """Return the number of crashed loaders, failed checks, errors, unexpected passes and checks that were not run.

    A crash is one failure of its loader, and an error that several checks of a loader share is one error, as in
    pytest's own summary.
    """
    crashed = [loader for loader in loaders if is_crashed(loader)]
    others = [loader for loader in loaders if not is_crashed(loader)]
    counts = count_kinds(loaders)
    errors = [check for loader in others for check in loader.checks if check.status == "error" and check.findings]
    return {
        "crashed": len(crashed),
        "failed": counts["failed"],
        "error": sum(len(errors_by_reason([loader])) for loader in others) + len(errors),
        "xpassed": counts["xpassed"],
        "not run": counts["not run"],
    }


def describe_failures(loaders: Sequence[LoaderRecord], missing: int = 0) -> str:
    """Return a text such as "3 loaders crashed, 6 checks failed, 1 unexpected pass"; empty if nothing needs a fix.

    ``missing`` loaders are those that an earlier run had.
    """
    counts = count_failures(loaders)
    texts = {
        "crashed": f"{counted(counts['crashed'], 'loader')} crashed",
        "failed": f"{counted(counts['failed'], 'check')} failed",
        "error": describe_count(counts["error"], "error"),
        "xpassed": counted(counts["xpassed"], "unexpected pass"),
        "not run": f"{counts['not run']} not run",
    }
    gone = [f"{counted(missing, 'loader')} missing"] if missing else []
    return ", ".join([*(text for kind, text in texts.items() if counts[kind]), *gone])


def explain_pass(reason: str, check: str = "") -> str:
    """Return what an unexpected pass means, with the check as its subject; ``reason`` is that of the expectation."""
    return f"{check} passes, but xfail expects it to fail ({reason})".lstrip()


def failing_loaders(loaders: Iterable[LoaderRecord]) -> list[LoaderRecord]:
    """Return the loaders that crashed or have a failure of any kind."""
    return [loader for loader in loaders if describe_failures([loader])]
