"""The C functions that processes are in, from gdb, if it is installed and permitted to attach."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Mapping

TIMEOUT = 3.0
"""Seconds for all processes together."""
SYMBOLS = ("libc.so", "libstdc", "libpython", "libcuda", "libnccl")
"""Libraries whose symbols gdb loads. Those of torch alone take three seconds, so its frames show only the library."""
FRAME = re.compile(r"#\d+ +(?:0x[0-9a-f]+ in )?(?P<name>.+?) \(.*?\)(?: (?:from|at) (?P<file>\S+))?$")
INTERPRETER = re.compile(r"_?Py[A-Z]|cfunction_|method_|pybind11|type_call|builtin_")
MAX_FRAMES = 6


def c_stacks(pids: Mapping[int, int], seconds: float = TIMEOUT) -> dict[int, str]:
    """Return one line for each process in C code, by the keys of ``pids``: the C functions, outermost first."""
    gdb = shutil.which("gdb")
    if gdb is None:
        return {}
    deadline = time.monotonic() + seconds
    debuggers = {key: _start_gdb(gdb, pid) for key, pid in pids.items()}
    stacks = {key: summarize_backtrace(_output_until(deadline, process)) for key, process in debuggers.items()}
    return {key: f"  in C: {stack}" for key, stack in stacks.items() if stack}


def _start_gdb(gdb: str, pid: int) -> subprocess.Popen[str]:
    settings = ("debuginfod enabled off", "auto-load off", "auto-solib-add off")
    commands = [*(f"sharedlibrary {name}" for name in SYMBOLS), "set print frame-arguments none", "bt 25"]
    return subprocess.Popen(
        [
            gdb,
            "--batch",
            "-nx",
            *_repeat_option("-iex", [f"set {setting}" for setting in settings]),
            "-p",
            str(pid),
            *_repeat_option("-ex", commands),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        errors="replace",
        start_new_session=True,  # so that Ctrl-C reaches only pytest, which then ends gdb
    )


def _repeat_option(option: str, values: list[str]) -> list[str]:
    return [argument for value in values for argument in (option, value)]


def _output_until(deadline: float, process: subprocess.Popen[str]) -> str:
    """Return gdb's output, and kill it at the deadline. The process that it is attached to continues unharmed."""
    try:
        return process.communicate(timeout=max(0.0, deadline - time.monotonic()))[0]
    except BaseException as error:
        process.kill()
        output, _ = process.communicate()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        return output


def summarize_backtrace(backtrace: str) -> str:
    """Return the C functions of a gdb backtrace in one line, without the internal calls of libc; "" if there are none.

    The line ends where the frames of the interpreter begin.
    """
    names: list[str] = []
    for found in filter(None, map(FRAME.match, backtrace.splitlines())):
        name, file = found["name"], found["file"] or ""
        if INTERPRETER.match(name):
            break
        if name == "??":  # without symbols for this frame, the outer ones are unreliable
            names += [os.path.basename(file)] * bool(file)
            break
        if names and name.startswith("__") and names[-1].startswith("__"):
            names.pop()
        names.append(name.partition("(")[0])
    clean = [name.lstrip("_").removeprefix("GI_").lstrip("_") for name in names]
    return " > ".join(reversed(clean[:MAX_FRAMES]))
