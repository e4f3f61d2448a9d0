"""A line in the terminal that shows what ranks are doing, from two seconds into an item until its end."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

import pytest

from pytest_fsdp_meta.text import counted, grouped, name_ranks
from pytest_fsdp_meta.worlds import ObservedWorld

DELAY = 2.0
"""Seconds after which an item that still runs gets the line."""
PACE = 0.2
"""Seconds between two updates of the line."""
STARTING = "starting"
"""What a world does until its ranks have met."""
FALLBACK_WIDTH = 80
"""Columns of a terminal that does not report its width."""


@dataclass(frozen=True)
class Activity:
    """What a world is doing, and single ranks where they have reported it."""

    world: str
    activity: str
    ranks: Mapping[int, str] = field(default_factory=dict)


def describe_activity(activity: Activity, seconds: float, width: int) -> str:
    """Return a line shorter than ``width``; where ranks differ, it names those that differ from the majority."""
    groups = grouped((text, rank) for rank, text in activity.ranks.items())
    if len(groups) > 1:
        majority = max(groups, key=lambda text: len(groups[text]))
        minority = [f"{name_ranks(ranks)}: {text}" for text, ranks in sorted(groups.items()) if text != majority]
        text = f"{activity.world}, {'; '.join(minority)} (others: {majority})"
    else:
        text = f"{activity.world}: {next(iter(groups), activity.activity)}"
    line = f"  {text}, {seconds:.0f} s"
    return line if len(line) < width else f"{line[: max(0, width - 4)]}..."


def draw_below_cursor(line: str, column: int, width: int) -> str:
    """Return control codes that write a line below the cursor's and move the cursor back; "" erases the line."""
    return f"\n\r{line}\x1b[K\x1b[A\x1b[{column % width + 1}G"


class Progress:
    """Draws the line from a thread that runs while an item waits for ranks; does nothing without a terminal.

    ``column`` returns the cursor's column, ``importing`` what ranks that start wait for to be imported. While it draws,
    nothing else may write to the terminal.
    """

    def __init__(
        self, terminal: int | None, column: Callable[[], int], importing: Callable[[], str] = lambda: ""
    ) -> None:
        self._terminal = terminal
        self._column = column
        self._importing = importing
        self._activity: Activity | None = None
        self._since = 0.0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Start with an item."""
        self._since = time.monotonic()
        self._activity = None

    def hide(self) -> None:
        """Erase the line and stop drawing, until a world reports its next activity."""
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._thread = None

    def on_wait(self, world: ObservedWorld, doing: str) -> None:
        """Show what the world begins to wait for."""
        self.show(Activity(world.label or counted(world.spec.size, "rank"), doing))

    def rank_does(self, rank: int, text: str) -> None:
        if self._activity is not None:
            self._activity = replace(self._activity, ranks={**self._activity.ranks, rank: text})

    def show(self, activity: Activity) -> None:
        self._activity = activity
        if self._terminal is not None and self._thread is None:
            self._stop.clear()
            self._thread = threading.Thread(target=self._draw, name="pytest-fsdp-meta progress", daemon=True)
            self._thread.start()

    def _draw(self) -> None:
        assert self._terminal is not None
        if self._stop.wait(max(0.0, self._since + DELAY - time.monotonic())):
            return
        column, width = self._column(), _width(self._terminal)
        if column and not column % width:
            return  # the cursor is beyond the last column, and no control code can move it back there
        stop = False
        while not stop:
            assert self._activity is not None
            line = describe_activity(self._with_imports(self._activity), time.monotonic() - self._since, width)
            _write(self._terminal, draw_below_cursor(line, column, width))
            stop = self._stop.wait(PACE)
        _write(self._terminal, draw_below_cursor("", column, width))

    def _with_imports(self, activity: Activity) -> Activity:
        starts = activity.activity == STARTING and not activity.ranks
        name = self._importing() if starts else ""
        return replace(activity, activity=f"importing {name}") if name else activity


def _write(terminal: int, text: str) -> None:
    with suppress(OSError):  # the terminal was closed
        os.write(terminal, text.encode())


def _width(terminal: int) -> int:
    try:
        return os.get_terminal_size(terminal).columns or FALLBACK_WIDTH
    except OSError:
        return FALLBACK_WIDTH


def terminal_of(config: pytest.Config) -> int | None:
    """Return a descriptor of pytest's terminal, closed with ``config``; None where no line should be drawn.

    It is a copy: pytest redirects its own descriptor while items run. Call this while pytest configures itself.
    """
    wanted = (
        config.getoption("capture", "no") != "no"  # with -s, the ranks' own output is shown
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
