"""``summary.md``: a run on one short page, for the summary of a CI step.

Names come from the models under test and may contain anything; all of them are escaped, as Markdown and as HTML.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from pytest_fsdp_meta.reports.compare import Comparison, describe_comparison, describe_verdict
from pytest_fsdp_meta.reports.history import describe_history
from pytest_fsdp_meta.reports.schema import (
    FAILED,
    JUDGED,
    SKIPS,
    STATUSES,
    LoaderRecord,
    Report,
    count_kinds,
    describe_count,
    errors_by_reason,
    how_many,
    is_bad,
)
from pytest_fsdp_meta.reports.terminal import MOST_LINES, describe_finding, printable
from pytest_fsdp_meta.text import counted, first_of

IN_RESULT = tuple(status for status in STATUSES if status != "skipped")
COLUMNS = ("passed", "partly checked", "failed", "error")
PLAIN = r"(?<=:):|:(?=[: ])|(?<=\d):(?=\d)|(?<=\d)\+"
MARKUP = re.compile(rf"(?!{PLAIN})[^\w .,/=()-]|(?<![^\W_])_|_(?![^\W_])")
"""Characters written as entities: not an underscore within a word, nor the colons of sentences, node ids and times."""
MARKS = {"worse": "❌", "better": "✅", "neutral": "ℹ️"}  # noqa: RUF001  (the sign is meant)
MOST_ROWS = 200
"""Rows of the table; GitHub truncates a page at 1 MiB."""


def summarise_run(report: Report, comparison: Comparison | None = None, problem: str = "") -> str:
    """Return the whole page. ``problem`` says why there is no comparison although one was requested."""
    parts = [*_head(report), *_comparison(comparison, problem), *_history(report), *_table(report), *_failures(report)]
    return "\n".join(parts) + "\n"


def escaped(text: str) -> str:
    """Return any text as Markdown that stays in its line and its table cell."""
    return MARKUP.sub(lambda found: f"&#{ord(found[0])};", printable(text))


def _head(report: Report) -> Iterator[str]:
    yield f"### {_mark(report)} fsdp conformance: {describe_result(report)}"
    yield ""
    if not report.complete:
        yield "The run was cut off; this is what had been checked by then."
        yield ""


def _mark(report: Report) -> str:
    if not report.complete:
        return "⚠️"
    if is_bad(report.loaders) or report.missing:
        return "❌"
    if _failed_otherwise(report):
        return "⚠️"
    return "✅" if how_many(count_kinds(report.loaders), JUDGED) else "⚪"


def describe_result(report: Report) -> str:
    """Return a text such as "41 passed, 2 failed, 1 xfailed". Skipped checks are not counted."""
    counts = count_kinds(report.loaders)
    parts = [describe_count(counts[status], status) for status in IN_RESULT if counts[status]] or ["nothing judged"]
    if report.missing:
        parts.append(f"{counted(len(report.missing), 'loader')} missing")
    return ", ".join([*parts, *([f"pytest exited with {report.exit_status}"] if _failed_otherwise(report) else [])])


def _failed_otherwise(report: Report) -> bool:
    """Return whether the run failed for a reason that no check shows: another test, a crash, an incomplete report."""
    return bool(report.exit_status) and not is_bad(report.loaders) and not report.missing


def _table(report: Report) -> Iterator[str]:
    if not report.loaders:
        return
    yield f"| loader | world | {' | '.join(COLUMNS)} | skipped | others | s |"
    yield f"|---|---|{'--:|' * (len(COLUMNS) + 3)}"
    for loader in sorted(report.loaders, key=lambda loader: not is_bad([loader]))[:MOST_ROWS]:
        counts = count_kinds([loader])
        numbers = [*(counts[status] for status in COLUMNS), how_many(counts, ("skipped", *SKIPS))]
        cells = " | ".join(map(str, [*numbers, counts.total() - sum(numbers)]))
        seconds = sum(check.seconds for check in loader.checks)
        yield f"| {escaped(loader.loader)} | {_world(loader)} | {cells} | {seconds:.1f} |"
    if len(report.loaders) > MOST_ROWS:
        yield f"| and {len(report.loaders) - MOST_ROWS} more |{' |' * (len(COLUMNS) + 4)}"
    yield ""


def _world(loader: LoaderRecord) -> str:
    return escaped(str(loader.world)) if loader.world.size else ""


def _failures(report: Report) -> Iterator[str]:
    failed = [
        f"* {escaped(check.check)} in {escaped(loader.loader)}: "
        + escaped(describe_finding(check.findings[0]) if check.findings else check.reason or check.status)
        + (f", and {counted(len(check.findings) - 1, 'more finding')}" if len(check.findings) > 1 else "")
        for loader in report.loaders
        for check in loader.checks
        if check.status in FAILED and (check.findings or check.status != "error")
    ]
    errors = [
        f"* {escaped(first_of(checks))} in {escaped(where)}: {escaped(reason)}"
        for (reason, where), checks in errors_by_reason(report.loaders).items()
    ]
    for headline, lines in (("Failed", failed), ("Errors", errors)):
        if lines:
            yield from [f"**{headline}**", "", *lines[:MOST_LINES]]
            if len(lines) > MOST_LINES:
                yield f"* and {len(lines) - MOST_LINES} more"
            yield ""


def _comparison(comparison: Comparison | None, problem: str) -> Iterator[str]:
    if problem:
        yield escaped(problem)
        yield ""
    if comparison is None:
        return
    yield f"**Compared:** {escaped(describe_verdict(comparison))}"
    yield ""
    yield from _lists(describe_comparison(comparison))


def _history(report: Report) -> Iterator[str]:
    yield from _lists(describe_history(report))


def _lists(described: Iterable[tuple[str, str, list[str]]]) -> Iterator[str]:
    for mark, headline, lines in described:
        yield f"{MARKS[mark]} {headline}"
        yield ""
        yield from (f"* {escaped(line)}" for line in lines)
        yield ""
