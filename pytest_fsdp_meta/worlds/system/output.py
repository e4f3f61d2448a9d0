"""The stdout and stderr of a rank, also of its C code and children: redirected to a file, and read from there."""

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
"""Bytes of a rank's output that are shown: its end."""
_POLL_INTERVAL = 0.05
"""Seconds between two reads of the output of all ranks, while it is followed."""
CHUNK = 2**20
"""Bytes of one read at most."""
_CHUNKS_PER_TURN = 256
"""Chunks read from one rank before the next rank's turn, also in the last turn after ``stop``."""
_IOLBF = 1
MAX_OUTPUT = 64 * 2**20
"""Bytes on the disk above which the older part of a rank's output is discarded."""
KEPT_OUTPUT = 2**20
"""Bytes of the output that are kept then."""
PUNCH_HOLE_KEEP_SIZE = 3
"""FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE: flags of fallocate that os.posix_fallocate does not accept."""


@dataclass(frozen=True)
class OutputTail:
    """How many bytes a rank has written, and the last of them."""

    size: int = 0
    tail: bytes = b""

    @classmethod
    def read(cls, path: Path) -> OutputTail:
        """Read the size and the last ``LIMIT`` bytes of a file."""
        if not path.exists():
            return cls()
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - LIMIT))
            return cls(size, file.read(size - file.tell()))

    def since(self, mark: int = 0) -> str:
        """Return the text after the first ``mark`` bytes. If only its end was kept, a first line says so."""
        size = max(0, self.size - mark)
        text = self.tail[max(0, len(self.tail) - size) :].decode("utf-8", "backslashreplace")
        return text if size <= len(self.tail) else f"(the last {len(self.tail)} of {size} bytes)\n{text}"


def read(path: Path, at: int) -> bytes:
    """Return at most ``CHUNK`` bytes of the file, from offset ``at``; empty if there are none."""
    try:
        if path.stat().st_size <= at:
            return b""
        with path.open("rb") as file:
            file.seek(at)
            return file.read(CHUNK)
    except FileNotFoundError:
        return b""


def redirect(path: Path) -> None:
    """Redirect stdout and stderr of this process to a file, for Python, C and child processes alike."""
    output = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.close(output)
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    with suppress(ValueError, AttributeError):
        # C buffers what it writes to a file until the process exits, but ranks are killed.
        _libc().setvbuf(_c_stdout(), None, _IOLBF, ctypes.c_size_t(0))


def flush() -> None:
    """Flush the buffers of Python and C, also unfinished lines."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # the user's code may have closed or replaced the stream
            stream.flush()
    with suppress(ValueError, AttributeError):
        _libc().fflush(_c_stdout())


def bound_file(path: Path) -> None:
    """Free the disk space of all but the end of a file that has grown too large; its size does not change."""
    if sys.platform != "linux":
        return
    with suppress(OSError):  # the file has been removed
        found = path.stat()
        if found.st_blocks * 512 <= MAX_OUTPUT:
            return
        file = os.open(path, os.O_WRONLY)
        try:
            size = ctypes.c_longlong(found.st_size - KEPT_OUTPUT)
            _libc().fallocate(file, PUNCH_HOLE_KEEP_SIZE, ctypes.c_longlong(0), size)
        finally:
            os.close(file)


@cache
def _libc() -> ctypes.CDLL:
    """Return the C library; cached, because loading it takes as long as the rest of a rank's answer."""
    return ctypes.CDLL(None)


def _c_stdout() -> ctypes.c_void_p:
    """Return C's stdout. Raises ValueError if the C library has another name for it."""
    return ctypes.c_void_p.in_dll(_libc(), "__stdoutp" if sys.platform == "darwin" else "stdout")


class OutputFollower:
    """A thread that reports what ranks write while they write it, in complete lines.

    ``readers`` has one function per rank, which returns at most ``CHUNK`` bytes of its output from an offset.
    ``report(rank, lines)`` is called from the thread.
    """

    def __init__(self, readers: Sequence[Callable[[int], bytes]], report: Callable[[int, list[str]], None]) -> None:
        self._readers = list(readers)
        self._report = report
        self._offsets = [0 for _ in readers]
        self._unfinished: list[list[bytes]] = [[] for _ in readers]
        """By rank, the parts of its unfinished last line."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="pytest-fsdp-meta output", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Report the rest, also unfinished lines. To be called when the ranks have stopped writing."""
        self._stopping.set()
        self._thread.join()

    def _follow(self) -> None:
        stopping = False
        while not stopping:
            stopping = self._stopping.wait(_POLL_INTERVAL)  # before the reads, so that the last ones see everything
            for rank, read in enumerate(self._readers):
                self._read_turn(rank, read)
        for rank, parts in enumerate(self._unfinished):
            if parts:
                self._report(rank, [_as_displayed(b"".join(parts))])

    def _read_turn(self, rank: int, read: Callable[[int], bytes]) -> None:
        for _ in range(_CHUNKS_PER_TURN):  # bounded, so that a rank that writes without end does not starve the others
            new = read(self._offsets[rank])
            self._offsets[rank] += len(new)
            self._report_lines(rank, new)
            if len(new) < CHUNK:
                return

    def _report_lines(self, rank: int, new: bytes) -> None:
        first, *others = new.split(b"\n")
        if first:
            self._unfinished[rank].append(first)
        if others:
            *lines, rest = [b"".join(self._unfinished[rank]), *others]
            self._unfinished[rank] = [rest] if rest else []
            self._report(rank, [_as_displayed(line) for line in lines])


def _as_displayed(line: bytes) -> str:
    """Return the line as a terminal displays it: a carriage return, as progress bars write, starts the line again."""
    return line.decode("utf-8", "backslashreplace").rstrip("\r").rpartition("\r")[2]
