"""Measure the parity checks' silence and power: ``python -m benchmarks.power [silence|power|report] --json FILE``.

Silence: right trainings of many models, which nothing may report. Power: for each optimizer and precision, the smallest
injected error that is found with all of ten seeds; each seed puts it into another parameter.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import cloudpickle

from benchmarks.training_setups import load
from pytest_fsdp_meta.catalogue import built_in, judge
from pytest_fsdp_meta.loader.call import Call
from pytest_fsdp_meta.trial import ON_RANKS, Trial
from pytest_fsdp_meta.worlds import ForkServerEngine, Sources, World, WorldError, WorldSpec

OPTIMIZERS, PRECISIONS = ("sgd", "adamw", "muon"), ("float32", "bfloat16", "autocast")
ERRORS = ("gradient", "update", "row", "stale")
CHECKS = (
    *("grad_parity", "grad_norm_parity", "every_trainable_moves", "second_grad_parity"),
    *("update_parity", "loss_parity", "grad_accumulation_parity"),
)
Setup = tuple[str, str]
"""An optimizer and a precision."""
RATES = (0.1, 1.0, 3.0)
SIZES = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Relative sizes of injected errors."""
SEEDS = 10
MODELS = (
    "llama", "qwen2", "qwen3", "qwen3_moe", "glm4", "mixtral", "gpt2", "gemma", "gemma2", "gemma3_text",
    "phi", "phi3", "mamba", "mamba2", "bloom", "opt", "olmo", "olmo2", "olmoe", "granite", "granitemoe",
    "starcoder2", "stablelm", "cohere", "cohere2", "falcon", "gpt_neox", "gpt_neo", "gptj", "mistral", "mpt",
    "persimmon", "falcon_h1", "deepseek_v3", "gpt_oss", "smollm3",
)  # fmt: skip


class Bench:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        preloaded = ("fixtures.architectures", "fixtures.architectures:import_all", "benchmarks.training_setups")
        self._engine = ForkServerEngine(Sources(tuple(sys.path)), [*ON_RANKS, *preloaded])
        self._catalogue = built_in()

    def found(self, model: str, **arguments: Any) -> list[str]:
        """Return the checks that fail or cannot be judged, with their first finding or the reason."""
        trial = Trial(WorldSpec({"dp_shard": 2}, timeout=120), self._engine, steps=3, tolerance={})
        packed = {name: cloudpickle.dumps(value) for name, value in {"path": self._saved(model), **arguments}.items()}
        evidence = trial.observe(Call(cloudpickle.dumps(load), packed, "fsdp"), self._catalogue.observations(CHECKS))
        verdicts = [judge(self._catalogue[id], evidence, self._catalogue) for id in CHECKS]
        return [
            f"{v.check.id}: {v.findings[0].tensor} {v.findings[0].actual} ({v.findings[0].expected}; "
            f"{v.findings[0].detail})"
            if v.findings
            else f"{v.check.id}: {v.status}, {v.reason}"
            for v in verdicts
            if v.status in ("failed", "error") or (v.status == "skipped" and "equires" in v.reason)
        ]

    def _saved(self, model: str) -> Path:
        folder = self._folder / model
        if not folder.exists():
            folder.mkdir()
            with World(WorldSpec({"alone": 1}), self._engine) as world:
                world.run("fixtures.architectures:save_plain", model, folder)
        return folder


def silence(
    bench: Bench, models: Sequence[str], setups: Sequence[Setup], rates: Sequence[float]
) -> Iterator[dict[str, Any]]:
    for model, (optimizer, precision), rate in product(models, setups, rates):
        try:
            found = bench.found(model, optimizer=optimizer, precision=precision, rate=rate)
        except WorldError as error:
            found = [f"did not run: {error.summary}"]
        yield {"model": model, "optimizer": optimizer, "precision": precision, "rate": rate, "found": found}


