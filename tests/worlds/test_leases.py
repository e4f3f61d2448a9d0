"""Leases: no device is used twice, whoever waits gets its turn, and what a worker held is free when it has ended."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pytest_fsdp_meta.worlds import current
from pytest_fsdp_meta.worlds.leases.leases import Lease, LeaseError, Leases
from pytest_fsdp_meta.worlds.leases.locks import FileLock
from tests.world_help import ROOT, SOON, world_of

EIGHT = tuple(map(str, range(8)))


def worker(folder: Path, name: str, names: tuple[str, ...] = EIGHT) -> Leases:
    return Leases(folder, "slot", names, name)


@contextmanager
def taking(
    leases: Leases, count: int, what: str = "a test", patience: float = SOON
) -> Iterator[list[Lease | BaseException]]:
    """Takes beside the test, which goes on; what came of it is there at the end."""
    came: list[Lease | BaseException] = []

    def take() -> None:
        try:
            came.append(leases.take(count, what, patience=patience))
        except BaseException as error:
            came.append(error)

    thread = threading.Thread(target=take)
    thread.start()
    yield came
    thread.join(SOON)
    assert not thread.is_alive()


def soon(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + SOON
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_no_device_twice(tmp_path: Path) -> None:
    first, second = worker(tmp_path, "gw0"), worker(tmp_path, "gw1")
    one, other = first.take(3, "test_a"), second.take(5, "test_b")
    assert one.devices == (0, 1, 2)
    assert other.devices == (3, 4, 5, 6, 7)
    one.release()
    one.release()
    assert worker(tmp_path, "gw2").take(3, "test_c").devices == (0, 1, 2)


def test_more_than_there_are_takes_them_all(tmp_path: Path) -> None:
    assert worker(tmp_path, "gw0").take(16, "test_a").devices == tuple(range(8))


def test_whoever_waits_gets_them_when_they_are_free(tmp_path: Path) -> None:
    first, second = worker(tmp_path, "gw0"), worker(tmp_path, "gw1")
    held = first.take(6, "test_a")
    assert not first.wanted()
    with taking(second, 4) as came:
        soon(first.wanted)
        assert not came
        held.release()
    (lease,) = came
    assert isinstance(lease, Lease)
    assert len(lease.devices) == 4
    assert not second.wanted()
    assert not first.wanted()


def test_a_large_world_is_not_overtaken(tmp_path: Path) -> None:
    small, large, late = (worker(tmp_path, name) for name in ("gw0", "gw1", "gw2"))
    held = small.take(1, "test_a")
    with taking(large, 8) as all_of_them:
        soon(small.wanted)
        with taking(late, 1) as one:
            time.sleep(0.3)
            assert not one, "seven are free, but it came later"
            held.release()
            soon(lambda: all_of_them)
            (lease,) = all_of_them
            assert isinstance(lease, Lease)
            lease.release()
    assert isinstance(one[0], Lease)


def test_the_wait_says_who_holds_what(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pytest_fsdp_meta.worlds.leases.leases.QUIET", 0.0)
    lines: list[str] = []
    worker(tmp_path, "gw1").take(4, "test_x.py::test_llama")
    worker(tmp_path, "gw2").take(2, "test_x.py::test_moe")
    with pytest.raises(LeaseError) as caught:
        worker(tmp_path, "gw3").take(4, "test_y", lines.append, patience=0.5)
    told = (
        "waiting for 4 of 8 slots: gw1 holds 0-3 for test_x.py::test_llama, 0 s; "
        "gw2 holds 4, 5 for test_x.py::test_moe, 0 s"
    )
    assert told in lines
    assert str(caught.value).startswith("nothing moved for 0.5 s while waiting for 4 of 8 slots: gw1 holds 0-3 for ")
    # It has left nothing behind: what was free is free.
    assert worker(tmp_path, "gw4").take(2, "test_z").devices == (6, 7)


def test_behind_another_in_the_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pytest_fsdp_meta.worlds.leases.leases.QUIET", 0.0)
    first = worker(tmp_path, "gw0")
    held = first.take(8, "test_a")
    lines: list[str] = []
    with taking(worker(tmp_path, "gw1"), 8, "test_b"):
        soon(first.wanted)
        with pytest.raises(LeaseError):
            worker(tmp_path, "gw2").take(1, "test_c", lines.append, patience=0.3)
        held.release()
    assert "waiting for 1 of 8 slots: gw0 holds 0-7 for test_a, 0 s; gw1 comes first, with 8 for test_b" in lines


def test_patience_lasts_while_something_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pytest_fsdp_meta.worlds.leases.leases.QUIET", 0.0)
    holders = [worker(tmp_path, f"gw{number}") for number in range(8)]
    held = [holder.take(1, "test_a") for holder in holders]
    with taking(worker(tmp_path, "gw8"), 8, patience=3.0) as came:
        for lease in held:
            time.sleep(0.6)
            lease.release()
    assert isinstance(came[0], Lease)


def test_two_leases_of_one_worker_overlap(tmp_path: Path) -> None:
    one, other = worker(tmp_path, "gw0"), worker(tmp_path, "gw1")
    kept = one.take(4, "a session's world")
    assert one.take(2, "test_a").devices == (0, 1)
    larger = one.take(6, "test_b")
    assert set(larger.devices) >= set(kept.devices)
    larger.release()
    assert other.take(4, "test_c").devices == (4, 5, 6, 7)
    kept.release()
    kept.release()
    assert one.take(1, "test_d").devices == (0,)


def test_two_workers_that_both_want_more_than_they_hold(tmp_path: Path) -> None:
    one, other = worker(tmp_path, "gw0"), worker(tmp_path, "gw1")
    first, second = one.take(4, "kept"), other.take(4, "kept")
    with taking(one, 8) as of_one:
        soon(other.wanted)
        with taking(other, 8) as of_other:
            soon(lambda: of_one)
            (lease,) = of_one
            assert isinstance(lease, Lease)
            lease.release()
            first.release()
    (lease,) = of_other
    assert isinstance(lease, Lease)
    assert lease.devices == tuple(range(8))
    lease.release()
    assert set(second.devices) == set(other._held)


def test_the_very_same_devices_again(tmp_path: Path) -> None:
    one, other = worker(tmp_path, "gw0"), worker(tmp_path, "gw1")
    one.take(2, "test_a").release()
    first = other.take(2, "test_b")
    kept = one.take(2, "kept")
    assert kept.devices == (2, 3)
    kept.release()
    first.release()
    kept.resume()
    kept.resume()
    assert other.take(8 - 2, "test_c").devices == (0, 1, 4, 5, 6, 7)


HOLDER = """
import os, subprocess, sys, time
from pathlib import Path
from pytest_fsdp_meta.worlds.leases.leases import Leases
from tests.worlds.test_leases import use
from tests.world_help import world_of
leases = Leases(Path(sys.argv[1]), "slot", tuple(map(str, range(8))), "gw0")
lease = leases.take(8, "test_a")
child = 0
if sys.argv[2] == "rank":
    world = world_of(2)
    world.start()
    world.run(use, sys.argv[1])
