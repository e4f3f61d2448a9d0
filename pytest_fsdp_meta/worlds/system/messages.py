"""Messages between a world and its ranks: a short note through the pipe, what is large in a file beside it.

So neither side can keep the other waiting: a note fits the pipe as a whole, and a rank that is stopped or killed in the
middle of a large result leaves an unfinished file that nobody reads, not half a message whose rest never comes.
"""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

NOTE_LIMIT = 8 * 1024
HERE = b"h"
FILED = b"f"
"""How a note begins: with the message itself, or with where it lies."""


def pack(message: tuple[Any, ...], file: Path | None = None) -> bytes:
    """The note to send; ``file`` is written where the message does not fit into it."""
    return enclose(pickle.dumps(message), file)


def enclose(packed: bytes, file: Path | None) -> bytes:
    """The note for a message that is packed already."""
    if len(packed) <= NOTE_LIMIT:
        return HERE + packed
    assert file is not None, "this message has no file to go to"
    try:
        file.write_bytes(packed)
    except OSError:
        file.unlink(missing_ok=True)  # a part of it is of no use, and may have taken the last room
        raise
    return FILED + os.fsencode(file)


def disclose(note: bytes, remove: bool = False) -> bytes:
    """The packed message that a note stands for. ``remove`` deletes its file, when nobody else is going to read it."""
    if note[:1] == HERE:
        return note[1:]
    file = Path(os.fsdecode(note[1:]))
    packed = file.read_bytes()
    if remove:
        file.unlink()
    return packed


def unpack(note: bytes) -> tuple[Any, ...]:
    """The message that a note stands for."""
    return open_packed(disclose(note))


def open_packed(packed: bytes) -> tuple[Any, ...]:
    message = pickle.loads(packed)
    assert isinstance(message, tuple)
    return message


DOING = "doing"
"""The kind of the notes that say what a rank does: "training step 2 of 3"."""


POST_MORTEM = "post mortem"
"""The kind of the messages by which a rank is asked for a debugger, and says that it is over."""