def power(bench: Bench, model: str, setups: Sequence[Setup]) -> Iterator[dict[str, Any]]:
    for (optimizer, precision), error in product(setups, ERRORS):
        setup = {"optimizer": optimizer, "precision": precision, "error": error}
        sizes = (1.0,) if error == "stale" else SIZES
        smallest = _smallest(bench, model, setup, sizes)
        yield {"model": model, **setup, "smallest": smallest}


def _smallest(bench: Bench, model: str, setup: dict[str, Any], sizes: Sequence[float]) -> float | None:
    """Return the smallest size that is found with all seeds, by bisection; None if not even the largest is."""
    low, high, best = 0, len(sizes) - 1, None
    while low <= high:
        middle = (low + high) // 2
        if all(bench.found(model, size=sizes[middle], seed=seed, **setup) for seed in range(SEEDS)):
            best, high = sizes[middle], middle - 1
        else:
            low = middle + 1
    return best


def report(silent: Sequence[Mapping[str, Any]], powers: Sequence[Mapping[str, Any]]) -> str:
    """Return both results as a page."""
    models = list(dict.fromkeys(row["model"] for row in silent))
    lines = [
        "# Silence and power of the parity checks",
        "",
        f"`make power`, torch {version('torch')}, CPU, world of 2 (FSDP2).",
        "",
        f"**Silence**: {len(silent)} right trainings of {len(models)} models ({', '.join(models)}): "
        f"{sum(bool(row['found']) for row in silent)} with a finding.",
        "",
        *(f"* {row['model']}, {row['optimizer']}, {row['precision']}, {row['rate']:g} times the usual rate: "
          f"{'; '.join(row['found'])}" for row in silent if row["found"]),
        "",
        f"**Power**: the smallest relative error that is found with all of {SEEDS} seeds; each seed puts it into "
        f"another weight. Tried: {', '.join(f'{size:g}' for size in SIZES)}.",
        "",
        "| model | optimizer | precision | scaled gradient | scaled update | one row's gradient | stale shard |",
        "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    setups = dict.fromkeys((row["model"], row["optimizer"], row["precision"]) for row in powers)
    by_setup = {(row["model"], row["optimizer"], row["precision"], row["error"]): row["smallest"] for row in powers}
    for setup in setups:
        cells = [by_setup.get((*setup, error), "not measured") for error in ERRORS]
        shown = ["not found" if cell is None else cell if isinstance(cell, str) else f"{cell:.1%}" for cell in cells]
        if by_setup.get((*setup, "stale")) is not None:
            shown[-1] = "found"
        lines.append(f"| {' | '.join([*setup, *shown])} |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=("silence", "power", "both", "report"), nargs="?", default="both")
    parser.add_argument("--models", nargs="+", help="for silence, by default all; for power, by default llama")
    parser.add_argument("--rates", nargs="+", type=float, default=RATES, help="multiples of the usual learning rates")
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=OPTIMIZERS)
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=PRECISIONS)
    parser.add_argument("--json", type=Path, help="where the results are kept; `report` reads them")
    parser.add_argument("--out", type=Path, help="where the page is written")
    options = parser.parse_args()
    if options.what == "report" and (options.json is None or not options.json.exists()):
        parser.error("report needs --json=FILE with results")
    setups = list(product(options.optimizers, options.precisions))
    results: dict[str, list[dict[str, Any]]] = {"silence": [], "power": []}
    if options.json is not None and options.json.exists():
        results |= json.loads(options.json.read_text())
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder)) if options.what != "report" else None
        for what in ("silence", "power"):
            if bench is None or options.what not in (what, "both"):
                continue
            rows = (
                silence(bench, options.models or MODELS, setups, options.rates)
                if what == "silence"
                else (row for model in options.models or ["llama"] for row in power(bench, model, setups))
            )
            for row in rows:
                results[what].append(row)
                print(*row.values(), flush=True)
                if options.json is not None:
                    options.json.write_text(json.dumps(results, indent=1))
    if options.out is not None:
        options.out.write_text(report(results["silence"], results["power"]))


if __name__ == "__main__":
    main()
