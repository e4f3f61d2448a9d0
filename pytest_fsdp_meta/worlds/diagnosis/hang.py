"""The description of a hang: which collectives the ranks of a world wait in, and the stack of every rank."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from pytest_fsdp_meta.text import name_ranks
from pytest_fsdp_meta.worlds.diagnosis.collective_history import (
    History,
    describe_collective,
    describe_difference,
    draw_table,
    find_difference,
    group_ranks,
)
from pytest_fsdp_meta.worlds.diagnosis.flight_recorder import QUESTION, Collective, Flight, Group, Whereabouts
from pytest_fsdp_meta.worlds.engine import Member, receive
from pytest_fsdp_meta.worlds.system import messages

PATIENCE = 3.0
"""Seconds for all ranks together to answer. They need milliseconds, or a second and more on a machine under ten times
the load that it can handle. A rank that holds the interpreter lock uses up all of them."""
NEVER = Collective("", 0, "", "", "", done=False)
"""Stands for the last collective of a rank that has entered none."""
RETURNED = "  (the call has returned)"
STOPPED = "  (it did not react: it is stopped)"


def look(members: Sequence[Member]) -> dict[int, Whereabouts]:
    """Return where every rank is. Ranks that do not answer (stopped, or inside C code) are inspected from outside."""
    # A stopped rank answers neither a message nor a signal, so it is not asked: others would wait for it in vain.
    stopped = {member.rank: Whereabouts(STOPPED, stopped=True) for member in members if member.is_stopped}
    found = _ask([member for member in members if member.rank not in stopped and not member.has_ended])
    silent = [member for member in members if member.rank not in found and member.rank not in stopped]
    for member in silent:
        member.request_stack()
    deadline = time.monotonic() + PATIENCE
    found |= stopped | {member.rank: Whereabouts(member.stack(deadline)) for member in silent}
    return {
        rank: whereabouts if whereabouts.stack else replace(whereabouts, stack=RETURNED)
        for rank, whereabouts in found.items()
    }


def _ask(members: Sequence[Member]) -> dict[int, Whereabouts]:
    """Ask ranks where they are; return the answers that arrive in time."""
    found: dict[int, Whereabouts] = {}
    waiting_for = list(members)
    for member in waiting_for:
        member.send(messages.pack(QUESTION))
    deadline = time.monotonic() + PATIENCE
    while waiting_for and time.monotonic() < deadline:
        for member, message in list(receive(waiting_for, deadline)):
            if message is None or message[0] == QUESTION[0]:
                waiting_for.remove(member)
            if message is not None and message[0] == QUESTION[0]:
                found[member.rank] = message[1]
    return found


def describe(flights: Mapping[int, Flight | None], returned: Collection[int] = ()) -> str:
    """Describe, for each process group, which ranks wait in which collective and which are missing; "" if none waits.

    ``returned`` are the ranks whose call has returned.
    """
    known = {rank: flight for rank, flight in sorted(flights.items()) if flight is not None}
    groups = {name: group for flight in known.values() for name, group in flight.groups.items()}
    waited_in = dict.fromkeys(
        collective.group for flight in known.values() for collective in flight.collectives if not collective.done
    )
    lines = []
    for name in waited_in:
        group = groups.get(name, Group("", tuple(sorted(known))))
        recent = {
            rank: [collective for collective in known[rank].collectives if collective.group == name]
            for rank in group.ranks
            if rank in known
        }
        silent = [rank for rank in group.ranks if rank not in known]
        lines += [f"in {_title(group, len(flights))}:", *_group_lines(recent, silent, returned)]
    return "\n".join(lines)


def _title(group: Group, size: int) -> str:
    ranks = f" of {name_ranks(group.ranks)}" if len(group.ranks) < size else ""
    return f"{group.title}{ranks}" if group.title.startswith("the ") else f"group {group.title}".rstrip() + ranks


def _group_lines(recent: Mapping[int, History], silent: Sequence[int], returned: Collection[int]) -> list[str]:
    waiting = {
        rank: next(collective for collective in mine if not collective.done)
        for rank, mine in recent.items()
        if mine and not mine[-1].done
    }
    furthest = max(collective.number for collective in waiting.values())
    lines = [_fill("{ranks} wait{s} in {last}", ranks, one) for one, ranks in group_ranks(waiting)]
    missing: dict[str, dict[int, Collective]] = {}
    for rank in sorted(recent.keys() - waiting.keys()):
        template, last = _describe_missing(recent[rank], furthest, rank in returned)
        missing.setdefault(template, {})[rank] = last
    for template, last_of in missing.items():
        lines += [_fill(template, ranks, one) for one, ranks in group_ranks(last_of)]
    if silent:
        lines.append(f"{name_ranks(silent)} did not respond")
    return [f"  {line}" for line in lines + _compare(recent, waiting, returned, complete=not silent)]


def _fill(template: str, ranks: Sequence[int], last: Collective) -> str:
    return template.format(ranks=name_ranks(ranks), s="s" * (len(ranks) == 1), last=describe_collective(last))


def _describe_missing(mine: History, number: int, returned: bool) -> tuple[str, Collective]:
    """Describe a rank that waits in no collective of the group, while other ranks wait in ``number``.

    Return a template and the collective for it.
    """
    if not mine:
        start = "{ranks} returned without entering any" if returned else "{ranks} did not enter it, nor any earlier one"
        return start, NEVER
    last = mine[-1]
    if last.number < number:
        start = "{ranks} returned" if returned else "{ranks} did not enter it"
        return f"{start}; last in this group: {{last}}", last
    completed = next((collective for collective in mine if collective.number == number), last)
    return "{ranks} completed {last}" + (" and returned" if returned else ""), completed


def _compare(
    recent: Mapping[int, History], waiting: Mapping[int, Collective], returned: Collection[int], complete: bool
) -> list[str]:
    """Say where the ranks' collectives differ first, or else that no rank is missing; nothing if neither is known."""
    numbers = {collective.number for collective in waiting.values()}
    difference = find_difference(recent, min(numbers))
    found = describe_difference(recent, difference, min(numbers)) if difference else []
    matching = difference is None or difference.mismatch is None
    if matching and complete and len(waiting) == len(recent) and len(numbers) == 1:
        found.insert(0, "all ranks entered it, but it does not complete")
    return found + (draw_table(recent, difference, returned) if difference else [])
