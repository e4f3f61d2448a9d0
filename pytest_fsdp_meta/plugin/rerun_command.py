"""The shell command that reruns one item, which every failure message ends with."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

SHIM = 5.0
"""Seconds in which a script that stands for an interpreter has to say for which."""


def rerun_command(item: pytest.Item, given: Sequence[str]) -> str:
    """Return a command that reruns this item from where pytest was started, with the options ``given``."""
    # Not from the node id, to which xdist may append a group.
    names = [node.name for node in item.listchain() if isinstance(node, (pytest.Class, pytest.Item))]
    here = item.config.invocation_params.dir
    nodeid = "::".join([os.path.relpath(item.path, here), *names])
    return shlex.join([_interpreter(here), "-m", "pytest", nodeid, *given])


@cache
def _interpreter(cwd: Path) -> str:
    """Return "python" where that is this interpreter for a shell in ``cwd``, else the shortest path of it."""
    python = shutil.which("python")
    if python is not None and (_is_same_link(python) or _is_shim(python, cwd)):
        return "python"
    near = os.path.relpath(sys.executable, cwd)
    near = near if os.sep in near else os.path.join(os.curdir, near)  # a shell looks up a bare name on the PATH
    return min(near, sys.executable, key=len)


def _is_same_link(python: str) -> bool:
    """Return whether this is the running interpreter: the same file in the same folder, which is its environment.

    The script "pytest" of an environment may run its Python through another link, such as python3.11.
    """
    folders = (os.path.dirname(os.path.abspath(file)) for file in (python, sys.executable))
    return os.path.samefile(*folders) and os.path.samefile(python, sys.executable)


def _is_shim(python: str, cwd: Path) -> bool:
    """Return whether this is a script, as pyenv and asdf put on the PATH, that runs the running interpreter."""
    ask = [python, "-c", "import sys; print(sys.executable)"]
    try:
        with open(python, "rb") as file:
            if file.read(2) != b"#!":
                return False
        asked = subprocess.run(ask, cwd=cwd, capture_output=True, text=True, timeout=SHIM)
    except (OSError, subprocess.TimeoutExpired):  # it cannot be read or run, so the path is the answer that is certain
        return False
    return asked.stdout.strip() == sys.executable
