"""What is told of a world that does not answer: who waits for whom, and where every rank stands."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_fsdp_meta.worlds import ForkServerEngine, Sources, World, WorldError, WorldSpec, current, world
from pytest_fsdp_meta.worlds.diagnosis import native_stacks
from pytest_fsdp_meta.worlds.diagnosis.flight_recorder import Collective, Flight, Group, read
from pytest_fsdp_meta.worlds.diagnosis.hang import describe
from pytest_fsdp_meta.worlds.rank import tracebacks
from tests.world_help import assert_gone, fails, preload, world_of

HERE = r"test_hangs.py:\d+"


def hung(size: int, function: Callable[..., object], *args: object) -> WorldError:
    stuck = world_of(size, timeout=2.0)
    stuck.start()
    return fails(stuck, function, *args)


def stood(error: WorldError) -> dict[str, str]:
    """What the ranks are said to have stood at, by their names."""
    return dict(re.findall(r"stack of (ranks? [\d, -]+) \(innermost frame last\):\n((?:  .*\n?)+)", str(error)))


def late(absent: Callable[[], object]) -> Callable[[], None]:
    """Rank 1 does something else, while the others wait for it."""

    def function() -> None:
        import torch
        import torch.distributed as dist

        dist.barrier()
        if dist.get_rank() == 1:
            absent()
            return
        dist.all_reduce(torch.ones(3))

    return function


def test_a_deadlock_shows_who_waits_for_whom_and_the_stacks_of_all_ranks() -> None:
    def oversleep() -> None:
        time.sleep(1000)

    error = hung(3, late(oversleep))
    assert error.summary == "ranks 0-2 did not answer within 2 s"
    assert {one.kind for one in error.failures} == {"hung"}
    assert re.fullmatch(
        "in the default group:\n"
        rf"  ranks 0, 2 wait in all_reduce number 2 \(float\[3\], {HERE}\)\n"
        rf"  rank 1 did not enter it; the last there was barrier number 1 \({HERE}\)",
        error.view,
    )
    told = str(error)
    assert told.startswith(f"{error.summary}\n(while running late.<locals>.function)\n\n{error.view}\n\nstack of rank")
    where = stood(error)
    assert set(where) == {"rank 1", "ranks 0, 2"}, told
    assert re.search(r"in oversleep(\n  in C: .*)?$", where["rank 1"].rstrip())
    assert re.search(r"in all_reduce(\n  in C: .*)?$", where["ranks 0, 2"].rstrip())
    assert "_listen" not in told


def test_a_rank_that_has_returned_while_the_others_wait_for_it() -> None:
    error = hung(2, late(lambda: None))
    assert error.summary == "rank 0 did not answer within 2 s"
    assert [(one.rank, one.kind) for one in error.failures] == [(0, "hung"), (1, "answered")]
    assert re.search(rf"\n  rank 1 returned; the last there was barrier number 1 \({HERE}\)$", error.view)
    assert stood(error)["rank 1"].strip() == "(it has returned)"


def test_a_hang_outside_of_any_collective() -> None:
    def hang() -> None:
        if current().rank == 1:
            time.sleep(1000)

    error = hung(2, hang)
    assert error.summary == "rank 1 did not answer within 2 s"
    assert not error.view
    assert "in hang" in stood(error)["rank 1"]


def test_ranks_in_different_collectives() -> None:
    def differ() -> None:
        import torch
        import torch.distributed as dist

        mine = torch.ones(2, dtype=torch.bfloat16)
        if dist.get_rank() == 1:
            dist.all_gather([torch.empty_like(mine)] * 2, mine)
        else:
            dist.all_reduce(mine)

    view = hung(2, differ).view.splitlines()
    assert re.fullmatch(rf"  rank 0 waits in all_reduce number 1 \(bfloat16\[2\], {HERE}\)", view[1])
    assert re.fullmatch(rf"  rank 1 waits in all_gather number 1 \(bfloat16\[2\], {HERE}\)", view[2])
    assert view[3] == "  they do not fit together: number 1 is not the same on these ranks"


def test_groups_that_wait_for_each_other() -> None:
    def cross() -> None:
        import torch
        import torch.distributed as dist

        pair = dist.new_group([0, 2], group_desc="pair")
        first, second = (pair, None) if dist.get_rank() == 2 else (None, pair)
        for group in (first, second):
            dist.all_reduce(torch.ones(1), group=group)

    view = hung(3, cross).view
    default, pair = view.split("in group pair of ranks 0, 2:\n")
    assert default.startswith("in the default group:\n  ranks 0, 1 wait in all_reduce number 1 ")
    assert "  rank 2 did not enter it, nor any before" in default
    assert pair.startswith("  rank 2 waits in all_reduce number 1 ")
    assert "  rank 0 did not enter it, nor any before" in pair


def test_a_rank_that_keeps_the_interpreters_lock_is_looked_at_from_outside() -> None:
    error = hung(2, late(lambda: ctypes.PyDLL(None).sleep(1000)))
    assert "  rank 1 did not say" in error.view
    assert "test_hangs.py" in stood(error)["rank 1"]


def test_a_stopped_rank() -> None:
    error = hung(2, late(lambda: os.kill(os.getpid(), signal.SIGSTOP)))
    assert error.summary == "ranks 0, 1 did not answer within 2 s"
    assert stood(error)["rank 1"].startswith("  (it did not react: it is stopped)")


def test_ranks_that_hang_while_they_join(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "STARTING", 3.0)
    (tmp_path / "never.py").write_text(
        "import time, torch.distributed as dist\ndef join(*given, **named): time.sleep(1000)\n"
        "dist.init_process_group = join\n"
    )
    shared = ForkServerEngine(Sources((str(tmp_path), *preload().sources.path)), test_modules=["never"])
    stuck = World(WorldSpec({"dp": 2}, timeout=3.0), shared)
    with pytest.raises(WorldError) as caught:
        stuck.start()
    assert caught.value.summary == "ranks 0, 1 did not answer within 3 s"
    assert "(while joining the process group)" in str(caught.value)
    assert "in join" in stood(caught.value)["ranks 0, 1"]


def collective(number: int, name: str = "all_reduce", done: bool = False, tensors: str = "float[1]") -> Collective:
    return Collective("0", number, name, tensors, "x.py:7", done)


def flight(*collectives: Collective, size: int = 2) -> Flight:
    return Flight(collectives, {"0": Group("the default group", tuple(range(size)))})


@pytest.mark.parametrize(
    ("flights", "lines"),
    [
        ([flight(collective(1, done=True)), flight(collective(1, done=True))], []),
        ([flight(), flight()], []),
        ([None, None], []),
        (
            [flight(collective(4)), flight(collective(4))],
            ["ranks 0, 1 wait in all_reduce number 4 (float[1], x.py:7)", "all are there, and it does not end"],
        ),
        (
            [flight(collective(4)), None],
            ["rank 0 waits in all_reduce number 4 (float[1], x.py:7)", "rank 1 did not say"],
        ),
        (
            [flight(collective(1)), flight(collective(1, "broadcast", done=True), collective(2))],
            [
                "rank 0 waits in all_reduce number 1 (float[1], x.py:7)",
                "rank 1 waits in all_reduce number 2 (float[1], x.py:7)",
                "they do not fit together: number 1 is not the same on these ranks",
            ],
        ),
        (
            [flight(collective(1)), flight(collective(1, "broadcast", done=True), collective(2, done=True))],
            [
                "rank 0 waits in all_reduce number 1 (float[1], x.py:7)",
                "rank 1 went on from broadcast number 1 (float[1], x.py:7)",
                "they do not fit together: number 1 is not the same on these ranks",
            ],
        ),
        (
            [flight(collective(1)), flight(collective(1, tensors="float[2]"))],
            [
                "rank 0 waits in all_reduce number 1 (float[1], x.py:7)",
                "rank 1 waits in all_reduce number 1 (float[2], x.py:7)",
                "they do not fit together: number 1 is not the same on these ranks",
            ],
        ),
        (
            [flight(collective(1, "scatter")), flight(collective(1, "scatter", tensors=""))],
            [
                "rank 0 waits in scatter number 1 (float[1], x.py:7)",
                "rank 1 waits in scatter number 1 (x.py:7)",
                "all are there, and it does not end",
            ],
        ),
    ],
)
def test_the_view_of_collectives(flights: list[Flight | None], lines: list[str]) -> None:
    told = describe(dict(enumerate(flights)))
    assert told.splitlines() == (["in the default group:", *(f"  {line}" for line in lines)] if lines else [])


def test_what_torch_keeps_private() -> None:
    """Breaks when ``flight`` does not find torch's recorder any more."""

    def fly() -> Flight:
        import torch
        import torch.distributed as dist

        dist.new_group([0], group_desc="alone")
        dist.barrier()
        dist.all_reduce(torch.ones(2, 3))
        dist.barrier()  # what has just ended may not have been noted yet
        return read()

    for rank, seen in enumerate(_run(fly)):
        assert seen.groups == {
            "0": Group("the default group", (0, 1)),
            **({} if rank else {"1": Group("alone", (0,))}),
        }
        assert [(one.group, one.name, one.tensors, one.number) for one in seen.collectives] == [
            ("0", "barrier", "", 1),
            ("0", "all_reduce", "float[2, 3]", 2),
            ("0", "barrier", "", 3),
        ]
        assert all(re.fullmatch(HERE, one.where) for one in seen.collectives)
        assert seen.collectives[1].done


