"""Render the page of a report again, optionally compared with an earlier report: see ``USAGE``."""

from __future__ import annotations

import sys
from pathlib import Path

from pytest_fsdp_meta.reports.compare import compare
from pytest_fsdp_meta.reports.history import Timeline
from pytest_fsdp_meta.reports.io import read_report
from pytest_fsdp_meta.reports.page import write_page

USAGE = "usage: python -m pytest_fsdp_meta.reports.page REPORT.json [PAGE.html [EARLIER.json]]"


def main(arguments: list[str]) -> str | None:
    """Write index.html next to the report, or PAGE.html. Return a usage error in one line, or None."""
    if not 1 <= len(arguments) <= 3 or arguments[0].startswith("-"):
        return USAGE
    source = Path(arguments[0])
    target = Path(arguments[1]) if len(arguments) > 1 else source.with_name("index.html")
    try:
        report = read_report(source)
        before = read_report(Path(arguments[2])) if len(arguments) > 2 else None
    except ValueError as error:
        return str(error)
    try:
        if before is None:
            write_page(report, target)
        else:
            # A report that was compared when it was written knows more runs.
            history = report if report.earlier else Timeline([before]).add_to(report)
            write_page(history, target, compare(before, report))
    except OSError as error:
        return f"{target}: {error.strerror or error}"
    except (ArithmeticError, ValueError, LookupError, TypeError, MemoryError) as error:  # an edited file's numbers
        return f"{source}: the report cannot be drawn: {error or 'not enough memory'}"
    print(target)
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
