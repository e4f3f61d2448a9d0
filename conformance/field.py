"""Judge every causal language model of transformers by the whole catalogue (``make field``).

Each architecture's tiny checkpoint is loaded on two ranks by transformers' own FSDP2 loader, or by a conforming loader
(``--loader plain``). With "-uneven" after the loader's name, the vocabulary and other sizes are primes; with "-tp" and
"-fsdp-tp", those with a plan for it are loaded tensor-parallel, on two ranks, or on four with FSDP2 as well. With the
name of a task after "transformers-", models of that class are judged instead. ``--loader all`` judges all of this.
Differences from the known results are printed on standard error, and the exit status is then 1.
An interrupted run continues where it stopped: it reuses results of the same versions and the same code.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import cloudpickle

from conformance.contract import judge_all
from conformance.field_page import Run, render_overview, render_page
from conformance.field_results import TASKS, ArchitectureResult, accept
from conformance.released import FIELD, PUBLISHED, record
from conformance.released_history import Judged
from fixtures.releases import NO_FSDP_SIZE
from pytest_fsdp_meta import __version__
from pytest_fsdp_meta.judging.registry import OBSERVATIONS
from pytest_fsdp_meta.loader.call import ByName, Call
from pytest_fsdp_meta.trial import ON_RANKS, LoaderFailed, Trial
from pytest_fsdp_meta.worlds import ForkServerEngine, Sources, World, WorldError, WorldSpec

ROOT = Path(__file__).parents[1]
PACKAGES = ("torch", "transformers")
ARCHITECTURES = "fixtures.architectures"
ALL = "all"
"""What ``--loader`` takes beside the names of ``LOADERS``."""


@dataclass(frozen=True)
class Mode:
    """How the sweep loads: functions by name, which this process does not import, and the mesh of the ranks."""

    loader: str
    save: str = "pytest_fsdp_meta.transformers:tiny_checkpoint"
    mesh: Mapping[str, int] = field(default_factory=lambda: {"dp_shard": 2})
    names: str = f"{ARCHITECTURES}:names"
    task: tuple[str, ...] = ()
    """The name of another class than that of causal language models, which ``save`` and ``names`` take first."""


OWN = f"{ARCHITECTURES}:load_transformers"
PLANNED = f"{ARCHITECTURES}:names_with_tp_plan"
SAVE_FOR, NAMES_OF = f"{ARCHITECTURES}:save_for", f"{ARCHITECTURES}:names_of"
LOADERS = {
    "transformers": Mode(OWN),
    "transformers-uneven": Mode(OWN, f"{ARCHITECTURES}:save_uneven"),
    "transformers-tp": Mode(OWN, mesh={"tp": 2}, names=PLANNED),
    "transformers-fsdp-tp": Mode(OWN, mesh={"dp_shard": 2, "tp": 2}, names=PLANNED),
    **{f"transformers-{task}": Mode(OWN, SAVE_FOR, names=NAMES_OF, task=(task,)) for task in TASKS},
    "plain": Mode(f"{ARCHITECTURES}:load_plain", f"{ARCHITECTURES}:save_plain"),
    "plain-uneven": Mode(f"{ARCHITECTURES}:load_plain", f"{ARCHITECTURES}:save_plain_uneven"),
}
"""By the name for ``--loader``."""


class Sweep:
    """Judge architectures, several at a time, with one loader. This process never imports torch."""

    def __init__(self, loader: str, folder: Path) -> None:
        self._mode = LOADERS[loader]
        self._folder = folder
        architectures = ("pytest_fsdp_meta.transformers", f"{ARCHITECTURES}:import_all")
        self._engine = ForkServerEngine(Sources(tuple(sys.path)), [*architectures, *ON_RANKS])

    def names(self) -> tuple[str, ...]:
        """Return all model types that can be loaded so, in transformers' order."""
        with self._single_rank() as world:
            found: tuple[str, ...] = world.run(self._mode.names, *self._mode.task)[0]
        return found

    def judge(self, names: Iterable[str], jobs: int) -> Iterator[ArchitectureResult]:
        """Yield results in the order in which they complete."""
        with ThreadPoolExecutor(jobs) as threads:
            pending: list[Future[ArchitectureResult]] = [threads.submit(self._judge_timed, name) for name in names]
            try:
                yield from (future.result() for future in as_completed(pending))
            finally:
                for future in pending:
                    future.cancel()

    def close(self) -> None:
        self._engine.close()

    def _judge_timed(self, name: str) -> ArchitectureResult:
        start = time.perf_counter()
        result = self._judge(name)
        result.seconds = round(time.perf_counter() - start, 1)
        return result

    def _judge(self, name: str) -> ArchitectureResult:
        path = self._folder / name
        try:
            with self._single_rank() as world:
                world.run(self._mode.save, *self._mode.task, name, path)
        except WorldError as error:  # an architecture may raise anything on sizes that do not suit it
            return ArchitectureResult(name, checkpoint_error=" ".join(error.failures[0].message.split())[:300])
        trial = Trial(WorldSpec(dict(self._mode.mesh), timeout=120), self._engine, steps=3, tolerance={})
        loader = cloudpickle.dumps(ByName(*self._mode.loader.split(":")))
        try:
            evidence = trial.observe(Call(loader, {"path": cloudpickle.dumps(path)}, "fsdp"), OBSERVATIONS)
        except LoaderFailed as failed:
            return ArchitectureResult(name, loader_error=failed.summary)
        found = judge_all(evidence)
        return ArchitectureResult(
            name,
            passed=[id for id, v in found.items() if v.status == "passed"],
            findings={
                id: [_describe_finding(finding) for finding in v.findings] for id, v in found.items() if v.findings
            },
            errors={id: v.reason for id, v in found.items() if v.status == "error"},
            skipped={id: v.reason for id, v in found.items() if v.status == "skipped"},
        )

    def _single_rank(self) -> World:
        return World(WorldSpec({"dp_shard": 1}, timeout=120), self._engine)


