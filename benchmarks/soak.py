"""Four workers of xdist on eight slots for a while: ``python -m benchmarks.soak --seconds 600``.

Runs of pytest with worlds of random sizes, some of which fail, exit, are killed, hang, or end their worker. Every rank
asks, from inside, for the lock of the slot that its worker has leased for it, so that a slot that is used twice at a
time is seen, however short. Afterwards nothing may be left: no process, no folder, no shared memory, no open file.
Exits with 1 when anything is wrong, and writes what it saw under ``benchmarks/results``.
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
"""In the environment of every process of the soak: its folder."""
KINDS = {"pass": 58, "fail": 8, "exit": 6, "kill": 6, "segv": 4, "hang": 3, "kept": 10, "loader": 8, "crash": 3}
"""What a test does, and how often of a hundred."""
GONE = 5.0
"""Seconds after pytest's end in which its processes go."""
PROJECT = Path(__file__).parent / "soaked"


@dataclass
class Seen:
    """What came of all runs of pytest."""

    runs: int = 0
    seconds: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    worlds: int = 0
    uses: int = 0
    most_ranks: int = 0
    waits: list[float] = field(default_factory=list)
    files: int = 0
    """The most open files that a worker gained from before its first test to its end."""


def plan(number: int, largest: int, seed: int) -> list[dict[str, Any]]:
    draw = random.Random(seed)
    kinds = draw.choices(list(KINDS), list(KINDS.values()), k=number)
    return [
        {"kind": kind, "size": draw.randint(1, 4 if kind == "loader" else largest), "seconds": draw.uniform(0, 0.4)}
        for kind in kinds
    ]


def run(folder: Path, tests: list[dict[str, Any]], options: argparse.Namespace, seen: Seen) -> None:
    """One run of pytest over these tests, and a look at what it leaves."""
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
        seen.wrong.append(f"pytest ended with {done.returncode}: {(folder / 'output').read_text()[-3000:]}")
    seen.wrong += left(folder, memory)
    read_log(folder, tests, options, seen)


def left(folder: Path, memory: set[str]) -> list[str]:
    """What a run has left behind."""
    deadline = time.monotonic() + GONE
    while (processes := marked(folder)) and time.monotonic() < deadline:
        time.sleep(0.1)
    found = [f"process {pid} is left: {name}" for pid, name in processes.items()]
    kept = [name for name in os.listdir(folder / "tmp") if name.startswith(("fsdp-", "pymp-", "tmp"))]
    found += [f"{name} is left among the temporary files" for name in kept]
    owned = [name for name in set(os.listdir("/dev/shm")) - memory if opened_by_us(folder, name)]
    return found + [f"/dev/shm/{name} is left" for name in owned]


def marked(folder: Path) -> dict[int, str]:
    """The processes of the soak that run."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                ours = f"{MARK}={folder}".encode() in (entry / "environ").read_bytes().split(b"\0")
                if ours and (entry / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:120]
            except OSError:
                continue  # it has ended
    return found


def opened_by_us(folder: Path, name: str) -> bool:
    """Whether a segment was made by a process of the soak: torch and multiprocessing write its id into the name."""
    pids = {line.split()[2] for line in (folder / "log").read_text().splitlines()}
    return any(f"_{pid}_" in name or f"-{pid}-" in name for pid in pids)


def read_log(folder: Path, tests: list[dict[str, Any]], options: argparse.Namespace, seen: Seen) -> None:
    """The diary of the ranks: "in|out|twice SLOT PID TIME ..."; and what became of each test."""
    seen.runs += 1
    alive: set[str] = set()
    ended = dict[str, str]()
    files: dict[str, list[int]] = {}
    for line in sorted((folder / "log").read_text().splitlines(), key=lambda line: float(line.split()[3])):
        what, slot, pid, _, *rest = line.split()
        if what == "in":
            alive -= {ended.get(slot, "")}  # whoever had it before was killed
            ended[slot] = pid
            alive.add(pid)
            seen.uses += 1
            seen.worlds += rest[0] == "0"
            seen.most_ranks = max(seen.most_ranks, len({ended[one] for one in ended} & alive))
        elif what == "out":
            alive.discard(pid)
        elif what == "files":
            files.setdefault(pid, []).append(int(slot))
        elif what == "waited":
            seen.waits.append(float(slot))
        else:
            seen.wrong.append(f"run {seen.runs}: {line}")
    seen.files = max([seen.files, *(counts[-1] - counts[0] for counts in files.values())])
    told = [line.split() for line in (folder / "outcomes").read_text().splitlines()]
    by_test = {int(number): outcome for number, outcome in told}
    for number, test in enumerate(tests):
        expected = "passed" if test["kind"] in ("pass", "kept", "loader") else "failed"
        outcome = by_test.get(number, "nothing")
        seen.outcomes[f"{test['kind']}: {outcome}"] += 1
        if outcome != expected:
            seen.wrong.append(f"run {seen.runs}: test {number} {test}: {outcome}, expected {expected}")


def report(seen: Seen, options: argparse.Namespace) -> str:
    waits = sorted(seen.waits) or [0.0]
    rows = {
        "runs of pytest": seen.runs,
        "seconds": round(seen.seconds),
        "tests": seen.outcomes.total(),
        "worlds": seen.worlds,
        "uses of a slot by a rank": seen.uses,
        "slots used twice at a time": sum("twice" in line for line in seen.wrong),
        "most ranks at a time": f"{seen.most_ranks} of {options.slots}",
        "wait for a lease: median, 99%, longest": ", ".join(
            f"{waits[min(len(waits) - 1, int(len(waits) * part))]:.2f} s" for part in (0.5, 0.99, 1.0)
        ),
        "open files gained by a worker": seen.files,
        "anything wrong": len(seen.wrong),
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
        *("| a test that should | came out | times |", "|---|---|---|"),
        *(f"| {' | '.join(name.split(': '))} | {count} |" for name, count in sorted(seen.outcomes.items())),
    ]
    return "\n".join([*lines, *(["", *seen.wrong] if seen.wrong else []), ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--largest", type=int, default=8, help="ranks of the largest world")
    parser.add_argument("--tests", type=int, default=100, help="tests of one run of pytest")
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    parser.add_argument("--out", type=Path, default=RESULTS / f"{datetime.date.today()}-soak.md")
    options = parser.parse_args()
    seen = Seen()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        folder = Path(name)
        (folder / "tmp").mkdir()
        while time.monotonic() - began < options.seconds:
            tests = plan(options.tests, options.largest, options.seed + seen.runs)
            run(folder, tests, options, seen)
            seen.seconds = time.monotonic() - began
            print(f"{seen.seconds:.0f} s: {seen.outcomes.total()} tests, {len(seen.wrong)} wrong", flush=True)
    text = report(seen, options)
    print(text)
    options.out.write_text(text, "utf-8")
    return 1 if seen.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
