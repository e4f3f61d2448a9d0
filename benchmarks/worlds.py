"""Worlds beside the peers, one run after the other on the same machine: ``python -m benchmarks.worlds``.

Wanted: a fresh world for every test at least 20 times faster than a fresh world per test in any peer; a warm call no
slower than the fastest peer that reuses processes; less memory for a world of 8 than any peer takes. Before each peer
ours is run again, and only the ratio of the two counts: the machine may be busy, but then it is for both.
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


def compare(python: str, peers: Sequence[Peer], body: str, world: int, tests: int) -> list[Row]:
    fresh, kept = (
        next(one for one in OURS if one.file == "ours_spmd.py" and one.fresh == kind) for kind in (True, False)
    )
    rows = []
    for peer in peers:
        beside = timed(fresh if peer.fresh else kept, python, body, world, tests)
        run = beside if peer in (fresh, kept) else timed(peer, python, body, world, tests)
        rows.append(Row(peer, body, world, run, beside))
        say(f"{peer.name}, {body}, world of {world}: {cells(rows[-1])}")
    return rows


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}, load {os.getloadavg()[0]:.1f}] {text}", file=sys.stderr, flush=True)


def cells(row: Row) -> str:
    run = row.run
    if not run.tests:
        return "no test ended | | | | "
    failed = sum(outcome != "passed" for outcome in run.outcomes)
    told = "".join(
        [f"; {failed} failed" if failed else "", f"; {len(run.tests)} ended" if run.code is None else ""]
    ).removeprefix("; ")
    return f"{run.wall:.1f} | {run.tests[0]:.2f} | {short(warm(run))} | {row.ratio:.1f} | {told}"


def short(seconds: float) -> str:
    return f"{seconds:.3f}" if seconds < 0.1 else f"{seconds:.2f}"


def table(rows: Sequence[Row], title: str) -> str:
    head = f"### {title}\n\n| | wall | first | each after | beside ours | |\n|---|---|---|---|---|---|\n"
    ordered = sorted(rows, key=lambda row: (not row.peer.fresh, not row.peer.ours, warm(row.run)))
    return head + "\n".join(f"| {bold(row.peer)} | {cells(row)} |" for row in ordered)


def bold(peer: Peer) -> str:
    return f"**{peer.name}**" if peer.ours else peer.name


def verdicts(rows: Sequence[Row]) -> str:
    lines = []
    for body in dict.fromkeys(row.body for row in rows):
        for fresh, words in ((True, "a fresh world in {0} takes {1:.1f} times ours (wanted: 20)"),
                             (False, "a warm call in {0} takes {1:.1f} times ours (wanted: at least 1)")):  # fmt: skip
            of_kind = [row for row in rows if row.body == body and row.peer.fresh == fresh and not row.peer.ours]
            known = [row for row in of_kind if row.ratio == row.ratio]
            if known:
                closest = min(known, key=lambda row: row.ratio)
                lines.append(f"* {body}, world of {closest.world}: " + words.format(closest.peer.name, closest.ratio))
    return "\n".join(lines)


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
    parser.add_argument("--bodies", nargs="*", default=["all_reduce", "sharded"])
    parser.add_argument("--only", nargs="*", default=[], help="words of the names of peers")
    parser.add_argument("--memory", type=int, default=8, help="size of the world that is weighed; 0: none")
    parser.add_argument("--out", type=Path, help="where the tables are written; else to the terminal")
    options = parser.parse_args()
    peers, missing = available(options.python, [*OURS, *PEERS])
    if options.only:
        peers = [one for one in peers if one.ours or any(word in one.name for word in options.only)]
    began, before = time.strftime("%Y-%m-%d %H:%M"), os.getloadavg()[0]
    rows, parts = [], []
    for body in options.bodies:
        some = compare(options.python, peers, body, 2, options.tests)
        rows += some
        parts.append(table(some, f"{options.tests} tests, {body}, world of 2"))
    kept = [one for one in peers if not one.fresh]
    parts.append(table(compare(options.python, kept, "all_reduce", 4, options.tests), "all_reduce, world of 4"))
    if options.memory:
        parts.append(memory(options.python, peers, options.memory))
    told = [
        f"# Worlds beside the peers, {began}\n",
        f"{os.cpu_count()} cores, load {before:.1f} before and {os.getloadavg()[0]:.1f} after.",
        f"{versions(options.python)}.",
        "Seconds; `beside ours` is the time of a test after the first, divided by ours in a run just before.\n",
        verdicts(rows) + "\n",
        "\n\n".join(parts),
    ]
    if missing:
        told.append("\nNot installed here: " + ", ".join(peer.name for peer in missing) + ".")
    text = "\n".join(told) + "\n"
    if options.out:
        options.out.write_text(text, "utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main()
