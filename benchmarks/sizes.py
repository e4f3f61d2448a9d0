"""Measure how time and memory of the whole catalogue grow with the model: ``python -m benchmarks.sizes 15M 120M 550M``.

``bare`` is the work of a hand-written loss-parity test: load in a world of two and train three steps, build the
reference in a world of one and train it. ``whole`` takes every observation of the same loader and runs every check.
Target: at most 4 times the time, and 1.5 times the peak memory, at every size.

Each measurement runs in a process of its own, once for its time and once for its memory, because to read how much
memory a process has stops it: about 10% of the time at 15M. The memory is the largest sum, over this process and all
that it starts, of the proportional set size: pages that processes share count once. ``/dev/shm`` and the page cache do
not count.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

SIZES: dict[str, dict[str, int]] = {
    "15M": {"hidden_size": 288, "intermediate_size": 768, "num_hidden_layers": 6, "num_attention_heads": 6},
    "120M": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 10, "num_attention_heads": 12},
    "550M": {"hidden_size": 1536, "intermediate_size": 4096, "num_hidden_layers": 16, "num_attention_heads": 16},
}
VOCABULARY = 32000
PERIOD = 0.1
"""Seconds between two samples of the memory."""
GIB = 2**30


def save_checkpoint(size: str, folder: Path) -> int:
    """Save a Llama of this size; return its number of parameters."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    # The smallest ties its embedding and its head, as small models do.
    config = LlamaConfig(vocab_size=VOCABULARY, tie_word_embeddings=size == "15M", **SIZES[size])
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def work(name: str, path: Path) -> dict[str, Any]:
    """Do the work; return its seconds, and those of each activity."""
    import cloudpickle

    from benchmarks import catalogue
    from fixtures.conforming import load_conforming
    from pytest_fsdp_meta.catalogue import built_in, judge
    from pytest_fsdp_meta.judging.registry import OBSERVATIONS
    from pytest_fsdp_meta.loader.call import Call
    from pytest_fsdp_meta.trial import ON_RANKS, Trial
    from pytest_fsdp_meta.worlds import ForkServerEngine, Sources, World, WorldSpec

    engine = ForkServerEngine(Sources(tuple(sys.path)), [*ON_RANKS, "benchmarks.on_ranks", "fixtures.conforming"])
    with World(WorldSpec({"dp_shard": 2}), engine) as ranks:  # starts the fork server, which imports torch
        ranks.run("benchmarks.on_ranks:seconds", int)
    began = time.perf_counter()
    if name == "bare":
        with World(WorldSpec({"dp_shard": 2}, timeout=600), engine) as ranks:
            ranks.run("benchmarks.on_ranks:load_and_train", path, catalogue.STEPS)
        with World(WorldSpec({"dp_shard": 1}, timeout=600), engine) as alone:
            alone.run("benchmarks.on_ranks:train_reference", path, catalogue.STEPS, 1)
        return {"seconds": time.perf_counter() - began, "activities": {}}
    trial = Trial(WorldSpec({"dp_shard": 2}, timeout=600), engine, catalogue.STEPS, {})
    loader = Call(cloudpickle.dumps(load_conforming), {"path": cloudpickle.dumps(path)}, "fsdp")
    evidence = trial.observe(loader, OBSERVATIONS)
    every = built_in()
    failed = {
        check.id: verdict.reason for check in every if (verdict := judge(check, evidence, every)).status == "failed"
    }
    assert not failed, failed
    missing = {name: why.summary for name, why in evidence.unavailable.items() if why.error}
    assert not missing, missing
    return {"seconds": time.perf_counter() - began, "activities": dict(trial.seconds)}


def measure(name: str, path: Path) -> dict[str, Any]:
    """Run ``work`` in two processes: the second adds the peak of its memory in bytes, and when it was reached."""
    command = [sys.executable, "-m", "benchmarks.sizes", "--work", name, "--checkpoint", str(path)]
    timed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    watched = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    began, peak, at = time.perf_counter(), 0, 0.0
    while watched.poll() is None:
        held = memory_of(psutil.Process(watched.pid))
        if held > peak:
            peak, at = held, time.perf_counter() - began
        time.sleep(PERIOD)
    if watched.returncode:
        raise SystemExit(f"{name}: the process ended with status {watched.returncode}")
    result: dict[str, Any] = json.loads(timed.stdout.splitlines()[-1])
    return {**result, "peak": peak, "peak_at": at}


def memory_of(process: psutil.Process) -> int:
    held = 0
    try:
        for one in (process, *process.children(recursive=True)):
            held += _anonymous(one.pid)
    except psutil.Error:
        pass  # it has ended meanwhile
    return held


def _anonymous(pid: int) -> int:
    """Return the bytes of anonymous and shared memory, each page divided by the processes that share it."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    fields = {line.split(":")[0]: line.split()[1] for line in lines[1:]}
    return 1024 * (int(fields.get("Pss_Anon", 0)) + int(fields.get("Pss_Shmem", 0)))


def describe(size: str, parameters: int, bare: Mapping[str, Any], whole: Mapping[str, Any]) -> str:
    spent = sorted(whole["activities"].items(), key=lambda pair: -pair[1])
    where = ", ".join(f"{name} {seconds:.1f}" for name, seconds in spent if seconds >= 0.02 * whole["seconds"])
    label = f"{size:>5} ({parameters / 1e6:.0f}M parameters)"
    runs = {"bare": bare, "whole": whole}
    both = [f"{name} {run['seconds']:.1f} s and {run['peak'] / GIB:.2f} GiB" for name, run in runs.items()]
    times, memory = (whole[key] / bare[key] for key in ("seconds", "peak"))
    return (
        f"{label}: {', '.join(both)}: {times:.2f} and {memory:.2f} times as much\n"
        f"      seconds: {where}; the peak is at {whole['peak_at']:.0f} s of its run"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="time and memory of the whole catalogue by the size of the model")
    parser.add_argument("sizes", nargs="*", choices=[[], *SIZES], default=[], help="default: all")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--checkpoint", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        print(json.dumps(work(options.work, options.checkpoint)))
        return
    for size in options.sizes or SIZES:
        with tempfile.TemporaryDirectory() as folder:
            parameters = save_checkpoint(size, Path(folder))
            bare, whole = (measure(name, Path(folder)) for name in ("bare", "whole"))
            print(describe(size, parameters, bare, whole), flush=True)


if __name__ == "__main__":
    main()
