"""``--pdb`` and ``breakpoint()`` on ranks, with and without a terminal."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from typing import Any

import pytest

from tests.conftest import Project
from tests.world_help import assert_gone

pytestmark = pytest.mark.nightly

BOOM = """
import os

@fsdp_conformance(only=["no_meta_params", "no_meta_buffers"])
def test_x(fsdp):
    with open(f"pid{fsdp.rank}", "w") as file:
        file.write(str(os.getpid()))
    secret = f"secret of rank {fsdp.rank}"
    if fsdp.rank == 1:
        raise RuntimeError("boom")
    fsdp.barrier()

@fsdp_conformance(only=["no_meta_params"])
def test_after(fsdp):
    return load(fsdp)
"""
PROMPT = r"\(Pdb\) "


@pytest.fixture
def shell(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("TERM", "dumb")

    def start(*args: str) -> Any:
        # A shell starts background jobs with SIGINT ignored, and child processes inherit that.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return pytester.spawn(f"{sys.executable} -m pytest -p no:cacheprovider {' '.join(args)}", expect_timeout=120)

    return start


def pids(project: Project) -> list[int]:
    """Return the process ids of both ranks of ``BOOM``."""
    return [int((project.path / f"pid{rank}").read_text()) for rank in (0, 1)]


def test_the_debugger_opens_where_the_rank_failed(project: Project, shell: Any) -> None:
    project.loaders(BOOM)
    child = shell("--pdb")
    child.expect_exact("rank 1 raised RuntimeError: boom")
    child.expect_exact("pdb on rank 1 of 2: RuntimeError: boom")
    child.expect(PROMPT)
    child.sendline("p fsdp.rank, secret")
    child.expect_exact("(1, 'secret of rank 1')")
    child.expect(PROMPT)
    child.sendline("import os; print('I am', os.getpid())")
    child.expect(r"I am (\d+)")
    assert int(child.match[1]) == pids(project)[1]
    child.expect(PROMPT)
    child.sendintr()  # Ctrl-C goes to the debugger and ends nothing
    child.expect(PROMPT)
    child.sendline("c")
    rest = child.read().decode()
    assert "1 passed" in rest
    assert "1 error, 1 same error" in rest
    child.wait()
    assert_gone(pids(project))


@pytest.mark.parametrize(
    ("args", "line", "ending"),
    [("--pdbcls=pdb:Pdb", "q", "Quitting debugger"), ("-x", "import os; os._exit(3)", "stopping after 1 failures")],
)
def test_quit_or_an_exit_in_the_debugger_ends_the_session(
    project: Project, shell: Any, args: str, line: str, ending: str
) -> None:
    project.loaders(BOOM)
    child = shell("--pdb", args)
    child.expect(PROMPT)
    child.sendline(line)
    rest = child.read().decode()
    assert ending in rest
    assert "1 error" in rest
    assert not re.search(r"\d passed", rest)
    assert_gone(pids(project))


def test_no_rank_is_left_when_pytest_is_killed_at_the_prompt(project: Project, shell: Any) -> None:
    project.loaders(BOOM)
    child = shell("--pdb")
    child.expect(PROMPT)
    os.kill(child.pid, signal.SIGKILL)
    assert_gone(pids(project))


BODIES = """
import pytest
from pytest_fsdp_meta import fsdp_spmd
from pytest_fsdp_meta.worlds import WorldError

def fails(word):
    raise ValueError(word)

def test_expected(fsdp_world):
    with pytest.raises(WorldError):
        fsdp_world.run(fails, "expected")

def test_world(fsdp_world):
    fsdp_world.run(fails, "not expected")

@fsdp_spmd(world_size=2)
def test_body(fsdp):
    number = fsdp.rank + 41
    assert number == 41

def test_plain():
    plain = 1
    assert plain == 2
