"""The folder that the workers of a run share, and the devices that they lease there."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from pytest_fsdp_meta.worlds import (
    LeaseError,
    Presence,
    WorkerDevices,
    WorldSpec,
    assign_devices,
    run_folder_of,
    usable_cores,
)
from pytest_fsdp_meta.worlds.leases import run_folder, worker_devices
from pytest_fsdp_meta.worlds.leases.file_lock import FileLock
from tests.world_help import ROOT, SOON

CPU = WorldSpec({"dp_shard": 2})
CUDA = WorldSpec({"dp_shard": 4}, "cuda", "gloo")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return run_folder_of("a run, with / odd \0 letters")


def test_each_run_of_each_user_has_one_folder(folder: Path, tmp_path: Path) -> None:
    assert folder == run_folder_of("a run, with / odd \0 letters") != run_folder_of("another")
    assert folder.parent == tmp_path
    assert f"-{os.getuid()}-" in folder.name
    first, second = Presence(folder), Presence(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    first.leave()
    second.remove()
    assert not folder.exists()


def test_a_folder_of_another_user_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(
        LeaseError,
        match=f"^cannot share devices between workers: {folder} is a link or belongs to another user; remove it$",
    ):
        Presence(folder)


def test_a_folder_that_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        LeaseError, match=r"^cannot share devices between workers: .*/file/run: Not a directory; set TMPDIR"
    ):
        Presence(tmp_path / "file" / "run")


def test_a_later_run_removes_the_folder_of_a_killed_run(folder: Path, tmp_path: Path) -> None:
    left, used, young = (run_folder_of(name) for name in ("left", "used", "young"))
    other = tmp_path / f"fsdp-run-{os.getuid() + 1}-0"
    for path in (left, used, young, other):
        path.mkdir()
        (path / "0.present").touch()
    lock = FileLock.attempt(used / "0.present")
    assert lock is not None
    for path in (left, used, other):
        os.utime(path, (0, time.time() - 2 * run_folder.STALE))
    presence = Presence(folder)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        path.name for path in (used, young, other, folder)
    )
    lock.release()
    presence.leave()


def test_gpus_are_counted_by_one_worker_for_all(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    folder.mkdir()
    counts: list[int] = []

    def count() -> int:
        time.sleep(0.2)
        counts.append(2)
        return 2

    workers = [WorkerDevices(folder, f"gw{number}", 8) for number in range(3)]
    threads = [threading.Thread(target=sharing.count_gpus, args=(count,)) for sharing in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert [sharing.count_gpus(count) for sharing in workers] == [2, 2, 2]
    assert counts == [2]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert WorkerDevices(folder, "gw3", 8).count_gpus(lambda: 1) == 1, "a worker that sees other GPUs counts again"


def test_a_failed_count_is_repeated_by_the_next_worker(folder: Path) -> None:
    def fail() -> int:
        raise ValueError("counting the GPUs failed")

    one, other = WorkerDevices(folder, "gw0", 8), WorkerDevices(folder, "gw1", 8)
    with pytest.raises(ValueError, match="counting the GPUs failed"):
        one.count_gpus(fail)
    assert other.count_gpus(lambda: 3) == 3


@pytest.mark.parametrize(
    ("visible", "count", "names"),
    [
        (None, 2, ("0", "1")),
        ("2,3", 2, ("2", "3")),
        (" 3 , 5,", 2, ("3", "5")),
        ("4,5,6", 2, ("4", "5")),
        ("GPU-8932f937,MIG-GPU-1/0/0", 2, ("GPU-8932f937", "MIG-GPU-1%2F0%2F0")),
        ("1,1", 2, ("0", "1")),
        ("", 0, ()),
    ],
)
def test_gpu_names(visible: str | None, count: int, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert worker_devices.gpu_names(count) == names


def test_workers_that_see_different_gpus_agree_on_their_names(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = WorkerDevices(folder, "gw0", 8), WorkerDevices(folder, "gw1", 8)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    first.count_gpus(lambda: 2)
    one = first.take(CUDA, "test_a")
    assert assign_devices(CUDA, one).devices == (0, 1, 0, 1)
    assert assign_devices(CUDA, one).visible == (), "all that this worker sees"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    second.count_gpus(lambda: 2)
    one.release()
    assert sorted(path.name for path in folder.glob("GPU-?.lock")) == ["GPU-0.lock", "GPU-1.lock"]
    other = second.take(CUDA, "test_b")
    assert other.devices == (0, 1)
    assert sorted(path.name for path in folder.glob("GPU-?.note")) == ["GPU-1.note", "GPU-2.note"]


@pytest.mark.parametrize("visible", [None, "0,1,2,3", "GPU-a,MIG-GPU-1/0/0,GPU-c,GPU-d"])
def test_a_local_rank_is_the_index_of_a_leased_gpu(
    folder: Path, visible: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loader that selects the GPU of its LOCAL_RANK must not get another worker's."""
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    names = tuple((visible or "0,1,2,3").split(","))
    spec, workers = WorldSpec({"dp_shard": 2}, "cuda", "nccl"), [WorkerDevices(folder, f"gw{n}", 8) for n in range(2)]
    for worker in workers:
        worker.count_gpus(lambda: 4)
    first, second = [assign_devices(spec, worker.take(spec, "test")) for worker in workers]
    assert (first.devices, first.visible) == ((0, 1), names[:2])
    assert (second.devices, second.visible) == ((0, 1), names[2:])


