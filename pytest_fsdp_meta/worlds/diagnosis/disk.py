"""Room on the disk of temporary files: how a full one is told, and how ranks are kept from filling it."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from contextlib import suppress
from pathlib import Path

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
LITTLE = 2**20
"""Bytes; a disk that has less left is full."""
FEW = 8
"""Files that a disk has room for, likewise."""
MOST = 64 * 2**20
"""Bytes of a rank's output that stay on the disk."""
KEPT = 2**20
PUNCH_HOLE_KEEP_SIZE = 3
"""The modes of fallocate, which Python's os.posix_fallocate does not take."""


def hint(folder: Path | str, error: BaseException, text: str = "") -> str:
    """The line to tell with an error that says that a disk is full, where the disk of ``folder`` is; else empty.

    ``text`` is what the error says, where it may be one of a C++ library.
    """
    says = error.errno in FULL if isinstance(error, OSError) else "No space left on device" in text
    if not says:
        return ""
    try:
        left = _left(folder)
    except OSError:
        return ""
    # A world's own folder means nothing to its reader, and where TMPDIR leads is a choice.
    near = Path(folder).parent if Path(folder).name.startswith("fsdp-") else folder
    return left and (
        f"the disk of {near} is full ({left}), where ranks and pytest leave what they tell each other; free some room, "
        "or set TMPDIR to a folder on another disk"
    )


def _left(folder: Path | str) -> str:
    """What a disk has left of what has run out, or empty."""
    disk = os.statvfs(folder)
    free = disk.f_bavail * disk.f_frsize
    if free < LITTLE:
        return f"{free // 1024} KiB left"
    return f"no more than {disk.f_favail} files left" if disk.f_files and disk.f_favail < FEW else ""


def bound(path: Path) -> None:
    """Gives the disk back what a file that grows without end holds before its last part; its size stays as it is."""
    if sys.platform != "linux":
        return
    with suppress(OSError):  # no such file any more
        found = path.stat()
        if found.st_blocks * 512 <= MOST:
            return
        file = os.open(path, os.O_WRONLY)
        try:
            size = ctypes.c_longlong(found.st_size - KEPT)
            ctypes.CDLL(None).fallocate(file, PUNCH_HOLE_KEEP_SIZE, ctypes.c_longlong(0), size)
        finally:
            os.close(file)
