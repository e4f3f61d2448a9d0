"""What the tests of worlds share: one fork server for all of them, and a look at which processes are left."""

from __future__ import annotations

import os
import signal
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
"""Seconds within which a failure is known, with room for a busy machine; the time-outs of torch begin at 300."""


@cache
def preload() -> ForkServerEngine:
    return ForkServerEngine(Sources(tuple(dict.fromkeys((str(ROOT), *sys.path)))))


@cache
def trial_preload() -> ForkServerEngine:
    """As a trial's worlds have it, so that not every rank imports the observers anew."""
    return ForkServerEngine(preload().sources, ON_RANKS)


def world_of(size: int, label: str = "", listener: Listener | None = None, **given: Any) -> World:
    given = {"mesh": {DEFAULT_MESH_DIM: size}, "timeout": 60.0} | given
    return World(WorldSpec(**given), preload(), label, listener=listener)


def world(size: int = 2, **given: Any) -> World:
    """One that has been started."""
    started = world_of(size, **given)
    started.start()
    return started


def on_rank(chosen: int, act: Callable[[], object]) -> Callable[[], None]:
    """``act`` on one rank, while the others wait for it in a collective."""

    def function() -> None:
        import torch
        import torch.distributed as dist

        dist.barrier()
        if dist.get_rank() == chosen:
            act()
        dist.all_reduce(torch.ones(1))

    return function


def fails(world: World, function: Any, *args: Any) -> WorldError:
    """The error of a call that fails soon and leaves no rank behind."""
    pids = world.run(os.getpid)
    began = time.monotonic()
    with pytest.raises(WorldError) as caught:
        world.run(function, *args)
    assert time.monotonic() - began < SOON
    assert not world.alive
    assert_gone(pids)
    return caught.value


HEEDING = """
import signal
for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
    signal.signal(number, signal.SIG_DFL)
"""
"""A process inherits what its parent ignores, which is some of them under nohup and in the background of a shell."""


def run_script(text: str, folder: Path, **environ: str) -> subprocess.Popen[str]:
    """A Python process of its own, as the parent of worlds."""
    script = folder / "script.py"
    script.write_text(HEEDING + text, encoding="utf-8")
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONPATH": path} | environ,
    )


def is_running(pid: int) -> bool:
    """Zombies do not run: who collects them is not a world's business."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def assert_gone(pids: Iterable[int], seconds: float = SOON) -> None:
    deadline = time.monotonic() + seconds
    while left := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.02)


def processes_with(word: str, value: str = "") -> list[int]:
    """Those that run and carry this in the environment that they were started with."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if f"{word}={value}".encode() in entry.read_bytes():
                found.append(int(entry.parent.name))
    return [pid for pid in found if is_running(pid)]


@contextmanager
def ended_at_last(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """Whatever the test finds, the process is not left behind."""
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGKILL)
        process.wait(10)
        assert process.stdout is not None
        process.stdout.close()


def me() -> tuple[int, int]:
    rank = current()
    return rank.rank, rank.world_size


def environment(names: Iterable[str]) -> Mapping[str, str | None]:
    return {name: os.environ.get(name) for name in names}


def total(value: float) -> float:
    """The sum of value x rank over all ranks."""
    import torch
    import torch.distributed as dist

    tensor = torch.tensor(value * dist.get_rank())
    dist.all_reduce(tensor)
    return tensor.item()


def fill(folder: str) -> None:
    """Leaves no room on the disk of this folder."""
    with open(folder + "/fill", "ab", buffering=0) as file:
        for size in (2**16, 1):
            with suppress(OSError):
                while True:
                    file.write(b"x" * size)
