"""Run the tests and measurements that need a GPU: ``python -m benchmarks.gpu``, or ``make gpu``.

The steps go from one rank on one GPU to eight ranks with NCCL; the last one measures how long a world takes to start.
The first step that fails ends the run, because later ones build on it, and what a failure there means is printed.
Steps that need more GPUs than there are do not run. It writes ``benchmarks/results/DATE-gpu.md`` and exits with 1 if a
step failed. Without a GPU, it prints one line and exits with 2.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import shlex
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
ON_GPU, ON_GPUS = "tests/gpu/test_gpu.py", "tests/gpu/test_nccl.py"
CONFORMING = "conformance/test_conforming.py"
NCCL_ONLY = "what passed with gloo fails with NCCL: a collective that only NCCL refuses, or sums in another order"
MORE = "what passed with fewer GPUs fails: compare with torch alone, under torchrun"


@dataclass(frozen=True)
class Step:
    """A part of the tests, and what is wrong if it alone fails. By default, the plugin uses NCCL where it can."""

    name: str
    red: str
    arguments: tuple[str, ...]
    gpus: int = 1


STEPS = (
    Step(
        "devices and NCCL, one rank",
        "ranks do not reach their GPU, or NCCL does not start: see worlds/rank/rendezvous.py",
        (ON_GPU, "-k", "1-nccl"),
    ),
    Step(
        "preloaded modules and memory",
        "the fork server was refused (worlds/rank/preload.py), or GPU memory is not measured as torch does "
        "(observers/memory.py)",
        (ON_GPU, "-k", "preloaded or memory"),
    ),
    Step(
        "conforming loader, one rank with NCCL",
        "'does not reproduce itself' is a kernel that is not deterministic (observers/support/reproducible.py); "
        "buffers that differ by 1e-7 are computed on the GPU by the loader and on the CPU by the reference",
        (CONFORMING, "--fsdp-require-gpu", "-k", "test_sharded and llama-world1"),
    ),
    Step(
        "the same in bfloat16 with 2048 tokens",
        "if only this fails, an attention kernel adds up gradients in an order that varies "
        "(observers/support/reproducible.py)",
        (CONFORMING, "--fsdp-require-gpu", "-k", "test_long_batches and world1"),
    ),
    Step(
        "gloo: ranks that share a GPU",
        "if only the export crashes, gloo reads memory of the GPU: worlds/rank/host_collectives.py lacks an operator",
        (ON_GPU, "-k", "gloo"),
    ),
    Step(
        "conforming loaders, gloo on GPUs",
        "ranks that share a GPU differ from those with their own in the group, and in the memory left for each",
        (CONFORMING, *SHARED, "-k", "test_sharded and (world2 or world4)"),
    ),
    Step(
        "README's loader, right and broken",
        "the checks find nothing on a GPU, or cry wolf",
        (ON_GPU, "-k", "readme"),
    ),
    Step(
        "failing ranks, leases",
        "ranks that fail, or workers that share GPUs, do so otherwise than on CPUs: see worlds/rank/main.py, "
        "worlds/leases.py",
        (ON_GPU, "-k", "failing or few_gpus or lease"),
    ),
    Step(
        "worlds on CPUs, on this machine",
        "the process group of a CPU world is made otherwise where torch sees a GPU (worlds/rank/rendezvous.py)",
        ("tests/worlds/test_worlds.py", "tests/worlds/test_faults.py"),
    ),
    Step(
        "NCCL, two ranks",
        "NCCL does not connect two GPUs: compare with torch alone, under torchrun",
        (ON_GPUS, "-k", "[2 or 2] or on_the_cpu"),
        2,
    ),
    Step("conforming loaders, NCCL, two", NCCL_ONLY, (CONFORMING, "--fsdp-require-gpu", "-k", "world2 or frozen"), 2),
    Step("NCCL, four ranks", MORE, (ON_GPUS, "-k", "[4 or 4] or local_rank"), 4),
    Step(
        "conforming loaders, NCCL, four, HSDP, uneven",
        NCCL_ONLY,
        (CONFORMING, "--fsdp-require-gpu", "-k", "world4 or test_hsdp[ or uneven or three"),
        4,
    ),
    Step("NCCL, eight ranks", MORE, (ON_GPUS, "-k", "[8 or 8]"), 8),
    Step("conforming loaders, NCCL, eight", NCCL_ONLY, (CONFORMING, "--fsdp-require-gpu", "-k", "eight"), 8),
)


@dataclass(frozen=True)
class Outcome:
    """The outcome of one step."""

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


def run(step: Step) -> Outcome:
    """Run the step's tests with their output in the terminal."""
    print(f"--- {step.name}: {command_of(step)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", *step.arguments]
        began = time.monotonic()
        done = subprocess.run(command, cwd=ROOT, check=False)
        seconds = time.monotonic() - began
        if not report.exists():
            return Outcome({}, seconds, [f"pytest ended with {done.returncode} and wrote no report"])
        cases = list(xml.parse(report).iter("testcase"))
    counts = {"passed": 0, "failed": 0, "error": 0, "skipped": 0}
    bad = []
    for case in cases:
        found = {child.tag: child for child in case}
        outcome = {"failure": "failed", "error": "error", "skipped": "skipped"}
        tag = next((tag for tag in ("failure", "error", "skipped") if tag in found), "")
        counts[outcome.get(tag, "passed")] += 1
        if tag in ("failure", "error"):
            message = found[tag].get("message", "").strip().partition("\n")[0]
            bad.append(f"{case.get('classname')}::{case.get('name')}: {message[:300]}")
    if not bad and (done.returncode or not counts["passed"]):
        bad = [f"pytest ended with {done.returncode}, and no test passed or failed"]
    return Outcome(counts, seconds, bad + left_on_gpus())


