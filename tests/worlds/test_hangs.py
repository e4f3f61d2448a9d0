"""The description of a world that hangs: which ranks wait for which, and where every rank is."""

from __future__ import annotations

import ctypes
import multiprocessing.process
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pytest_fsdp_meta.worlds import ForkServerEngine, Sources, World, WorldError, WorldSpec, current, world
from pytest_fsdp_meta.worlds.diagnosis import flight_recorder, hang
from pytest_fsdp_meta.worlds.diagnosis.flight_recorder import Flight, Group, read
from pytest_fsdp_meta.worlds.rank import tracebacks
from tests.world_help import SOON, fails, preload, world_of

LINE = r"test_hangs.py:\d+"


def hung(size: int, function: Callable[..., object], *args: object) -> WorldError:
    """Return the error of a world whose ranks hang in this function."""
    stuck = world_of(size, timeout=2.0)
    stuck.start()
    return fails(stuck, function, *args)


def stacks_of(error: WorldError) -> dict[str, str]:
    """Return the stacks in the message of an error, by the ranks that they belong to."""
    return dict(re.findall(r"stack of (ranks? [\d, -]+) \(innermost frame last\):\n((?:  .*\n?)+)", str(error)))


def late(absent: Callable[[], object]) -> Callable[[], None]:
    """Return a function in which rank 1 calls ``absent`` while the other ranks wait for it in an all_reduce."""

    def function() -> None:
        import torch
        import torch.distributed as dist

        dist.barrier()
        if dist.get_rank() == 1:
            absent()
            return
        dist.all_reduce(torch.ones(3))

    return function


def test_a_deadlock_shows_the_collectives_and_the_stacks_of_all_ranks() -> None:
    def oversleep() -> None:
        time.sleep(1000)

    error = hung(3, late(oversleep))
    assert re.fullmatch(rf"rank 1 hung in oversleep, {LINE}; ranks 0, 2 wait in all_reduce, {LINE}", error.summary)
    assert error.place == f"{__file__}:{oversleep.__code__.co_firstlineno + 1}"
    assert {one.kind for one in error.failures} == {"hung"}
    assert re.fullmatch(
        "in the default group:\n"
        rf"  ranks 0, 2 wait in all_reduce number 2 \(float\[3\], {LINE}\)\n"
        rf"  rank 1 did not enter it; last in this group: barrier number 1 \({LINE}\)",
        error.view,
    )
    message = str(error)
    assert message.startswith(
        f"{error.summary}\n(did not answer within 2 s while running late.<locals>.function)\n\n"
        f"{error.view}\n\nstack of rank"
    )
    stacks = stacks_of(error)
    assert set(stacks) == {"rank 1", "ranks 0, 2"}, message
    assert re.search(r"in oversleep$", stacks["rank 1"].rstrip())
    assert re.search(r"in all_reduce$", stacks["ranks 0, 2"].rstrip())
    assert "_listen" not in message


def test_a_rank_that_returned_while_the_others_wait_for_it() -> None:
    error = hung(2, late(lambda: None))
    assert re.fullmatch(rf"rank 0 hung in all_reduce, {LINE}; rank 1 had returned", error.summary)
    assert [(one.rank, one.kind) for one in error.failures] == [(0, "hung"), (1, "answered")]
    assert re.search(rf"\n  rank 1 returned; last in this group: barrier number 1 \({LINE}\)$", error.view)
    assert stacks_of(error)["rank 1"].strip() == "(the call has returned)"


def test_groups_that_wait_for_each_other() -> None:
    def cross() -> None:
        import torch
        import torch.distributed as dist

        pair = dist.new_group([0, 2], group_desc="pair")
        first, second = (pair, None) if dist.get_rank() == 2 else (None, pair)
        for group in (first, second):
            dist.all_reduce(torch.ones(1), group=group)

    error = hung(3, cross)
    assert re.fullmatch(rf"ranks 0-2 hung in all_reduce, {LINE}", error.summary)
    view = error.view
    default, pair = view.split("in group pair of ranks 0, 2:\n")
    assert default.startswith("in the default group:\n  ranks 0, 1 wait in all_reduce number 1 ")
    assert "  rank 2 did not enter it, nor any earlier one" in default
    assert pair.startswith("  rank 2 waits in all_reduce number 1 ")
    assert "  rank 0 did not enter it, nor any earlier one" in pair


