"""Name the checks in pytest's summary of skips: it folds the items of a loader that have one reason into one line."""

from __future__ import annotations

from copy import copy
from typing import Any

import pytest

from pytest_fsdp_meta.plugin.outcomes import attached_context


def name_checks(reporter: pytest.TerminalReporter) -> None:
    """Add to the reason of each skipped item the checks that are skipped at the same line for the same reason."""
    if not reporter.config.getoption("fold_skipped", True):
        return  # each item has its own line, with its node id
    skipped: list[Any] = reporter.stats.get("skipped", [])
    checks: dict[tuple[object, ...], dict[str, None]] = {}
    for report in skipped:
        if (check := _check_of(report)) is not None:
            checks.setdefault(report.longrepr, {})[check] = None
    for number, report in enumerate(skipped):
        if _check_of(report) is not None:
            path, line, reason = report.longrepr
            skipped[number] = copy(report)  # other plugins may still read the report
            skipped[number].longrepr = (path, line, f"{reason} [{', '.join(checks[report.longrepr])}]")


def _check_of(report: Any) -> str | None:
    """Return the check of a skipped item of a loader; None for other reports."""
    context = attached_context(report) if isinstance(report, pytest.TestReport) else None
    return context.check.check if context is not None and isinstance(report.longrepr, tuple) else None
