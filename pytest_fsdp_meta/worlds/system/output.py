"""What a rank writes to stdout and stderr: by Python, by C and C++, by its children. On the rank, and in the parent."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

LIMIT = 64 * 1024
"""Bytes of each rank's output that are kept; of a longer one, the end."""
PACE = 0.05
"""Seconds between two looks at what ranks have written, where somebody watches."""
CHUNK = 2**20
"""Bytes that are read at once."""
TURN = 256
"""Chunks of one rank before the next one's turn, and at its end."""
_IOLBF = 1


@dataclass(frozen=True)
class Written:
    """How much a rank has written, and the end of it."""

    size: int = 0
    tail: bytes = b""

    @classmethod
    def read(cls, path: Path) -> Written:
        if not path.exists():
            return cls()
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - LIMIT))
            return cls(size, file.read(size - file.tell()))

    def since(self, mark: int = 0) -> str:
        """What came after the first ``mark`` bytes; of a long text the end, after a line that says so."""
        size = max(0, self.size - mark)
        text = self.tail[max(0, len(self.tail) - size) :].decode("utf-8", "backslashreplace")
        return text if size <= len(self.tail) else f"(the last {len(self.tail)} of {size} bytes)\n{text}"


def read(path: Path, at: int) -> bytes:
    """What is in the file after the first ``at`` bytes, a ``CHUNK`` at most."""
    try:
        if path.stat().st_size <= at:
            return b""
        with path.open("rb") as file:
            file.seek(at)
            return file.read(CHUNK)
    except FileNotFoundError:
        return b""


def redirect(path: Path) -> None:
    """Sends what this process writes into a file, whoever in it writes."""
    output = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.close(output)
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    with suppress(ValueError, AttributeError):
        # C keeps what it writes into a file until the process exits, which a rank does not: it is killed.
        _libc().setvbuf(_c_stdout(), None, _IOLBF, ctypes.c_size_t(0))


def flush() -> None:
    """Gives out unfinished lines as well."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # the user's code may have closed or replaced it
            stream.flush()
    with suppress(ValueError, AttributeError):
        _libc().fflush(_c_stdout())


@cache
def _libc() -> ctypes.CDLL:
    """Made once: making it takes as long as the rest of an answer."""
    return ctypes.CDLL(None)


def _c_stdout() -> ctypes.c_void_p:
    """Raises ValueError where C calls it otherwise."""
    return ctypes.c_void_p.in_dll(_libc(), "__stdoutp" if sys.platform == "darwin" else "stdout")


class Follower:
    """Tells what ranks write while they write it: complete lines only, each rank's in their order.

    Each of ``readers`` gives what its rank has written after so many bytes, a ``CHUNK`` of it at most. ``tell(rank,
    lines)`` is called from a thread of its own.
    """

    def __init__(self, readers: Sequence[Callable[[int], bytes]], tell: Callable[[int, list[str]], None]) -> None:
        self._readers = list(readers)
        self._tell = tell
        self._at = [0 for _ in readers]
        self._rest: list[list[bytes]] = [[] for _ in readers]
        """Of each, the parts of the line that is not finished."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="pytest-fsdp-meta output", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Tells what is left, unfinished lines as well; for when nobody writes any more."""
        self._over.set()
        self._thread.join()

    def _follow(self) -> None:
        over = False
        while not over:
            over = self._over.wait(PACE)  # asked before the last look, so that this one sees everything
            for rank, read in enumerate(self._readers):
                self._read(rank, read)
        for rank, rest in enumerate(self._rest):
            if rest:
                self._tell(rank, [_shown(b"".join(rest))])

    def _read(self, rank: int, read: Callable[[int], bytes]) -> None:
        for _ in range(TURN):  # one that writes without end must not keep the others from being read
            new = read(self._at[rank])
            self._at[rank] += len(new)
            self._split(rank, new)
            if len(new) < CHUNK:
                return

    def _split(self, rank: int, new: bytes) -> None:
        first, *others = new.split(b"\n")
        if first:
            self._rest[rank].append(first)
        if others:
            *lines, rest = [b"".join(self._rest[rank]), *others]
            self._rest[rank] = [rest] if rest else []
            self._tell(rank, [_shown(line) for line in lines])


def _shown(line: bytes) -> str:
    """As a terminal would show it in the end, where a progress bar has gone back to the beginning of its line."""
    return line.decode("utf-8", "backslashreplace").rstrip("\r").rpartition("\r")[2]
