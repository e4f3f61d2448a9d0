"""What differs between two reports. Pure: it reads two records and knows neither ranks nor pytest."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from pytest_fsdp_meta.reports.schema import (
    BROKEN,
    JUDGED,
    KEPT,
    CheckRecord,
    Curves,
    FindingRecord,
    LoaderRecord,
    Report,
    is_bad,
    statuses,
)
from pytest_fsdp_meta.reports.terminal import describe_finding, printable
from pytest_fsdp_meta.text import counted, first_of

EXPECTED = ("xfailed",)
NUMBERS = re.compile(r"[-+]?\d[\d.]*(?:e[-+]?\d+)?")
SLOWER = 1.5
"""A load that takes so many times what it took is told, ..."""
LEAST = 1.0
"""... if it takes so many seconds more: runs of a tiny model differ by more than their own length."""
DRIFT = 10.0
"""Parity that is so many times worse is told, ..."""
NOISE = 1e-6
"""... if the losses are further apart than that, relatively: what float32 rounds differs from machine to machine."""


@dataclass(frozen=True)
class Change:
    """One check of one loader, then and now; None where the run had no such check."""

    loader: str
    check: str
    before: CheckRecord | None
    now: CheckRecord | None


@dataclass(frozen=True)
class Measured:
    """A number of one loader, then and now: seconds, or how far its losses are from the reference's, relatively."""

    loader: str
    before: float
    now: float


@dataclass(frozen=True)
class Comparison:
    """What became of every promise since an earlier run, by what it means for whoever reads it."""

    before: Report
    now: Report
    cautions: tuple[str, ...] = ()
    """What makes the two runs less than comparable."""
    failures: tuple[Change, ...] = ()
    """Broken now, and not then; or on tensors that it was not broken on then; or an error, and not that one then."""
    unjudged: tuple[Change, ...] = ()
    """Judged then, and not now: a promise that may be broken unseen. Its author may have meant it so."""
    blocked: tuple[Change, ...] = ()
    """Judged then, and not now because of what a more basic check has found: a consequence, no news."""
    expected: tuple[Change, ...] = ()
    """Failing as expected now, and not then: somebody has declared that it does."""
    fixed: tuple[Change, ...] = ()
    changed: tuple[Change, ...] = ()
    """Broken then and now, with other findings on the same tensors, or on fewer."""
    known: tuple[Change, ...] = ()
    """Broken then and now, in the same way."""
    slower: tuple[Measured, ...] = ()
    drifted: tuple[Measured, ...] = ()
    came: tuple[str, ...] = ()
    """Loaders and checks that the earlier run did not have."""
    went: tuple[str, ...] = ()
    """What the earlier run had: removed since, called otherwise, or not selected now."""

    def fails(self, on: str) -> bool:
        """Whether the run is bad by what ``--fsdp-fail-on`` names."""
        if on == "regression":
            # Of what has not run nobody knows whether it would have failed as before.
            return bool(self.failures) or bool(statuses(self.now.loaders)["not run"])
        worse = on == "any" and bool(self.unjudged or self.blocked or self.went or self.slower or self.drifted)
        return worse or is_bad(self.now.loaders)


def compare(before: Report, now: Report) -> Comparison:
    """Loaders are known by their node ids; what became of their checks is told in the order of ``now``."""
    old, new = _by_name(before, now), _by_name(now, before)
    kinds: dict[str, list[Change]] = {}
    for change in _pairs(old, new):
        kinds.setdefault(_kind(change), []).append(change)
    kinds.pop("", None)
    timed = before.header.hardware == now.header.hardware
    both = [(old[name], new[name]) for name in new if name in old]
    return Comparison(
        before,
        now,
        tuple(_cautions(before, now, both, timed)),
        slower=tuple(_slower(both)) if timed else (),
        drifted=tuple(_drifted(both)),
        came=(*_without(new, old), *_without(_ids(now), _ids(before))),
        went=(*_without(old, new), *_without(_ids(before), _ids(now))),
        **{kind: tuple(changes) for kind, changes in kinds.items()},
    )


