"""``--pdb`` where a rank has failed: the debugger opens there, at the terminal that pytest runs in."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from pytest_fsdp_meta.worlds import ObservedWorld, WorldError
from pytest_fsdp_meta.worlds.system.terminal import Terminal

USUAL = "pdbinvoke"
"""The plugin that pytest registers for --pdb."""
QUIT = "bdb.BdbQuit"
PACKAGE = Path(__file__).parents[2]


class Debugger:
    """Takes the place of pytest's own, which it calls where no rank has failed.

    The ranks of the last world that failed are kept until the failure is reported: what the test expects, or
    Hypothesis only tries, opens no debugger.
    """

    def __init__(self, config: pytest.Config, usual: Any) -> None:
        self._config = config
        self._usual = usual
        self._kept: tuple[ObservedWorld, WorldError] | None = None
        self._terminal: Terminal | None = None
        self._why_not = ""
        try:
            with _own_stdin(config):
                self._terminal = Terminal()
        except ValueError as error:
            self._why_not = str(error)

    def failed(self, world: ObservedWorld, error: WorldError, keep: Callable[[], ObservedWorld]) -> None:
        """Keeps the ranks, if there is something to look at."""
        first = error.failures[0]
        if first.kind != "raised" or first.user or (self._kept is not None and world.label):
            return
        self.drop()
        if self._terminal is None or not world.can_debug(first.rank):
            self._kept = world, error
        else:
            self._kept = keep(), error

    def drop(self) -> None:
        """Ends the ranks that are kept."""
        kept, self._kept = self._kept, None
        if kept is not None:
            kept[0].close()

    def close(self) -> None:
        self.drop()
        if self._terminal is not None:
            self._terminal.close()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, object, object]:
        """The items of one loader share its failure; the ranks of any other test go with it."""
        try:
            return (yield)
        finally:
            if nextitem is None or _function(item) != _function(nextitem):
                self.drop()

    def pytest_exception_interact(self, node: Any, call: pytest.CallInfo[Any], report: Any) -> None:
        kept = self._kept
        if kept is None or kept[1].summary not in report.longreprtext:
            if _is_verdict(call.excinfo):
                if call.when == "call":
                    self._config.get_terminal_writer().line("\n--pdb: no rank raised, so there is nothing to look at")
                return
            self._usual.pytest_exception_interact(node=node, call=call, report=report)
            return
        world, error = kept
        first = error.failures[0]
        who = _who(world, first.rank)
        if self._terminal is None or not world.can_debug(first.rank):
            why = self._why_not or "it had not started, has ended, or is on another machine"
            self._config.get_terminal_writer().line(f"\n--pdb: no debugger on {who}: {why}")
            self.drop()
            if not _is_verdict(call.excinfo):
                self._usual.pytest_exception_interact(node=node, call=call, report=report)
            return
        self._interact(world, error, f"pdb on {who}: {_what(error)}", report)

    def pytest_internalerror(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        self._usual.pytest_internalerror(excinfo=excinfo)

    def _interact(self, world: ObservedWorld, error: WorldError, header: str, report: Any) -> None:
        assert self._terminal is not None
        capture = self._config.pluginmanager.getplugin("capturemanager")
        if capture is not None:
            capture.suspend_global_capture(in_=True)  # as pytest does, which resumes it for the next item
        writer = self._config.get_terminal_writer()
        writer.line()
        report.toterminal(writer)
        writer.sep(">", header)
        writer.flush()
        name = self._config.getoption("usepdb_cls", None)
        try:
            quits = world.post_mortem(error.failures[0].rank, self._terminal, ":".join(name) if name else "")
        except ValueError as why:
            writer.line(f"--pdb: no debugger: {why}")
            return
        finally:
            self.drop()
        if quits:
            pytest.exit("Quitting debugger")


@contextmanager
def _own_stdin(config: pytest.Config) -> Iterator[None]:
    """Between items pytest gives back what it captures, but not stdin."""
    capture = config.pluginmanager.getplugin("capturemanager")
    if capture is None:
        yield
        return
    capture.suspend_global_capture(in_=True)
    try:
        yield
    finally:
        capture.resume_global_capture()
        capture.suspend_global_capture()


def _function(item: pytest.Item) -> tuple[object, str]:
    return item.parent, getattr(item, "originalname", item.name)


def _who(world: ObservedWorld, rank: int) -> str:
    return f"rank {rank} of {world.spec.size}" + (f" of {world.label}" if world.label else "")


class Desk:
    """Where a debugger that the user's code opens gets the terminal."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._last: tuple[ObservedWorld, int] | None = None

    @contextmanager
    def terminal(self, world: ObservedWorld, rank: int) -> Iterator[Terminal]:
        """For one prompt. Raises ValueError, with the reason, where there is none."""
        capture = self._config.pluginmanager.getplugin("capturemanager")
        if capture is not None:
            capture.suspend_global_capture(in_=True)
        try:
            with closing(Terminal()) as terminal:
                if self._last != (world, rank):
                    self._last = world, rank
                    writer = self._config.get_terminal_writer()
                    writer.line()
                    writer.sep(">", f"pdb on {_who(world, rank)}")
                    writer.flush()
                yield terminal
        finally:
            if capture is not None:
                capture.resume_global_capture()

    def failed(self, error: WorldError) -> None:
        """Ends the session where a rank has failed because the user has typed "quit"."""
        lent, self._last = self._last is not None, None
        if lent and any(failure.exception == QUIT for failure in error.failures):
            pytest.exit("Quitting debugger")


def _is_verdict(info: pytest.ExceptionInfo[BaseException] | None) -> bool:
    """Whether this plugin has said that a test failed: its own frames are not what the user looks for."""
    if info is None or not isinstance(info.value, pytest.fail.Exception):
        return False
    places = [Path(entry.path) for entry in info.traceback]
    return any(place.is_relative_to(PACKAGE) for place in places[-2:])  # the last one is that of pytest.fail


def _what(error: WorldError) -> str:
    return error.failures[0].summary.removeprefix("raised ")


def debug_ranks(config: pytest.Config) -> Debugger | None:
    """Puts it in place, if the user asked for --pdb."""
    usual = config.pluginmanager.getplugin(USUAL)
    if usual is None:
        return None
    config.pluginmanager.unregister(usual)
    debugger = Debugger(config, usual)
    config.pluginmanager.register(debugger, "fsdp_debugger")
    return debugger
