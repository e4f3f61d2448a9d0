"""Tracebacks and stacks of ranks, reduced to the user's code."""

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
"""Parts of stack lines that belong to how ranks are started and called."""
NO_FRAME = "  <no Python frame>"
"""What faulthandler prints for the threads of a C++ library."""
PACKAGE = f'File "{Path(__file__).parents[2]}{os.sep}'
"""How stack lines of this package begin; they are shown only if there are no others."""


def format_traceback(error: BaseException, hide: Path) -> str:
    """Format the traceback, causes and contexts included, without its leading frames in files under ``hide``."""
    formatted = traceback.TracebackException.from_exception(error)
    seen: set[int] = set()
    todo: list[traceback.TracebackException | None] = [formatted]
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
    return "".join(formatted.format())


def user_line(error: BaseException | None = None) -> str:
    """Return "file:line" of the innermost frame that is neither this package's nor of an installed one.

    Of the frames of an error, or else of those that run now.
    """
    frames = traceback.extract_stack() if error is None else traceback.extract_tb(error.__traceback__)
    own = [one for one in frames if not Path(one.filename).is_relative_to(Path(__file__).parents[2])]
    users = [one for one in own if "site-packages" not in Path(one.filename).parts] or own or frames
    return f"{os.path.relpath(users[-1].filename)}:{users[-1].lineno}" if users else "unknown line"


def dump() -> str:
    """Return the stacks of this process as faulthandler prints them, the main thread as the current one."""
    threads = []
    for thread, frame in sys._current_frames().items():
        head = "Current thread" if thread == threading.main_thread().ident else "Thread"
        lines = [
            f'  File "{one.f_code.co_filename}", line {line} in {one.f_code.co_name}'
            for one, line in traceback.walk_stack(frame)
        ]
        threads.append("\n".join([f"{head} 0x{thread:016x}", *lines]))
    return "\n\n".join(sorted(threads))


def user_stack(dump: str) -> str:
    """Turn a faulthandler dump into stacks, innermost frame last, without the plugin's own thread and frames."""
    threads = re.split(r"\n\n(?=(?:Current thread|Thread) 0x)", dump.strip())
    stacks = []
    for thread in threads:
        head, *frames = thread.splitlines() or [""]
        if not frames or frames == [NO_FRAME] or any(frame.endswith(" in _listen") for frame in frames):
            continue
        shown = [frame for frame in reversed(frames) if not any(part in frame for part in PLUMBING)]
        of_user = [frame for frame in shown if PACKAGE not in frame] or shown
        stacks.append("\n".join(of_user if head.startswith("Current") else [f"  ({head.split()[1]})", *of_user]))
    return "\n".join(stacks)
