"""On each machine of a cluster: starts ranks for a world whose parent is elsewhere, and passes on what both sides say.

A connection is the life of one rank. When it breaks, because the parent has gone, its rank is ended; when the host
itself goes, its ranks lose their parent and end by themselves, as they do on one machine.
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

from pytest_fsdp_meta.worlds.diagnosis import disk
from pytest_fsdp_meta.worlds.failures import Misuse
from pytest_fsdp_meta.worlds.local.engine import ForkServerEngine
from pytest_fsdp_meta.worlds.local.member import LocalMember
from pytest_fsdp_meta.worlds.rank.main import Assignment
from pytest_fsdp_meta.worlds.ray import wire
from pytest_fsdp_meta.worlds.system import messages, temp_folders
from pytest_fsdp_meta.worlds.system.output import read

OF_THE_NODE = ("HOME", "HOSTNAME", "LD_LIBRARY_PATH", "PATH", "TMPDIR")
"""Environment variables that a rank has from its machine; all others it has from the parent."""
PREFIXES_OF_THE_NODE = ("NCCL_", "GLOO_")
GLANCE = 0.5
LINGER = 60.0
"""Seconds for which the parent may take the last message of a rank that has ended."""


@dataclass(frozen=True)
class LaunchRequest:
    """What the parent says first."""

    task: Assignment
    shared: Sequence[str] = ()
    """Folders of the parent's that this machine must see."""
    leftovers: Sequence[str] = ()
    """Folders that go when the parent is killed."""


@dataclass(frozen=True)
class Reading:
    """What the parent says first where it only wants to read a file of a rank of its, from place to place."""

    path: str


class Host:
    """Serves parents that have ``key``; each of its connections is served by a thread of its own."""

    def __init__(self, preload: ForkServerEngine, address: str, key: bytes) -> None:
        self.address = address
        self._preload = preload
        self._key = key
        self._gate = wire.Gate(address)
        self.port = self._gate.port
        preload.start()
        threading.Thread(target=self._serve, name="host", daemon=True).start()

    def _serve(self) -> None:
        while True:
            knocking = self._gate.wait()
            threading.Thread(target=self._admit, args=(knocking,), name="host-rank", daemon=True).start()

    def _admit(self, knocking: socket.socket) -> None:
        try:
            parent = wire.admit(knocking, self._key)
        except OSError:
            return  # it was somebody else, who has been told nothing
        with parent, suppress(OSError, EOFError):  # the parent has gone, and with it who could be told
            first = pickle.loads(parent.recv_bytes())
            if isinstance(first, Reading):
                while True:
                    parent.send_bytes(read(Path(first.path), int(parent.recv_bytes())))
            self._keep(parent, first)

    def _keep(self, parent: Connection, order: LaunchRequest) -> None:
        with ExitStack() as stack:
            try:
                folder = Path(tempfile.mkdtemp(prefix=temp_folders.prefix("world")))
                stack.callback(shutil.rmtree, folder, ignore_errors=True)
                task = settle_in(order, folder, self.address)
                self._preload.ready()
                member = self._preload.launch_rank(task)
            except Exception as error:
                stack.close()  # before it is told: who has heard it may look at what is left
                why = f"could not start a rank: {disk.hint(tempfile.gettempdir(), error) or describe(error)}"
                _tell(parent, "refused", str(error) if isinstance(error, Misuse) else f"node {self.address} {why}")
                return
            relay = _Relay(parent, member, folder)
            stack.callback(relay.tidy_up, order.leftovers)
            stack.callback(_end, member)  # before the others, so that it writes nothing more
            _tell(parent, "started", time.monotonic(), str(task.output))
            relay.run()


def _end(member: LocalMember) -> None:
    member.kill()
    member.join(5.0)
    member.release()


def describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def settle_in(order: LaunchRequest, folder: Path, address: str) -> Assignment:
    """The task as it is on this machine. Raises Misuse where the machine has not what the ranks of the parent need."""
    task = order.task
    here = f"node {address}"
    if not os.path.isdir(task.cwd):
        raise Misuse(
            f"{here} has no folder {task.cwd}, where pytest runs; every node must have the project at this path"
        )
    for needed in order.shared:
        if not os.path.isdir(needed):
            raise Misuse(
                f"{here} does not see {needed}, where the ranks of a loader meet their reference; set TMPDIR to a "
                "folder that all nodes share"
            )
    own = {name: os.environ.get(name) for name in {*os.environ, *task.environ} if _is_of_the_node(name)}
    environ = {name: value for name, value in (task.environ | own).items() if value is not None}
    leftovers = str(folder), *order.shared
    return replace(task, folder=str(folder), leftovers=leftovers, environ=environ)


def _is_of_the_node(name: str) -> bool:
    return name in OF_THE_NODE or name.startswith(PREFIXES_OF_THE_NODE)


@dataclass
class _Relay:
    """Between a parent and a rank of this machine."""

    parent: Connection
    member: LocalMember
    folder: Path
    dismissed: bool = False
    """Whether the parent has ended the rank itself, or knows how it ended."""

    def tidy_up(self, leftovers: Sequence[str]) -> None:
        """Removes what a parent removes that ends as it should."""
        for folder in () if self.dismissed else leftovers:
            shutil.rmtree(folder, ignore_errors=True)

    def run(self) -> None:
        """Until the rank has ended and the parent has been told, or the parent has gone."""
        while not self._pass_on():
            if self.parent in connection.wait([self.parent, *self.member.handles], GLANCE):
                self._obey(pickle.loads(self.parent.recv_bytes()))
        self.dismissed = True
        _tell(self.parent, "ended", self.member.ending(), self.member.written())
        deadline = time.monotonic() + LINGER
        # The parent hangs up when it has read that: a connection closed from here could take it along.
        while self.parent.poll(max(0.0, deadline - time.monotonic())):
            self.parent.recv_bytes()

    def _pass_on(self) -> bool:
        """What the rank has said; whether it has ended."""
        while self.member.has_ended or connection.wait(self.member.handles, 0):
            packed = self.member.hear_packed()
            if packed is None:
                return True
            self.parent.send_bytes(b"said" + packed)
        return False

    def _obey(self, command: tuple[Any, ...]) -> None:
        name, *given = command
        if name == "send":
            self.member.send(messages.enclose(given[0], self.folder / "call"))
        elif name == "kill":
            self.dismissed = True
            self.member.kill()
        elif name == "ask_stack":
            self.member.ask_stack()
        elif name == "stack":
            _tell(self.parent, "answer", self.member.stack(time.monotonic() + given[0]))
        elif name == "written":
            _tell(self.parent, "answer", self.member.written())
        else:
            raise AssertionError(command)


def _tell(parent: Connection, *message: Any) -> None:
    parent.send_bytes(b"told" + pickle.dumps(message))
