"""The differences between the reports of two runs, and their description."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from pytest_fsdp_meta.reports.failures import explain_pass
from pytest_fsdp_meta.reports.schema import (
    FAILED,
    JUDGED,
    PASSED,
    CheckRecord,
    FindingRecord,
    LoaderRecord,
    Report,
    count_kinds,
    is_bad,
)
from pytest_fsdp_meta.reports.terminal import describe_finding, shorten_list
from pytest_fsdp_meta.text import counted, first_of, printable, without_numbers

SLOWER = 1.5
"""A load is reported as slower if it takes this many times as long as before, ..."""
LEAST_SLOWER = 1.0
"""... and this much (s) longer: the times of tiny models vary by more than their own length."""
DRIFT = 10.0
"""Losses are reported as drifted if they are this many times further from the reference than before, ..."""
ROUNDING = 1e-6
"""... and further than this, relatively: float32 rounding differs from machine to machine."""
MISSING = "removed or renamed on purpose? --fsdp-allow-missing accepts it"
MOST_CHECKS = 5
"""Checks of a loader that are named."""
OF_CHECKS = ("failures", "differing", "no_longer_judged", "dependent", "expected", "fixed", "changed", "known")
"""The fields of ``Comparison`` that are about checks; one check is in at most one of them."""
FAILING_ANY = ("differing", "removed", "no_longer_judged", "dependent", "slower", "drifted")
"""The fields that fail a run with ``--fsdp-fail-on=any``, beside loaders that are gone."""


@dataclass(frozen=True)
class Change:
    """One check of one loader in both runs; None where a run does not have the check."""

    loader: str
    check: str
    before: CheckRecord | None
    now: CheckRecord | None


@dataclass(frozen=True)
class Comparison:
    """The changes between two runs, by what they mean for the reader."""

    before: Report
    now: Report
    caveats: tuple[str, ...] = ()
    """Why the two runs can only be compared in part."""
    environment: tuple[str, ...] = ()
    """Packages that were added, removed or have other versions."""
    failures: tuple[Change, ...] = ()
    """New failures: the check did not fail before, or fails on other tensors, or with another error."""
    differing: tuple[Change, ...] = ()
    """New differences: the check differs now, and neither differed nor failed before."""
    no_longer_judged: tuple[Change, ...] = ()
    """Judged before and not now, perhaps on purpose: the promise may be broken unnoticed."""
    dependent: tuple[Change, ...] = ()
    """Judged before, and now skipped because they depend on a failed check."""
    expected: tuple[Change, ...] = ()
    """Failing as expected now, and not before: xfail= was added."""
    fixed: tuple[Change, ...] = ()
    changed: tuple[Change, ...] = ()
    """Failing in both runs, with other findings on the same tensors, or on fewer."""
    known: tuple[Change, ...] = ()
    """Failing in both runs with the same findings."""
    slower: tuple[str, ...] = ()
    """Loaders that take longer to load, with the seconds of both runs."""
    drifted: tuple[str, ...] = ()
    """Loaders whose losses are further from the reference, with the relative distance in both runs."""
    added: tuple[str, ...] = ()
    """Loaders and checks that the earlier run does not have."""
    missing: tuple[str, ...] = ()
    """Loaders that only the earlier run has: removed or renamed, so that nothing judges them any more."""
    allowed: tuple[str, ...] = ()
    """Missing loaders that ``--fsdp-allow-missing`` allows."""
    unselected: tuple[str, ...] = ()
    """Loaders of the earlier run that this one was not asked for."""
    removed: tuple[str, ...] = ()
    """Checks that only the earlier run has."""
    which: str = ""
    """Which of several earlier runs ``before`` is."""
    left_out: tuple[str, ...] = ()
    """Why files that were given as earlier reports were not read, one line each."""

    def count(self, name: str) -> int:
        """Return the number of changes in one of the fields. Errors of a loader with the same reason are one."""
        changes = getattr(self, name)
        return count_changes(changes) if name in OF_CHECKS else len(changes)

    def fails(self, on: str) -> bool:
        """Return whether the run fails with ``--fsdp-fail-on`` set to ``on``."""
        if on == "regression":
            # A check that was not judged, or not even run, might have failed in a new way.
            worse = self.failures or self.differing or self.missing or self.dependent
            return bool(worse) or bool(count_kinds(self.now.loaders)["not run"])
        is_changed = on == "any" and any(getattr(self, name) for name in ("missing", "unselected", *FAILING_ANY))
        return is_changed or is_bad(self.now.loaders)


def compare(
    before: Report,
    now: Report,
    is_selected: Callable[[str], bool] = lambda loader: True,
    is_allowed: Callable[[str], bool] = lambda loader: False,
    which: str = "",
    left_out: tuple[str, ...] = (),
) -> Comparison:
    """Compare two reports. Loaders are identified by node id, and changes are in the order of ``now``.

    Of a loader that ``now`` lacks, ``is_selected`` says whether the run was asked for it, and ``is_allowed`` whether it
    may be missing. ``which`` and ``left_out`` are those of ``Comparison``.
    """
    repeated = repeated_in(before, now)
    old, new = _by_name(before, repeated), _by_name(now, repeated)
    changes: dict[str, list[Change]] = {}
    for change in _pair_checks(old, new):
        changes.setdefault(_classify(change), []).append(change)
    changes.pop("", None)
    gone = _gone(_without(old, new), old, is_selected, is_allowed)
    same_hardware = before.header.hardware == now.header.hardware
    in_both = [(old[name], new[name]) for name in new if name in old]
    return Comparison(
        before,
        now,
        caveats=tuple(_caveats(before, now, in_both)),
        environment=tuple(_environment_changes(before.header.versions, now.header.versions)),
        slower=tuple(_slower_loads(in_both)) if same_hardware else (),
        drifted=tuple(_drifted_losses(in_both)),
        added=(*_without(new, old), *_without(_check_ids(now), _check_ids(before))),
        which=which,
        left_out=left_out,
        removed=tuple(_without(_check_ids(before), _check_ids(now))),
        missing=gone["missing"],
        allowed=gone["allowed"],
        unselected=gone["unselected"],
        **{kind: tuple(group) for kind, group in changes.items()},
    )


def _gone(
    names: Iterable[str],
    old: Mapping[str, LoaderRecord],
    is_selected: Callable[[str], bool],
    is_allowed: Callable[[str], bool],
) -> dict[str, tuple[str, ...]]:
    """Return field of ``Comparison`` -> the loaders that are gone for this reason."""
    groups: dict[str, list[str]] = {"missing": [], "allowed": [], "unselected": []}
    for name in names:
        loader = old[name].loader
        reason = "unselected" if not is_selected(loader) else "allowed" if is_allowed(loader) else "missing"
        groups[reason].append(name)
    return {reason: tuple(found) for reason, found in groups.items()}


def repeated_in(*reports: Report) -> frozenset[str]:
    """Return the loaders that one of the reports has in several worlds."""
    counts = [Counter(record.loader for record in report.loaders) for report in reports]
    return frozenset(name for count in counts for name, times in count.items() if times > 1)


def name_of(loader: LoaderRecord, repeated: frozenset[str]) -> str:
    """Return what identifies a loader in several reports: it has the world where one of them has it in several."""
    return f"{loader.loader}, {loader.world}" if loader.loader in repeated else loader.loader


def _by_name(report: Report, repeated: frozenset[str]) -> dict[str, LoaderRecord]:
    named: dict[str, LoaderRecord] = {}
    for record in report.loaders:
        name = name_of(record, repeated)
        while name in named:
            name += " again"
        named[name] = record
    return named


def _pair_checks(old: Mapping[str, LoaderRecord], new: Mapping[str, LoaderRecord]) -> Iterator[Change]:
    for name, record in new.items():
        now = {check.check: check for check in record.checks}
        before = {check.check: check for check in old[name].checks} if name in old else {}
        for check in dict.fromkeys((*now, *before)):
            yield Change(name, check, before.get(check), now.get(check))


def _classify(change: Change) -> str:
    """Return the field of ``Comparison`` that the change belongs to; "" for a change of no interest."""
    before, now = change.before, change.now
    failed_before = _has_kind(before, FAILED)
    if now is not None and now.status in FAILED:
        if before is None or not failed_before or (now.status == "error" and before.status != "error"):
            return "failures"
        if _without_numbers(before) == _without_numbers(now):
            return "known"
        # A finding on a new tensor is new, and another error may hide new findings.
        known = {finding.tensor for finding in before.findings}
        is_worse = _is_reason(now) or any(finding.tensor not in known for finding in now.findings)
        return "failures" if is_worse else "changed"
    if _has_kind(now, ("differs",)) and not _has_kind(before, (*FAILED, "xfailed")):
        return "" if _has_kind(before, ("differs",)) else "differing"
    if _has_kind(now, PASSED):
        return "fixed" if _has_kind(before, (*FAILED, "xfailed", "differs")) else ""
    if _has_kind(now, ("xfailed",)):
        return "expected" if _has_kind(before, (*FAILED, *PASSED, "differs")) else ""
    if _has_kind(now, ("depends on a failed check",)):
        return "dependent" if _has_kind(before, JUDGED) else ""
    return "no_longer_judged" if _has_kind(before, (*FAILED, *JUDGED)) else ""


def _has_kind(check: CheckRecord | None, kinds: Iterable[str]) -> bool:
    return check is not None and check.kind in kinds


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


def _slower_loads(in_both: Iterable[tuple[LoaderRecord, LoaderRecord]]) -> Iterator[str]:
    for old, new in in_both:
        before, now = old.seconds.get("loading", math.nan), new.seconds.get("loading", math.nan)
        if old.world == new.world and now > max(before * SLOWER, before + LEAST_SLOWER):
            yield f"{new.loader}: {now:.1f} s, before {before:.1f} s"


def _drifted_losses(in_both: Iterable[tuple[LoaderRecord, LoaderRecord]]) -> Iterator[str]:
    for old, new in in_both:
        before, now = _largest_distance(old), _largest_distance(new)
        if now > max(before * DRIFT, ROUNDING):
            yield f"{new.loader}: relative distance {now:.1e}, before {before:.1e}"


def _largest_distance(loader: LoaderRecord) -> float:
    """Return the largest relative distance of a loss from the reference's; NaN if it is not known."""
    curves = loader.summary.losses if loader.summary is not None else None
    pairs = zip(curves.mean, curves.reference, strict=False) if curves is not None else ()
    known = ((loss, reference) for loss, reference in pairs if math.isfinite(loss) and math.isfinite(reference))
    return max((abs(loss - reference) / abs(reference) for loss, reference in known if reference), default=math.nan)


