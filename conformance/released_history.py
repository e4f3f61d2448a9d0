"""Which checks found something in which release, and since when: conformance/released_history.json as a table."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Judged:
    """What one run has found in a release."""

    date: str
    """ISO 8601, in UTC."""
    system: str
    release: str
    torch: str
    findings: tuple[str, ...]
    """The checks that have a finding, known or not."""

    def __str__(self) -> str:
        return f"{self.date}, {self.release} with torch {self.torch}"


def read_history(path: Path) -> list[Judged]:
    entries = json.loads(path.read_text("utf-8"))
    return [Judged(**{**entry, "findings": tuple(entry["findings"])}) for entry in entries]


def write_history(history: Iterable[Judged], path: Path) -> None:
    """Write a line for each run, so that a diff shows what is new."""
    lines = ",\n".join(json.dumps(asdict(entry)) for entry in history)
    path.write_text(f"[\n{lines}\n]\n", "utf-8")


def with_runs(history: Sequence[Judged], runs: Iterable[Judged]) -> list[Judged]:
    """Add runs. One replaces an earlier run of the same day."""
    entries = {(entry.date, entry.system): entry for entry in (*history, *runs)}
    return [entries[key] for key in sorted(entries)]


def history_table(history: Sequence[Judged], links: Mapping[str, str]) -> str:
    """Return a row for each check that ever found something in a system. ``links`` has the page of each."""
    lines = ["| check | found in | first seen | last judged | found then |", "| --- | --- | --- | --- | --- |"]
    last = {entry.system: entry for entry in history}
    first: dict[tuple[str, str], Judged] = {}
    for entry in history:
        for check in entry.findings:
            first.setdefault((check, entry.system), entry)
    for (check, system), entry in sorted(first.items()):
        cells = [f"[`{check}`](../docs/catalogue.md#{check})", links.get(system, system), str(entry), str(last[system])]
        lines.append(f"| {' | '.join(cells)} | {'yes' if check in last[system].findings else '**no**'} |")
    return "\n".join(lines) + "\n"
