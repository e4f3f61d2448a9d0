"""``summary.md``: a run on one short page, for the summary of a CI step.

Names come from the models under test and may contain anything; all of them are escaped, as Markdown and as HTML.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from pytest_fsdp_meta.reports.causes import (
    CRASH,
    ERROR,
    FINDING,
    REMOVE,
    UNEXPECTED_PASS,
    FailureGroup,
    describe_failures,
    explain_pass,
    group_failures,
    is_crashed,
)
from pytest_fsdp_meta.reports.compare import Comparison, describe_comparison, describe_verdict, mark_of
from pytest_fsdp_meta.reports.history import describe_history
from pytest_fsdp_meta.reports.schema import (
    BAD,
    JUDGED,
    SKIPS,
    STATUSES,
    LoaderRecord,
    Report,
    count_kinds,
    describe_count,
    how_many,
    is_bad,
)
from pytest_fsdp_meta.reports.terminal import MOST_LINES, describe_finding, printable
from pytest_fsdp_meta.text import counted, first_of

IN_RESULT = tuple(status for status in STATUSES if status != "skipped" and status not in BAD)
COLUMNS = ("passed", "partly checked", "failed", "error")
PLAIN = r"(?<=:):|:(?=[: ])|(?<=\d):(?=\d)|(?<=\d)\+"
MARKUP = re.compile(rf"(?!{PLAIN})[^\w .,/=()-]|(?<![^\W_])_|_(?![^\W_])")
"""Characters written as entities: not an underscore within a word, nor the colons of sentences, node ids and times."""
MARKS = {"worse": "❌", "better": "✅", "neutral": "ℹ️"}  # noqa: RUF001  (the sign is meant)
HEADLINES = {CRASH: "Crashed", FINDING: "Failed", ERROR: "Errors", UNEXPECTED_PASS: "Passed unexpectedly"}
"""Kind of a failure -> the headline of its list."""
MOST_NAMED = 10
"""Loaders named for one crash."""
MOST_ROWS = 200
"""Rows of the table; GitHub truncates a page at 1 MiB."""


def summarise_run(report: Report, comparison: Comparison | None = None, problem: str = "") -> str:
    """Return the whole page. ``problem`` says why there is no comparison although one was requested."""
    parts = [*_head(report), *_failures(report), *_comparison(comparison, problem), *_history(report), *_table(report)]
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
    if report.is_bad:
        return "❌"
    if _failed_otherwise(report):
        return "⚠️"
    return "✅" if how_many(count_kinds(report.loaders), JUDGED) else "⚪"


def describe_result(report: Report) -> str:
    """Return a text such as "3 loaders crashed, 2 checks failed, 41 passed". Skipped checks are not counted."""
    counts = count_kinds(report.loaders)
    others = [describe_count(counts[status], status) for status in IN_RESULT if counts[status]]
    failures = describe_failures(report.loaders, len(report.missing))
    parts = list(filter(None, [failures, *others])) or ["nothing judged"]
    return ", ".join([*parts, *([f"pytest exited with {report.exit_status}"] if _failed_otherwise(report) else [])])


def _failed_otherwise(report: Report) -> bool:
    """Return whether the run failed for a reason that no check shows: another test, a crash, an incomplete report."""
    return bool(report.exit_status) and not report.is_bad


def _table(report: Report) -> Iterator[str]:
    if not report.loaders:
        return
    yield f"| loader | world | {' | '.join(COLUMNS)} | skipped | others | s |"
    yield f"|---|---|{'--:|' * (len(COLUMNS) + 3)}"
    for loader in sorted(report.loaders, key=lambda loader: not is_bad([loader]))[:MOST_ROWS]:
        counts = count_kinds([loader])
        numbers = [*(counts[status] for status in COLUMNS), how_many(counts, ("skipped", *SKIPS))]
        shown: list[object] = [*numbers, counts.total() - sum(numbers)]
        if is_crashed(loader):
            shown[COLUMNS.index("error")] = "crashed"
        cells = " | ".join(map(str, shown))
        seconds = sum(check.seconds for check in loader.checks)
        yield f"| {escaped(loader.loader)} | {_world(loader)} | {cells} | {seconds:.1f} |"
    if len(report.loaders) > MOST_ROWS:
        yield f"| and {len(report.loaders) - MOST_ROWS} more |{' |' * (len(COLUMNS) + 4)}"
    yield ""


def _world(loader: LoaderRecord) -> str:
    return escaped(str(loader.world)) if loader.world.size else ""


def _failures(report: Report) -> Iterator[str]:
    groups = group_failures(report.loaders)
    for kind, headline in HEADLINES.items():
        lines = [line for group in groups if group.kind == kind for line in _describe_group(group)]
        if lines:
            yield from [f"**{headline}**", "", *lines[:MOST_LINES]]
            if len(lines) > MOST_LINES:
                yield f"* and {len(lines) - MOST_LINES} more"
            yield ""


def _describe_group(group: FailureGroup) -> Iterator[str]:
    """Yield one line for a crash that several loaders share, and one for each check with a finding or an error."""
    if group.kind == CRASH:
        loaders = [place.loader.loader for place in group.places]
        yield f"* {escaped(group.cause)}: {escaped(first_of(loaders, MOST_NAMED))}"
        return
    for place in group.places:
        where = escaped(place.loader.loader)
        if group.kind == UNEXPECTED_PASS and place.check is not None:
            yield f"* {escaped(explain_pass(place.check.reason, place.check.check))}: {REMOVE}, in {where}"
            continue
        what = escaped(describe_finding(place.findings[0]) if place.findings else group.cause)
        more = f", and {counted(len(place.findings) - 1, 'more finding')}" if len(place.findings) > 1 else ""
        yield f"* {escaped(first_of([check.check for check in place.checks]))} in {where}: {what}{more}"


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
    for kind, headline, lines in described:
        yield f"{MARKS[mark_of(kind)]} {headline}"
        yield ""
        yield from (f"* {escaped(line)}" for line in lines)
        yield ""
