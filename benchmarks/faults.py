"""The same faults under ours and under each peer: ``python -m benchmarks.faults``.

Of two tests in a world of two, the first has the fault on rank 1 while rank 0 waits for it in a collective; the second
is healthy. Told is how long after the fault the run is over, whether what it says names rank 1 and the cause, whether
rank 0 came out of the collective though rank 1 never was in it (its collective met one of another test: a false pass),
and what still runs five seconds after the run is over.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peer_runs import OURS, PEERS, Peer, Run, Started, available, default_python, started, versions

FAULTS = {
    "raise": ("an exception on rank 1", r"boom"),
    "exit": ("rank 1 exits with code 7", r"(?i)(exit|code|status|return)\D{0,40}\b7\b"),
    "kill": ("rank 1 is killed by SIGKILL", r"SIGKILL|[Kk]illed|signal 9|signal -?9|exit ?code:? -9"),
    "deadlock": ("rank 1 never comes", r"(?i)time[d ]*-?out|did not answer|hang|stuck|stack of rank"),
    "orphan": ("pytest is killed by SIGKILL while ranks wait", r""),
}
NAMED = r"(?i)(?:rank|process|worker|thread|local_rank|gw)s?[\s:=\[#(]*{}\b"
LATER = 5.0


@dataclass
class Seen:
    """What became of one fault."""

    seconds: float | None
    """None: it was not over when the patience was."""
    run: Run
    left: int

    def cells(self, fault: str) -> str:
        if "fault.1" not in self.run.marks:
            return "fault not reached | | |"
        if fault == "orphan":
            return f" | | {self.left} |"
        known = "not known" if self.seconds is None else f"{max(self.seconds, 0):.1f}"
        false = " **false pass**" if "out.0" in self.run.marks else ""
        return f"{known}{false} | {self.blamed()}{self.caused(fault)} | {self.left} |"

    def blamed(self) -> str:
        right, wrong = (re.search(NAMED.format(rank), self.run.output) is not None for rank in (1, 0))
        return {(True, False): "rank 1", (True, True): "both", (False, True): "rank 0", (False, False): "none"}[
            right, wrong
        ]

    def caused(self, fault: str) -> str:
        return ", cause told" if re.search(FAULTS[fault][1], self.run.output) else ", no cause"


def inject(peer: Peer, python: str, fault: str, limit: float, patience: float) -> Seen:
    with started(peer, python, fault, world=2, tests=2, limit=limit) as at_work:
        mark = _wait_for_fault(at_work)
        if fault == "orphan" and mark is not None:
            time.sleep(0.5)
            _kill_pytest(at_work)
        over = _wait(at_work, patience)
        ended = time.time()
        time.sleep(LATER if over else 0.0)
        left = [pid for pid in at_work.pids() if over or pid != at_work.process.pid]
        return Seen(ended - mark if over and mark is not None else None, at_work.told(), len(left))


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
    """Every pytest that the user would see as one: what was started first. Its ranks are left to themselves."""
    os.kill(at_work.process.pid, signal.SIGKILL)


def _wait(at_work: Started, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while at_work.process.poll() is None:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}, load {os.getloadavg()[0]:.1f}] {text}", file=sys.stderr, flush=True)


def table(python: str, peers: Sequence[Peer], fault: str, limit: float, patience: float) -> str:
    lines = [f"### {FAULTS[fault][0]}\n", "| | seconds until it is over | told | left 5 s later |", "|---|---|---|---|"]
    for peer in peers:
        seen = inject(peer, python, fault, limit, patience)
        name = f"**{peer.name}**" if peer.ours else peer.name
        lines.append(f"| {name} | {seen.cells(fault)}")
        say(lines[-1])
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--python", default=default_python(), help="of the environment that has the peers")
    parser.add_argument("--only", nargs="*", default=[], help="words of the names of peers")
    parser.add_argument("--faults", nargs="*", default=list(FAULTS))
    parser.add_argument("--limit", type=float, default=10.0, help="seconds that a hang may take, where a peer is told")
    parser.add_argument("--patience", type=float, default=30.0, help="seconds until a fault counts as not known")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    ours = [one for one in OURS if one.name == "@fsdp_spmd"]
    peers, missing = available(options.python, [*ours, *PEERS])
    peers = [one for one in peers if not options.only or one.ours or any(word in one.name for word in options.only)]
    told = [
        f"# The same faults under each peer, {time.strftime('%Y-%m-%d %H:%M')}\n",
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before. {versions(options.python)}.",
        f"Hangs are to be told after {options.limit:g} s, where a peer can be told so.",
        f"Not known: not within {options.patience:g} s.",
    ]
    if missing:
        told.append("Not installed here: " + ", ".join(peer.name for peer in missing) + ".")
    for fault in options.faults:
        told.append("\n" + table(options.python, peers, fault, options.limit, options.patience))
        if options.out:  # after each, for a run takes long
            options.out.write_text("\n".join(told) + "\n", "utf-8")
    if not options.out:
        print("\n".join(told))


if __name__ == "__main__":
    main()