def test_a_rank_that_holds_the_interpreter_lock_is_inspected_from_outside() -> None:
    error = hung(2, late(lambda: ctypes.PyDLL(None).sleep(1000)))
    assert "  rank 1 did not respond" in error.view
    assert re.fullmatch(rf"rank 1 hung in <lambda>, {LINE}; rank 0 waits in all_reduce, {LINE}", error.summary)
    assert "test_hangs.py" in stacks_of(error)["rank 1"]


def test_a_stopped_rank_is_named_without_waiting_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang, "PATIENCE", 3 * SOON)
    error = hung(2, late(lambda: os.kill(os.getpid(), signal.SIGSTOP)))
    assert re.fullmatch(
        rf"rank 1 was stopped by a signal such as SIGSTOP; rank 0 waits in all_reduce, {LINE}", error.summary
    )
    assert stacks_of(error)["rank 1"].startswith("  (it did not react: it is stopped)")


@pytest.mark.nightly
def test_ranks_that_hang_while_joining_the_process_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "STARTING", 3.0)
    (tmp_path / "never.py").write_text(
        "import time, torch.distributed as dist\ndef join(*given, **named): time.sleep(1000)\n"
        "dist.init_process_group = join\n"
    )
    shared = ForkServerEngine(Sources((str(tmp_path), *preload().sources.path)), test_modules=["never"])
    stuck = World(WorldSpec({"dp": 2}, timeout=3.0), shared)
    with pytest.raises(WorldError) as caught:
        stuck.start()
    assert caught.value.summary == "ranks 0, 1 hung in join, never.py:2"
    assert "(did not answer within 3 s while joining the process group)" in str(caught.value)
    assert "in join" in stacks_of(caught.value)["ranks 0, 1"]


def test_private_names_of_torchs_flight_recorder() -> None:
    """Fails when ``flight_recorder`` does not find torch's recorder any more."""

    def collect() -> Flight:
        import torch
        import torch.distributed as dist

        dist.new_group([0], group_desc="alone")
        dist.barrier()
        dist.all_reduce(torch.ones(2, 3))
        dist.barrier()
        until = time.monotonic() + 10
        while not (flight := read()).collectives[1].done and time.monotonic() < until:
            time.sleep(0.01)  # a thread of gloo records the end of a collective after the call has returned
        return flight

    for rank, flight in enumerate(_run(collect)):
        assert flight.groups == {
            "0": Group("the default group", (0, 1)),
            **({} if rank else {"1": Group("alone", (0,))}),
        }
        assert [(one.group, one.name, one.tensors, one.number) for one in flight.collectives] == [
            ("0", "barrier", "", 1),
            ("0", "all_reduce", "float[2, 3]", 2),
            ("0", "barrier", "", 3),
        ]
        assert all(re.fullmatch(LINE, one.where) for one in flight.collectives)
        assert flight.collectives[1].done


def test_a_recorder_that_the_user_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "0")

    def collect() -> Flight:
        current().barrier()
        return read()

    assert [flight.collectives for flight in _run(collect)] == [(), ()]


def test_a_torch_without_the_recorder() -> None:
    def collect() -> Flight:
        import torch

        del torch._C._distributed_c10d._dump_fr_trace
        current().barrier()
        return read()

    assert _run(collect) == [Flight(groups={"0": Group("the default group", (0, 1))})] * 2


def _run(function: Callable[[], Flight]) -> list[Flight]:
    with world_of(2) as world:
        return world.run(function)


def test_dump_has_the_format_of_faulthandler() -> None:
    def inner() -> str:
        return tracebacks.user_stack(tracebacks.dump())

    assert re.search(r'File ".*test_hangs.py", line \d+ in inner$', inner(), re.MULTILINE)


@pytest.mark.parametrize(
    ("files", "where"),
    [
        (["/work/train.py", multiprocessing.process.__file__], "train.py:1"),
        ([multiprocessing.process.__file__], ""),
    ],
)
def test_a_collective_of_an_observer_is_not_placed_where_the_rank_was_started(files: list[str], where: str) -> None:
    frames = [{"filename": file, "line": 1} for file in (str(torch.__file__), str(flight_recorder.__file__), *files)]
    assert flight_recorder._user_line(frames) == where
