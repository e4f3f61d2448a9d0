"""A rank on another machine as its world sees it: every question goes to the host that has started it."""

from __future__ import annotations

import pickle
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any

from pytest_fsdp_meta.worlds.failures import RankFailure
from pytest_fsdp_meta.worlds.ray.host import LaunchRequest, Reading
from pytest_fsdp_meta.worlds.system import messages
from pytest_fsdp_meta.worlds.system.output import Written

ANSWER = 5.0
"""Seconds for a host, which does nothing else, to answer."""
SILENT = "was lost: its host did not answer"


@dataclass
class RemoteMember:
    """A ``Member`` whose process a host has started. ``lost`` says what is known when the host is gone."""

    rank: int
    lost: Callable[[], str]
    connect: Callable[[], Connection]
    """To the host, once more: output is read by another thread."""
    _host: Connection
    _inbox: deque[bytes] = field(default_factory=deque)
    """What the rank has said while the host was asked for something else."""
    _answers: deque[Any] = field(default_factory=deque)
    _ending: RankFailure | None = None
    _written: Written = field(default_factory=Written)
    _output: str = ""
    """Where the host has what the rank writes."""
    _reading: Connection | None = None
    _ahead: float = 0.0
    """How much the clock of this machine is ahead of that of the other, whose seconds count from its own start."""

    def begin(self, order: LaunchRequest) -> None:
        self._host.send_bytes(pickle.dumps(order))

    def await_start(self, seconds: float) -> RankFailure | None:
        """Waits until the rank runs; why it does not."""
        deadline = time.monotonic() + seconds
        while not self._answers and self._ending is None:
            if not self._receive(deadline):
                return RankFailure(self.rank, "hung", f"was not started within {seconds:g} s")
        if self._ending is not None:
            return self._ending
        kind, *told = self._answers.popleft()
        if kind == "refused":
            return RankFailure(self.rank, "refused", told[0], user=True)
        self._ahead, self._output = time.monotonic() - told[0], told[1]
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
    def has_news(self) -> bool:
        return bool(self._inbox) or self._ending is not None

    def send(self, note: bytes) -> None:
        self._ask("send", messages.disclose(note))

    def hear(self) -> tuple[Any, ...] | None:
        while not self._inbox and self._ending is None:
            if not self._receive(time.monotonic() + ANSWER):
                self._ending = self._loss(SILENT)
        if not self._inbox:
            return None
        message = messages.open_packed(self._inbox.popleft())
        if message[0] == "failure":
            return "failure", self._by_our_clock(message[1])
        return message

    def ending(self) -> RankFailure:
        assert self._ending is not None
        return self._ending

    def kill(self) -> None:
        self._ask("kill")

    def join(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._ending is None and self._receive(deadline):
            pass

    @property
    def is_released(self) -> bool:
        return self._host.closed

    def release(self) -> None:
        self._host.close()
        if self._reading is not None:
            self._reading.close()

    def written(self) -> Written:
        if self._ending is None:
            self._written = self._answer_to("written", seconds=ANSWER) or self._written
        return self._written

    def read(self, at: int) -> bytes:
        try:
            if self._reading is None:
                self._reading = self.connect()
                self._reading.send_bytes(pickle.dumps(Reading(self._output)))
            self._reading.send_bytes(str(at).encode())
            return self._reading.recv_bytes() if self._reading.poll(ANSWER) else b""
        except (EOFError, OSError):  # the host is gone, which is told where its answers are waited for
            return b""

    def ask_stack(self) -> None:
        self._ask("ask_stack")

    def stack(self, deadline: float) -> str:
        seconds = max(0.0, deadline - time.monotonic())
        told = self._answer_to("stack", seconds, seconds=seconds + ANSWER)
        return str(told) if told else "  (it did not react)"

    def _ask(self, *command: Any) -> None:
        # A host that is gone is no error here: whoever waits for an answer learns how.
        if self._ending is None:
            with suppress(OSError):
                self._host.send_bytes(pickle.dumps(command))

    def _answer_to(self, *command: Any, seconds: float) -> Any:
        """None where the rank ended instead. A host that does not answer is taken for gone."""
        self._ask(*command)
        deadline = time.monotonic() + seconds
        while not self._answers and self._ending is None:
            if not self._receive(deadline):
                self._ending = self._loss(SILENT)
        return self._answers.popleft()[1] if self._answers else None

    def _receive(self, deadline: float) -> bool:
        """One message of the host's, noted; whether there was one before the deadline."""
        try:
            if not self._host.poll(max(0.0, deadline - time.monotonic())):
                return False
            received = self._host.recv_bytes()
        except (EOFError, OSError):
            self._ending = self._loss(self.lost())
            return True
        if received[:4] == b"said":
            self._inbox.append(received[4:])
            return True
        kind, *told = pickle.loads(received[4:])
        if kind == "ended":
            self._ending, self._written = self._by_our_clock(told[0]), told[1]
        else:
            self._answers.append((kind, *told))
        return True

    def _loss(self, how: str) -> RankFailure:
        return RankFailure(self.rank, "lost", how, when=time.monotonic())

    def _by_our_clock(self, failure: RankFailure) -> RankFailure:
        return replace(failure, when=failure.when + self._ahead)
