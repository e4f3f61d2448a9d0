"""The detection matrix: every loader against every check. ``make matrix``, or ``python -m conformance.matrix``.

A defect must be told by the check that promises it and by no other; a conforming loader by none. What differs is told
on standard error, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from conformance.judging import Court
from conformance.matrix_pages import markdown, picture
from fixtures.conforming import load_conforming
from fixtures.defects import DEFECTS
from fixtures.forms import FORMS
from fixtures.systems import PAIRS
from fixtures.tiny import CHECKPOINTS, save_tiny
from pytest_fsdp_meta.catalogue import built_in

MESHES: tuple[dict[str, int], ...] = (
    {"dp_shard": 1},
    {"dp_shard": 2},
    {"dp_shard": 4},
    {"dp_replicate": 2, "dp_shard": 2},
)


@dataclass(frozen=True)
class Entry:
    """A loader to judge; ``promised`` is the check that must tell it, empty for one that conforms."""

    name: str
    load: Callable[..., Any]
    mesh: Mapping[str, int]
    architecture: str | None
    """Of the checkpoint that it loads; None for one that makes its own model."""
    promised: str = ""


@dataclass(frozen=True)
class Row:
    """What came of a loader: the status of every check by id, with the reason where it is neither pass nor fail."""

    name: str
    architecture: str
    mesh: Mapping[str, int]
    promised: str
    status: Mapping[str, str]
    reasons: Mapping[str, str] = field(default_factory=dict)

    def problems(self) -> Iterator[str]:
        """How it differs from what is promised."""
        failed = {id for id, status in self.status.items() if status == "failed"}
        if self.promised and self.promised not in failed:
            yield f"{self.name}: {self.promised} should tell it, but {self.status.get(self.promised, 'does not exist')}"
        for id in sorted(failed - {self.promised}):
            yield f"{self.name}: {id} fails, which " + (
                "the defect does not explain" if self.promised else "it should not"
            )
        for id, status in self.status.items():
            if status == "error":
                yield f"{self.name}: {id} could not be judged: {self.reasons[id]}"


def entries() -> list[Entry]:
    """Every defect, then every conforming loader: ours, every form of sharding, what a pull request repaired."""
    defects = [Entry(name, d.load, d.mesh, d.architecture, d.caught_by) for name, d in DEFECTS.items()]
    sound = [Entry("conforming", load_conforming, mesh, name) for name in CHECKPOINTS for mesh in MESHES]
    possible = {name: form for name, form in FORMS.items() if not form.needs_accelerator or accelerated()}
    sound += [Entry(name, form.load, form.mesh, form.architecture) for name, form in possible.items()]
    repaired = {pair.repaired: pair for pair in PAIRS.values()}
    sound += [Entry(load.__name__, load, pair.mesh, pair.architecture) for load, pair in repaired.items()]
    return defects + sound


def accelerated() -> bool:
    """Whether torch has an accelerator, without which it refuses some forms."""
    import torch

    return bool(torch.accelerator.is_available())


def judge_all(entries: Iterable[Entry], checkpoint: Callable[[str], Path]) -> Iterator[Row]:
    court = Court()
    for entry in entries:
        path = checkpoint(entry.architecture) if entry.architecture else None
        found = court.judge(entry.load, entry.mesh, path=path)
        reasons = {id: verdict.reason for id, verdict in found.items() if verdict.reason}
        status = {id: verdict.status for id, verdict in found.items()}
        yield Row(entry.name, entry.architecture or "its own model", entry.mesh, entry.promised, status, reasons)


def all_problems(rows: Sequence[Row], checks: Iterable[str]) -> list[str]:
    """What is wrong with the rows, and the checks that no defect proves."""
    proved = {row.promised for row in rows}
    unproved = [f"{id}: no defect proves it" for id in checks if id not in proved]
    return [problem for row in rows for problem in row.problems()] + unproved


def write(folder: Path, rows: Sequence[Row], checks: Sequence[str], problems: Sequence[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    packages = ("torch", "transformers", "pytest", "pytest-fsdp-meta")
    told = {
        "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
        "checks": list(checks),
        "loaders": [asdict(row) for row in rows],
        "problems": list(problems),
    }
    (folder / "matrix.json").write_text(json.dumps(told, indent=1) + "\n")
    (folder / "matrix.md").write_text(markdown(told))
    (folder / "matrix.svg").write_text(picture(told))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="judge every loader by every check")
    parser.add_argument("--out", type=Path, default=Path("build"), help="folder of matrix.json, .md and .svg")
    parser.add_argument("-k", default="", help="only loaders whose name has this in it")
    options = parser.parse_args(arguments)
    chosen = [entry for entry in entries() if options.k in entry.name]
    checks = built_in().ids()
    with tempfile.TemporaryDirectory() as folder:
        rows = []
        for row in judge_all(chosen, lambda name: _saved(name, Path(folder))):
            rows.append(row)
            mark = "!!" if any(row.problems()) else "ok"
            print(f"[{len(rows)}/{len(chosen)}] {mark} {row.name} ({row.architecture})", flush=True)
    problems = all_problems(rows, [] if options.k else checks)
    write(options.out, rows, checks, problems)
    print(f"{len(rows)} loaders, {len(checks)} checks: {options.out}/matrix.json, matrix.md, matrix.svg")
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


def _saved(name: str, folder: Path) -> Path:
    path = folder / name
    return path if path.exists() else save_tiny(name, path)


if __name__ == "__main__":
    sys.exit(main())
