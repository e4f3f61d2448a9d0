"""The first line about a hang, from hand-made answers of ranks."""

from __future__ import annotations

import sysconfig

import pytest

from pytest_fsdp_meta.worlds import RankFailure, WorldError
from pytest_fsdp_meta.worlds.diagnosis.flight_recorder import Collective, Flight, Whereabouts
from pytest_fsdp_meta.worlds.diagnosis.hang import rank_states

STACK = '  File "/work/test_x.py", line {line} in {function}\n  File "{library}/torch/x.py", line 5 in wait'


def at(line: int, function: str = "load", flight: Flight | None = None) -> Whereabouts:
    library = sysconfig.get_path("purelib")
    return Whereabouts(STACK.format(line=line, function=function, library=library), flight)


def waiting(name: str, number: int, group: str = "0", line: int = 7) -> Whereabouts:
    entered = [
        Collective(group, count, "broadcast" if count < number else name, "", f"test_x.py:{line}", done=count < number)
        for count in range(1, number + 1)
    ]
    return at(line, flight=Flight(tuple(entered)))


def headline(*found: Whereabouts, answered: tuple[int, ...] = (), label: str = "") -> str:
    states = rank_states(dict(enumerate(found)), answered)
    hung = [RankFailure(rank, "hung", "did not answer") for rank in range(len(found)) if rank not in answered]
    return WorldError(hung, "testing", [""] * len(found), label, states=states).summary


@pytest.mark.parametrize(
    ("found", "answered", "expected"),
    [
        (
            [waiting("barrier", 1), at(9)],
            (1,),
            "rank 0 hung in barrier, test_x.py:7; rank 1 had returned",
        ),
        (
            [waiting("all_reduce", 3), waiting("all_gather", 2, line=4), waiting("all_reduce", 3)],
            (),
            "rank 1 hung in all_gather, test_x.py:4; ranks 0, 2 wait in all_reduce, test_x.py:7",
        ),
        (
            [waiting("barrier", 2), waiting("barrier", 2)],
            (),
            "ranks 0, 1 hung in barrier, test_x.py:7",
        ),
        (
            [waiting("barrier", 5, group="a"), waiting("barrier", 2, group="b", line=8)],
            (),
            "rank 0 hung in barrier, test_x.py:7; rank 1 hung in barrier, test_x.py:8",
        ),
        (
            [Whereabouts("  (it did not react)", stopped=True), waiting("barrier", 1), at(3), at(3)],
            (),
            "rank 0 was stopped by a signal such as SIGSTOP; ranks 2, 3 hung in load, test_x.py:3; "
            "rank 1 waits in barrier, test_x.py:7",
        ),
        (
            [Whereabouts("  (it did not react)"), waiting("barrier", 1)],
            (),
            "rank 0 did not respond; rank 1 waits in barrier, test_x.py:7",
        ),
        (
            [Whereabouts("", Flight())],  # in a function that is written in C
            (),
            "rank 0 hung outside of Python code",
        ),
        (
            [at(1), at(2), at(3), at(4), at(4)],
            (),
            "rank 0 hung in load, test_x.py:1; rank 1 hung in load, test_x.py:2; ranks 2-4 were elsewhere",
        ),
    ],
)
def test_headlines(found: list[Whereabouts], answered: tuple[int, ...], expected: str) -> None:
    assert headline(*found, answered=answered) == expected


def test_a_label_names_the_world() -> None:
    assert headline(at(3), label="the reference") == "the reference hung in load, test_x.py:3"
    two = [Whereabouts("", stopped=True), Whereabouts("", stopped=True)]
    assert headline(*two, label="the reload").startswith("ranks 0, 1 of the reload were stopped by a signal")


def test_a_stack_outside_of_the_users_code_names_the_innermost_frame() -> None:
    library = sysconfig.get_path("stdlib")
    found = Whereabouts(f'  File "{library}/runpy.py", line 8 in run\n  File "{library}/socket.py", line 9 in accept')
    assert headline(found) == "rank 0 hung in accept, socket.py:9"


def test_other_threads_are_not_the_place() -> None:
    stack = at(3).stack.rpartition("\n")[0] + '\n  (0x01)\n  File "/work/worker.py", line 1 in work'
    assert headline(Whereabouts(stack)) == "rank 0 hung in load, test_x.py:3"