def test_gpus_and_slots_are_leased_separately(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    first, second = WorkerDevices(folder, "gw0", 2), WorkerDevices(folder, "gw1", 2)
    first.count_gpus(lambda: 1)
    gpu, slots = first.take(CUDA, "test_a"), second.take(CPU, "test_b")
    assert assign_devices(CUDA, gpu).devices == (0, 0, 0, 0)
    assert slots.devices == (0, 1)
    assert assign_devices(CPU, slots) == CPU, "a slot only counts ranks; it is not a device of the spec"
    assert not first.wanted()


def test_a_lease_covers_the_largest_world_of_a_trial(folder: Path) -> None:
    assert WorkerDevices(folder, "gw0", 8).take(CPU, "test_a", ranks=3).devices == (0, 1, 2)


def test_a_crashed_worker_leaves_a_note_of_what_it_ran(folder: Path) -> None:
    first, second = WorkerDevices(folder, "gw0", 8), WorkerDevices(folder, "gw1", 8)
    with first.running("test_x", "gw0 test_x[a]") as before:
        assert before == ""
        with second.running("test_x", "gw1 test_x[a]") as meanwhile:
            assert meanwhile == "", "--dist=each"
        with second.running("test_y", "gw1 test_y[a]") as other:
            assert other == ""
    with second.running("test_x", "gw1 test_x[b]") as rerun:
        assert rerun == ""
    pid = os.fork()
    if not pid:
        with first.running("test_x", "gw0 test_x[b]"):
            os._exit(0)
    os.waitpid(pid, 0)
    for _ in range(2):
        with second.running("test_x", "gw1 test_x[c]") as crashed:
            assert crashed == "gw0 test_x[b]"


def test_usable_cores() -> None:
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)


WORKER = """
import sys, time
from pathlib import Path
from pytest_fsdp_meta.worlds import WorkerDevices
sharing = WorkerDevices(Path(sys.argv[1]), "gw0", 8)
sharing.count_gpus(lambda: 0)
print("ready", flush=True)
time.sleep(60)
"""
STARTS_WORKER = """
import subprocess, sys
subprocess.run([sys.executable, "-c", sys.argv[2], sys.argv[1]])
"""


def test_a_worker_ends_with_its_parent_and_removes_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", STARTS_WORKER, str(folder), WORKER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        assert folder.exists()
        process.kill()
        process.wait(SOON)
        deadline = time.monotonic() + SOON
        while folder.exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
