"""Numbers as the page writes them: bytes, durations, times and losses."""

from __future__ import annotations

from datetime import datetime
from math import isfinite


def describe_bytes(size: int | None) -> str:
    """Return a text such as "1.5 MiB"."""
    if size is None:
        return "unknown"
    value, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1023.5:  # larger values would be rounded to 1024
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"


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


def describe_loss(value: float) -> str:
    """Return a loss with six digits, or "nan" or "inf"."""
    return f"{value:.6g}" if isfinite(value) else str(value)