def test_a_recorder_that_the_user_has_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "0")

    def fly() -> Flight:
        current().barrier()
        return read()

    assert [seen.collectives for seen in _run(fly)] == [(), ()]


def test_another_torch_without_the_recorder() -> None:
    def fly() -> Flight:
        import torch

        del torch._C._distributed_c10d._dump_fr_trace
        current().barrier()
        return read()

    assert _run(fly) == [Flight(groups={"0": Group("the default group", (0, 1))})] * 2


def _run(function: Callable[[], Flight]) -> list[Flight]:
    with world_of(2) as world:
        return world.run(function)


def test_a_dump_of_ours_reads_as_one_of_faulthandler() -> None:
    def inner() -> str:
        return tracebacks.user_stack(tracebacks.dump())

    assert re.search(r'File ".*test_hangs.py", line \d+ in inner$', inner(), re.MULTILINE)


BACKTRACE = """\
[New LWP 16201]
0x00007f0ab46e4545 in __GI___clock_nanosleep (clock_id=clock_id@entry=1) at ../sysdeps/clock_nanosleep.c:48
#0  __futex_abstimed_wait_common64 (private=0, cancel=true) at ./nptl/futex-internal.c:57
#1  0x00007fea590a3f7b in __GI___futex_abstimed_wait_cancelable64 (futex_word=...) at ./nptl/futex-internal.c:139
#2  ___pthread_cond_wait (cond=0x556ea93aead8, mutex=0x556ea93aeab0) at ./nptl/pthread_cond_wait.c:618
#3  0x00007fea41ca741d in std::condition_variable::wait(std::unique_lock<std::mutex>&) () from /lib/libstdc++.so.6
#4  0x00007fea4876984b in ?? () from /opt/torch/lib/libtorch_cpu.so
#5  0x00007fea57acc5e8 in never (shown=...) at here.c:1
"""


