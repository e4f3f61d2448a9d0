"""Temporary folders of this process, and the disk that they are on.

They are named so that the fork server can remove them when this process was killed. The output of ranks is kept from
filling the disk.
"""

from __future__ import annotations

import ctypes
import glob
import os
import secrets
import shutil
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

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