def _by_name(report: Report, other: Report) -> dict[str, LoaderRecord]:
    """A loader that a report has several times, as that of evidence of several runs may, is known by its world too."""
    times = [Counter(record.loader for record in one.loaders) for one in (report, other)]
    often = {name for counter in times for name, many in counter.items() if many > 1}
    named: dict[str, LoaderRecord] = {}
    for record in report.loaders:
        name = f"{record.loader}, {record.world}" if record.loader in often else record.loader
        while name in named:
            name += " again"
        named[name] = record
    return named


def _pairs(old: Mapping[str, LoaderRecord], new: Mapping[str, LoaderRecord]) -> Iterator[Change]:
    for name, record in new.items():
        before = _by_id(old.get(name))
        now = _by_id(record)
        for check in dict.fromkeys((*now, *before)):
            yield Change(name, check, before.get(check), now.get(check))


def _by_id(loader: LoaderRecord | None) -> dict[str, CheckRecord]:
    return {one.check: one for one in loader.checks} if loader is not None else {}


def _kind(change: Change) -> str:
    before, now = change.before, change.now
    was, bad = _is(before, BROKEN), _is(now, BROKEN)
    if bad and now is not None:
        if not was or before is None or (now.status == "error" and before.status != "error"):
            return "failures"
        if _told(before) == _told(now):
            return "known"
        return "failures" if _worse(before, now) else "changed"
    if _is(now, KEPT):
        return "fixed" if was or _is(before, EXPECTED) else ""
    if _is(now, EXPECTED):
        return "expected" if was or _is(before, KEPT) else ""
    if not _is(before, (*BROKEN, *JUDGED)):
        return ""
    return "blocked" if _is(now, ("blocked",)) else "unjudged"


def _worse(before: CheckRecord, now: CheckRecord) -> bool:
    """Another error hides what it stops from being judged."""
    return now.status == "error" or bool(_places(now.findings) - _places(before.findings))


def _is(record: CheckRecord | None, among: Iterable[str]) -> bool:
    return record is not None and record.status in among


def _places(findings: Iterable[FindingRecord]) -> set[str | None]:
    return {found.tensor for found in findings}


def _told(record: CheckRecord) -> tuple[str, str, frozenset[FindingRecord]]:
    """Without numbers: those of a broken model differ from run to run."""

    def blot(text: str) -> str:
        return NUMBERS.sub("#", text)

    return (
        record.status,
        blot(record.reason) if record.status == "error" else "",
        frozenset(
            replace(found, actual=blot(found.actual), expected=blot(found.expected), detail="")
            for found in record.findings
        ),
    )


def _slower(both: Iterable[tuple[LoaderRecord, LoaderRecord]]) -> Iterator[Measured]:
    for before, now in both:
        was, takes = before.seconds.get("loading", math.nan), now.seconds.get("loading", math.nan)
        if before.world == now.world and takes > max(was * SLOWER, was + LEAST):
            yield Measured(now.loader, was, takes)


def _drifted(both: Iterable[tuple[LoaderRecord, LoaderRecord]]) -> Iterator[Measured]:
    for before, now in both:
        was, apart = _apart(before), _apart(now)
        if apart > max(was * DRIFT, NOISE):
            yield Measured(now.loader, was, apart)


def _apart(loader: LoaderRecord) -> float:
    """The furthest that a loss is from the reference's, relatively; NaN where it is not known."""
    curves = loader.summary.losses if loader.summary is not None else None
    return max(_distances(curves), default=math.nan) if curves is not None else math.nan


def _distances(curves: Curves) -> Iterator[float]:
    for loss, truth in zip(curves.mean, curves.reference, strict=False):
        if math.isfinite(loss) and math.isfinite(truth) and truth:
            yield abs(loss - truth) / abs(truth)


def _cautions(
    before: Report, now: Report, both: Iterable[tuple[LoaderRecord, LoaderRecord]], timed: bool
) -> Iterator[str]:
    if not before.complete:
        yield "the earlier run was cut off: what it does not have may have been there"
    if before.header.project != now.header.project:
        yield f"the earlier run was of the project {before.header.project!r}, this one is of {now.header.project!r}"
    if not timed:
        yield "the earlier run was on other hardware, so times are not compared"
    was, are = before.header.versions, now.header.versions
    for name in dict.fromkeys((*are, *was)):
        if was.get(name, "") != are.get(name, ""):
            yield f"{name}: {was.get(name) or 'none'} then, {are.get(name) or 'none'} now"
    for old, new in both:
        if (old.world.size, old.world.mesh) != (new.world.size, new.world.mesh) and old.world.size and new.world.size:
            yield f"{new.loader}: {old.world} then, {new.world} now"