@pytest.mark.parametrize(
    ("backtrace", "line"),
    [
        (BACKTRACE, "libtorch_cpu.so > std::condition_variable::wait > pthread_cond_wait"),
        (
            "#0  time_sleep (self=..., o=...) at ./t.c:3\n#1  0x01 in cfunction_vectorcall_O (f=...) at o.c:5",
            "time_sleep",
        ),
        ("#0  _PyEval_EvalFrameDefault (tstate=...) at Python/ceval.c:47\n#1  x () at y.c:3", ""),
        ("ptrace: Operation not permitted.\nNo stack.", ""),
        ("", ""),
    ],
)
def test_a_backtrace_in_one_line(backtrace: str, line: str) -> None:
    assert native_stacks.read(backtrace) == line


@pytest.mark.skipif(not shutil.which("gdb"), reason="gdb is not on the PATH")
def test_what_gdb_sees_of_a_process() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", "import time; print(flush=True); time.sleep(1000)"], stdout=-1
    ) as child:
        try:
            assert child.stdout is not None
            child.stdout.readline()
            seen = native_stacks.stacks({7: child.pid}, seconds=20.0)
        finally:
            child.kill()
    if seen:  # where debuggers are not permitted there is nothing to see
        assert list(seen) == [7]
        assert seen[7].startswith("  in C: ")
        assert "nanosleep" in seen[7]


def test_a_debugger_that_does_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    endless = tmp_path / "gdb"
    endless.write_text(f"#!/bin/sh\necho $$ >> {tmp_path}/pids\necho '#0  found (x=...) at y.c:3'\nexec sleep 1000\n")
    endless.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert native_stacks.stacks({0: 1, 1: 1}, seconds=2.0) == {0: "  in C: found", 1: "  in C: found"}
    assert_gone(int(pid) for pid in (tmp_path / "pids").read_text().split())
    monkeypatch.setenv("PATH", os.fspath(tmp_path / "nowhere"))
    assert native_stacks.stacks({0: 1}) == {}
