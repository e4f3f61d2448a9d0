"""Stress four xdist workers on eight slots: ``python -m benchmarks.soak --seconds 600``.

It repeats pytest runs with worlds of random sizes, in which tests fail, exit, are killed, hang or crash their worker.
Every rank locks the slot that its worker leased for it, which detects any double use of a slot, however short. After
each run, nothing may remain: no process, folder, shared memory or open file. It writes a report under
``benchmarks/results`` and exits with 1 if anything went wrong.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import random
import secrets
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
MARK = "FSDP_SOAK"
"""Environment variable of every process of the soak; its value is the soak's folder."""
KINDS = {"pass": 58, "fail": 8, "exit": 6, "kill": 6, "segv": 4, "hang": 3, "kept": 10, "loader": 8, "crash": 3}
"""How many of 100 tests do what: pass, fail, use a session-scoped world (kept), crash their worker, ..."""
EXIT_TIME = 5.0
"""Seconds that processes may take to exit after pytest ends."""
PROJECT = Path(__file__).parent / "soaked"


@dataclass
class Results:
    """The results of all runs of pytest."""

    runs: int = 0
    seconds: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    worlds: int = 0
    uses: int = 0
    most_ranks: int = 0
    waits: list[float] = field(default_factory=list)
    files: int = 0
    """The most additional open files of a worker, from before its first test to its end."""


def plan(number: int, largest: int, seed: int) -> list[dict[str, Any]]:
    draw = random.Random(seed)
    kinds = draw.choices(list(KINDS), list(KINDS.values()), k=number)
    return [
        {"kind": kind, "size": draw.randint(1, 4 if kind == "loader" else largest), "seconds": draw.uniform(0, 0.4)}
        for kind in kinds
    ]


def run(folder: Path, tests: list[dict[str, Any]], options: argparse.Namespace, results: Results) -> None:
    """Run pytest with these tests, and record the outcomes and whatever the run leaves behind."""
    for name in ("plan.json", "log", "outcomes"):
        (folder / name).unlink(missing_ok=True)
    (folder / "plan.json").write_text(json.dumps(tests))
    memory = set(os.listdir("/dev/shm"))
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [
        *(sys.executable, "-m", "pytest", str(PROJECT), "-q", "-p", "no:cacheprovider", "-o", "addopts="),
        *(f"-n{options.workers}", f"--fsdp-slots={options.slots}", "--fsdp-device=cpu", "--max-worker-restart=1000"),
        *("--rootdir", str(PROJECT), "-c", "/dev/null", "--tb=line", f"--basetemp={folder / 'pytest'}"),
    ]
    environ = os.environ | {MARK: str(folder), "TMPDIR": str(folder / "tmp"), "PYTHONPATH": path}
    with (folder / "output").open("w") as output:
        done = subprocess.run(command, env=environ, stdout=output, stderr=subprocess.STDOUT, check=False)
    if done.returncode not in (0, 1):
        results.wrong.append(f"pytest ended with {done.returncode}: {(folder / 'output').read_text()[-3000:]}")
    results.wrong += find_leftovers(folder, memory)
    read_log(folder, tests, options, results)


def find_leftovers(folder: Path, memory: set[str]) -> list[str]:
    """Describe the processes, temporary files and shared memory that a run leaves behind."""
    deadline = time.monotonic() + EXIT_TIME
    while (processes := live_processes(folder)) and time.monotonic() < deadline:
        time.sleep(0.1)
    found = [f"process {pid} remains: {name}" for pid, name in processes.items()]
    kept = [name for name in os.listdir(folder / "tmp") if name.startswith(("fsdp-", "pymp-", "tmp"))]
    found += [f"temporary file {name} remains" for name in kept]
    owned = [name for name in set(os.listdir("/dev/shm")) - memory if opened_by_us(folder, name)]
    return found + [f"/dev/shm/{name} remains" for name in owned]


