"""The badge of a run: ``badge.json`` for shields.io's endpoint, and ``badge.svg``, the same badge as a picture."""

from __future__ import annotations

import json

from pytest_fsdp_meta.reports.outcome import describe_result, state_of
from pytest_fsdp_meta.reports.schema import Report

LABEL = "fsdp conformance"
COLORS = {"brightgreen": "#2e7d32", "red": "#c62828", "yellow": "#7a5c00", "lightgrey": "#616161"}
"""shields.io's name -> the colour in the picture. White text on each has a contrast of 5 or more."""
STATES = {"passed": "brightgreen", "failed": "red", "known": "yellow"}
"""State of a run -> shields.io's name of its colour, where it is not grey."""
CHARACTER_WIDTH = 6.6
"""Average width (px) of a character at 11 px; ``textLength`` then fits the text to it."""

SVG = """<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="20" role="img" aria-label="{label}: {message}">
<title>{label}: {message}</title>
<rect width="{width}" height="20" rx="3" fill="#424242"/>
<path d="M{left} 0h{rest}a3 3 0 0 1 3 3v14a3 3 0 0 1-3 3H{left}z" fill="{color}"/>
<g fill="#fff" font-family="Verdana,Geneva,DejaVu Sans,sans-serif" font-size="11" text-anchor="middle">
<text x="{label_at}" y="14" textLength="{label_length}">{label}</text>
<text x="{message_at}" y="14" textLength="{message_length}">{message}</text>
</g>
</svg>
"""


def badge(report: Report) -> dict[str, object]:
    """Return what shields.io's endpoint badge expects."""
    state = state_of(report)
    color = "red" if state == "incomplete" and report.is_bad else STATES.get(state, "lightgrey")
    message = str(report.outcome or describe_result(report))
    message = f"incomplete, {message}" if state == "incomplete" else message
    return {"schemaVersion": 1, "label": LABEL, "message": message, "color": color, "isError": color == "red"}


def badge_json(report: Report) -> str:
    """Return the text of ``badge.json``."""
    return json.dumps(badge(report), indent=1) + "\n"


def badge_svg(report: Report) -> str:
    """Return the text of ``badge.svg``. Label and message contain no character that XML would escape."""
    facts = badge(report)
    label_length, message_length = (round(len(text) * CHARACTER_WIDTH) for text in (LABEL, str(facts["message"])))
    left, width = label_length + 10, label_length + message_length + 20
    return SVG.format(
        width=width,
        left=left,
        rest=width - left - 3,
        color=COLORS[str(facts["color"])],
        label=LABEL,
        message=facts["message"],
        label_at=left / 2,
        message_at=left + (width - left) / 2,
        label_length=label_length,
        message_length=message_length,
    )
