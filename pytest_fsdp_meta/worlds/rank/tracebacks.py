"""Tracebacks and stacks of ranks as their reader wants them: the user's code, not the plugin's."""

from __future__ import annotations

import os
import re
import sys
import threading
import traceback
from pathlib import Path

PLUMBING = (
    "multiprocessing/",
    "pytest_fsdp_meta/worlds/rank/main.py",
    "pytest_fsdp_meta/worlds/rank/rendezvous.py",
    "pytest_fsdp_meta/worlds/rank/channel.py",
    '"<string>"',
    "runpy",
)

NO_FRAME = "  <no Python frame>"
"""What faulthandler says of the threads of a C++ library."""
PACKAGE = f'File "{Path(__file__).parents[2]}{os.sep}'
"""How the frames of this package begin: shown only where there is nothing else."""


def tell(error: BaseException, hide: Path) -> str:
    """The traceback without the leading frames of files under ``hide``, causes and contexts included."""
    told = traceback.TracebackException.from_exception(error)
    seen: set[int] = set()
    todo: list[traceback.TracebackException | None] = [told]
    while todo:
        one = todo.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        frames = list(one.stack)
        while frames and Path(frames[0].filename).is_relative_to(hide):
            frames.pop(0)
        one.stack = traceback.StackSummary.from_list(frames)
        todo += [one.__cause__, one.__context__]
    return "".join(told.format())


def dump() -> str:
    """The stacks of this process as faulthandler dumps them, the main thread as the current one."""
    told = []
    for thread, frame in sys._current_frames().items():
        head = "Current thread" if thread == threading.main_thread().ident else "Thread"
        lines = [
            f'  File "{one.f_code.co_filename}", line {line} in {one.f_code.co_name}'
            for one, line in traceback.walk_stack(frame)
        ]
        told.append("\n".join([f"{head} 0x{thread:016x}", *lines]))
    return "\n\n".join(sorted(told))


def user_stack(dump: str) -> str:
    """A faulthandler dump as a traceback reads, innermost frame last, without the plugin's own thread and frames."""
    threads = re.split(r"\n\n(?=(?:Current thread|Thread) 0x)", dump.strip())
    told = []
    for thread in threads:
        head, *frames = thread.splitlines() or [""]
        if not frames or frames == [NO_FRAME] or any(frame.endswith(" in _listen") for frame in frames):
            continue
        shown = [frame for frame in reversed(frames) if not any(part in frame for part in PLUMBING)]
        kept = [frame for frame in shown if PACKAGE not in frame] or shown
        told.append("\n".join(kept if head.startswith("Current") else [f"  ({head.split()[1]})", *kept]))
    return "\n".join(told)
