"""The field: every causal language model of transformers, judged by the whole catalogue. ``make field``.

A tiny checkpoint of each is loaded on two ranks by transformers' own FSDP2 loader, or by one that conforms
(``--loader plain``). What differs from what is known is told on standard error, and the exit status is 1. A run that
was broken off goes on where it was: what it had judged, with the same versions and the same code, is taken over.
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
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import cloudpickle

from conformance.judging import verdicts
from pytest_fsdp_meta import __version__
from pytest_fsdp_meta.catalogue import built_in
from pytest_fsdp_meta.catalogue.registry import OBSERVATIONS
from pytest_fsdp_meta.loader.call import ByName, Call
from pytest_fsdp_meta.trial import ON_RANKS, LoaderFailed, Trial
from pytest_fsdp_meta.worlds import ForkServerEngine, Sources, World, WorldError, WorldSpec

ROOT = Path(__file__).parents[1]
PACKAGES = ("torch", "transformers")
ARCHITECTURES = "fixtures.architectures"
LOADERS = {
    "transformers": (f"{ARCHITECTURES}:load_transformers", "pytest_fsdp_meta.transformers:tiny_checkpoint"),
    "plain": (f"{ARCHITECTURES}:load_plain", f"{ARCHITECTURES}:save_plain"),
}
"""By name, the loader, and what makes a checkpoint for it."""

FUSED = {"params_equal_reference"}
"""Projections that are fused in the model or in the checkpoint: cut first, and fused or taken apart afterwards."""
THAWED = {"requires_grad_matches_reference"}
"""Built frozen, and trainable once one device has loaded them; shards stay frozen."""
FINDINGS: dict[str, dict[str, set[str]]] = {
    "plain": {},
    "transformers": {
        "falcon_h1": {"no_uninitialized_memory"},
        **dict.fromkeys(("bailing_hybrid", "hrm_text", "kimi_linear", "olmo_hybrid"), FUSED),
        **dict.fromkeys(("afmoe", "blt", "ernie4_5_moe", "laguna"), THAWED),
        **dict.fromkeys(("marian", "moss_transcribe_diarize", "pegasus", "roformer"), THAWED),
    },
}
"""What transformers 5.23.0 is known for; docs/systems.md says why. A release that mends it asks to be noted here."""

ALL_SHARED = (
    "the configuration demands that all layers share their keys and values, and `kv_sharing_modes` refuses that"
)
WITHOUT_CHECKPOINT = {
    **dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant"), ALL_SHARED),
    "gemma3n": "its vision tower is one of timm's, which brings torchvision (`gemma3n_text` is judged)",
}
"""Why nothing is judged of them."""

RAISING: dict[str, set[str]] = {"plain": set(), "transformers": {"musicgen", "musicgen_melody"}}
"""The loader itself fails: its plan shards a ModuleList, which has no forward."""

UNTRAINABLE = {"blt", "git", "musicgen", "musicgen_melody", "reformer", "rwkv", "xlstm"}
"""One device cannot train them either, from tokens alone and in evaluation mode; their loading is judged."""


TRAINED = {check.id for check in built_in() if {"training", "continued"} & set(check.needs)}
"""The checks that nobody can judge of what cannot be trained."""


@dataclass
class Judged:
    """What came of an architecture."""

    name: str
    unmade: str = ""
    """Why it has no tiny checkpoint."""
    raised: str = ""
    """Why the loader gave nothing to judge."""
    passed: list[str] = field(default_factory=list)
    findings: dict[str, list[str]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def stopped(self) -> str:
        """Why there is no judgement."""
        return f"no checkpoint: {self.unmade}" if self.unmade else self.raised and f"the loader failed: {self.raised}"

    @property
    def clean(self) -> bool:
        """Whether it was judged, and nothing was found."""
        return not self.stopped and not self.findings

    def line(self) -> str:
        told = {
            id: f"{found[0]}" + f" and {len(found) - 1} more" * (len(found) > 1) for id, found in self.findings.items()
        }
        return self.stopped or "; ".join(f"{id}: {words}" for id, words in {**told, **self.errors}.items()) or "clean"

    def problems(self, loader: str) -> Iterator[str]:
        """How it differs from what is known."""
        known_to_stop = self.name in WITHOUT_CHECKPOINT if self.unmade else self.name in RAISING[loader]
        if self.stopped:
            yield from [] if known_to_stop else [f"{self.name}: {self.stopped}"]
            return
        if self.name in WITHOUT_CHECKPOINT or self.name in RAISING[loader]:
            yield f"{self.name}: can be judged now"
        known = FINDINGS[loader].get(self.name, set())
        yield from (f"{self.name}: {id}: {found[0]}" for id, found in self.findings.items() if id not in known)
        yield from (f"{self.name}: {id} has no finding any more" for id in sorted(known - set(self.findings)))
        excused = TRAINED if self.name in UNTRAINABLE else set()
        for id, reason in self.errors.items():
            if id not in excused:
                yield f"{self.name}: {id} could not be judged: {reason}"
        if excused and self.clean and not self.errors:
            yield f"{self.name}: can be trained now"


class Sweep:
    """Judges architectures, several at a time, by one loader. Nothing of torch is imported in this process."""

    def __init__(self, loader: str, folder: Path) -> None:
        self._function, self._make = LOADERS[loader]
        self._folder = folder
        architectures = ("pytest_fsdp_meta.transformers", f"{ARCHITECTURES}:import_all")
        self._engine = ForkServerEngine(Sources(tuple(sys.path)), [*architectures, *ON_RANKS])

    def names(self) -> tuple[str, ...]:
        """All model types, in transformers' order."""
        with self._alone() as world:
            found: tuple[str, ...] = world.run(f"{ARCHITECTURES}:names")[0]
        return found

    def judge(self, names: Iterable[str], jobs: int) -> Iterator[Judged]:
        """In the order in which they are done."""
        with ThreadPoolExecutor(jobs) as threads:
            waiting: list[Future[Judged]] = [threads.submit(self._timed, name) for name in names]
            try:
                yield from (done.result() for done in as_completed(waiting))
            finally:
                for one in waiting:
                    one.cancel()

    def close(self) -> None:
        self._engine.close()

    def _timed(self, name: str) -> Judged:
        start = time.perf_counter()
        judged = self._judge(name)
        judged.seconds = round(time.perf_counter() - start, 1)
        return judged

    def _judge(self, name: str) -> Judged:
        path = self._folder / name
        try:
            with self._alone() as world:
                world.run(self._make, name, path)
        except WorldError as error:  # whatever an architecture says of sizes that do not suit it
            return Judged(name, unmade=" ".join(error.failures[0].message.split())[:300])
        trial = Trial(WorldSpec({"dp_shard": 2}, timeout=120), self._engine, steps=3, tolerance={})
        loader = cloudpickle.dumps(ByName(*self._function.split(":")))
        try:
            evidence = trial.observe(Call(loader, {"path": cloudpickle.dumps(path)}, "fsdp"), OBSERVATIONS)
        except LoaderFailed as failed:
            return Judged(name, raised=failed.summary)
        found = verdicts(evidence)
        return Judged(
            name,
            passed=[id for id, v in found.items() if v.status == "passed"],
            findings={id: [_words(one) for one in v.findings] for id, v in found.items() if v.findings},
            errors={id: v.reason for id, v in found.items() if v.status == "error"},
            skipped={id: v.reason for id, v in found.items() if v.status == "skipped"},
        )

    def _alone(self) -> World:
        return World(WorldSpec({"dp_shard": 1}, timeout=120), self._engine)