def _caveats(before: Report, now: Report, in_both: Iterable[tuple[LoaderRecord, LoaderRecord]]) -> Iterator[str]:
    if not before.complete:
        yield "the earlier run was cut off, so loaders and checks that it lacks may not be new"
    if before.header.project != now.header.project:
        yield f"the earlier run was of project {before.header.project!r}, this one is of {now.header.project!r}"
    if before.header.hardware != now.header.hardware:
        yield "the earlier run was on other hardware, so times are not compared"
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


def _check_ids(report: Report) -> dict[str, None]:
    return dict.fromkeys(check.check for check in report.header.catalogue)


def _without(names: Iterable[str], others: Iterable[str]) -> list[str]:
    known = set(others)
    return [name for name in names if name not in known]


@dataclass(frozen=True)
class Kind:
    """How a field of ``Comparison`` is described: above its list, and as a number of changes in one line."""

    headline: str
    number: Callable[[int], str] = "{} new".format
    mark: str = "neutral"
    hint: str = ""


KINDS = {
    "failures": Kind("new failures", lambda number: counted(number, "new failure"), "worse"),
    "differing": Kind("new differences", lambda number: counted(number, "new difference"), "worse"),
    "missing": Kind("missing loaders", "{} missing".format, "worse", f" ({MISSING})"),
    "dependent": Kind("skipped because of a failed check", "{} skipped because of a failed check".format, "worse"),
    "no_longer_judged": Kind("no longer judged", "{} no longer judged".format),
    "changed": Kind("known failures, other findings", "{} known with other findings".format),
    "known": Kind("known failures, same findings", "{} known".format),
    "expected": Kind("xfailed now", "{} xfailed now".format),
    "fixed": Kind("fixed", "{} fixed".format, "better"),
    "slower": Kind("slower loads", lambda number: counted(number, "slower load"), "worse"),
    "drifted": Kind("losses further from the reference", "{} with losses further from the reference".format, "worse"),
    "added": Kind("new in this run"),
    "allowed": Kind("missing loaders that are allowed", "{} missing as allowed".format),
    "unselected": Kind("not selected in this run", "{} not selected".format),
    "removed": Kind("checks that this version lacks", lambda number: f"{counted(number, 'check')} removed"),
    "environment": Kind("environment changes"),
    "caveats": Kind("limits of this comparison"),
    "left_out": Kind("earlier reports left out"),
}
"""Field of ``Comparison`` -> its description, in the order of the lists."""
OF_RESULTS = (
    *("failures", "differing", "fixed", "known", "changed", "expected", "dependent", "no_longer_judged"),
    *("slower", "drifted"),
)
OF_COVERAGE = ("added", "missing", "allowed", "unselected", "removed")
"""The fields whose changes a line counts, in its order: of what both runs have, and of what only one has."""


