"""A rank that is a process of this machine: what it says, how it ended, where it stands, what it wrote."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from pytest_fsdp_meta.worlds.failures import RankFailure, describe_exit
from pytest_fsdp_meta.worlds.rank import tracebacks
from pytest_fsdp_meta.worlds.system import messages, processes
from pytest_fsdp_meta.worlds.system.output import Written, read

UNTOLD = 255

GLANCE = 0.2
"""Seconds between two looks at whether the process has ended of which no handle tells."""


@dataclass
class LocalMember:
    """A ``Member`` whose process was started here."""

    rank: int
    process: BaseProcess
    pipe: Connection
    output: Path
    stacks: Path
    end_strays: Callable[[], None] = lambda: None
    is_orphan: Callable[[], bool] = lambda: False
    shortages: int = field(default_factory=processes.shortages)
    _next_look: float = 0.0

    @property
    def pid(self) -> int | None:
        return self.process.pid

    @property
    def handles(self) -> tuple[Any, ...]:
        return self.pipe, self.process.sentinel

    def send(self, note: bytes) -> None:
        # A rank that has ended is no error here: whoever waits for its answer learns how.
        with suppress(BrokenPipeError, ConnectionResetError):
            self.pipe.send_bytes(note)

    def hear(self) -> tuple[Any, ...] | None:
        packed = self.hear_packed()
        return None if packed is None else messages.open_packed(packed)

    def hear_packed(self) -> bytes | None:
        """The message that has arrived, None where none will: a rank that ended may have its last one in the pipe."""
        try:
            note = self.pipe.recv_bytes() if self.pipe.poll() else None
        except (EOFError, OSError):
            note = None
        return None if note is None else messages.disclose(note, remove=True)

    @property
    def has_news(self) -> bool:
        """Asks the process now and then: to ask it after each message of any rank takes a tenth of a warm call."""
        now = time.monotonic()
        if now < self._next_look:
            return False
        self._next_look = now + GLANCE
        return self.has_ended

    @property
    def has_ended(self) -> bool:
        """Asked of the process itself: a child that it has forked can hold its pipe and its sentinel open."""
        return self.process.exitcode is not None

    def ending(self) -> RankFailure:
        when = time.monotonic()
        self.process.join(1.0)
        kind, summary = describe_exit(self.process.exitcode)
        # Multiprocessing makes up an exit code where nobody is left to tell it.
        orphan = self.process.exitcode == UNTOLD and self.is_orphan()
        if orphan:
            kind, summary = "killed", "was killed with the process that ranks are forked from, which somebody has ended"
        if (orphan or self.process.exitcode == -signal.SIGKILL) and processes.shortages() > self.shortages:
            summary += processes.OOM_KILL_NOTE
        return RankFailure(self.rank, kind, summary, when=when)

    def kill(self) -> None:
        """At once, with what it has started: a rank leads a process group, which may outlive it."""
        pid = self.process.pid
        assert pid is not None
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        if not self.has_ended:  # it may not have got as far as to lead a group
            self.process.kill()

    def join(self, seconds: float) -> None:
        self.process.join(seconds)

    def release(self) -> None:
        self.pipe.close()
        self.end_strays()
        # A process that does not end even so (it sits in a driver) is left to the system.
        with suppress(ValueError):
            self.process.close()

    def written(self) -> Written:
        return Written.read(self.output)

    def read(self, at: int) -> bytes:
        return read(self.output, at)

    def ask_stack(self) -> None:
        pid = self.process.pid
        if pid and self.stacks.exists() and not self.has_ended:  # no handler before the file: the signal would kill
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)

    def stack(self, deadline: float) -> str:
        """Written by the signal handler even while the rank is inside C code, and whole once it grows no more."""
        before = 0
        while (size := _size(self.stacks)) != before or not size:
            if time.monotonic() > deadline:
                break
            before = size
            time.sleep(0.05)
        return tracebacks.user_stack(Written.read(self.stacks).since()) or f"  (it did not react{self._condition()})"

    def _condition(self) -> str:
        """Why a process does not react, where the system says so."""
        try:
            state = Path(f"/proc/{self.process.pid}/stat").read_text("utf-8").rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            return ""
        return {"T": ": it is stopped", "D": ": it waits inside the kernel", "Z": ": it has ended"}.get(state, "")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
