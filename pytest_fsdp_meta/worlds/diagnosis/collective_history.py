"""Where the collectives of a group's ranks differ first, and the table of the collectives around that one.

A backend may complete collectives that do not match: gloo adds integers to floats of the same size, and two calls of
all_reduce from different lines look alike to every backend. The ranks then hang later, in collectives that match.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from pytest_fsdp_meta.text import counted, grouped, name_ranks
from pytest_fsdp_meta.worlds.diagnosis.flight_recorder import Collective

UNEVEN = ("all_to_all", "scatter", "gather", "barrier")
"""Name prefixes of collectives in which ranks may pass different tensors."""
SHAPE = re.compile(r"\[([\d, ]*)\]")
BEFORE, AFTER = 1, 3
"""Collectives that the table shows before and after the first that differs."""
MOST_VARIANTS = 4
"""Kinds of tensors to list for one collective: the ranks with rarer ones share a line."""
MOST_EXTRA = 3
"""Collectives in a row that a rank may have entered beyond those of the others, to be named as the difference."""

History: TypeAlias = Sequence[Collective]
"""Recent collectives of one rank in one group, oldest first."""


@dataclass(frozen=True)
class Difference:
    """The first collective that differs between ranks."""

    mismatch: int | None
    """Number of the first collective whose name or tensors differ between ranks."""
    other_lines: int | None
    """Number of the first collective that ranks called at different lines, if that may have led to the hang."""
    oldest: int
    """The first number that every rank still has."""
    without: str = ""
    """Which ranks would match the others without the first of these collectives; "" if that is not known."""

    @property
    def start(self) -> int:
        return min(number for number in (self.mismatch, self.other_lines) if number is not None)


def find_difference(recent: Mapping[int, History], stuck: int) -> Difference | None:
    """Return the first collective that differs up to number ``stuck``, the first in which a rank waits."""
    entered = _comparable(recent, stuck)
    mismatch = next((number for number, found in entered.items() if len(set(map(_kind, found.values()))) > 1), None)
    oldest = min(entered, default=0)
    # Ranks that are behind could still call a collective at the same line as the others, or at another one.
    everybody = max(map(len, entered.values()), default=0)
    alike = {
        number: found
        for number, found in entered.items()
        if len(found) == everybody and (mismatch is None or number < mismatch)
    }
    differ = [number for number, found in alike.items() if _lines_differ(found)]
    starts = [number for number in differ if number < stuck and number - 1 not in differ]
    for start in [*starts, *([] if mismatch is None else [mismatch])]:
        if without := _describe_extra(recent, start):
            return Difference(mismatch, start if start in alike else None, oldest, without)
    other_lines = _start_of_other_lines(alike, differ)
    if other_lines == stuck:  # the report says already who waits there
        other_lines = None
    return Difference(mismatch, other_lines, oldest) if (mismatch, other_lines) != (None, None) else None


def _comparable(recent: Mapping[int, History], stuck: int) -> dict[int, dict[int, Collective]]:
    """Return collectives by number and rank: ``stuck``, and those before it that every rank has still recorded."""
    oldest = min(stuck, max((mine[0].number for mine in recent.values() if mine), default=0))
    entered: dict[int, dict[int, Collective]] = {}
    for rank, mine in sorted(recent.items()):
        for collective in mine:
            if oldest <= collective.number <= stuck:
                entered.setdefault(collective.number, {})[rank] = collective
    return {number: found for number, found in sorted(entered.items()) if len(found) > 1}


def _kind(collective: Collective) -> tuple[str, str]:
    """Return what must be equal on all ranks. Backends compare the number of elements, not the shape."""
    if collective.name.startswith(UNEVEN):
        return collective.name, ""  # not compared
    return collective.name, SHAPE.sub(lambda shape: f"[{_elements(shape[1])}]", collective.tensors)


def _elements(sizes: str) -> int:
    return math.prod(int(size) for size in sizes.split(",") if size.strip())


def _lines_differ(found: Mapping[int, Collective]) -> bool:
    lines = {collective.where for collective in found.values()}
    return len(lines) > 1 and "" not in lines  # "" is unknown: the backward of FSDP may run in a thread of its own


def _start_of_other_lines(alike: Mapping[int, Mapping[int, Collective]], differ: Collection[int]) -> int | None:
    """Return the number from which on the ranks' lines differ up to the end, or None.

    Calls at different lines are often correct. So lines that agree again later say nothing, nor do pairs of lines that
    met before, as where rank 0 always takes a branch of its own.
    """
    lines = {number: tuple((rank, one.where) for rank, one in found.items()) for number, found in alike.items()}
    start = None
    for number in reversed(list(alike)):
        if number not in differ:
            break
        start = number
    if start is None or any(lines[start] == lines[number] for number in alike if number < start):
        return None
    never_agreed = start == min(alike)
    return None if never_agreed and len(set(lines.values())) < len(lines) else start


def _describe_extra(recent: Mapping[int, History], start: int) -> str:
    """Say which ranks would match the others without their collectives from ``start`` on; "" if that is not known."""
    tails: dict[tuple[tuple[str, str, str], ...], list[int]] = {}
    for rank, mine in recent.items():
        if tail := tuple((*_kind(one), one.where) for one in mine if one.number >= start):
            tails.setdefault(tail, []).append(rank)
    if len(tails) != 2:
        return ""
    (short, others), (long, ranks) = sorted(tails.items(), key=lambda item: len(item[0]))
    extra = len(long) - len(short)
    if not 0 < extra <= MOST_EXTRA or long[extra:] != short:
        return ""
    which = f"collective {start}" if extra == 1 else f"collectives {start}-{start + extra - 1}"
    fewer, more = name_ranks(others), name_ranks(ranks)
    if len(ranks) > len(others):
        return f"if {fewer} also called {which} of {more}, {'it' if len(others) == 1 else 'they'} would match them"
    whose, who = ("its", "it") if len(ranks) == 1 else ("their", "they")
    return f"if {more} skipped {whose} {which}, {who} would match {fewer}"


def describe_difference(recent: Mapping[int, History], difference: Difference, stuck: int) -> list[str]:
    """Return one line for a mismatch and one for a hint, as far as there are such."""
    lines = []
    if (number := difference.mismatch) is not None:
        if number < stuck and number == difference.oldest > 1:
            what = "differs between these ranks, although it completed; older ones are no longer recorded"
        elif number < stuck:
            since = f" since number {difference.oldest}" if difference.oldest > 1 else ""
            what = f"is the first{since} that differs between these ranks, although it completed"
        else:
            what = "differs between these ranks"
        lines.append(f"mismatch: collective number {number} {what}")
    if (number := difference.other_lines) is not None:
        ranks_by_line = grouped((collective.where, rank) for rank, collective in _at(recent, number).items())
        callers = [f"at {line} by {name_ranks(ranks)}" for line, ranks in ranks_by_line.items()]
        where = ", but ".join(callers)
        if len(callers) > 2:
            where = f"{callers[0]}, {callers[1]} and at {counted(len(callers) - 2, 'other line')}"
        lines.append(f"hint: collective number {number} was called {where}")
    if difference.without:
        lines[-1] += f"; {difference.without}"
    return lines


def _at(recent: Mapping[int, History], number: int) -> dict[int, Collective]:
    return {rank: one for rank, mine in sorted(recent.items()) for one in mine if one.number == number}


def draw_table(recent: Mapping[int, History], difference: Difference, returned: Collection[int]) -> list[str]:
    """Return the table of the collectives around the first difference, in which ranks that agree share a line.

    It is empty if no rank went on after that collective: then the table would repeat where the ranks wait.
    """
    start = difference.start
    if all(mine[-1].number <= start for mine in recent.values() if mine):
        return []
    rows = []
    missing = set(recent)
    for number in range(max(start - BEFORE, difference.oldest), start + AFTER + 1):
        found = _at(recent, number)
        states = {rank: _state(recent[rank], one) for rank, one in found.items()}
        label = f"{'>' if number == start else ' '} {number}"
        here = [
            (name_ranks(ranks), describe_collective(one, with_number=False), state.format("s" * (len(ranks) == 1)))
            for state in dict.fromkeys(states.values())
            for one, ranks in group_ranks({rank: found[rank] for rank in found if states[rank] == state})
        ]
        gone = {rank for rank in missing if not recent[rank] or recent[rank][-1].number < number}
        missing -= gone
        for state, ranks in (("returned", gone & set(returned)), ("did not enter", gone - set(returned))):
            here += [(name_ranks(ranks), "", state)] if ranks and found else []
        rows += [(label if not index else "", *row) for index, row in enumerate(here)]
    return ["collectives of each rank (> marks the first difference):", *_aligned(rows)]


def _aligned(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    label, ranks, what = (max(len(row[column]) for row in rows) for column in range(3))
    for row in rows:
        text = f"{row[1]:{ranks}}  {row[2]:{what}}  {row[3]}" if row[2] else f"{row[1]:{ranks}}  {row[3]}"
        yield f"  {row[0]:>{label}}  {text}"


def _state(mine: History, collective: Collective) -> str:
    if collective.done:
        return "completed"
    return "wait{}" if next(one for one in mine if not one.done) == collective else "entered"


def group_ranks(found: Mapping[int, Collective]) -> list[tuple[Collective, list[int]]]:
    """Group ranks that entered the same collective, so that many ranks with different tensors need few lines."""
    groups = grouped((one, rank) for rank, one in sorted(found.items()))
    if len(groups) > MOST_VARIANTS:
        largest = sorted(groups, key=lambda one: -len(groups[one]))[: MOST_VARIANTS - 1]
        rest = [(rank, one) for rank, one in sorted(found.items()) if one not in largest]
        others = grouped((replace(one, tensors=""), rank) for rank, one in rest)
        groups = {one: groups[one] for one in largest}
        for one, ranks in others.items():
            kinds = {found[rank].tensors for rank in ranks}
            tensors = f"{len(kinds)} other kinds of tensors" if len(kinds) > 1 else kinds.pop()
            groups[replace(one, tensors=tensors)] = ranks
    return sorted(groups.items(), key=lambda item: item[1])


def describe_collective(collective: Collective, with_number: bool = True) -> str:
    details = ", ".join(filter(None, (collective.tensors, collective.where)))
    name = f"{collective.name} number {collective.number}" if with_number else collective.name
    return f"{name} ({details})" if details else name
