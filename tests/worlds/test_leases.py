"""Leases: no device is used twice, waiting workers get their turn, and a worker that ends frees its devices."""

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
from pytest_fsdp_meta.worlds.leases.device_leases import Lease, LeaseError, Leases
from pytest_fsdp_meta.worlds.leases.file_lock import FileLock
from tests.world_help import ROOT, SOON, world_of

EIGHT = tuple(map(str, range(8)))


def worker(folder: Path, name: str, names: tuple[str, ...] = EIGHT) -> Leases:
    return Leases(folder, "slot", names, name)


@contextmanager
def taking(
    leases: Leases, count: int, purpose: str = "a test", patience: float = SOON
) -> Iterator[list[Lease | BaseException]]:
    """Take devices in a thread during the block; the list then holds the lease or the error."""
    result: list[Lease | BaseException] = []

    def take() -> None:
        try:
            result.append(leases.take(count, purpose, patience=patience))
        except BaseException as error:
            result.append(error)

    thread = threading.Thread(target=take)
    thread.start()
    yield result
    thread.join(SOON)
    assert not thread.is_alive()


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_two_workers_never_hold_the_same_device(tmp_path: Path) -> None:
    first, second = worker(tmp_path, "gw0"), worker(tmp_path, "gw1")
    one, other = first.take(3, "test_a"), second.take(5, "test_b")
    assert one.devices == (0, 1, 2)
    assert other.devices == (3, 4, 5, 6, 7)
    one.release()
    one.release()
    assert worker(tmp_path, "gw2").take(3, "test_c").devices == (0, 1, 2)


def test_a_request_for_more_devices_than_exist_gets_all(tmp_path: Path) -> None:
    assert worker(tmp_path, "gw0").take(16, "test_a").devices == tuple(range(8))


def test_a_waiting_worker_gets_devices_when_they_are_released(tmp_path: Path) -> None:
    first, second = worker(tmp_path, "gw0"), worker(tmp_path, "gw1")
    held = first.take(6, "test_a")
    assert not first.wanted()
    with taking(second, 4) as result:
        wait_until(first.wanted)
        assert not result
        held.release()
    (lease,) = result
    assert isinstance(lease, Lease)
    assert len(lease.devices) == 4
    assert not second.wanted()
    assert not first.wanted()


def test_a_large_world_is_not_overtaken(tmp_path: Path) -> None:
    small, large, late = (worker(tmp_path, name) for name in ("gw0", "gw1", "gw2"))
    held = small.take(1, "test_a")
    with taking(large, 8) as all_of_them:
        wait_until(small.wanted)
        with taking(late, 1) as one:
            time.sleep(0.3)
            assert not one, "seven devices are free, but the large world came first"
            held.release()
            wait_until(lambda: all_of_them)
            (lease,) = all_of_them
            assert isinstance(lease, Lease)
            lease.release()
    assert isinstance(one[0], Lease)


def test_the_wait_message_names_the_holders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pytest_fsdp_meta.worlds.leases.device_leases.QUIET", 0.0)
    lines: list[str] = []
    worker(tmp_path, "gw1").take(4, "test_x.py::test_llama")
    worker(tmp_path, "gw2").take(2, "test_x.py::test_moe")
    with pytest.raises(LeaseError) as caught:
        worker(tmp_path, "gw3").take(4, "test_y", lines.append, patience=0.5)
    message = (
        "waiting for 4 of 8 slots: gw1 holds 0-3 for test_x.py::test_llama (0 s); "
        "gw2 holds 4, 5 for test_x.py::test_moe (0 s)"
    )
    assert message in lines
    assert str(caught.value).startswith(
        "gave up after 0.5 s without a change while waiting for 4 of 8 slots: gw1 holds 0-3 for "
    )
    # The worker that gave up holds nothing: the free devices are still free.
    assert worker(tmp_path, "gw4").take(2, "test_z").devices == (6, 7)


def test_the_wait_message_names_the_worker_that_is_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pytest_fsdp_meta.worlds.leases.device_leases.QUIET", 0.0)
    first = worker(tmp_path, "gw0")
    held = first.take(8, "test_a")
    lines: list[str] = []
    with taking(worker(tmp_path, "gw1"), 8, "test_b"):
        wait_until(first.wanted)
        with pytest.raises(LeaseError):
            worker(tmp_path, "gw2").take(1, "test_c", lines.append, patience=0.3)
        held.release()
    assert "waiting for 1 of 8 slots: gw0 holds 0-7 for test_a (0 s); gw1 is next in the queue: 8 for test_b" in lines


