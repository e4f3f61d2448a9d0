"""Debuggers on ranks, in pytest's terminal: ``--pdb`` where a rank failed, and the user's ``breakpoint()``."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from pytest_fsdp_meta.plugin._pytest_private import uncaptured
from pytest_fsdp_meta.worlds import ObservedWorld, WorldError
from pytest_fsdp_meta.worlds.rank.debugging import Terminal

PDB_PLUGIN = "pdbinvoke"
"""The name of the plugin that pytest registers for --pdb."""
QUIT = "bdb.BdbQuit"
"""The exception that a debugger raises for the command "quit", by qualified name."""
PACKAGE = Path(__file__).parents[2]


class TerminalLender:
    """Lends pytest's terminal to debuggers on ranks."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._last: tuple[ObservedWorld, int] | None = None
        """The rank whose prompt was the last one."""
        self.reason = ""
        """What a debugger that pytest opens shows, for the line above its prompt."""

    @contextmanager
    def lend(self, world: ObservedWorld, rank: int, pid: int) -> Iterator[None]:
        """Lend the terminal for one prompt. Raises ValueError where there is none, with the reason."""
        with self._open_terminal() as terminal:
            if self._last != (world, rank):
                self._last = world, rank
                writer = self._config.get_terminal_writer()
                writer.line()
                writer.sep(">", f"pdb on {_name_rank(world, rank)}{self.reason}")
                writer.flush()
            with terminal.lent_to(pid):
                yield

    @contextmanager
    def _open_terminal(self) -> Iterator[Terminal]:
        """Open the terminal, with the process' own stdin, which pytest keeps replaced also between items."""
        with uncaptured(self._config):
            capture = self._config.pluginmanager.getplugin("capturemanager")
            if capture is not None:
                capture.suspend_global_capture(in_=True)  # pytest replaces it again for the next item
            with closing(Terminal()) as terminal:
                yield terminal

    def why_not(self) -> str:
        """Return the reason why there is no terminal to lend, or ""."""
        try:
            with self._open_terminal():
                return ""
        except ValueError as error:
            return str(error)

    def failed(self, error: WorldError) -> None:
        """End the session if a rank failed because the user typed "quit" in its debugger."""
        lent, self._last = self._last is not None, None
        if lent and any(failure.exception == QUIT for failure in error.failures):
            pytest.exit("Quitting debugger")


class Debugger:
    """Replaces pytest's plugin for --pdb, which it calls where no rank has failed.

    The ranks of the last world that failed stay alive until the failure is reported. So a failure that the test
    expects, or that Hypothesis only tries, opens no debugger.
    """

    def __init__(self, config: pytest.Config, pdb_plugin: Any, lender: TerminalLender) -> None:
        self._config = config
        self._pdb_plugin = pdb_plugin
        self._lender = lender
        self._why_not = lender.why_not()
        self._kept: tuple[ObservedWorld, WorldError] | None = None

    @classmethod
    def replacing_pytests(cls, config: pytest.Config, lender: TerminalLender) -> Debugger | None:
        """Replace pytest's plugin for ``--pdb``; return None if the option is not set."""
        pdb_plugin = config.pluginmanager.getplugin(PDB_PLUGIN)
        if pdb_plugin is None:
            return None
        config.pluginmanager.unregister(pdb_plugin)
        debugger = cls(config, pdb_plugin, lender)
        config.pluginmanager.register(debugger, "fsdp_debugger")
        return debugger

    def failed(self, world: ObservedWorld, error: WorldError, keep: Callable[[], ObservedWorld]) -> None:
        """Keep the ranks alive if the first failure is an exception that a debugger can show."""
        first = error.failures[0]
        if first.kind != "raised" or first.user or (self._kept is not None and world.label):
            return
        self.drop()
        self._kept = keep() if not self._why_not and world.can_debug(first.rank) else world, error

    def drop(self) -> None:
        """End the ranks that are kept alive."""
        kept, self._kept = self._kept, None
        if kept is not None:
            kept[0].close()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, object, object]:
        """End such ranks after the last item of their test, because the items of a loader share its failure."""
        try:
            return (yield)
        finally:
            if nextitem is None or _test_of(item) != _test_of(nextitem):
                self.drop()

    def pytest_exception_interact(self, node: Any, call: pytest.CallInfo[Any], report: Any) -> None:
        kept = self._kept
        if kept is None or kept[1].summary not in report.longreprtext:
            if _is_own_failure(call.excinfo):
                if call.when == "call":
                    self._config.get_terminal_writer().line("\n--pdb: no debugger: no rank raised an exception")
                return
            self._pdb_plugin.pytest_exception_interact(node=node, call=call, report=report)
            return
        world, error = kept
        first = error.failures[0]
        if self._why_not or not world.can_debug(first.rank):
            why = self._why_not or "it has not started, has ended, or is on another machine"
            self._config.get_terminal_writer().line(f"\n--pdb: no debugger on {_name_rank(world, first.rank)}: {why}")
            self.drop()
            if not _is_own_failure(call.excinfo):
                self._pdb_plugin.pytest_exception_interact(node=node, call=call, report=report)
            return
        self._interact(world, error, report)

    def pytest_internalerror(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        self._pdb_plugin.pytest_internalerror(excinfo=excinfo)

    def _interact(self, world: ObservedWorld, error: WorldError, report: Any) -> None:
        writer = self._config.get_terminal_writer()
        with uncaptured(self._config):
            writer.line()
            report.toterminal(writer)
        first = error.failures[0]
        debugger = self._config.getoption("usepdb_cls", None)
        self._lender.reason = f": {first.summary.removeprefix('raised ')}"
        try:
            quits = world.post_mortem(first.rank, ":".join(debugger) if debugger else "")
        except ValueError as why:
            writer.line(f"--pdb: no debugger: {why}")
            return
        finally:
            self._lender.reason = ""
            self.drop()
        if quits:
            pytest.exit("Quitting debugger")


def _test_of(item: pytest.Item) -> tuple[object, str]:
    return item.parent, getattr(item, "originalname", item.name)


def _name_rank(world: ObservedWorld, rank: int) -> str:
    return f"rank {rank} of {world.spec.size}" + (f" of {world.label}" if world.label else "")


def _is_own_failure(info: pytest.ExceptionInfo[BaseException] | None) -> bool:
    """Return whether this plugin raised the failure: pytest's debugger would only show the plugin's frames."""
    if info is None or not isinstance(info.value, pytest.fail.Exception):
        return False
    places = [Path(entry.path) for entry in info.traceback]
    return any(place.is_relative_to(PACKAGE) for place in places[-2:])  # the last frame is that of pytest.fail
