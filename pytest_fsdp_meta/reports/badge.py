"""``badge.json``, which shields.io draws where it is served, and ``badge.svg``, the same drawn already. Pure."""

from __future__ import annotations

import json

from pytest_fsdp_meta.reports.markdown import message
from pytest_fsdp_meta.reports.schema import JUDGED, Report, how_many, is_bad, statuses

LABEL = "fsdp conformance"
COLORS = {"brightgreen": "#2e7d32", "red": "#c62828", "lightgrey": "#616161"}
"""As shields.io calls them, and as they are drawn: white text on each has a contrast of 5 and more."""
WIDTH = 6.6
"""Pixels of a letter at 11 px, on average; the text is then drawn at exactly this length."""

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
    """What shields.io's endpoint takes."""
    judged = how_many(statuses(report.loaders), JUDGED)
    clean = judged and report.complete and not report.exit_status
    color = "red" if is_bad(report.loaders) else "brightgreen" if clean else "lightgrey"
    told = message(report) if report.complete else f"cut off, {message(report)}"
    return {"schemaVersion": 1, "label": LABEL, "message": told, "color": color, "isError": color == "red"}


def badge_json(report: Report) -> str:
    return json.dumps(badge(report), indent=1) + "\n"


def badge_svg(report: Report) -> str:
    """The texts are ours and of letters, digits and commas, so there is nothing to escape."""
    told = badge(report)
    label_length, message_length = (round(len(text) * WIDTH) for text in (LABEL, str(told["message"])))
    left, width = label_length + 10, label_length + message_length + 20
    return SVG.format(
        width=width,
        left=left,
        rest=width - left - 3,
        color=COLORS[str(told["color"])],
        label=LABEL,
        message=told["message"],
        label_at=left / 2,
        message_at=left + (width - left) / 2,
        label_length=label_length,
        message_length=message_length,
    )
