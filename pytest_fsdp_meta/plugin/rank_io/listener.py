"""What is heard of ranks while an item runs, as pytest's user gets to see it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from pytest_fsdp_meta.plugin.rank_io.debugger import Debugger, Desk, debug_ranks
from pytest_fsdp_meta.plugin.rank_io.progress import Progress, terminal_of
from pytest_fsdp_meta.plugin.rank_io.warnings import Warnings
from pytest_fsdp_meta.worlds import Listener, ObservedWorld, WorldError
from pytest_fsdp_meta.worlds.rank import coverage
from pytest_fsdp_meta.worlds.rank.warnings import Warned
from pytest_fsdp_meta.worlds.system.messages import DOING
from pytest_fsdp_meta.worlds.system.terminal import Terminal


def name_of(world: ObservedWorld, rank: int) -> str:
    """The rank, and of which world it is one where that is not the item's own."""
    if not world.label:
        return f"rank {rank}"
    return world.label if world.spec.size == 1 else f"rank {rank} of {world.label}"


def column(config: pytest.Config) -> int:
    """Where pytest itself is in its line; 0 where it writes nothing (-p no:terminal)."""
    shown = config.pluginmanager.hasplugin("terminalreporter")
    return config.get_terminal_writer().width_of_current_line if shown else 0


def _told(error: Warning) -> str:
    return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])


class RankListener(Listener):
    """One per pytest session; hears all its worlds."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        # A worker of xdist has no terminal, and what it writes would be lost; so there it is captured as ever.
        self.live = config.getoption("capture", "no") == "no" and not hasattr(config, "workerinput")
        self._at_line_start = False
        self._warnings = Warnings()
        self._coverage = coverage.Sum()
        self._debugger: Debugger | None = None
        self._desk = Desk(config)
        self._progress = Progress(terminal_of(config), partial(column, config))

    @contextmanager
    def hearing(self) -> Iterator[None]:
        """Around one phase of an item. A warning that the user's filters make an error of fails it, at its end."""
        self._at_line_start = False
        self._progress.begin()
        try:
            yield
        except BaseException:
            self._warnings.tell()  # what is raised already is more than any of them
            raise
        finally:
            self._progress.end()
            self._coverage.collect()
        if errors := self._warnings.tell():
            pytest.fail("\n".join(map(_told, errors)), pytrace=False)

    def warn(self) -> None:
        """Raises again what the last call warned of. Raises the first that the user's filters make an error of."""
        for error in self._warnings.tell():
            raise error

    def debug(self) -> None:
        """The session begins: --pdb is about ranks from now on."""
        self._debugger = debug_ranks(self._config)

    def finish(self) -> None:
        """All items have run; what measures coverage has not saved it yet."""
        if self._debugger is not None:
            self._debugger.close()
        self._coverage.hand_over()

    def noted(self, world: ObservedWorld, rank: int, kind: str, what: Any) -> None:
        if kind == DOING:
            self._progress.rank_does(rank, what)
        elif kind == coverage.KIND:
            source, packed = what
            self._coverage.add((world, rank, source), packed)
        elif isinstance(what, Warned):
            self._warnings.hear(world, rank, what)

    def failed(self, world: ObservedWorld, error: WorldError, keep: Callable[[], ObservedWorld]) -> None:
        self._desk.failed(error)
        if self._debugger is not None:
            self._debugger.failed(world, error, keep)

    @contextmanager
    def terminal(self, world: ObservedWorld, rank: int) -> Iterator[Terminal]:
        self._progress.end()
        with self._desk.terminal(world, rank) as terminal:
            yield terminal

    def show(self, item: pytest.Item, when: str, outputs: Sequence[str]) -> None:
        """What each rank wrote, as sections of the item's report, unless it was shown live."""
        for rank, text in enumerate(outputs):
            if text.strip() and not self.live:
                item.add_report_section(when, f"rank {rank}", text)

    def waits(self, world: ObservedWorld, doing: str) -> None:
        self._progress.waits(world, doing)

    def wrote(self, world: ObservedWorld, rank: int, lines: Sequence[str]) -> None:
        who = name_of(world, rank)
        text = "".join(f"[{who}] {line}\n" for line in lines)
        if not self._at_line_start and column(self._config):
            text = f"\n{text}"  # pytest has begun a line with the name of the item
        self._at_line_start = True
        sys.stdout.write(text)
        sys.stdout.flush()
