"""The traced step as the page shows it: forward and backward, one row for each call, with a cell for each column."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite

from pytest_fsdp_meta.reports.schema import TRACED, TracedPhase, TracedRow, TracedStep

GLYPHS = {"agrees": "✓", "not compared": "?", "in between": "◐", "departs": "✕"}
"""State of a call -> its character."""
PLURAL = {"agrees": "agree", "departs": "depart"}
UNITS = ("k", "M", "G", "T")
NO_PLACE = "No module is named: what departs does not show beyond doubt where it starts."
NO_DEPARTURE = (
    "No call departs, so a difference that a check finds starts elsewhere: in the loss, in how gradients of weights "
    "are summed over the ranks, or in what could not be compared"
)
EARLIER = ", or in weights that an earlier step left wrong"
NAMES = {"gradient": "the gradient of the output"}


@dataclass(frozen=True)
class CellView:
    """How the calls of a row are on the ranks of a column: their state, with its verb, and how far off or how many."""

    ranks: tuple[int, ...]
    state: str
    text: str
    verb: str


@dataclass(frozen=True)
class PhaseView:
    """The forward or the backward; ``result`` says what departs first, and ``here`` what is said beside that row."""

    name: str
    result: str
    rows: tuple[TracedRow, ...]
    first: TracedRow | None
    here: str


@dataclass(frozen=True)
class StepView:
    """A traced step; ``place`` says in a few words where it departs, ``problem`` why no module is named."""

    record: TracedStep
    place: str
    problem: str
    phases: tuple[PhaseView, ...]

    @property
    def agrees(self) -> bool:
        """Whether every call agrees, so that there are no rows to look at."""
        rows = (row for phase in self.phases for row in phase.rows)
        return {cell.state for row in rows for cell in cells_of(row, self.record)} == {"agrees"}


def step_view(step: TracedStep) -> StepView:
    """Return a traced step as the page shows it."""
    phases = (("forward", step.forward), ("backward", step.backward))
    departs = any(phase.first for _, phase in phases)
    place, problem = "nowhere", f"{NO_DEPARTURE}{EARLIER if step.step else ''}."
    if step.module is not None:
        place, problem = f"{step.module or 'the model'}, {step.phase}", ""
    elif departs:
        place, problem = "no module is named", NO_PLACE
    if step.step:
        place = f"{place}; batch of step {step.step}"
    return StepView(step, place, problem, tuple(_phase(name, phase, step) for name, phase in phases if phase.rows))


def _phase(name: str, phase: TracedPhase, step: TracedStep) -> PhaseView:
    first = phase.first
    if first is not None:
        stage = NAMES.get(first.stage, f"the {first.stage}")
        result = f"the first that departs is {stage} of {first.module or 'the model'}"
    else:
        result = "nothing departs"
    here = ""
    if name == ("forward" if step.forward.first else "backward") and first is not None:
        inside = "" if first.module == step.module else f", inside {step.module or 'the model'}"
        here = "first to depart" if step.module is None else f"starts here{inside}"
    return PhaseView(name, result, phase.rows, first, here)


def cells_of(row: TracedRow, step: TracedStep) -> Iterator[CellView]:
    """Yield the cells of a row, one for each group of ranks."""
    times = row.times or (row.calls,) * len(row.states)
    for ranks, state, many, distance in zip(step.ranks, row.states, times, row.distances, strict=False):
        others_agree = state == "not compared" and many < row.calls
        if others_agree:
            state, many = "agrees", row.calls - many
        text = ""
        if row.calls > 1:
            text = "all" if many == row.calls else f"{many} of {row.calls}"
        elif state in ("in between", "departs") and distance is not None:
            text = describe_multiple(distance)
        state = state if state in TRACED else "not compared"
        yield CellView(ranks, state, text, PLURAL.get(state, state) if row.calls > 1 else state)


def describe_multiple(distance: float) -> str:
    """Return a text such as "5.1", "12", "540k" or "1.2M"."""
    if not isfinite(distance):
        return "∞"
    value, unit = float(f"{distance:.2g}"), ""
    for larger in UNITS:
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.2g}{unit}" if value < 100 else f"{value:.0f}{unit}"