def command_of(step: Step) -> str:
    return shlex.join(["pytest", *step.arguments])


def left_on_gpus() -> list[str]:
    """Return the Python processes that still use a GPU; ranks take a moment to end."""
    query = ["nvidia-smi", "--query-compute-apps=pid,process_name", "--format=csv,noheader"]
    for _ in range(20):
        try:
            found = subprocess.run(query, capture_output=True, text=True, check=False, timeout=60).stdout
        except OSError:
            return []
        left = [line for line in found.splitlines() if "python" in line]
        if not left:
            return []
        time.sleep(0.5)
    return [f"still uses a GPU after the step: process {line}" for line in left]


def run_all(gpus: int) -> dict[str, Outcome]:
    """Run the steps that this machine has GPUs for, in order, until one fails."""
    outcomes = {}
    for step in STEPS:
        if step.gpus <= gpus:
            outcomes[step.name] = outcome = run(step)
            if outcome.bad:
                break
    return outcomes


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


def page(gpus: int, outcomes: dict[str, Outcome], started: list[str]) -> str:
    """Return the result in Markdown: the machine, the steps, what the step that failed means, and the times."""
    facts = [f"| {name} | {value} |" for name, value in machine().items()]
    return "\n".join(
        [
            f"# {datetime.date.today()}, {gpus} GPU{'s' if gpus > 1 else ''}",
            "",
            "`make gpu`",
            "",
            *("| | |", "|---|---|", *facts),
            "",
            *("| step | passed | failed | error | skipped | seconds |", "|---|---|---|---|---|---|"),
            *(row(step, outcomes.get(step.name), gpus) for step in STEPS),
            *(line for step in STEPS if step.name in outcomes for line in failure(step, outcomes[step.name])),
            "",
            *started,
            "",
        ]
    )


def row(step: Step, outcome: Outcome | None, gpus: int) -> str:
    if outcome is None:
        why = f"needs {step.gpus} GPUs" if step.gpus > gpus else "not run: an earlier step failed"
        return f"| {step.name} | {why} | | | | |"
    counts = " | ".join(str(outcome.counts.get(kind, 0)) for kind in ("passed", "failed", "error", "skipped"))
    return f"| {step.name} | {counts} | {outcome.seconds:.0f} |"


def failure(step: Step, outcome: Outcome) -> list[str]:
    """Return what failed in a step, what that means, and how to run the step again."""
    if not outcome.bad:
        return []
    return [
        *("", f"**{step.name}** failed. It means: {step.red}. Run it again: `{command_of(step)}`", ""),
        *(f"* {line}" for line in outcome.bad),
    ]


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
    outcomes = run_all(gpus)
    failed = any(outcome.bad for outcome in outcomes.values())
    text = page(gpus, outcomes, [] if failed else speeds(gpus, options.repeats))
    print(text)
    options.out.write_text(text, "utf-8")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
