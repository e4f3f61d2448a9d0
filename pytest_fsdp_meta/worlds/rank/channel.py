"""A rank's end of the pipe to its parent."""

from __future__ import annotations

import os
import pickle
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

from pytest_fsdp_meta.worlds.diagnosis import flight_recorder
from pytest_fsdp_meta.worlds.engine import pack_message, read_note
from pytest_fsdp_meta.worlds.failures import CUT_OFF, CUT_OFF_MARK
from pytest_fsdp_meta.worlds.rank import tracebacks
from pytest_fsdp_meta.worlds.system import output

POLL_INTERVAL = 0.5
"""Seconds between two checks how much this rank has written and whether its pipe is still open."""


class Channel:
    """Sends and receives messages. A thread reads the pipe, so that a rank in a collective notices the parent's end.

    ``output`` is the file of this rank's output; large messages are stored next to it. ``leftovers`` are the folders to
    remove if the parent is killed.
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
        pipe = select.poll()  # made once: Connection.poll() makes a new one for every message
        pipe.register(self._connection.fileno(), select.POLLIN)
        while True:
            try:
                while not pipe.poll(POLL_INTERVAL * 1000):
                    self._check_pipe()
                    output.bound_file(self._output)
                note = self._connection.recv_bytes()
            except (EOFError, OSError):
                self._check_pipe()
                # The parent has gone, so this rank removes the folders, and ends itself and what it has started.
                for folder in self._leftovers:
                    shutil.rmtree(folder, ignore_errors=True)
                os.killpg(os.getpid(), signal.SIGKILL)
            message: tuple[Any, ...] = pickle.loads(read_note(note))
            if message == flight_recorder.QUESTION:
                self._report_whereabouts()
            else:
                self._inbox.put(message)

    def _report_whereabouts(self) -> None:
        """Answer for the main thread, which may be stuck in a collective."""
        found = flight_recorder.Whereabouts(tracebacks.user_stack(tracebacks.dump()), flight_recorder.read())
        # Without this answer the parent only knows less. With an exception this thread would end, and nothing would
        # notice the end of the parent.
        with suppress(OSError):
            self._post((*flight_recorder.QUESTION, found))

    def receive(self) -> tuple[Any, ...]:
        return self._inbox.get()

    @property
    def is_own(self) -> bool:
        """Whether this process is the rank itself, not a child that it forked."""
        return os.getpid() == self._owner

    def send(self, *message: Any) -> None:
        """Send the message. Raises OSError if it is large and the disk is full."""
        if not self.is_own:
            os._exit(0)  # a child that the loader forked has returned from the loader, but is not a rank
        output.flush()
        self._post(message)

    def _post(self, message: tuple[Any, ...]) -> None:
        with self._sending:
            note = pack_message(message, next(self._files))
            self._check_pipe()
            self._connection.send_bytes(note)

    def _check_pipe(self) -> None:
        """End this rank if the code that it runs has closed the pipe: its descriptor may be another file by now."""
        try:
            same = os.path.samestat(self._pipe, os.fstat(self._connection.fileno()))
        except OSError:
            same = False
        if not same:
            with suppress(OSError):
                self._output.with_suffix(CUT_OFF_MARK).touch()
            os._exit(CUT_OFF)
