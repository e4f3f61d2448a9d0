"""Render ``results/field.md``, the results of ``conformance/field.py`` for every architecture."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date

from conformance.field_results import TASKS, UNTRAINABLE, WITHOUT_CHECKPOINT, ArchitectureResult
from pytest_fsdp_meta.catalogue import built_in
from pytest_fsdp_meta.text import counted

MOST_FINDINGS = 3
"""Findings of a check that are quoted; the others are counted."""

FEW_TYPES = 5
"""Up to so many model types are named; more are counted."""


@dataclass(frozen=True)
class Run:
    """The results of a sweep, with its versions and costs. ``reused`` ones come from an earlier, interrupted run."""

    loader: str
    versions: Mapping[str, str]
    seconds: float
    cpu: float
    reused: int
    jobs: int
    rows: Sequence[ArchitectureResult]

    @property
    def judged(self) -> list[ArchitectureResult]:
        return [row for row in self.rows if not row.not_judged]

    @property
    def clean(self) -> int:
        """How many have no finding."""
        return sum(row.clean for row in self.rows)

    @property
    def unexpected(self) -> list[str]:
        """A line for each difference from what is known."""
        return [line for row in self.rows for line in row.unexpected(self.loader)]


def render_page(run: Run) -> str:
    """Return the whole page, with the status of every check for every architecture."""
    return "\n".join(
        [*_head(run), *_table(run.rows), *_findings(run.rows), *_errors(run.rows, run.loader), *_skips(run.rows)]
    )


OVERVIEW = """\
# The field by class and mode

`make fields` judges every class of models that users train in transformers, and every way in which transformers shards
them, as [the field](field.md) does for causal language models: a tiny checkpoint of each model type, loaded on the
ranks, and compared with the same checkpoint on one device by the whole catalogue. It also writes this page.
`make field LOADER=transformers-seq2seq` judges one row, and writes `build/field-transformers-seq2seq.md` with the
status of every check.

* {date}: {versions}, over gloo on CPU, float32, on {cores} cores

*New* counts the differences from what was seen before and is known. Models of images and text are trained on text
alone, because each has its own way of placing images in it.

What was found beside the findings of causal language models, each shown with transformers 5.23 alone:

* `qwen3_vl_moe` cannot be loaded sharded: its experts are transposed in the checkpoint, and from_pretrained compares
  the shapes of shards before it transposes them.
* `kimi_k25`, `minimax_m3_vl`, `mistral_large4`, `qianfan_ocr`, `shieldgemma2` and `unlimited_ocr` get other weights
  when they are loaded sharded than on one device, as do `gte`, `jina_embeddings_v3` and `nomic_bert`: weights that are
  fused in the model or in the checkpoint are sharded first and converted afterwards.
* `marian` cannot be loaded as an encoder with a decoder: the loader copies a plain tensor into a sharded one.
* `switch_transformers` ends the step if an expert gets no token on one rank: FSDP2 then reduces gradients of different
  sizes.

| `LOADER` | what is loaded, and how | model types | clean | findings | loader fails | no checkpoint | new | seconds |
|---|---|---|---|---|---|---|---|---|"""


def render_overview(runs: Sequence[Run]) -> str:
    """Return a page with a row for each run, and the model types with findings by check."""
    versions = ", ".join(f"{name} {number}" for name, number in runs[0].versions.items())
    head = OVERVIEW.format(date=date.today().isoformat(), versions=versions, cores=os.cpu_count())
    return "\n".join([head, *map(_overview_row, runs), "", *(line for run in runs for line in _overview_findings(run))])


def _overview_row(run: Run) -> str:
    failed, unmade = (
        sum(bool(error) for error in errors)
        for errors in zip(*((row.loader_error, row.checkpoint_error) for row in run.rows), strict=True)
    )
    counts = [len(run.rows), run.clean, len(run.judged) - run.clean, failed, unmade, len(run.unexpected)]
    loaded = " ".join(LOADED[run.loader].split()).replace("and two, with", "on four ranks, with")
    return f"| `{run.loader}` | {loaded} | {' | '.join(map(str, counts))} | {run.seconds:.0f} |"


def _overview_findings(run: Run) -> Iterator[str]:
    found: dict[str, list[str]] = {}
    for row in run.rows:
        for id in row.findings:
            found.setdefault(f"`{id}`", []).append(f"`{row.name}`")
        if row.not_judged:
            why = "the loader fails" if row.loader_error else "no checkpoint"
            found.setdefault(why, []).append(f"`{row.name}`")
        elif row.errors:
            found.setdefault("checks that could not run", []).append(f"`{row.name}`")
    if found:
        yield f"## `{run.loader}`"
        yield ""
        yield from (f"* {what}: {', '.join(names)}" for what, names in sorted(found.items()))
        yield ""


HEAD = """\
# The field: every {kind} of transformers

