"""A rank that runs as a process on this machine: its messages, its exit, its stack, its output."""

from __future__ import annotations

import os
import pickle
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from pytest_fsdp_meta.worlds.engine import read_note
from pytest_fsdp_meta.worlds.failures import CUT_OFF_MARK, RankFailure, describe_exit
from pytest_fsdp_meta.worlds.rank import tracebacks
from pytest_fsdp_meta.worlds.system import processes
from pytest_fsdp_meta.worlds.system.output import OutputTail, read

UNKNOWN_EXIT_CODE = 255
"""What multiprocessing makes up when the fork server ended before it could report the exit code."""
POLL_INTERVAL = 0.2
"""Seconds between two checks whether the process has ended, for an exit that no handle signals."""


@dataclass
class LocalMember:
    """A ``Member`` whose process was started by this process."""

    rank: int
    process: BaseProcess
    pipe: Connection
    output: Path
    stacks: Path
    end_strays: Callable[[], None] = lambda: None
    """Ends what ranks that have ended left behind."""
    is_orphan: Callable[[], bool] = lambda: False
    """Returns whether the fork server of this rank has ended."""
    count_oom_kills: int = field(default_factory=processes.count_oom_kills)
    """How many processes the system had killed for lack of memory when this rank was started."""
    _next_check: float = 0.0

    def __post_init__(self) -> None:
        self._started = processes.started(self.process.pid)

    @property
    def pid(self) -> int | None:
        return self.process.pid

    @property
    def handles(self) -> tuple[Any, ...]:
        return self.pipe, self.process.sentinel

    def send(self, note: bytes) -> None:
        # A rank that has ended is not an error here: waiting for its answer will report how it ended.
        with suppress(BrokenPipeError, ConnectionResetError):
            self.pipe.send_bytes(note)

    def receive_message(self) -> tuple[Any, ...] | None:
        packed = self.receive_packed()
        return None if packed is None else pickle.loads(packed)

    def receive_packed(self) -> bytes | None:
        """Return the message that has arrived, or None. A rank that has ended may have left one in the pipe."""
        try:
            note = self.pipe.recv_bytes() if self.pipe.poll() else None
        except (EOFError, OSError):
            note = None
        return None if note is None else read_note(note, remove=True)

    @property
    def has_message_or_ended(self) -> bool:
        """Whether the process has ended, checked at intervals: a check per message costs a tenth of a warm call."""
        now = time.monotonic()
        if now < self._next_check:
            return False
        self._next_check = now + POLL_INTERVAL
        return self.has_ended

    @property
    def has_ended(self) -> bool:
        """Whether the process itself has ended; a child that it forked can hold its pipe and its sentinel open."""
        return self.process.exitcode is not None

    @property
    def is_stopped(self) -> bool:
        return processes.stat(self.pid)[:1] in (["T"], ["t"])

    def ending(self) -> RankFailure:
        when = time.monotonic()
        self.process.join(1.0)
        cut_off = self.output.with_suffix(CUT_OFF_MARK).exists()
        kind, summary = describe_exit(self.process.exitcode, cut_off, self.written().since())
        orphan = self.process.exitcode == UNKNOWN_EXIT_CODE and self.is_orphan()
        if orphan:
            kind, summary = "killed", "was killed because the fork server of all ranks was ended from outside"
        if (orphan or self.process.exitcode == -signal.SIGKILL) and processes.count_oom_kills() > self.count_oom_kills:
            summary += processes.OOM_KILL_NOTE
        return RankFailure(self.rank, kind, summary, when=when)

    def kill(self) -> None:
        """Kill the rank and what it has started: it leads a process group, which may outlive it."""
        pid = self.process.pid
        assert pid is not None
        if processes.started(pid) not in ([], self._started):
            return  # the rank and its group have ended, and another process was given the number
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        if not self.has_ended:  # it may not have become the leader of a group yet
            self.process.kill()

    def join(self, seconds: float) -> None:
        self.process.join(seconds)

    def release(self) -> None:
        self.pipe.close()
        self.end_strays()
        # A process that has not ended by now (it sits in a driver) is left to the system.
        with suppress(ValueError):
            self.process.close()

    def written(self) -> OutputTail:
        return OutputTail.read(self.output)

    def read(self, at: int) -> bytes:
        return read(self.output, at)

    def request_stack(self) -> None:
        pid = self.process.pid
        if pid and self.stacks.exists() and not self.has_ended:  # without a file no handler: the signal would kill
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)

    def stack(self, deadline: float) -> str:
        """Return the stack that the signal handler dumps, even inside C code, once the file has stopped growing."""
        before = 0
        while (size := self.stacks.stat().st_size if self.stacks.exists() else 0) != before or not size:
            if time.monotonic() > deadline:
                break
            before = size
            time.sleep(0.05)
        known = {"T": ": it is stopped", "D": ": it waits inside the kernel", "Z": ": it has ended"}
        why = known.get("".join(processes.stat(self.pid)[:1]), "")
        return tracebacks.user_stack(OutputTail.read(self.stacks).since()) or f"  (it did not react{why})"
