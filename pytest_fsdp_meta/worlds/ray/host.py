"""The process on each machine of a cluster that starts ranks for a world whose parent is on another machine.

Each connection belongs to one rank and relays messages between it and the parent. When the connection breaks, because
the parent has ended, the host ends the rank. When the host itself ends, its ranks lose their parent process and end by
themselves, as ranks of a local world do.
"""

from __future__ import annotations

import os
import pickle
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from pytest_fsdp_meta.worlds.engine import make_note
from pytest_fsdp_meta.worlds.failures import Misuse
from pytest_fsdp_meta.worlds.local.engine import ForkServerEngine
from pytest_fsdp_meta.worlds.local.member import LocalMember
from pytest_fsdp_meta.worlds.rank.main import Assignment
from pytest_fsdp_meta.worlds.rank.rendezvous import listen
from pytest_fsdp_meta.worlds.ray import wire
from pytest_fsdp_meta.worlds.system import processes
from pytest_fsdp_meta.worlds.system.output import read

NODE_VARIABLES = ("HOME", "HOSTNAME", "LD_LIBRARY_PATH", "PATH", "TMPDIR")
"""Environment variables that a rank gets from its own machine; it gets all others from the parent."""
NODE_PREFIXES = ("NCCL_", "GLOO_")
"""Prefixes of more such variables."""
FROM_RANK = b"rank"
"""Prefix of a message to the parent that contains a pickled message of the rank."""
FROM_HOST = b"host"
"""Prefix of a message to the parent that contains a pickled message of the host itself."""
POLL_INTERVAL = 0.5
"""Seconds between two looks at whether a rank has ended, for an end that no pipe signals."""
LINGER = 60.0
"""Seconds that the parent has to receive the last message of a rank that has ended."""


@dataclass(frozen=True)
class LaunchRequest:
    """The first message of a parent that wants a rank."""

    task: Assignment
    shared: Sequence[str] = ()
    """Folders of the parent that this machine must see."""
    leftovers: Sequence[str] = ()
    """Folders to remove when the parent is killed."""


class Host:
    """Serves parents that have ``key``, each connection in a thread of its own."""

    def __init__(self, engine: ForkServerEngine, address: str, key: bytes) -> None:
        self.address = address
        self._engine = engine
        self._key = key
        self._socket = listen(address)
        self.port = int(self._socket.getsockname()[1])
        engine.start()
        threading.Thread(target=self._accept, name="host", daemon=True).start()

    def _accept(self) -> None:
        while True:
            accepted, _ = self._socket.accept()
            threading.Thread(target=self._serve, args=(accepted,), name="host-rank", daemon=True).start()

    def _serve(self, accepted: socket.socket) -> None:
        try:
            parent = wire.authenticate(accepted, self._key)
        except OSError:
            return  # not one of our parents
        with parent, suppress(OSError, EOFError):  # the parent has ended
            request = pickle.loads(parent.recv_bytes())
            if isinstance(request, Path):  # of a file of one of its ranks, which it wants to read; offsets follow
                while True:
                    parent.send_bytes(read(request, int(parent.recv_bytes())))
            self._run_rank(parent, request)

    def _run_rank(self, parent: Connection, request: LaunchRequest) -> None:
        with ExitStack() as stack:
            try:
                folder = Path(tempfile.mkdtemp(prefix=processes.folder_prefix("world")))
                stack.callback(shutil.rmtree, folder, ignore_errors=True)
                task = localize(request, folder, self.address)
                self._engine.ready()
                member = self._engine.launch_rank(task)
            except Exception as error:
                stack.close()  # before the message: once it has arrived, nothing must be left here
                why = f"node {self.address} could not start a rank: {type(error).__name__}: {error}"
                _send(parent, "refused", str(error) if isinstance(error, Misuse) else why)
                return
            relay = _Relay(parent, member, folder)
            stack.callback(relay.remove_leftovers, request.leftovers)
            stack.callback(_end, member)  # runs before the other callbacks, so that the rank writes nothing after them
            _send(parent, "started", time.monotonic(), str(task.output))
            relay.run()


def _end(member: LocalMember) -> None:
    member.kill()
    member.join(5.0)
    member.release()


def localize(request: LaunchRequest, folder: Path, address: str) -> Assignment:
    """Return the requested task with the folders and the environment of this machine.

    Raises Misuse if the machine lacks a folder that the rank needs.
    """
    task = request.task
    node = f"node {address}"
    if not os.path.isdir(task.cwd):
        raise Misuse(f"{node} has no folder {task.cwd}, where pytest runs; every node needs the project at this path")
    for shared in request.shared:
        if not os.path.isdir(shared):
            raise Misuse(
                f"{node} cannot see {shared}, where the reference is stored; set TMPDIR to a folder that all nodes "
                "share"
            )
    names = {name for name in {*os.environ, *task.environ} if name in NODE_VARIABLES or name.startswith(NODE_PREFIXES)}
    own = {name: os.environ.get(name) for name in names}
    environ = {name: value for name, value in (task.environ | own).items() if value is not None}
    leftovers = str(folder), *request.shared
    return replace(task, folder=str(folder), leftovers=leftovers, environ=environ)


@dataclass
class _Relay:
    """Passes messages between a parent and a rank on this machine."""

    parent: Connection
    member: LocalMember
    folder: Path
    parent_knows: bool = False
    """Whether the parent has ended the rank itself, or knows how it ended."""

    def remove_leftovers(self, leftovers: Sequence[str]) -> None:
        """Remove the parent's folders, unless the parent is there to remove them itself."""
        for folder in () if self.parent_knows else leftovers:
            shutil.rmtree(folder, ignore_errors=True)

    def run(self) -> None:
        """Relay until the rank has ended and the parent knows. Raises OSError or EOFError if the parent ends."""
        while not self._forward():
            if self.parent in connection.wait([self.parent, *self.member.handles], POLL_INTERVAL):
                self._execute(pickle.loads(self.parent.recv_bytes()))
        self.parent_knows = True
        _send(self.parent, "ended", self.member.ending(), self.member.written())
        deadline = time.monotonic() + LINGER
        # The parent closes the connection when it has read that; closing it here could discard the message.
        while self.parent.poll(max(0.0, deadline - time.monotonic())):
            self.parent.recv_bytes()

    def _forward(self) -> bool:
        """Forward the rank's messages to the parent; return whether the rank has ended."""
        while self.member.has_ended or connection.wait(self.member.handles, 0):
            packed = self.member.receive_packed()
            if packed is None:
                return True
            self.parent.send_bytes(FROM_RANK + packed)
        return False

    def _execute(self, command: tuple[Any, ...]) -> None:
        name, *arguments = command
        if name == "send":
            self.member.send(make_note(arguments[0], self.folder / "call"))
        elif name == "kill":
            self.parent_knows = True
            self.member.kill()
        elif name == "request_stack":
            self.member.request_stack()
        elif name == "is_stopped":
            _send(self.parent, "answer", self.member.is_stopped)
        elif name == "stack":
            _send(self.parent, "answer", self.member.stack(time.monotonic() + arguments[0]))
        elif name == "written":
            _send(self.parent, "answer", self.member.written())
        else:
            raise AssertionError(command)


def _send(parent: Connection, *message: Any) -> None:
    parent.send_bytes(FROM_HOST + pickle.dumps(message))
