"""Run many worlds on one fork server: ``python -m benchmarks.many_worlds --worlds 1000``.

Their ranks work, return large results, leave processes behind, raise, exit and are killed. At intervals it counts what
the fork server and this process hold: memory, descriptors, threads, children, folders, shared memory. It writes a
report under ``benchmarks/results`` and exits with 1 if anything has grown.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from glob import glob
from importlib.metadata import version
from pathlib import Path

from pytest_fsdp_meta.worlds import ForkServerEngine, Sources, World, WorldError, WorldSpec
from pytest_fsdp_meta.worlds.system import processes

RESULTS = Path(__file__).parent / "results"
ALLOWED_KIB = 1024
"""KiB that the own memory of a process may grow: what is allocated once is not a leak."""
NO_PROBLEM = (
    "Nothing is left. Descriptors, threads and children have not grown, and anonymous memory by no more than "
    f"{ALLOWED_KIB} KiB."
)
SETTLING = 60.0
"""Seconds that the fork server may take to reap its children, on a busy machine."""


@dataclass(frozen=True)
class Holdings:
    """What one process holds."""

    anonymous_kib: int
    """Its own memory, without files that it has mapped."""
    pss_kib: int
    """All its memory; pages that processes share are divided among them."""
    descriptors: int
    threads: int
    children: int

    def grown(self, before: Holdings) -> list[str]:
        """Return what has grown since ``before``, by name."""
        now, then = asdict(self), asdict(before)
        exact = [name for name in ("descriptors", "threads", "children") if now[name] > then[name]]
        return exact + ["anonymous_kib"] * (self.anonymous_kib > before.anonymous_kib + ALLOWED_KIB)


@dataclass(frozen=True)
class Count:
    """What is held after a number of worlds."""

    worlds: int
    seconds: float
    server: Holdings
    parent: Holdings
    left: tuple[str, ...]
    """Temporary folders, and shared memory that ranks have made."""


def holdings(pid: int) -> Holdings:
    proc = Path(f"/proc/{pid}")
    rows = [line.split() for line in (proc / "smaps_rollup").read_text().splitlines()[1:]]
    kib = {name.rstrip(":"): int(value) for name, value, *_ in rows}
    return Holdings(
        anonymous_kib=kib["Anonymous"],
        pss_kib=kib["Pss"],
        descriptors=len(list((proc / "fd").iterdir())),
        threads=len(list((proc / "task").iterdir())),
        children=len(_children(pid)),
    )


def wait_until_idle(server: int) -> None:
    """Wait until the fork server has reaped its children and waits for a request.

    A rank's exit code reaches this process a moment before the fork server closes the pipe that carried it. So the
    children are read first: if none is left, a fork server that sleeps has closed every pipe.
    """
    deadline = time.monotonic() + SETTLING
    while _children(server) or _state(server) != "S":
        assert time.monotonic() < deadline, f"the fork server {server} has not become idle"
        time.sleep(0.01)


def _children(pid: int) -> list[int]:
    """Return the children of a process, zombies included."""
    return [int(child) for file in Path(f"/proc/{pid}/task").glob("*/children") for child in file.read_text().split()]


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


# What ranks do.


def work() -> None:
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(1))
    torch.ones(1000).share_memory_()


def return_much() -> bytes:
    work()
    return bytes(2**20)


def leave_a_process() -> None:
    work()
    subprocess.Popen(["sleep", "600"], start_new_session=True)


def leave_by_exit() -> None:
    work()
    os._exit(3)


def raise_an_error() -> None:
    work()
    raise RuntimeError


def be_killed() -> None:
    import torch.distributed as dist

    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


KINDS: tuple[Callable[[], object], ...] = (
    work,
    leave_by_exit,
    return_much,
    raise_an_error,
    leave_a_process,
    be_killed,
)


def count_while_running(engine: ForkServerEngine, worlds: int, every: int) -> Iterator[Count]:
    """Run this many worlds on the engine's fork server. Yield a count before the first, and after ``every`` ones.

    The first count comes after one world of each kind, because some things are allocated once.
    """
    ranks: set[int] = set()
    for kind in KINDS:
        ranks.update(_run(engine, kind))
    server = _pid_of_server(engine)
    began = time.monotonic()
    for number in range(worlds + 1):
        if number % every == 0:
            assert _pid_of_server(engine) == server, "the fork server has ended"
            wait_until_idle(server)
            gc.collect()
            left = (*glob(f"{tempfile.gettempdir()}/{processes.folder_prefix('world')}*"), *_shared_memory(ranks))
            yield Count(number, time.monotonic() - began, holdings(server), holdings(os.getpid()), left)
            ranks.clear()
        if number < worlds:
            ranks.update(_run(engine, KINDS[number % len(KINDS)]))


def _run(engine: ForkServerEngine, kind: Callable[[], object]) -> list[int]:
    """Run one world of two ranks and return their pids."""
    with World(WorldSpec({"dp": 2}, timeout=60.0), engine) as world:
        pids = world.run(os.getpid)
        with suppress(WorldError):
            world.run(kind)
            return pids
    assert kind in (leave_by_exit, raise_an_error, be_killed), f"{kind.__name__} failed"
    return pids


def _pid_of_server(engine: ForkServerEngine) -> int:
    with World(WorldSpec({"dp": 1}, timeout=60.0), engine) as world:
        return int(world.run(os.getppid)[0])


def _shared_memory(pids: set[int]) -> list[str]:
    """Return the shared memory segments that torch has made in these processes, by the pid in their names."""
    return [name for name in os.listdir("/dev/shm") if name.startswith(tuple(f"torch_{pid}_" for pid in pids))]


def problems(first: Count, last: Count) -> list[str]:
    """Describe what has grown between two counts, and what is left."""
    pairs = {"fork server": (first.server, last.server), "pytest process": (first.parent, last.parent)}
    found = [
        f"{who}: {name} grew from {getattr(before, name)} to {getattr(now, name)}"
        for who, (before, now) in pairs.items()
        for name in now.grown(before)
    ]
    return found + [f"{name} remains" for name in last.left]


def report(counts: list[Count], options: argparse.Namespace) -> str:
    found = problems(counts[0], counts[-1])
    rows = [
        f"| {one.worlds} | {one.seconds:.0f} | "
        + " | ".join(
            f"{who.anonymous_kib} | {who.pss_kib} | {who.descriptors} | {who.threads} | {who.children}"
            for who in (one.server, one.parent)
        )
        + f" | {len(one.left)} |"
        for one in counts
    ]
    held = "anonymous KiB", "PSS KiB", "descriptors", "threads", "children"
    columns = ["worlds", "seconds", *(f"{who}: {what}" for who in ("server", "parent") for what in held), "left"]
    kinds = ", ".join(kind.__name__.replace("_", " ") for kind in KINDS)
    command = f"python -m benchmarks.many_worlds --worlds {options.worlds} --every {options.every}"
    return "\n".join(
        [
            f"# {options.worlds} worlds on one fork server, {datetime.date.today()}",
            "",
            f"`{command}`, {os.cpu_count()} cores, Python {platform.python_version()}, torch {version('torch')}.",
            "",
            f"Worlds of 2 ranks, which in turn {kinds}.",
            "The parent is the process that runs the worlds. PSS divides pages among the processes that share them, so",
            "it depends on what else runs. Left: temporary folders and shared memory.",
            "",
            f"| {' | '.join(columns)} |",
            "|---" * len(columns) + "|",
            *rows,
            "",
            *([f"* {one}" for one in found] or [NO_PROBLEM]),
            "",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worlds", type=int, default=1000)
    parser.add_argument("--every", type=int, default=100, help="worlds between two counts")
    parser.add_argument("--out", type=Path, default=RESULTS / f"{datetime.date.today()}-many-worlds.md")
    options = parser.parse_args()
    engine = ForkServerEngine(Sources(tuple(sys.path)))
    counts = []
    for one in count_while_running(engine, options.worlds, options.every):
        counts.append(one)
        print(one, flush=True)
    text = report(counts, options)
    print(text)
    options.out.write_text(text, "utf-8")
    return 1 if problems(counts[0], counts[-1]) else 0


if __name__ == "__main__":
    from benchmarks.many_worlds import main as run  # ranks import the functions by the name of this module

    sys.exit(run())
