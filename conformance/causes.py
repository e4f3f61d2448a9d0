"""Measure whether the cause that is named is the cause: ``python -m conformance.causes`` (``make causes``).

``causes.json`` has the true cause of each defect, written from its code before anybody looked at the output, what the
kit says of it, and a grade given by reading both:

* "right": the first cause that is named is the true one
* "near": it is among the causes that are named, at most three, or is the true one in other words
* "vague": what is said fits the true cause and many others
* "wrong": what is said would send the author elsewhere

A run judges each defect again. If the text changes, its grade is removed and the run fails until somebody grades it. It
also fails with a wrong cause, or with fewer than ``ENOUGH`` that are right or near.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from conformance.judging import LoaderJudge
from conformance.matrix import Entry, entries, save_once
from pytest_fsdp_meta.catalogue import Finding, built_in, judge

FILE = Path(__file__).with_name("causes.json")
GRADES = ("right", "near", "vague", "wrong")
ENOUGH = 0.85
UNGRADED = {"cause": "", "said": [], "grade": ""}


def said_of(findings: Sequence[Finding]) -> list[str]:
    """Return each thing that a message says of the cause: where it starts, and what is likely."""
    starts = dict.fromkeys(f"where it starts: {finding.origin}" for finding in findings if finding.origin)
    return [*starts, *dict.fromkeys(finding.cause for finding in findings)]


def say(chosen: Sequence[Entry]) -> Iterator[tuple[str, list[str]]]:
    """Yield what the check that must catch each defect says of it."""
    judging, catalogue = LoaderJudge(), built_in()
    with tempfile.TemporaryDirectory() as folder:
        for entry in chosen:
            path = save_once(entry.architecture, Path(folder)) if entry.architecture else None
            # State that only a training step changes is lost only by what is saved after one.
            trained = ["loss_parity"] if catalogue[entry.caught_by].family == "checkpoint" else []
            checks = [entry.caught_by, *trained]
            evidence = judging.observe(
                entry.load, entry.mesh, checks, simulated=entry.simulated, smaller=True, path=path
            )
            yield entry.name, said_of(judge(catalogue[entry.caught_by], evidence, catalogue).findings)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="measure whether the cause that is named is the cause")
    parser.add_argument("-k", default="", help="only defects whose name contains this")
    options = parser.parse_args(arguments)
    known = json.loads(FILE.read_text())
    defects = [entry for entry in entries() if entry.caught_by]  # those that this release of torch can run
    for name, said in say([entry for entry in defects if options.k in entry.name]):
        row = known.setdefault(name, {**UNGRADED})
        if row["said"] != said:
            row.update(said=said, grade="")
            print(f"{name}: {row['cause']}", *said, sep="\n  ", flush=True)
        FILE.write_text(json.dumps(known, indent=1, ensure_ascii=False) + "\n")
    rows = {entry.name: known.get(entry.name, UNGRADED) for entry in defects}
    counts = Counter(row["grade"] for row in rows.values())
    print(", ".join(f"{counts[grade]} {grade}" for grade in GRADES), f"of {len(rows)} defects")
    open_rows = [name for name, row in rows.items() if row["grade"] not in GRADES or not row["cause"]]
    if open_rows:
        print(f"write cause and grade of {', '.join(open_rows)} in {FILE.name}", file=sys.stderr)
    good = counts["right"] + counts["near"]
    return int(bool(open_rows) or counts["wrong"] > 0 or good < ENOUGH * len(rows))


if __name__ == "__main__":
    sys.exit(main())