def _words(found: Any) -> str:
    detail = f" ({found.detail})" if found.detail else ""
    ranks = ", ".join(map(str, found.ranks))
    return f"{found.tensor}, ranks {ranks}: {found.actual}, but should be {found.expected}{detail}; {found.cause}"


class Notebook:
    """What was judged so far, a line each; a file of its own for each loader, set of versions and state of the code."""

    def __init__(self, folder: Path, loader: str, versions: dict[str, str], sources: Iterable[Path]) -> None:
        told = hashlib.sha256(json.dumps([loader, versions]).encode())
        for file in sorted(sources):
            told.update(file.read_bytes())
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"field-{loader}-{told.hexdigest()[:12]}.jsonl"

    def read(self) -> dict[str, Judged]:
        """By name. What a run that was broken off has written half of a line of is judged again."""
        rows = {}
        for line in self.path.read_text("utf-8").splitlines() if self.path.exists() else ():
            try:
                row = Judged(**json.loads(line))
            except ValueError:
                continue
            rows[row.name] = row
        return rows

    def add(self, row: Judged) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            print("", json.dumps(asdict(row)), sep="\n", file=file)


def sources() -> list[Path]:
    """What decides over a verdict, beside the packages that are installed."""
    return [
        file for folder in ("pytest_fsdp_meta", "fixtures", "conformance") for file in (ROOT / folder).rglob("*.py")
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="judge every causal language model of transformers")
    parser.add_argument("names", nargs="*", help="model types; default: all")
    parser.add_argument("--loader", choices=LOADERS, default="transformers")
    parser.add_argument("--jobs", type=int, default=(os.cpu_count() or 1) + 1, help="architectures judged at a time")
    parser.add_argument("--fresh", action="store_true", help="judge again what an earlier run has judged")
    parser.add_argument("--out", type=Path, default=ROOT / "build", help="folder of what was judged so far")
    parser.add_argument("--page", type=Path, help="where to write the table, once all are judged")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore")  # of configurations that are tiny
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    versions = {"pytest-fsdp-meta": __version__} | {name: version(name) for name in PACKAGES}
    notebook = Notebook(options.out, options.loader, versions, sources())
    known = {} if options.fresh else notebook.read()
    began, cpu = time.perf_counter(), _cpu()
    with tempfile.TemporaryDirectory() as folder:
        sweep = Sweep(options.loader, Path(folder))
        wanted = options.names or sweep.names()
        rows = {name: known[name] for name in wanted if name in known}
        taken = len(rows)
        for row in sweep.judge([name for name in wanted if name not in rows], options.jobs):
            rows[row.name] = row
            notebook.add(row)
            print(f"[{len(rows)}/{len(wanted)}] {row.seconds:5.1f}s {row.name}: {row.line()[:200]}", flush=True)
        sweep.close()
    seconds, spent = time.perf_counter() - began, _cpu() - cpu
    told = [rows[name] for name in wanted]
    if options.page is not None:
        from conformance.field_page import Run, page

        run = Run(options.loader, versions, seconds, spent, taken, options.jobs)
        options.page.write_text(page(told, run), "utf-8")
    clean = sum(row.clean for row in told)
    print(f"{len(rows)} architectures, {clean} without a finding, {taken} taken over: {notebook.path}")
    print(f"{seconds:.0f} s, {spent:.0f} s of CPU, load {os.getloadavg()[0]:.1f}")
    problems = [problem for row in told for problem in row.problems(options.loader)]
    print(*problems, sep="\n", file=sys.stderr, end="\n" if problems else "")
    return 1 if problems else 0


def _cpu() -> float:
    """Of this process and of those that it has waited for: the fork server, and with it all ranks."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("broken off; the same command goes on where it was")
