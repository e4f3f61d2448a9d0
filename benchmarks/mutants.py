"""Count how many faults in the code the tests find: ``python -m benchmarks.mutants choose|run|report``.

``choose`` draws 150 mutants with a fixed seed: swapped comparisons, changed constants, negated conditions, deleted
calls. Each is known by its function and the text of its lines, so that it is found again after code has moved.
``run`` tests one after another in a copy of the repository, most related tests first, and continues where it stopped.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE, COPY = "pytest_fsdp_meta", ROOT / "build" / "mutants"
SEED = 40
WANTED = {"catalogue": 60, "observers": 35, "trial": 15, "worlds": 40}
"""Room -> number of mutants."""
STAGES: Mapping[str, Sequence[str]] = {
    "catalogue": ("tests/checks", "conformance/test_defects.py", "tests/trial", "tests/reports tests/plugin"),
    "observers": ("tests/ranks", "conformance/test_defects.py", "tests/trial", "conformance"),
    "trial": ("tests/trial", "conformance/test_defects.py", "conformance tests/plugin"),
    "worlds": ("tests/worlds", "tests/plugin", "tests/trial"),
}
"""Room -> the tests to run, one after another, until one fails."""
LIMIT = 900
"""Seconds for a stage; a mutant that takes longer is found as one that hangs."""
SWAPPED = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not",
    ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip


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


def choose() -> list[Mutant]:
    """Return the same mutants for the same code."""
    drawn = random.Random(SEED)
    found: list[Mutant] = []
    for room, count in WANTED.items():
        candidates = [one for path in _files(room) for one in _candidates(room, path)]
        found += drawn.sample(candidates, count)
    return found


def _files(room: str) -> list[Path]:
    """Return the files of a room without what only make ray tests."""
    return [path for path in sorted((ROOT / PACKAGE / room).rglob("*.py")) if "ray" not in path.parts]


def _candidates(room: str, path: Path) -> Iterator[Mutant]:
    text = path.read_text("utf-8")
    lines = text.splitlines(keepends=True)
    for function in (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)):
        body = "".join(lines[function.lineno - 1 : function.end_lineno])
        for start, end, new in _changes(function.body, text):
            first = text.rfind("\n", 0, start) + 1
            last = text.find("\n", end)
            before, after = text[first:last], text[first:start] + new + text[end:last]
            if body.count(before) == 1:
                yield Mutant(room, str(path.relative_to(ROOT)), function.name, before, after)


def _changes(statements: Sequence[ast.stmt], text: str) -> Iterator[tuple[int, int, str]]:
    """Yield (start, end, replacement) of each change."""
    for node in (inner for statement in statements for inner in ast.walk(statement)):
        if change := _change(node, text):
            yield change


def _change(node: ast.AST, text: str) -> tuple[int, int, str] | None:
    """Return the change of a node, or None for one that is not mutated."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPPED:
        between = _end(node.left, text), _start(node.comparators[0], text)
        closing = re.match(r"[\s)]*", text[between[0] :])
        assert closing is not None
        opening = text[: between[1]].rstrip("( \n")
        start, end = between[0] + closing.end(), len(opening)
        return start, end, SWAPPED[type(node.ops[0])]
    if isinstance(node, ast.If | ast.IfExp):
        source = text[_start(node.test, text) : _end(node.test, text)]
        return _start(node.test, text), _end(node.test, text), f"not ({source})"
    if isinstance(node, ast.Constant) and type(node.value) in (bool, int, float):
        changed = not node.value if isinstance(node.value, bool) else node.value + 1
        return _start(node, text), _end(node, text), repr(changed)
    if isinstance(node, ast.AugAssign) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        return _start(node, text), _end(node, text), "pass"
    return None


def _start(node: ast.expr | ast.stmt, text: str) -> int:
    return _offset(text, node.lineno, node.col_offset)


def _end(node: ast.expr | ast.stmt, text: str) -> int:
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    return _offset(text, node.end_lineno, node.end_col_offset)


def _offset(text: str, line: int, column: int) -> int:
    lines = text.splitlines(keepends=True)
    return sum(map(len, lines[: line - 1])) + len(lines[line - 1].encode()[:column].decode())


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
    changed = apply(mutant, COPY)
    stem = Path(mutant.file).stem
    try:
        for stage in STAGES[mutant.room]:
            near = [str(path.relative_to(COPY)) for path in sorted((COPY / "tests").rglob(f"test_{stem}.py"))]
            if killer := _first_failure([*near, *stage.split()], workers):
                return replace(mutant, killed_by=killer, seconds=round(time.monotonic() - began))
    finally:
        shutil.copy(ROOT / changed.relative_to(COPY), changed)
    return replace(mutant, seconds=round(time.monotonic() - began))


def _first_failure(tests: Sequence[str], workers: int) -> str:
    options = ("-x", "-q", "-n", str(workers), "-m", "not slow and not nightly", "-p", "no:cacheprovider")
    # The copy comes before the installed package also in the processes that the tests start.
    environ = {**os.environ, "PYTHONPATH": str(COPY), "PYTHONDONTWRITEBYTECODE": "1"}
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
    all_, found = Counter(one.room for one in ran), Counter(one.room for one in ran if one.killed_by)
    lines = ["| room | mutants | found |", "|---|---|---|"]
    lines += [f"| {room} | {all_[room]} | {found[room]} |" for room in all_]
    lines += ["", f"{found.total()} of {all_.total()} found. Not found:", ""]
    lines += [f"* {one.file}, {one.function}: `{one.after.strip()}`" for one in ran if not one.killed_by]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mutants", description=__doc__)
    parser.add_argument("action", choices=("choose", "run", "report"))
    parser.add_argument("--json", type=Path, required=True, help="the file of the mutants and what was found")
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    if arguments.action == "choose":
        mutants = choose()
    else:
        mutants = [Mutant(**one) for one in json.loads(arguments.json.read_text())]
    if arguments.action == "run":
        _copy()
        for index, one in enumerate(mutants):
            if not one.seconds:
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
