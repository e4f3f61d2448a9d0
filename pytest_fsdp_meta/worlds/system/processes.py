"""What Linux knows of processes: whose children they are, and what becomes of them when somebody ends.

Elsewhere the process group of a rank is all that ends with it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
PR_SET_PTRACER = 0x59616D61
ANYBODY = ctypes.c_ulong(-1)
NONE = ctypes.c_ulong(0)
_HEEDED: dict[int, Any] = {}
"""What had been done about the signals that are ignored."""
PAUSE = 0.002
THREADS = 16
"""Where in /proc/PID/stat after the state the number of threads is."""


def no_descriptors(error: OSError) -> str:
    """The line to tell with an error that says that there is no file descriptor left; else empty."""
    if error.errno not in (errno.EMFILE, errno.ENFILE):
        return ""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        f"no file descriptor is left for another rank, of which each takes four in the pytest process ({most} at most, "
        "see ulimit -n)"
    )


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """The system sends this signal when the thread ends that started this process; 0 for none."""
    _prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(number))


def outlive_group() -> None:
    """What a terminal, timeout(1) or CI sends to a whole process group, or to all of a service, does not end this one.

    It clears up after the others.
    """
    os.setpgid(0, 0)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        _HEEDED[number] = signal.signal(number, signal.SIG_IGN)


def heed_signals() -> None:
    """In a process that was forked from one that outlives its group."""
    for number, handler in _HEEDED.items():
        signal.signal(number, handler)


def adopt_orphans() -> None:
    """What descendants of this process leave behind becomes its child, whatever session it is in."""
    _prctl(PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1))


def let_debuggers_in() -> None:
    """Where the system restricts debuggers to ancestors, anybody of the same user may look at this process."""
    _prctl(PR_SET_PTRACER, ANYBODY)


def _prctl(option: int, argument: ctypes.c_ulong) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, argument, NONE, NONE, NONE)


def children(pid: int) -> set[int]:
    """Those that run; empty where the system does not say."""
    try:
        lists = [task.read_text() for task in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:
        return set()
    return {child for text in lists for child in map(int, text.split()) if is_running(child)}


def is_running(pid: int) -> bool:
    """Zombies do not, unless a thread of theirs is left: until that has ended, their children stay theirs."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return state not in "ZX" or int(fields[THREADS]) > 1


def end_children(pid: int, spare: Callable[[], Collection[int]] = tuple, seconds: float = 1.0) -> None:
    """Kills the children of a process that adopts orphans, and what they leave behind, until there is none."""
    deadline = time.monotonic() + seconds
    while (left := children(pid).difference(spare())) and time.monotonic() < deadline:
        for child in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(child, signal.SIGKILL)
        time.sleep(PAUSE)


@contextmanager
def held_back() -> Iterator[None]:
    """Within it a Ctrl-C waits, and takes effect at the end."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            before(*came[0])


SEEN = " (meanwhile the system ran out of memory and killed a process)"


def shortages() -> int:
    """How many processes it has ended for that since it started, of any container; 0 where it does not say."""
    try:
        counts = Path("/proc/vmstat").read_text("ascii")
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in counts.splitlines() if line.startswith("oom_kill ")), 0)
