"""Render the detection matrix, as in ``matrix.json``, as Markdown and as SVG."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

SIGNS = {"passed": "", "failed": "X", "skipped": "-", "error": "E"}
CELL, LEFT, TOP = 16, 330, 250
COLOURS = {"caught": "#2e7d32", "false": "#c62828", "missed": "#ff8f00", "error": "#6a1b9a", "skipped": "#e0e0e0"}
LEGEND = {
    "caught": "fails, as expected",
    "missed": "should fail, but does not",
    "false": "fails, but should not",
    "error": "error",
    "skipped": "skipped",
}


def render_markdown(matrix: Mapping[str, Any]) -> str:
    """Return a table with a row per loader and a numbered column per check, after a list of the checks."""
    versions = ", ".join(f"{name} {number}" for name, number in matrix["versions"].items())
    problems = matrix["problems"] or ["every defect fails its own check and no other; no conforming loader fails any"]
    return "\n".join(
        ["# Detection matrix", "", versions, "", *(f"* {line}" for line in problems), "", *_table(matrix), ""]
    )


def _table(matrix: Mapping[str, Any]) -> Iterator[str]:
    checks: Sequence[str] = matrix["checks"]
    yield "`X` failed, `-` skipped, `E` error; empty: passed. The check that should fail is in brackets."
    yield ""
    yield from (f"{number}. `{id}`" for number, id in enumerate(checks, 1))
    yield ""
    yield "| loader | " + " | ".join(str(number) for number, _ in enumerate(checks, 1)) + " |"
    yield "|---|" + "---|" * len(checks)
    for row in matrix["loaders"]:
        signs = (f"[{SIGNS[s]}]" if id == row["caught_by"] else SIGNS[s] for id, s in row["status"].items())
        yield f"| {_label(row)} | " + " | ".join(signs) + " |"


def render_svg(matrix: Mapping[str, Any]) -> str:
    """Return the matrix as a grid of coloured cells."""
    checks, rows = matrix["checks"], matrix["loaders"]
    width, height = LEFT + CELL * len(checks) + 160, TOP + CELL * len(rows) + 60
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for column, id in enumerate(checks):
        x = LEFT + CELL * column + 12
        parts.append(f'<text transform="translate({x},{TOP - 6}) rotate(-60)">{escape(id)}</text>')
    for number, row in enumerate(rows):
        y = TOP + CELL * number
        parts.append(f'<text x="{LEFT - 8}" y="{y + 12}" text-anchor="end">{escape(_label(row))}</text>')
        parts += [_cell(row, id, LEFT + CELL * column, y) for column, id in enumerate(checks)]
    for number, (kind, label) in enumerate(LEGEND.items()):
        x, y = LEFT + 170 * number, TOP + CELL * len(rows) + 20
        parts.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{COLOURS[kind]}"/>')
        parts.append(f'<text x="{x + 17}" y="{y + 10}">{label}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _cell(row: Mapping[str, Any], id: str, x: int, y: int) -> str:
    colour = COLOURS.get(_kind(row, id), "white")
    title = escape(f"{row['name']}: {id} {row['status'][id]} {row['reasons'].get(id, '')}".strip())
    return (
        f'<rect x="{x}" y="{y}" width="{CELL - 1}" height="{CELL - 1}" fill="{colour}" stroke="#bdbdbd" '
        f'stroke-width="0.5"><title>{title}</title></rect>'
    )


def _kind(row: Mapping[str, Any], id: str) -> str:
    status = row["status"][id]
    if id == row["caught_by"]:
        return "caught" if status == "failed" else "missed"
    return "false" if status == "failed" else str(status)


def _label(row: Mapping[str, Any]) -> str:
    mesh = " x ".join(f"{name}={size}" for name, size in row["mesh"].items())
    return f"{row['name']} ({row['architecture']}, {mesh})"
