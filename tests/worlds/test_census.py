"""Many worlds in a row leave no descriptors, threads, processes, folders or shared memory behind."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_fsdp_meta.worlds import WorldError
from tests.world_help import preload, total, world_of

WORLDS = int(os.environ.get("FSDP_TEST_WORLDS", "20"))
"""How many worlds to run; 100 take a minute."""


def resources_of(pid: int, mine: Path) -> dict[str, int]:
    """Count what the process holds, and its folders in ``mine``."""
    proc = Path(f"/proc/{pid}")
    return {
        "descriptors": len(list((proc / "fd").iterdir())),
        "threads": len(list((proc / "task").iterdir())),
        "children": sum(len(list_of.read_text().split()) for list_of in (proc / "task").glob("*/children")),
        "folders": len(list(mine.glob("fsdp-*"))),
    }


def shared_memory(pids: set[int]) -> list[str]:
    """Return the shared memory segments that torch has made in these processes, by the pid in their names."""
    return [one for one in os.listdir("/dev/shm") if one.startswith(tuple(f"torch_{pid}_" for pid in pids))]


def server() -> int:
    """Return the pid of the fork server."""
    with world_of(1) as world:
        return int(world.run(os.getppid)[0])


def work() -> None:
    import torch

    assert total(1.0) == 1.0
    torch.ones(1000).share_memory_()


def crash() -> None:
    work()
    os._exit(3)


def fail() -> None:
    work()
    raise RuntimeError


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
def test_worlds_in_a_row_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    preload().start()

    ranks: set[int] = set()

    def use(act: Callable[[], object]) -> None:
        with world_of(2) as world:
            ranks.update(world.run(os.getpid))
            if act is work:
                world.run(act)
            else:
                with pytest.raises(WorldError):
                    world.run(act)

    for act in (work, crash, fail):
        use(act)
    forking = server()
    before = {pid: resources_of(pid, tmp_path) for pid in (os.getpid(), forking)}
    for number in range(WORLDS):
        use((work, crash, work, fail)[number % 4])
    assert server() == forking
    patience = time.monotonic() + 10.0  # the fork server closes the last pipe when it learns that the rank has ended
    while (after := {pid: resources_of(pid, tmp_path) for pid in (os.getpid(), forking)}) != before:
        assert time.monotonic() < patience, (after, before)
        time.sleep(0.05)
    assert len(ranks) >= 2 * WORLDS
    assert not shared_memory(ranks)
