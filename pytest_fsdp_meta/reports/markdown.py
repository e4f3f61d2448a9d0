"""``summary.md``: a run on one short page, for the summary of a CI step.

Names come from the models under test and may contain anything; all of them are escaped, as Markdown and as HTML.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from pytest_fsdp_meta.reports.compare import Comparison, describe_comparison, describe_verdict, mark_of
from pytest_fsdp_meta.reports.history import describe_history
from pytest_fsdp_meta.reports.schema import SKIPS, UNSETTLED, LoaderRecord, Report, count_kinds, how_many, is_bad
from pytest_fsdp_meta.reports.story import (
    CRASH,
    KINDS,
    Story,
    describe_counts_of,
    describe_reasons,
    describe_result,
    state_of,
    stories_of,
    with_starts,
)
from pytest_fsdp_meta.reports.terminal import MOST_LINES, shorten_list
from pytest_fsdp_meta.text import printable

COLUMNS = ("passed", "differs", "partly checked", "failed", "error")
PLAIN = r"(?<=:):|:(?=[: ])|(?<=\d):(?=\d)|(?<=\d)\+|(?<=\w)\[|\](?![\[(])"
MARKUP = re.compile(rf"(?!{PLAIN})[^\w .,;/=()'\"?%{{}}-]|(?<![^\W_])_|_(?![^\W_])")
"""Characters that are escaped: not an underscore within a word, nor the colons of sentences, node ids and times, nor
brackets that make no link: those of a node id."""
BACKSLASHED = "_*`~[]"
"""Characters that a backslash escapes; others become entities, which no extension of Markdown or HTML reads."""
HEADS = {
    "passed": "✅",
    "differs": "🟡",
    "known": "🟡",
    "failed": "❌",
    "incomplete": "⚠️",
    "otherwise": "⚠️",
    "empty": "⚪",
}
"""State of a run -> the sign of its headline."""
MARKS = {"worse": "❌", "better": "✅", "neutral": "ℹ️"}  # noqa: RUF001  (the sign is meant)
IN_FAILURES = ("failures", "changed", "known", "broken")
"""Kinds of changes and of history that the list of failures has already, each with its start."""
MOST_ROWS = 200
"""Rows of the table; GitHub truncates a page at 1 MiB."""


def summarise_run(report: Report, comparison: Comparison | None = None, problem: str = "") -> str:
    """Return the whole page. ``problem`` says why there is no comparison although one was requested."""
    paragraphs = (
        *_head(report),
        *_failures(report),
        *_unsettled(report),
        *_comparison(comparison, problem),
        *_lists(describe_history(report)),
        *_table(report),
    )
    return "".join(f"{paragraph}\n\n" for paragraph in paragraphs)


def escaped(text: str) -> str:
    """Return any text as Markdown that stays in its line and its table cell."""
    return MARKUP.sub(
        lambda found: f"\\{found[0]}" if found[0] in BACKSLASHED else f"&#{ord(found[0])};", printable(text)
    )


def _bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"* {escaped(line)}" for line in lines)


def _head(report: Report) -> Iterator[str]:
    outcome = report.outcome
    result = f" {outcome}" if outcome is not None else f": {describe_result(report)}"
    yield f"### {HEADS[state_of(report)]} fsdp conformance{result}"
    if outcome is not None:
        yield f"{describe_counts_of(report)}, with --fsdp-fail-on={outcome.fail_on}"
    if report.stopped_by:
        yield f"Nothing ran: {escaped(report.stopped_by)}"
    if not report.complete:
        yield "The run was cut off; this is what had been checked by then."


def _table(report: Report) -> Iterator[str]:
    if not report.loaders:
        return
    lines = [
        f"| loader | world | {' | '.join(COLUMNS)} | skipped | others | s |",
        f"|---|---|{'--:|' * (len(COLUMNS) + 3)}",
        *map(_row, sorted(report.loaders, key=lambda loader: not is_bad([loader]))[:MOST_ROWS]),
    ]
    if len(report.loaders) > MOST_ROWS:
        lines.append(f"| and {len(report.loaders) - MOST_ROWS} more |{' |' * (len(COLUMNS) + 4)}")
    yield "\n".join(lines)


def _row(loader: LoaderRecord) -> str:
    counts = count_kinds([loader])
    numbers = [*(counts[status] for status in COLUMNS), how_many(counts, ("skipped", *SKIPS))]
    shown: list[object] = [*numbers, counts.total() - sum(numbers)]
    if loader.is_crashed:
        shown[COLUMNS.index("error")] = "crashed"
    world = escaped(str(loader.world)) if loader.world.size else ""
    seconds = sum(check.seconds for check in loader.checks)
    return f"| {escaped(loader.loader)} | {world} | {' | '.join(map(str, shown))} | {seconds:.1f} |"


def _failures(report: Report) -> Iterator[str]:
    stories = with_starts(stories_of(report.loaders), report)
    for kind, (headline, *_) in KINDS.items():
        same = [story for story in stories if story.kind == kind]
        if same:
            yield f"**{headline}**"
            more = [f"* and {len(same) - MOST_LINES} more"] if len(same) > MOST_LINES else []
            yield "\n".join([*(line for story in same[:MOST_LINES] for line in _describe_story(story)), *more])


def _describe_story(story: Story) -> Iterator[str]:
    """Yield the cause and the remedy, and a line for each check that failed, with all loaders where it failed alike."""
    since = f" ({escaped(story.since)})" if story.since else ""
    places = story.describe_places()
    if story.kind == CRASH:
        yield f"* {escaped(story.cause)}: {escaped(places[0])}{since}"
        return
    subject = f"**{escaped(story.subject)}**, {'likely cause: ' if story.cause else ''}" if story.subject else ""
    yield f"* {subject}{escaped(story.headline)}{since}"
    yield from (f"  * where it starts: {escaped(origin)}" for origin in story.starts)
    if story.remedy:
        yield f"  * remedy: {escaped(story.remedy)}"
    yield from (f"  * {escaped(line)}" for line in shorten_list(places))


def _unsettled(report: Report) -> Iterator[str]:
    for status in UNSETTLED:
        if lines := shorten_list(describe_reasons(report.loaders, status)):
            yield from (f"**{status.capitalize()}**", _bullets(lines))


def _comparison(comparison: Comparison | None, problem: str) -> Iterator[str]:
    if problem:
        yield escaped(problem)
    if comparison is not None:
        yield f"**Compared:** {escaped(describe_verdict(comparison))}"
        yield from _lists(describe_comparison(comparison))


def _lists(described: Iterable[tuple[str, str, list[str]]]) -> Iterator[str]:
    for kind, headline, lines in described:
        if kind not in IN_FAILURES:
            yield from (f"{MARKS[mark_of(kind)]} {headline}", _bullets(lines))
