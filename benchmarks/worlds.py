"""Worlds beside the peers, one run after the other on the same machine: ``python -m benchmarks.worlds``.

Wanted: a fresh world for every test at least 20 times faster than a fresh world per test in any peer; a warm call no
slower than the fastest peer that reuses processes; less memory for a world of 8 than any peer takes. Ours is
run again before every second peer, and only ratios of neighbours count: where the machine is busy, it is for both.
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
    """One peer, one body, one size of worlds; ``beside`` is ours of the same kind, run just before."""

    peer: Peer
    body: str
    world: int
    run: Run
    beside: Run

    @property
    def ratio(self) -> float:
        return warm(self.run) / warm(self.beside)


def warm(run: Run) -> float:
    """Seconds of a test after the first."""
    return statistics.median(run.tests[1:]) if len(run.tests) > 1 else float("nan")


def compare(python: str, peers: Sequence[Peer], body: str, world: int, tests: int, fresh_tests: int) -> list[Row]:
    fresh = next(one for one in OURS if one.name == "@fsdp_spmd")
    kept = next(one for one in OURS if one.name == "World, kept")
    rows: list[Row] = []
    for kind, ours in ((True, fresh), (False, kept)):
        for number, peer in enumerate([ours, *(one for one in peers if one.fresh == kind and one != ours)]):
            if number % 2 == 0:
                beside = timed(ours, python, body, world, tests)
            many = fresh_tests if peer.fresh and not peer.ours else tests
            run = beside if peer == ours else timed(peer, python, body, world, many)
            rows.append(Row(peer, body, world, run, beside))
            say(f"{peer.name}, {body}, world of {world}: {cells(rows[-1])}")
    return rows


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}, load {os.getloadavg()[0]:.1f}] {text}", file=sys.stderr, flush=True)


def cells(row: Row) -> str:
    run = row.run
    if not run.tests:
        return "none ended | | | | | "
    failed = sum(outcome != "passed" for outcome in run.outcomes)
    told = "; ".join(filter(None, [f"{failed} failed" if failed else "", "cut off" if run.code is None else ""]))
    return f"{len(run.tests)} | {run.wall:.1f} | {run.tests[0]:.2f} | {short(warm(run))} | {row.ratio:.1f} | {told}"


def short(seconds: float) -> str:
    return f"{seconds:.3f}" if seconds < 0.1 else f"{seconds:.2f}"


def table(rows: Sequence[Row], title: str) -> str:
    head = f"### {title}\n\n| | tests | wall | first | each after | beside ours | |\n|---|---|---|---|---|---|---|\n"
    ordered = sorted(rows, key=lambda row: (not row.peer.fresh, not row.peer.ours, warm(row.run)))
    return head + "\n".join(f"| {bold(row.peer)} | {cells(row)} |" for row in ordered)


def bold(peer: Peer) -> str:
    return f"**{peer.name}**" if peer.ours else peer.name


def verdicts(rows: Sequence[Row]) -> str:
    lines = []
    for body in dict.fromkeys(row.body for row in rows):
        rows_of_two = [row for row in rows if row.body == body and row.world == 2]
        for fresh, words in ((True, "a fresh world in {0} takes {1:.1f} times ours (wanted: 20)"),
                             (False, "a warm call in {0} takes {1:.1f} times ours (wanted: at least 1)")):  # fmt: skip
            of_kind = [row for row in rows_of_two if row.peer.fresh == fresh and not row.peer.ours]
            known = [row for row in of_kind if row.ratio == row.ratio]
            if known:
                closest = min(known, key=lambda row: row.ratio)
                lines.append(f"* {body}, world of {closest.world}: " + words.format(closest.peer.name, closest.ratio))
    return "\n".join(lines)


class Report:
    """What has been measured so far; its file is written anew after each part, for a run takes long."""

    def __init__(self, python: str, out: Path | None, missing: Sequence[str]) -> None:
        self._out, self._missing, self._versions = out, missing, versions(python)
        self._began, self._before = time.strftime("%Y-%m-%d %H:%M"), os.getloadavg()[0]
        self._rows: list[Row] = []
        self._parts: list[str] = []

    def add(self, rows: list[Row]) -> None:
        self._rows += rows
        self.say(table(rows, f"{rows[0].body}, world of {rows[0].world}"))

    def say(self, part: str) -> None:
        self._parts.append(part)
        if self._out:
            self._out.write_text(self.text(), "utf-8")

    def text(self) -> str:
        told = [
            f"# Worlds beside the peers, {self._began}\n",
            f"{os.cpu_count()} cores, load {self._before:.1f} before and {os.getloadavg()[0]:.1f} after.",
            f"{self._versions}.",
            "Seconds; `beside ours` is the time of a test after the first, divided by ours in a run just before.\n",
            verdicts(self._rows) + "\n",
            "\n\n".join(self._parts),
        ]
        if self._missing:
            told.append("\nNot installed here: " + ", ".join(self._missing) + ".")
        return "\n".join(told) + "\n"


def memory(python: str, peers: Sequence[Peer], world: int) -> str:
    lines = [f"### Memory of a world of {world}\n", "| | peak MiB (PSS) |", "|---|---|"]
    weights = []
    for peer in peers:
        run = weighed(peer, python, world)
        held = sum(name.startswith("held") for name in run.marks)
        say(f"{peer.name}, memory: {run.peak_pss / MIB:.0f} MiB, {held} ranks held")
        if held:
            weights.append((run.peak_pss / MIB, peer))
    lines += [f"| {bold(peer)} | {weight:.0f} |" for weight, peer in sorted(weights, key=lambda one: one[0])]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--python", default=default_python(), help="of the environment that has the peers")
    parser.add_argument("--tests", type=int, default=20)
    parser.add_argument("--fresh-tests", type=int, help="of peers that start a world for each; default: --tests")
    parser.add_argument("--bodies", nargs="*", default=["all_reduce", "sharded"])
    parser.add_argument("--only", nargs="*", default=[], help="words of the names of peers")
    parser.add_argument("--memory", type=int, default=8, help="size of the world that is weighed; 0: none")
    parser.add_argument("--out", type=Path, help="where the tables are written; else to the terminal")
    options = parser.parse_args()
    peers, missing = available(options.python, [*OURS, *PEERS])
    if options.only:
        peers = [one for one in peers if one.ours or any(word in one.name for word in options.only)]
    report = Report(options.python, options.out, [peer.name for peer in missing])
    for body in options.bodies:
        report.add(compare(options.python, peers, body, 2, options.tests, options.fresh_tests or options.tests))
    kept = [one for one in peers if not one.fresh]
    report.add(compare(options.python, kept, "all_reduce", 4, options.tests, options.tests))
    if options.memory:
        report.say(memory(options.python, peers, options.memory))
    if not options.out:
        print(report.text())


if __name__ == "__main__":
    main()
