"""The cards of "What broke": one per cause, with its loaders, the decisive values and a command that reruns it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pytest_fsdp_meta.reports.page.checks import CheckView, FindingLine, as_line
from pytest_fsdp_meta.reports.page.view import LoaderView, PageView
from pytest_fsdp_meta.reports.story import Story, stories_of, with_starts
from pytest_fsdp_meta.reports.terminal import describe_first, fold_tensors, group_for_lines
from pytest_fsdp_meta.text import grouped

MOST_VALUES = 3
"""Lines of values on a card; the loaders below have all."""
MOST_ALIKE = 2
"""Lines of one check that differ only in numbers, before one line stands for them."""


@dataclass(frozen=True)
class Value:
    """What a check found, in ``loaders`` loaders with the same values; ``where`` is the first of them.

    ``names`` are the folded names of the tensors, and ``note`` says whose numbers or detail the line has.
    """

    check: str
    line: FindingLine
    names: tuple[str, ...]
    note: str
    where: str
    findings: int
    """The number of findings in all of these loaders."""
    loaders: int


@dataclass(frozen=True)
class Card:
    """One cause, with what was found and where to read more."""

    story: Story
    values: tuple[Value, ...]
    chips: tuple[tuple[LoaderView, LoaderView | CheckView], ...]
    """Each loader, with where its details and its first cell are: its own, or those of the check that failed."""

    @property
    def left(self) -> int:
        """The number of findings that it does not show."""
        return sum(value.findings for value in self.values[MOST_VALUES:])


def make_cards(page: PageView) -> list[Card]:
    """Return the cards of a page, in the terminal's order."""
    views = {id(loader.record): loader for loader in page.loaders}
    stories = with_starts(stories_of(page.report.loaders), page.report)
    return [Card(story, tuple(_values(story, views)), tuple(_chips(story, views))) for story in stories]


def _chips(story: Story, views: Mapping[int, LoaderView]) -> Iterator[tuple[LoaderView, LoaderView | CheckView]]:
    first = {id(place.loader): place.check for place in reversed(story.places)}
    for record in story.loaders:
        loader, check = views[id(record)], first[id(record)]
        yield loader, loader if check is None or record.is_crashed else loader.checks[check.check]


def _values(story: Story, views: Mapping[int, LoaderView]) -> Iterator[Value]:
    """Yield what was found, with the number of loaders that have the same values."""
    found = grouped(
        ((place.check.check, as_line(similar)), (place, similar))
        for place in story.places
        for similar in group_for_lines(place.findings, MOST_ALIKE)
        if place.check is not None
    )
    for (check, line), same in found.items():
        place, similar = same[0]
        names, where = tuple(fold_tensors(line.names, place.kinds)), views[id(place.loader)].short
        findings = sum(len(one) for _, one in same)
        yield Value(check, line, names, describe_first(similar), where, findings, len(same))
