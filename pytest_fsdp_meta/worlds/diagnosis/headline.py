"""The first line about a hang: the ranks that are behind, where they are, and what the others wait for."""

from __future__ import annotations

import os
import re
import sysconfig
from collections.abc import Collection, Mapping

from pytest_fsdp_meta.worlds.diagnosis.flight_recorder import Collective, Whereabouts
from pytest_fsdp_meta.worlds.failures import RankState

FRAME = re.compile(r'  File "(?P<file>[^"\n]+)", line (?P<line>\d+) in (?P<function>\S+)')
LIBRARIES = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib")})
"""The folders of Python's own modules and of installed packages."""
MOST_STATES = 3
"""States that the line names, so that it stays a line."""


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
    waiting = {rank: last for rank, whereabouts in hung.items() if (last := _awaited(whereabouts)) is not None}
    behind = _behind(hung, waiting)
    states: dict[tuple[str, str], list[int]] = {}
    for rank in sorted(hung, key=lambda rank: (rank not in behind, rank)):
        text = _describe(hung[rank], waiting.get(rank), verb if rank in behind else "waits")
        states.setdefault((text, _place(hung[rank].stack)), []).append(rank)
    if answered:
        states["had returned", ""] = sorted(answered)
    return _shorten([RankState(tuple(ranks), text, place) for (text, place), ranks in _merge_places(states).items()])


def _merge_places(states: Mapping[tuple[str, str], list[int]]) -> dict[tuple[str, str], list[int]]:
    """Merge states with the same text, which shows the name of a file, but not its folder."""
    merged: dict[str, tuple[str, list[int]]] = {}
    for (text, place), ranks in states.items():
        merged.setdefault(text, (place, []))[1].extend(ranks)
    return {(text, place): ranks for text, (place, ranks) in merged.items()}


def _shorten(states: list[RankState]) -> list[RankState]:
    if len(states) <= MOST_STATES:
        return states
    rest = sorted(rank for state in states[MOST_STATES - 1 :] for rank in state.ranks)
    return [*states[: MOST_STATES - 1], RankState(tuple(rest), "were elsewhere")]


def _awaited(whereabouts: Whereabouts) -> Collective | None:
    """Return the collective that the rank waits in, or None."""
    collectives = () if whereabouts.flight is None else whereabouts.flight.collectives
    return next((collective for collective in reversed(collectives) if not collective.done), None)


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


def _describe(whereabouts: Whereabouts, awaited: Collective | None, verb: str) -> str:
    if awaited is not None:
        return f"{verb} in {', '.join(filter(None, (awaited.name, awaited.where)))}"
    if whereabouts.stopped:
        return "was stopped by a signal such as SIGSTOP"
    frame = _user_frame(whereabouts.stack)
    if frame is None:
        return "did not respond" if whereabouts.flight is None else f"{verb} outside of Python code"
    return f"{verb} in {frame['function']}, {os.path.basename(frame['file'])}:{frame['line']}"


def _place(stack: str) -> str:
    """Return "path:line" of the user's innermost frame; "" if there is none."""
    frame = _user_frame(stack)
    return "" if frame is None else f"{frame['file']}:{frame['line']}"


def _user_frame(stack: str) -> re.Match[str] | None:
    """Return the innermost frame of the user's code in the main thread, or else the innermost frame."""
    frames = list(FRAME.finditer(stack.partition("\n  (")[0]))
    of_user = [frame for frame in frames if not is_library(frame["file"])]
    return next(reversed(of_user or frames), None)
