"""The place and the text of a failure's one-line forms: ``--tb=line``, the short summary, annotations of CI.

pytest takes them from where an exception was raised in its own process, which is a line of this plugin.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class FailureLine:
    """A failure in one line. ``subject`` is what failed; pytest's summary has it in the node id.

    ``place`` is "path:line" in the user's code; "" for the line of the test.
    """

    subject: str
    message: str
    place: str = ""


LINE = pytest.StashKey[FailureLine]()
"""The line of the phase that has just run."""


def point_to_user(item: pytest.Item, report: pytest.TestReport) -> None:
    """Let the report of a failed phase point to the user's code; with ``--tb=line``, it is that line alone."""
    line = item.stash.get(LINE, None)
    if line is None:
        return
    del item.stash[LINE]  # also of an expected failure: a later phase has a line of its own
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is None or not report.failed:
        return
    path, _, number = line.place.rpartition(":")
    crash.path, crash.lineno = (path, int(number)) if path else (str(item.path), (item.location[1] or 0) + 1)
    crash.message = line.message
    if item.config.getoption("tbstyle", "auto") != "line":
        return
    crash.message = f"{line.subject}: {line.message}"
    entries = report.longrepr.reprtraceback.reprentries  # type: ignore[union-attr]
    # pytest prints this line of a test that failed, but of an error in its setup the entries.
    del entries[0 if report.when == "call" else 1 :]
    if entries:
        entries[0].lines = [f"{crash.path}:{crash.lineno}: {crash.message}"]