def test_patience_starts_again_with_every_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pytest_fsdp_meta.worlds.leases.device_leases.QUIET", 0.0)
    holders = [worker(tmp_path, f"gw{number}") for number in range(8)]
    held = [holder.take(1, "test_a") for holder in holders]
    with taking(worker(tmp_path, "gw8"), 8, patience=3.0) as result:
        for lease in held:
            time.sleep(0.6)
            lease.release()
    assert isinstance(result[0], Lease)


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


def test_two_workers_that_both_need_more_than_they_hold(tmp_path: Path) -> None:
    one, other = worker(tmp_path, "gw0"), worker(tmp_path, "gw1")
    first, second = one.take(4, "kept"), other.take(4, "kept")
    with taking(one, 8) as of_one:
        wait_until(other.wanted)
        with taking(other, 8) as of_other:
            wait_until(lambda: of_one)
            (lease,) = of_one
            assert isinstance(lease, Lease)
            lease.release()
            first.release()
    (lease,) = of_other
    assert isinstance(lease, Lease)
    assert lease.devices == tuple(range(8))
    lease.release()
    assert set(second.devices) == set(other._held)


def test_resume_takes_the_same_devices(tmp_path: Path) -> None:
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
from pytest_fsdp_meta.worlds.leases.device_leases import Leases
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
    """Hold a lock for as long as this rank lives."""
    rank = current()
    rank.state["lock"] = FileLock.attempt(Path(folder, f"used-{rank.rank}"))
    assert rank.state["lock"] is not None


@pytest.mark.parametrize("child", ["fork", "exec", "rank"])
def test_devices_of_a_killed_worker_are_free_although_its_child_lives(tmp_path: Path, child: str) -> None:
    """A device is free only when no rank of the killed worker uses it any more."""
    temporary = Path(tempfile.mkdtemp(dir="/tmp"))  # short, because socket paths are limited
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environ = os.environ | {"PYTHONPATH": path, "TMPDIR": str(temporary)}
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path), child], stdout=subprocess.PIPE, text=True, env=environ
    )
    assert process.stdout is not None
    try:
        pid = int(process.stdout.readline())
        assert child != "rank" or FileLock.attempt(tmp_path / "used-1") is None
        with taking(worker(tmp_path, "gw1"), 8) as result:
            time.sleep(0.2)
            assert not result
            process.kill()
            process.wait(SOON)
        assert isinstance(result[0], Lease)
        assert FileLock.attempt(tmp_path / "used-1")
        if pid:
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not [path for path in temporary.iterdir() if path.name.startswith(("fsdp-", "pymp-"))])
    finally:
        shutil.rmtree(temporary)
        process.kill()
        process.wait(SOON)
        process.stdout.close()


def test_a_forked_child_cannot_release_its_parents_lease(tmp_path: Path) -> None:
    mine = worker(tmp_path, "gw0")
    lease = mine.take(8, "test_a")
    pid = os.fork()
    if not pid:
        lease.release()
        os._exit(0)
    os.waitpid(pid, 0)
    with pytest.raises(LeaseError):
        worker(tmp_path, "gw1").take(1, "test_b", patience=0.1)


def test_the_queue_note_of_a_worker_that_ended_is_removed(tmp_path: Path) -> None:
    mine = worker(tmp_path, "gw0")
    mine.take(1, "test_a")
    (tmp_path / "slot-queue.note").write_text('{"worker": "gw1", "purpose": "x", "count": 8, "since": 0.0}')
    assert not mine.wanted()
    assert not (tmp_path / "slot-queue.note").exists()


def test_ranks_do_not_inherit_the_locks(tmp_path: Path) -> None:
    with worker(tmp_path, "gw0").take(2, "test_a"), world_of(2) as world:
        files = [file for rank in world.run(open_files) for file in rank]
    assert files
    assert not [file for file in files if str(tmp_path) in file]


def open_files() -> list[str]:
    """Return the files that this rank has open, without the folder that lists them."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{number}"))
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
    return found


def test_a_missing_run_folder(tmp_path: Path) -> None:
    with pytest.raises(LeaseError, match=r"^cannot lease devices: .*slot-queue\.lock: No such file or directory; set "):
        worker(tmp_path / "gone", "gw0").take(1, "test_a")


def test_unreadable_notes_only_shorten_the_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pytest_fsdp_meta.worlds.leases.device_leases.QUIET", 0.0)
    worker(tmp_path, "gw1").take(8, "test_a")
    for device in EIGHT:
        (tmp_path / f"slot-{device}.note").write_text("{")
    with pytest.raises(LeaseError, match=r"^gave up after 0\.2 s without a change while waiting for 1 of 8 slots$"):
        worker(tmp_path, "gw3").take(1, "test_y", patience=0.2)