def describe_comparison(comparison: Comparison) -> Iterator[tuple[str, str, list[str]]]:
    """Yield (kind, headline, lines) for each kind of change; the kind is the field of ``Comparison``."""
    for name, kind in KINDS.items():
        if number := comparison.count(name):
            changes = getattr(comparison, name)
            lines = _describe_by_loader(changes) if name in OF_CHECKS else map(printable, changes)
            yield name, f"{kind.headline}: {number}{kind.hint}", shorten_list(lines)


def mark_of(kind: str) -> str:
    """Return "worse", "better" or "neutral" for a kind of change or of history."""
    return KINDS[kind].mark if kind in KINDS else "neutral"


def describe_verdict(comparison: Comparison) -> str:
    """Return a line such as "1 new failure, 2 fixed since 2026-11-19T21:04:00+00:00 (0123abc)"."""
    header = comparison.before.header
    since = printable(header.started + (f" ({header.commit})" if header.commit else ""))
    which = f", {comparison.which}" if comparison.which else ""
    return f"{describe_changes(comparison)} since {since}{which}"


def describe_changes(comparison: Comparison) -> str:
    """Return how many changes of each kind there are, such as "1 new failure, 2 fixed"."""
    return ", ".join(describe_numbers(comparison, (*OF_RESULTS, *OF_COVERAGE))) or "no changes"


def describe_numbers(comparison: Comparison, names: Iterable[str]) -> Iterator[str]:
    """Yield a text such as "2 fixed" for each of these fields of ``Comparison`` that has changes."""
    for name in names:
        if number := comparison.count(name):
            yield KINDS[name].number(number)


def count_changes(changes: Iterable[Change]) -> int:
    """Return the number of changes. Errors of a loader with the same reason are one: most often it crashed."""
    return len({_identity(change) for change in changes})


def _identity(change: Change) -> tuple[str, str]:
    # What failed before and fails now is counted by what it is now.
    record = change.now if change.now is not None and change.now.status in FAILED else change.before
    if record is not None and record.status == "error":
        return change.loader, f"error: {record.reason}"
    return change.loader, change.check


def _describe_by_loader(changes: Iterable[Change]) -> Iterator[str]:
    groups: dict[str, list[Change]] = {}
    for change in changes:
        groups.setdefault(change.loader, []).append(change)
    for loader, group in groups.items():
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
