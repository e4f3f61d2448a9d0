"""The tests of the soak, as planned in ``plan.json``. Each rank locks its slot while it works."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pytest_fsdp_meta import fsdp_conformance, fsdp_spmd
from pytest_fsdp_meta.worlds import current
from pytest_fsdp_meta.worlds.leases import LockedFile

FOLDER = Path(os.environ["FSDP_SOAK"])
TESTS: list[dict[str, Any]] = json.loads((FOLDER / "plan.json").read_text())
SIZES = sorted({test["size"] for test in TESTS})


def write_log(*words: object) -> None:
    with (FOLDER / "log").open("a") as file:
        file.write(" ".join(map(str, words)) + "\n")


def my_slot() -> str:
    """Return the slot of this rank, from the notes that workers write into the files that they lock."""
    (run,) = (FOLDER / "pytest").glob("fsdp-run-*")
    held = []
    for note in sorted(run.glob("slot-[0-9]*.lock")):
        try:
            if json.loads(note.read_text())[0] == os.environ["PYTEST_XDIST_WORKER"]:
                held.append(note.stem)
        except (OSError, ValueError):
            continue  # another worker is releasing or acquiring it
    return held[current().rank] if current().rank < len(held) else f"none-of-{len(held)}"


@contextmanager
def slot() -> Iterator[None]:
    name, pid, rank = my_slot(), os.getpid(), current().rank
    lock = LockedFile.attempt(FOLDER / f"used-{name}")
    write_log("in" if lock else "twice", name, pid, time.monotonic(), rank)
    yield
    write_log("out", name, pid, time.monotonic(), rank)
    if lock:
        lock.release()


def work(kind: str, seconds: float) -> None:
    import torch
    import torch.distributed as dist

    rank, last = current().rank, current().world_size - 1
    with slot():
        time.sleep(seconds)
        if rank == last:
            assert kind != "fail"
            if kind == "exit":
                os._exit(3)
            if kind in ("kill", "segv"):
                os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGSEGV)
            if kind == "hang":
                time.sleep(60)
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == last + 1
        dist.barrier()


def numbers(size: int, *kinds: str) -> list[int]:
    return [number for number, test in enumerate(TESTS) if test["size"] == size and test["kind"] in kinds]


def define(size: int) -> None:
    """Define the tests of one size, because a mark needs a constant size."""

    @pytest.mark.parametrize("number", numbers(size, "pass", "fail", "exit", "kill", "segv"))
    @fsdp_spmd(world_size=size)
    def test_fresh(fsdp: Any, number: int) -> None:
        work(TESTS[number]["kind"], TESTS[number]["seconds"])

    @pytest.mark.parametrize("number", numbers(size, "hang"))
    @fsdp_spmd(world_size=size, timeout=15)
    def test_hang(fsdp: Any, number: int) -> None:
        work("hang", 0.0)

    @pytest.mark.parametrize("number", numbers(size, "kept"))
    @fsdp_spmd(world_size=size, scope="session")
    def test_kept(fsdp: Any, number: int) -> None:
        work("pass", TESTS[number]["seconds"])

    @pytest.mark.parametrize("number", numbers(size, "crash"))
    @pytest.mark.fsdp_world(world_size=size)
    def test_crash(fsdp_world: Any, number: int) -> None:
        fsdp_world.run(work, "pass", 0.0)
        fsdp_world.run(hold)
        os._exit(5)

    @pytest.mark.parametrize("number", numbers(size, "loader"))
    @fsdp_conformance(world_size=size, only=["no_meta_params"])
    def test_loader(fsdp: Any, number: int) -> Any:
        from torch import nn
        from torch.distributed.fsdp import fully_shard

        with slot():
            model = nn.Linear(8, 8)
            fully_shard(model, mesh=fsdp.mesh)
            fsdp.barrier()
        return model

    for test in (test_fresh, test_hang, test_kept, test_crash, test_loader):
        if any(mark.args[1] for mark in test.pytestmark if mark.name == "parametrize"):
            globals()[f"{test.__name__}_{size}"] = test


def hold() -> None:
    """Hold the slot until the rank exits."""
    current().state["slot"] = slot()
    current().state["slot"].__enter__()


for size in SIZES:
    define(size)
