"""Helpers for tests of worlds: one fork server for all tests, and checks that no process is left over."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from pytest_fsdp_meta.trial import ON_RANKS
from pytest_fsdp_meta.worlds import (
    DEFAULT_MESH_DIM,
    ForkServerEngine,
    Listener,
    Sources,
    World,
    WorldError,
    WorldSpec,
    current,
)

ROOT = Path(__file__).parents[1]
SOON = 20.0
"""Seconds within which a failure must be reported, also on a busy machine; torch's own timeouts start at 300."""


TEST_MODULES = ("pytest", "tests.world_help")
"""What test modules import: each rank that gets a function of one imports the module."""
LOADER_MODULES = (
    *(
        "transformers.models.llama.modeling_llama",
        "fixtures.conforming",
        "fixtures.forms_registry",
        "fixtures.localised",
    ),
    *("pytest_fsdp_meta.reports.terminal", "tests.checks.evidence_factory"),
)


@cache
def preload() -> ForkServerEngine:
    """Return the engine that all tests share."""
    return ForkServerEngine(Sources(tuple(dict.fromkeys((str(ROOT), *sys.path)))), TEST_MODULES)


@cache
def trial_preload() -> ForkServerEngine:
    """Return an engine that has imported the observers and loaders, as a trial's has, so that ranks need not."""
    return ForkServerEngine(preload().sources, [*ON_RANKS, *TEST_MODULES, *LOADER_MODULES])


def world_of(size: int, label: str = "", listener: Listener | None = None, **given: Any) -> World:
    """Return a world that has not been started; ``given`` are fields of its ``WorldSpec``."""
    given = {"mesh": {DEFAULT_MESH_DIM: size}, "timeout": 60.0} | given
    return World(WorldSpec(**given), preload(), label, listener=listener)


def world(size: int = 2, **given: Any) -> World:
    """Return a world that has been started."""
    started = world_of(size, **given)
    started.start()
    return started


def on_rank(chosen: int, act: Callable[[], object]) -> Callable[[], None]:
    """Return a function that calls ``act`` on one rank, while the others wait for it in a collective."""

    def function() -> None:
        import torch
        import torch.distributed as dist

        dist.barrier()
        if dist.get_rank() == chosen:
            act()
        dist.all_reduce(torch.ones(1))

    return function


def fails(world: World, function: Any, *args: Any) -> WorldError:
    """Return the error of a call, which has to come soon and to leave no rank behind."""
    pids = world.run(os.getpid)
    began = time.monotonic()
    with pytest.raises(WorldError) as caught:
        world.run(function, *args)
    assert time.monotonic() - began < SOON
    assert not world.alive
    assert_gone(pids)
    return caught.value


DEFAULT_SIGNALS = """
import signal
for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
    signal.signal(number, signal.SIG_DFL)
"""
"""Restores signals, because a process inherits ignored ones: under nohup or in the background of a shell."""


def run_script(text: str, folder: Path, **environ: str) -> subprocess.Popen[str]:
    """Start a Python process that runs this text, to be the parent of worlds."""
    script = folder / "script.py"
    script.write_text(DEFAULT_SIGNALS + text, encoding="utf-8")
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONPATH": path} | environ,
    )


def is_running(pid: int) -> bool:
    """Return whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def assert_gone(pids: Iterable[int], seconds: float = SOON) -> None:
    """Wait until these processes have ended; fail if that takes too long."""
    deadline = time.monotonic() + seconds
    while left := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.02)


def processes_with(word: str, value: str = "") -> list[int]:
    """Return the running processes that were started with this environment variable."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if f"{word}={value}".encode() in entry.read_bytes():
                found.append(int(entry.parent.name))
    return [pid for pid in found if is_running(pid)]


@contextmanager
def ended_at_last(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """Kill the process at the end, whatever happens in the test."""
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGKILL)
        process.wait(10)
        assert process.stdout is not None
        process.stdout.close()


def me() -> tuple[int, int]:
    """Return rank and world size."""
    rank = current()
    return rank.rank, rank.world_size


def environment(names: Iterable[str]) -> Mapping[str, str | None]:
    return {name: os.environ.get(name) for name in names}


def listening() -> list[str]:
    """Return the addresses at which this process accepts connections from the network."""
    found = []
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):  # not a socket, or the descriptor of this listing
            one = socket.socket(fileno=int(name))
            if one.family != socket.AF_UNIX and one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found.append(str(one.getsockname()[0]))
            one.detach()
    return sorted(found)


def total(value: float) -> float:
    """Return the sum of value x rank over all ranks."""
    import torch
    import torch.distributed as dist

    tensor = torch.tensor(value * dist.get_rank())
    dist.all_reduce(tensor)
    return tensor.item()


def fill(folder: str) -> None:
    """Fill the disk that has this folder."""
    with open(folder + "/fill", "ab", buffering=0) as file:
        for size in (2**16, 1):
            with suppress(OSError):
                while True:
                    file.write(b"x" * size)
