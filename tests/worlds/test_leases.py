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

from pytest_fsdp_meta.worlds import Lease, LeaseError, WorldSpec, current, leases
from pytest_fsdp_meta.worlds.leases import LockedFile, assign_devices, gpu_names
from tests.world_help import ROOT, SOON, world_of

EIGHT = tuple(map(str, range(8)))


def wanting(folder: Path, worker: str, count: int, purpose: str = "a test", patience: float = SOON) -> Lease:
    """Return a lease of ``count`` of eight slots that is yet to be acquired."""
    return Lease(folder, worker, "slot", EIGHT, count, purpose, patience)


def take(folder: Path, worker: str, count: int, purpose: str = "a test") -> Lease:
    lease = wanting(folder, worker, count, purpose)
    lease.acquire()
    return lease


@contextmanager
def acquiring(lease: Lease) -> Iterator[list[Lease]]:
    """Acquire the lease in a thread during the block; the list has it from then on."""
    result: list[Lease] = []

    def acquire() -> None:
        lease.acquire()
        result.append(lease)

    thread = threading.Thread(target=acquire)
    thread.start()
    yield result
    thread.join(SOON)
    assert not thread.is_alive()
    assert result


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_two_workers_never_hold_the_same_device(tmp_path: Path) -> None:
    one, other = take(tmp_path, "gw0", 3), take(tmp_path, "gw1", 5)
    assert (one.devices, other.devices) == ((0, 1, 2), (3, 4, 5, 6, 7))
    one.release()
    one.release()
    other.release()
    with take(tmp_path, "gw0", 16) as everything:
        assert everything.devices == tuple(range(8)), "all, where there are fewer than wanted"
    first = take(tmp_path, "gw0", 2)
    assert first.devices == (0, 1)
    other.acquire()
    other.acquire()
    assert other.devices == (3, 4, 5, 6, 7), "a world that is kept gets its own devices again"


def test_a_large_world_is_not_overtaken(tmp_path: Path) -> None:
    small = take(tmp_path, "gw0", 1)
    assert not small.wanted()
    with acquiring(wanting(tmp_path, "gw1", 8)) as all_of_them:
        wait_until(small.wanted)
        with acquiring(wanting(tmp_path, "gw2", 1)) as one:
            time.sleep(0.3)
            assert not one, "seven devices are free, but the large world came first"
            small.release()
            wait_until(lambda: all_of_them)
            assert not one
            all_of_them[0].release()
    assert not one[0].wanted()


def test_the_wait_message_names_the_holders_and_the_next_in_the_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "QUIET", 0.0)
    lines: list[str] = []
    held = take(tmp_path, "gw1", 4, "test_x.py::test_llama")
    also_held = take(tmp_path, "gw2", 2, "test_x.py::test_moe")
    with pytest.raises(LeaseError) as caught:
        wanting(tmp_path, "gw3", 4, patience=0.5).acquire(lines.append)
    holders = "gw1 uses 4 for test_x.py::test_llama (0 s); gw2 uses 2 for test_x.py::test_moe"
    slots = "8 CPU slots (one per rank, --fsdp-slots) to be free"
    assert f"waiting for 4 of {slots}: {holders} (0 s)" in lines
    assert str(caught.value).startswith(
        f"gave up after 0.5 s without a change while waiting for 4 of {slots}: gw1 uses 4 for "
    )
    with take(tmp_path, "gw4", 2) as rest:
        assert rest.devices == (6, 7), "the worker that gave up holds nothing"
    with acquiring(wanting(tmp_path, "gw5", 5, "test_b")):
        wait_until(held.wanted)
        with pytest.raises(LeaseError):
            wanting(tmp_path, "gw6", 1, patience=0.3).acquire(lines.append)
        held.release()
    also_held.release()
    assert lines[-1].startswith(f"waiting for 1 of {slots}: gw1 uses 4 for ")
    assert lines[-1].endswith("; gw5 is next and needs 5 for test_b")


def test_patience_starts_again_with_every_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "QUIET", 0.0)
    held = [take(tmp_path, f"gw{number}", 1) for number in range(8)]
    with acquiring(wanting(tmp_path, "gw8", 8, patience=3.0)):
        for lease in held:
            time.sleep(0.6)
            lease.release()


