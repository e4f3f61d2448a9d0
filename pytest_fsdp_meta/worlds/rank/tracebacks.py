"""Tracebacks and stacks of ranks, reduced to the user's code."""

from __future__ import annotations

import os
import re
import sys
import threading
import traceback
from pathlib import Path

from pytest_fsdp_meta.text import clean_name, counted, first_line
from pytest_fsdp_meta.worlds.diagnosis.hang import is_library

PLUMBING = (
    "multiprocessing/",
    "pytest_fsdp_meta/worlds/rank/main.py",
    "pytest_fsdp_meta/worlds/rank/rendezvous.py",
    "pytest_fsdp_meta/worlds/rank/channel.py",
    '"<string>"',
    "runpy",
)
"""Parts of stack lines that belong to how ranks are started and called."""
FIRST_CHAINED, LAST_CHAINED = 2, 3
"""Exceptions of a longer chain that are shown: the oldest, which caused the others, and those that were raised last."""
CAUSED = "The above exception was the direct cause of the following exception:"
WHILE_HANDLED = "During handling of the above exception, another exception occurred:"
"""Python's own sentences."""
NO_FRAME = "  <no Python frame>"
"""What faulthandler prints for the threads of a C++ library."""
TORCH = f"{os.sep}torch{os.sep}"
PACKAGE = f'File "{Path(__file__).parents[2]}{os.sep}'
"""How stack lines of this package begin; they are shown only if there are no others."""


def format_traceback(error: BaseException, hide: Path) -> str:
    """Format the traceback, without its leading frames in files under ``hide``.

    Of the exceptions that led to this one, the first and the last are shown: a loop of retries can chain thousands.
    """
    chain = _chain(traceback.TracebackException.from_exception(error))
    left_out = range(FIRST_CHAINED, len(chain) - LAST_CHAINED)
    parts = []
    for number, (one, join) in enumerate(chain):
        if number in left_out:
            parts += [f"... {counted(len(left_out), 'more exception')} ...\n\n"] if number == left_out[0] else []
            continue
        frames = list(one.stack)
        while frames and Path(frames[0].filename).is_relative_to(hide):
            frames.pop(0)
        one.stack = traceback.StackSummary.from_list(frames)
        parts += [*one.format(chain=False), *([f"\n{join}\n\n"] if join else [])]
    return "".join(parts)


def describe_long_chain(error: BaseException) -> str:
    """Return a line about the exceptions that led to this one if they are too many to be shown; else ""."""
    chain = _chain(traceback.TracebackException.from_exception(error))
    if len(chain) <= FIRST_CHAINED + LAST_CHAINED:
        return ""
    oldest = next(chain[0][0].format_exception_only()).strip()
    return f"{counted(len(chain) - 1, 'exception')} led to this one, the first of them: {first_line(oldest)}"


def _chain(last: traceback.TracebackException) -> list[tuple[traceback.TracebackException, str]]:
    """Return the exceptions that Python shows, the oldest first, each with the sentence that joins it to the next."""
    chain, seen = [(last, "")], {id(last)}
    while True:
        one = chain[-1][0]
        earlier = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
        if earlier is None or id(earlier) in seen:
            return chain[::-1]
        seen.add(id(earlier))
        chain.append((earlier, CAUSED if one.__cause__ is not None else WHILE_HANDLED))


def user_line(error: BaseException | None = None) -> str:
    """Return "file:line" of the innermost frame that is neither this package's nor of an installed one.

    If there is none, it is the innermost one of another package than torch, such as a model's. The frames are those of
    an error, or else those that run now.
    """
    frames = traceback.extract_stack() if error is None else traceback.extract_tb(error.__traceback__)
    others = _not_ours(frames)
    if users := _of_user(frames):
        return f"{os.path.relpath(users[-1].filename)}:{users[-1].lineno}"
    libraries = [one for one in others if TORCH not in one.filename] or others or frames
    return f"{shorten_path(libraries[-1].filename)}:{libraries[-1].lineno}" if libraries else "unknown line"


def shorten_path(file: str) -> str:
    """Return a path relative to the current folder, or to the folder that it was imported from."""
    path = Path(file)
    for folder in sorted({os.getcwd(), *filter(None, sys.path)}, key=len, reverse=True):
        if path.is_relative_to(folder):
            return path.relative_to(folder).as_posix()
    return file


def user_place(error: BaseException) -> str:
    """Return "path:line" of the user's innermost frame; "" if the traceback has no frame of the user."""
    users = _of_user(traceback.extract_tb(error.__traceback__))
    return f"{os.path.abspath(users[-1].filename)}:{users[-1].lineno}" if users else ""


def tensors_in_use(error: BaseException) -> tuple[str, ...]:
    """Return the tensors of the innermost module in whose method the error was raised, as the outermost names them."""
    from torch.nn import Module

    frames = [frame.f_locals for frame, _ in traceback.walk_tb(error.__traceback__)]
    # torch's functions that load a state dict call their module so.
    held = [value for one in frames for value in (one.get("self"), one.get("module")) if isinstance(value, Module)]
    for prefix, module in held[0].named_modules() if held else ():
        if module is held[-1]:
            own = (*module._parameters, *module._buffers)
            return tuple(clean_name(f"{prefix}.{name}" if prefix else name) for name in own)
    return ()


def _of_user(frames: list[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    return [one for one in _not_ours(frames) if not is_library(one.filename)]


def _not_ours(frames: list[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    return [one for one in frames if not Path(one.filename).is_relative_to(Path(__file__).parents[2])]


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
