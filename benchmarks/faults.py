"""Inject the same faults under this plugin and each other tool: ``python -m benchmarks.faults``.

Two tests run in a world of two. In the first, rank 1 has the fault while rank 0 waits for it in a collective; the
second is healthy. The table shows the time from the fault to the end of the run, whether the output names rank 1 and
the cause, whether rank 0 left the collective although rank 1 never entered it (it was paired with a collective of
another test: a false pass), and how many processes still run five seconds after the end.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.peer_runs import OURS, PEERS, Peer, Run, Started, available, default_python, started, versions

FAULTS = {
    "raise": ("an exception on rank 1", r"boom"),
    "exit": ("rank 1 exits with code 7", r"(?i)(exit|code|status|return)\D{0,40}\b7\b"),
    "kill": ("rank 1 is killed by SIGKILL", r"SIGKILL|[Kk]illed|signal 9|signal -?9|exit ?code:? -9"),
    "deadlock": ("rank 1 never arrives", r"(?i)time[d ]*-?out|did not answer|hang|stuck|stack of rank"),
    "stopped": ("rank 1 is stopped by SIGSTOP", r"(?i)is stopped|was stopped|SIGSTOP"),
    "pytest-timeout": ("pytest-timeout ends the test while rank 0 waits", r"Timeout.{0,20} from pytest-timeout"),
    "orphan": ("pytest is killed by SIGKILL while ranks wait", r""),
}
NAMED = r"(?i)(?:rank|process|worker|thread|local_rank|gw)s?[\s:=\[#(]*{}\b"
LATER = 5.0
"""Seconds after the end of a run at which the remaining processes are counted."""


@dataclass
class FaultResult:
    """The outcome of one fault."""

    seconds: float | None
    """Seconds from the fault to the end of the run; None if it did not end within --patience."""
    run: Run
    left: int

    def cells(self, fault: str) -> str:
        if "fault.1" not in self.run.marks:
            return "fault not reached | | |"
        if fault == "orphan":
            return f" | | {self.left} |"
        duration = "did not end" if self.seconds is None else f"{max(self.seconds, 0):.1f}"
        false = " **false pass**" if "out.0" in self.run.marks else ""
        return f"{duration}{false} | {self.named_rank()}{self.named_cause(fault)} | {self.left} |"

    def named_rank(self) -> str:
        right, wrong = (re.search(NAMED.format(rank), self.run.output) is not None for rank in (1, 0))
        return {(True, False): "rank 1", (True, True): "both", (False, True): "rank 0", (False, False): "none"}[
            right, wrong
        ]

    def named_cause(self, fault: str) -> str:
        return ", cause named" if re.search(FAULTS[fault][1], self.run.output) else ", no cause"


def inject(peer: Peer, python: str, fault: str, limit: float, patience: float) -> FaultResult:
    if fault == "pytest-timeout":  # which ends the test long before the tool's own limit
        limits = (f"--timeout={limit}", "--timeout-method=signal")
        peer = replace(peer, plugins=(*peer.plugins, "pytest_timeout"), after=(*peer.after, *limits))
        limit *= 10
    with started(peer, python, fault, world=2, tests=2, limit=limit) as at_work:
        mark = _wait_for_fault(at_work)
        if fault == "orphan" and mark is not None:
            time.sleep(0.5)
            _kill_pytest(at_work)
        over = _wait(at_work, patience)
        ended = time.time()
        time.sleep(LATER if over else 0.0)
        left = [pid for pid in at_work.pids() if over or pid != at_work.process.pid]
        return FaultResult(ended - mark if over and mark is not None else None, at_work.read_results(), len(left))


def _wait_for_fault(at_work: Started, seconds: float = 120.0) -> float | None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and at_work.process.poll() is None:
        file = at_work.marks / "fault.1"
        if file.exists() and (text := file.read_text()):
            return float(text)
        time.sleep(0.05)
    file = at_work.marks / "fault.1"
    return float(file.read_text()) if file.exists() else None


def _kill_pytest(at_work: Started) -> None:
    """Kill the process that the user started, and leave its ranks alone."""
    os.kill(at_work.process.pid, signal.SIGKILL)


def _wait(at_work: Started, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while at_work.process.poll() is None:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def log(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}, load {os.getloadavg()[0]:.1f}] {text}", file=sys.stderr, flush=True)


def table(python: str, peers: Sequence[Peer], fault: str, limit: float, patience: float) -> str:
    lines = [
        f"### {FAULTS[fault][0]}\n",
        "| | seconds until the run ends | output names | processes left after 5 s |",
        "|---|---|---|---|",
    ]
    for peer in peers:
        result = inject(peer, python, fault, limit, patience)
        name = f"**{peer.name}**" if peer.ours else peer.name
        lines.append(f"| {name} | {result.cells(fault)}")
        log(lines[-1])
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument(
        "--python", default=default_python(), help="interpreter of the environment that has the other tools"
    )
    parser.add_argument("--only", nargs="*", default=[], help="parts of the names of tools to run")
    parser.add_argument("--faults", nargs="*", default=list(FAULTS))
    parser.add_argument("--limit", type=float, default=10.0, help="time limit in seconds, for tools that have one")
    parser.add_argument("--patience", type=float, default=30.0, help="seconds to wait for the end of a run")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    ours = [peer for peer in OURS if peer.name == "@fsdp_spmd"]
    peers, missing = available(options.python, [*ours, *PEERS])
    peers = [peer for peer in peers if not options.only or peer.ours or any(part in peer.name for part in options.only)]
    lines = [
        f"# The same faults under each tool, {time.strftime('%Y-%m-%d %H:%M')}\n",
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before. {versions(options.python)}.",
        f"Time limit for a hang: {options.limit:g} s, for tools that have one.",
        f"Did not end: not within {options.patience:g} s.",
    ]
    if missing:
        lines.append("Not installed here: " + ", ".join(peer.name for peer in missing) + ".")
    for fault in options.faults:
        lines.append("\n" + table(options.python, peers, fault, options.limit, options.patience))
        if options.out:  # after each fault, because a run takes long
            options.out.write_text("\n".join(lines) + "\n", "utf-8")
    if not options.out:
        print("\n".join(lines))


if __name__ == "__main__":
    main()
