"""``summary.md``: a run in one short page, for the summary of a CI step. Pure.

Names come from the models that were judged, and may hold anything; nothing of them is Markdown or HTML on the page.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from pytest_fsdp_meta.reports.compare import MOST, Comparison, describe_comparison, verdict
from pytest_fsdp_meta.reports.schema import (
    BROKEN,
    JUDGED,
    KEPT,
    VIOLATED,
    WORDS,
    LoaderRecord,
    Report,
    errors_by_reason,
    how_many,
    is_bad,
    statuses,
)
from pytest_fsdp_meta.reports.terminal import describe_finding, printable
from pytest_fsdp_meta.text import counted, first_of

OTHERS = ("error", "xfailed", "not run")
PLAIN = r"(?<=:):|:(?=[: ])|(?<=\d):(?=\d)|(?<=\d)\+"
MARKUP = re.compile(rf"(?!{PLAIN})[^\w .,/=()-]|(?<![^\W_])_|_(?![^\W_])")
"""What is written as an entity: not an underscore within a word, nor the colons of sentences, node ids and times."""
MARKS = {"worse": "❌", "better": "✅", "odd": "ℹ️"}  # noqa: RUF001  (the sign is meant)
ROWS = 200
"""Of the table: GitHub cuts a page off at 1 MiB."""


def summarise_run(report: Report, comparison: Comparison | None = None, told: str = "") -> str:
    """The whole page. ``told`` says why there is no comparison, where one was asked for."""
    return "\n".join([*_head(report), *_changes(comparison, told), *_table(report), *_findings(report)]) + "\n"


def escaped(text: str) -> str:
    """As text of Markdown that stays in its line and cell, whatever it holds."""
    return MARKUP.sub(lambda found: f"&#{ord(found[0])};", printable(text))


def _head(report: Report) -> Iterator[str]:
    yield f"### {_mark(report)} fsdp conformance: {message(report)}"
    yield ""
    if not report.complete:
        yield "The run was cut off; this is what it knew by then."
        yield ""


def _mark(report: Report) -> str:
    if not report.complete:
        return "⚠️"
    if is_bad(report.loaders):
        return "❌"
    if _failed_otherwise(report):
        return "⚠️"
    return "✅" if how_many(statuses(report.loaders), JUDGED) else "⚪"


def message(report: Report) -> str:
    """ "41 kept, 2 broken, 1 failed as expected": of the checks that were judged, or should have been."""
    counts = statuses(report.loaders)
    kept, broken = how_many(counts, KEPT), how_many(counts, VIOLATED)
    told = [f"{kept} kept"] if kept or broken else []
    told += [f"{broken} broken"] if broken else []
    told += [f"{counts[status]} {WORDS[status]}" for status in OTHERS if counts[status]]
    told = told or ["nothing judged"]
    return ", ".join([*told, *([f"pytest exited with {report.exit_status}"] if _failed_otherwise(report) else [])])


def _failed_otherwise(report: Report) -> bool:
    """Whether the run is bad for another reason than what was judged: a test, a crash, evidence that is not whole."""
    return bool(report.exit_status) and not is_bad(report.loaders)


def _table(report: Report) -> Iterator[str]:
    if not report.loaders:
        return
    yield "| loader | world | kept | broken | could not be judged | others | s |"
    yield "|---|---|--:|--:|--:|--:|--:|"
    for loader in sorted(report.loaders, key=lambda one: not is_bad([one]))[:ROWS]:
        counts = statuses([loader])
        told = [how_many(counts, KEPT), how_many(counts, VIOLATED), counts["error"]]
        others = counts.total() - sum(told)
        seconds = sum(check.seconds for check in loader.checks)
        numbers = " | ".join(map(str, [*told, others]))
        yield f"| {escaped(loader.loader)} | {_world(loader)} | {numbers} | {seconds:.1f} |"
    if len(report.loaders) > ROWS:
        yield f"| and {len(report.loaders) - ROWS} more | | | | | | |"
    yield ""


def _world(loader: LoaderRecord) -> str:
    return escaped(str(loader.world)) if loader.world.size else ""


def _findings(report: Report) -> Iterator[str]:
    lines = [
        f"* {escaped(check.check)} in {escaped(loader.loader)}: "
        + escaped(describe_finding(check.findings[0]) if check.findings else check.reason or WORDS[check.status])
        + (f", and {counted(len(check.findings) - 1, 'more finding')}" if len(check.findings) > 1 else "")
        for loader in report.loaders
        for check in loader.checks
        if check.status in BROKEN and (check.findings or check.status != "error")
    ]
    errors = [
        f"* {escaped(first_of(checks))} in {escaped(where)}: {escaped(reason)}"
        for (reason, where), checks in errors_by_reason(report.loaders).items()
    ]
    for headline, found in (("Broken", lines), ("Could not be judged", errors)):
        if found:
            yield from [f"**{headline}**", "", *found[:MOST]]
            if len(found) > MOST:
                yield f"* and {len(found) - MOST} more"
            yield ""


def _changes(comparison: Comparison | None, told: str) -> Iterator[str]:
    if told:
        yield escaped(told)
        yield ""
    if comparison is None:
        return
    yield f"**Compared:** {escaped(verdict(comparison))}"
    yield ""
    for mark, headline, lines in describe_comparison(comparison):
        yield f"{MARKS[mark]} {headline}"
        yield ""
        yield from (f"* {escaped(line)}" for line in lines)
        yield ""
