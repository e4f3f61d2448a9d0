"""The collectives of this rank, from torch's flight recorder.

Torch fills it for every backend and gives no public way to read it before it is too late: it is dumped when a process
group times out. tests/worlds/test_hangs.py breaks when one of these private names moves; without them, and with a torch
that has no recorder, nothing is known of collectives and everything else is told as ever.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

QUESTION = ("where",)
"""What the parent asks; the answer begins with the same word."""
SIZE = "TORCH_FR_BUFFER_SIZE"
ENTRIES = "500"
"""Collectives that are kept. Writing one down costs some 7 microseconds; reading them all 30 milliseconds."""
RECENT = 20
"""Collectives of each group that are told: what another rank waits in may be some way back."""
DUMPS = ("_dump_fr_trace", "_dump_nccl_trace")
"""The second is what torch built for GPUs has beside the first: NCCL has a recorder of its own."""

WRAPPERS = ("typing_extensions.py", "contextlib.py", "functools.py")
"""Where decorators stand between the user's line and torch's."""


@dataclass(frozen=True)
class Collective:
    """One collective as a rank entered it. ``number`` counts those of its group, on every rank alike."""

    group: str
    number: int
    name: str
    tensors: str
    where: str
    """The user's line."""
    done: bool


@dataclass(frozen=True)
class Group:
    """What it is called, which may be nothing, and its ranks."""

    title: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Flight:
    """The last collectives of a rank, oldest first, and every group that it is in, by torch's name for it."""

    collectives: tuple[Collective, ...] = ()
    groups: Mapping[str, Group] = field(default_factory=dict)


@dataclass(frozen=True)
class Whereabouts:
    """What a rank says when it is asked where it is. Of one that cannot hear, the system says the stack at best."""

    stack: str
    flight: Flight | None = None


def switch_on() -> None:
    """Before the first process group is made: the recorder reads its size once. What the user has set stays."""
    os.environ.setdefault(SIZE, ENTRIES)


def read() -> Flight:
    """Of what torch says here and now; also while another thread of this process sits in a collective."""
    if "torch.distributed" not in sys.modules:
        return Flight()
    try:
        entries = [entry for dump in _dumps() for entry in pickle.loads(dump(True, True, False))["entries"]]
        groups = _groups()
        named = {_group(entry) for entry in entries}
        kept = [one for group in named for one in _recent(entries, group)]
    except (ImportError, AttributeError, KeyError, TypeError, RuntimeError):
        return Flight()  # another torch: the view of a hang goes without, which is better than no view
    return Flight(tuple(kept), groups)


def _dumps() -> Iterator[Any]:
    bindings = sys.modules["torch"]._C._distributed_c10d
    return (getattr(bindings, name) for name in DUMPS if hasattr(bindings, name))


def _groups() -> dict[str, Group]:
    """Public torch tells the ranks of a group that one holds, and not which groups there are."""
    world = sys.modules["torch.distributed"].distributed_c10d._world
    # What a rank holds of a group that it is not in has ranks and no name.
    mine = {
        world.pg_names[group]: (group, ranks)
        for group, ranks in world.pg_group_ranks.items()
        if group in world.pg_names
    }
    return {name: Group(_title(group.group_desc), tuple(sorted(ranks))) for name, (group, ranks) in mine.items()}


def _title(description: str) -> str:
    return {"default_pg": "the default group", "undefined": ""}.get(description, description)


def _group(entry: Mapping[str, Any]) -> str:
    return str(entry["process_group"][0])


def _recent(entries: Sequence[Mapping[str, Any]], group: str) -> list[Collective]:
    # A rank that sends or receives is not counted on by its whole group, so numbers cannot be compared.
    mine = [_collective(entry) for entry in entries if _group(entry) == group and not entry["is_p2p"]]
    mine.sort(key=lambda one: one.number)
    # Torch notes an end a moment after whoever waited for it has gone on, and has been seen to miss one.
    ended = max((one.number for one in mine if one.done), default=0)
    return [replace(one, done=one.number <= ended) for one in mine[-RECENT:]]


def _collective(entry: Mapping[str, Any]) -> Collective:
    tensors = [
        f"{kind.lower()}{list(size)}" for kind, size in zip(entry["input_dtypes"], entry["input_sizes"], strict=False)
    ]
    return Collective(
        group=_group(entry),
        number=entry["collective_seq_id"],
        name=entry["profiling_name"].rpartition(":")[2].strip("_"),
        tensors=", ".join(tensors[:3]) + ", ..." * (len(tensors) > 3),
        where=_where(entry.get("frames", ())),
        done=bool(entry["retired"]) or entry["state"] == "completed",
    )


def _where(frames: Sequence[Mapping[str, Any]]) -> str:
    """The innermost line of the user's: frames come innermost first."""
    ours = (str(Path(__file__).parents[2]), str(Path(sys.modules["torch"].__file__ or "").parent), "<")
    for frame in frames:
        file = str(frame["filename"])
        if not file.startswith(ours) and os.path.basename(file) not in WRAPPERS:
            return f"{os.path.basename(file)}:{frame['line']}"
    return ""
