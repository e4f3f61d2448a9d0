"""The end of a world or of its parent: ranks, the processes that they started, and folders are gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_fsdp_meta.worlds import ForkServerEngine, Sources, World, WorldSpec, current
from pytest_fsdp_meta.worlds.local.member import LocalMember
from tests.world_help import (
    assert_gone,
    ended_at_last,
    fails,
    is_running,
    me,
    preload,
    processes_with,
    run_script,
    world,
    world_of,
)

pytestmark = pytest.mark.usefixtures("next_world_works")


def start_children() -> list[int]:
    """Start a forked child, a program, one in its own session, and one whose parent has ended; return their pids."""
    import multiprocessing

    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,))
    process.start()
    child = subprocess.Popen(["sleep", "1000"])
    away = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    daemon = subprocess.run(
        ["sh", "-c", "setsid sleep 1000 >/dev/null 2>&1 & echo $!"], stdout=subprocess.PIPE, check=True
    )
    current().state["children"] = [process, child, away]
    assert process.pid
    return [process.pid, child.pid, away.pid, int(daemon.stdout)]


def test_children_of_ranks_are_ended_with_them() -> None:
    closed = world(2)
    pids = [pid for started in closed.run(start_children) for pid in started]
    with world_of(2) as other:
        assert other.run(me) == [(0, 2), (1, 2)]
    assert all(map(is_running, pids)), "closing another world does not end them"
    closed.close()
    assert_gone(pids)


def test_children_of_a_rank_that_has_ended_before() -> None:
    failed = world(2)
    pids = [pid for started in failed.run(start_children) for pid in started]
    fails(failed, lambda: os._exit(1))
    assert_gone(pids)


def test_processes_that_test_modules_start_on_import_survive(tmp_path: Path) -> None:
    (tmp_path / "starts.py").write_text("import subprocess\nCHILD = subprocess.Popen(['sleep', '1000'])")
    shared = ForkServerEngine(Sources((str(tmp_path), *preload().sources.path)), test_modules=["starts"])
    for _ in range(2):
        with World(WorldSpec({"dp": 1}), shared) as one:
            (pid,) = one.run(lambda: __import__("starts").CHILD.pid)
        assert is_running(pid)
    os.kill(pid, signal.SIGKILL)


def test_interrupt_while_waiting_ends_the_ranks() -> None:
    interrupted = world(2)
    pids = interrupted.run(os.getpid)
    # SIGINT is ignored if the tests were started in the background of a shell.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        interrupted.run(time.sleep, 1000)
    assert not interrupted.alive
    assert_gone(pids)


ENDLESS = """
import os, sys, time
from tests.world_help import preload, world_of

def stuck(how):
    import ctypes
    from pytest_fsdp_meta.worlds import current
    if how == "collective" and current().rank == 0:
        current().barrier()
    if how == "stopped":
        os.kill(os.getpid(), 19)
    if how == "locked":  # PyDLL keeps the interpreter's lock, so no thread of this rank can run
        ctypes.PyDLL(None).sleep(1000)
    time.sleep(1000)

preload().method = "{method}"
world = world_of(2)
world.start()
print(*world.run(os.getpid), *sum(world.run("tests.worlds.test_ends:start_children"), []), flush=True)
world.run(stuck, "{how}")
"""


def assert_folders_removed(folder: Path) -> None:
    deadline = time.monotonic() + 5.0  # the fork server removes the folders last
    while left := list(folder.glob("fsdp-*")):
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("how", "method"),
    [
        ("stopped", "forkserver"),
        ("locked", "bare"),
        pytest.param("collective", "forkserver", marks=pytest.mark.nightly),
        pytest.param("locked", "forkserver", marks=pytest.mark.nightly),
        pytest.param("collective", "bare", marks=pytest.mark.nightly),
    ],
)
def test_ranks_end_when_their_parent_is_killed(tmp_path: Path, how: str, method: str) -> None:
    text = ENDLESS.format(how=how, method=method)
    with ended_at_last(run_script(text, tmp_path, TMPDIR=str(tmp_path))) as process:
        assert process.stdout is not None
        pids = [int(word) for word in process.stdout.readline().split()]
        assert len(pids) == 10
        time.sleep(0.5)
        assert all(map(is_running, pids))
        process.kill()
        process.wait()
        assert_gone(pids)
    assert_folders_removed(tmp_path)


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        signal.SIGKILL,
        *(pytest.param(n, marks=pytest.mark.nightly) for n in (signal.SIGHUP, signal.SIGQUIT)),
    ],
)
def test_a_signal_to_the_whole_process_group(tmp_path: Path, number: signal.Signals) -> None:
    """timeout(1), terminals and CI systems signal the whole group: the parent and its fork server."""
    text = "import os\nos.setpgid(0, 0)\n" + ENDLESS.format(how="collective", method="forkserver")
    with ended_at_last(run_script(text, tmp_path, TMPDIR=str(tmp_path))) as process:
        assert process.stdout is not None
        pids = [int(word) for word in process.stdout.readline().split()]
        assert len(pids) == 10
        os.killpg(process.pid, number)
        process.wait()
        assert_gone(pids)
    assert_folders_removed(tmp_path)


def test_ranks_do_not_ignore_the_signals_that_the_fork_server_ignores() -> None:
    def ask() -> list[object]:
        return [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)]

    with world_of(1) as one:
        assert one.run(ask)[0] == ask()


def test_spawned_ranks_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    """Only the ranks: without a fork server, no other process knows what they have started."""
    text = """