HOLDER = """
import os, subprocess, sys, time
from pathlib import Path
from tests.worlds.test_leases import take, use
from tests.world_help import world_of
lease = take(Path(sys.argv[1]), "gw0", 8)
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
    rank.state["lock"] = LockedFile.attempt(Path(folder, f"used-{rank.rank}"))
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
        assert child != "rank" or LockedFile.attempt(tmp_path / "used-1") is None
        with acquiring(wanting(tmp_path, "gw1", 8)) as result:
            time.sleep(0.2)
            assert not result
            process.kill()
            process.wait(SOON)
        assert LockedFile.attempt(tmp_path / "used-1")
        if pid:
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not [path for path in temporary.iterdir() if path.name.startswith(("fsdp-", "pymp-"))])
    finally:
        shutil.rmtree(temporary)
        process.kill()
        process.wait(SOON)
        process.stdout.close()


def test_a_forked_child_cannot_release_its_parents_lease(tmp_path: Path) -> None:
    lease = take(tmp_path, "gw0", 8)
    pid = os.fork()
    if not pid:
        lease.release()
        os._exit(0)
    os.waitpid(pid, 0)
    with pytest.raises(LeaseError):
        wanting(tmp_path, "gw1", 1, patience=0.1).acquire()


def test_ranks_do_not_inherit_the_locks(tmp_path: Path) -> None:
    with take(tmp_path, "gw0", 2), world_of(2) as world:
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


def test_unreadable_notes_only_shorten_the_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "QUIET", 0.0)
    held = take(tmp_path, "gw1", 8)
    for name in (*EIGHT, "queue"):
        LockedFile.note(tmp_path / f"slot-{name}.lock").write_text("{")
    assert not held.wanted()
    alone = r"^gave up after 0\.2 s without a change while waiting for 1 of 8 CPU slots \(.*\) to be free$"
    with pytest.raises(LeaseError, match=alone):
        wanting(tmp_path, "gw3", 1, patience=0.2).acquire()


@pytest.mark.parametrize(
    ("visible", "count", "names"),
    [
        (None, 2, ("0", "1")),
        (" 3 , 5,", 2, ("3", "5")),
        ("4,5,6", 2, ("4", "5")),
        ("GPU-8932f937,MIG-GPU-1/0/0", 2, ("GPU-8932f937", "MIG-GPU-1/0/0")),
        ("1,1", 2, ("0", "1")),
        ("", 0, ()),
    ],
)
def test_gpu_names(visible: str | None, count: int, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpu_names(count) == names


def test_a_local_rank_is_the_index_of_a_leased_gpu(tmp_path: Path) -> None:
    """A loader that selects the GPU of its LOCAL_RANK must not get another worker's."""
    pair, four = WorldSpec({"dp_shard": 2}, "cuda", "nccl"), WorldSpec({"dp_shard": 4}, "cuda", "gloo")
    names = ("GPU-a", "MIG-GPU-1/0/0", "GPU-c", "GPU-d")
    first, second = [Lease(tmp_path, f"gw{number}", "GPU", names, 2, "test", SOON) for number in range(2)]
    with first, second:
        for lease, visible in ((first, names[:2]), (second, names[2:])):
            lease.acquire()
            placed = assign_devices(pair, lease)
            assert (placed.devices, placed.visible) == ((0, 1), visible)
        assert assign_devices(four, first).devices == (0, 1, 0, 1), "gloo ranks share GPUs"
        slots = take(tmp_path, "gw2", 2)
        assert slots.devices == (0, 1), "GPUs and slots are leased separately"
        cpu = WorldSpec({"dp_shard": 2})
        assert assign_devices(cpu, slots) == cpu, "a slot only counts ranks; it is not a device of the spec"
    seen_from_elsewhere = Lease(tmp_path, "gw3", "GPU", names[1:3], 2, "test", SOON)
    with seen_from_elsewhere:
        seen_from_elsewhere.acquire()
        assert assign_devices(pair, seen_from_elsewhere).visible == (), "all that this worker sees"
        with pytest.raises(LeaseError):
            Lease(tmp_path, "gw4", "GPU", names, 3, "test", 0.1).acquire()
