"""Run what needs a GPU, step by step: ``make gpu``, or one command in the folder that ``make gpu-bundle`` makes.

    python3 build/gpu --out RESULTS --seconds 570

The steps that decide most come first, none that fails stops the others, and each writes its output and its result to
RESULTS when it ends, so that a run that is cut off leaves what it had: gpu.md has the table. The next run with these
results (``--resume``) runs what has not run yet, then what failed, and not what passed. It exits with 0 if all steps
passed that this machine has GPUs for, with 1 if not, and with 2 and one line if nothing can run.

It imports the standard library only, because in the bundle it begins by making an environment with what the machine
lacks. ``--dry-run`` takes the same steps on the CPU, to try them where there is no GPU.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import time
import venv
import xml.etree.ElementTree as xml
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path

from benchmarks.gpu_steps import OWN, STEPS, Step

ROOT = Path(__file__).resolve().parents[1]
WHEELS, ENVIRONMENT = ROOT / "wheels", ROOT / "env"
"""Of the bundle: the package and what it needs, and where they are installed; a checkout has none."""
LEAST = 25.0
"""Seconds without which a step is not begun."""


class Impossible(Exception):
    """Nothing can run here; the message is one line."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of one step; ``printed`` is the output of a step without tests."""

    counts: dict[str, int]
    seconds: float
    bad: list[str]
    dry: bool = False
    printed: str = ""


