"""Makes the page of a report again: ``python -m pytest_fsdp_meta.reports.page REPORT.json [PAGE.html]``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from pytest_fsdp_meta.plain import from_plain
from pytest_fsdp_meta.reports.page import write_page
from pytest_fsdp_meta.reports.record import SCHEMA, Report

USAGE = "usage: python -m pytest_fsdp_meta.reports.page REPORT.json [PAGE.html]"


def main(arguments: list[str]) -> str | None:
    """Writes index.html beside the report, or PAGE.html; what is wrong, in one line."""
    if not 1 <= len(arguments) <= 2 or arguments[0].startswith("-"):
        return USAGE
    source = Path(arguments[0])
    target = Path(arguments[1]) if len(arguments) > 1 else source.with_name("index.html")
    try:
        report = read_report(source)
        write_page(report, target)
    except OSError as error:
        return f"{error.filename or source}: {error.strerror or error}"
    except ValueError as error:
        return f"{source}: {error}"
    print(target)
    return None


def read_report(path: Path) -> Report:
    """Raises ValueError that says in one line why it is no report."""
    text = path.read_bytes().decode("utf-8", errors="replace")
    data = _parsed(text)
    if not isinstance(data, dict) or type(data.get("schema")) is not int:
        raise ValueError('no report of pytest-fsdp-meta: it has no number as "schema"')
    if data["schema"] != SCHEMA:
        raise ValueError(
            f"a report of schema {data['schema']}, but this version reads schema {SCHEMA}; make its page with the "
            "version that wrote it"
        )
    return from_plain(Report, data)


def _parsed(text: str) -> Any:
    if not text.strip():
        raise ValueError("empty: whoever wrote it was ended")
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        at_end = error.pos >= len(text.rstrip()) - 1 or error.msg.startswith("Unterminated string")
        if text.lstrip().startswith("{") and at_end:
            raise ValueError("cut off in the middle: whoever wrote it was ended") from None
        raise ValueError(f"no JSON: {error}") from None
    except RecursionError:
        raise ValueError("no report of pytest-fsdp-meta: nested too deep") from None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
