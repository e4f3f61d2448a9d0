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


def pack(message: tuple[Any, ...], file: Path | None = None) -> bytes:
    """The note to send; ``file`` is written where the message does not fit into it."""
    packed = pickle.dumps(message)
    if len(packed) <= NOTE_LIMIT:
        return packed
    assert file is not None, "this message has no file to go to"
    try:
        file.write_bytes(packed)
    except OSError:
        file.unlink(missing_ok=True)  # a part of it is of no use, and may have taken the last room
        raise
    return pickle.dumps(str(file))


def unpack(note: bytes, remove: bool = False) -> tuple[Any, ...]:
    """The message that a note stands for. ``remove`` deletes its file, when nobody else is going to read it."""
    message = pickle.loads(note)
    if isinstance(message, str):
        file = Path(message)
        message = pickle.loads(file.read_bytes())
        if remove:
            os.unlink(file)
    assert isinstance(message, tuple)
    return message