def _ids(report: Report) -> dict[str, None]:
    return dict.fromkeys(one.check for one in report.header.catalogue)


def _without(names: Iterable[str], others: Iterable[str]) -> list[str]:
    known = set(others)
    return [name for name in names if name not in known]


MOST = 20
"""Loaders of a kind of change, and cautions, that are told one by one."""
NAMED = 5
"""Checks of a loader that are named."""


def describe_comparison(comparison: Comparison) -> Iterator[tuple[str, str, list[str]]]:
    """(mark, headline, lines) of each kind of change that there is: the mark is "worse", "better" or "odd"."""
    changes = (
        ("worse", "new failures", comparison.failures),
        ("odd", "not judged, because of what fails", comparison.blocked),
        ("odd", "no longer judged", comparison.unjudged),
        ("odd", "other findings than before", comparison.changed),
        ("odd", "known failures, as before", comparison.known),
        ("odd", "failing as expected now", comparison.expected),
        ("better", "fixed", comparison.fixed),
    )
    for mark, headline, found in changes:
        if found:
            yield mark, f"{headline}: {len(found)}", _cut(_by_loader(found))
    if comparison.slower:
        yield "worse", "slower loads", _cut(map(_describe_slower, comparison.slower))
    if comparison.drifted:
        yield "worse", "losses further from the reference's", _cut(map(_describe_drifted, comparison.drifted))
    for headline, names in (("new", comparison.came), ("not in this run", comparison.went)):
        if names:
            yield "odd", f"{headline}: {len(names)}", _cut(map(printable, names))
    if comparison.cautions:
        yield "odd", "mind that", _cut(map(printable, comparison.cautions))


def verdict(comparison: Comparison) -> str:
    """In one line, what a reader wants to know first."""
    return f"{counts(comparison)} since {since(comparison)}"


def counts(comparison: Comparison) -> str:
    """How many there are of each kind of change."""
    parts = [
        (counted(len(comparison.failures), "new failure"), comparison.failures),
        (f"{len(comparison.fixed)} fixed", comparison.fixed),
        (f"{len(comparison.known)} known", comparison.known),
        (f"{len(comparison.changed)} with other findings than before", comparison.changed),
        (f"{len(comparison.expected)} failing as expected now", comparison.expected),
        (f"{len(comparison.blocked)} not judged because of what fails", comparison.blocked),
        (f"{len(comparison.unjudged)} no longer judged", comparison.unjudged),
        (counted(len(comparison.slower), "slower load"), comparison.slower),
        (f"{len(comparison.drifted)} with losses further from the reference's", comparison.drifted),
        (f"{len(comparison.came)} new", comparison.came),
        (f"{len(comparison.went)} not in this run", comparison.went),
    ]
    return ", ".join(text for text, there in parts if there) or "nothing has changed"


def since(comparison: Comparison) -> str:
    header = comparison.before.header
    return printable(header.started + (f" ({header.commit})" if header.commit else ""))


def _by_loader(changes: Iterable[Change]) -> Iterator[str]:
    groups: dict[str, list[Change]] = {}
    for change in changes:
        groups.setdefault(change.loader, []).append(change)
    for loader, group in groups.items():
        first, *others = (change.check for change in group)
        more = f", {first_of(others, NAMED - 1)}" if others else ""
        yield f"{printable(loader)}: {first}{_why(group[0])}{more}"


def _why(change: Change) -> str:
    """What it shows now."""
    now = change.now
    if now is None:
        return ""
    told = describe_finding(now.findings[0]) if now.findings else now.reason
    return f" ({printable(told)})" if told else ""


def _describe_slower(one: Measured) -> str:
    return f"{printable(one.loader)}: {one.now:.1f} s, before {one.before:.1f} s"


def _describe_drifted(one: Measured) -> str:
    return f"{printable(one.loader)}: off by {one.now:.1e} relative, before {one.before:.1e}"


def _cut(lines: Iterable[str]) -> list[str]:
    told = list(lines)
    return told if len(told) <= MOST else [*told[:MOST], f"... and {len(told) - MOST} more"]
