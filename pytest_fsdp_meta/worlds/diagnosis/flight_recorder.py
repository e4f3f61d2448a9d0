"""The last collectives of this rank, from torch's flight recorder.

Torch records collectives for every backend, but its public API writes them out only when a process group times out,
which is too late. So this module uses private names; tests/worlds/test_hangs.py fails when one of them moves. Without
them, or with a torch that has no recorder, the description of a hang lacks the collectives and is otherwise complete.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

QUESTION = ("where",)
"""The message that asks a rank for its ``Whereabouts``; the answer begins with the same word."""
SIZE = "TORCH_FR_BUFFER_SIZE"
"""The variable that enables the recorder; the user may have set it."""
ENTRIES = "500"
"""Collectives that torch records. Recording one costs about 7 microseconds, reading all of them 30 milliseconds."""
RECENT = 100
"""Collectives of each group to report: a hang may begin long before the collectives that the ranks wait in."""
DUMPS = ("_dump_fr_trace", "_dump_nccl_trace")
"""Functions of torch's bindings. The second exists only in builds for GPUs: NCCL has a recorder of its own."""

WRAPPERS = ("typing_extensions.py", "contextlib.py", "functools.py")
"""Files of decorators, whose frames lie between the user's and torch's."""


@dataclass(frozen=True)
class Collective:
    """One collective as a rank entered it. ``number`` counts the collectives of its group, equally on every rank."""

    group: str
    number: int
    name: str
    tensors: str
    where: str
    """The user's file and line."""
    done: bool


@dataclass(frozen=True)
class Group:
    """A process group: its title, which may be empty, and its ranks."""

    title: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Flight:
    """The last collectives of a rank, oldest first, and every group that it is in, by torch's name for the group."""

    collectives: tuple[Collective, ...] = ()
    groups: Mapping[str, Group] = field(default_factory=dict)


@dataclass(frozen=True)
class Whereabouts:
    """Where a rank is. If the rank did not answer, ``flight`` is None and ``stack`` was obtained from outside."""

    stack: str
    flight: Flight | None = None
    stopped: bool = False
    """Whether a signal such as SIGSTOP has stopped the rank."""


def read() -> Flight:
    """Read this rank's recorder, also while another thread waits in a collective."""
    if "torch.distributed" not in sys.modules:
        return Flight()
    try:
        bindings = sys.modules["torch"]._C._distributed_c10d
        dumps = [getattr(bindings, name) for name in DUMPS if hasattr(bindings, name)]
        entries = [entry for dump in dumps for entry in pickle.loads(dump(True, True, False))["entries"]]
        groups = _groups()
        names = {_group_of(entry) for entry in entries}
        recent = [collective for group in names for collective in _recent(entries, group)]
    except (ImportError, AttributeError, KeyError, TypeError, RuntimeError):
        return Flight()  # a torch with other private names: describe the hang without collectives
    return Flight(tuple(recent), groups)


def _groups() -> dict[str, Group]:
    """Return the groups that this rank is in, which torch's public API does not list."""
    world = sys.modules["torch.distributed"].distributed_c10d._world
    # Groups that this rank is not in have ranks there, but no name.
    mine = {
        world.pg_names[group]: (group, ranks)
        for group, ranks in world.pg_group_ranks.items()
        if group in world.pg_names
    }
    titles = {"default_pg": "the default group", "undefined": ""}
    return {
        name: Group(titles.get(group.group_desc, group.group_desc), tuple(sorted(ranks)))
        for name, (group, ranks) in mine.items()
    }


def _group_of(entry: Mapping[str, Any]) -> str:
    return str(entry["process_group"][0])


def _recent(entries: Sequence[Mapping[str, Any]], group: str) -> list[Collective]:
    # Sends and receives are left out: only two ranks count them, so their numbers cannot be compared.
    mine = [_collective(entry) for entry in entries if _group_of(entry) == group and not entry["is_p2p"]]
    mine.sort(key=lambda collective: collective.number)
    # Torch records the end of a collective a moment after its caller goes on, and has been seen to miss one.
    ended = max((collective.number for collective in mine if collective.done), default=0)
    return [replace(collective, done=collective.number <= ended) for collective in mine[-RECENT:]]


def _collective(entry: Mapping[str, Any]) -> Collective:
    tensors = [
        f"{kind.lower()}{list(size)}" for kind, size in zip(entry["input_dtypes"], entry["input_sizes"], strict=False)
    ]
    return Collective(
        group=_group_of(entry),
        number=entry["collective_seq_id"],
        name=entry["profiling_name"].rpartition(":")[2].strip("_"),
        tensors=", ".join(tensors[:3]) + ", ..." * (len(tensors) > 3),
        where=_user_line(entry.get("frames", ())),
        done=bool(entry["retired"]) or entry["state"] == "completed",
    )


def _user_line(frames: Sequence[Mapping[str, Any]]) -> str:
    """Return "file:line" of the user's innermost frame, or ""; torch lists frames innermost first."""
    # With multiprocessing, which starts the rank: an observer may call a collective after the user's code.
    modules = (sys.modules["torch"], multiprocessing)
    hidden = (str(Path(__file__).parents[2]), *(str(Path(module.__file__ or "").parent) for module in modules), "<")
    for frame in frames:
        file = str(frame["filename"])
        if not file.startswith(hidden) and os.path.basename(file) not in WRAPPERS:
            return f"{os.path.basename(file)}:{frame['line']}"
    return ""
