"""Temporary folders of this process, and the disk that they are on.

They are named so that the fork server can remove them when this process was killed. A full disk is described, and the
output of ranks is kept from filling it.
"""

from __future__ import annotations

import ctypes
import errno
import glob
import os
import secrets
import shutil
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
MIN_FREE_BYTES = 2**20
"""A disk with less free space is described as full."""
MIN_FREE_FILES = 8
"""A disk with room for fewer files is described as full."""
MAX_OUTPUT = 64 * 2**20
"""Bytes on the disk above which the older part of a rank's output is discarded."""
KEPT_OUTPUT = 2**20
"""Bytes of the output that are kept then."""
PUNCH_HOLE_KEEP_SIZE = 3
"""FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE: flags of fallocate that os.posix_fallocate does not accept."""
_RUN = secrets.token_hex(4)
"""Unique among all processes, also those of other machines and containers that share the disk."""


def _name_run() -> None:
    """A fork would otherwise share its parent's name, and remove the parent's folders when it is killed."""
    global _RUN
    _RUN = secrets.token_hex(4)


os.register_at_fork(after_in_child=_name_run)


def prefix(kind: str) -> str:
    """Return the prefix for the name of a temporary folder of this kind."""
    return f"fsdp-{kind}-{_RUN}-"


def pattern() -> str:
    """Return the glob pattern that matches all temporary folders of this process."""
    return os.path.join(glob.escape(tempfile.gettempdir()), f"fsdp-*-{_RUN}-*")


def remove(pattern: str) -> None:
    """Remove the folders that match the pattern."""
    for folder in glob.glob(pattern):
        shutil.rmtree(folder, ignore_errors=True)


def describe_full_disk(folder: Path | str, error: BaseException, text: str = "") -> str:
    """Return the line to show for an error about a full disk, if the disk of ``folder`` is full; else "".

    ``text`` is the message of an error that a C++ library may have raised, which has no errno.
    """
    is_about_disk = error.errno in DISK_FULL if isinstance(error, OSError) else "No space left on device" in text
    if not is_about_disk:
        return ""
    try:
        left = _describe_shortage(folder)
    except OSError:
        return ""
    # A world's own folder means nothing to the user; its parent is TMPDIR, which the user can change.
    shown = Path(folder).parent if Path(folder).name.startswith("fsdp-") else folder
    return left and (
        f"the disk of {shown} is full ({left}); ranks and pytest exchange messages there; free some space, or set "
        "TMPDIR to a folder on another disk"
    )


def _describe_shortage(folder: Path | str) -> str:
    """Return what is left of the free space or of the inodes, whichever has run out; "" if neither has."""
    disk = os.statvfs(folder)
    free = disk.f_bavail * disk.f_frsize
    if free < MIN_FREE_BYTES:
        return f"{free // 1024} KiB left"
    return f"room for {disk.f_favail} more files" if disk.f_files and disk.f_favail < MIN_FREE_FILES else ""


def bound_output(path: Path) -> None:
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
            ctypes.CDLL(None).fallocate(file, PUNCH_HOLE_KEEP_SIZE, ctypes.c_longlong(0), size)
        finally:
            os.close(file)
