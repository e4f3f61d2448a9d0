"""The cards of "What broke": one per cause, with its loaders, the decisive values and a command that reruns it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from pytest_fsdp_meta.reports.causes import (
    CRASH,
    FINDING,
    UNEXPECTED_PASS,
    FailureGroup,
    Place,
    group_failures,
)
from pytest_fsdp_meta.reports.compare import Comparison
from pytest_fsdp_meta.reports.news import describe_news
from pytest_fsdp_meta.reports.page.findings import Line, as_line
from pytest_fsdp_meta.reports.page.view import LoaderView, PageView
from pytest_fsdp_meta.reports.terminal import group_similar, origins
from pytest_fsdp_meta.text import counted

MOST_CARDS = 12
"""Cards that are not folded."""
MOST_VALUES = 3
"""Lines of values on a card; the loaders below have all."""
MOST_CHIPS = 8
"""Loaders that a card names before it folds the others."""


@dataclass(frozen=True)
class Value:
    """What a check found, in ``loaders`` loaders with the same values; ``where`` is the first of them."""

    check: str
    line: Line
    where: str
    loaders: int = 1


@dataclass(frozen=True)
class Chip:
    """A loader on a card: its name, its details, and its first cell in the table."""

    name: str
    title: str
    details: str
    cell: str


@dataclass(frozen=True)
class Card:
    """One cause. ``number`` is the one that the terminal gives it."""

    number: int
    kind: str
    subject: str
    """Its tensors; "" if it is about whole models, a crash or an error."""
    cause: str
    is_known: bool
    """Whether the cause is; else ``cause`` names the check."""
    remedy: str
    count: str
    """How many loaders or checks it concerns, such as "3 loaders crashed"."""
    news: str
    """Since when it is broken, as far as earlier runs show; empty without any."""
    is_new: bool
    origins: tuple[str, ...]
    values: tuple[Value, ...]
    chips: tuple[Chip, ...]
    again: str

    @property
    def anchor(self) -> str:
        return f"cause-{self.number}"


def make_cards(page: PageView, comparison: Comparison | None) -> tuple[Card, ...]:
    """Return the cards of a page, in the terminal's order."""
    views = {id(loader.record): loader for loader in page.loaders}
    groups = group_failures(page.report.loaders)
    return tuple(
        _card(number, group, views, describe_news(group.places, page.report, comparison))
        for number, group in enumerate(groups, 1)
    )


def _card(number: int, group: FailureGroup, views: Mapping[int, LoaderView], news: tuple[str, bool]) -> Card:
    first = {id(place.loader): place for place in reversed(group.places)}
    chips = [_chip(views[key], first[key]) for key in dict.fromkeys(id(place.loader) for place in group.places)]
    commands = (check.again for place in group.places for check in place.checks if check.again)
    return Card(
        number=number,
        kind=group.kind,
        subject=group.subject,
        cause=group.headline,
        is_known=bool(group.cause),
        remedy=group.remedy,
        count=_describe_count(group, len(chips)),
        news=news[0],
        is_new=news[1],
        origins=tuple(dict.fromkeys(_origins(group))),
        values=tuple(_values(group, views)),
        chips=tuple(chips),
        again=next(commands, ""),
    )


def _chip(loader: LoaderView, place: Place) -> Chip:
    check = loader.checks[place.check.check] if place.check is not None and not loader.is_crashed else None
    if check is None:
        return Chip(loader.short, loader.title, loader.anchor, loader.cell)
    return Chip(loader.short, loader.title, check.anchor, check.cell)


def _describe_count(group: FailureGroup, loaders: int) -> str:
    where = f" in {counted(loaders, 'loader')}" if loaders > 1 else ""
    checks = sum(len(place.checks) for place in group.places)
    if group.kind == CRASH:
        return f"{counted(loaders, 'loader')} crashed"
    if group.kind == FINDING:
        return f"{counted(checks, 'check')} failed{where}"
    if group.kind == UNEXPECTED_PASS:
        return f"{counted(checks, 'unexpected pass')}{where}"
    return f"error of {counted(checks, 'check')}{where}"


def _origins(group: FailureGroup) -> Iterator[str]:
    """Yield where the difference starts, or the user's line that an error points to."""
    for place in group.places:
        yield from origins(place.findings)
        if not place.findings:
            yield from filter(None, (check.place for check in place.checks))


def _values(group: FailureGroup, views: Mapping[int, LoaderView]) -> Iterable[Value]:
    """Return what was found, with the number of loaders that have the same values."""
    found: dict[object, Value] = {}
    for place in group.places:
        for similar in group_similar(place.findings):
            assert place.check is not None
            line = as_line(similar)
            key = place.check.check, line
            known = found.get(key)
            if known is not None:
                found[key] = replace(known, loaders=known.loaders + 1)
            else:
                found[key] = Value(place.check.check, line, views[id(place.loader)].short)
    return found.values()
