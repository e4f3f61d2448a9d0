"""A rank's side of the control pipe."""

from __future__ import annotations

import os
import queue
import select
import shutil
import signal
import threading
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from pytest_fsdp_meta.worlds.diagnosis import disk, flight_recorder
from pytest_fsdp_meta.worlds.failures import CUT_OFF
from pytest_fsdp_meta.worlds.rank import tracebacks
from pytest_fsdp_meta.worlds.system import messages, output, processes

GLANCE = 0.5
"""Seconds between two looks at how much this rank has written, and whether its pipe is still there."""


class Channel:
    """A thread reads the pipe, so that the parent's end is noticed in the middle of a collective.

    ``output`` is where this rank writes; its messages lie beside it. ``leftovers`` are the folders that go when the
    parent is killed.
    """

    def __init__(self, connection: Connection, output: Path, leftovers: Sequence[str]) -> None:
        self._connection = connection
        self._pipe = os.fstat(connection.fileno())
        self._owner = os.getpid()
        self._output = output
        self._leftovers = leftovers
        self._files = (output.with_suffix(f".{number}") for number in count())
        self._inbox: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._sending = threading.Lock()
        threading.Thread(target=self._listen, name="pytest-fsdp-meta", daemon=True).start()

    def _listen(self) -> None:
        heard = select.poll()  # that of the connection makes one for every message
        heard.register(self._connection.fileno(), select.POLLIN)
        while True:
            try:
                while not heard.poll(GLANCE * 1000):
                    self._check_pipe()
                    disk.bound(self._output)
                note = self._connection.recv_bytes()
            except (EOFError, OSError):
                self._check_pipe()
                # The parent is gone. What it would have removed and what this rank has started goes as well.
                for folder in self._leftovers:
                    shutil.rmtree(folder, ignore_errors=True)
                os.killpg(os.getpid(), signal.SIGKILL)
            message = messages.unpack(note)
            if message == flight_recorder.QUESTION:
                self._say_where()
            else:
                self._inbox.put(message)

    def _say_where(self) -> None:
        """Answers for the main thread, which may sit in a collective for ever."""
        processes.let_debuggers_in()
        found = flight_recorder.Whereabouts(tracebacks.user_stack(tracebacks.dump()), flight_recorder.read())
        # Without an answer the parent tells less; with this thread gone, the rank would outlive its parent.
        with suppress(OSError):
            self._post((*flight_recorder.QUESTION, found))

    def receive(self) -> tuple[Any, ...]:
        return self._inbox.get()

    @property
    def is_own(self) -> bool:
        """Whether this process is the rank, and not a child that it has forked."""
        return os.getpid() == self._owner

    def send(self, *message: Any) -> None:
        """Raises OSError where a long one finds no room on the disk."""
        if not self.is_own:
            os._exit(0)  # a child that the loader forked, and that came back from it, is no rank
        output.flush()
        self._post(message)

    def _post(self, message: tuple[Any, ...]) -> None:
        with self._sending:
            note = messages.pack(message, next(self._files))
            self._check_pipe()
            self._connection.send_bytes(note)

    def _check_pipe(self) -> None:
        """Ends this rank when the code that it runs has closed its pipe: the descriptor may be another file by now."""
        try:
            same = os.path.samestat(self._pipe, os.fstat(self._connection.fileno()))
        except OSError:
            same = False
        if not same:
            os._exit(CUT_OFF)
