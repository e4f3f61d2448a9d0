"""Compare worlds with other tools, one run after another on the same machine: ``python -m benchmarks.worlds``.

Targets: a fresh world per test at least 20 times faster than in any other tool, a warm call no slower than in the
fastest tool that reuses processes, and less memory for a world of 8 than in any other tool. This plugin is run again
before every second tool, and only the ratio to that run counts, because a busy machine slows both.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peer_runs import OURS, PEERS, Peer, Run, available, default_python, timed, versions, weighed

MIB = 2**20


@dataclass
class Row:
    """The run of one tool, with the latest run of this plugin of the same kind in ``baseline``."""

    peer: Peer
    body: str
    world: int
    run: Run
    baseline: Run

    @property
    def ratio(self) -> float:
        return warm(self.run) / warm(self.baseline)


def warm(run: Run) -> float:
    """Return the median seconds of a test after the first."""
    return statistics.median(run.tests[1:]) if len(run.tests) > 1 else float("nan")


def compare(python: str, peers: Sequence[Peer], body: str, world: int, tests: int, fresh_tests: int) -> list[Row]:
    fresh = next(peer for peer in OURS if peer.name == "@fsdp_spmd")
    reused = next(peer for peer in OURS if peer.name == "World, reused")
    rows: list[Row] = []
    for kind, ours in ((True, fresh), (False, reused)):
        for number, peer in enumerate([ours, *(peer for peer in peers if peer.fresh == kind and peer != ours)]):
            if number % 2 == 0:
                baseline = timed(ours, python, body, world, tests)
            many = fresh_tests if peer.fresh and not peer.ours else tests
            run = baseline if peer == ours else timed(peer, python, body, world, many)
            rows.append(Row(peer, body, world, run, baseline))
            log(f"{peer.name}, {body}, world of {world}: {cells(rows[-1])}")
    return rows


def log(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}, load {os.getloadavg()[0]:.1f}] {text}", file=sys.stderr, flush=True)


def cells(row: Row) -> str:
    run = row.run
    if not run.tests:
        return "no test ended | | | | | "
    failed = sum(outcome != "passed" for outcome in run.outcomes)
    remark = "; ".join(filter(None, [f"{failed} failed" if failed else "", "cut off" if run.code is None else ""]))
    return f"{len(run.tests)} | {run.wall:.1f} | {run.tests[0]:.2f} | {short(warm(run))} | {row.ratio:.1f} | {remark}"


def short(seconds: float) -> str:
    return f"{seconds:.3f}" if seconds < 0.1 else f"{seconds:.2f}"


def table(rows: Sequence[Row], title: str) -> str:
    head = f"### {title}\n\n| | tests | wall | first | each after | relative | |\n|---|---|---|---|---|---|---|\n"
    ordered = sorted(rows, key=lambda row: (not row.peer.fresh, not row.peer.ours, warm(row.run)))
    return head + "\n".join(f"| {bold(row.peer)} | {cells(row)} |" for row in ordered)


def bold(peer: Peer) -> str:
    return f"**{peer.name}**" if peer.ours else peer.name


def verdicts(rows: Sequence[Row]) -> str:
    lines = []
    for body in dict.fromkeys(row.body for row in rows):
        rows_of_two = [row for row in rows if row.body == body and row.world == 2]
        for fresh, sentence in (
            (True, "a fresh world in {0} takes {1:.1f} times as long (target: 20)"),
            (False, "a warm call in {0} takes {1:.1f} times as long (target: at least 1)"),
        ):
            of_kind = [row for row in rows_of_two if row.peer.fresh == fresh and not row.peer.ours]
            known = [row for row in of_kind if row.ratio == row.ratio]
            if known:
                closest = min(known, key=lambda row: row.ratio)
                lines.append(
                    f"* {body}, world of {closest.world}: " + sentence.format(closest.peer.name, closest.ratio)
                )
    return "\n".join(lines)


class Report:
    """The measurements so far; the file is rewritten after each part, because a run takes long."""

    def __init__(self, python: str, out: Path | None, missing: Sequence[str]) -> None:
        self._out, self._missing, self._versions = out, missing, versions(python)
        self._began, self._before = time.strftime("%Y-%m-%d %H:%M"), os.getloadavg()[0]
        self._rows: list[Row] = []
        self._parts: list[str] = []

    def add(self, rows: list[Row]) -> None:
        self._rows += rows
        self.add_part(table(rows, f"{rows[0].body}, world of {rows[0].world}"))

    def add_part(self, part: str) -> None:
        self._parts.append(part)
        if self._out:
            self._out.write_text(self.text(), "utf-8")

    def text(self) -> str:
        lines = [
            f"# Worlds compared with other tools, {self._began}\n",
            f"{os.cpu_count()} cores, load {self._before:.1f} before and {os.getloadavg()[0]:.1f} after.",
            f"{self._versions}.",
            "Seconds. `relative`: time of a test after the first, divided by this plugin's in its latest run.\n",
            verdicts(self._rows) + "\n",
            "\n\n".join(self._parts),
        ]
        if self._missing:
            lines.append("\nNot installed here: " + ", ".join(self._missing) + ".")
        return "\n".join(lines) + "\n"


def memory(python: str, peers: Sequence[Peer], world: int) -> str:
    lines = [f"### Memory of a world of {world}\n", "| | peak MiB (PSS) |", "|---|---|"]
    weights = []
    for peer in peers:
        run = weighed(peer, python, world)
        held = sum(name.startswith("held") for name in run.marks)
        log(f"{peer.name}, memory: {run.peak_pss / MIB:.0f} MiB, {held} ranks held")
        if held:
            weights.append((run.peak_pss / MIB, peer))
    lines += [f"| {bold(peer)} | {weight:.0f} |" for weight, peer in sorted(weights, key=lambda pair: pair[0])]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument(
        "--python", default=default_python(), help="interpreter of the environment that has the other tools"
    )
    parser.add_argument("--tests", type=int, default=20)
    parser.add_argument("--fresh-tests", type=int, help="tests for tools that start a world per test; default: --tests")
    parser.add_argument("--bodies", nargs="*", default=["all_reduce", "sharded"])
    parser.add_argument("--only", nargs="*", default=[], help="parts of the names of tools to run")
    parser.add_argument("--memory", type=int, default=8, help="world size for the memory measurement; 0: none")
    parser.add_argument("--out", type=Path, help="file for the tables; default: the terminal")
    options = parser.parse_args()
    peers, missing = available(options.python, [*OURS, *PEERS])
    if options.only:
        peers = [peer for peer in peers if peer.ours or any(part in peer.name for part in options.only)]
    report = Report(options.python, options.out, [peer.name for peer in missing])
    for body in options.bodies:
        report.add(compare(options.python, peers, body, 2, options.tests, options.fresh_tests or options.tests))
    reusing = [peer for peer in peers if not peer.fresh]
    report.add(compare(options.python, reusing, "all_reduce", 4, options.tests, options.tests))
    if options.memory:
        report.add_part(memory(options.python, peers, options.memory))
    if not options.out:
        print(report.text())


if __name__ == "__main__":
    main()
