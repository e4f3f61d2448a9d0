"""Run the tests and measurements that need a GPU: ``python -m benchmarks.gpu``, or ``make gpu``.

It tests worlds with NCCL (one rank per GPU) and with gloo (ranks share GPUs), runs the whole catalogue on conforming
loaders, and measures how long a world takes to start. It writes ``benchmarks/results/DATE-gpu.md`` and exits with 1 if
a test failed. Without a GPU, it prints one line and exits with 2.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as xml
from dataclasses import dataclass
from pathlib import Path

from pytest_fsdp_meta.worlds import ForkServerEngine, Sources, World, WorldError, WorldSpec

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
SHARED = ("--fsdp-device=cuda", "--fsdp-backend=gloo")
SUITES = {
    "worlds on GPUs": ("tests/gpu/test_gpu.py",),
    # By default the plugin uses one GPU per rank if there are enough.
    "conforming loaders, NCCL, world of 1": ("conformance/test_conforming.py", "-k", "test_sharded and world1"),
    "conforming loaders, gloo on CUDA, worlds of 2 and 4": (
        *("conformance/test_conforming.py", "-k", "test_sharded and (world2 or world4)", *SHARED),
    ),
    "tests of worlds, unchanged": ("tests/worlds/test_worlds.py", "tests/worlds/test_faults.py"),
}


@dataclass(frozen=True)
class Suite:
    """The outcome of one run of pytest."""

    name: str
    counts: dict[str, int]
    seconds: float
    bad: list[str]


def run_python(code: str) -> str:
    """Return what the code prints in a separate process, so that this one never initialises CUDA."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300)
    return done.stdout.strip() or done.stderr.strip().rpartition("\n")[2]


def machine() -> dict[str, str]:
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        gpus = subprocess.run(query, capture_output=True, text=True, check=False, timeout=60).stdout.strip()
    except OSError as error:
        gpus = f"nvidia-smi: {error}"
    return {
        "GPUs (name, driver, memory)": gpus.replace("\n", "; "),
        "torch": run_python("import torch; print(torch.__version__, 'CUDA', torch.version.cuda)"),
        "NCCL": run_python("import torch; print('.'.join(map(str, torch.cuda.nccl.version())))"),
        "Python": platform.python_version(),
        "CPU cores": str(os.cpu_count()),
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "not set"),
    }


def run(name: str, arguments: tuple[str, ...]) -> Suite:
    """Run pytest with its output in the terminal, and return the outcome."""
    print(f"--- {name}: pytest {' '.join(arguments)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", *arguments]
        began = time.monotonic()
        done = subprocess.run(command, cwd=ROOT, check=False)
        seconds = time.monotonic() - began
        if not report.exists():
            return Suite(name, {}, seconds, [f"pytest ended with {done.returncode} and wrote no report"])
        cases = list(xml.parse(report).iter("testcase"))
    counts = {"passed": 0, "failed": 0, "error": 0, "skipped": 0}
    bad = [] if cases else [f"pytest ended with {done.returncode} and ran no test"]
    for case in cases:
        found = {child.tag: child for child in case}
        outcome = {"failure": "failed", "error": "error", "skipped": "skipped"}
        tag = next((tag for tag in ("failure", "error", "skipped") if tag in found), "")
        counts[outcome.get(tag, "passed")] += 1
        if tag in ("failure", "error"):
            message = found[tag].get("message", "").strip().partition("\n")[0]
            bad.append(f"{case.get('classname')}::{case.get('name')}: {message[:300]}")
    return Suite(name, counts, seconds, bad)


def first_collective() -> float:
    """Return the seconds of an all-reduce on this rank's device; the first one opens the backend's connections."""
    import torch
    import torch.distributed as dist

    from pytest_fsdp_meta.worlds import current

    began = time.monotonic()
    dist.all_reduce(torch.ones(1, device=current().device))
    torch.cuda.synchronize()
    return time.monotonic() - began


def speed(size: int, backend: str, gpus: int, engine: ForkServerEngine, repeats: int) -> str:
    """Return a row of medians in seconds: starting a world, its first collective, a warm call, closing it."""
    spec = WorldSpec({"dp_shard": size}, "cuda", backend, devices=tuple(rank % gpus for rank in range(size)))
    took: dict[str, list[float]] = {"start": [], "first": [], "warm": [], "end": []}
    try:
        for _ in range(repeats):
            began = time.monotonic()
            world = World(spec, engine)
            world.start()
            took["start"].append(time.monotonic() - began)
            took["first"].append(max(world.run(first_collective)))
            began = time.monotonic()
            world.run(first_collective)
            took["warm"].append(time.monotonic() - began)
            began = time.monotonic()
            world.close()
            took["end"].append(time.monotonic() - began)
    except WorldError as error:
        return f"| {size} | {backend} | {error.summary} | | | |"
    columns = " | ".join(f"{statistics.median(seconds):.3f}" for seconds in took.values())
    return f"| {size} | {backend} | {columns} |"


def speeds(gpus: int, repeats: int) -> list[str]:
    engine = ForkServerEngine(Sources(tuple(sys.path)), ["benchmarks.gpu"])
    began = time.monotonic()
    engine.ready()
    took = time.monotonic() - began
    worlds = [(1, "nccl"), (2, "gloo"), (4, "gloo"), *([(2, "nccl")] if gpus > 1 else [])]
    return [
        f"Ranks are started by {engine.method} (expected: forkserver); importing torch beforehand took {took:.1f} s.",
        "",
        f"Seconds, median of {repeats}; the first collective is the slowest rank's.",
        "",
        *("| ranks | backend | start | first collective | warm call | end |", "|---|---|---|---|---|---|"),
        *(speed(size, backend, gpus, engine, repeats) for size, backend in worlds),
    ]


def page(gpus: int, suites: list[Suite], started: list[str]) -> str:
    facts = [f"| {name} | {value} |" for name, value in machine().items()]
    rows = [
        f"| {suite.name} | {' | '.join(str(suite.counts.get(k, 0)) for k in ('passed', 'failed', 'error', 'skipped'))} "
        f"| {suite.seconds:.0f} |"
        for suite in suites
    ]
    bad = [f"* {line}" for suite in suites for line in suite.bad]
    return "\n".join(
        [
            f"# {datetime.date.today()}, {gpus} GPU{'s' if gpus > 1 else ''}",
            "",
            "`make gpu`",
            "",
            *("| | |", "|---|---|", *facts),
            "",
            *("| tests | passed | failed | error | skipped | seconds |", "|---|---|---|---|---|---|", *rows),
            *(["", "What failed:", "", *bad] if bad else []),
            "",
            *started,
            "",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS / f"{datetime.date.today()}-gpu.md")
    options = parser.parse_args()
    try:
        gpus = ForkServerEngine().count_gpus()
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if not gpus:
        print("this machine has no GPU that torch can use, so there is nothing to run", file=sys.stderr)
        return 2
    started = speeds(gpus, options.repeats)
    suites = [run(name, arguments) for name, arguments in SUITES.items()]
    text = page(gpus, suites, started)
    print(text)
    options.out.write_text(text, "utf-8")
    return 1 if any(suite.bad for suite in suites) else 0


if __name__ == "__main__":
    sys.exit(main())
