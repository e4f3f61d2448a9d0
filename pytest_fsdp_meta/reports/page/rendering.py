"""Rendering of templates, style and script into one HTML file. Everything from the report is escaped as text.

A card of "What broke" has one cause, with its loaders, the decisive values and a command that reruns it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import shlex
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_fsdp_meta.checks.simulation.facts import BACKWARD, PARTS
from pytest_fsdp_meta.evidence.codec import write_whole
from pytest_fsdp_meta.reports.compare import Comparison, describe_comparison, mark_of
from pytest_fsdp_meta.reports.history import describe_history
from pytest_fsdp_meta.reports.page.checks import CheckView, FindingLine, as_line
from pytest_fsdp_meta.reports.page.layouts import PROBLEMS, STATES
from pytest_fsdp_meta.reports.page.traced import GLYPHS as TRACED_GLYPHS
from pytest_fsdp_meta.reports.page.traced import cells_of
from pytest_fsdp_meta.reports.page.view import GLYPHS, TABS, LoaderView, PageView, build_view
from pytest_fsdp_meta.reports.schema import BAD, SKIPS, STATUSES, TRACED, Report, describe_kind
from pytest_fsdp_meta.reports.sizes import BAR_HEIGHT, BAR_WIDTH, why_no_step
from pytest_fsdp_meta.reports.story import Story, stories_of, with_starts
from pytest_fsdp_meta.reports.terminal import describe_first, fold_tensors, group_for_lines
from pytest_fsdp_meta.reports.totals import name_activity
from pytest_fsdp_meta.text import LINES, as_bytes, counted, first_of, fold_names, grouped, name_ranks, printable

if TYPE_CHECKING:
    from jinja2 import Environment

HERE = files("pytest_fsdp_meta.reports.page")
STYLES = ("templates/page.css", "templates/history.css")
SCRIPTS = tuple(f"templates/{name}.js" for name in ("page", "state", "matrix", "filters", "links", "start"))
MOST_VALUES = 3
"""Lines of values on a card; the loaders below have all."""
MOST_ALIKE = 2
"""Lines of one check that differ only in numbers, before one line stands for them."""


def write_page(report: Report, path: Path, comparison: Comparison | None = None, problem: str = "") -> None:
    """Write the page atomically; a browser loads no other file for it. Raises OSError.

    ``problem`` says why there is no comparison although one was requested. Lone surrogates, which UTF-8 cannot encode,
    are written as escapes.
    """
    write_whole(path, render(report, comparison, problem).encode(errors="backslashreplace"))


def render(report: Report, comparison: Comparison | None = None, problem: str = "") -> str:
    """Return the page as text."""
    # The page's own scripts are one strict function, so that their names do not become properties of the window.
    styles, scripts = _joined(STYLES), f'(() => {{\n"use strict";{_joined(SCRIPTS)}}})();\n'
    early = _joined(("templates/early.js",))
    page = build_view(report)
    return (
        _environment()
        .get_template("page.html.j2")
        .render(
            page=page,
            report=report,
            cards=make_cards(page),
            comparison_problem=problem,
            comparison=comparison
            and {
                "before": comparison.before.header,
                "changes": comparison.describe_numbers() or "no changes",
                "kinds": [(mark_of(kind), kind, *texts) for kind, *texts in describe_comparison(comparison)],
            },
            history_lists=list(describe_history(report)),
            # JSON in a script element, which only "<" could end.
            data=json.dumps(page.data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
            styles=styles,
            early=early,
            scripts=scripts,
            style_hash=_hash(styles),
            script_hashes=[_hash(early), _hash(scripts)],
        )
    )


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FunctionLoader, StrictUndefined
    from markupsafe import Markup

    def escape_control(value: Any) -> Any:
        # Not isinstance(value, Markup): pytester drops modules from sys.modules, so templates may have another Markup.
        return value if hasattr(value, "__html__") or not isinstance(value, str) else printable(value, LINES)

    environment = Environment(
        loader=FunctionLoader(lambda name: _read(f"templates/{name}")),
        autoescape=True,
        finalize=escape_control,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "amount": "{:,}".format,
        "cells": cells_of,
        "why_no_step": why_no_step,
        "bytes": lambda size: "unknown" if size is None else as_bytes(size),
        "counted": counted,
        "duration": describe_duration,
        "moment": describe_time,
        "number": "{:.6g}".format,
        "name_ranks": name_ranks,
        "first_of": first_of,
        "folded": lambda names: list(fold_names(names)),
        "packed": pack,
        "safe_source": Markup,
        "shell": shlex.join,
        "space_separated": lambda numbers: " ".join(map(str, numbers)),
        "capitalize_first": lambda text: text[:1].upper() + text[1:],
        "css": lambda kind: kind.replace(" ", "-"),
        "kind": describe_kind,
    }
    environment.globals |= {
        "MEANINGS": STATUSES | SKIPS,
        "GLYPHS": GLYPHS,
        "BAD": BAD,
        "TABS": TABS,
        "SKIPS": SKIPS,
        "MOST_VALUES": MOST_VALUES,
        "STATES": STATES,
        "PROBLEMS": PROBLEMS,
        "TRACED": TRACED,
        "TRACED_GLYPHS": TRACED_GLYPHS,
        "BACKWARD": BACKWARD,
        "SIZE_PARTS": PARTS,
        "SIZE_WIDTH": BAR_WIDTH,
        "SIZE_HEIGHT": BAR_HEIGHT,
        "name_activity": name_activity,
    }
    return environment


@cache
def _read(name: str) -> str:
    return HERE.joinpath(name).read_text(encoding="utf-8")


def _joined(names: tuple[str, ...]) -> str:
    """Return files exactly as the page embeds them, since its policy has their hash."""
    return "\n" + "\n".join(_read(name).strip() for name in names) + "\n"


def pack(text: str) -> str:
    """Return HTML as the page's script unpacks it: sections of many loaders are alike and become a twentieth."""
    return base64.b64encode(zlib.compress(text.encode(errors="backslashreplace"), 9)).decode()


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def describe_duration(seconds: float) -> str:
    """Return a text such as "12 ms", "3.4 s" or "5 min 20 s"."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s"


def describe_time(text: str) -> str:
    """Return an ISO 8601 time as "2026-11-20 22:30:00 UTC"; any other text unchanged."""
    try:
        return datetime.fromisoformat(text.replace("Z", "+00:00")).strftime("%Y-%m-%d %H:%M:%S %Z")
    except ValueError:
        return text


# The cards of "What broke".


@dataclass(frozen=True)
class Value:
    """What a check found, in ``loaders`` loaders with the same values; ``where`` is the first of them.

    ``names`` are the folded names of the tensors, and ``note`` says whose numbers or detail the line has.
    """

    check: str
    line: FindingLine
    names: tuple[str, ...]
    note: str
    where: str
    findings: int
    """The number of findings in all of these loaders."""
    loaders: int


@dataclass(frozen=True)
class Card:
    """One cause, with what was found and where to read more."""

    story: Story
    values: tuple[Value, ...]
    chips: tuple[tuple[LoaderView, LoaderView | CheckView], ...]
    """Each loader, with where its details and its first cell are: its own, or those of the check that failed."""

    @property
    def left(self) -> int:
        """The number of findings that it does not show."""
        return sum(value.findings for value in self.values[MOST_VALUES:])


def make_cards(page: PageView) -> list[Card]:
    """Return the cards of a page, in the terminal's order."""
    views = {id(loader.record): loader for loader in page.loaders}
    stories = with_starts(stories_of(page.report.loaders), page.report)
    return [Card(story, tuple(_values(story, views)), tuple(_chips(story, views))) for story in stories]


def _chips(story: Story, views: Mapping[int, LoaderView]) -> Iterator[tuple[LoaderView, LoaderView | CheckView]]:
    first = {id(place.loader): place.check for place in reversed(story.places)}
    for record in story.loaders:
        loader, check = views[id(record)], first[id(record)]
        yield loader, loader if check is None or record.is_crashed else loader.checks[check.check]


def _values(story: Story, views: Mapping[int, LoaderView]) -> Iterator[Value]:
    """Yield what was found, with the number of loaders that have the same values."""
    found = grouped(
        ((place.check.check, as_line(similar)), (place, similar))
        for place in story.places
        for similar in group_for_lines(place.findings, MOST_ALIKE)
        if place.check is not None
    )
    for (check, line), same in found.items():
        place, similar = same[0]
        names, where = tuple(fold_tensors(line.names, place.kinds)), views[id(place.loader)].short
        findings = sum(len(one) for _, one in same)
        yield Value(check, line, names, describe_first(similar), where, findings, len(same))