"""


def test_failures_of_other_tests_on_ranks_and_of_plain_tests(project: Project, shell: Any) -> None:
    project.write("test_it.py", BODIES)
    child = shell("--pdb")
    child.expect("pdb on rank [01] of 2: ValueError: not expected")
    child.expect(PROMPT)
    child.sendline("p word")
    child.expect_exact("'not expected'")
    child.sendline("c")
    child.expect_exact("pdb on rank 1 of 2: AssertionError")
    child.expect(PROMPT)
    child.sendline("p number")
    child.expect_exact("42")
    child.sendline("c")
    child.expect_exact("entering PDB")
    child.expect(PROMPT)
    child.sendline("p plain")
    child.expect_exact("1")
    child.sendline("c")
    rest = child.read().decode()
    assert "3 failed, 1 passed" in rest


def test_ranks_that_cannot_start(project: Project, shell: Any) -> None:
    project.loaders(
        """
        import torch.distributed as dist

        def refuse(*args, **kwargs):
            raise RuntimeError("no group today")

        dist.init_process_group = refuse

        @fsdp_conformance(only=["no_meta_params"])
        def test_x(fsdp):
            return load(fsdp)
        """
    )
    output = shell("--pdb").read().decode()
    assert "no group today" in output
    # The message names the rank that was refused first, which may be either.
    assert re.search(r"--pdb: no debugger on rank [01] of 2: it has not started", output)
    assert "1 error" in output


def test_a_finding_opens_no_debugger(project: Project, shell: Any) -> None:
    project.loaders(
        """
        @fsdp_conformance(only=["no_meta_params"])
        def test_x(fsdp):
            with torch.device("meta"):
                return build()
        """
    )
    child = shell("--pdb")
    output = child.read().decode()
    assert "--pdb: no debugger: no rank raised an exception" in output
    assert "1 failed" in output


def test_without_a_terminal(project: Project) -> None:
    project.loaders(BOOM)
    result = project.run("--pdb")
    text = result.stdout.str()
    assert text.count("--pdb: no debugger on rank 1 of 2: stdin is not a terminal") == 1
    assert "rank 1 raised RuntimeError: boom" in text


STOPS = """
import pdb
import torch.distributed as dist

@fsdp_conformance(only=["no_meta_params"], timeout=20)
def test_x(fsdp):
    first = fsdp.rank + 41
    {stop}
    total = torch.tensor(1.0)
    dist.all_reduce(total)
    second = total.item()
    return load(fsdp)
"""


def test_breakpoints_on_all_ranks_around_a_collective(project: Project, shell: Any) -> None:
    project.loaders(STOPS.format(stop="breakpoint()"))
    child = shell()
    todo = {rank: ["n", "n", "n", "p f'{second} on {first}'", "c"] for rank in (0, 1)}
    while any(todo.values()):
        child.expect(PROMPT)
        child.sendline("p f'rank is {fsdp.rank}'")
        child.expect(r"'rank is (\d)'")
        rank = int(child.match[1])
        child.expect(PROMPT)
        child.sendline(todo[rank].pop(0))  # the next prompt may be the other rank's
    rest = child.read().decode()
    assert "1 passed" in rest
    output = (project.path / "spawn.out").read_text()
    for rank in (0, 1):
        assert output.count(f"'2.0 on {rank + 41}'") == 1


@pytest.mark.parametrize("stop", ["pdb.set_trace()", "dist.breakpoint(1)"])
def test_other_breakpoints_and_a_pause_longer_than_the_timeout(project: Project, shell: Any, stop: str) -> None:
    project.loaders(STOPS.format(stop=f"fsdp.rank == 1 and {stop}" if "dist" not in stop else stop).replace("20", "3"))
    child = shell("-s")
    child.expect(r"pdb on rank 1 of 2")
    child.expect(PROMPT)
    time.sleep(4)
    child.sendline("up" if "dist" in stop else "p 1")
    child.expect(PROMPT)
    child.sendline("p first")
    child.expect_exact("42")
    child.sendline("c")
    assert "1 passed" in child.read().decode()


def test_quit_at_a_breakpoint_ends_the_session(project: Project, shell: Any) -> None:
    project.loaders(STOPS.format(stop="fsdp.rank == 1 and breakpoint()"))
    child = shell()
    child.expect(PROMPT)
    child.sendline("q")
    assert "Quitting debugger" in child.read().decode()


@pytest.mark.parametrize("args", [(), ("-n1",)])
def test_a_breakpoint_without_a_terminal(project: Project, args: tuple[str, ...]) -> None:
    project.loaders(STOPS.format(stop="breakpoint()"))
    result = project.run(*args)
    result.assert_outcomes(errors=1)
    why = "RuntimeError: a debugger on this rank has no terminal: stdin is not a terminal"
    assert why in result.stdout.str()
