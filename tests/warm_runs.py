"""Inner pytest runs without their cold start: each is forked from a process that has imported pytest and torch.

An inner run pays for an interpreter, pytest, torch in the test module, and a fork server that imports torch again:
about five seconds of CPU before its first test. Here one process per test worker imports all of that once, and every
inner run is a fork of it. Its fork server, and its workers where it uses pytest-xdist, are forks of the same process,
made before pytest starts, in place of new interpreters. Everything else is real: plugin, ranks, process groups.

``Project.run_cold`` starts an interpreter: for coverage, interpreter options, and what the pytest process imports.
"""

from __future__ import annotations

import gc
import importlib
import os
import random
import runpy
import select
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

from _pytest.assertion.rewrite import AssertionRewritingHook
from execnet.gateway_io import popen_bootstrapline

from tests.warm_client import ADDRESS, receive, run_pytest, send

ROOT = Path(__file__).parents[1]
CLIENT = Path(__file__).with_name("warm_client.py")
IMPORTED = (
    *("torch", "torch.distributed", "torch.distributed.tensor", "torch.distributed.fsdp", "cloudpickle"),
    *("torch.distributed.checkpoint", "torch.distributed.checkpoint.state_dict", "torch._inductor.config"),
    *("safetensors.torch", "pytest", "pytest_fsdp_meta.plugin.hooks", "pytest_fsdp_meta.plugin.spmd_rank"),
    *("pytest_fsdp_meta.plugin.loader_option", "pytest_fsdp_meta.reports.page"),
)
WORKERS = 4
"""Processes that wait to become workers of pytest-xdist, in a run that distributes its tests."""


@cache
def address() -> str:
    """Start the process that runs are forked from, and return its socket. It ends with this process."""
    folder = tempfile.mkdtemp(prefix="warm-runs-", dir="/tmp")  # a socket's path has room for 108 letters
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"{folder}/socket")
    listener.listen()
    ours, theirs = socket.socketpair()
    environ = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *_python_path()])}
    numbers = [listener.fileno(), theirs.fileno()]
    command = [sys.executable, "-m", "tests.warm_runs", *map(str, numbers), folder]
    subprocess.Popen(command, cwd=ROOT, env=environ, pass_fds=numbers)
    listener.close()
    theirs.close()
    _OPEN.append(ours)
    return f"{folder}/socket"


_OPEN: list[socket.socket] = []
"""Closed by the system when this process ends, however it ends."""


def run(args: Sequence[str], folder: Path, timeout: float) -> tuple[int, list[str], list[str], float]:
    """Run pytest in the current folder; return its exit status, the lines that it wrote, and the seconds it took.

    Raises TimeoutError after ``timeout`` seconds.
    """
    out, err = folder / "stdout", folder / "stderr"
    began = time.monotonic()
    with open(os.devnull) as stdin, out.open("w") as stdout, err.open("w") as stderr:
        status = run_pytest(address(), args, [one.fileno() for one in (stdin, stdout, stderr)], timeout)
    seconds = time.monotonic() - began
    lines = [file.read_text("utf-8", errors="replace").splitlines() for file in (out, err)]
    return status, lines[0], lines[1], seconds


def shell_functions() -> dict[str, str]:
    """Return an environment in which ``pytest`` and ``python -m pytest``, typed into bash, are runs from here."""
    client = f'"{sys.executable}" -IS "{CLIENT}"'
    return {
        ADDRESS: address(),
        "BASH_FUNC_pytest%%": f'() {{ {client} "$@"; }}',
        "BASH_FUNC_python%%": f'() {{ if [ "$1 $2" = "-m pytest" ]; then {client} "${{@:3}}"; '
        'else command python "$@"; fi; }',
    }


def _python_path() -> list[str]:
    return [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]


def _serve(listener: socket.socket, parent: socket.socket, folder: str) -> None:
    for name in IMPORTED:
        importlib.import_module(name)
    from _pytest.config import default_plugins

    for name in default_plugins:
        importlib.import_module(f"_pytest.{name}")
    import torch

    torch.use_deterministic_algorithms(False)  # imports what ranks need for it
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while parent not in select.select([listener, parent], [], [])[0]:
        connection, _ = listener.accept()
        if not os.fork():
            listener.close()
            parent.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            _answer(connection)
        connection.close()
    os.unlink(f"{folder}/socket")
    os.rmdir(folder)


def _answer(connection: socket.socket) -> None:
    """Fork the run, and wait for it in this process."""
    request, descriptors = receive(connection)
    pid = os.fork()
    if not pid:
        connection.close()
        _run(descriptors, **request)  # type: ignore[arg-type]
    for one in descriptors:
        os.close(one)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(BrokenPipeError):
        connection.sendall(f"{pid}\n".encode())
        connection.sendall(f"{os.waitpid(pid, 0)[1]}\n".encode())
    os._exit(0)


def _run(descriptors: Sequence[int], args: list[str], cwd: str, environ: dict[str, str]) -> NoReturn:
    """Be a fresh ``python -m pytest ARGS``, and end."""
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    _open_streams()
    inherited = {"", str(ROOT), *_python_path()}
    _move({name: value for name, value in environ.items() if not name.startswith("BASH_FUNC_")}, cwd)
    after = [entry for entry in sys.path if entry not in inherited]
    sys.path[:] = [cwd, *_python_path(), *after]
    importlib.invalidate_caches()
    random.seed()
    distributed = any(arg.startswith(("-n", "--dist", "--tx")) for arg in args)
    _take_over([_Waiting() for _ in range(1 + WORKERS * distributed)])
    # The plugin was imported before pytest could rewrite its asserts, of which pytest would warn if it is a wheel.
    AssertionRewritingHook._warn_already_imported = lambda self, name: None  # type: ignore[method-assign]
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
        there = list(descriptors.values())
        request = {"command": command, "descriptors": there, "environ": dict(os.environ), "cwd": os.getcwd()}
        send(self._socket, request, list(descriptors))
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
    try:
        asked, received = receive(parent)
    except EOFError:
        os._exit(0)  # the run did not need it
    wanted: Any = asked["descriptors"]
    # First out of the way of all numbers that are wanted, then to these numbers.
    lowest = 1 + max([*wanted, *received, parent.fileno()])
    for place, descriptor in enumerate(received):
        os.dup2(descriptor, lowest + place)
    for place, number in enumerate(wanted):
        os.dup2(lowest + place, number)
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):  # that of the listing itself is closed already
            if int(name) not in {0, 1, 2, *wanted}:
                os.close(int(name))
    _open_streams()
    _move(asked["environ"], asked["cwd"])  # type: ignore[arg-type]
    sys.argv = ["-c"]
    if asked["command"] == popen_bootstrapline:
        _take_over([_Waiting()])  # a worker starts a fork server of its own
    exec(str(asked["command"]), {"__name__": "__main__"})
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


if __name__ == "__main__":
    listening, ends = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    _serve(listening, ends, sys.argv[3])
