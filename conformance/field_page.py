"""``docs/field.md``: what came of every architecture, from what ``conformance/field.py`` has judged."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date

from conformance.field import UNTRAINABLE, WITHOUT_CHECKPOINT, Judged
from pytest_fsdp_meta.catalogue import built_in
from pytest_fsdp_meta.text import counted

MOST = 3
"""Findings of a check that are told in words; the others are counted."""

FEW = 5
"""So many model types have names, more are counted."""


@dataclass(frozen=True)
class Run:
    """How it was judged. ``taken`` were taken over from a run that was broken off."""

    loader: str
    versions: Mapping[str, str]
    seconds: float
    cpu: float
    taken: int
    jobs: int


def page(rows: Sequence[Judged], run: Run) -> str:
    """The whole page. Every check of every architecture is accounted for."""
    return "\n".join([*_head(rows, run), *_table(rows), *_findings(rows), *_unjudged(rows), *_nothing_there(rows)])


HEAD = """\
# The field: every causal language model of transformers

`make field` makes a tiny checkpoint of each model type for which transformers has a causal language model, and loads
it on two ranks {loaded}. Each is judged by the whole catalogue beside the same checkpoint on one device; batches are
random tokens. `make field` wrote this page, too.
"""
LOADED = {
    "transformers": "as users do, `from_pretrained(path, distributed_config=DistributedConfig(fsdp_size=2))`, with the "
    "class\nthat the checkpoint names",
    "plain": "by a loader that conforms, `load_plain` of fixtures/architectures.py",
}
VERDICTS = """\
## Verdicts

Of {total} checks each: *passed*; *broken*; *nothing there*: the model has nothing of the kind (ties, frozen weights),
its author declares nothing, or a more basic check has told already what is broken; *not judged*: the reason is below.

| model type | verdict | passed | broken | nothing there | not judged | seconds |
|---|---|---|---|---|---|---|"""
WHY = """\
What these findings come from, line by line of transformers' source, and that they are there without the kit as well,
is in [The five systems](systems.md).
"""


def _head(rows: Sequence[Judged], run: Run) -> Iterator[str]:
    judged = [row for row in rows if not row.stopped]
    clean = sum(row.clean for row in judged)
    versions = ", ".join(f"{name} {number}" for name, number in run.versions.items())
    over = f"; {run.taken} of them were judged by a run before, which was broken off" if run.taken else ""
    new = [problem for row in rows for problem in row.problems(run.loader)]
    yield HEAD.format(loaded=LOADED[run.loader])
    yield f"* {date.today().isoformat()}: {versions}, a world of 2 over gloo on CPU, float32"
    spent = f"{run.seconds:.0f} s, {run.cpu:.0f} s of CPU, {run.jobs} at a time"
    yield f"* {counted(len(rows), 'model type')} in {spent}{over}"
    yield f"* on {os.cpu_count()} cores, with a load of {os.getloadavg()[0]:.1f} at the end"
    yield f"* {len(judged)} judged: {clean} without a finding, {len(judged) - clean} with findings"
    yield f"* differs from what is known of these versions: {'nothing' if not new else counted(len(new), 'line')}"
    yield from (f"  * {problem}" for problem in new)
    yield ""


def _table(rows: Iterable[Judged]) -> Iterator[str]:
    total = len(list(built_in()))
    yield VERDICTS.format(total=total)
    for row in rows:
        verdict = ", ".join(f"`{id}`" for id in row.findings) or "clean"
        if row.stopped:
            verdict = "**the loader failed**" if row.raised else "no checkpoint"
        counts = [len(row.passed), len(row.findings), len(row.skipped), total - _accounted(row)]
        yield f"| `{row.name}` | {verdict} | {' | '.join(map(str, counts))} | {row.seconds} |"
    yield ""


def _accounted(row: Judged) -> int:
    return len({*row.passed, *row.findings, *row.skipped})


def _findings(rows: Iterable[Judged]) -> Iterator[str]:
    yield "## Findings"
    yield ""
    yield WHY
    for row in rows:
        for id, words in row.findings.items():
            more = f", and {len(words) - MOST} more" if len(words) > MOST else ""
            yield f"* `{row.name}`, `{id}`{more}:"
            yield from (f"  * `{one}`" for one in words[:MOST])
    yield ""


def _unjudged(rows: Sequence[Judged]) -> Iterator[str]:
    yield "## Not judged"
    yield ""
    yield from (f"* `{row.name}`: {WITHOUT_CHECKPOINT.get(row.name, row.stopped)}" for row in rows if row.stopped)
    for row in rows:
        if row.errors:
            known = "one device cannot train it either" if row.name in UNTRAINABLE else "**new**"
            reasons = "; ".join(dict.fromkeys(row.errors.values()))
            yield f"* `{row.name}`, {counted(len(row.errors), 'check')} ({known}): {reasons}"
    yield ""


def _nothing_there(rows: Sequence[Judged]) -> Iterator[str]:
    """Why, of all model types alike in a table, of a few by their names."""
    types: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for id, why in row.skipped.items():
            types.setdefault((id, " ".join(why.split()).replace("|", "&#124;")), []).append(row.name)
    yield "## Nothing there"
    yield ""
    yield "| check | why | model types |"
    yield "|---|---|---|"
    yield from (f"| `{id}` | {why} | {len(names)} |" for (id, why), names in sorted(types.items()) if len(names) > FEW)
    yield ""
    for row in rows:
        checks: dict[str, list[str]] = {}
        for (id, why), names in types.items():
            if row.name in names and len(names) <= FEW:
                checks.setdefault(why, []).append(f"`{id}`")
        if checks:
            yield f"* `{row.name}`"
            yield from (f"  * {', '.join(ids)}: {why}" for why, ids in checks.items())
    yield ""
