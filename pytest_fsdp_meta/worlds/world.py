"""The parent's side of a world: start its ranks, call them, notice at once how they fail, leave nothing behind."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any

from pytest_fsdp_meta.worlds import tracebacks
from pytest_fsdp_meta.worlds.failures import RankFailure, WorldError, describe_exit
from pytest_fsdp_meta.worlds.launch import Preload
from pytest_fsdp_meta.worlds.rank import Assignment, main
from pytest_fsdp_meta.worlds.spec import WorldSpec

GRACE = 0.3
"""Seconds that the other ranks get, after the first failure, to report theirs."""
OUTPUT_LIMIT = 64 * 1024
"""Bytes of each rank's output that are kept; of a longer one, the end."""


@dataclass
class _Member:
    rank: int
    process: BaseProcess
    pipe: Connection
    output: Path
    stacks: Path


class _UnsafeFork(Exception):
    """The fork server must not be forked; the reason is its argument."""


class World:
    """Ranks with one process group. A context manager; ``run`` calls a function on every rank.

    After a ``WorldError`` the world is over: its ranks are ended, and the next test takes a fresh one.
    """

    def __init__(self, spec: WorldSpec, preload: Preload | None = None, label: str = "") -> None:
        self.spec = spec
        self._label = label
        self._preload = preload or Preload()
        self._members: list[_Member] = []
        self._calls = 0
        self._outputs: list[str] = []
        self._folder: str | None = None

    def __enter__(self) -> World:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def alive(self) -> bool:
        return bool(self._members)

    def start(self) -> None:
        """Starts the ranks and joins them. Raises WorldError when one of them fails to."""
        try:
            try:
                self._start()
            except _UnsafeFork as unsafe:
                self.close()
                self._preload.give_up_forking(str(unsafe))
                self._start()
        except BaseException:
            self.close()
            raise

    def run(self, function: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> list[Any]:
        """Calls ``function`` on every rank; the results in rank order.

        ``function`` may be "module:name", which spares the parent importing the module. Raises WorldError when a
        rank raises, ends or does not answer within the world's timeout, and ValueError for arguments that cannot be
        sent.
        """
        return [pickle.loads(result) for result in self.run_packed(function, *args, **kwargs)]

    def run_packed(self, function: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> list[bytes]:
        """Like ``run``, with each result still pickled: for results that only another rank can read."""
        import cloudpickle

        if not self._members:
            raise RuntimeError("this world has ended; a test takes a fresh one")
        target = function if isinstance(function, str) else ""
        try:
            payload = cloudpickle.dumps((None if target else function, args, kwargs))
        except Exception as error:
            raise ValueError(f"the arguments cannot be sent to the ranks: {type(error).__name__}: {error}") from error
        self._calls += 1
        message = pickle.dumps(("call", self._calls, target, payload))
        for member in self._members:
            self._send(member, message)
        name = target or getattr(function, "__qualname__", repr(function))
        answers = self._collect("result", f"running {name.rpartition(':')[2]}")
        assert all(call == self._calls for call, _ in answers), "an answer belongs to another call"
        return [packed for _, packed in answers]

    def close(self) -> None:
        """Ends every rank, at once and whatever it is doing; safe to call twice."""
        for member in self._members:
            self._send(member, pickle.dumps(("stop",)))
        deadline = time.monotonic() + GRACE
        for member in self._members:
            member.process.join(max(0.0, deadline - time.monotonic()))
        for member in self._members:
            _kill(member.process)
        self._outputs = self.outputs()
        for member in self._members:
            member.process.join(5)
            member.pipe.close()
            member.process.close()
        self._members = []
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def outputs(self) -> list[str]:
        """What each rank has written to stdout and stderr so far; of a long one, the end."""
        if not self._members:
            return list(self._outputs)
        return [_tail(member.output) for member in self._members]

    def _start(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="fsdp-world-")
        context = self._preload.context()
        for rank in range(self.spec.size):
            here, there = context.Pipe()
            folder = Path(self._folder)
            task = Assignment(
                rank=rank,
                spec=self.spec,
                sources=self._preload.sources,
                output=str(folder / f"rank{rank}.out"),
                stacks=str(folder / f"rank{rank}.stacks"),
                parent=os.getpid(),
                environ=dict(os.environ),
                cwd=os.getcwd(),
            )
            process = self._preload.launch(main, (there, task), name=f"rank{rank}")
            there.close()
            self._members.append(_Member(rank, process, here, Path(task.output), Path(task.stacks)))
        (port,) = self._collect("store", "starting", self._members[:1])[0]
        for member in self._members:
            self._send(member, pickle.dumps(("store", port)))
        self._collect("ready", "joining the process group")

    @staticmethod
    def _send(member: _Member, message: bytes) -> None:
        try:
            member.pipe.send_bytes(message)
        except (BrokenPipeError, ConnectionResetError):
            return  # it has ended; whoever waits for its answer learns how

    def _collect(self, kind: str, doing: str, members: Sequence[_Member] | None = None) -> list[tuple[Any, ...]]:
        """One message of this kind from each member. Every other rank is watched as well."""
        awaited = {member.rank for member in (self._members if members is None else members)}
        answers: dict[int, tuple[Any, ...]] = {}
        failures: dict[int, RankFailure] = {}
        deadline = time.monotonic() + self.spec.timeout
        while awaited - set(answers):
            for member, message in self._events(deadline, skip=set(answers) | set(failures)):
                if message is None:
                    failures[member.rank] = _ended(member)
                elif message[0] == "failure":
                    failures[member.rank] = message[1]
                elif message[0] == "unsafe":
                    raise _UnsafeFork(message[1])
                else:
                    assert message[0] == kind, message
                    answers[member.rank] = message[1:]
            if failures:
                deadline = min(deadline, time.monotonic() + GRACE) if len(failures) == 1 else deadline
            if time.monotonic() >= deadline or failures.keys() >= awaited - set(answers):
                break
        if awaited - set(answers):
            waiting = sorted(awaited - set(answers) - set(failures))
            self._fail(list(failures.values()) or self._hung(waiting), doing)
        return [answers[rank] for rank in sorted(awaited)]

    def _events(self, deadline: float, skip: set[int]) -> Iterator[tuple[_Member, tuple[Any, ...] | None]]:
        """What members have said (None: it ended), waiting for the first until the deadline."""
        watched = [member for member in self._members if member.rank not in skip]
        handles: dict[Any, _Member] = {}
        for member in watched:
            handles[member.pipe] = member
            handles[member.process.sentinel] = member
        ready = connection.wait(list(handles), timeout=max(0.0, deadline - time.monotonic()))
        for member in {handles[handle].rank: handles[handle] for handle in ready}.values():
            try:
                # A rank that reported and then ended has its report still in the pipe.
                yield member, pickle.loads(member.pipe.recv_bytes()) if member.pipe.poll() else None
            except (EOFError, OSError):
                yield member, None

    def _hung(self, waiting: Sequence[int]) -> list[RankFailure]:
        stacks = self._stacks()
        when = time.monotonic()
        summary = f"did not answer within {self.spec.timeout:g} s"
        late = [RankFailure(rank, "hung", summary, stacks[rank], when) for rank in waiting]
        others = sorted({member.rank for member in self._members} - set(waiting))
        return late + [RankFailure(rank, "answered", "had answered", stacks[rank], when + 1) for rank in others]

    def _stacks(self) -> list[str]:
        """The Python stacks of all ranks, written by the signal handler even while a rank is inside C code."""
        for member in self._members:
            if member.process.pid is not None and member.process.is_alive():
                os.kill(member.process.pid, signal.SIGUSR1)
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline and not all(_complete(member.stacks) for member in self._members):
            time.sleep(0.02)
        return [tracebacks.user_stack(_tail(member.stacks)) or "(it did not react)" for member in self._members]

    def _fail(self, failures: list[RankFailure], doing: str) -> None:
        self.close()
        raise WorldError(failures, doing, self._outputs, self._label)


def _complete(stacks: Path) -> bool:
    before = stacks.stat().st_size if stacks.exists() else 0
    time.sleep(0.02)
    return before > 0 and stacks.stat().st_size == before


def _ended(member: _Member) -> RankFailure:
    member.process.join(2.0)
    kind, summary = describe_exit(member.process.exitcode)
    return RankFailure(member.rank, kind, summary, when=time.monotonic())


def _kill(process: BaseProcess) -> None:
    """The rank and, as it leads a process group, what it started."""
    if process.pid is None:
        return
    for send in (os.killpg, os.kill):
        try:
            send(process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue


def _tail(path: Path) -> str:
    if not path.exists():
        return ""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - OUTPUT_LIMIT))
        text = file.read().decode("utf-8", "backslashreplace")
    return text if size <= OUTPUT_LIMIT else f"(the last {OUTPUT_LIMIT} of {size} bytes)\n{text}"
