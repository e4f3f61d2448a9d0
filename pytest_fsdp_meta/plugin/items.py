"""Items that use ranks. pytest makes a Function of each test, and ``collection`` one of these classes in its place.

``LoaderItem``, a check of a loader, has a module of its own. ``WorldItem`` is a test that requests ``fsdp_world``, and
``SpmdItem`` one whose whole body runs on every rank.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from pytest_fsdp_meta.loader.call import UNANIMOUS_OUTCOMES, Call
from pytest_fsdp_meta.plugin import hypothesis_given
from pytest_fsdp_meta.plugin.fixture_worlds import Disagreement
from pytest_fsdp_meta.plugin.outcomes import FailureLine
from pytest_fsdp_meta.plugin.pickling import Unsendable, pack_call, pack_drawn
from pytest_fsdp_meta.plugin.session import SESSION, PluginSession
from pytest_fsdp_meta.plugin.settings import runs_nothing
from pytest_fsdp_meta.plugin.spmd_rank import BODY
from pytest_fsdp_meta.text import first_line
from pytest_fsdp_meta.worlds import LeaseError, WorldError, WorldSpec

SHIM = 5.0
"""Seconds in which a script that stands for an interpreter has to say for which."""


class RanksItem(pytest.Item):
    """An item of this plugin."""

    line: FailureLine | None = None
    """How the phase that has just run failed, in one line."""

    @property
    def plugin(self) -> PluginSession:
        return self.config.stash[SESSION]

    def begin(self) -> None:
        """Prepare for a run of the item, or for another one; before its marks are evaluated and fixtures set up."""

    def rerun_command(self) -> str:
        """Return the shell command that reruns this item from where pytest was started, with the options given."""
        # Not from the node id, to which xdist may append a group.
        names = [node.name for node in self.listchain() if isinstance(node, (pytest.Class, pytest.Item))]
        here = self.config.invocation_params.dir
        nodeid = "::".join([os.path.relpath(self.path, here), *names])
        return shlex.join([_interpreter(here), "-m", "pytest", nodeid, *self.plugin.settings.given])

    def complete_report(self, call: pytest.CallInfo[None], report: pytest.TestReport) -> None:
        """Let pytest's report of a phase point to the line of the user's code that failed."""
        if self.line is not None:
            self.line.point(report, self)
            self.line = None  # also of an expected failure: a later phase has a line of its own


class WorldItem(RanksItem, pytest.Function):
    """A test that requests ``fsdp_world``: its body runs in the pytest process and calls ranks."""

    world: WorldSpec
    scope: str
    """How long the ranks live: "function", "module" or "session"."""

    def begin(self) -> None:
        """Make ``fsdp_world`` usable in the test's fixtures."""
        test = hypothesis_given.given_test(self.obj)
        if test is not None:
            hypothesis_given.disable_deadline(test)
        self.plugin.worlds.begin(self, self.world, self.scope)

    def setup(self) -> None:
        """Start the ranks, so that a world that cannot start is an error of the setup, not a failure of the test."""
        super().setup()
        if runs_nothing(self.config):
            return
        try:
            self.start()
        except (Unsendable, WorldError, LeaseError) as error:
            message = self.set_line(error)
        else:
            return
        pytest.fail(message, pytrace=False)

    def start(self) -> None:
        self.plugin.worlds.world()

    def set_line(self, error: Exception) -> str:
        """Set the line of this failure and return its text."""
        self.line = FailureLine(self.name, first_line(error), error.place if isinstance(error, WorldError) else "")
        return str(error)


class SpmdItem(WorldItem):
    """A test whose whole body runs on every rank, which ``@fsdp_spmd`` makes it."""

    _packed: Call

    def start(self) -> None:
        self._packed = pack_call(self)
        super().start()

    def runtest(self) -> None:
        values = {name: self.funcargs[name] for name in self._packed.names}
        test = hypothesis_given.given_test(self.obj)
        try:
            if test is None:
                self._run_body({})
            else:
                hypothesis_given.run_examples(test, values, self._run_body)
        except (WorldError, Disagreement, Unsendable) as error:
            parts = [self.set_line(error), hypothesis_given.join_notes(error)]
        except pytest.fail.Exception:  # raised by a signal handler, as pytest-timeout's
            ranks = self.plugin.listener.take_interruption()
            if ranks is None:
                raise
            parts = [self.set_line(ranks)]
        else:
            return
        pytest.fail("\n\n".join(filter(None, [*parts, f"rerun: {self.rerun_command()}"])), pytrace=False)

    def _run_body(self, drawn: dict[str, Any]) -> None:
        packed = self._packed.with_drawn({name: pack_drawn(name, value) for name, value in drawn.items()})
        options = self.config.option
        style = "short" if options.tbstyle == "short" else "long"
        given = packed, style, bool(options.showlocals), frozenset(UNANIMOUS_OUTCOMES)
        results = self.plugin.worlds.call(BODY, given, {})
        returned = sorted({kind for kind in results if kind is not None})
        if returned:
            message = f"{self.nodeid} returned a {returned[0]}, but a test should return None; did you mean assert?"
            line = (self.location[1] or 0) + 1
            warnings.warn_explicit(pytest.PytestReturnNotNoneWarning(message), None, str(self.path), line)


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