def _describe_finding(finding: Any) -> str:
    expected = f", but should be {finding.expected}" if finding.expected else ""
    detail = f" ({finding.detail})" if finding.detail else ""
    ranks = ", ".join(map(str, finding.ranks))
    place = f"{finding.tensor}, " if finding.tensor else ""
    return f"{place}ranks {ranks}: {finding.actual}{expected}{detail}; {finding.cause}"


class ResultsFile:
    """Results so far, one per line, in a separate file for each loader, set of versions and state of the code."""

    def __init__(self, folder: Path, loader: str, versions: dict[str, str], sources: Iterable[Path]) -> None:
        digest = hashlib.sha256(json.dumps([loader, versions]).encode())
        for file in sorted(sources):
            digest.update(file.read_bytes())
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"field-{loader}-{digest.hexdigest()[:12]}.jsonl"

    def read_results(self) -> dict[str, ArchitectureResult]:
        """Return the results by architecture, without lines that an interrupted run left incomplete."""
        rows = {}
        for line in self.path.read_text("utf-8").splitlines() if self.path.exists() else ():
            try:
                row = ArchitectureResult(**json.loads(line))
            except ValueError:
                continue
            rows[row.name] = row
        return rows

    def add(self, row: ArchitectureResult) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            print("", json.dumps(asdict(row)), sep="\n", file=file)


def source_files() -> list[Path]:
    """Return the files of this repository that verdicts depend on."""
    return [
        file for folder in ("pytest_fsdp_meta", "fixtures", "conformance") for file in (ROOT / folder).rglob("*.py")
    ]


def judge(options: argparse.Namespace, loader: str) -> Run:
    """Judge what the options say with one loader, print the results, and return them."""
    versions = {"pytest-fsdp-meta": __version__} | {name: version(name) for name in PACKAGES}
    results = ResultsFile(options.out, loader, versions, source_files())
    known = {} if options.fresh else results.read_results()
    began, cpu = time.perf_counter(), _cpu_seconds()
    with tempfile.TemporaryDirectory() as folder:
        sweep = Sweep(loader, Path(folder))
        wanted = options.names or sweep.names()
        rows = {name: known[name] for name in wanted if name in known}
        reused = len(rows)
        for row in sweep.judge([name for name in wanted if name not in rows], options.jobs):
            rows[row.name] = row
            results.add(row)
            print(f"[{len(rows)}/{len(wanted)}] {row.seconds:5.1f}s {row.name}: {row.summarise()[:200]}", flush=True)
        sweep.close()
    seconds, spent = time.perf_counter() - began, _cpu_seconds() - cpu
    if options.accept:
        accept(loader, rows.values())
    run = Run(loader, versions, seconds, spent, reused, options.jobs, [rows[name] for name in wanted])
    print(f"{len(rows)} architectures, {run.clean} without a finding, {reused} from an earlier run: {results.path}")
    print(f"{seconds:.0f} s, {spent:.0f} s of CPU, load {os.getloadavg()[0]:.1f}")
    print(*run.unexpected, sep="\n", file=sys.stderr, end="\n" if run.unexpected else "")
    return run


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="judge every model of a class in transformers")
    parser.add_argument("names", nargs="*", help="model types; default: all")
    parser.add_argument("--loader", choices=[*LOADERS, ALL], default="transformers")
    parser.add_argument("--jobs", type=int, default=(os.cpu_count() or 1) + 1, help="architectures judged at a time")
    parser.add_argument("--fresh", action="store_true", help="ignore the results of earlier runs")
    parser.add_argument("--out", type=Path, default=ROOT / "build", help="folder for the results so far")
    parser.add_argument("--accept", action="store_true", help="from now on, expect these results of another class")
    parser.add_argument("--page", type=Path, help="file for the results page")
    options = parser.parse_args(arguments)
    loaders = [*LOADERS] if options.loader == ALL else [options.loader]
    if NO_FSDP_SIZE and any(LOADERS[loader].loader == OWN for loader in loaders):
        sys.exit(f"field.py: {NO_FSDP_SIZE}, or judge --loader plain")
    warnings.filterwarnings("ignore")  # transformers warns about the tiny configurations
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    runs = [judge(options, loader) for loader in loaders]
    if options.page is not None:
        options.page.write_text(render_overview(runs) if options.loader == ALL else render_page(*runs), "utf-8")
        if options.page.resolve() == PUBLISHED and options.loader == "transformers" and not options.names:
            record([judged(*runs)])
    return 1 if any(run.unexpected for run in runs) else 0


def judged(run: Run) -> Judged:
    """Return the entry of a run in the history of released packages."""
    findings = {id for row in run.rows for id in row.findings}
    torch, transformers = (run.versions[name].partition("+")[0] for name in PACKAGES)
    today = datetime.now(timezone.utc).date().isoformat()
    return Judged(today, FIELD, f"transformers {transformers}", torch, tuple(sorted(findings)))


def _cpu_seconds() -> float:
    """Return the CPU time of this process and of its finished children: the fork server with all ranks."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted; run the same command again to continue")