@dataclass
class Run:
    """A run on this machine: where results go, the GPUs that there are or, in a dry run, that the CPU stands for."""

    out: Path
    gpus: int
    dry: bool = False
    ends: float = float("inf")
    """The time, on the monotonic clock, after which nothing runs."""
    facts: dict[str, str] = field(default_factory=dict)

    def all(self, steps: Sequence[Step] = STEPS) -> bool:
        """Run the steps that have not passed, first those without a result. Return whether all have passed now."""
        fitting = [step for step in steps if step.gpus <= self.gpus]
        outcomes = {step.name: self.result_of(step) for step in fitting}
        for step in sorted(fitting, key=lambda step: outcomes[step.name] is not None):
            outcome = outcomes[step.name]
            if outcome is not None and not outcome.bad:
                print(f"{step.name}: passed before", flush=True)
            elif self.ends - time.monotonic() < LEAST:
                print(f"{step.name}: not run, no time is left", flush=True)
            else:
                outcomes[step.name] = self.step(step)
            (self.out / "gpu.md").write_text(self.page(steps, outcomes), "utf-8")
        return all(outcome is not None and not outcome.bad for outcome in outcomes.values())

    def result_of(self, step: Step) -> Outcome | None:
        """Return the result of an earlier run; one on the CPU says nothing about a GPU."""
        file = self.out / f"{step.file}.json"
        found = Outcome(**json.loads(file.read_text("utf-8"))) if file.exists() else None
        return found if found and found.dry == self.dry else None

    def step(self, step: Step) -> Outcome:
        """Run the step with its output in a file, and write its result beside it."""
        report, output = self.out / f"{step.file}.xml", self.out / f"{step.file}.txt"
        command = [sys.executable, *self.arguments(step)]
        if "pytest" in command:
            command.append(f"--junitxml={report}")
        began = time.monotonic()
        with output.open("w") as file:
            limit = min(step.seconds * (10 if self.dry else 1), self.ends - began - 10)
            status = run(command, file, limit, {"GPU_DRY_RUN": str(self.gpus)} if self.dry else {})
        counts, bad = read(report) if report.exists() else ({}, [])
        report.unlink(missing_ok=True)
        said = output.read_text("utf-8", errors="replace")
        last = said.strip().rpartition("\n")[2][:300]
        if status is None:
            bad.append(
                f"was ended after {limit:.0f} s{', as no time was left' if limit < step.seconds else ''}: {last}"
            )
        elif status != 0 and not bad:
            bad.append(f"ended with {status}: {last}")
        elif "pytest" in command and not counts.get("passed") and not (self.dry and counts.get("skipped")):
            bad.append(f"no test passed: {last}")
        bad += left_on_gpus()
        outcome = Outcome(counts, time.monotonic() - began, bad, self.dry, "" if counts or bad else said)
        (self.out / f"{step.file}.json").write_text(json.dumps(asdict(outcome), indent=1), "utf-8")
        print(f"{step.name}: {'failed' if bad else 'passed'}, {outcome.seconds:.0f} s {counts or ''}", flush=True)
        print(*(f"    {line}" for line in bad[:12]), sep="\n", end="\n" if bad else "", flush=True)
        return outcome

    def arguments(self, step: Step) -> Iterator[str]:
        """Yield the arguments of Python; in a dry run those that ask for a GPU ask for the CPU."""
        for argument in step.arguments:
            if not self.dry or argument != OWN:
                yield argument.replace("=cuda", "=cpu") if self.dry else argument

    def page(self, steps: Sequence[Step], outcomes: dict[str, Outcome | None]) -> str:
        """Return the results in Markdown: the machine, the steps, what those that failed mean, and the times."""
        on = "a dry run on the CPU: this has not run on a GPU" if self.dry else f"GPUs: {self.gpus}"
        return "\n".join(
            [
                *(f"# {datetime.date.today()}, {on}", ""),
                *("| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in self.facts.items()), ""),
                *("| step | passed | failed | error | skipped | seconds |", "|---|---|---|---|---|---|"),
                *(self.row(step, outcomes.get(step.name)) for step in steps),
                *(line for step in steps for line in self.details(step, outcomes.get(step.name))),
                "",
            ]
        )

    def row(self, step: Step, outcome: Outcome | None) -> str:
        if outcome is None:
            why = f"needs {step.gpus} GPUs" if step.gpus > self.gpus else "not run yet"
            return f"| {step.name} | {why} | | | | |"
        ran = outcome.counts or {"failed" if outcome.bad else "passed": 1}
        counts = " | ".join(str(ran.get(kind, 0)) for kind in ("passed", "failed", "error", "skipped"))
        return f"| {step.name} | {counts} | {outcome.seconds:.0f} |"

    def details(self, step: Step, outcome: Outcome | None) -> list[str]:
        """Return what failed in a step, what that means and how to run it again, or what it has printed."""
        if outcome is None:
            return []
        if not outcome.bad:
            return ["", f"**{step.name}**", "", outcome.printed.strip()] if outcome.printed else []
        again = shlex.join(["python", *self.arguments(step)])
        head = f"**{step.name}** failed. It means: {step.red}. Run it again: `{again}`"
        return ["", head, "", *(f"* {line}" for line in outcome.bad)]


def run(command: list[str], output: object, limit: float, environ: dict[str, str]) -> int | None:
    """Return the exit status, or None if it took too long; then pytest gets SIGINT, and writes what it has."""
    given = {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    # Where no DNS answers, torch waits for it at each connection of a TCPStore, and warns in the output of ranks.
    given |= {"RES_OPTIONS": "timeout:1 attempts:1", "TORCH_CPP_LOG_LEVEL": "ERROR", **environ}
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, env={**inherited, **given}, start_new_session=True
    )  # type: ignore[call-overload]
    try:
        return int(process.wait(limit))
    except subprocess.TimeoutExpired:
        return None
    finally:  # after a signal to this process, too
        for number in (signal.SIGINT, signal.SIGKILL):
            if process.poll() is None:
                os.killpg(process.pid, number)
                try:
                    process.wait(8)
                except subprocess.TimeoutExpired:
                    continue


def read(report: Path) -> tuple[dict[str, int], list[str]]:
    """Return how many tests of a JUnit file passed and so on, and a line for each that did not."""
    counts = {"passed": 0, "failed": 0, "error": 0, "skipped": 0}
    bad = []
    for case in xml.parse(report).iter("testcase"):
        found = {child.tag: child for child in case}
        tag = next((tag for tag in ("failure", "error", "skipped") if tag in found), "passed")
        counts["failed" if tag == "failure" else tag] += 1
        if tag in ("failure", "error"):
            message = found[tag].get("message", "").strip().partition("\n")[0]
            bad.append(f"{case.get('classname')}::{case.get('name')}: {message[:300]}")
    return counts, bad


def nvidia_smi(query: str) -> list[str]:
    """Return the lines of an answer of nvidia-smi; none where there is none."""
    try:
        command = ["nvidia-smi", query, "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines()


def left_on_gpus() -> list[str]:
    """Return the Python processes that still use a GPU; ranks take a moment to end."""
    left: list[str] = []
    for _ in range(20):
        left = [line for line in nvidia_smi("--query-compute-apps=pid,process_name") if "python" in line]
        if not left:
            break
        time.sleep(0.5)
    return [f"still uses a GPU after the step: process {line}" for line in left]


def machine() -> tuple[int, dict[str, str]]:
    """Return the number of GPUs that torch finds, and facts. A separate process asks: this one has no torch."""
    code = (
        "import json, torch; n = torch.cuda.device_count(); print(json.dumps([n, {'torch': torch.__version__, "
        "'CUDA': str(torch.version.cuda), 'NCCL': str(torch.cuda.nccl.version()) if n else 'not asked'}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode:
        raise Impossible(f"torch does not work here: {done.stderr.strip().rpartition(chr(10))[2]}")
    gpus, versions = json.loads(done.stdout)
    facts = {
        "GPUs (name, driver, memory)": "; ".join(nvidia_smi("--query-gpu=name,driver_version,memory.total")) or "none",
        **versions,
        "Python": platform.python_version(),
        "CPU cores": str(os.cpu_count()),
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "not set"),
    }
    return gpus, facts


def complete_environment(ends: float) -> None:
    """In the bundle, go on in an environment of its own: this Python's packages, and from the wheels what it lacks."""
    if not WHEELS.is_dir() or Path(sys.prefix) == ENVIRONMENT:
        return
    python = ENVIRONMENT / "bin" / "python"
    if not (ENVIRONMENT / "complete").exists():
        if find_spec("torch") is None:
            raise Impossible(f"{sys.executable} has no torch; run this with a Python that has a CUDA build of torch")
        shutil.rmtree(ENVIRONMENT, ignore_errors=True)
        venv.EnvBuilder(system_site_packages=True, with_pip=find_spec("pip") is None).create(ENVIRONMENT)
        # "System" is where this Python was installed; its packages may be in an environment that was made from that.
        found = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
        next(ENVIRONMENT.glob("lib/python*/site-packages")).joinpath("machine.pth").write_text("\n".join(found))
        wheel = next(WHEELS.glob("pytest_fsdp_meta-*.whl"))
        install = ["-m", "pip", "install", "--quiet", "--no-index", "--no-compile", f"--find-links={WHEELS}"]
        command = [str(python), *install, f"{wheel}[conformance]"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            said = [line for line in (done.stderr + done.stdout).splitlines() if "ERROR" in line] or ["pip failed"]
            what = said[-1].replace("ERROR: ", "").replace("No matching distribution found for ", "").partition(";")[0]
            raise Impossible(f"missing here and in {WHEELS} for Python {platform.python_version()}: {what}")
        (ENVIRONMENT / "complete").touch()
    os.execv(python, [str(python), str(ROOT), *sys.argv[1:], f"--seconds={ends - time.monotonic()}"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    out = os.environ.get("OUT") or ROOT / ("results" if WHEELS.is_dir() else "build/gpu-results")
    parser.add_argument("--out", type=Path, default=Path(out), help="results (default: $OUT, else %(default)s)")
    parser.add_argument("--resume", type=Path, help="another folder, with results of an earlier run")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end after this time (default: no limit)")
    parser.add_argument("--dry-run", action="store_true", help="take the steps on the CPU; says nothing about a GPU")
    parser.add_argument("--gpus", type=int, default=1, help="in a dry run, how many GPUs the CPU stands for")
    options = parser.parse_args()
    ends = time.monotonic() + options.seconds
    try:
        complete_environment(ends)
        gpus, facts = machine()
        if not gpus and not options.dry_run:
            raise Impossible("this machine has no GPU that torch can use, so nothing can run; try --dry-run on the CPU")
    except Impossible as problem:
        print(problem, file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the step, too
    options.out.mkdir(parents=True, exist_ok=True)
    if options.resume:
        shutil.copytree(options.resume, options.out, dirs_exist_ok=True)
    done = Run(options.out, options.gpus if options.dry_run else gpus, options.dry_run, ends, facts)
    if options.dry_run:
        print("dry run on the CPU: this says nothing about a GPU", flush=True)
    return int(not done.all())


if __name__ == "__main__":
    sys.exit(main())
