"""The progress line in the terminal, and the same activity in error messages."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pytest_fsdp_meta.plugin.rank_io.progress import Activity, Progress, describe_activity, draw_below_cursor
from pytest_fsdp_meta.worlds import Listener, World, WorldError, current, doing
from tests.conftest import Project
from tests.world_help import SOON, world_of

ALIKE = dict.fromkeys(range(4), "training step 2 of 3")


@pytest.mark.parametrize(
    ("ranks", "line"),
    [
        ({}, "  4 ranks: starting, 3 s"),
        (ALIKE, "  4 ranks: training step 2 of 3, 3 s"),
        ({0: "loading"}, "  4 ranks: loading, 3 s"),
        (ALIKE | {1: "saving"}, "  4 ranks, rank 1: saving (others: training step 2 of 3), 3 s"),
        (
            ALIKE | {1: "saving", 3: "loading"},
            "  4 ranks, rank 3: loading; rank 1: saving (others: training step 2 of 3), 3 s",
        ),
    ],
)
def test_ranks_that_differ_from_the_majority_are_named(ranks: dict[int, str], line: str) -> None:
    assert describe_activity(Activity("4 ranks", "starting", ranks), 3.2, 100) == line


@pytest.mark.parametrize("width", [1, 4, 5, 20, 43, 44])
def test_the_line_fits_into_the_terminal(width: int) -> None:
    line = describe_activity(Activity("the reference", "training step 2 of 3"), 12.0, width)
    assert len(line) < max(width, 4)
    assert line.endswith("..." if width < 44 else "12 s")


def test_the_cursor_returns_to_its_column() -> None:
    assert draw_below_cursor("doing", 7, 80) == "\n\rdoing\x1b[K\x1b[A\x1b[8G"
    assert draw_below_cursor("", 87, 80) == "\n\r\x1b[K\x1b[A\x1b[8G"


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    ours, theirs = os.openpty()
    os.set_blocking(ours, False)
    yield ours, theirs
    os.close(ours)
    os.close(theirs)


def read(terminal: int) -> str:
    try:
        return os.read(terminal, 2**16).decode()
    except BlockingIOError:
        return ""


def test_a_short_item_shows_no_line(terminal: tuple[int, int]) -> None:
    progress = Progress(terminal[1], lambda: 0)
    progress.begin()
    progress.show(Activity("2 ranks", "loading"))
    progress.hide()
    progress.hide()
    assert read(terminal[0]) == ""


def test_the_line_is_drawn_and_erased(terminal: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pytest_fsdp_meta.plugin.rank_io.progress.DELAY", 0.0)
    progress = Progress(terminal[1], lambda: 3)
    for what in ("loading", "saving"):  # the line applistener again for the next item
        progress.begin()
        progress.show(Activity("2 ranks", what))
        seen, deadline = "", time.monotonic() + SOON
        while what not in seen and time.monotonic() < deadline:
            time.sleep(0.01)
            seen += read(terminal[0])
        progress.hide()
        seen += read(terminal[0])
        assert f"  2 ranks: {what}, 0 s\x1b[K\x1b[A\x1b[4G" in seen
        assert seen.endswith("\n\r\x1b[K\x1b[A\x1b[4G")
        assert read(terminal[0]) == ""


SLOW = """
import time

@fsdp_conformance(only=["no_meta_params"])
def test_slow(fsdp):
    time.sleep(4)
    return load(fsdp)
