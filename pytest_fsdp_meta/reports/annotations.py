"""Annotations: workflow commands that GitHub shows at a loader's line in the diff of a pull request."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest

from pytest_fsdp_meta.reports.schema import FAILED, CheckRecord, LoaderRecord
from pytest_fsdp_meta.reports.terminal import by_cause, describe_finding
from pytest_fsdp_meta.text import counted, first_of

MOST = 10
"""GitHub shows 10 errors of a step."""
LONGEST = 1000
"""Characters of a message; GitHub cuts it at 4 KiB."""
IN_MESSAGE = str.maketrans({"%": "%25", "\r": "%0D", "\n": "%0A"})
IN_PROPERTY = IN_MESSAGE | str.maketrans({":": "%3A", ",": "%2C"})


@dataclass(frozen=True)
class Location:
    """A line of a file. ``file`` is relative to the repository, or absolute; ``line`` counts from 1."""

    file: str
    line: int


@dataclass
class _Problem:
    """One cause at the line of one loader, which may run in several worlds, or with several parameters."""

    loader: str
    text: str
    advice: str
    excused: bool
    """Whether it does not fail the run."""
    checks: list[str] = field(default_factory=list)


def annotate(
    loaders: Iterable[LoaderRecord], locations: Mapping[str, Location], is_excused: Callable[[str], bool]
) -> Iterator[str]:
    """Yield workflow commands: an error for each cause at each failed loader's line, a warning for an excused one.

    ``locations`` has the line of each item, by node id, and ``is_excused`` says of an item that its failure does not
    fail the run. The first line of each cause comes before the second line of any.
    """
    by_reason: dict[tuple[str, str], dict[Location, _Problem]] = {}
    for loader in loaders:
        for check in loader.checks:
            where = locations.get(check.nodeid)
            if check.status not in FAILED or where is None:
                continue
            for reason, text, advice in _reasons(check):
                new = _Problem(loader.loader, text, advice, is_excused(check.nodeid))
                problem = by_reason.setdefault(reason, {}).setdefault(where, new)
                problem.excused &= is_excused(check.nodeid)
                problem.checks += [check.check] if check.check not in problem.checks else []
    rounds = zip_longest(*(places.items() for places in by_reason.values()))
    listed = [one for turn in rounds for one in turn if one is not None]
    listed.sort(key=lambda one: one[1].excused)
    yield from (_command(where, problem) for where, problem in listed[:MOST])
    if len(listed) > MOST:
        yield f"::notice::{counted(len(listed) - MOST, 'more annotation')} of fsdp conformance: see the summary"


def _reasons(check: CheckRecord) -> Iterator[tuple[tuple[str, str], str, str]]:
    """Yield an identity, the first finding, and the cause with its remedy, of each cause; for an error, its reason."""
    if not check.findings:
        yield (check.reason, ""), check.reason or check.status, ""
    for cause, found in by_cause(check.findings).items():
        more = f", and {counted(len(found) - 1, 'more finding')}" if len(found) > 1 else ""
        # Without a cause, only findings of one check are surely the same problem.
        key = cause if any(cause) else (check.check, "")
        yield key, describe_finding(found[0]) + more, "; ".join(filter(None, cause))


def _command(where: Location, problem: _Problem) -> str:
    level = "warning" if problem.excused else "error"
    title = f"{problem.loader}: {first_of(problem.checks, 2)}"
    message = "\n".join(filter(None, [problem.text[:LONGEST], problem.advice[:LONGEST]]))
    file, title = (text.translate(IN_PROPERTY) for text in (where.file, title[:LONGEST]))
    return f"::{level} file={file},line={where.line},title={title}::{message.translate(IN_MESSAGE)}"
