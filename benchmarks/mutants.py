"""Count how many faults in the code the tests find: ``python -m benchmarks.mutants run|report --json FILE``.

mutants.json has 150 mutants that were drawn once, with a fixed seed, from the code of version 0.3 before its redesign:
swapped comparisons, changed constants, negated conditions, deleted calls. Each is known by its function and the text of
its lines, so that it is found again after code has moved; one whose code has gone is reported as gone. ``run`` tests
one after another in a copy of the repository, most related tests first, and continues where it stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE, COPY = "pytest_fsdp_meta", ROOT / "build" / "mutants"
CHOSEN = Path(__file__).with_suffix(".json")
STAGES: Mapping[str, Sequence[str]] = {
    "judges": (
        "tests/checks conformance/test_recorded.py",
        "conformance/test_defects.py",
        "tests/trial",
        "tests/reports tests/plugin",
    ),
    "observers": ("tests/ranks", "conformance/test_defects.py", "tests/trial", "conformance"),
    "trial": ("tests/trial", "conformance/test_defects.py", "conformance tests/plugin"),
    "worlds": ("tests/worlds", "tests/plugin", "tests/trial"),
}
"""Room -> the tests to run, one after another, until one fails."""
GONE = "gone"
LIMIT = 900
"""Seconds for a stage; a mutant that takes longer is found as one that hangs."""


@dataclass(frozen=True)
class Mutant:
    room: str
    file: str
    """Where it was when it was chosen."""
    function: str
    before: str
    """The lines that change; they are unique in the function."""
    after: str
    killed_by: str = ""
    """The first test that failed; empty if all passed, or the mutant has not run."""
    seconds: float = 0.0


def apply(mutant: Mutant, root: Path) -> Path:
    """Change the mutant's lines, wherever its function is now, and return the file. Raises LookupError without them."""
    header = re.compile(rf"^ *def {mutant.function}\(", re.MULTILINE)
    paths = [root / mutant.file, *sorted((root / PACKAGE).rglob("*.py"))]
    for path in (path for path in paths if path.exists()):
        text = path.read_text("utf-8")
        for found in header.finditer(text):
            at = text.find(mutant.before, found.start())
            following = re.compile(r"^ *(?:def|class) ", re.MULTILINE).search(text, found.end())
            if at >= 0 and (following is None or at < following.start() or mutant.file == str(path.relative_to(root))):
                path.write_text(text[:at] + mutant.after + text[at + len(mutant.before) :], "utf-8")
                return path
    raise LookupError(f"{mutant.function}: {mutant.before.strip()}")


def run(mutant: Mutant, workers: int) -> Mutant:
    """Return the mutant with the first test that finds it."""
    began = time.monotonic()
    try:
        changed = apply(mutant, COPY)
    except LookupError:
        return replace(mutant, killed_by=GONE)
    _forget_bytecode(changed)
    stem = Path(mutant.file).stem
    try:
        for stage in STAGES[mutant.room]:
            near = [str(path.relative_to(COPY)) for path in sorted((COPY / "tests").rglob(f"test_{stem}.py"))]
            if killer := _first_failure([*near, *stage.split()], workers):
                return replace(mutant, killed_by=killer, seconds=round(time.monotonic() - began))
    finally:
        shutil.copy(ROOT / changed.relative_to(COPY), changed)
        _forget_bytecode(changed)
    return replace(mutant, seconds=round(time.monotonic() - began))


def _forget_bytecode(file: Path) -> None:
    """Python tells versions of a file by time and size, which two mutants may share."""
    for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*"):
        compiled.unlink()


def _first_failure(tests: Sequence[str], workers: int) -> str:
    options = ("-x", "-q", "-n", str(workers), "-m", "not slow and not nightly", "-p", "no:cacheprovider")
    # The copy comes before the installed package also in the processes that the tests start.
    environ = {**os.environ, "PYTHONPATH": str(COPY)}
    environ.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-m", "pytest", *options, *dict.fromkeys(tests)]
    try:
        done = subprocess.run(
            command, cwd=COPY, env=environ, capture_output=True, text=True, timeout=LIMIT, check=False
        )
    except subprocess.TimeoutExpired:
        return f"more than {LIMIT} s"
    if not done.returncode:
        return ""
    named = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return named[1] if named else f"exit status {done.returncode}: {done.stdout[-200:]}"


def _copy() -> None:
    shutil.rmtree(COPY, ignore_errors=True)
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        (COPY / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, COPY / name)


def report(mutants: Sequence[Mutant]) -> str:
    """Return a table of how many were found in each room, and those that were not."""
    ran = [one for one in mutants if one.seconds]
    gone = sum(one.killed_by == GONE for one in mutants)
    all_, found = Counter(one.room for one in ran), Counter(one.room for one in ran if one.killed_by)
    lines = ["| room | mutants | found |", "|---|---|---|"]
    lines += [f"| {room} | {all_[room]} | {found[room]} |" for room in all_]
    lines += ["", f"{found.total()} of {all_.total()} found, and the code of {gone} has gone. Not found:", ""]
    lines += [f"* {one.file}, {one.function}: `{one.after.strip()}`" for one in ran if not one.killed_by]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mutants", description=__doc__)
    parser.add_argument("action", choices=("run", "report"))
    parser.add_argument("--json", type=Path, required=True, help="the file of what was found; it need not exist")
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    begun = arguments.json if arguments.json.exists() else CHOSEN
    mutants = [Mutant(**one) for one in json.loads(begun.read_text("utf-8"))]
    if arguments.action == "run":
        _copy()
        for index, one in enumerate(mutants):
            if not (one.seconds or one.killed_by):
                mutants[index] = run(one, arguments.workers)
                print(
                    f"{index + 1}: {mutants[index].killed_by or 'not found'} ({mutants[index].seconds:.0f} s)",
                    flush=True,
                )
                _write(arguments.json, mutants)
    elif arguments.action == "report":
        print(report(mutants))
    _write(arguments.json, mutants)


def _write(path: Path, mutants: Sequence[Mutant]) -> None:
    path.write_text(json.dumps([asdict(one) for one in mutants], indent=1) + "\n")


if __name__ == "__main__":
    main()