elif sys.argv[2] == "fork":
    child = os.fork()
    if not child:
        time.sleep(60)
else:
    child = subprocess.Popen(["sleep", "60"]).pid
print(child, flush=True)
time.sleep(60)
"""


def use(folder: str) -> None:
    """On a rank: holds a lock for as long as the rank lives."""
    rank = current()
    rank.state["lock"] = FileLock.attempt(Path(folder, f"used-{rank.rank}"))
    assert rank.state["lock"] is not None


@pytest.mark.parametrize("child", ["fork", "exec", "rank"])
def test_what_a_killed_worker_held_is_free_though_its_child_lives(tmp_path: Path, child: str) -> None:
    """And when it is free no rank uses it any more."""
    temporary = Path(tempfile.mkdtemp(dir="/tmp"))  # a short name, as sockets want it
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environ = os.environ | {"PYTHONPATH": path, "TMPDIR": str(temporary)}
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path), child], stdout=subprocess.PIPE, text=True, env=environ
    )
    assert process.stdout is not None
    try:
        pid = int(process.stdout.readline())
        assert child != "rank" or FileLock.attempt(tmp_path / "used-1") is None
        with taking(worker(tmp_path, "gw1"), 8) as came:
            time.sleep(0.2)
            assert not came
            process.kill()
            process.wait(SOON)
        assert isinstance(came[0], Lease)
        assert FileLock.attempt(tmp_path / "used-1")
        if pid:
            os.kill(pid, signal.SIGKILL)
        soon(lambda: not [one for one in temporary.iterdir() if one.name.startswith(("fsdp-", "pymp-"))])
    finally:
        shutil.rmtree(temporary)
        process.kill()
        process.wait(SOON)
        process.stdout.close()


def test_a_forked_child_frees_nothing(tmp_path: Path) -> None:
    mine = worker(tmp_path, "gw0")
    lease = mine.take(8, "test_a")
    pid = os.fork()
    if not pid:
        lease.release()
        os._exit(0)
    os.waitpid(pid, 0)
    with pytest.raises(LeaseError):
        worker(tmp_path, "gw1").take(1, "test_b", patience=0.1)


def test_a_waiter_that_ended_is_not_waited_for(tmp_path: Path) -> None:
    mine = worker(tmp_path, "gw0")
    mine.take(1, "test_a")
    (tmp_path / "slot-queue.note").write_text('{"who": "gw1", "what": "x", "count": 8, "since": 0.0}')
    assert not mine.wanted()
    assert not (tmp_path / "slot-queue.note").exists()


def test_ranks_do_not_hold_the_locks(tmp_path: Path) -> None:
    with worker(tmp_path, "gw0").take(2, "test_a"), world_of(2) as world:
        files = [file for rank in world.run(open_files) for file in rank]
    assert files
    assert not [file for file in files if str(tmp_path) in file]


def open_files() -> list[str]:
    """What a rank has open; the folder itself is closed by the time its entry is read."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{number}"))
        except FileNotFoundError:
            continue
    return found


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(
        LeaseError, match=r"^devices cannot be leased: .*slot-queue\.lock: No such file or directory; set "
    ):
        worker(tmp_path / "gone", "gw0").take(1, "test_a")


def test_notes_that_cannot_be_read_cost_the_message_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pytest_fsdp_meta.worlds.leases.leases.QUIET", 0.0)
    worker(tmp_path, "gw1").take(8, "test_a")
    for device in EIGHT:
        (tmp_path / f"slot-{device}.note").write_text("{")
    with pytest.raises(LeaseError, match=r"^nothing moved for 0\.2 s while waiting for 1 of 8 slots$"):
        worker(tmp_path, "gw3").take(1, "test_y", patience=0.2)
