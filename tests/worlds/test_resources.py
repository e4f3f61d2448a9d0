"""Worlds that run out of memory or disk space, lose the pipe to pytest, or write too much output."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pytest_fsdp_meta.worlds import current
from pytest_fsdp_meta.worlds.system import processes
from pytest_fsdp_meta.worlds.system.output import MAX_OUTPUT
from tests.world_help import ROOT, SOON, fails, on_rank, world

pytestmark = pytest.mark.usefixtures("next_world_works")


def test_a_rank_ended_by_the_out_of_memory_killer() -> None:
    group = Path(f"/sys/fs/cgroup/memory/fsdp-test-{os.getpid()}")
    if not processes.count_oom_kills.__module__ or not os.access(group.parent, os.W_OK) or not group.parent.is_dir():
        pytest.skip("a test cannot limit memory here: there is no writable cgroup v1")
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(200 * 2**20))

        def swell() -> None:
            (group / "cgroup.procs").write_text(str(os.getpid()))
            blocks = []
            while True:
                blocks.append(b"x" * 2**24)

        summary = fails(world(2), on_rank(1, swell)).summary
        assert summary == "rank 1 was killed by SIGKILL (meanwhile the kernel's out-of-memory killer ended a process)"
    finally:
        group.rmdir()
    summary = fails(world(2), on_rank(1, lambda: os.kill(os.getpid(), signal.SIGKILL))).summary
    assert summary == "rank 1 was killed by SIGKILL", "the out-of-memory killer was not active during this world"


def test_out_of_memory_kills_that_the_system_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> str:
        raise PermissionError

    assert processes.count_oom_kills() >= 0
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", refuse)
        assert processes.count_oom_kills() == 0


CUT = "closed the file descriptor of its connection to pytest"


def pipe() -> int:
    from pytest_fsdp_meta.worlds.rank import main

    assert main._CHANNEL is not None
    return main._CHANNEL._connection.fileno()


def test_a_rank_that_closes_its_pipe_and_continues() -> None:
    def cut() -> None:
        os.close(pipe())
        time.sleep(1000)

    assert fails(world(2), on_rank(1, cut)).summary == f"rank 1 {CUT}"


def test_a_rank_that_opens_files_with_the_descriptor_of_its_pipe(tmp_path: Path) -> None:
    def cut(folder: Path) -> None:
        if current().rank == 1:
            file = os.open(folder / "file", os.O_RDWR | os.O_CREAT)
            os.dup2(file, pipe())  # at once: a rank whose pipe is closed is killed, which races with what it does next

    assert fails(world(2), cut, tmp_path).summary == f"rank 1 {CUT}"
    assert (tmp_path / "file").read_bytes() == b"", "nothing was written into the user's file"


def test_a_rank_that_closes_every_descriptor() -> None:
    """The kind of the failure varies, because gloo's threads may abort first."""
    error = fails(world(2), on_rank(1, lambda: os.closerange(3, 4096)))
    assert error.failures[0].rank == 1
    assert error.failures[0].kind in ("exited", "killed", "raised")


def test_a_flood_of_output_does_not_fill_the_disk() -> None:
    def flood() -> int:
        line = b"x" * 2**20
        for _ in range(300):
            os.write(1, line)
        for _ in range(600):
            if os.fstat(1).st_blocks * 512 < MAX_OUTPUT:
                break
            time.sleep(0.1)
        subprocess.run(["echo", "the end"], check=True)
        return os.fstat(1).st_blocks * 512

    flooded = world(2)
    held = flooded.run(flood)
    if sys.platform == "linux":
        assert max(held) < MAX_OUTPUT
    flooded.close()
    for text in flooded.outputs():
        assert text.startswith("(the last 65536 of 314572")
        assert text.endswith("xxxthe end\n")


FULL_DISK = """
import os, tempfile
from pathlib import Path
from tests.world_help import fill, world_of, me
from pytest_fsdp_meta.worlds import WorldError, current

def fail():
    fill(os.environ["TMPDIR"])
    if current().rank == 1:
        raise RuntimeError("x" * 50_000)
    current().barrier()

def speak():
    fill(os.environ["TMPDIR"])
    current().barrier()
    if current().rank == 1:
        print("x" * 100_000)
    current().barrier()

def give():
    fill(os.environ["TMPDIR"])
    return b"x" * 100_000 if current().rank == 1 else None

folder = os.environ["TMPDIR"]
assert tempfile.gettempdir() == folder
for name, act in {
    "fail": lambda world: world.run(fail),
    "speak": lambda world: world.run(speak),
    "give": lambda world: world.run(give),
    "take": lambda world: (fill(folder), world.run(len, b"x" * 100_000)),
    "full": lambda world: (fill(folder), world.run(me)),
}.items():
    try:
        with world_of(2) as world:
            print(name, act(world), flush=True)
    except WorldError as error:
        print(name, str(error).splitlines()[0][:400], error.user, len(str(error).splitlines()), flush=True)
    os.unlink(folder + "/fill")
many = 0
try:
    while True:
        Path(folder, f"file{many}").touch()
        many += 1
except OSError:
    pass
try:
    with world_of(2) as world:
        print("files", world.run(me), flush=True)
except WorldError as error:
    print("files", error, error.user, flush=True)
for number in range(many):
    os.unlink(folder + f"/file{number}")
with world_of(2) as world:
    worked = world.run(me)
print("empty", worked, [name for name in os.listdir(folder) if name.startswith("fsdp-world")], flush=True)
"""


@pytest.mark.skipif(not shutil.which("unshare"), reason="a test cannot mount a disk here: no unshare")
def test_a_full_disk_is_named(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(FULL_DISK)
    small = tmp_path / "small"
    small.mkdir()
    mount = f"mount -t tmpfs -o size=8m,nr_inodes=60 none {small} && exec {sys.executable} {script}"
    tried = ["unshare", "--user", "--map-root-user", "--mount"]
    if subprocess.run([*tried, "mount", "-t", "tmpfs", "none", small], stderr=subprocess.DEVNULL).returncode:
        pytest.skip("a test cannot mount a disk here: namespaces are not permitted")
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [*tried, "sh", "-c", mount],
        env=os.environ | {"TMPDIR": str(small), "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=6 * SOON,
    )
    messages = dict(line.split(" ", 1) for line in run.stdout.splitlines())
    full = "No space left on device"
    assert messages["fail"].startswith("rank 1 raised RuntimeError: xxx")
    assert re.match(rf"rank 1 raised OSError: .*{full}.* False", messages["speak"])
    assert re.match(rf"rank 1 returned a bytes that cannot be sent back: OSError: .*{full}.* False", messages["give"])
    assert messages["take"] == f"{full}: {small}; set TMPDIR to a folder on another disk True 1"
    assert messages["full"] == "(None, [(0, 2), (1, 2)])", "short messages need no disk"
    assert messages["files"] == f"{full}: {small}; set TMPDIR to a folder on another disk True"
    assert messages["empty"] == "[(0, 2), (1, 2)] []"
