"""Run a selection of the tests with each torch that users have, and write results/versions.md (``make versions``).

Each row gets an environment of its own, created by venv and pip in .venv-versions and removed after its run. The
Python of a row is PYTHON310 (or 312, ...) from the environment, python3.10 on PATH, pyenv's, or the one that runs this.

A row that fails does not stop the others; the exit status is then 1. Rows that already ran today on the same commit
are not run again. Their results and logs are in build/versions.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from xml.etree import ElementTree

from conformance.released import ROOT, replace_table

BEGIN = "<!-- written by make versions -->\n"
ENVIRONMENTS, RESULTS = ROOT / ".venv-versions", ROOT / "build" / "versions"
CPU, NIGHTLY_CPU = "https://download.pytorch.org/whl/cpu", "https://download.pytorch.org/whl/nightly/cpu"


@dataclass(frozen=True)
class Row:
    """An environment. pip gets the arguments ``torch`` first, so that nothing that comes later chooses a torch."""

    name: str
    python: str
    torch: tuple[str, ...]
    others: tuple[str, ...] = ()


OLDEST = ("pytest==8.0.0", "pytest-xdist==3.5.0", "hypothesis==6.100.0", "transformers==5.0.0", "accelerate==1.10.0")
"""The oldest releases that pyproject.toml allows."""
USUAL = (
    Row("2.9.1", "3.10", ("torch==2.9.1",), (*OLDEST, "peft==0.18.0", "safetensors==0.4.3", "cloudpickle==3.0.0")),
    Row("2.11.0", "3.12", ("torch==2.11.0",), ("transformers==5.17.0",)),
    Row("2.13.0-cpu", "3.11", ("torch==2.13.0", "--extra-index-url", CPU), ("-c", "constraints.txt")),
    Row("2.14.1", "3.11", ("torch==2.14.1",)),
    Row("newest", "3.13", ("torch",)),
)
ROWS = {row.name: row for row in (*USUAL, Row("nightly", "3.13", ("--pre", "torch", "--index-url", NIGHTLY_CPU)))}

SELECTION = (
    # The first defect of each check, and what breaks first when torch, safetensors, pytest or Hypothesis changes.
    (
        "-m",
        "not slow and not nightly",
        "conformance/test_defects.py",
        "tests/ranks/test_torch_names.py",
        "tests/ranks/test_torch_private.py",
        "tests/ranks/test_collectives.py",
        "tests/ranks/test_reference_record.py",
        "tests/plugin/test_pytest_private.py",
        "tests/plugin/test_hypothesis_given.py",
    ),
    ("conformance/test_forms.py::test_a_form_conforms",),
)
"""The arguments of each run of pytest after README's example."""
PACKAGES = {"transformers": "transformers", "pytest": "pytest", "xdist": "pytest-xdist", "hypothesis": "hypothesis"}
DESCRIBE = f"""
import json, platform, torch
from importlib.metadata import version
build = f"CUDA {{torch.version.cuda}}" if torch.version.cuda else "CPU"
torch = f"{{torch.__version__.partition('+')[0]}} ({{build}})"
versions = {{name: version(package) for name, package in {PACKAGES!r}.items()}}
print(json.dumps({{"Python": platform.python_version(), "torch": torch, **versions}}))
"""
CAUGHT = "no_uninitialized_memory"
"""The check that fails for README's broken loader."""
DROPPED = {"PIP_EXTRA_INDEX_URL", "PYTEST_ADDOPTS", "PYTHONDONTWRITEBYTECODE"}
"""Variables that commands do not inherit. With an index of builds for CPUs, pip would not install what users get.
Without bytecode each interpreter compiles all of torch again, for pip does not compile it either."""
LIMIT = 3600
"""Seconds for one command, so that a hang on a nightly torch does not last all night."""
SHOWN = 20
"""Failures of a row that the page names."""


