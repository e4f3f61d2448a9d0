"""Annotations: workflow commands that GitHub shows at a loader's line in the diff of a pull request."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from pytest_fsdp_meta.reports.failures import explain_pass
from pytest_fsdp_meta.reports.schema import CheckRecord, LoaderRecord
from pytest_fsdp_meta.reports.story import CRASH, FINDING, UNEXPECTED_PASS, Place, Story, stories_of
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
    loaders: Sequence[LoaderRecord], locations: Mapping[str, Location], is_excused: Callable[[str], bool]
) -> Iterator[str]:
    """Yield workflow commands: an error for each cause at each failed loader's line, a warning for an excused one.

    ``locations`` has the line of each item, by node id, and ``is_excused`` says of an item that its failure does not
    fail the run. The first line of each cause comes before the second line of any.
    """
    by_cause: list[dict[Location, _Problem]] = []
    for story in stories_of(loaders):
        places: dict[Location, _Problem] = {}
        for place in story.places:
            for check in place.checks:
                where = locations.get(check.nodeid)
                if where is not None:
                    excused = is_excused(check.nodeid)
                    new = _Problem(place.loader.loader, _describe(story, place, check), _advice(story), excused)
                    problem = places.setdefault(where, new)
                    problem.excused &= excused
                    problem.checks += [check.check] if check.check not in problem.checks else []
        by_cause.append(places)
    rounds = zip_longest(*(places.items() for places in by_cause))
    listed = [one for turn in rounds for one in turn if one is not None]
    listed.sort(key=lambda one: one[1].excused)
    yield from (_command(where, problem) for where, problem in listed[:MOST])
    if len(listed) > MOST:
        yield f"::notice::{counted(len(listed) - MOST, 'more annotation')} of fsdp conformance: see the summary"


def _describe(story: Story, place: Place, check: CheckRecord) -> str:
    """Return the first finding, or the reason of another failure."""
    if story.kind == UNEXPECTED_PASS:
        return explain_pass(check.reason, check.check)
    if not place.findings:
        return place.loader.error if story.kind == CRASH else check.reason or check.status
    return place.found


def _advice(story: Story) -> str:
    cause = story.cause if story.kind == FINDING and story.places[0].findings else ""
    return "; ".join(filter(None, [cause, story.remedy]))


def _command(where: Location, problem: _Problem) -> str:
    level = "warning" if problem.excused else "error"
    title = f"{problem.loader}: {first_of(problem.checks, 2)}"
    message = "\n".join(filter(None, [problem.text[:LONGEST], problem.advice[:LONGEST]]))
    file, title = (text.translate(IN_PROPERTY) for text in (where.file, title[:LONGEST]))
    return f"::{level} file={file},line={where.line},title={title}::{message.translate(IN_MESSAGE)}"
