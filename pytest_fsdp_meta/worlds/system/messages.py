"""Messages between a world and its ranks, sent through a pipe as notes.

A note holds a small message itself, or the path of the file that holds a large one. Every note fits into the pipe's
buffer, so neither side can block the other. A rank that is stopped or killed while it writes a large message leaves an
unfinished file that nobody reads, not half a message in the pipe.
"""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

DOING = "doing"
"""The kind of a message in which a rank says what it is doing: "training step 2 of 3"."""
_NOTE_LIMIT = 8 * 1024
"""Bytes of the largest message that a note holds itself."""
_INLINE = b"h"
"""The first byte of a note that holds the message."""
_IN_FILE = b"f"
"""The first byte of a note that holds the path of the message's file."""


def pack(message: tuple[Any, ...], file: Path | None = None) -> bytes:
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


def unpack(note: bytes) -> tuple[Any, ...]:
    """Return the message of a note."""
    return unpickle_message(read_note(note))


def unpickle_message(packed: bytes) -> tuple[Any, ...]:
    """Return a pickled message."""
    message = pickle.loads(packed)
    assert isinstance(message, tuple)
    return message