"""


@pytest.fixture
def run_in_terminal(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    command = f"{sys.executable} -m pytest -p no:cacheprovider"
    return lambda args="": pytester.spawn(f"{command} {args}", expect_timeout=120)


@pytest.mark.parametrize("verbose", [pytest.param("-v", marks=pytest.mark.nightly), ""])
def test_a_long_item_in_a_terminal(project: Project, run_in_terminal: Callable[..., Any], verbose: str) -> None:
    project.loaders(SLOW)
    child = run_in_terminal(verbose)
    begun = "test_it.py::test_slow[no_meta_params] " if verbose else "test_it.py "
    child.expect_exact(begun)
    child.expect(r"  2 ranks: loading, \d+ s\x1b\[K\x1b\[A\x1b\[(\d+)G")
    assert int(child.match[1]) == len(begun) + 1
    child.expect_exact(f"\n\r\x1b[K\x1b[A\x1b[{len(begun) + 1}G")
    rest = child.read().decode()
    assert "\x1b[A" not in rest
    assert "1 passed" in rest
    assert child.wait() == 0


@pytest.mark.nightly
@pytest.mark.parametrize("args", ["-s", "-n1"])
def test_no_line_with_live_output_or_on_a_worker(
    project: Project, run_in_terminal: Callable[..., Any], args: str
) -> None:
    project.loaders(SLOW)
    output = run_in_terminal(args).read().decode()
    assert "1 passed" in output
    assert "2 ranks:" not in output


@pytest.mark.nightly
def test_no_line_in_a_log(project: Project) -> None:
    project.loaders(SLOW)
    result = project.run()
    result.assert_outcomes(passed=1)
    assert "2 ranks:" not in result.stdout.str()
    assert "\x1b" not in result.stdout.str()


class RecordingListener(Listener):
    def __init__(self) -> None:
        self.activities: list[str] = []

    def on_wait(self, world: World, doing: str) -> None:
        self.activities.append(doing)


def test_a_world_reports_what_it_waits_for() -> None:
    listener = RecordingListener()
    with world_of(2, listener=listener) as world:
        world.run("os:getpid")
    assert listener.activities == ["starting", "starting", "joining the process group", "running getpid"]


def test_an_error_says_what_its_rank_was_doing() -> None:
    def work() -> None:
        doing("training step 1 of 2")
        current().barrier()
        doing(f"training step {current().rank + 1} of 2")
        if current().rank == 1:
            raise RuntimeError("boom")
        current().barrier()

    with world_of(2) as world, pytest.raises(WorldError) as caught:
        world.run(work)
    assert str(caught.value).splitlines()[:2] == ["rank 1 raised RuntimeError: boom", "(while training step 2 of 2)"]

    with world_of(2, timeout=2.0) as world, pytest.raises(WorldError) as caught:
        world.run(lambda: (doing(f"step {current().rank}"), time.sleep(60)))
    assert str(caught.value).splitlines()[1] == "(did not answer within 2 s while step 0 on rank 0; step 1 on rank 1)"

    with world_of(3, timeout=2.0) as world, pytest.raises(WorldError) as caught:
        world.run(lambda: current().rank == 2 or (current().rank and doing("saving"), time.sleep(60)))
    what = "running test_an_error_says_what_its_rank_was_doing.<locals>.<lambda>"
    assert str(caught.value).splitlines()[1] == f"(did not answer within 2 s while {what} on rank 0; saving on rank 1)"


def test_an_error_does_not_name_the_activity_of_an_earlier_call() -> None:
    def fail() -> None:
        raise RuntimeError("boom")

    with world_of(1) as world:
        world.run(lambda: doing("something else"))
        with pytest.raises(WorldError) as caught:
            world.run(fail)
    assert "(while running test_an_error_does_not" in str(caught.value)


def test_doing_outside_of_a_world_does_nothing() -> None:
    doing("nothing")


def test_the_line_says_what_is_imported(project: Project, run_in_terminal: Callable[..., Any]) -> None:
    """The package waits in the fork server alone, until the line was seen."""
    seen = project.path / "seen"
    project.write(
        "slowly/__init__.py",
        f"""
        import pathlib, sys, time
        while "pytest" not in sys.argv[0] and not pathlib.Path({str(seen)!r}).exists(): time.sleep(0.1)
        """,
    )
    project.loaders(f"import slowly\n{SLOW.replace('sleep(4)', 'sleep(0)')}")
    child = run_in_terminal()
    child.expect(r"  2 ranks: importing test_it \(slowly\), \d+ s\x1b\[K")
    seen.touch()
    assert "1 passed" in child.read().decode()
    assert child.wait() == 0


def test_what_is_imported_is_shown_only_while_ranks_start() -> None:
    progress = Progress(None, lambda: 0, lambda: "test_it (transformers)")
    assert progress._with_imports(Activity("2 ranks", "starting")).activity == "importing test_it (transformers)"
    assert progress._with_imports(Activity("2 ranks", "loading")).activity == "loading"
