"""The shell command that reruns one item, which every failure message ends with."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest


def rerun_command(item: pytest.Item, given: Sequence[str]) -> str:
    """Return a command that reruns this item from where pytest was started, with the options ``given``."""
    # Not from the node id, to which xdist may append a group.
    names = [node.name for node in item.listchain() if isinstance(node, (pytest.Class, pytest.Function))]
    return command(item.config, item.path, names, given)


def command(config: pytest.Config, path: Path, names: Sequence[str], given: Sequence[str]) -> str:
    """Return a command that runs the item with these names (class, function) in a file."""
    here = config.invocation_params.dir
    nodeid = "::".join([os.path.relpath(path, here), *names])
    return shlex.join([_interpreter(here), "-m", "pytest", nodeid, *given])


def _interpreter(cwd: Path) -> str:
    """Return "python" where that is this interpreter for a shell in ``cwd``, else the interpreter's path."""
    # The script "pytest" of a virtual environment may run its Python through another link, such as python3.11.
    python, this = (os.path.abspath(found or "") for found in (shutil.which("python"), sys.executable))
    if os.path.dirname(python) == os.path.dirname(this) and os.path.samefile(python, this):
        return "python"
    near = os.path.relpath(sys.executable, cwd)
    return sys.executable if near.startswith("..") else near
