"""The process that ranks are forked from: a fork server of multiprocessing, but not its global one.

The global one may be running already: without torch, for the user's code (it is the default from Python 3.14 on), or
for an earlier pytest session whose test modules have the same names.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import sysconfig
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from multiprocessing import resource_tracker
from pathlib import Path

from pytest_fsdp_meta.worlds.rank import coverage
from pytest_fsdp_meta.worlds.rank.preload import IMPORTING, REQUEST
from pytest_fsdp_meta.worlds.spec import Sources
from pytest_fsdp_meta.worlds.system import processes
from pytest_fsdp_meta.worlds.system.multiprocessing_private import ForkServer

MAIN = "pytest_fsdp_meta.worlds.local.forkserver_main"
SET_BY_IMPORTS = ("TORCHINDUCTOR_CACHE_DIR",)
"""Environment variables that torch sets when it is imported, in this process as in the server."""
MAX_SOCKET_PATH = 107 if sys.platform == "linux" else 103
"""Bytes that the path of a socket may have."""
SOCKET_NAME = "/pymp-12345678/listener-12345678"
"""What multiprocessing appends to the temporary folder for the path of the server's socket."""
PACKAGE_PATH = str(Path(__file__).parents[3])
"""The search path entry under which this package is found."""


class Server:
    """A fork server that starts to import at once, in the background. It ends with this object or with this process."""

    def __init__(
        self,
        modules: Sequence[str],
        sources: Sources,
        early: Mapping[str, Sequence[str]] | None = None,
        worlds: int | None = None,
    ) -> None:
        """With ``early``, import these modules, look up these names in them, and wait for ``give``."""
        resource_tracker.ensure_running()  # else it starts between folder and server, where a kill leaves the folder
        self._folder = Path(tempfile.mkdtemp(prefix=processes.folder_prefix("preload")))
        self._report: tuple[str, dict[str, str]] | None = None
        self._spared: frozenset[int] = frozenset()
        """Processes that the imported modules have started; they outlive the ranks."""
        start = {
            "path": list(sources.path),
            "early": None if early is None else {name: list(names) for name, names in early.items()},
            "leftovers": processes.folders_pattern(),
            "parent": os.getpid(),
            "from_main_thread": threading.current_thread() is threading.main_thread(),
        }
        (self._folder / "start").write_text(json.dumps(start), "utf-8")
        self._environ = dict(os.environ) if early is not None else {}
        self.waits = early is not None
        """Whether it waits for ``give``."""
        if early is None:
            self.give(modules, sources, worlds)
        self._server = ForkServer()
        self._server.set_forkserver_preload([MAIN])
        environ = {REQUEST: str(self._folder)}
        if sysconfig.get_path("purelib") != PACKAGE_PATH:
            # Before Python 3.13 the server does not get the sys.path of this process, and would not find this package.
            environ["PYTHONPATH"] = os.pathsep.join(filter(None, (PACKAGE_PATH, os.environ.get("PYTHONPATH"))))
        weakref.finalize(self, _end, self._server, self._folder, os.getpid())
        with environment(environ), _short_temporary_folder():
            self._server.ensure_running()

    def knows_environment(self) -> bool:
        """Return whether this process has the environment in which the early imports began: modules may read it."""
        before, now = ({**environ, **dict.fromkeys(SET_BY_IMPORTS)} for environ in (self._environ, os.environ))
        return before == now

    def give(self, modules: Sequence[str], sources: Sources, worlds: int | None) -> None:
        """Let the server import these modules, for about that many worlds."""
        settings = coverage.current_settings()
        # In a file, because the modules of a large repository are too much for an environment variable.
        request = {
            "modules": list(modules),
            "path": list(sources.path),
            "files": dict(sources.modules),
            "before": sources.before,
            "coverage": None if settings is None else asdict(settings),
            "worlds": worlds,
        }
        unfinished = self._folder / "request.part"
        unfinished.write_text(json.dumps(request), "utf-8")
        unfinished.rename(self._folder / "request")
        self.waits = False

    def report(self, seconds: float) -> tuple[str, dict[str, str]]:
        """Wait for the imports; return why the server must not be forked, or "", and the import errors by module."""
        if self._report is None:
            self._report = self._wait(seconds)
            shutil.rmtree(self._folder, ignore_errors=True)
        return self._report

    def _wait(self, seconds: float) -> tuple[str, dict[str, str]]:
        deadline = time.monotonic() + seconds
        while not (self._folder / "report").exists():
            if not self.alive:
                return "importing the test modules ended the process that does it", {}
            if time.monotonic() > deadline:
                current = self.importing()
                now = f", and {current} is not done" if current else ""
                return f"importing the test modules took longer than {seconds:g} s{now}", {}
            time.sleep(0.005)
        report = json.loads((self._folder / "report").read_text("utf-8"))
        self._spared = frozenset(report["children"])
        return report["objection"], report["failed"]

    def importing(self) -> str:
        """Return what is being imported: "test_it (transformers)"; empty if that is not known."""
        try:
            return (self._folder / IMPORTING).read_text("utf-8")
        except OSError:
            return ""

    @property
    def alive(self) -> bool:
        return self._server.pid is not None

    def ends(self, seconds: float) -> bool:
        """Return whether the server ends within this time: its descriptors are closed a moment before it does."""
        deadline = time.monotonic() + seconds
        while self.alive and time.monotonic() < deadline:
            time.sleep(0.005)
        return not self.alive

    def end_strays(self, ranks: Callable[[], Collection[int]]) -> None:
        """End the processes that ranks left behind when they ended, also in other process groups and sessions."""
        pid = self._server.pid
        if pid is not None:
            processes.end_children(pid, spare=lambda: self._spared.union(ranks()))

    def serving(self) -> AbstractContextManager[None]:
        """Let multiprocessing fork from this server instead of its global one."""
        return self._server.serving()


def _end(server: ForkServer, folder: Path, owner: int) -> None:
    if os.getpid() != owner:
        return  # this process was forked from the owner
    server.kill()
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _short_temporary_folder() -> Iterator[None]:
    """Let multiprocessing make its folder for sockets in /tmp if TMPDIR is too long for the path of a socket."""
    before = tempfile.tempdir
    if len(os.fsencode(tempfile.gettempdir() + SOCKET_NAME)) > MAX_SOCKET_PATH:
        tempfile.tempdir = "/tmp"
    try:
        yield
    finally:
        tempfile.tempdir = before


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set these environment variables for a while."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
