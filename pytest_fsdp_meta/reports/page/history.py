"""The last runs of a check as a strip of bars, and the words beside it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from pytest_fsdp_meta.reports.history import (
    BROKEN,
    GOOD,
    NAMES,
    describe_flaky,
    describe_moment,
    describe_results,
    describe_since,
    letter_of,
    run_of,
    starts_of,
)
from pytest_fsdp_meta.reports.schema import ABSENT, CheckRecord, Report
from pytest_fsdp_meta.text import first_of

STEP, BAR, HEIGHT = 8, 6, 16
"""Widths of a run and of its bar, and the height of the strip (px)."""
HEIGHTS = {"bad": HEIGHT, "good": 6, "other": 3}
"""The height of a bar (px) by the state of the run: failures stand out without colours."""


@dataclass(frozen=True)
class HistoryView:
    """The history of one check, this run included."""

    record: CheckRecord
    results: str
    since: str
    """Since when it is broken, if it was broken before this run, for this cause or another one."""
    is_old: bool = False
    """Whether something that is wrong with it now was wrong before this run."""

    @property
    def width(self) -> int:
        return len(self.results) * STEP

    @property
    def is_flaky(self) -> bool:
        return self.record.history is not None and self.record.history.flaky

    @property
    def is_steady(self) -> bool:
        """Whether all runs had the same result."""
        return len(set(self.results)) == 1

    @property
    def words(self) -> str:
        """The runs in words: their order where they differ little, else how many there were of each."""
        in_order = describe_results(self.results)
        if in_order.count(",") < 4:
            return in_order
        return ", ".join(f"{times} {NAMES[letter]}" for letter, times in Counter(self.results).most_common())

    @property
    def description(self) -> str:
        """All runs in order, for the picture's text."""
        return f"The last {len(self.results)} runs, oldest first: {describe_results(self.results)}"

    @property
    def note(self) -> str:
        """What the matrix says of the cell beside its status, such as "broken since ..."."""
        return "; ".join(filter(None, [self.since, self.flaky]))

    @property
    def flaky(self) -> str:
        return describe_flaky(self.results) if self.is_flaky else ""

    @property
    def mark(self) -> str:
        """The class of the cell in the matrix."""
        return "h-flaky" if self.is_flaky else "h-old" if self.is_old else ""

    @cached_property
    def paths(self) -> tuple[tuple[str, str], ...]:
        """The bars as (state, path of an SVG)."""
        drawn: dict[str, list[str]] = {}
        for index, letter in enumerate(self.results):
            state = "bad" if letter in BROKEN else "good" if letter in GOOD else "other"
            if letter != ABSENT:
                height = HEIGHTS[state]
                drawn.setdefault(state, []).append(f"M{index * STEP} {HEIGHT - height}h{BAR}v{height}h-{BAR}z")
        return tuple((state, "".join(parts)) for state, parts in drawn.items())


def history_view(check: CheckRecord, report: Report) -> HistoryView | None:
    """Return what the page shows of a check's history; None without earlier runs."""
    history = check.history
    if history is None:
        return None
    starts, this = starts_of(check), run_of(report)
    since, new = "", starts.pop(this, [])
    if starts:
        names = [one.tensor or "the model" for one in new]
        since = describe_since(next(iter(starts)), history) + (f"; new: {first_of(names)}" if new else "")
    elif history.broken_since is not None and history.broken_since != this:
        since = f"new cause; it failed for another one since {describe_moment(history.broken_since)}"
    return HistoryView(check, history.results + letter_of(check), since, bool(starts))