def live_processes(folder: Path) -> dict[int, str]:
    """Return the command lines of the soak's live processes by pid."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                ours = f"{MARK}={folder}".encode() in (entry / "environ").read_bytes().split(b"\0")
                if ours and (entry / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:120]
            except OSError:
                continue  # the process has exited
    return found


def opened_by_us(folder: Path, name: str) -> bool:
    """Return whether the soak created the segment: torch and multiprocessing put the pid into its name."""
    pids = {line.split()[2] for line in (folder / "log").read_text().splitlines()}
    return any(f"_{pid}_" in name or f"-{pid}-" in name for pid in pids)


def read_log(folder: Path, tests: list[dict[str, Any]], options: argparse.Namespace, results: Results) -> None:
    """Read the ranks' log ("in|out|twice SLOT PID TIME ...") and the outcome of each test."""
    results.runs += 1
    alive: set[str] = set()
    ended = dict[str, str]()
    files: dict[str, list[int]] = {}
    for line in sorted((folder / "log").read_text().splitlines(), key=lambda line: float(line.split()[3])):
        what, slot, pid, _, *rest = line.split()
        if what == "in":
            alive -= {ended.get(slot, "")}  # the previous user was killed
            ended[slot] = pid
            alive.add(pid)
            results.uses += 1
            results.worlds += rest[0] == "0"
            results.most_ranks = max(results.most_ranks, len(set(ended.values()) & alive))
        elif what == "out":
            alive.discard(pid)
        elif what == "files":
            files.setdefault(pid, []).append(int(slot))
        elif what == "waited":
            results.waits.append(float(slot))
        else:
            results.wrong.append(f"run {results.runs}: {line}")
    results.files = max([results.files, *(counts[-1] - counts[0] for counts in files.values())])
    lines = [line.split() for line in (folder / "outcomes").read_text().splitlines()]
    by_test = {int(number): outcome for number, outcome in lines}
    for number, test in enumerate(tests):
        expected = "passed" if test["kind"] in ("pass", "kept", "loader") else "failed"
        outcome = by_test.get(number, "no outcome")
        results.outcomes[f"{test['kind']}: {outcome}"] += 1
        if outcome != expected:
            results.wrong.append(f"run {results.runs}: test {number} {test}: {outcome}, expected {expected}")


def report(results: Results, options: argparse.Namespace) -> str:
    waits = sorted(results.waits) or [0.0]
    rows = {
        "runs of pytest": results.runs,
        "seconds": round(results.seconds),
        "tests": results.outcomes.total(),
        "worlds": results.worlds,
        "uses of a slot by a rank": results.uses,
        "slots used by two ranks at a time": sum("twice" in line for line in results.wrong),
        "most ranks at a time": f"{results.most_ranks} of {options.slots}",
        "wait for a lease: median, 99%, longest": ", ".join(
            f"{waits[min(len(waits) - 1, int(len(waits) * part))]:.2f} s" for part in (0.5, 0.99, 1.0)
        ),
        "open files gained by a worker": results.files,
        "problems": len(results.wrong),
    }
    lines = [
        f"# Soak, {datetime.date.today()}",
        "",
        f"`python -m benchmarks.soak --seconds {options.seconds:g} --seed {options.seed}`: {options.workers} workers, "
        f"{options.slots} slots, worlds of 1 to {options.largest}, {os.cpu_count()} cores, Python "
        f"{platform.python_version()}.",
        "",
        *("| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())),
        "",
        *("| kind of test | outcome | times |", "|---|---|---|"),
        *(f"| {' | '.join(name.split(': '))} | {count} |" for name, count in sorted(results.outcomes.items())),
    ]
    return "\n".join([*lines, *(["", *results.wrong] if results.wrong else []), ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--largest", type=int, default=8, help="ranks of the largest world")
    parser.add_argument("--tests", type=int, default=100, help="tests per run of pytest")
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    parser.add_argument("--out", type=Path, default=RESULTS / f"{datetime.date.today()}-soak.md")
    options = parser.parse_args()
    results = Results()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        folder = Path(name)
        (folder / "tmp").mkdir()
        while time.monotonic() - began < options.seconds:
            tests = plan(options.tests, options.largest, options.seed + results.runs)
            run(folder, tests, options, results)
            results.seconds = time.monotonic() - began
            print(f"{results.seconds:.0f} s: {results.outcomes.total()} tests, {len(results.wrong)} wrong", flush=True)
    text = report(results, options)
    print(text)
    options.out.write_text(text, "utf-8")
    return 1 if results.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
