"""What ranks are doing, in one line of a terminal that is there after two seconds and vanishes with the item."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import pytest

from pytest_fsdp_meta.text import counted, name_ranks
from pytest_fsdp_meta.worlds import ObservedWorld

DELAY = 2.0
"""Seconds that an item may take without a word."""
PACE = 0.2
FALLBACK_WIDTH = 80


@dataclass(frozen=True)
class Doing:
    """What a world does: all of its ranks, and each of them where that is known."""

    who: str
    what: str
    ranks: Mapping[int, str] = field(default_factory=dict)


def describe(doing: Doing, seconds: float, width: int) -> str:
    """One line of less than ``width`` characters. Of ranks that differ, the few are named."""
    groups: dict[str, list[int]] = {}
    for rank, what in doing.ranks.items():
        groups.setdefault(what, []).append(rank)
    if len(groups) > 1:
        most = max(groups, key=lambda what: len(groups[what]))
        few = [f"{name_ranks(ranks)}: {what}" for what, ranks in sorted(groups.items()) if what != most]
        text = f"{doing.who}, {'; '.join(few)} (others: {most})"
    else:
        text = f"{doing.who}: {next(iter(groups), doing.what)}"
    line = f"  {text}, {seconds:.0f} s"
    return line if len(line) < width else f"{line[: max(0, width - 4)]}..."


def drawn(line: str, column: int, width: int) -> str:
    """Writes the line below that of the cursor, which comes back to its column; an empty one takes it away again."""
    return f"\n\r{line}\x1b[K\x1b[A\x1b[{column % width + 1}G"


class Progress:
    """Draws from a thread, which lives only while something takes long; without a terminal it never does.

    ``column`` tells where the cursor is in its line. While the thread draws, nobody else may write.
    """

    def __init__(self, terminal: int | None, column: Callable[[], int]) -> None:
        self._terminal = terminal
        self._column = column
        self._doing: Doing | None = None
        self._since = 0.0
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """An item begins."""
        self._since = time.monotonic()
        self._doing = None

    def end(self) -> None:
        """The line is gone when this returns; what ranks do afterwards brings it back."""
        if self._thread is not None:
            self._over.set()
            self._thread.join()
            self._thread = None

    def waits(self, world: ObservedWorld, doing: str) -> None:
        """The world begins something else."""
        self.tell(Doing(world.label or counted(world.spec.size, "rank"), doing))

    def rank_does(self, rank: int, what: str) -> None:
        if self._doing is not None:
            self._doing = Doing(self._doing.who, self._doing.what, {**self._doing.ranks, rank: what})

    def tell(self, doing: Doing) -> None:
        self._doing = doing
        if self._terminal is not None and self._thread is None:
            self._over.clear()
            self._thread = threading.Thread(target=self._draw, name="pytest-fsdp-meta progress", daemon=True)
            self._thread.start()

    def _draw(self) -> None:
        assert self._terminal is not None
        if self._over.wait(max(0.0, self._since + DELAY - time.monotonic())):
            return
        column, width = self._column(), _width(self._terminal)
        if column and not column % width:
            return  # the cursor waits beyond the last column, where it cannot be brought back to
        over = False
        while not over:
            assert self._doing is not None
            line = describe(self._doing, time.monotonic() - self._since, width)
            _write(self._terminal, drawn(line, column, width))
            over = self._over.wait(PACE)
        _write(self._terminal, drawn("", column, width))


def _write(terminal: int, text: str) -> None:
    with suppress(OSError):  # the terminal was closed
        os.write(terminal, text.encode())


def _width(terminal: int) -> int:
    try:
        return os.get_terminal_size(terminal).columns or FALLBACK_WIDTH
    except OSError:
        return FALLBACK_WIDTH


def terminal_of(config: pytest.Config) -> int | None:
    """A descriptor of the terminal that pytest writes to, closed with ``config``; None where none is for drawing on.

    A copy, because pytest redirects its own while items run; so to be asked for while it configures itself.
    """
    wanted = (
        config.getoption("capture", "no") != "no"  # there ranks speak for themselves
        and not hasattr(config, "workerinput")
        and "CI" not in os.environ
        and os.environ.get("TERM", "dumb") != "dumb"
        and os.isatty(1)
    )
    if not wanted:
        return None
    terminal = os.dup(1)
    config.add_cleanup(lambda: os.close(terminal))
    return terminal
