"""Processes: their parents and what ends them, temporary folders, descriptor limits, Ctrl-C, the out-of-memory killer.

What uses prctl or /proc does nothing outside Linux; there, only a rank's process group ends together with it.
"""

from __future__ import annotations

import ctypes
import errno
import glob
import os
import resource
import secrets
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

PAUSE = 0.002
"""Seconds between two looks at the children that are being ended."""
OOM_KILL_NOTE = " (meanwhile the kernel's out-of-memory killer ended a process)"
"""Added to the summary of a rank that was killed while ``count_oom_kills`` went up."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_UNUSED = ctypes.c_ulong(0)
_THREADS_FIELD, _START_FIELD = 17, 19
"""Indices of the number of threads and of the start time in /proc/PID/stat, counted from the state."""
_DESCRIPTORS_PER_RANK = 4
"""A rank's pipe, the two ends by which multiprocessing follows its process, and a file of its output being read."""
_SPARE_DESCRIPTORS = 16
"""For a fork server that is still to start, and for removing a folder."""
_IGNORED: dict[int, Any] = {}
"""The former handler of each signal that ``outlive_group`` ignores."""
_RUN = secrets.token_hex(4)
"""Part of the names of temporary folders. Unique among all processes, also those of other machines and containers that
share the disk."""


# Parents and children


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Have the system send this signal when the thread that started this process ends; 0 for none."""
    _prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(number))


def adopt_orphans() -> None:
    """Become the parent of descendants whose parent has ended, whatever session they are in."""
    _prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1))


def _prctl(option: int, argument: ctypes.c_ulong) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, argument, _UNUSED, _UNUSED, _UNUSED)


def children(pid: int) -> set[int]:
    """Return the running children of a process; empty where /proc does not list them."""
    try:
        lists = [task.read_text() for task in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:
        return set()
    return {child for text in lists for child in map(int, text.split()) if is_running(child)}


def is_running(pid: int) -> bool:
    """Return whether a process runs. A zombie with a live thread does: until that ends, its children stay its own."""
    fields = stat(pid)
    return bool(fields) and (fields[0] not in "ZX" or int(fields[_THREADS_FIELD]) > 1)


def started(pid: int | None) -> list[str]:
    """Return when a process was started: later if its number was another's before. Empty as ``stat``."""
    return stat(pid)[_START_FIELD:][:1]


def stat(pid: int | None) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; none if there is no such process, or no /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    except OSError:
        return []


def end_children(pid: int, spare: Callable[[], Collection[int]] = tuple, seconds: float = 1.0) -> None:
    """Kill the children of a process that adopts orphans until none is left but those to ``spare``."""
    deadline = time.monotonic() + seconds
    while (left := children(pid).difference(spare())) and time.monotonic() < deadline:
        for child in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(child, signal.SIGKILL)
        time.sleep(PAUSE)


# Signals


def outlive_group() -> None:
    """Leave the process group, and ignore the signals that a terminal, timeout(1) or CI sends to end a whole job.

    The fork server calls this, because it cleans up after the other processes.
    """
    os.setpgid(0, 0)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        _IGNORED[number] = signal.signal(number, signal.SIG_IGN)


def restore_signals() -> None:
    """Restore the handlers that ``outlive_group`` replaced, in a process that was forked from one that called it."""
    for number, handler in _IGNORED.items():
        signal.signal(number, handler)


@contextmanager
def defer_interrupts() -> Iterator[None]:
    """Defer Ctrl-C to the end of the block."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    received: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: received.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if received:
            before(*received[0])


# Temporary folders, named so that the fork server can remove them when this process was killed


def _name_run() -> None:
    """A fork would otherwise share its parent's name, and remove the parent's folders when it is killed."""
    global _RUN
    _RUN = secrets.token_hex(4)


os.register_at_fork(after_in_child=_name_run)


def folder_prefix(kind: str) -> str:
    """Return the prefix for the name of a temporary folder of this kind."""
    return f"fsdp-{kind}-{_RUN}-"


def folders_pattern() -> str:
    """Return the glob pattern that matches all temporary folders of this process."""
    return os.path.join(glob.escape(tempfile.gettempdir()), f"fsdp-*-{_RUN}-*")


def remove_folders(pattern: str) -> None:
    """Remove the folders that match the pattern."""
    for folder in glob.glob(pattern):
        shutil.rmtree(folder, ignore_errors=True)


# Limits


def require_descriptors(ranks: int) -> None:
    """Raise the OSError of exhausted file descriptors if this process has too few left to start so many ranks.

    Asked before the first rank starts: a fork server whose client runs out in the middle of a request ends, and a world
    without a free descriptor cannot remove its folder.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(FileNotFoundError):  # where the system does not list them
        if limit - len(os.listdir("/dev/fd")) < ranks * _DESCRIPTORS_PER_RANK + _SPARE_DESCRIPTORS:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def describe_shortage(error: OSError) -> str:
    """Return the line to show if this process has run out of file descriptors or disk space; "" for another error."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return (
            f"out of file descriptors (limit {limit}); the pytest process needs {_DESCRIPTORS_PER_RANK} for each rank; "
            "raise it with ulimit -n"
        )
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{error.strerror}: {tempfile.gettempdir()}; set TMPDIR to a folder on another disk"
    return ""


def count_oom_kills() -> int:
    """Return how many processes the out-of-memory killer has ended since boot, in all containers; 0 if unknown."""
    try:
        counts = Path("/proc/vmstat").read_text("ascii")
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in counts.splitlines() if line.startswith("oom_kill ")), 0)
