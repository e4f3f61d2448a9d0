"""Inner pytest runs without their cold start: each is forked from a process that has imported pytest and torch.

An inner run pays for an interpreter, pytest, torch in the test module, and a fork server that imports torch again:
about five seconds of CPU before its first test. Here one process per test worker imports all of that once, and every
inner run is a fork of it. Its fork server, and its workers where it uses pytest-xdist, are forks of the same process,
made before pytest starts, in place of new interpreters. Everything else is real: plugin, ranks, process groups.

``Project.run_cold`` starts an interpreter: for coverage, interpreter options, and what the pytest process imports.
"""

from __future__ import annotations

import array
import gc
import importlib
import json
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from multiprocessing import util
from pathlib import Path
from typing import Any, NoReturn

from execnet.gateway_io import popen_bootstrapline

ROOT = Path(__file__).parents[1]
IMPORTED = (
    *("torch", "torch.distributed", "torch.distributed.tensor", "torch.distributed.fsdp", "cloudpickle"),
    *("torch.distributed.checkpoint", "torch.distributed.checkpoint.state_dict", "torch._inductor.config"),
    *("safetensors.torch", "pytest", "pytest_fsdp_meta.plugin.hooks", "pytest_fsdp_meta.plugin.spmd_rank"),
    *("pytest_fsdp_meta.plugin.loader_option", "pytest_fsdp_meta.reports.page"),
)
WORKERS = 4
"""Processes that wait to become workers of pytest-xdist, in a run that distributes its tests."""
LARGEST = 2**20
"""Bytes of one request: arguments and environment of a run."""


class Zygote:
    """The process that inner runs are forked from, as its user sees it: one run at a time."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "tests.warm_runs", str(theirs.fileno())]
        environ = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *_python_path()])}
        self._process = subprocess.Popen(command, cwd=ROOT, env=environ, pass_fds=[theirs.fileno()])
        theirs.close()

    def run(self, args: Sequence[str], out: Path, err: Path, timeout: float) -> int:
        """Run ``pytest ARGS`` here, with this environment; return its exit status, negative for a signal.

        Raises subprocess.TimeoutExpired, and kills the run, after ``timeout`` seconds.
        """
        request = {"args": list(args), "cwd": os.getcwd(), "environ": dict(os.environ), "files": [str(out), str(err)]}
        self._socket.settimeout(timeout)
        self._socket.send(json.dumps(request).encode())
        pid = 0
        try:
            pid = int(self._receive())
            return os.waitstatus_to_exitcode(int(self._receive()))
        except TimeoutError:
            if pid:
                os.kill(pid, signal.SIGKILL)
            self._socket.settimeout(None)
            self._receive()
            raise subprocess.TimeoutExpired(["pytest", *args], timeout) from None

    def _receive(self) -> bytes:
        message = self._socket.recv(LARGEST)
        assert message, "the process that inner runs are forked from has ended"
        return message


@cache
def zygote() -> Zygote:
    """Return the one of this test worker. It ends when this process ends, because its socket is closed then."""
    return Zygote()


def _python_path() -> list[str]:
    return [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]


def _serve(requests: socket.socket) -> None:
    for name in IMPORTED:
        importlib.import_module(name)
    from _pytest.config import default_plugins

    for name in default_plugins:
        importlib.import_module(f"_pytest.{name}")
    import torch

    torch.use_deterministic_algorithms(False)  # imports what ranks need for it
    gc.freeze()
    while message := requests.recv(LARGEST):
        pid = os.fork()
        if not pid:
            requests.close()
            _run(**json.loads(message))
        requests.send(str(pid).encode())
        requests.send(str(os.waitpid(pid, 0)[1]).encode())


def _run(args: list[str], cwd: str, environ: dict[str, str], files: list[str]) -> NoReturn:
    """Be a fresh ``python -m pytest ARGS``, and end."""
    for number, (file, flags) in enumerate(
        [(os.devnull, os.O_RDONLY), *((one, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) for one in files)]
    ):
        opened = os.open(file, flags, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    _open_streams()
    inherited = {"", str(ROOT), *_python_path()}
    _move(environ, cwd)
    after = [entry for entry in sys.path if entry not in inherited]
    sys.path[:] = [cwd, *_python_path(), *after]
    importlib.invalidate_caches()
    random.seed()
    _take_over([_Waiting() for _ in range(1 + WORKERS * any(arg.startswith(("-n", "--dist", "--tx")) for arg in args))])
    sys.argv = ["pytest", *args]
    runpy.run_module("pytest", run_name="__main__", alter_sys=True)
    sys.exit()


class _Waiting:
    """A fork of this process from before pytest began, which becomes the process that the run would start cold."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.pid = os.fork()
        if not self.pid:
            self._socket.close()
            _become_what_is_asked_for(theirs)
        theirs.close()

    def become(self, command: str, descriptors: Mapping[int, int]) -> int:
        """Make it run ``command`` with these descriptors (here -> there) and this environment; return its pid."""
        request = {
            "command": command,
            "descriptors": list(descriptors.values()),
            "environ": dict(os.environ),
            "cwd": os.getcwd(),
        }
        text = json.dumps(request).encode()
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
        self._socket.sendmsg([len(text).to_bytes(8, "little")], [rights])
        self._socket.sendall(text)
        self._socket.close()
        return self.pid