@dataclass
class Outcome:
    """What a row has shown. A test that failed, or anything else that went wrong, is a problem."""

    row: str
    date: str
    commit: str
    versions: dict[str, str] = field(default_factory=dict)
    right: str = "not run"
    broken: str = "not run"
    counts: dict[str, int] = field(default_factory=dict)
    seconds: float = 0
    problems: dict[str, str] = field(default_factory=dict)

    def cells(self) -> list[str]:
        described = [self.versions.get(name, "-") for name in ("Python", "torch", *PACKAGES)]
        counted = [str(self.counts.get(status, 0)) for status in ("passed", "failed", "skipped")]
        return [self.row, *described, self.right, self.broken, *counted, f"{self.seconds / 60:.0f}"]


class Stopped(Exception):
    """A command did not do its work. The arguments are the command and why."""


def find_python(version: str) -> str:
    """Return an interpreter of this version, or the one that runs this."""
    name = f"python{version}"
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    named = [os.environ.get(f"PYTHON{version.replace('.', '')}"), shutil.which(name)]
    for found in filter(None, [*named, *map(str, pyenv.glob(f"versions/{version}.*/bin/{name}"))]):
        # A shim of pyenv is on PATH even if no version is active.
        if subprocess.run([found, "--version"], capture_output=True, check=False).returncode == 0:
            return found
    return sys.executable


@dataclass(frozen=True)
class Runner:
    """Runs commands for one row, with their output in its log."""

    log: Path
    workers: int
    environment: dict[str, str]

    def run(self, *command: str, folder: Path = ROOT, statuses: Iterable[int] = (0,)) -> None:
        """Run a command. Raises Stopped for an unexpected exit status."""
        with self.log.open("ab") as log:
            log.write(f"\n$ {' '.join(command)}\n".encode())
            log.flush()
            try:
                done = subprocess.run(
                    command, cwd=folder, env=self.environment, stdout=log, stderr=log, timeout=LIMIT, check=False
                )
            except subprocess.TimeoutExpired:
                raise Stopped(" ".join(command[1:]), f"not done after {LIMIT} s") from None
        if done.returncode not in statuses:
            last = [line for line in self.log.read_text("utf-8", "replace").splitlines() if line.strip()][-1]
            raise Stopped(" ".join(command[1:]), f"exit status {done.returncode}: {last}")

    def install(self, row: Row) -> str:
        """Create the environment of a row; return its interpreter."""
        self.run(find_python(row.python), "-m", "venv", "--clear", str(ENVIRONMENTS / row.name))
        python = str(ENVIRONMENTS / row.name / "bin" / "python")
        install = [python, "-m", "pip", "install", "--no-compile", "--progress-bar", "off"]
        self.run(*install, *row.torch)
        self.run(*install, *row.others, "-e", ".[conformance]")
        return python

    def test(self, python: str, *arguments: str, folder: Path = ROOT) -> dict[str, tuple[str, str]]:
        """Run pytest; return the status and the message of each test."""
        with tempfile.TemporaryDirectory() as written:
            file = Path(written, "junit.xml")
            self.run(python, "-m", "pytest", *arguments, f"--junitxml={file}", folder=folder, statuses=(0, 1))
            return read_tests(file.read_text("utf-8"))

    def try_readme(self, python: str, outcome: Outcome) -> None:
        """Run README's example as it is, and without the line that README says to delete."""
        lines = (ROOT / "examples" / "test_llama.py").read_text("utf-8").splitlines(keepends=True)
        with tempfile.TemporaryDirectory() as folder:
            example = Path(folder, "test_llama.py")
            example.write_text("".join(lines), "utf-8")
            right = self.test(python, example.name, folder=example.parent)
            example.write_text("".join(line for line in lines if "rotary_emb = " not in line), "utf-8")
            broken = self.test(python, example.name, folder=example.parent)
        judge_readme(outcome, right, broken, (ROOT / "README.md").read_text("utf-8"))

    def try_row(self, row: Row, ready: str, outcome: Outcome) -> None:
        """Fill in the outcome of a row, in a new environment or with an interpreter that is ready."""
        try:
            python = ready or self.install(row)
            described = subprocess.run(
                [python, "-c", DESCRIBE], env=self.environment, capture_output=True, text=True, check=False
            )
            last = described.stdout.strip().rpartition("\n")[2]  # what is imported may print something, too
            if described.returncode or not last.startswith("{"):
                with self.log.open("a", encoding="utf-8") as log:
                    log.write(described.stdout + described.stderr)
                raise Stopped("import torch", described.stderr.strip().rpartition("\n")[2] or "it printed no versions")
            outcome.versions = json.loads(last)
            if not outcome.versions["Python"].startswith(f"{row.python}."):
                outcome.versions["Python"] += f" (no {row.python} was found)"
            self.try_readme(python, outcome)
            for arguments in SELECTION:
                add_tests(outcome, self.test(python, "-n", str(self.workers), *arguments))
        except Stopped as error:
            command, why = error.args
            outcome.problems[command] = why


