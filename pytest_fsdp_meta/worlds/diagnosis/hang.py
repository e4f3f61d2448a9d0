"""Where the ranks of a world stand that does not answer, in one view: collectives first, then stacks."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from multiprocessing import connection

from pytest_fsdp_meta.text import name_ranks
from pytest_fsdp_meta.worlds.diagnosis import native_stacks
from pytest_fsdp_meta.worlds.diagnosis.flight_recorder import QUESTION, Collective, Flight, Group, Whereabouts
from pytest_fsdp_meta.worlds.engine import Member
from pytest_fsdp_meta.worlds.system import messages

PATIENCE = 3.0
"""Seconds for all ranks together to say where they are: they need milliseconds, on a machine that has ten times as much
to do as it can a second and more; where the interpreter is locked, it is all spent."""
IDLE = "  (it has returned)"
UNEVEN = ("all_to_all", "scatter", "gather", "barrier")
"""Collectives in which ranks may bring different tensors."""


def look(members: Sequence[Member]) -> dict[int, Whereabouts]:
    """Where every rank is. One that does not answer is stopped, or keeps the interpreter's lock, and is looked at."""
    found = _ask([member for member in members if not member.has_ended])
    mute = [member for member in members if member.rank not in found]
    # In this order: the signal that makes a rank write its stack wakes it from what it sleeps in.
    inside = _inside(members, {rank: there.stack for rank, there in found.items()})
    for member in mute:
        member.ask_stack()
    deadline = time.monotonic() + PATIENCE
    found |= {member.rank: Whereabouts(member.stack(deadline)) for member in mute}
    return {
        rank: Whereabouts("\n".join(filter(None, (there.stack or IDLE, inside.get(rank)))), there.flight)
        for rank, there in found.items()
    }


def _inside(members: Sequence[Member], stacks: Mapping[int, str]) -> dict[int, str]:
    """Where ranks are in C code. Of those that have said the same stack one is looked at, and of the idle none."""
    pids = {member.rank: member.pid for member in members if member.pid and stacks.get(member.rank) != ""}
    alike = {rank: stacks.get(rank, f"unknown, of rank {rank}") for rank in pids}
    first = {stack: rank for rank, stack in reversed(alike.items())}
    seen = native_stacks.stacks({rank: pids[rank] for rank in first.values()})
    return {rank: seen[first[stack]] for rank, stack in alike.items() if first[stack] in seen}


def _ask(members: Sequence[Member]) -> dict[int, Whereabouts]:
    found: dict[int, Whereabouts] = {}
    asked = list(members)
    for member in asked:
        member.send(messages.pack(QUESTION))
    deadline = time.monotonic() + PATIENCE
    while asked and (left := deadline - time.monotonic()) > 0:
        ready = connection.wait([handle for member in asked for handle in member.handles], left)
        for member in [one for one in asked if one.has_news or any(handle in ready for handle in one.handles)]:
            message = member.hear()
            if message is None or message[0] == QUESTION[0]:
                asked.remove(member)
            if message is not None and message[0] == QUESTION[0]:
                found[member.rank] = message[1]
    return found


def describe(flights: Mapping[int, Flight | None], returned: Collection[int] = ()) -> str:
    """Who waits in which collective, and who is not there, by process group; empty where nobody waits in any.

    ``returned`` are ranks that have nothing left to do.
    """
    known = {rank: flight for rank, flight in sorted(flights.items()) if flight is not None}
    groups = {name: group for flight in known.values() for name, group in flight.groups.items()}
    waited_in = dict.fromkeys(one.group for flight in known.values() for one in flight.collectives if not one.done)
    told = []
    for name in waited_in:
        group = groups.get(name, Group("", tuple(sorted(known))))
        recent = {
            rank: [one for one in known[rank].collectives if one.group == name] for rank in group.ranks if rank in known
        }
        deaf = [rank for rank in group.ranks if rank not in known]
        told += [f"in {_title(group, len(flights))}:", *_lines(recent, deaf, returned)]
    return "\n".join(told)


def _title(group: Group, size: int) -> str:
    who = f" of {name_ranks(group.ranks)}" if len(group.ranks) < size else ""
    return f"{group.title}{who}" if group.title.startswith("the ") else f"group {group.title}".rstrip() + who


def _lines(recent: Mapping[int, Sequence[Collective]], deaf: Sequence[int], returned: Collection[int]) -> list[str]:
    waiting = {rank: next(one for one in mine if not one.done) for rank, mine in recent.items() if _waits(mine)}
    number = max(one.number for one in waiting.values())
    said: dict[str, list[int]] = {}
    for rank, one in waiting.items():
        said.setdefault(f"{{}} wait{{}} in {_named(one)}", []).append(rank)
    for rank in recent.keys() - waiting.keys():
        said.setdefault(_absent(recent[rank], number, rank in returned), []).append(rank)
    if deaf:
        said["{} did not say"] = list(deaf)
    lines = [f"  {_fill(line, ranks)}" for line, ranks in said.items()]
    if verdict := _verdict(recent, waiting, complete=not deaf):
        lines.append(f"  {verdict}")
    return lines


def _fill(line: str, ranks: Sequence[int]) -> str:
    one = len(ranks) == 1
    return line.format(name_ranks(ranks), "s" if one else "")


def _waits(mine: Sequence[Collective]) -> bool:
    return bool(mine) and not mine[-1].done


def _absent(mine: Sequence[Collective], number: int, returned: bool) -> str:
    """What a rank does that waits in nothing, while others wait in ``number``."""
    gone = "{} returned" if returned else "{} did not enter it"
    if not mine:
        return "{} returned, and entered none" if returned else f"{gone}, nor any before"
    last = mine[-1]
    if last.number < number:
        return f"{gone}; the last there was {_named(last)}"
    there = next((one for one in mine if one.number == number), last)
    return f"{{}} went on from {_named(there)}" + (" and returned" if returned else "")


def _named(one: Collective) -> str:
    about = ", ".join(filter(None, (one.tensors, one.where)))
    return f"{one.name} number {one.number}" + (f" ({about})" if about else "")


def _verdict(recent: Mapping[int, Sequence[Collective]], waiting: Mapping[int, Collective], complete: bool) -> str:
    """What does not fit together, at the first number that somebody waits in."""
    number = min(one.number for one in waiting.values())
    there = [one for mine in recent.values() for one in mine if one.number == number]
    kinds = {(one.name, "" if one.name.startswith(UNEVEN) else one.tensors) for one in there}
    if len(kinds) > 1:
        return f"they do not fit together: number {number} is not the same on these ranks"
    if complete and len(waiting) == len(recent) and len({one.number for one in waiting.values()}) == 1:
        return "all are there, and it does not end"
    return ""
