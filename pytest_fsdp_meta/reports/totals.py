"""The totals in the terminal at the end of a run: loaders, findings by cause, and how many checks have a result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from pytest_fsdp_meta.reports.schema import (
    BAD,
    JUDGED,
    UNACCOUNTED,
    UNSETTLED,
    LoaderRecord,
    count_kinds,
    describe_counts,
    how_many,
    is_bad,
)
from pytest_fsdp_meta.reports.sizes import describe_sizes
from pytest_fsdp_meta.reports.story import (
    FINDING,
    KINDS,
    Story,
    describe_failures,
    describe_reasons,
    stories_of,
)
from pytest_fsdp_meta.reports.terminal import paragraph, shorten_list
from pytest_fsdp_meta.text import counted, first_of, grouped, printable

ACTIVITIES = {"starting": "starting ranks", "values": "comparing values", "not_finite": "a NaN step", "kept": "saving"}
"""Activity in ``LoaderRecord.seconds`` -> its description, where it is not its name."""
MOST_ACTIVITIES = 3
"""Activities named in the line of a loader."""
MOST_CAUSES = 20
NOTES = {
    "even shards": "every shard was even, so padding was not tested; try a number of ranks that does not divide {}",
    "equal vectors": "a loader that mixes up {} would pass, because their values are equal; unless they are copies on "
    "purpose, draw norms and biases at random, in the reference and in its checkpoint",
    "one rate": "the schedule was compared at one learning rate, {}; pass more steps=, or let it change within them",
    "norms in eval": "results were compared with {} in eval(); statistics in train() are compared between ranks only",
    "norms kept": "in the trainer's own step, {} ran in eval(), which never updates running statistics",
    "own groups": "the reference has copies of the parameter groups of {}, so wrong groups would pass",
    "square experts": "a loader that transposes {} would pass where the reference is converted by the same code, "
    "because they are square; let the intermediate size differ, as tiny_checkpoint(..., revealing=True) does",
}
"""Kind of a note in ``LoaderRecord.notes`` -> the sentence about it."""
FIELDS_TO_SUGGEST = ("reference", "batch", "loss", "optimizer", "train_step", "data", "scheduler", "save")
"""The fields of Subject that most loaders can declare, those worth most first."""
MOST_NEXT = 3
"""Fields named as the next to declare."""
CHECKS_NAMED_FIRST = ("params_equal_reference", "loss_parity", "grad_parity", "resume_parity", "modules_train")
"""Checks to name first of those that need a field; the others follow in the order of the catalogue."""
MOST_CHECKS = 2
"""Checks named for each of them."""
NO_ITEM = ("left out", "not selected")
"""Kinds of checks without an item, unless there is a reason for them; pytest does not count them as skipped."""
Styled = tuple[str, dict[str, bool]]
"""A text with pytest's markup for it."""
GREEN, RED, YELLOW = {"green": True}, {"red": True}, {"yellow": True}


def nothing_judged(loaders: Sequence[LoaderRecord], others_passed: bool) -> bool:
    """Return whether there are loaders, but no check of any was judged, so that the run must not look like a pass.

    If other tests passed, loaders that their authors skipped or did not select are an ordinary skip.
    """
    counts = count_kinds(loaders)
    if not loaders or how_many(counts, JUDGED):
        return False
    return not others_passed or bool(counts.keys() - {"by the test", "left out", "not selected"})


def describe_totals(loaders: Sequence[LoaderRecord], verbosity: int = 0, is_shown: bool = False) -> Iterator[Styled]:
    """Yield the lines of the section: without what pytest's failures say, if shown; with -q, only what differs."""
    for loader in loaders if verbosity > -1 else ():
        yield _describe_loader(loader)
        yield from ((line, {}) for line in describe_sizes(loader.sizes, loader.world))
    if verbosity > -2:
        yield from () if verbosity < 0 and is_shown else _describe_causes(loaders, is_shown)
        for status in UNSETTLED if verbosity > -1 else UNSETTLED[:1]:
            yield from ((f"{status}: {line}", YELLOW) for line in shorten_list(describe_reasons(loaders, status)))
    if verbosity > 0:
        yield from ((f"passed: {line}", {}) for line in describe_reasons(loaders, "passed"))
    if verbosity > -1:
        yield from ((line, {}) for line in describe_unseen(loaders))
        yield from _describe_next(loaders)
    if len(loaders) > 1 and (failures := describe_failures(loaders)):
        yield f"{failures} in {sum(is_bad([loader]) for loader in loaders)} of {len(loaders)} loaders", RED
    yield _describe_accounted(loaders)


def _describe_loader(loader: LoaderRecord) -> Styled:
    counts = count_kinds([loader])
    no_items = Counter(check.skip for check in loader.checks if check.skip in NO_ITEM and not check.reason)
    world = f", {loader.world}" if loader.world.size else ""
    total = sum(check.seconds for check in loader.checks)
    times = f"{total:.1f} s{_describe_activities(loader.seconds)}"
    if loader.loads > 1:
        times = f"loaded {loader.loads} times ({counted(loader.loads - 1, 'rerun')}); {times}"
    result = f"crashed, {counted(counts['error'], 'check')} not judged"
    if not loader.is_crashed:
        others = (f"{no_items[kind]} {kind}" for kind in NO_ITEM if no_items[kind])
        result = ", ".join(filter(None, [describe_counts(counts - no_items), *others]))
    return f"{printable(loader.loader)}{world}: {result}; {times}", RED if loader.is_crashed else _markup(counts)


