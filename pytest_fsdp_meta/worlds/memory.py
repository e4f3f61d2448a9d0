"""Whether the system has ended processes because memory ran out, of which it tells them nothing."""

from __future__ import annotations

from pathlib import Path

SEEN = " (meanwhile the system ran out of memory and killed a process)"


def shortages() -> int:
    """How many processes it has ended for that since it started, of any container; 0 where it does not say."""
    try:
        counts = Path("/proc/vmstat").read_text("ascii")
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in counts.splitlines() if line.startswith("oom_kill ")), 0)
