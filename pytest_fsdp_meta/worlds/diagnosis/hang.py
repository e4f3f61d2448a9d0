"""The description of a hang: the ranks that are behind, the collectives that ranks wait in, and every rank's stack."""

from __future__ import annotations

import os
import re
import sysconfig
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
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
from pytest_fsdp_meta.worlds.engine import Member, pack_message, receive
from pytest_fsdp_meta.worlds.failures import RankFailure, RankState

PATIENCE = 3.0
"""Seconds for all ranks together to answer. They need milliseconds, or a second and more on a machine under ten times
the load that it can handle. A rank that holds the interpreter lock uses up all of them."""
NEVER = Collective("", 0, "", "", "", done=False)
"""Stands for the last collective of a rank that has entered none."""
RETURNED = "  (the call has returned)"
STOPPED = "  (it did not react: it is stopped)"
FRAME = re.compile(r'  File "(?P<file>[^"\n]+)", line (?P<line>\d+) in (?P<function>\S+)')
LIBRARIES = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib")})
"""The folders of Python's own modules and of installed packages."""
MISMATCH = "op.preamble.length <= op.nbytes"
"""What gloo says when it receives more data than it expects."""
MOST_STATES = 3
"""States that the line names, so that it stays a line."""


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
    found: dict[int, Whereabouts] = {}
    waiting_for = list(members)
    for member in waiting_for:
        member.send(pack_message(QUESTION))
    deadline = time.monotonic() + PATIENCE
    while waiting_for and time.monotonic() < deadline:
        for member, message in list(receive(waiting_for, deadline)):
            if message is None or message[0] == QUESTION[0]:
                waiting_for.remove(member)
            if message is not None and message[0] == QUESTION[0]:
                found[member.rank] = message[1]
    return found


def describe_mismatch(members: Sequence[Member], failures: Iterable[RankFailure]) -> str:
    """Name the collective that each rank was in, if gloo received data of another size than it expects; else ""."""
    if not any(MISMATCH in failure.summary for failure in failures):
        return ""
    lines, found = ["the collectives of the ranks do not match:"], _ask([one for one in members if not one.has_ended])
    for member in members:
        flight = found[member.rank].flight if member.rank in found else None
        calls = flight.collectives if flight is not None else ()
        last = next((one for one in calls if not one.done), calls[-1] if calls else None)
        was_in = _written_place(member.written().since()) if last is None else describe_collective(last)
        lines.append(f"  rank {member.rank} was in {was_in or 'an unknown one'}")
    return "\n".join(lines)


def _written_place(output: str) -> str:
    """Return where a rank was that gloo has ended, in a thread of its own, from the stacks that faulthandler writes."""
    main_thread = output.rpartition("Fatal Python error")[2].partition("\n\nExtension")[0].rpartition("\n\n")[2]
    frames = list(FRAME.finditer(main_thread))  # innermost first
    own = next((one for one in frames if not is_library(one["file"])), None)
    return f"{frames[0]['function']}, {os.path.basename(own['file'])}:{own['line']}" if own else ""


def is_library(file: str) -> bool:
    """Return whether a file of a traceback belongs to Python or to an installed package, not to the user's project."""
    return file.startswith((*LIBRARIES, "<"))


def rank_states(
    found: Mapping[int, Whereabouts], answered: Collection[int] = (), verb: str = "hung"
) -> list[RankState]:
    """Return what ranks do, those that are behind first. ``answered`` are the ranks whose call has returned.

    ``verb`` says what a rank did that is behind: it may not hang, but only be slow.
    """
    hung = {rank: whereabouts for rank, whereabouts in sorted(found.items()) if rank not in answered}
    flights = ((rank, whereabouts.flight) for rank, whereabouts in hung.items() if whereabouts.flight is not None)
    open_calls = ((rank, [c for c in flight.collectives if not c.done]) for rank, flight in flights)
    waiting = {rank: calls[-1] for rank, calls in open_calls if calls}
    behind = _behind(hung, waiting)
    ranks_by_text: dict[str, tuple[str, list[int]]] = {}
    for rank in sorted(hung, key=lambda rank: (rank not in behind, rank)):
        text = _describe_state(hung[rank], waiting.get(rank), verb if rank in behind else "waits")
        frame = _user_frame(hung[rank].stack)
        place = "" if frame is None else f"{frame['file']}:{frame['line']}"
        ranks_by_text.setdefault(text, (place, []))[1].append(rank)
    if answered:
        ranks_by_text["had returned"] = "", sorted(answered)
    states = [RankState(tuple(ranks), text, place) for text, (place, ranks) in ranks_by_text.items()]
    if len(states) > MOST_STATES:
        rest = sorted(rank for state in states[MOST_STATES - 1 :] for rank in state.ranks)
        states[MOST_STATES - 1 :] = [RankState(tuple(rest), "were elsewhere")]
    return states


def _behind(hung: Mapping[int, Whereabouts], waiting: Mapping[int, Collective]) -> set[int]:
    """Return the ranks that the others wait for; all of them where that is not known.

    These are ranks that wait in no collective, or else in an earlier one than other ranks of the same group.
    """
    if outside := hung.keys() - waiting.keys():
        return set(outside)
    furthest: dict[str, int] = {}
    for collective in waiting.values():
        furthest[collective.group] = max(collective.number, furthest.get(collective.group, 0))
    earlier = {rank for rank, collective in waiting.items() if collective.number < furthest[collective.group]}
    return earlier or set(hung)


def _describe_state(whereabouts: Whereabouts, awaited: Collective | None, verb: str) -> str:
    if awaited is not None:
        return f"{verb} in {', '.join(filter(None, (awaited.name, awaited.where)))}"
    if whereabouts.stopped:
        return "was stopped by a signal such as SIGSTOP"
    frame = _user_frame(whereabouts.stack)
    if frame is None:
        return "did not respond" if whereabouts.flight is None else f"{verb} outside of Python code"
    return f"{verb} in {frame['function']}, {os.path.basename(frame['file'])}:{frame['line']}"


def _user_frame(stack: str) -> re.Match[str] | None:
    """Return the innermost frame of the user's code in the main thread, or else the innermost frame."""
    frames = list(FRAME.finditer(stack.partition("\n  (")[0]))
    of_user = [frame for frame in frames if not is_library(frame["file"])]
    return next(reversed(of_user or frames), None)


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
        ranks = f" of {name_ranks(group.ranks)}" if len(group.ranks) < len(flights) else ""
        title = group.title if group.title.startswith("the ") else f"group {group.title}".rstrip()
        lines += [f"in {title}{ranks}:", *_group_lines(recent, silent, returned)]
    return "\n".join(lines)


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
