"""Where processes stand inside C code, asked of gdb, where there is one and it is allowed to look."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Mapping

SECONDS = 3.0
"""For all processes together."""
SYMBOLS = ("libc.so", "libstdc", "libpython", "libcuda", "libnccl")
"""Libraries that gdb reads. It needs three seconds for those of torch alone; that a frame is theirs says enough."""
FRAME = re.compile(r"#\d+ +(?:0x[0-9a-f]+ in )?(?P<name>.+?) \(.*?\)(?: (?:from|at) (?P<file>\S+))?$")
INTERPRETER = re.compile(r"_?Py[A-Z]|cfunction_|method_|pybind11|type_call|builtin_")
DEEPEST = 6


def stacks(pids: Mapping[int, int], seconds: float = SECONDS) -> dict[int, str]:
    """By the keys of ``pids``, one line: the C functions that the interpreter is in, outermost first."""
    gdb = shutil.which("gdb")
    if gdb is None:
        return {}
    deadline = time.monotonic() + seconds
    looking = {key: _look(gdb, pid) for key, pid in pids.items()}
    told = {key: read(_heard(process, deadline)) for key, process in looking.items()}
    return {key: f"  in C: {line}" for key, line in told.items() if line}


def _look(gdb: str, pid: int) -> subprocess.Popen[str]:
    settings = ("debuginfod enabled off", "auto-load off", "auto-solib-add off")
    commands = [*(f"sharedlibrary {name}" for name in SYMBOLS), "set print frame-arguments none", "bt 25"]
    return subprocess.Popen(
        [
            gdb,
            "--batch",
            "-nx",
            *_each("-iex", [f"set {one}" for one in settings]),
            "-p",
            str(pid),
            *_each("-ex", commands),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        errors="replace",
        start_new_session=True,  # Ctrl-C is for pytest, which ends it
    )


def _each(option: str, values: list[str]) -> list[str]:
    return [word for value in values for word in (option, value)]


def _heard(process: subprocess.Popen[str], deadline: float) -> str:
    """What gdb has said until then. One that is killed leaves the process that it looks at as it was."""
    try:
        return process.communicate(timeout=max(0.0, deadline - time.monotonic()))[0]
    except BaseException as error:
        process.kill()
        heard, _ = process.communicate()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        return heard


def read(backtrace: str) -> str:
    """A backtrace of gdb in one line, without what the system's library calls inside itself; empty for none."""
    names: list[str] = []
    for found in filter(None, map(FRAME.match, backtrace.splitlines())):
        name, file = found["name"], found["file"] or ""
        if INTERPRETER.match(name):
            break
        if name == "??":  # nothing is known of this frame, so of none outside of it
            names += [os.path.basename(file)] * bool(file)
            break
        if names and name.startswith("__") and names[-1].startswith("__"):
            names.pop()
        names.append(name.partition("(")[0])
    clean = [name.lstrip("_").removeprefix("GI_").lstrip("_") for name in names]
    return " > ".join(reversed(clean[:DEEPEST]))
