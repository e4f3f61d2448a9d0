"""A comparison in words: lines for the terminal and for a page of Markdown. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pytest_fsdp_meta.reports.compare import Change, Comparison, Measured
from pytest_fsdp_meta.reports.terminal import describe_finding, printable
from pytest_fsdp_meta.words import counted, first_of

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
        yield "worse", "slower loads", _cut(map(_slower, comparison.slower))
    if comparison.drifted:
        yield "worse", "losses further from the reference's", _cut(map(_drifted, comparison.drifted))
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


def _slower(one: Measured) -> str:
    return f"{printable(one.loader)}: {one.now:.1f} s, before {one.before:.1f} s"


def _drifted(one: Measured) -> str:
    return f"{printable(one.loader)}: off by {one.now:.1e} relative, before {one.before:.1e}"


def _cut(lines: Iterable[str]) -> list[str]:
    told = list(lines)
    return told if len(told) <= MOST else [*told[:MOST], f"... and {len(told) - MOST} more"]
