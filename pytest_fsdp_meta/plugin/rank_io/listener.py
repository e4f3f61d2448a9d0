"""Receives what worlds report while an item runs, and passes it on to pytest's output, warnings and debugger."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import pytest

from pytest_fsdp_meta.plugin.rank_io.debugger import Debugger, TerminalLender
from pytest_fsdp_meta.plugin.rank_io.progress import STARTING, Progress, terminal_of
from pytest_fsdp_meta.text import LINES, first_line, name_ranks, printable
from pytest_fsdp_meta.worlds import Listener, ObservedWorld, WorldError
from pytest_fsdp_meta.worlds.engine import DOING
from pytest_fsdp_meta.worlds.rank import coverage
from pytest_fsdp_meta.worlds.rank.warnings import RankWarning, reissue


def cursor_column(config: pytest.Config) -> int:
    """Return the column of pytest's own output in its current line; 0 with ``-p no:terminal``."""
    shown = config.pluginmanager.hasplugin("terminalreporter")
    return config.get_terminal_writer().width_of_current_line if shown else 0


class Warnings:
    """The warnings of one item, each once, however many ranks and worlds have raised it.

    They are raised again in the pytest process, where the user's filters and pytest's summary apply.
    """

    def __init__(self) -> None:
        self._collected: dict[RankWarning, tuple[set[int], list[str]]] = {}
        """The ranks that raised each warning, and the labels of worlds of one rank that did."""

    def add(self, world: ObservedWorld, rank: int, warning: RankWarning) -> None:
        ranks, labels = self._collected.setdefault(warning, (set(), []))
        if not world.label or world.spec.size > 1:
            ranks.add(rank)
        elif world.label not in labels:
            labels.append(world.label)

    def raise_collected(self) -> list[Warning]:
        """Raise all warnings again, and return those that the user's filters turn into errors."""
        collected, self._collected = self._collected, {}
        errors = []
        for warning, (ranks, labels) in collected.items():
            try:
                reissue(warning, f"on {name_ranks(ranks)}" if ranks else f"in {' and '.join(labels)}")
            except Warning as error:
                error.__notes__ = [f"raised at {warning.file}:{warning.line}"]  # type: ignore[attr-defined]
                errors.append(error)
        return errors


class RankListener(Listener):
    """Listens to all worlds of a pytest session."""

    def __init__(self, config: pytest.Config, importing: Callable[[], str]) -> None:
        self._config = config
        # Output that a worker of xdist writes itself would be lost, so there it is captured also with -s.
        self.live = config.getoption("capture", "no") == "no" and not hasattr(config, "workerinput")
        self._at_line_start = False
        self._warnings = Warnings()
        self._debugger: Debugger | None = None
        self._lender = TerminalLender(config)
        self._interruption: WorldError | None = None
        self._doing = ""
        self._progress = Progress(terminal_of(config), partial(cursor_column, config), importing)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Wrap one phase of an item; fail it at its end for warnings that the user's filters turn into errors."""
        self._at_line_start = False
        self._interruption, self._doing = None, ""
        self._progress.begin()
        try:
            yield
        except BaseException:
            self._warnings.raise_collected()  # the exception takes precedence over warnings that are errors
            raise
        finally:
            self._progress.hide()
        if errors := self._warnings.raise_collected():
            texts = [(f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())) for error in errors]
            pytest.fail("\n".join(chain(*texts)), pytrace=False)

    def warn(self) -> None:
        """Raise the warnings of the last call again, as an exception where the user's filters make one an error."""
        for error in self._warnings.raise_collected():
            raise error

    def start_debugger(self) -> None:
        """With ``--pdb``, open the debugger on failed ranks from now on."""
        self._debugger = Debugger.replacing_pytests(self._config, self._lender)

    def finish(self) -> None:
        """Combine the ranks' coverage with pytest's after the last item, before pytest-cov saves its data."""
        if self._debugger is not None:
            self._debugger.drop()
        coverage.combine()

    def on_note(self, world: ObservedWorld, rank: int, kind: str, what: Any) -> None:
        if kind == DOING:
            self._progress.rank_does(rank, what)
        elif isinstance(what, RankWarning):
            self._warnings.add(world, rank, what)

    def failed(self, world: ObservedWorld, error: WorldError, keep: Callable[[], ObservedWorld]) -> None:
        self._lender.failed(error)
        if self._debugger is not None:
            self._debugger.failed(world, error, keep)

    def interrupted(self, world: ObservedWorld, error: BaseException, describe: Callable[[str], WorldError]) -> None:
        """Take down where the ranks are when pytest-timeout, or another plugin with a time limit, fails the test."""
        if isinstance(error, pytest.fail.Exception):
            self._interruption = describe(first_line(str(error)).rstrip("."))

    def take_interruption(self) -> WorldError | None:
        """Return where the ranks were at the last interruption, once; None if they were not waited for."""
        taken, self._interruption = self._interruption, None
        return taken

    @property
    def is_starting(self) -> bool:
        """Whether the last that a world did was to start its ranks, for which they import the user's modules."""
        return self._doing == STARTING

    @contextmanager
    def lend_terminal(self, world: ObservedWorld, rank: int, pid: int) -> Iterator[None]:
        self._progress.hide()
        with self._lender.lend(world, rank, pid):
            yield

    def show(self, item: pytest.Item, when: str, outputs: Iterable[tuple[int, str]]) -> None:
        """Add what each rank wrote, as (rank, text), as a section of the item's report, unless it was shown live."""
        for rank, text in outputs:
            if text.strip() and not self.live:
                item.add_report_section(when, f"rank {rank}", printable(text, f"{LINES}\r"))  # of progress bars

    def on_wait(self, world: ObservedWorld, doing: str) -> None:
        self._doing = doing
        self._progress.on_wait(world, doing)

    def on_output(self, world: ObservedWorld, rank: int, lines: Sequence[str]) -> None:
        name = f"rank {rank} of {world.label}" if world.label else f"rank {rank}"
        name = world.label if world.label and world.spec.size == 1 else name
        text = "".join(f"[{name}] {printable(line, LINES)}\n" for line in lines)
        if not self._at_line_start and cursor_column(self._config):
            text = f"\n{text}"  # pytest has written the item's name in this line
        self._at_line_start = True
        sys.stdout.write(text)
        sys.stdout.flush()
