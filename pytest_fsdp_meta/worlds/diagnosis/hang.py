"""The description of a hang: which collectives the ranks of a world wait in, and the stack of every rank."""

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
"""Seconds for all ranks together to answer. They need milliseconds, or a second and more on a machine under ten times
the load that it can handle. A rank that holds the interpreter lock uses up all of them."""
RETURNED = "  (the call has returned)"
UNEVEN = ("all_to_all", "scatter", "gather", "barrier")
"""Name prefixes of collectives in which ranks may pass different tensors."""


def look(members: Sequence[Member]) -> dict[int, Whereabouts]:
    """Return where every rank is. Ranks that do not answer (stopped, or inside C code) are inspected from outside."""
    found = _ask([member for member in members if not member.has_ended])
    silent = [member for member in members if member.rank not in found]
    # Before the stacks: the signal that makes a rank write its stack interrupts the system call that it sleeps in.
    c_stacks = _c_stacks(members, {rank: whereabouts.stack for rank, whereabouts in found.items()})
    for member in silent:
        member.request_stack()
    deadline = time.monotonic() + PATIENCE
    found |= {member.rank: Whereabouts(member.stack(deadline)) for member in silent}
    return {
        rank: Whereabouts(
            "\n".join(filter(None, (whereabouts.stack or RETURNED, c_stacks.get(rank)))), whereabouts.flight
        )
        for rank, whereabouts in found.items()
    }


def _c_stacks(members: Sequence[Member], stacks: Mapping[int, str]) -> dict[int, str]:
    """Return the C functions that ranks are in. Of ranks with equal Python stacks only one is inspected.

    Ranks that have returned, whose stack is empty, are left out.
    """
    pids = {member.rank: member.pid for member in members if member.pid and stacks.get(member.rank) != ""}
    stack_of = {rank: stacks.get(rank, f"unknown, of rank {rank}") for rank in pids}
    first = {stack: rank for rank, stack in reversed(stack_of.items())}
    inspected = native_stacks.c_stacks({rank: pids[rank] for rank in first.values()})
    return {rank: inspected[first[stack]] for rank, stack in stack_of.items() if first[stack] in inspected}


def _ask(members: Sequence[Member]) -> dict[int, Whereabouts]:
    """Ask ranks where they are; return the answers that arrive in time."""
    found: dict[int, Whereabouts] = {}
    waiting_for = list(members)
    for member in waiting_for:
        member.send(messages.pack(QUESTION))
    deadline = time.monotonic() + PATIENCE
    while waiting_for and (left := deadline - time.monotonic()) > 0:
        ready = connection.wait([handle for member in waiting_for for handle in member.handles], left)
        for member in [
            one for one in waiting_for if one.has_message_or_ended or any(handle in ready for handle in one.handles)
        ]:
            message = member.receive_message()
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


def _group_lines(
    recent: Mapping[int, Sequence[Collective]], silent: Sequence[int], returned: Collection[int]
) -> list[str]:
    waiting = {
        rank: next(collective for collective in mine if not collective.done)
        for rank, mine in recent.items()
        if _waits(mine)
    }
    number = max(collective.number for collective in waiting.values())
    ranks_by_template: dict[str, list[int]] = {}
    for rank, collective in waiting.items():
        ranks_by_template.setdefault(f"{{}} wait{{}} in {_describe(collective)}", []).append(rank)
    for rank in recent.keys() - waiting.keys():
        ranks_by_template.setdefault(_missing_template(recent[rank], number, rank in returned), []).append(rank)
    if silent:
        ranks_by_template["{} did not respond"] = list(silent)
    lines = [f"  {_fill(template, ranks)}" for template, ranks in ranks_by_template.items()]
    if conclusion := _conclude(recent, waiting, complete=not silent):
        lines.append(f"  {conclusion}")
    return lines


def _fill(template: str, ranks: Sequence[int]) -> str:
    return template.format(name_ranks(ranks), "s" if len(ranks) == 1 else "")


def _waits(mine: Sequence[Collective]) -> bool:
    return bool(mine) and not mine[-1].done


def _missing_template(mine: Sequence[Collective], number: int, returned: bool) -> str:
    """Describe a rank that waits in no collective of the group, while other ranks wait in ``number``."""
    if not mine:
        return "{} returned without entering any" if returned else "{} did not enter it, nor any earlier one"
    last = mine[-1]
    if last.number < number:
        start = "{} returned" if returned else "{} did not enter it"
        return f"{start}; last in this group: {_describe(last)}"
    completed = next((collective for collective in mine if collective.number == number), last)
    return f"{{}} completed {_describe(completed)}" + (" and returned" if returned else "")


def _describe(collective: Collective) -> str:
    details = ", ".join(filter(None, (collective.tensors, collective.where)))
    return f"{collective.name} number {collective.number}" + (f" ({details})" if details else "")


def _conclude(recent: Mapping[int, Sequence[Collective]], waiting: Mapping[int, Collective], complete: bool) -> str:
    """Say why the first collective that a rank waits in does not complete; "" if that is not known."""
    number = min(collective.number for collective in waiting.values())
    entered = [collective for mine in recent.values() for collective in mine if collective.number == number]
    kinds = {(one.name, "" if one.name.startswith(UNEVEN) else one.tensors) for one in entered}
    if len(kinds) > 1:
        return f"mismatch: collective number {number} differs between these ranks"
    if complete and len(waiting) == len(recent) and len({one.number for one in waiting.values()}) == 1:
        return "all ranks entered it, but it does not complete"
    return ""
