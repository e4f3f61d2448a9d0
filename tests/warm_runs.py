"""Run pytest inside tests without a cold start: fork each run from a process that has imported pytest and torch.

A cold run starts an interpreter, imports pytest, imports torch in the test module, and imports it again in a fork
server: about five seconds of CPU before its first test. Here, one warm process per test worker imports all of this
once, and every run is a fork of it. Where a run would start an interpreter for its fork server or for an xdist worker,
it uses another fork of the warm process, made before pytest starts. Plugin, ranks and process groups are real.

``Project.run_cold`` starts a new interpreter. Tests of coverage, of interpreter options and of imports need that.
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
    *("transformers.models.auto.modeling_auto", "transformers.models.llama.modeling_llama"),
)
ENVIRON = dict(os.environ)
"""The environment before any test has patched it, because tests find the processes of a run by what they put there."""
WORKERS = 4
"""Number of processes that are forked as future xdist workers, in a run that uses pytest-xdist."""


@cache
def address() -> str:
    """Start the warm process and return the path of its socket. It ends with this process."""
    folder = tempfile.mkdtemp(prefix="warm-runs-", dir="/tmp")  # the path of a Unix socket is limited to 108 bytes
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"{folder}/socket")
    listener.listen()
    ours, theirs = socket.socketpair()
    environ = ENVIRON | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *_python_path()])}
    numbers = [listener.fileno(), theirs.fileno()]
    command = [sys.executable, "-m", "tests.warm_runs", *map(str, numbers), folder]
    subprocess.Popen(command, cwd=ROOT, env=environ, pass_fds=numbers)
    listener.close()
    theirs.close()
    _OPEN.append(ours)
    return f"{folder}/socket"


_OPEN: list[socket.socket] = []
"""Sockets that the system closes when this process ends, however it ends; the warm process then ends as well."""


def run(args: Sequence[str], folder: Path, timeout: float) -> tuple[int, list[str], list[str], float]:
    """Run pytest in the current folder; return its exit status, the lines of stdout and stderr, and its seconds.

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
    """Return environment variables that make ``pytest`` and ``python -m pytest`` in bash use the warm process."""
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

    torch.use_deterministic_algorithms(False)  # imports modules that ranks need for deterministic mode
    # pytest would warn that it cannot rewrite the asserts of plugins that are imported already: of this one as a wheel,
    # and of anyio, which transformers imports.
    AssertionRewritingHook._warn_already_imported = lambda self, name: None  # type: ignore[method-assign]
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
    """Fork the requested run, wait for it, and send its pid and exit status."""
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
    """Act as a fresh process of ``python -m pytest ARGS``, and exit."""
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    _open_streams()
    inherited = {"", str(ROOT), *_python_path()}
    _set_environment({name: value for name, value in environ.items() if not name.startswith("BASH_FUNC_")}, cwd)
    after = [entry for entry in sys.path if entry not in inherited]
    sys.path[:] = [cwd, *_python_path(), *after]
    importlib.invalidate_caches()
    random.seed()
    distributed = any(arg.startswith(("-n", "--dist", "--tx")) for arg in args)
    _use_waiting([_Waiting() for _ in range(1 + WORKERS * distributed)])
    sys.argv = ["pytest", *args]
    runpy.run_module("pytest", run_name="__main__", alter_sys=True)
    sys.exit()


class _Waiting:
    """A process forked before pytest starts. It waits for a command that would need a new interpreter."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.pid = os.fork()
        if not self.pid:
            self._socket.close()
            _wait_for_command(theirs)
        theirs.close()

    def execute(self, command: str, descriptors: Mapping[int, int]) -> int:
        """Make the process run ``command`` with this environment; return its pid.

        ``descriptors`` maps descriptors of this process to their numbers in the other one.
        """
        there = list(descriptors.values())
        request = {"command": command, "descriptors": there, "environ": dict(os.environ), "cwd": os.getcwd()}
        send(self._socket, request, list(descriptors))
        self._socket.close()
        return self.pid


def _use_waiting(waiting: list[_Waiting]) -> None:
    """Patch the start of processes: a fork server or an xdist worker uses a process of ``waiting``, if one is left.

    Otherwise, and in forks of this process, a new interpreter starts as usual.
    """
    owner = os.getpid()
    spawn, execute = util.spawnv_passfds, subprocess.Popen._execute_child  # type: ignore[attr-defined]

    def spawnv_passfds(path: bytes, args: Sequence[Any], descriptors: Sequence[int]) -> int:
        if waiting and os.getpid() == owner and "multiprocessing.forkserver" in str(args[-1]):
            return waiting.pop().execute(str(args[-1]), {one: one for one in descriptors})
        return int(spawn(path, args, descriptors))

    def execute_child(self: Any, args: Any, *given: Any) -> None:
        if not (waiting and os.getpid() == owner and list(args)[-1:] == [popen_bootstrapline]):
            execute(self, args, *given)
            return
        stdin, stdout = given[9], given[12]
        self.pid = waiting.pop().execute(popen_bootstrapline, {stdin: 0, stdout: 1})
        self._child_created = True
        os.close(stdin)
        os.close(stdout)

    util.spawnv_passfds = spawnv_passfds
    subprocess.Popen._execute_child = execute_child  # type: ignore[attr-defined]


def _wait_for_command(parent: socket.socket) -> NoReturn:
    try:
        asked, received = receive(parent)
    except EOFError:
        os._exit(0)  # the run did not need it
    wanted: Any = asked["descriptors"]
    # Copy them above all wanted numbers first, so that no copy overwrites a descriptor that is still needed.
    lowest = 1 + max([*wanted, *received, parent.fileno()])
    for place, descriptor in enumerate(received):
        os.dup2(descriptor, lowest + place)
    for place, number in enumerate(wanted):
        os.dup2(lowest + place, number)
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):  # the descriptor that os.listdir() used is closed already
            if int(name) not in {0, 1, 2, *wanted}:
                os.close(int(name))
    _open_streams()
    _set_environment(asked["environ"], asked["cwd"])  # type: ignore[arg-type]
    sys.argv = ["-c"]
    if asked["command"] == popen_bootstrapline:
        _use_waiting([_Waiting()])  # a worker starts a fork server of its own
    exec(str(asked["command"]), {"__name__": "__main__"})
    sys.exit()


def _set_environment(environ: Mapping[str, str], cwd: str) -> None:
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(cwd)
    tempfile.tempdir = None  # importing torch computed it from another environment


def _open_streams() -> None:
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", errors="backslashreplace", closefd=False)  # noqa: SIM115


if __name__ == "__main__":
    listening, ends = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    _serve(listening, ends, sys.argv[3])
