"""The end of a run in the terminal: a line for each loader in its world, the findings by cause, and the account of all
checks. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from pytest_fsdp_meta.reports.schema import (
    BAD,
    BROKEN,
    JUDGED,
    UNACCOUNTED,
    WORDS,
    FindingRecord,
    LoaderRecord,
    errors_by_reason,
    how_many,
    statuses,
)
from pytest_fsdp_meta.reports.terminal import by_cause, describe_finding, paragraph, printable
from pytest_fsdp_meta.text import counted, first_of

DOING = {
    "starting": "starting ranks",
    "reference": "the reference",
    "values": "comparing values",
    "verifier": "the verifier",
    "collectives": "a step watched",
    "state_dict": "the state dict",
    "continued": "saving and going on",
    "saved": "saving",
    "repetition": "loading again",
    "kept": "saving",
    "export": "exporting",
    "resumed": "resuming",
    "restored": "restoring",
    "resharded": "resharding",
}
"""Where time goes, where it is called otherwise in a record."""
MOST_TIMES = 3
MOST_CAUSES = 20
Line = tuple[str, dict[str, bool]]
"""With how the terminal shall show it."""
GREEN, RED, YELLOW = {"green": True}, {"red": True}, {"yellow": True}


def nothing_judged(loaders: Sequence[LoaderRecord], others_passed: bool) -> bool:
    """Whether there were loaders, and nobody has judged any check of any: that must not look like a pass.

    Where other tests have passed, loaders that were all skipped by their authors are no more than that.
    """
    counts = statuses(loaders)
    if not loaders or how_many(counts, JUDGED):
        return False
    return not others_passed or bool(counts.keys() - {"skipped", "left out", "unselected"})


def describe_totals(loaders: Sequence[LoaderRecord], verbosity: int = 0) -> Iterator[Line]:
    """All lines of the section."""
    for loader in loaders:
        yield _loader(loader)
    if verbosity > -2:
        yield from _causes(loaders)
    yield _account(loaders)


def _loader(loader: LoaderRecord) -> Line:
    counts = statuses([loader])
    told = ", ".join(f"{counts[status]} {word}" for status, word in WORDS.items() if counts[status])
    world = f", {loader.world}" if loader.world.size else ""
    total = sum(check.seconds for check in loader.checks)
    return f"{printable(loader.loader)}{world}: {told}; {total:.1f} s{_times(loader.seconds)}", _markup(counts)


def _markup(counts: Mapping[str, int]) -> dict[str, bool]:
    if how_many(counts, BAD):
        return RED
    return GREEN if how_many(counts, JUDGED) else YELLOW


def _times(seconds: Mapping[str, float]) -> str:
    """The most of it."""
    spent = Counter[str]()
    for what, time in seconds.items():
        spent[DOING.get(what, what)] += time  # type: ignore[assignment]
    most = [f"{what} {time:.1f}" for what, time in spent.most_common(MOST_TIMES) if time >= 0.05]
    return f" ({', '.join(most)})" if most else ""


def _causes(loaders: Iterable[LoaderRecord]) -> Iterator[Line]:
    causes: dict[tuple[str, str], dict[tuple[str, str], list[FindingRecord]]] = {}
    for loader in loaders:
        for check in loader.checks:
            for why, found in by_cause(check.findings if check.status in BROKEN else ()).items():
                causes.setdefault(why, {}).setdefault((check.check, loader.loader), []).extend(found)
    for place, ((cause, remedy), places) in enumerate(list(causes.items())[:MOST_CAUSES], 1):
        yield "", {}
        yield paragraph(f"{place}. likely cause: ", cause), {"bold": True}
        yield paragraph("   remedy: ", remedy), {}
        for (broken, where), found_here in places.items():
            yield f"   {broken} in {printable(where)}: {first_of(list(map(describe_finding, found_here)))}", {}
    if len(causes) > MOST_CAUSES:
        yield f"... and {counted(len(causes) - MOST_CAUSES, 'cause')} more", RED
    yield from _errors(loaders, len(causes))
    if causes or any(check.status == "error" for loader in loaders for check in loader.checks):
        yield "", {}


def _errors(loaders: Iterable[LoaderRecord], before: int) -> Iterator[Line]:
    """Why checks could not be judged."""
    reasons = errors_by_reason(loaders)
    for place, ((reason, where), checks) in enumerate(list(reasons.items())[:MOST_CAUSES], before + 1):
        yield "", {}
        yield paragraph(f"{place}. could not be judged: ", reason), {"bold": True}
        yield f"   {first_of(checks)} in {printable(where)}", {}
    if len(reasons) > MOST_CAUSES:
        yield f"... and {counted(len(reasons) - MOST_CAUSES, 'reason')} more", RED


def _account(loaders: Sequence[LoaderRecord]) -> Line:
    """Every check of every loader is accounted for, or it is said which are not."""
    counts = statuses(loaders)
    total = counts.total()
    left = ", ".join(f"{counts[status]} {WORDS[status]}" for status in UNACCOUNTED if counts[status])
    of_which = f" in {len(loaders)} runs of loaders" if len(loaders) > 1 else ""
    told = f"{total - how_many(counts, UNACCOUNTED)} of {counted(total, 'check')} accounted for{of_which}"
    told += f" ({left})" if left else ""
    if not how_many(counts, JUDGED):
        return f"{told}; nothing was judged, so nothing has passed", RED
    return told, _markup(counts)
