"""Output of ranks: from Python, C and children, since a mark, and line by line while a call runs."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from pytest_fsdp_meta.worlds import Listener, World, WorldError, current
from pytest_fsdp_meta.worlds.system.output import LIMIT, OutputFollower, OutputTail, read
from tests.world_help import SOON, world_of


def say(word: str, end: str = "\n") -> None:
    print(f"{word} {current().rank}", end=end)


@pytest.fixture(scope="module")
def pair() -> Iterator[World]:
    with world_of(2) as world:
        yield world


def test_a_mark_outlives_the_world() -> None:
    with world_of(2) as world:
        world.run(say, "first", "")
        mark = world.mark()
        assert world.outputs(since=mark) == ["", ""]
        world.run(say, "second")
        assert world.outputs(since=mark) == ["second 0\n", "second 1\n"]
    assert world.outputs(since=mark) == ["second 0\n", "second 1\n"]
    assert world.outputs() == ["first 0second 0\n", "first 1second 1\n"]
    assert world.mark() == [len("first 0second 0\n")] * 2


def test_output_of_c_code_is_complete_after_an_answer_and_after_a_kill(pair: World) -> None:
    def write(text: bytes) -> None:
        ctypes.CDLL(None).printf(b"%s", text)

    mark = pair.mark()
    pair.run(write, b"unfinished")
    assert pair.outputs(since=mark) == ["unfinished"] * 2

    def die() -> None:
        write(b"complete\n")
        os.kill(os.getpid(), 9)

    with world_of(1) as world, pytest.raises(WorldError):
        world.run(die)
    assert world.outputs() == ["complete\n"]


@pytest.mark.parametrize(
    ("size", "mark", "shown"),
    [
        (10, 0, "0123456789"),
        (10, 4, "456789"),
        (10, 10, ""),
        (10, 12, ""),
        (100, 0, "(the last 10 of 100 bytes)\n0123456789"),
        (100, 50, "(the last 10 of 50 bytes)\n0123456789"),
        (100, 90, "0123456789"),
        (100, 97, "789"),
    ],
)
def test_long_output_is_cut_at_the_start(size: int, mark: int, shown: str) -> None:
    assert OutputTail(size, b"0123456789").since(mark) == shown


def test_a_missing_file_counts_as_empty_output(tmp_path: Path) -> None:
    assert OutputTail.read(tmp_path / "none") == OutputTail()


class LineRecorder(Listener):
    live = True

    def __init__(self) -> None:
        self.lines: list[tuple[int, str]] = []
        self.event = threading.Event()

    def on_output(self, world: World, rank: int, lines: Sequence[str]) -> None:
        self.lines += [(rank, line) for line in lines]
        self.event.set()


def test_complete_lines_arrive_during_the_call_and_the_rest_at_the_end() -> None:
    recorder = LineRecorder()

    def speak(file: str) -> None:
        say("early")
        print("half of ", end="", flush=True)
        while not os.path.exists(file):
            time.sleep(0.01)
        print("a line")
        print("unfinished", end="")

    with world_of(2, listener=recorder) as world:
        file = world.folder / "go"

        def go() -> None:
            deadline = time.monotonic() + SOON
            while len(recorder.lines) < 2 and time.monotonic() < deadline:
                recorder.event.wait(0.1)
            early.extend(sorted(recorder.lines))
            file.touch()

        early: list[tuple[int, str]] = []
        watch = threading.Thread(target=go)
        watch.start()
        world.run(speak, str(file))
        watch.join()
        assert early == [(0, "early 0"), (1, "early 1")], "only complete lines"
    for rank in (0, 1):
        assert [line for who, line in recorder.lines if who == rank] == [
            f"early {rank}",
            "half of a line",
            "unfinished",
        ]


def test_a_flood_of_lines_arrives_whole_and_in_order() -> None:
    def flood(lines: int) -> None:
        for number in range(lines):
            print(number, "x" * 100)

    recorder = LineRecorder()
    with world_of(2, listener=recorder) as world:
        world.run(flood, 50_000)
    for rank in (0, 1):
        lines = [line for who, line in recorder.lines if who == rank]
        assert [int(line.split()[0]) for line in lines] == list(range(50_000))
    assert len(world.outputs()[0]) < 2 * LIMIT


def test_output_is_not_followed_unless_the_listener_wants_it() -> None:
    with world_of(1) as world:
        world.run(say, "anything")
        assert "pytest-fsdp-meta output" not in [thread.name for thread in threading.enumerate()]


def test_a_progress_bar_and_a_line_that_ends_late(tmp_path: Path) -> None:
    received: list[tuple[int, list[str]]] = []
    path = tmp_path / "out"
    path.write_bytes(b" 0%|\r50%|\r100%|\nwindows\r\n\xff\n\nlong")
    follower = OutputFollower(
        [partial(read, path), partial(read, tmp_path / "none")], lambda rank, lines: received.append((rank, lines))
    )
    with path.open("ab") as file:
        file.write(b" and longer" * 3)
    follower.stop()
    lines = [line for rank, lines in received for line in lines]
    assert lines == ["100%|", "windows", "\\xff", "", "long and longer and longer and longer"]
    assert {rank for rank, _ in received} == {0}
