"""Templates, style and script put together into one file. Whatever a report holds is text to it, and stays text."""

from __future__ import annotations

import base64
import hashlib
import json
import shlex
from datetime import datetime
from functools import cache
from importlib.resources import files
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_fsdp_meta.evidence.codec import write_whole
from pytest_fsdp_meta.reports.compare import Comparison, counts, describe_comparison
from pytest_fsdp_meta.reports.page.findings import MOST_DETAILS
from pytest_fsdp_meta.reports.page.layouts import STATES, TROUBLES
from pytest_fsdp_meta.reports.page.traffic import LONG, TALL
from pytest_fsdp_meta.reports.page.view import GLYPHS, view
from pytest_fsdp_meta.reports.schema import STATUSES, WORDS, Report
from pytest_fsdp_meta.reports.totals import DOING
from pytest_fsdp_meta.text import counted, first_of, fold_names, name_ranks

if TYPE_CHECKING:
    from jinja2 import Environment

HERE = files("pytest_fsdp_meta.reports.page")
STYLES = ("vendor/uPlot.min.css", "templates/page.css")
MAIN_VERSIONS = ("pytest-fsdp-meta", "torch", "transformers")
MOST_IN_WORDS = 60
"""Drawings of one loader that each have their words as text beside them; of more, only those with troubles."""
SCRIPTS = ("vendor/uPlot.LICENSE", "vendor/uPlot.iife.min.js", "templates/page.js")


def write_page(report: Report, path: Path, comparison: Comparison | None = None, told: str = "") -> None:
    """One file that a browser shows without asking for another; whole or not at all.

    ``told`` says why there is no comparison, where one was asked for. What UTF-8 cannot say is written as its escape.
    Raises OSError.
    """
    write_whole(path, render(report, comparison, told).encode(errors="backslashreplace"))


def render(report: Report, comparison: Comparison | None = None, told: str = "") -> str:
    """The page as text."""
    styles, scripts = _joined(STYLES), _joined(SCRIPTS)
    early = _joined(("templates/early.js",))
    page = view(report)
    return (
        _environment()
        .get_template("page.html.j2")
        .render(
            page=page,
            report=report,
            not_compared=told,
            comparison=comparison
            and {
                "before": comparison.before.header,
                "counts": counts(comparison),
                "kinds": list(describe_comparison(comparison)),
            },
            data=_embedded(page.data),
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

    def shown(value: Any) -> Any:
        return value if isinstance(value, Markup) or not isinstance(value, str) else printable(value)

    environment = Environment(
        loader=FunctionLoader(lambda name: _read(f"templates/{name}")),
        autoescape=True,
        finalize=shown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "amount": amount,
        "bytes": in_bytes,
        "counted": counted,
        "duration": duration,
        "moment": moment,
        "number": number,
        "name_ranks": name_ranks,
        "first_of": first_of,
        "folded": lambda names: list(fold_names(names)),
        "safe_source": Markup,
        "shell": shlex.join,
        "words": lambda numbers: " ".join(map(str, numbers)),
    }
    environment.globals |= {
        "STATUSES": STATUSES,
        "WORDS": WORDS,
        "GLYPHS": GLYPHS,
        "STATES": STATES,
        "TROUBLES": TROUBLES,
    }
    environment.globals |= {"LONG": LONG, "TALL": TALL, "MOST_DETAILS": MOST_DETAILS, "MOST_IN_WORDS": MOST_IN_WORDS}
    environment.globals |= {"MAIN_VERSIONS": MAIN_VERSIONS, "DOING": DOING}
    return environment


@cache
def _read(name: str) -> str:
    return HERE.joinpath(name).read_text(encoding="utf-8")


def _joined(names: tuple[str, ...]) -> str:
    """Files as they stand in the page, which is what their hash is of. A licence is a comment."""
    told = ((f"/*!\n{_read(name)}*/" if name.endswith("LICENSE") else _read(name).strip()) for name in names)
    return "\n" + "\n".join(told) + "\n"


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _embedded(data: Any) -> str:
    """JSON that no HTML parser sees an end in: inside a script element only ``<`` can begin one."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def printable(text: str) -> str:
    """A control character, or one that turns the direction of what follows, as its escape; lines stay lines."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one == "\n" else repr(one)[1:-1] for one in text)


def in_bytes(size: int | None) -> str:
    """ "1.5 MiB"."""
    if size is None:
        return "unknown"
    value, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1023.5:  # what would be told as 1024
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"


def duration(seconds: float) -> str:
    """ "12 ms", "3.4 s", "5 min 20 s"."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s"


def moment(told: str) -> str:
    """ "2026-11-20 22:30 UTC"; what is no time of ISO 8601, as it is."""
    try:
        return datetime.fromisoformat(told.replace("Z", "+00:00")).strftime("%Y-%m-%d %H:%M %Z")
    except ValueError:
        return told


def amount(value: float) -> str:
    """ "1,234"."""
    return f"{value:,}"


def number(value: float) -> str:
    """A loss, to six digits; what is none, by its name."""
    return f"{value:.6g}" if isfinite(value) else str(value)
