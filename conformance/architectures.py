"""Every causal language model of transformers, judged: ``make architectures``, ``python -m conformance.architectures``.

A tiny checkpoint of each is loaded on two ranks by transformers' own FSDP2 loader, or by one that conforms
(``--loader plain``), and judged with the whole catalogue. What differs from what is known is told on standard error,
and the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # read when transformers is imported

from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from transformers.utils import logging

from conformance.judging import Court
from fixtures.architectures import NAMES, load_plainly, save_architecture
from fixtures.conforming import subject
from pytest_fsdp_meta import Subject
from pytest_fsdp_meta.trial import LoaderFailed
from pytest_fsdp_meta.worlds import Rank


def load_transformers(fsdp: Rank, path: Path) -> Subject:
    sharded = DistributedConfig(fsdp_size=fsdp.world_size)
    return subject(AutoModelForCausalLM.from_pretrained(path, distributed_config=sharded), path)


def load_plain(fsdp: Rank, path: Path) -> Subject:
    return subject(load_plainly(path, fsdp.mesh, fsdp.device), path)


LOADERS = {"transformers": load_transformers, "plain": load_plain}

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

WITHOUT_CHECKPOINT = {
    *("dots3_note", "gemma4_assistant", "gemma4_unified_assistant"),  # sizes that depend on each other
    *("emu3", "mllama", "musicgen", "musicgen_melody"),  # AutoModelForCausalLM does not take their own configuration
    "gemma3n",  # wants pillow and timm
}
"""Nothing is judged of them."""

UNTRAINABLE = {"blt", "git", "reformer", "rwkv", "xlstm"}
"""One device cannot train them either, from tokens alone and in evaluation mode; their loading is judged."""


@dataclass
class Judged:
    """What came of an architecture."""

    name: str
    stopped: str = ""
    """Why there is no judgement: no tiny checkpoint, or the loader raised."""
    findings: dict[str, list[str]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    def line(self) -> str:
        told = {
            id: f"{found[0]}" + f" and {len(found) - 1} more" * (len(found) > 1) for id, found in self.findings.items()
        }
        return self.stopped or "; ".join(f"{id}: {words}" for id, words in {**told, **self.errors}.items()) or "clean"

    def problems(self, loader: str) -> Iterator[str]:
        """How it differs from what is known."""
        if bool(self.stopped) != (self.name in WITHOUT_CHECKPOINT):
            yield f"{self.name}: {self.stopped or 'can be judged now'}"
        if self.stopped:
            return
        known = FINDINGS[loader].get(self.name, set())
        yield from (f"{self.name}: {id}: {found[0]}" for id, found in self.findings.items() if id not in known)
        yield from (f"{self.name}: {id} has no finding any more" for id in sorted(known - set(self.findings)))
        if self.name not in UNTRAINABLE:
            yield from (f"{self.name}: {id} could not be judged: {reason}" for id, reason in self.errors.items())


def judge_all(names: Iterable[str], loader: str, folder: Path) -> Iterator[Judged]:
    court = Court()
    for name in names:
        start = time.perf_counter()
        judged = judge_one(court, name, loader, folder / name)
        judged.seconds = round(time.perf_counter() - start, 1)
        yield judged


def judge_one(court: Court, name: str, loader: str, path: Path) -> Judged:
    if not path.exists():
        try:
            save_architecture(name, path)
        except Exception as error:  # whatever an architecture says of sizes that do not suit it
            return Judged(name, f"no checkpoint: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
    try:
        verdicts = court.judge(LOADERS[loader], {"dp_shard": 2}, path=path)
    except LoaderFailed as failed:
        return Judged(name, f"the loader failed: {failed.summary}")
    return Judged(
        name,
        findings={id: [_words(one) for one in v.findings] for id, v in verdicts.items() if v.findings},
        errors={id: v.reason for id, v in verdicts.items() if v.status == "error"},
        skipped={id: v.reason for id, v in verdicts.items() if v.status == "skipped"},
    )


def _words(found: Any) -> str:
    detail = f" ({found.detail})" if found.detail else ""
    ranks = ", ".join(map(str, found.ranks))
    return f"{found.tensor}, ranks {ranks}: {found.actual}, but should be {found.expected}{detail}; {found.cause}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="judge every causal language model of transformers")
    parser.add_argument("names", nargs="*", default=NAMES, help="model types; default: all")
    parser.add_argument("--loader", choices=LOADERS, default="transformers")
    parser.add_argument("--out", type=Path, default=Path("build"), help="folder of architectures-LOADER.json")
    options = parser.parse_args(arguments)
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore")  # of configurations that are tiny
    rows: list[Judged] = []
    with tempfile.TemporaryDirectory() as folder:
        for row in judge_all(options.names, options.loader, Path(folder)):
            rows.append(row)
            print(f"[{len(rows)}/{len(options.names)}] {row.seconds:5.1f}s {row.name}: {row.line()[:200]}", flush=True)
            write(options.out, options.loader, rows)
    problems = [problem for row in rows for problem in row.problems(options.loader)]
    clean = sum(row.line() == "clean" for row in rows)
    print(f"{len(rows)} architectures, {clean} clean: {options.out}/architectures-{options.loader}.json")
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


def write(folder: Path, loader: str, rows: Sequence[Judged]) -> None:
    """After each, so that a run that is broken off has something to show."""
    folder.mkdir(parents=True, exist_ok=True)
    packages = ("torch", "transformers", "pytest-fsdp-meta")
    told = {
        "versions": {name: version(name) for name in packages},
        "loader": loader,
        "architectures": [asdict(row) for row in rows],
    }
    (folder / f"architectures-{loader}.json").write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