def read_tests(junit: str) -> dict[str, tuple[str, str]]:
    """Return the status of each test in a JUnit report, and the first line of what it says."""
    tests: dict[str, tuple[str, str]] = {}
    for case in ElementTree.fromstring(junit).iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        failed = case.find("failure") if case.find("failure") is not None else case.find("error")
        if failed is not None:
            tests[name] = ("failed", (failed.get("message") or "").strip().partition("\n")[0])
        else:
            tests.setdefault(name, ("passed" if case.find("skipped") is None else "skipped", ""))
    return tests


def judge_readme(
    outcome: Outcome, right: dict[str, tuple[str, str]], broken: dict[str, tuple[str, str]], readme: str
) -> None:
    """Compare both runs of the example with what README promises."""
    counts = Counter(status for status, _ in right.values())
    statuses = [status for status in ("failed", "passed", "skipped") if counts[status]]
    outcome.right = ", ".join(f"{counts[status]} {status}" for status in statuses)
    failed = [name.partition("[")[2].rstrip("]") for name, (status, _) in broken.items() if status == "failed"]
    outcome.broken = f"`{CAUGHT}` alone" if failed == [CAUGHT] else f"{len(failed)} failed"
    if f"\n{outcome.right}\n" not in readme:
        messages = [message for status, message in right.values() if status == "failed"]
        outcome.problems["README's example"] = ": ".join([outcome.right or "no tests", *messages[:1]])
    if failed != [CAUGHT]:
        outcome.problems["README's broken example"] = f"failed: {', '.join(failed) or 'nothing'}"


def add_tests(outcome: Outcome, tests: dict[str, tuple[str, str]]) -> None:
    outcome.counts = dict(Counter(outcome.counts) + Counter(status for status, _ in tests.values()))
    outcome.problems |= {name: message for name, (status, message) in tests.items() if status == "failed"}