import os, time
from tests.world_help import preload, world_of
preload().method = "spawn"
world = world_of(2)
world.start()
print(*world.run(os.getpid), flush=True)
world.run(time.sleep, 1000)
"""
    with ended_at_last(run_script(text, tmp_path)) as process:
        assert process.stdout is not None
        pids = [int(word) for word in process.stdout.readline().split()]
        assert len(pids) == 2
        process.kill()
        process.wait()
        assert_gone(pids)


@pytest.mark.parametrize("delay", [0.1, 1.0, 2.5])
def test_a_parent_killed_while_it_starts_leaves_nothing(tmp_path: Path, delay: float) -> None:
    """Find what it started by an environment variable that all its children inherit."""
    word = f"WORLD_TEST_{os.getpid()}_{int(delay * 10)}"
    text = ENDLESS.format(how="sleep", method="forkserver")
    with ended_at_last(run_script(text, tmp_path, TMPDIR=str(tmp_path), **{word: "1"})) as process:
        time.sleep(delay)
        process.kill()
        process.wait()
    assert_nothing_left(word, tmp_path)


def assert_nothing_left(word: str, folder: Path) -> None:
    """Wait until the processes with this environment variable have ended, and check that no temporary folder is left.

    multiprocessing makes the folder ``pymp-*`` for the socket of the fork server.
    """
    deadline = time.monotonic() + 5.0
    while left := processes_with(word):
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.1)
    assert not [*folder.glob("fsdp-*"), *folder.glob("pymp-*")]


IMPORTING = """
import ctypes, os, platform, threading, time
from pytest_fsdp_meta.worlds import ForkServerEngine, Sources
from tests.world_help import preload

here = os.path.dirname(__file__)
with open(here + "/endless.py", "w") as file:
    file.write(f"import time; open({here!r} + '/importing', 'w'); time.sleep(1000)")
engine = ForkServerEngine(Sources((here, *preload().sources.path)), test_modules=["endless"])
engine.start()
while not os.path.exists(here + "/importing"):
    time.sleep(0.01)
"""
"""Waits until its fork server has imported torch and imports a module that takes forever."""
DIE_BY_THREADS = """
threading.Timer(1.0, os.kill, (os.getpid(), 9)).start()
exit_of_a_thread = 93 if platform.machine() in ("aarch64", "arm64") else 60
ctypes.CDLL(None).syscall(exit_of_a_thread, 0)
"""
"""Ends the thread that started the fork server a second before the process ends, as some kills do for a moment."""


@pytest.mark.skipif(sys.platform != "linux", reason="on Linux the system tells processes that their parent has ended")
def test_a_parent_whose_threads_end_one_by_one_leaves_nothing(tmp_path: Path) -> None:
    word = f"WORLD_TEST_{os.getpid()}_threads"
    environ = {"TMPDIR": str(tmp_path), word: "1"}
    with ended_at_last(run_script(IMPORTING + DIE_BY_THREADS, tmp_path, **environ)) as process:
        assert process.wait(120) == -signal.SIGKILL
    assert_nothing_left(word, tmp_path)


def member_of(process: subprocess.Popen[bytes]) -> Any:
    """Return a member whose rank is this process."""
    member: Any = LocalMember
    return member(0, SimpleNamespace(pid=process.pid, exitcode=0), pipe=None, output=None, stacks=None)


def test_what_a_rank_has_left_in_its_group_ends_with_it() -> None:
    with subprocess.Popen(["sh", "-c", "sleep 1000 & echo $!"], stdout=-1, start_new_session=True) as process:
        member = member_of(process)
        assert process.stdout is not None
        child = int(process.stdout.readline())
        process.wait()
        member.kill()
    assert_gone([child])


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the system does not say when a process was started")
def test_a_process_that_was_given_the_number_of_a_rank_is_left_alone() -> None:
    with subprocess.Popen(["sleep", "1000"], start_new_session=True) as process:
        member = member_of(process)
        process.kill()
    time.sleep(0.05)  # the system counts start times in hundredths
    with subprocess.Popen(["sleep", "1000"], start_new_session=True) as other:
        member.process.pid = other.pid
        member.kill()
        time.sleep(0.1)
        alive = is_running(other.pid)
        other.kill()
    assert alive
