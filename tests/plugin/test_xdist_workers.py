"""What the workers of one machine share through their folder: the count of GPUs, slots, and notes of crashes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pytest_fsdp_meta.plugin.xdist_workers import Devices, usable_cores
from pytest_fsdp_meta.worlds import LeaseError, WorldSpec
from tests.world_help import ROOT, SOON

SPEC = WorldSpec({"dp_shard": 2})


def worker(folder: Path | None, name: str, count: Callable[[], int] = lambda: 0, run: str = "run") -> Devices:
    """Return the devices of a worker that xdist gave a folder, or that runs on another machine."""
    basetemp = str(folder / f"popen-{name}") if folder else None
    config: Any = SimpleNamespace(workerinput={"workerid": name, "testrunuid": run}, getoption=lambda *_: basetemp)
    settings: Any = SimpleNamespace(engine="local", device="auto", slots=8)
    return Devices(config, settings, cast(Any, SimpleNamespace(count_gpus=count)))


def item(name: str) -> pytest.Item:
    return cast(pytest.Item, SimpleNamespace(name=name, nodeid=f"a.py::{name}"))


def test_gpus_are_counted_by_one_worker_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    counts: list[int] = []

    def count() -> int:
        time.sleep(0.2)
        counts.append(2)
        return 2

    def fail() -> int:
        raise ValueError("counting the GPUs failed")

    with pytest.raises(ValueError, match="counting the GPUs failed"):
        worker(tmp_path, "gw3", fail).count_gpus()
    workers = [worker(tmp_path, f"gw{number}", count) for number in range(3)]
    threads = [threading.Thread(target=one.count_gpus) for one in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)
    assert [one.count_gpus() for one in workers] == [2, 2, 2]
    assert counts == [2]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert worker(tmp_path, "gw3", lambda: 1).count_gpus() == 1, "a worker that sees other GPUs counts again"


def test_a_lease_covers_the_largest_world_of_a_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for folder in (tmp_path / "pytest-0", None):
        if folder:
            folder.mkdir()
        placed, lease = worker(folder, "gw0", run="a run, with / odd letters").take(SPEC, item("test_a[1]"), ranks=3)
        assert placed == SPEC
        assert lease is not None
        assert lease.devices == (0, 1, 2)
    assert len(list(tmp_path.glob("fsdp-run-*"))) == len(list(tmp_path.glob("pytest-0/fsdp-run-*"))) == 1


def test_a_folder_that_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    message = r"^cannot share devices between workers: .*/file/fsdp-run-.*: Not a directory; set TMPDIR to a folder on "
    with pytest.raises(LeaseError, match=message):
        worker(tmp_path / "file", "gw0").take(SPEC, item("test_a"))
    with pytest.raises(ValueError, match=message):
        worker(tmp_path / "file", "gw0").count_gpus()
    with worker(tmp_path / "file", "gw0").running("test_x", item("test_x")) as crashed:
        assert crashed == ("", ""), "reported when a device is leased"


def test_a_crashed_worker_leaves_a_note_of_what_it_ran(tmp_path: Path) -> None:
    first, second = worker(tmp_path, "gw0"), worker(tmp_path, "gw1")
    with first.running("test_x", item("test_x[a]")) as before:
        assert before == ("", "")
        with second.running("test_x", item("test_x[a]")) as meanwhile:
            assert meanwhile == ("", ""), "--dist=each"
    pid = os.fork()
    if not pid:
        with first.running("test_x", item("test_x[b, c d]")):
            os._exit(0)
    os.waitpid(pid, 0)
    for _ in range(2):
        with second.running("test_x", item("test_x[c]")) as crashed:
            assert crashed == ("gw0", "test_x[b, c d]")


def test_usable_cores() -> None:
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)


WORKER = """
import sys, time
from pathlib import Path
from tests.plugin.test_xdist_workers import worker
worker(Path(sys.argv[1]), "gw0").count_gpus()
print("ready", flush=True)
time.sleep(60)
"""
STARTS_WORKER = """
import signal, subprocess, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)  # as under nohup
print(subprocess.run([sys.executable, "-c", sys.argv[2], sys.argv[1]]))
"""


def test_a_worker_ends_with_the_controller(tmp_path: Path) -> None:
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", STARTS_WORKER, str(tmp_path), WORKER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.kill()
        began = time.monotonic()
        assert process.stdout.read() == b"", "the end of the worker closes the pipe"
        assert time.monotonic() - began < SOON
