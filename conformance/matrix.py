"""Run every loader against every check (``make matrix``, or ``python -m conformance.matrix``).

A defect must fail its own check and no other, and a conforming loader must fail none. Differences are printed on
standard error, and the exit status is then 1.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from conformance import recorded
from conformance.contract import judge_all
from conformance.judging import LoaderJudge
from conformance.matrix_pages import render_markdown, render_svg
from fixtures.conforming import load_conforming
from fixtures.defects import DEFECTS
from fixtures.forms import FORMS
from fixtures.needs import lacking
from fixtures.reports import PAIRS
from fixtures.tiny import CHECKPOINTS, save_tiny
from pytest_fsdp_meta.catalogue import built_in
from pytest_fsdp_meta.evidence import Evidence
from pytest_fsdp_meta.reports.terminal import describe_failure

MESHES: tuple[dict[str, int], ...] = (
    {"dp_shard": 1},
    {"dp_shard": 2},
    {"dp_shard": 4},
    {"dp_replicate": 2, "dp_shard": 2},
)


@dataclass(frozen=True)
class Entry:
    """A loader to judge; ``caught_by`` is the check that must fail, empty for a conforming loader."""

    name: str
    load: Callable[..., Any]
    mesh: Mapping[str, int]
    architecture: str | None
    """The architecture of the checkpoint to load; None if the loader builds its own model."""
    caught_by: str = ""
    simulated: bool = False
    says: tuple[str, ...] = ()
    """Texts that the message of this check contains."""


@dataclass(frozen=True)
class Row:
    """The status of every check for one loader, with the reasons of skips and errors."""

    name: str
    architecture: str
    mesh: Mapping[str, int]
    caught_by: str
    status: Mapping[str, str]
    reasons: Mapping[str, str] = field(default_factory=dict)
    unsaid: tuple[str, ...] = ()
    """Texts that the message of ``caught_by`` should contain, and does not."""

    def problems(self) -> Iterator[str]:
        """Yield a line for each check whose status is not the expected one."""
        failed = {id for id, status in self.status.items() if status == "failed"}
        if self.caught_by and self.caught_by not in failed:
            yield f"{self.name}: {self.caught_by} should fail: {self.status.get(self.caught_by, 'does not exist')}"
        for text in self.unsaid:
            yield f"{self.name}: {self.caught_by} should say: {text}"
        for id in sorted(failed - {self.caught_by}):
            yield f"{self.name}: {id} fails, but " + (
                f"only {self.caught_by} should" if self.caught_by else "no check should"
            )
        for id, status in self.status.items():
            if status == "error":
                yield f"{self.name}: {id}: error: {self.reasons[id]}"


def entries() -> list[Entry]:
    """Return every defect, then every conforming loader: ours, all forms of sharding, repaired pull requests."""
    known = {name: d for name, d in DEFECTS.items() if not lacking(d.needs)}
    defects = [
        Entry(name, d.load, d.mesh, d.architecture, d.caught_by, d.simulated, d.says) for name, d in known.items()
    ]
    conforming = [
        Entry(f"conforming_{name}_{'x'.join(map(str, mesh.values()))}", load_conforming, mesh, name)
        for name in CHECKPOINTS
        for mesh in MESHES
    ]
    possible = {name: form for name, form in FORMS.items() if not form.needs_accelerator or has_accelerator()}
    possible = {name: form for name, form in possible.items() if not lacking(form.needs)}
    conforming += [Entry(name, form.load, form.mesh, form.architecture) for name, form in possible.items()]
    repaired = {pair.repaired: pair for pair in PAIRS.values()}
    conforming += [Entry(load.__name__, load, pair.mesh, pair.architecture) for load, pair in repaired.items()]
    return defects + conforming


def has_accelerator() -> bool:
    """Return whether torch has an accelerator; without one it refuses some forms."""
    import torch

    return bool(torch.accelerator.is_available())


def judge_entry(entry: Entry, judge: LoaderJudge, path: Path | None) -> tuple[Row, Evidence]:
    """Judge by every check; what fails is judged in smaller worlds as well, as the plugin does."""
    evidence = judge.observe(entry.load, entry.mesh, simulated=entry.simulated, smaller=True, path=path)
    # The messages of a defect quote both causes that smaller worlds choose from.
    verdicts = judge_all(replace(evidence, smaller=()) if entry.caught_by else evidence)
    reasons = {id: verdict.reason for id, verdict in verdicts.items() if verdict.reason}
    status = {id: verdict.status for id, verdict in verdicts.items()}
    caught = verdicts.get(entry.caught_by)
    said = " ".join(describe_failure(caught, "world", "").split()) if caught is not None else ""
    unsaid = tuple(text for text in entry.says if text.strip().replace("{device}", judge.device) not in said)
    row = Row(entry.name, entry.architecture or "its own model", entry.mesh, entry.caught_by, status, reasons, unsaid)
    return row, evidence


def all_problems(rows: Sequence[Row], checks: Iterable[str]) -> list[str]:
    """Return the problems of all rows, and the checks that no defect covers."""
    covered = {row.caught_by for row in rows}
    uncovered = [f"{id}: no defect covers it" for id in checks if id not in covered]
    return [problem for row in rows for problem in row.problems()] + uncovered


def write_pages(folder: Path, rows: Sequence[Row], checks: Sequence[str], problems: Sequence[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    packages = ("torch", "transformers", "pytest", "pytest-fsdp-meta")
    matrix = {
        "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
        "checks": list(checks),
        "loaders": [asdict(row) for row in rows],
        "problems": list(problems),
    }
    (folder / "matrix.json").write_text(json.dumps(matrix, indent=1) + "\n")
    (folder / "matrix.md").write_text(render_markdown(matrix))
    (folder / "matrix.svg").write_text(render_svg(matrix))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="run every loader against every check")
    parser.add_argument("--out", type=Path, default=Path("build"), help="folder for matrix.json, .md and .svg")
    parser.add_argument("-k", default="", help="only loaders in whose name this regular expression is found")
    parser.add_argument("--record", action="store_true", help="keep the evidence, to be judged without ranks")
    options = parser.parse_args(arguments)
    chosen = [entry for entry in entries() if re.search(options.k, entry.name)]
    checks = built_in().ids()
    judge, rows, evidence = LoaderJudge(), [], {}
    with tempfile.TemporaryDirectory() as folder:
        for entry in chosen:
            path = save_once(entry.architecture, Path(folder)) if entry.architecture else None
            row, evidence[entry.name] = judge_entry(entry, judge, path)
            rows.append(row)
            mark = "!!" if any(row.problems()) else "ok"
            print(f"[{len(rows)}/{len(chosen)}] {mark} {row.name} ({row.architecture})", flush=True)
    if options.record:
        recorded.record(evidence, keep_others=bool(options.k))
    problems = all_problems(rows, [] if options.k else checks)
    write_pages(options.out, rows, checks, problems)
    print(f"{len(rows)} loaders, {len(checks)} checks: {options.out}/matrix.json, matrix.md, matrix.svg")
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


def save_once(name: str, folder: Path) -> Path:
    path = folder / name
    return path if path.exists() else save_tiny(name, path)


if __name__ == "__main__":
    sys.exit(main())