def _take_over(waiting: list[_Waiting]) -> None:
    """Give this process one of ``waiting`` where it would start an interpreter for a fork server or an xdist worker.

    Where none is left, or in a fork of this process, a new interpreter starts as always.
    """
    owner = os.getpid()
    spawn, execute = util.spawnv_passfds, subprocess.Popen._execute_child  # type: ignore[attr-defined]

    def spawnv_passfds(path: bytes, args: Sequence[Any], descriptors: Sequence[int]) -> int:
        if waiting and os.getpid() == owner and "multiprocessing.forkserver" in str(args[-1]):
            return waiting.pop().become(str(args[-1]), {one: one for one in descriptors})
        return int(spawn(path, args, descriptors))

    def execute_child(self: Any, args: Any, *given: Any) -> None:
        if not (waiting and os.getpid() == owner and list(args)[-1:] == [popen_bootstrapline]):
            execute(self, args, *given)
            return
        stdin, stdout = given[9], given[12]
        self.pid = waiting.pop().become(popen_bootstrapline, {stdin: 0, stdout: 1})
        self._child_created = True
        os.close(stdin)
        os.close(stdout)

    util.spawnv_passfds = spawnv_passfds
    subprocess.Popen._execute_child = execute_child  # type: ignore[attr-defined]


def _become_what_is_asked_for(parent: socket.socket) -> NoReturn:
    header, rights, _, _ = parent.recvmsg(8, socket.CMSG_SPACE(16 * array.array("i").itemsize))
    if not header:
        os._exit(0)  # the run did not need it
    received = array.array("i", rights[0][2])
    text = b""
    while len(text) < int.from_bytes(header, "little"):
        text += parent.recv(LARGEST)
    asked = json.loads(text)
    # First out of the way of all numbers that are wanted, then to these numbers.
    lowest = 1 + max([*asked["descriptors"], *received, parent.fileno()])
    for place, descriptor in enumerate(received):
        os.dup2(descriptor, lowest + place)
    for place, wanted in enumerate(asked["descriptors"]):
        os.dup2(lowest + place, wanted)
    keep = {0, 1, 2, *asked["descriptors"]}
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):  # that of the listing itself is closed already
            if int(name) not in keep:
                os.close(int(name))
    _open_streams()
    _move(asked["environ"], asked["cwd"])
    sys.argv = ["-c"]
    if asked["command"] == popen_bootstrapline:
        _take_over([_Waiting()])  # a worker starts a fork server of its own
    exec(asked["command"], {"__name__": "__main__"})
    sys.exit()


def _move(environ: Mapping[str, str], cwd: str) -> None:
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(cwd)
    tempfile.tempdir = None  # found out when torch was imported, from another environment


def _open_streams() -> None:
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", errors="backslashreplace", closefd=False)  # noqa: SIM115


def run(args: Sequence[str], folder: Path, timeout: float) -> tuple[int, list[str], list[str], float]:
    """Run pytest in the current folder; return its exit status, the lines that it wrote, and the seconds it took."""
    out, err = folder / "stdout", folder / "stderr"
    began = time.monotonic()
    status = zygote().run(args, out, err, timeout)
    seconds = time.monotonic() - began
    lines = [file.read_text("utf-8", errors="replace").splitlines() for file in (out, err)]
    return status, lines[0], lines[1], seconds


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