def current_commit() -> str:
    """Return the commit, followed by "+" if a file differs from it, but for results/versions.md, which a run writes."""
    git = ["git", "-C", str(ROOT)]
    commit = subprocess.run([*git, "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True, check=True)
    changes = subprocess.run(
        [*git, "status", "--porcelain", "--", ".", ":!results/versions.md"], capture_output=True, text=True, check=True
    )
    return commit.stdout.strip() + "+" * bool(changes.stdout)


def earlier(name: str, today: str, commit: str) -> Outcome | None:
    """Return the outcome of a row that ran on this day and commit, unless its environment could not be created."""
    file = RESULTS / f"{name}.json"
    if commit.endswith("+") or not file.is_file():
        return None
    outcome = Outcome(**json.loads(file.read_text("utf-8")))
    return outcome if (outcome.date, outcome.commit) == (today, commit) and outcome.versions else None


def render(outcomes: Sequence[Outcome]) -> str:
    """Return the table and what failed, in Markdown."""
    head = ["row", "Python", "torch", *PACKAGES, "README's example", "broken", "passed", "failed", "skipped", "minutes"]
    rows = [head, ["---"] * len(head), *(outcome.cells() for outcome in outcomes)]
    ran = sorted({f"{outcome.date}, commit {outcome.commit}" for outcome in outcomes})
    failed = [line for outcome in outcomes for line in render_problems(outcome)]
    lines = [f"Run on {'; '.join(ran)}.", "", *(f"| {' | '.join(cells)} |" for cells in rows), ""]
    return "\n".join([*lines, *(["What failed:", "", *failed] if failed else ["Nothing failed."]), ""])


def render_problems(outcome: Outcome) -> list[str]:
    def quote(text: str) -> str:
        return f"`{text.replace('`', chr(39))[:200]}`" if text else "no message"

    lines = [f"* {outcome.row}: {quote(name)}: {quote(why)}" for name, why in outcome.problems.items()]
    return lines[:SHOWN] + [f"* {outcome.row}: and {len(lines) - SHOWN} more"] * (len(lines) > SHOWN)


def run_row(row: Row, outcome: Outcome, ready: str, workers: int, keep: bool) -> Outcome:
    """Run a row, and store and return its outcome."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    log = RESULTS / f"{row.name}.log"
    log.unlink(missing_ok=True)
    print(f"{row.name}: its output is in {log.relative_to(ROOT)}", file=sys.stderr, flush=True)
    environment = {name: os.environ[name] for name in os.environ.keys() - DROPPED}
    if ready:
        environment["PYTHONPATH"] = str(ROOT)  # another checkout may be installed there
    began = time.monotonic()
    try:
        Runner(log, workers, environment).try_row(row, ready, outcome)
    finally:
        if not keep:
            shutil.rmtree(ENVIRONMENTS / row.name, ignore_errors=True)
    outcome.seconds = time.monotonic() - began
    (RESULTS / f"{row.name}.json").write_text(json.dumps(asdict(outcome), indent=1) + "\n", "utf-8")
    return outcome


def parse_ready(text: str) -> tuple[str, str]:
    """Parse ROW=PATH, the interpreter of an environment in which everything is installed."""
    name, _, path = text.partition("=")
    if name not in ROWS or not shutil.which(path):
        raise argparse.ArgumentTypeError(f"{text!r} is not ROW=PATH, with one of {', '.join(ROWS)} and an interpreter")
    return name, os.path.abspath(path)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m conformance.versions", description=__doc__)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"{', '.join(ROWS)}; all but nightly if none is named")
    parser.add_argument("--page", type=Path, help="the page whose table is replaced")
    parser.add_argument("--again", action="store_true", help="also run rows that already ran today on this commit")
    parser.add_argument("--keep", action="store_true", help="do not remove the environments")
    parser.add_argument("--workers", type=int, default=2, help="processes of pytest-xdist (default: 2)")
    parser.add_argument(
        "--python", type=parse_ready, action="append", default=[], metavar="ROW=PATH", help="a ready environment"
    )
    options = parser.parse_args(arguments)
    if unknown := set(options.rows) - set(ROWS):
        parser.error(f"no row {', '.join(sorted(unknown))} (choose from {', '.join(ROWS)})")
    if options.workers < 1:
        parser.error(f"--workers={options.workers} is not a number of processes; use 1 or more")
    if options.page and not options.page.is_file():
        parser.error(f"--page={options.page} is not a page; pass results/versions.md")
    selected = options.rows or [row.name for row in USUAL]
    if unused := set(dict(options.python)) - set(selected):
        parser.error(f"--python names {', '.join(sorted(unused))}, which is not run")
    if not (ROOT / ".git").exists():
        parser.error("this is not a git checkout, and the table names the commit; clone the repository")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # else pytest goes on, and the environment stays
    commit, outcomes = current_commit(), []
    for row in map(ROWS.__getitem__, selected):
        today = date.today().isoformat()
        outcome = None if options.again else earlier(row.name, today, commit)
        if outcome is None:
            ready = dict(options.python).get(row.name, "")
            outcome = run_row(row, Outcome(row.name, today, commit), ready, options.workers, options.keep)
        print(f"{row.name}: {len(outcome.problems)} problems", file=sys.stderr, flush=True)
        outcomes.append(outcome)
    print(render(outcomes))
    if options.page:
        options.page.write_text(replace_table(options.page.read_text("utf-8"), render(outcomes), BEGIN), "utf-8")
    return 1 if any(outcome.problems for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