`make field` makes a tiny checkpoint of each model type for which transformers has a {kind}, and loads
it on two ranks {loaded}. The whole catalogue compares each with the same checkpoint on one device; batches are random
{inputs}. `make field` also writes this page.
"""
LOADED = {
    "transformers": "as users do, `from_pretrained(path, distributed_config=DistributedConfig(fsdp_size=2))`, with the "
    "class\nthat the checkpoint names; this needs transformers 5.13 or newer",
    "transformers-uneven": "as users do, with a vocabulary of 131 tokens and other sizes that two ranks do not divide",
    "transformers-tp": "tensor-parallel, with `DistributedConfig(tp_size=2)`, if transformers has a plan for it",
    "transformers-fsdp-tp": "and two, with `DistributedConfig(fsdp_size=2, tp_size=2)`,\n"
    "if transformers has a plan for it",
    **{
        f"transformers-{task}": f"as users do, the model for {task.replace('-', ' ')}, with\n"
        "`DistributedConfig(fsdp_size=2)`"
        for task in TASKS
    },
    "plain": "with a conforming loader, `load_plain` of fixtures/architectures.py",
    "plain-uneven": "with a conforming loader, and sizes that two ranks do not divide",
}
INPUTS = {
    "transformers-image-classification": "images",
    "transformers-audio-classification": "recordings",
}
VERDICTS = """\
## Verdicts

Each model type has {total} checks: *passed*; *failed*; *skipped*: the model has nothing of the kind (ties, frozen
weights), a field of `Subject` is not declared, or the check depends on a failed check; *error or not run*: the reason
is below.

| model type | verdict | passed | failed | skipped | error or not run | seconds |
|---|---|---|---|---|---|---|"""
WHY = """\
[The five systems](systems.md) traces these findings to lines of transformers' source, and shows them without the
plugin.
"""


def _head(run: Run) -> Iterator[str]:
    versions = ", ".join(f"{name} {number}" for name, number in run.versions.items())
    reused = f"; {run.reused} of them by an earlier run, which was interrupted" if run.reused else ""
    yield HEAD.format(kind=_kind_of(run.loader), loaded=LOADED[run.loader], inputs=INPUTS.get(run.loader, "tokens"))
    world = "a world of 4 (2 x 2)" if run.loader == "transformers-fsdp-tp" else "a world of 2"
    yield f"* {date.today().isoformat()}: {versions}, {world} over gloo on CPU, float32"
    spent = f"{run.seconds:.0f} s, {run.cpu:.0f} s of CPU, {run.jobs} at a time"
    yield f"* {counted(len(run.rows), 'model type')} in {spent}{reused}"
    yield f"* on {os.cpu_count()} cores, with a load of {os.getloadavg()[0]:.1f} at the end"
    yield f"* {len(run.judged)} judged: {run.clean} without a finding, {len(run.judged) - run.clean} with findings"
    yield f"* differences from the known results of these versions: {len(run.unexpected) or 'none'}"
    yield from (f"  * {line}" for line in run.unexpected)
    yield ""


def _kind_of(loader: str) -> str:
    task = loader.removeprefix("transformers-")
    return f"model for {task.replace('-', ' ')}" if task in TASKS else "causal language model"


def _table(rows: Iterable[ArchitectureResult]) -> Iterator[str]:
    total = len(list(built_in()))
    yield VERDICTS.format(total=total)
    for row in rows:
        verdict = ", ".join(f"`{id}`" for id in row.findings) or "clean"
        if row.not_judged:
            verdict = "**the loader failed**" if row.loader_error else "no checkpoint"
        counts = [len(row.passed), len(row.findings), len(row.skipped), total - _count_judged(row)]
        yield f"| `{row.name}` | {verdict} | {' | '.join(map(str, counts))} | {row.seconds} |"
    yield ""


def _count_judged(row: ArchitectureResult) -> int:
    return len({*row.passed, *row.findings, *row.skipped})


def _findings(rows: Iterable[ArchitectureResult]) -> Iterator[str]:
    yield "## Findings"
    yield ""
    yield WHY
    for row in rows:
        for id, messages in row.findings.items():
            more = f", and {len(messages) - MOST_FINDINGS} more" if len(messages) > MOST_FINDINGS else ""
            yield f"* `{row.name}`, `{id}`{more}:"
            yield from (f"  * `{message}`" for message in messages[:MOST_FINDINGS])
    yield ""


def _errors(rows: Sequence[ArchitectureResult], loader: str) -> Iterator[str]:
    yield "## Errors"
    yield ""
    yield from (f"* `{row.name}`: {WITHOUT_CHECKPOINT.get(row.name, row.not_judged)}" for row in rows if row.not_judged)
    for row in rows:
        if row.errors:
            new = any(": error: " in line for line in row.unexpected(loader))
            known = "**new**" if new else "known"
            known = "one device cannot train it either" if row.name in UNTRAINABLE else known
            reasons = "; ".join(dict.fromkeys(row.errors.values()))
            yield f"* `{row.name}`, {counted(len(row.errors), 'check')} ({known}): {reasons}"
    yield ""


def _skips(rows: Sequence[ArchitectureResult]) -> Iterator[str]:
    """Yield the reasons for skips: common ones in a table, those of few model types by name."""
    types: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for id, why in row.skipped.items():
            types.setdefault((id, " ".join(why.split()).replace("|", "&#124;")), []).append(row.name)
    yield "## Skipped"
    yield ""
    yield "| check | reason | model types |"
    yield "|---|---|---|"
    yield from (
        f"| `{id}` | {why} | {len(names)} |" for (id, why), names in sorted(types.items()) if len(names) > FEW_TYPES
    )
    yield ""
    for row in rows:
        checks: dict[str, list[str]] = {}
        for (id, why), names in types.items():
            if row.name in names and len(names) <= FEW_TYPES:
                checks.setdefault(why, []).append(f"`{id}`")
        if checks:
            yield f"* `{row.name}`"
            yield from (f"  * {', '.join(ids)}: {why}" for why, ids in checks.items())
    yield ""
