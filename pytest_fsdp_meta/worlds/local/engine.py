"""Starting the processes of ranks: forked from a server that has imported torch, or spawned where that is unsafe."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Pipe
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any

from pytest_fsdp_meta.worlds.local import gpus
from pytest_fsdp_meta.worlds.local.forkserver import Server
from pytest_fsdp_meta.worlds.local.member import LocalMember
from pytest_fsdp_meta.worlds.rank import preload
from pytest_fsdp_meta.worlds.rank.main import Assignment, main
from pytest_fsdp_meta.worlds.spec import Place, Sources, WorldSpec

_LOCK = threading.RLock()
"""Held while a process is started, because that takes changes to what the whole process shares."""


@dataclass
class ForkServerEngine:
    """Engine of this machine, by what ranks find imported. Its fork server is started once and serves all worlds."""

    sources: Sources = field(default_factory=Sources)
    modules: Sequence[str] = ()
    """Modules of ours and of downstream's that every rank needs, by name."""
    test_modules: Sequence[str] = ()
    method: str = "forkserver"
    """Where that cannot be forked "bare": from a server that has imported nothing; where there can be none, "spawn"."""
    patience: float = 120.0
    """Seconds that importing may take; apart from the timeout of a world, which may be short."""
    _server: Server | None = field(default=None, repr=False)
    _processes: weakref.WeakSet[BaseProcess] = field(default_factory=weakref.WeakSet, repr=False)
    _told: set[str] = field(default_factory=set, repr=False)

    def start(self) -> None:
        """Begins importing in the background; worlds wait for it only if it has not finished."""
        with _LOCK:
            if self._server is None and self.method != "spawn":
                forked = self.method == "forkserver"
                modules = [*preload.TORCH_MODULES, *self.modules, *self.test_modules] if forked else []
                try:
                    self._server = Server(modules, self.sources)
                except OSError as error:  # the name of its socket is too long where TMPDIR is long
                    self.method = "spawn"
                    _tell(f"pytest-fsdp-meta: the fork server cannot start ({error}), so ranks are spawned")

    def ready(self) -> None:
        """Waits until ranks can be launched. Where they cannot be forked, every later world is spawned; said once."""
        with _LOCK:
            objection = self._import()
            if self._server is not None and not objection and not self._server.alive:
                self._server = None  # it has served and was ended from outside: a new one
                objection = self._import()
            if objection:
                self._server, self.method = None, "bare" if self.method == "forkserver" else "spawn"
                _tell(f"pytest-fsdp-meta: {objection}, so ranks are spawned, which is slower")
                self.ready()

    def _import(self) -> str:
        """Waits for the server; why it must not be forked, or empty. Tells what of ``modules`` it could not import."""
        self.start()
        if self._server is None:
            return ""
        objection, failed = self._server.report(self.patience)
        for name in [name for name in self.modules if name in failed and name not in self._told]:
            self._told.add(name)
            _tell(f"pytest-fsdp-meta: {name} cannot be preloaded: {failed[name]}")
        return objection

    def count_gpus(self) -> int:
        """Count the GPUs of this machine in a spawned process.

        The fork server must not start yet: GPUs are counted during collection, when the modules that it should import
        are not known.
        """
        return gpus.count_gpus(ForkServerEngine(method="spawn"))

    def launch(self, spec: WorldSpec, folder: Path, leftovers: Sequence[str]) -> Iterator[LocalMember]:
        self.ready()
        for rank in range(spec.size):
            task = Assignment(
                place=Place(rank, local_rank=rank, local_size=spec.size),
                spec=spec,
                sources=self.sources,
                folder=str(folder),
                leftovers=tuple(leftovers),
                environ=dict(os.environ),
                cwd=os.getcwd(),
            )
            yield self.launch_rank(task)

    def launch_rank(self, task: Assignment) -> LocalMember:
        here, there = Pipe()
        forked = self.method != "spawn"
        dies_with_parent = forked or threading.current_thread() is threading.main_thread()
        with there:
            process = self.launch_process(main, (there, task, dies_with_parent), name=f"rank{task.place.rank}")
        return LocalMember(task.place.rank, process, here, task.output, task.stacks, self.end_strays, self._is_orphan)

    def _is_orphan(self) -> bool:
        """Whether the process that ranks were forked from has ended, which ends them."""
        with _LOCK:
            return self._server is not None and self._server.ends(0.5)

    def end_strays(self) -> None:
        """Ends what ranks that are gone have left behind."""
        with _LOCK:  # nobody starts a rank meanwhile, so every rank there is is known
            if self._server is not None:
                self._server.end_strays(self._ranks)

    def _ranks(self) -> set[int]:
        pids = set()
        for process in self._processes:
            with suppress(ValueError):  # it has ended and was closed
                pids.add(process.pid)
        return {pid for pid in pids if pid is not None}

    def close(self) -> None:
        """The server ends with its object."""
        with _LOCK:
            self._server = None

    def launch_process(self, target: Callable[..., None], args: tuple[Any, ...], name: str) -> BaseProcess:
        self.start()
        try:
            return self._start(target, args, name)
        except (ConnectionError, EOFError):
            if self._server is None or not self._server.ends(1.0):
                raise
        self.ready()  # it was ended from outside since somebody looked: a new one
        return self._start(target, args, name)

    def _start(self, target: Callable[..., None], args: tuple[Any, ...], name: str) -> BaseProcess:
        # Not daemonic: a daemonic process may have no children, and loaders have DataLoader workers.
        context: Any = multiprocessing.get_context("spawn" if self.method == "spawn" else "forkserver")
        process: BaseProcess = context.Process(target=target, args=args, name=name)
        with _LOCK, _without_main(), self._server.serving() if self._server is not None else nullcontext():
            process.start()
            self._processes.add(process)
        return process


def _tell(message: str) -> None:
    """A warning also where the user turns warnings into errors: nothing is wrong, it is only slower."""
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.warn(message, stacklevel=2)


@contextmanager
def _without_main() -> Iterator[None]:
    """Keeps multiprocessing from running the parent's main script again on every rank.

    What ranks need of it is sent by value; a script that calls ``pytest.main()`` unguarded would start itself again.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
