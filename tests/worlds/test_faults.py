"""Worlds that fail: the error comes soon and names the right rank first, and the next world is not affected."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from pytest_fsdp_meta.worlds import Misuse, RankFailure, WorldError, current
from pytest_fsdp_meta.worlds.failures import CUT_OFF
from tests.world_help import (
    SOON,
    assert_gone,
    fails,
    me,
    on_rank,
    run_script,
    total,
    world,
    world_of,
)

pytestmark = pytest.mark.usefixtures("next_world_works")


def boom() -> None:
    raise RuntimeError("boom\nwith a second line")


def test_exception_on_one_rank() -> None:
    error = fails(world(4), on_rank(2, boom))
    assert error.summary == "rank 2 raised RuntimeError: boom"
    assert [(one.rank, one.kind, one.exception, one.message) for one in error.failures] == [
        (2, "raised", "builtins.RuntimeError", "boom\nwith a second line")
    ]
    lines = str(error).splitlines()
    assert lines[:2] == ["rank 2 raised RuntimeError: boom", "(while running on_rank.<locals>.function)"]
    assert lines[3] == "Traceback (most recent call last):"
    assert "pytest_fsdp_meta" not in str(error), "the traceback begins with the user's code"
    assert re.search(r'test_faults.py", line \d+, in boom\n    raise RuntimeError', str(error))
    assert not error.user


def test_the_same_exception_on_all_ranks_is_reported_once() -> None:
    error = fails(world(4), boom)
    assert error.summary == "ranks 0-3 raised RuntimeError: boom"
    assert len(error.failures) == 4
    assert str(error).count("RuntimeError: boom") == 2, "in the first line and in one traceback"


def test_different_exceptions_are_reported_in_order_of_time() -> None:
    def differ() -> None:
        time.sleep(0.2 * (1 - current().rank))
        raise ValueError(f"mine is {current().rank}")

    text = str(fails(world(2), differ))
    assert text.startswith("rank 1 raised ValueError: mine is 1\n(while running")
    assert "\n\nthen rank 0 raised ValueError: mine is 0\n\n" in text


def test_a_failed_checkpoint_is_named_by_what_its_first_rank_raised(tmp_path: Path) -> None:
    def load() -> None:
        import torch.distributed.checkpoint as dcp

        dcp.load({"weight": None}, checkpoint_id=tmp_path)

    summary = fails(world(2), load).summary
    assert summary.startswith("ranks 0, 1 raised CheckpointException: AssertionError: metadata is None; ")


@pytest.mark.parametrize(("ranks", "text"), [([0, 1, 2], "declare the batch"), ([1], "rank 1: declare the batch")])
def test_a_misuse_is_reported_by_its_message_alone(ranks: list[int], text: str) -> None:
    def misuse() -> None:
        if current().rank in ranks:
            raise Misuse("declare the batch")

    error = fails(world(3), misuse)
    assert error.user
    assert str(error) == error.summary == text


def test_control_characters_of_a_rank_are_escaped() -> None:
    def colour() -> None:
        raise ValueError("\x1b[31mred\x1b[0m\tand\nmore \x9b2J\r")

    error = fails(world(1), colour)
    assert error.summary == "rank 0 raised ValueError: red\tand"
    assert error.failures[0].message == "red\tand\nmore \\x9b2J\\r"
    assert "\x1b" not in str(error)
    assert "more \\x9b2J" in str(error)


def test_an_exception_without_text() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise TypeError

    def be_mute() -> None:
        raise Mute

    assert fails(world(1), be_mute).summary == "rank 0 raised Mute: (its __str__ raised an exception)"


def test_a_label_replaces_the_name_of_the_only_rank() -> None:
    alone = world_of(1, label="the reference")
    with alone:
        assert fails(alone, boom).summary == "the reference raised RuntimeError: boom"


def fork_and_die() -> None:
    """End while a child holds the pipe of this rank."""
    if os.fork() == 0:
        time.sleep(1000)
    os._exit(9)


@pytest.mark.parametrize(
    ("act", "summary"),
    [
        (lambda: os._exit(7), "exited with code 7 before it answered"),
        (lambda: os._exit(CUT_OFF), f"exited with code {CUT_OFF} before it answered"),
        (lambda: os._exit(0), "exited with code 0 before it answered"),
        (lambda: sys.exit(3), "raised SystemExit: 3"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "was killed by SIGKILL"),
        (lambda: ctypes.string_at(0), "was killed by SIGSEGV"),
        (lambda: os.abort(), "was killed by SIGABRT"),
        (fork_and_die, "exited with code 9 before it answered"),
    ],
    ids=["exit7", "exited like a rank that was cut off", "exit0", "sys.exit", "sigkill", "sigsegv", "abort", "fork"],
)
def test_the_rank_that_ended_is_named_not_those_that_waited_for_it(act: Callable[[], object], summary: str) -> None:
    broken = world(4)
    error = fails(broken, on_rank(1, act))
    assert error.summary == f"rank 1 {summary}"
    assert error.failures[0].rank == 1
    for waiting in error.failures[1:]:
        assert waiting.lost_peer
    assert re.fullmatch(
        rf"rank 1 {summary}\n\(while running \S+\)(\n\nthen ranks? [\d, -]+ lost the connection to it)?",
        str(error) if "raised" not in summary else "\n".join(str(error).splitlines()[:2]),
    )


def test_where_a_rank_crashed_is_in_its_output() -> None:
    broken = world(2)
    fails(broken, on_rank(1, lambda: ctypes.string_at(0)))
    assert "Fatal Python error: Segmentation fault" in broken.outputs()[1]
    assert "Segmentation" not in broken.outputs()[0]


def test_ranks_that_reduce_tensors_of_different_sizes() -> None:
    """gloo aborts in its own thread: nothing is raised in Python, and the reason is only in the rank's output."""

    def reduce() -> None:
        import torch
        import torch.distributed as dist

        gathered = torch.empty(4 + 2 * current().rank)
        dist.reduce_scatter_tensor(torch.empty(len(gathered) // 2), gathered)

    error = fails(world(2), reduce)
    assert re.fullmatch(
        r"ranks? \d(, 1)? (was|were) killed by SIGABRT: .*Received data size doesn't match expected size\. .*",
        error.summary,
    )
    was_in = r"\w*reduce\w*( number \d+ \(float\[[46]\], |, )test_faults\.py:\d+\)?"
    assert re.search(rf"do not match:\n  rank 0 was in {was_in}\n  rank 1 was in {was_in}\n", str(error))


def test_output_of_a_failed_world_is_kept() -> None:
    def speak() -> None:
        print("so far", current().rank)
        on_rank(0, lambda: os._exit(1))()

    broken = world(2)
    error = fails(broken, speak)
    assert broken.outputs() == list(error.outputs) == ["so far 0\n", "so far 1\n"]


def test_a_rank_that_dies_between_calls() -> None:
    broken = world(2)
    pids = broken.run(os.getpid)
    os.kill(pids[1], signal.SIGKILL)
    assert_gone(pids[1:])
    with pytest.raises(WorldError) as caught:
        broken.run(total, 1.0)
    assert caught.value.summary == "rank 1 was killed by SIGKILL"
    assert_gone(pids)


def test_a_rank_that_has_answered_and_dies_while_others_wait_for_it() -> None:
    def answer_and_die() -> None:
        if current().rank == 0:
            threading.Timer(0.5, os._exit, (5,)).start()
        else:
            time.sleep(1000)

    assert fails(world(2), answer_and_die).summary == "rank 0 exited with code 5 before it answered"


@pytest.mark.nightly
def test_a_rank_stopped_in_the_middle_of_a_large_result() -> None:
    def stop_soon() -> bytes:
        if current().rank == 1:
            data = b"x" * (200 * 2**20)
            subprocess.Popen(["sh", "-c", f"sleep 0.02; kill -STOP {os.getpid()}"])
            return data
        return b""

    stopped = world(2, timeout=3.0)
    pids = stopped.run(os.getpid)
    began = time.monotonic()
    # The rank may have sent its result before it is stopped, so the call may also succeed.
    with suppress(WorldError):
        stopped.run(stop_soon)
    stopped.close()
    assert time.monotonic() - began < SOON
    assert_gone(pids)


@pytest.mark.nightly
def test_large_arguments_for_a_stopped_rank() -> None:
    stopped = world(2, timeout=1.0)
    os.kill(stopped.run(os.getpid)[1], signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(WorldError) as caught:
        stopped.run(len, b"x" * (20 * 2**20))
    assert caught.value.summary == "rank 1 was stopped by a signal such as SIGSTOP; rank 0 had returned"
    assert time.monotonic() - began < SOON


def test_a_rank_that_cannot_join() -> None:
    broken = world_of(2, backend="nonsense")
    with pytest.raises(WorldError) as caught:
        broken.start()
    assert re.match(r"ranks 0, 1 raised \w+: .*nonsense", caught.value.summary, re.IGNORECASE)
    assert "(while joining the process group)" in str(caught.value)
    assert not broken.alive


def test_a_device_that_does_not_exist() -> None:
    broken = world_of(2, device_type="cuda", backend="gloo", devices=(998, 999))
    with pytest.raises(WorldError) as caught:
        broken.start()
    assert re.match(r"ranks? 0\b.* raised ", caught.value.summary)


def test_a_rank_that_cannot_enter_the_parents_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(FileNotFoundError):
        world_of(2).start()
    monkeypatch.chdir(tmp_path)


def test_threads_that_a_loader_leaves_behind_do_not_delay_the_end() -> None:
    def leave_thread() -> None:
        threading.Thread(target=time.sleep, args=(1000,), daemon=False).start()

    left = world(2)
    left.run(leave_thread)
    pids = left.run(os.getpid)
    began = time.monotonic()
    left.close()
    assert_gone(pids)
    assert time.monotonic() - began < SOON


def test_a_rank_whose_standard_output_was_closed_still_answers() -> None:
    def close() -> tuple[int, int]:
        sys.stdout.close()
        sys.stderr = None
        return me()

    with world_of(2) as quiet:
        assert quiet.run(close) == [(0, 2), (1, 2)]


def test_the_first_failure_is_named_even_if_its_consequence_was_reported_before() -> None:
    message = "[gloo/pair.cc] Connection closed by peer"
    lost = RankFailure(0, "raised", f"raised RuntimeError: {message}", when=1.0, message=message)
    killed = RankFailure(1, "killed", "was killed by SIGKILL", when=1.1)
    assert WorldError([lost, killed], "testing").summary == "rank 1 was killed by SIGKILL"
    assert WorldError([lost], "testing").summary.startswith("rank 0 raised RuntimeError: [gloo")


def test_a_connection_error_of_the_users_own_is_not_a_consequence() -> None:
    def refuse() -> None:
        raise ConnectionRefusedError("Connection refused by the hub")

    error = fails(world(2), refuse)
    assert error.summary == "ranks 0, 1 raised ConnectionRefusedError: Connection refused by the hub"
    assert "lost the connection" not in str(error)


def leave(delays: dict[int, float]) -> None:
    """Raise LookupError on these ranks, each after its delay in seconds."""
    if current().rank in delays:
        time.sleep(delays[current().rank])
        raise LookupError("nothing to do")


@pytest.mark.parametrize(
    ("delays", "outcomes", "unanimous", "survives"),
    [
        ({0: 0.0, 1: 1.5}, ["builtins.LookupError"], "builtins.LookupError", True),
        ({1: 0.0}, ["builtins.LookupError"], "", False),
        ({0: 0.0, 1: 0.0}, [], "builtins.LookupError", False),
    ],
    ids=["an outcome of all ranks", "of one rank only", "an exception that is no outcome"],
)
def test_a_world_survives_only_a_unanimous_outcome(
    delays: dict[int, float], outcomes: list[str], unanimous: str, survives: bool
) -> None:
    with world_of(2) as running:
        with pytest.raises(WorldError) as caught:
            running.call(leave, [delays], unanimous_outcomes=outcomes)
        assert {failure.rank for failure in caught.value.failures} == set(delays)
        assert caught.value.unanimous == unanimous
        assert running.alive == survives
        assert not survives or running.run(total, 1.0) == [1.0, 1.0]


def test_the_fork_server_is_killed() -> None:
    broken = world(2)
    (server,) = set(broken.run(os.getppid))
    threading.Timer(0.3, os.kill, (server, signal.SIGKILL)).start()
    error = fails(broken, time.sleep, 1000)
    assert error.summary == "ranks 0, 1 were killed because the fork server of all ranks was ended from outside"


SHORT_OF_DESCRIPTORS = """
import os, resource, tempfile
from pathlib import Path
from pytest_fsdp_meta.worlds import WorldError
from tests.world_help import preload, total, world, world_of

if __name__ == "__main__":
    preload().ready()
    for free in (5, 6, 8, 15, 40):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = len(os.listdir("/proc/self/fd")) + free
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        try:
            world(8)
        except WorldError as error:
            print(str(error).replace(f"(limit {most})", "(limit MOST)"))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    print(list(Path(tempfile.gettempdir()).glob("fsdp-world-*")))
    with world_of(2) as running:
        print(running.run(total, 1.0))
"""
"""Run in a process of its own: in a test process, garbage that is collected meanwhile closes descriptors."""


def test_running_out_of_file_descriptors(tmp_path: Path) -> None:
    process = run_script(SHORT_OF_DESCRIPTORS, tmp_path, TMPDIR=str(tmp_path))
    line = "out of file descriptors (limit MOST); the pytest process needs 4 for each rank; raise it with ulimit -n"
    assert process.communicate(timeout=120)[0].splitlines() == [*[line] * 5, "[]", "[1.0, 1.0]"]
