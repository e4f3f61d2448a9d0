"""A rank on another machine, as its world sees it: every call goes to the host that started the rank."""

from __future__ import annotations

import pickle
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from pytest_fsdp_meta.worlds.engine import read_note
from pytest_fsdp_meta.worlds.failures import RankFailure
from pytest_fsdp_meta.worlds.ray.host import FROM_RANK, LaunchRequest
from pytest_fsdp_meta.worlds.system.output import OutputTail

ANSWER_TIMEOUT = 5.0
"""Seconds for a host to answer; it has nothing else to do."""
NO_ANSWER = "was lost: its host did not answer"


@dataclass
class RemoteMember:
    """A ``Member`` whose process a host has started."""

    rank: int
    describe_loss: Callable[[], str]
    """Describes what happened to the rank when the connection to the host is lost."""
    connect: Callable[[], Connection]
    """Opens another connection to the host, because another thread reads the rank's output."""
    _host: Connection
    _inbox: deque[bytes] = field(default_factory=deque)
    """Messages of the rank that arrived while the host was asked for something else."""
    _answers: deque[Any] = field(default_factory=deque)
    """Messages of the host."""
    _ending: RankFailure | None = None
    _written: OutputTail = field(default_factory=OutputTail)
    _output: str = ""
    """The path of the rank's output file on the host."""
    _output_connection: Connection | None = None
    _clock_offset: float = 0.0
    """Seconds by which this machine's monotonic clock is ahead of the host's; each counts from its own start."""

    def start(self, request: LaunchRequest) -> None:
        """Ask the host to start the rank."""
        self._host.send_bytes(pickle.dumps(request))

    def await_start(self, seconds: float) -> RankFailure | None:
        """Wait until the rank runs; return the failure if it does not."""
        deadline = time.monotonic() + seconds
        while not self._answers and self._ending is None:
            if not self._receive(deadline):
                return RankFailure(self.rank, "hung", f"was not started within {seconds:g} s")
        if self._ending is not None:
            return self._ending
        kind, *content = self._answers.popleft()
        if kind == "refused":
            return RankFailure(self.rank, "refused", content[0], user=True)
        self._clock_offset, self._output = time.monotonic() - content[0], content[1]
        return None

    @property
    def pid(self) -> None:
        return None

    @property
    def has_ended(self) -> bool:
        return self._ending is not None

    @property
    def handles(self) -> tuple[Connection, ...]:
        return () if self._ending else (self._host,)

    @property
    def has_message_or_ended(self) -> bool:
        return bool(self._inbox) or self._ending is not None

    @property
    def is_stopped(self) -> bool:
        return bool(self._query("is_stopped", seconds=ANSWER_TIMEOUT))

    def send(self, note: bytes) -> None:
        self._command("send", read_note(note))

    def receive_message(self) -> tuple[Any, ...] | None:
        while not self._inbox and self._ending is None:
            if not self._receive(time.monotonic() + ANSWER_TIMEOUT):
                self._ending = self._lost(NO_ANSWER)
        if not self._inbox:
            return None
        message: tuple[Any, ...] = pickle.loads(self._inbox.popleft())
        if message[0] == "failure":
            return "failure", self._on_our_clock(message[1])
        return message

    def ending(self) -> RankFailure:
        assert self._ending is not None
        return self._ending

    def kill(self) -> None:
        self._command("kill")

    def join(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._ending is None and self._receive(deadline):
            pass

    @property
    def is_released(self) -> bool:
        return self._host.closed

    def release(self) -> None:
        self._host.close()
        if self._output_connection is not None:
            self._output_connection.close()

    def written(self) -> OutputTail:
        if self._ending is None:
            self._written = self._query("written", seconds=ANSWER_TIMEOUT) or self._written
        return self._written

    def read(self, at: int) -> bytes:
        try:
            if self._output_connection is None:
                self._output_connection = self.connect()
                self._output_connection.send_bytes(pickle.dumps(Path(self._output)))
            self._output_connection.send_bytes(str(at).encode())
            answered = self._output_connection.poll(ANSWER_TIMEOUT)
            return self._output_connection.recv_bytes() if answered else b""
        except (EOFError, OSError):  # the host is gone, which is reported where its answers are awaited
            return b""

    def request_stack(self) -> None:
        self._command("request_stack")

    def stack(self, deadline: float) -> str:
        seconds = max(0.0, deadline - time.monotonic())
        stack = self._query("stack", seconds, seconds=seconds + ANSWER_TIMEOUT)
        return str(stack) if stack else "  (it did not react)"

    def _command(self, *command: Any) -> None:
        # A host that is gone is not an error here: whoever waits for an answer gets the failure.
        if self._ending is None:
            with suppress(OSError):
                self._host.send_bytes(pickle.dumps(command))

    def _query(self, *command: Any, seconds: float) -> Any:
        """Send a command and return its answer, or None if the rank ends. A silent host counts as lost."""
        self._command(*command)
        deadline = time.monotonic() + seconds
        while not self._answers and self._ending is None:
            if not self._receive(deadline):
                self._ending = self._lost(NO_ANSWER)
        return self._answers.popleft()[1] if self._answers else None

    def _receive(self, deadline: float) -> bool:
        """Receive and store one message; return whether one arrived before the deadline."""
        try:
            if not self._host.poll(max(0.0, deadline - time.monotonic())):
                return False
            received = self._host.recv_bytes()
        except (EOFError, OSError):
            self._ending = self._lost(self.describe_loss())
            return True
        prefix, packed = received[: len(FROM_RANK)], received[len(FROM_RANK) :]
        if prefix == FROM_RANK:
            self._inbox.append(packed)
            return True
        kind, *content = pickle.loads(packed)
        if kind == "ended":
            self._ending, self._written = self._on_our_clock(content[0]), content[1]
        else:
            self._answers.append((kind, *content))
        return True

    def _lost(self, summary: str) -> RankFailure:
        return RankFailure(self.rank, "lost", summary, when=time.monotonic())

    def _on_our_clock(self, failure: RankFailure) -> RankFailure:
        return replace(failure, when=failure.when + self._clock_offset)