def _markup(counts: Mapping[str, int]) -> dict[str, bool]:
    if how_many(counts, BAD):
        return RED
    return GREEN if how_many(counts, JUDGED) and not counts.get("differs") else YELLOW


def _describe_activities(seconds: Mapping[str, float]) -> str:
    """Return the activities that took longest, such as " (training 1.2, loading 0.3)"."""
    spent = Counter[str]()
    for activity, time in seconds.items():
        spent[name_activity(activity)] += time  # type: ignore[assignment]
    longest = [f"{name} {time:.1f}" for name, time in spent.most_common(MOST_ACTIVITIES) if time >= 0.05]
    return f" ({', '.join(longest)})" if longest else ""


def name_activity(activity: str) -> str:
    return ACTIVITIES.get(activity, activity.replace("_", " "))


def _describe_causes(loaders: Sequence[LoaderRecord], is_shown: bool) -> Iterator[Styled]:
    stories = stories_of(loaders)
    if is_shown and (alone := _only_failure(stories)):
        (line,) = alone.describe_places(with_detail=False)
        yield f"failed: {printable(line)}", {}
        return
    for kind, (_, label, noun) in KINDS.items():
        same = [story for story in stories if story.kind == kind]
        for story in same[:MOST_CAUSES]:
            title = f"{story.number}. {label}: " if story.cause else f"{story.number}. "
            yield from _describe_story(title, story, is_shown and kind == FINDING)
        if len(same) > MOST_CAUSES:
            yield f"... and {counted(len(same) - MOST_CAUSES, f'more {noun}')}", RED
    if stories:
        yield "", {}


def _only_failure(stories: Sequence[Story]) -> Story | None:
    """Return the story of the failed check, with all of its findings, if nothing else needs a fix."""
    places = [place for story in stories for place in story.places]
    failed = {(id(place.loader), id(place.check)) for place in places}
    if len(failed) != 1 or not all(place.findings for place in places):
        return None
    findings = tuple(found for place in places for found in place.findings)
    return replace(stories[0], places=(replace(places[0], findings=findings),))


def _describe_story(label: str, story: Story, is_short: bool) -> Iterator[Styled]:
    yield "", {}
    yield paragraph(label, story.headline), {"bold": True}
    for origin in () if is_short else story.starts:
        yield paragraph("   where it starts: ", origin), {}
    if story.remedy and not is_short:
        yield paragraph("   remedy: ", story.remedy), {}
    # pytest's section of failures has the details.
    yield from ((f"   {printable(line)}", {}) for line in shorten_list(story.describe_places(with_detail=False)))


def describe_unseen(loaders: Sequence[LoaderRecord]) -> Iterator[str]:
    """Yield a line for each thing that no check could see, because of the sizes and values of the models."""
    clean = [loader for loader in loaders if not how_many(count_kinds([loader]), BAD)]
    for kind, text in NOTES.items():
        blind = [
            f"{first_of(list(map(printable, loader.notes[kind])))} of {printable(loader.loader)}"
            for loader in clean
            if loader.notes.get(kind)
        ]
        if blind and all(loader.notes.get(kind, True) for loader in loaders):  # () where another loader has seen it
            yield text.format(first_of(blind))


def _describe_next(loaders: Sequence[LoaderRecord]) -> Iterator[Styled]:
    """Yield the fields worth declaring next in the loader that lacks most, with what they check, if the run passed."""
    if how_many(count_kinds(loaders), BAD):
        return
    lacking = [(loader, _undeclared(loader)) for loader in loaders]
    loader, fields = max(lacking, key=lambda pair: sum(map(len, pair[1].values())))
    if fields:
        worth = [f"{name} ({first_of(fields[name], MOST_CHECKS)})" for name in FIELDS_TO_SUGGEST if name in fields]
        yield (
            f"to check more of {printable(loader.loader)}, declare in its Subject: {', '.join(worth[:MOST_NEXT])}",
            {},
        )


def _undeclared(loader: LoaderRecord) -> dict[str, list[str]]:
    """Return field -> the checks that lack it, for the fields to suggest."""
    lacking = (check for check in loader.checks if check.missing_field in FIELDS_TO_SUGGEST)
    fields = grouped((check.missing_field, check.check) for check in lacking)
    ranks = {id: rank for rank, id in enumerate(CHECKS_NAMED_FIRST)}
    return {name: sorted(ids, key=lambda id: ranks.get(id, len(ranks))) for name, ids in fields.items()}


def _describe_accounted(loaders: Sequence[LoaderRecord]) -> Styled:
    """Return how many checks have a result or a reason, and what became of the others."""
    counts = count_kinds(loaders)
    total = counts.total()
    others = ", ".join(f"{counts[kind]} {kind}" for kind in UNACCOUNTED if counts[kind])
    where = f" in {len(loaders)} loaders" if len(loaders) > 1 else ""
    accounted = f"{total - how_many(counts, UNACCOUNTED)} of {counted(total, 'check')} accounted for{where}"
    accounted += f" ({others})" if others else ""
    if not how_many(counts, JUDGED):
        return f"{accounted}; nothing was judged, so nothing has passed", RED
    return accounted, _markup(counts)
