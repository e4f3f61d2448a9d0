"""The interface between a world and the machines that its ranks run on: how to start, call and end a rank.

Messages go through a pipe as notes. A note holds a small message itself, or the path of the file that holds a large
one. Every note fits into the pipe's buffer, so neither side can block the other. A rank that is stopped or killed while
it writes a large message leaves an unfinished file that nobody reads, not half a message in the pipe.
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from pytest_fsdp_meta.worlds.failures import RankFailure
from pytest_fsdp_meta.worlds.spec import Sources, WorldSpec
from pytest_fsdp_meta.worlds.system.output import OutputTail

POLL_INTERVAL = 0.5
"""Seconds between two checks for ranks whose exit no pipe signals."""

DOING = "doing"
"""The kind of a message in which a rank says what it is doing: "training step 2 of 3"."""
_NOTE_LIMIT = 8 * 1024
"""Bytes of the largest message that a note holds itself."""
_INLINE = b"h"
"""The first byte of a note that holds the message."""
_IN_FILE = b"f"
"""The first byte of a note that holds the path of the message's file."""

Message: TypeAlias = tuple[Any, ...]
"""The kind of the message, then its content."""


def pack_message(message: Message, file: Path | None = None) -> bytes:
    """Return the note for a message. A message that is too large for a note is written to ``file``."""
    return make_note(pickle.dumps(message), file)


def make_note(packed: bytes, file: Path | None) -> bytes:
    """Return the note for a pickled message. Raises OSError if ``file`` is needed and cannot be written."""
    if len(packed) <= _NOTE_LIMIT:
        return _INLINE + packed
    assert file is not None, "this message needs a file"
    try:
        file.write_bytes(packed)
    except OSError:
        file.unlink(missing_ok=True)  # half a message is useless, and may occupy the last free space
        raise
    return _IN_FILE + os.fsencode(file)


def read_note(note: bytes, remove: bool = False) -> bytes:
    """Return the pickled message of a note. ``remove`` deletes its file, for a message with a single receiver."""
    if note[:1] == _INLINE:
        return note[1:]
    file = Path(os.fsdecode(note[1:]))
    packed = file.read_bytes()
    if remove:
        file.unlink()
    return packed


class Member(Protocol):
    """One rank as its world sees it. No method waits for the rank without a time limit."""

    @property
    def rank(self) -> int: ...

    @property
    def pid(self) -> int | None:
        """The process id, for debuggers on this machine; None if the rank runs on another machine."""

    @property
    def handles(self) -> Sequence[Any]:
        """For ``multiprocessing.connection.wait``: one is ready when a message has arrived or the rank has ended."""

    @property
    def has_ended(self) -> bool: ...

    @property
    def has_message_or_ended(self) -> bool:
        """Whether a message has arrived, or the rank has ended, although no handle may be ready."""

    @property
    def is_stopped(self) -> bool:
        """Whether a signal such as SIGSTOP has stopped the process."""

    def send(self, note: bytes) -> None:
        """Send a message that ``pack_message`` has packed. Does nothing if the rank has ended."""

    def receive_message(self) -> Message | None:
        """Return the message that has arrived, or None if none will because the rank has ended."""

    def ending(self) -> RankFailure:
        """Describe how the rank ended, for a rank that ended without sending a failure."""

    def kill(self) -> None:
        """Kill the rank and what it has started. Safe to call twice, and after the rank has ended."""

    def join(self, seconds: float) -> None:
        """Wait until the rank has ended, at most this long."""

    def release(self) -> None:
        """Free what belongs to the rank in this process; nothing else is called afterwards."""

    def written(self) -> OutputTail:
        """Return what the rank has written to stdout and stderr so far, or the end of it if it is long."""

    def read(self, at: int) -> bytes:
        """Return at most one chunk of the rank's output, from byte ``at``; empty if there is no more yet."""

    def request_stack(self) -> None:
        """Make the rank dump its stack."""

    def stack(self, deadline: float) -> str:
        """Return the stack that the rank has dumped, waiting for it until ``deadline`` (of ``time.monotonic``)."""


def receive(members: Sequence[Member], deadline: float) -> Iterator[tuple[Member, Message | None]]:
    """Yield the members that have sent a message or ended, each with its message or None.

    Wait for the first of them for at most one poll interval, and not beyond ``deadline`` (of ``time.monotonic``).
    """
    handles = [handle for member in members for handle in member.handles]
    ready = connection.wait(handles, timeout=max(0.0, min(POLL_INTERVAL, deadline - time.monotonic())))
    for member in members:
        if any(handle in ready for handle in member.handles) or member.has_message_or_ended:
            yield member, member.receive_message()


class Engine(Protocol):
    """Starts ranks. There is one per pytest session, which sets what ranks find imported."""

    sources: Sources
    modules: Sequence[str]
    """Names of the modules, of this package and of the project under test, that every rank needs."""
    test_modules: Sequence[str]
    worlds: int | None
    """About how many worlds will start, if that is known: what makes each of them faster may not be worth it."""

    def start(self) -> None:
        """Begin, in the background, to prepare what the first world would otherwise wait for."""

    def start_early(self, modules: Mapping[str, Sequence[str]], path: Sequence[str]) -> None:
        """Begin with imports that need nothing of the tests, before it is known what ``start`` has to prepare."""

    def importing(self) -> str:
        """Return what the first world waits for to be imported, such as "test_it (transformers)"; "" if nothing."""

    def count_gpus(self) -> int:
        """Return the number of GPUs that worlds of this engine can use. Raises ValueError where it cannot be known."""

    def launch(self, spec: WorldSpec, folder: Path, leftovers: Sequence[str]) -> Iterator[Member]:
        """Yield the ranks in order, each as soon as it is started. ``folder`` is for messages and output of the world.

        ``leftovers`` are the folders to remove if this process is killed. Raises ValueError if there can be no such
        world.
        """

    def close(self) -> None:
        """End what was started besides worlds, at the end of the session."""
