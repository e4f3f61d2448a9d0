"""Evidence of every defect and every conforming form, recorded once and kept, so that it is judged without ranks.

``python -m conformance.matrix --record`` records it, and ``python -m conformance.recorded`` writes the verdicts of what
was recorded into ``verdicts.txt``. Reviewers read the diff of that file: it shows each verdict and text that a change
of the judges changes. Record again what an observer sees otherwise.
"""

from __future__ import annotations

import json
import lzma
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from conformance.contract import judge_all
from pytest_fsdp_meta.catalogue import Verdict
from pytest_fsdp_meta.evidence import Evidence
from pytest_fsdp_meta.evidence.codec import from_plain, to_plain
from pytest_fsdp_meta.reports.terminal import describe_failure

ROOT = Path(__file__).parents[1]
FILE = Path(__file__).with_name("evidence.json.xz")
VERDICTS = Path(__file__).with_name("verdicts.txt")
HEAD = "=== "
DIGEST = re.compile(r"\b([0-9a-f]{8})[0-9a-f]{24}\b")


@cache
def _lines() -> dict[str, str]:
    with lzma.open(FILE, "rt", encoding="utf-8") as file:
        return dict(line.rstrip("\n").split(" ", 1) for line in file)


def names() -> list[str]:
    """Return the names of the loaders whose evidence was recorded."""
    return list(_lines())


def read(name: str) -> Evidence:
    return from_plain(Evidence, json.loads(_lines()[name]))


def record(evidence: Mapping[str, Evidence], keep_others: bool) -> None:
    """Write the evidence; what was recorded of other loaders stays if ``keep_others``."""
    lines = {**_lines()} if keep_others and FILE.exists() else {}
    lines |= {name: json.dumps(_shortened(to_plain(one)), allow_nan=False) for name, one in evidence.items()}
    with lzma.open(FILE, "wt", preset=9 | lzma.PRESET_EXTREME, encoding="utf-8") as file:
        file.writelines(f"{name} {lines[name]}\n" for name in sorted(lines))
    _lines.cache_clear()


def _shortened(value: Any) -> Any:
    """Return the value with as many digits as judges need, and without the folders of this machine."""
    if isinstance(value, dict):
        return {key: _shortened(item) for key, item in value.items()}
    if isinstance(value, list):
        return [*map(_shortened, value)]
    if isinstance(value, float):
        return float(f"{value:.7g}")
    if isinstance(value, str):
        text = value.replace(sys.prefix, "/environment").replace(str(ROOT), "/repository")
        text = text.replace(tempfile.gettempdir(), "/temporary")
        return DIGEST.sub(r"\1", text)
    return value


def describe(name: str) -> str:
    """Return all verdicts of a loader but those that passed, with their texts."""
    return "\n".join([f"{HEAD}{name}", *_describe(judge_all(read(name)))])


def _describe(verdicts: Mapping[str, Verdict]) -> Iterator[str]:
    skipped: dict[str, list[str]] = {}
    for id, verdict in verdicts.items():
        if verdict.status == "failed":
            _, *lines, _ = describe_failure(verdict, "world", "").splitlines()
            yield "\n".join([f"{id} failed", *(f"  {line}" for line in lines if line)])
        elif verdict.status == "error" or verdict.why in ("differs", "partly checked", "depends on a failed check"):
            yield f"{id}: {verdict.why or verdict.status}\n  {verdict.reason}"
        elif verdict.status == "skipped":
            skipped.setdefault(verdict.why, []).append(id)
        elif verdict.reason:
            yield f"{id}: passed\n  {verdict.reason}"
    yield from (f"{why}: {', '.join(ids)}" for why, ids in skipped.items())


def known() -> dict[str, str]:
    """Return what ``verdicts.txt`` says of each loader."""
    sections = VERDICTS.read_text(encoding="utf-8").rstrip("\n").removeprefix(HEAD).split(f"\n\n{HEAD}")
    return {section.partition("\n")[0]: HEAD + section for section in sections}


def main() -> None:
    VERDICTS.write_text("\n\n".join(map(describe, names())) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
