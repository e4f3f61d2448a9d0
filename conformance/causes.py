"""Measure whether the cause that is named is the cause: ``python -m conformance.causes`` (``make causes``).

``causes.json`` has the true cause of each defect, written from its code before anybody looked at the output, what the
kit says of it, and a grade given by reading both:

* "right": the first cause that is named is the true one
* "near": it is among the causes that are named, at most three, or is the true one in other words
* "vague": what is said fits the true cause and many others
* "wrong": what is said would send the author elsewhere

It is said of recorded evidence. If the text changes, its grade is removed, and the run fails until somebody grades it.
It also fails with a wrong cause, or with fewer than ``ENOUGH`` that are right or near.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from conformance import recorded
from fixtures.defects import DEFECTS
from pytest_fsdp_meta.catalogue import Finding, built_in, judge

FILE = Path(__file__).with_name("causes.json")
GRADES = ("right", "near", "vague", "wrong")
ENOUGH = 0.85
UNGRADED = {"cause": "", "said": [], "grade": ""}


def said_of(findings: Sequence[Finding]) -> list[str]:
    """Return each thing that a message says of the cause: where it starts, and what is likely."""
    starts = dict.fromkeys(f"where it starts: {finding.origin}" for finding in findings if finding.origin)
    return [*starts, *dict.fromkeys(finding.cause for finding in findings)]


def say(name: str) -> list[str]:
    """Return what the check that must catch the defect says of it."""
    evidence, catalogue = recorded.read(name), built_in()
    return said_of(judge(catalogue[DEFECTS[name].caught_by], evidence, catalogue).findings)


def main() -> int:
    known = json.loads(FILE.read_text())
    names = [name for name in recorded.names() if name in DEFECTS]
    for name in names:
        row, said = known.setdefault(name, {**UNGRADED}), say(name)
        if row["said"] != said:
            row.update(said=said, grade="")
            print(f"{name}: {row['cause']}", *said, sep="\n  ", flush=True)
    FILE.write_text(json.dumps({name: known[name] for name in names}, indent=1, ensure_ascii=False) + "\n")
    counts = Counter(known[name]["grade"] for name in names)
    print(", ".join(f"{counts[grade]} {grade}" for grade in GRADES), f"of {len(names)} defects")
    ungraded = [name for name in names if known[name]["grade"] not in GRADES or not known[name]["cause"]]
    if ungraded:
        print(f"write cause and grade of {', '.join(ungraded)} in {FILE.name}", file=sys.stderr)
    return int(bool(ungraded) or counts["wrong"] > 0 or counts["right"] + counts["near"] < ENOUGH * len(names))


if __name__ == "__main__":
    sys.exit(main())
