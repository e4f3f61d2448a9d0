"""Start the processes of ranks: forked from a server that has imported torch, or spawned if forking is unsafe."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any

from pytest_fsdp_meta.worlds.failures import describe_exit
from pytest_fsdp_meta.worlds.local.forkserver import Server
from pytest_fsdp_meta.worlds.local.member import LocalMember
from pytest_fsdp_meta.worlds.rank import preload
from pytest_fsdp_meta.worlds.rank.main import Assignment, main
from pytest_fsdp_meta.worlds.spec import Sources, WorldSpec, place_of
from pytest_fsdp_meta.worlds.system import processes

COUNT_TIMEOUT = 120.0
"""Seconds that counting may take; most of them import torch."""
ASK_TORCH = "to see why, run: python -c 'import torch; print(torch.cuda.device_count())'"
_LOCK = threading.RLock()
"""Held while a process is started, because that temporarily changes state of the whole interpreter."""


@dataclass
class ForkServerEngine:
    """The ``Engine`` of this machine. Its fork server is started once and serves all worlds."""

    sources: Sources = field(default_factory=Sources)
    modules: Sequence[str] = ()
    test_modules: Sequence[str] = ()
    method: str = "forkserver"
    """How ranks start: "forkserver"; "bare", from a server that has imported nothing, if forking it with these modules
    is unsafe; "spawn" if there can be no server."""
    patience: float = 120.0
    """Seconds that the imports may take, besides the timeout of a world, which may be short."""
    worlds: int | None = None
    _server: Server | None = field(default=None, repr=False)
    _processes: weakref.WeakSet[BaseProcess] = field(default_factory=weakref.WeakSet, repr=False)
    _reported: set[str] = field(default_factory=set, repr=False)
    """Modules whose import failure was reported already."""

    def start_early(self, modules: Mapping[str, Sequence[str]], path: Sequence[str]) -> None:
        """Import torch and what test modules will need, by names in them, while the parent still collects tests."""
        with _LOCK:
            if self._server is None and self.method == "forkserver":
                early = {**dict.fromkeys(preload.TORCH_MODULES, ()), **modules}
                with suppress(OSError):  # start() reports it
                    self._server = Server([], Sources(tuple(path)), early)

    def start(self) -> None:
        """Start importing in the background; a world waits for it only if it has not finished."""
        modules = [*preload.TORCH_MODULES, *self.modules, *self.test_modules]
        with _LOCK:
            if self._server is not None and self._server.waits:
                if self._server.alive and self._server.knows_environment():
                    self._server.give(modules, self.sources, self.worlds)
                else:
                    self._server = None
            if self._server is None and self.method != "spawn":
                forked = self.method == "forkserver"
                try:
                    self._server = Server(modules if forked else [], self.sources, worlds=self.worlds)
                except OSError as error:  # such as a full disk
                    self.method = "spawn"
                    _warn(f"pytest-fsdp-meta: the fork server cannot start ({error}), so ranks are spawned")

    def ready(self) -> None:
        """Wait until ranks can be started. If forking is unsafe, warn once and start all later ranks another way."""
        with _LOCK:
            objection = self._import()
            if self._server is not None and not objection and not self._server.alive:
                self._server = None  # it worked before and was ended from outside: start a new one
                objection = self._import()
            if objection:
                self._server, self.method = None, "bare" if self.method == "forkserver" else "spawn"
                _warn(f"pytest-fsdp-meta: {objection}, so ranks are spawned, which is slower")
                self.ready()

    def _import(self) -> str:
        """Wait for the server; return why it must not be forked, or "". Warn of ``modules`` that failed to import."""
        self.start()
        if self._server is None:
            return ""
        objection, failed = self._server.report(self.patience)
        for name in [name for name in self.modules if name in failed and name not in self._reported]:
            self._reported.add(name)
            _warn(f"pytest-fsdp-meta: {name} cannot be preloaded: {failed[name]}")
        return objection

    def importing(self) -> str:
        """Return what the fork server is importing; for threads other than the one that waits in ``ready``."""
        server = self._server  # without the lock, which ``ready`` holds
        return server.importing() if server is not None else ""

    def count_gpus(self) -> int:
        """Count the GPUs of this machine in a spawned process.

        The fork server must not start yet: GPUs are counted during collection, when the modules that it should import
        are not known.
        """
        return count_gpus(ForkServerEngine(method="spawn").launch_process)

    def launch(self, spec: WorldSpec, folder: Path, leftovers: Sequence[str]) -> Iterator[LocalMember]:
        processes.require_descriptors(len(spec.ranks))
        self.ready()
        for rank in spec.ranks:
            task = Assignment(
                place=place_of(rank, spec),
                spec=spec,
                sources=self.sources,
                folder=str(folder),
                leftovers=tuple(leftovers),
                environ={**os.environ, **spec.environ},
                cwd=os.getcwd(),
            )
            yield self.launch_rank(task)

    def launch_rank(self, task: Assignment) -> LocalMember:
        parent_end, rank_end = Pipe()
        forked = self.method != "spawn"
        dies_with_parent = forked or threading.current_thread() is threading.main_thread()
        with rank_end:
            process = self.launch_process(main, (rank_end, task, dies_with_parent), name=f"rank{task.place.rank}")
        return LocalMember(
            task.place.rank, process, parent_end, task.output, task.stacks, self.end_strays, self._is_orphan
        )

    def _is_orphan(self) -> bool:
        """Return whether the fork server has ended, which ends the ranks that it forked."""
        with _LOCK:
            return self._server is not None and self._server.ends(0.5)

    def end_strays(self) -> None:
        """End the processes that ranks left behind when they ended."""
        with _LOCK:  # no rank is started meanwhile, so every living rank is known and spared
            if self._server is not None:
                self._server.end_strays(self._ranks)

    def _ranks(self) -> set[int]:
        pids = set()
        for process in self._processes:
            with suppress(ValueError):  # its process object was closed
                pids.add(process.pid)
        return {pid for pid in pids if pid is not None}

    def close(self) -> None:
        """End the server, which happens when its object is collected."""
        with _LOCK:
            self._server = None

    def launch_process(self, target: Callable[..., None], args: tuple[Any, ...], name: str) -> BaseProcess:
        self.start()
        try:
            return self._start(target, args, name)
        except (ConnectionError, EOFError):
            if self._server is None or not self._server.ends(1.0):
                raise
        self.ready()  # the server was ended from outside since the last check: start a new one
        return self._start(target, args, name)

    def _start(self, target: Callable[..., None], args: tuple[Any, ...], name: str) -> BaseProcess:
        # Not daemonic: a daemonic process may not have children, and loaders start DataLoader workers.
        context: Any = multiprocessing.get_context("spawn" if self.method == "spawn" else "forkserver")
        process: BaseProcess = context.Process(target=target, args=args, name=name)
        with _LOCK, _without_main(), self._server.serving() if self._server is not None else nullcontext():
            process.start()
            self._processes.add(process)
        return process


def _warn(message: str) -> None:
    """Warn, but never raise even if the user turns warnings into errors: nothing is wrong, only slower."""
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.warn(message, stacklevel=2)


def count_gpus(launch_process: Callable[..., BaseProcess]) -> int:
    """Return the number of GPUs that torch can use, counted in a short-lived process: CUDA must not start in this one.

    ``launch_process(target, args, name=...)`` starts it. Raises ValueError when that process fails. On a machine
    without GPUs no process is started.
    """
    if not preload.has_gpu_files():  # so no process has to import torch to count them
        return 0
    here, there = Pipe(duplex=False)
    with here:
        with there:
            process = launch_process(_count, (there,), name="count-gpus")
        try:
            if not here.poll(COUNT_TIMEOUT):
                raise ValueError(f"counting the GPUs took longer than {COUNT_TIMEOUT:g} s; {ASK_TORCH}")
            return int(here.recv())
        except EOFError:
            process.join(5)
            _, summary = describe_exit(process.exitcode)
            raise ValueError(f"counting the GPUs failed: its process {summary}; {ASK_TORCH}") from None
        finally:
            if process.exitcode is None:  # else its number may be another process's by now
                process.kill()
            process.join()


def _count(pipe: Connection) -> None:
    import torch

    pipe.send(torch.cuda.device_count())


@contextmanager
def _without_main() -> Iterator[None]:
    """Keep multiprocessing from running the parent's main script on every rank.

    Functions of the script are pickled by value, and a script that calls ``pytest.main()`` unguarded would recurse.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
