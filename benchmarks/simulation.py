"""Measure what it takes to simulate large worlds: ``python -m benchmarks.simulation``.

Llamas of 8 and 70 billion parameters, sharded by FSDP2, with eight simulated ranks and one simulated step, without the
import of torch, which a run of pytest pays once. Targets: 8B at 1024 ranks in 15 s and 3 GiB on two cores, 70B in 40 s;
64, 1024 and 16384 ranks within a factor of 1.5. Memory is measured as in ``benchmarks.sizes``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from typing import Any

import psutil

from benchmarks.sizes import GIB, PERIOD, memory_of

SIZES: dict[str, dict[str, int]] = {
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
}
RUNS = (("8B", 64), ("8B", 1024), ("8B", 16384), ("70B", 1024))
RANKS = 8


def load(fsdp: Any, size: str) -> Any:
    """The loader that is simulated."""
    from functools import partial

    import torch
    from torch.distributed.fsdp import fully_shard
    from transformers import LlamaConfig, LlamaForCausalLM

    from pytest_fsdp_meta import Subject

    config = LlamaConfig(vocab_size=128256, num_key_value_heads=8, **SIZES[size])
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    for block in model.model.layers:
        fully_shard(block, mesh=fsdp.mesh)
    fully_shard(model, mesh=fsdp.mesh)
    model.to_empty(device=fsdp.device)
    tokens = torch.zeros(1, 4096, dtype=torch.long)
    return Subject(
        model,
        reference=partial(LlamaForCausalLM, config),
        batch=lambda step: {"input_ids": tokens, "labels": tokens},
        optimizer=torch.optim.AdamW,
    )


def work(size: str, ranks: int) -> dict[str, Any]:
    """Simulate once; return the seconds of each activity."""
    import cloudpickle

    from pytest_fsdp_meta.catalogue import built_in, judge
    from pytest_fsdp_meta.loader.call import Call
    from pytest_fsdp_meta.trial import ON_RANKS, Trial
    from pytest_fsdp_meta.worlds import ForkServerEngine, Sources, World, WorldSpec

    modules = [*ON_RANKS, "benchmarks.simulation", "transformers.models.llama.modeling_llama"]
    engine = ForkServerEngine(Sources(tuple(sys.path)), modules)
    with World(WorldSpec({"dp_shard": 1}), engine) as alone:  # starts the fork server, which imports torch
        alone.run("benchmarks.on_ranks:seconds", int)
    chosen = tuple(sorted({0, ranks - 1, *(ranks * part // (RANKS - 1) for part in range(1, RANKS - 1))}))
    trial = Trial(WorldSpec({"dp_shard": ranks}, timeout=600, simulated=chosen), engine, 3, {})
    loader = Call(cloudpickle.dumps(load), {"size": cloudpickle.dumps(size)}, "fsdp")
    catalogue = built_in()
    began = time.perf_counter()
    evidence = trial.observe(loader, catalogue.observations(catalogue.ids()))
    verdicts = [judge(check, evidence, catalogue) for check in catalogue]
    seconds = time.perf_counter() - began
    wrong = {verdict.check.id: verdict.reason for verdict in verdicts if verdict.status in ("failed", "error")}
    passed = sum(verdict.status == "passed" for verdict in verdicts)
    return {"seconds": seconds, "activities": dict(trial.seconds), "wrong": wrong, "passed": passed}


def measure(size: str, ranks: int) -> dict[str, Any]:
    """Run ``work`` in a process of its own, and add the peak of its memory in bytes."""
    command = [sys.executable, "-m", "benchmarks.simulation", "--work", size, str(ranks)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    peak = 0
    while process.poll() is None:
        peak = max(peak, memory_of(psutil.Process(process.pid)))
        time.sleep(PERIOD)
    assert process.stdout is not None
    if process.returncode:
        raise SystemExit(f"{size} on {ranks} ranks: the process ended with status {process.returncode}")
    result: dict[str, Any] = json.loads(process.stdout.read().splitlines()[-1])
    return {**result, "peak": peak}


def main() -> None:
    parser = argparse.ArgumentParser(description="time and memory of simulated worlds")
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        print(json.dumps(work(options.work[0], int(options.work[1]))))
        return
    for size, ranks in RUNS:
        run = measure(size, ranks)
        where = ", ".join(f"{name} {seconds:.1f}" for name, seconds in run["activities"].items() if seconds >= 0.1)
        print(
            f"{size:>3} on {ranks:>5} ranks: {run['seconds']:.1f} s, {run['peak'] / GIB:.2f} GiB ({where})", flush=True
        )
        print(f"      {run['passed']} checks passed; findings and errors: {run['wrong'] or 'none'}", flush=True)


if __name__ == "__main__":
    main()
