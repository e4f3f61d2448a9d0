"""The workflows are valid, secure, consistent with this repository, and the shell in their steps works."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import TINY

ROOT = Path(__file__).parents[2]
CI = ROOT / ".github/workflows/ci.yml"
NIGHTLY = ROOT / ".github/workflows/nightly.yml"
CALLER = ROOT / "examples/downstream/.github/workflows/nightly.yml"
WORKFLOWS = (CI, NIGHTLY, CALLER)
TOOLS = Path(sys.executable).parent


def read(path: Path) -> dict[str, Any]:
    return yaml.load(path.read_text("utf-8"), Loader=yaml.BaseLoader)  # keeps "on", which YAML 1.1 reads as true


def steps(path: Path) -> Iterator[dict[str, Any]]:
    for job in read(path)["jobs"].values():
        yield from job.get("steps", ())


def step(path: Path, name: str) -> dict[str, Any]:
    return next(found for found in steps(path) if found.get("name") == name)


def run_command(command: list[str | Path], **options: Any) -> tuple[int, str]:
    """Run a command; return its exit status and its output, followed by its standard error."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    return done.returncode, done.stdout + done.stderr


def test_workflows_match_the_schema_of_github():
    assert run_command([TOOLS / "check-jsonschema", "--builtin-schema", "vendor.github-workflows", *WORKFLOWS])[0] == 0


def test_a_workflow_that_does_not_match_the_schema_is_found(tmp_path):
    broken = tmp_path / "ci.yml"
    broken.write_text(CI.read_text().replace("timeout-minutes: 20", "timeout_minutes: 20"))
    code, text = run_command([TOOLS / "check-jsonschema", "--builtin-schema", "vendor.github-workflows", broken])
    assert code
    assert "timeout_minutes" in text


def test_zizmor_finds_nothing_in_the_workflows():
    code, text = run_command([TOOLS / "zizmor", "--offline", "--no-progress", "--quiet", *WORKFLOWS])
    assert code == 0, text


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: str(path.relative_to(ROOT)))
def test_shellcheck_finds_nothing_in_the_steps(path):
    for found in steps(path):
        if "run" in found:
            assert "${{" not in found["run"], "inputs must be passed as environment variables, never as shell code"
            assert run_command([TOOLS / "shellcheck", "--shell=bash", "-"], input=found["run"]) == (0, "")


def test_shellcheck_finds_nothing_in_the_downstream_script():
    assert run_command([TOOLS / "shellcheck", ROOT / "examples/downstream.sh"]) == (0, "")


def test_ci_runs_existing_targets():
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    scripts = [found["run"] for found in steps(CI) if "run" in found]
    used = set(re.findall(r"make (\w+)", "\n".join(scripts)))
    assert used
    assert used <= set(targets)
    assert any("examples/downstream.sh" in script for script in scripts)


def test_ci_covers_the_oldest_supported_python_and_torch_on_both_sides_of_the_pinned_version():
    matrix = read(CI)["jobs"]["test"]["strategy"]["matrix"]
    assert f'requires-python = ">={matrix["python"][0]}"' in (ROOT / "pyproject.toml").read_text()
    pinned = re.search(r"^torch==(.*)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[1]
    oldest, newest = (tuple(map(int, version.split("."))) for version in matrix["torch"])
    assert oldest < tuple(map(int, pinned.split("."))) <= newest


@pytest.mark.parametrize("path", [CI, CALLER], ids=["ours", "downstream"])
def test_callers_set_existing_inputs_and_the_required_permissions(path):
    call = next(job for job in read(path)["jobs"].values() if "nightly.yml" in job.get("uses", ""))
    assert set(call["with"]) <= set(read(NIGHTLY)["on"]["workflow_call"]["inputs"])
    assert call["permissions"] == read(NIGHTLY)["permissions"]


@dataclass
class Runner:
    """A stand-in for GitHub's runner: runs the shell of a step as GitHub does, with the commands that a test adds."""

    folder: Path

    def add_command(self, name: str, text: str) -> None:
        """Add a command to PATH: a Python script with this text."""
        path = self.folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!{sys.executable}\n{text}")
        path.chmod(0o755)

    def run(self, name: str, **environ: str) -> tuple[int, str]:
        """Run the step of this name; return its exit status and its output."""
        script = self.folder / "step.sh"
        script.write_text(step(NIGHTLY, name)["run"])
        names = {"GITHUB_OUTPUT": "output", "GITHUB_STEP_SUMMARY": "summary", "GITHUB_PATH": "path", "RUNNER_TEMP": ""}
        paths = os.pathsep.join([str(self.folder / "bin"), str(TOOLS), os.environ["PATH"]])
        environ |= {name: os.environ[name] for name in ("PYTHONPATH", "TMPDIR") if name in os.environ}
        environ = {variable: str(self.folder / file) for variable, file in names.items()} | environ | {"PATH": paths}
        return run_command(["bash", "--noprofile", "--norc", "-eo", "pipefail", script], env=environ, cwd=self.folder)

    def written(self, name: str) -> str:
        """Return what steps wrote to a file, or an empty string."""
        path = self.folder / name
        return path.read_text() if path.exists() else ""


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    return Runner(tmp_path)


GH = """
import json, os, sys
import jq  # stands in for the jq built into gh

answers = json.loads(os.environ["ANSWERS"])
arguments = sys.argv[1:]
if arguments[:2] == ["run", "list"]:
    options = dict(zip(arguments[2::2], arguments[3::2]))
    assert options["--workflow"] == "Nightly" and options["--branch"] == "main", options
    answer = answers["runs"][options["--status"]]
else:
    assert arguments[0] == "api" and arguments[1].endswith("?name=fsdp-report"), arguments
    answer = {"artifacts": answers["artifacts"].get(arguments[1].split("/")[5], [])}
for found in jq.compile(arguments[arguments.index("--jq") + 1]).input_value(answer):
    print(found)
"""
RUNS = {
    "completed": [
        {"databaseId": 9, "event": "schedule"},
        {"databaseId": 8, "event": "pull_request"},
        {"databaseId": 7, "event": "schedule"},
        {"databaseId": 6, "event": "schedule"},
        {"databaseId": 5, "event": "workflow_dispatch"},
    ],
    "success": [{"databaseId": 5, "event": "workflow_dispatch"}],
}
AVAILABLE, EXPIRED = [{"id": 1, "expired": False}], [{"id": 2, "expired": True}]


@pytest.mark.parametrize(
    ("compared", "artifacts", "found"),
    [
        ("completed", {"9": AVAILABLE, "8": AVAILABLE, "7": EXPIRED, "6": AVAILABLE, "5": AVAILABLE}, "run=6\n"),
        ("success", {"6": AVAILABLE, "5": AVAILABLE}, "run=6\npassed=5\n"),
        ("success", {"6": EXPIRED, "5": AVAILABLE}, "run=5\n"),
        ("success", {"6": AVAILABLE}, "run=6\npassed=\n"),
        ("completed", {"9": AVAILABLE, "8": AVAILABLE}, ""),
        ("success", {}, ""),
    ],
    ids=["the previous one", "and one that passed", "the previous one passed", "none passed", "only a fork's", "none"],
)
def test_the_earlier_runs_are_found(runner: Runner, compared, artifacts, found):
    runner.add_command("gh", GH)
    code, text = runner.run(
        "Find the last runs with a report",
        ANSWERS=json.dumps({"runs": RUNS, "artifacts": artifacts}),
        GITHUB_WORKFLOW="Nightly",
        GITHUB_REF_NAME="main",
        GITHUB_RUN_ID="9",
        GH_REPO="o/r",
        COMPARE_WITH=compared,
        NAME="fsdp-report",
    )
    assert code == 0, text
    assert runner.written("output") == found
    assert ("nothing is compared" in text) == (not found)


def test_by_default_a_run_is_compared_with_the_last_that_passed():
    assert read(NIGHTLY)["on"]["workflow_call"]["inputs"]["compare-with"]["default"] == "success"
    assert "compare-with" not in next(job for job in read(CALLER)["jobs"].values() if "with" in job)["with"]


def test_a_refused_request_fails_instead_of_comparing_nothing(runner: Runner):
    runner.add_command("gh", "raise SystemExit('HTTP 403')")
    given = {"COMPARE_WITH": "completed", "NAME": "x", "GITHUB_WORKFLOW": "x", "GITHUB_REF_NAME": "main"}
    code, text = runner.run("Find the last runs with a report", **given)
    assert code
    assert "HTTP 403" in text
    assert "nothing is compared" not in text


def test_the_virtual_environment_is_created_and_first_in_path(runner: Runner):
    code, text = runner.run("Create a virtual environment")
    assert code == 0, text
    assert Path(runner.written("path").strip(), "python").exists()


def test_installing_stops_at_the_first_failing_line(runner: Runner):
    code, text = runner.run("Install", INSTALL="echo one\nfalse\necho two\n")
    assert (code, text) == (1, "one\n")


def test_the_summary_is_shown_or_its_absence_explained(runner: Runner):
    assert runner.run("Show the summary")[0] == 0
    assert runner.written("summary") == "pytest wrote no report: see the previous step.\n"
    (runner.folder / "fsdp-report").mkdir()
    (runner.folder / "fsdp-report" / "summary.md").write_text("| all | passed |\n")
    assert runner.run("Show the summary")[0] == 0
    assert runner.written("summary").endswith("\n| all | passed |\n")
    assert runner.run("Clean up")[0] == 0
    assert not (runner.folder / "fsdp-report").exists()


PYTHON = """
import os, sys
print([word.replace(os.environ["RUNNER_TEMP"], "TEMP") for word in sys.argv[1:]], os.environ["PYTEST_ADDOPTS"])
assert "WORLD_SIZE" not in os.environ
raise SystemExit(1)
"""


@pytest.mark.parametrize("before", [False, True], ids=["first run", "later run"])
@pytest.mark.parametrize("gpu", ["true", "false"])
@pytest.mark.parametrize(("compared", "folder"), [("success", "fsdp-before"), ("completed", "fsdp-before/previous")])
def test_pytest_compares_if_there_is_a_previous_report(runner: Runner, before, gpu, compared, folder):
    runner.add_command("python", PYTHON)
    if before:
        (runner.folder / "fsdp-before" / "previous").mkdir(parents=True)
    inputs = {"TEST_PATH": "my tests", "WORLD_SIZE": "1,2", "FAIL_ON": "any", "PYTEST_ADDOPTS": "-m 'not slow'"}
    code, text = runner.run("Judge", REQUIRE_GPU=gpu, COMPARE_WITH=compared, **inputs)
    assert code == 1, "the step fails if pytest fails"
    expected = ["-m", "pytest", "my tests", "--fsdp-world-size=1,2", "--fsdp-report=TEMP/fsdp-report"]
    expected += ["--fsdp-require-gpu"] if gpu == "true" else []
    expected += [f"--fsdp-compare=TEMP/{folder}", "--fsdp-fail-on=any"] if before else []
    assert text == f"{expected} -m 'not slow'\n"


LOADER = """
@fsdp_conformance(only=["params_equal_reference", "requires_grad_matches_reference"])
def test_it(fsdp):
    subject = load(fsdp, reference=build)
    with torch.no_grad():
        subject.model.weight.to_local().add_({weight})
    subject.model.bias.requires_grad_({grad})
    return subject
"""


def night(runner: Runner, weight: int, grad: bool = True, **given: str) -> tuple[int, str]:
    """Run the steps of the job from the tests on, with the reports that earlier nights left.

    As the artifacts are downloaded, there is one of the previous night, and one of the last that passed.
    """
    text = TINY.format(folder=str(runner.folder)) + LOADER.format(weight=weight, grad=grad)
    (runner.folder / "test_it.py").write_text(text)
    before = runner.folder / "fsdp-before"
    for name in ("previous", "passed"):
        if (runner.folder / name).exists():
            shutil.copytree(runner.folder / name, before / name)
    inputs = {"TEST_PATH": "test_it.py", "WORLD_SIZE": "2", "FAIL_ON": "regression", "REQUIRE_GPU": "false"} | given
    code, text = runner.run("Judge", **{"PYTEST_ADDOPTS": "-p no:cacheprovider", "COMPARE_WITH": "success"} | inputs)
    assert runner.run("Show the summary")[0] == 0
    for name in ("previous", "passed")[: 1 if code else 2]:
        if (runner.folder / "fsdp-report").exists():
            shutil.rmtree(runner.folder / name, ignore_errors=True)
            shutil.copytree(runner.folder / "fsdp-report", runner.folder / name)
    shutil.rmtree(before, ignore_errors=True)
    return code, text


@pytest.mark.nightly
def test_nights_find_known_new_and_fixed_failures(runner: Runner):
    code, output = night(runner, weight=1)
    assert code == 1, output
    assert "❌ fsdp conformance: 1 check failed, 1 passed" in runner.written("summary")
    code, output = night(runner, weight=1)
    assert code == 1, "as none passed, nothing is excused"
    assert "no earlier run passed (1 read)" in output
    code, output = night(runner, weight=1, COMPARE_WITH="completed")
    assert code == 0, output
    assert "1 known since" in runner.written("summary").replace("&#58;", ":")
    code, output = night(runner, weight=1, grad=False)
    assert code == 1, output
    assert "1 new failure, 1 known since" in output
    code, output = night(runner, weight=1, grad=False)
    assert code == 1, "it stays red until it is fixed"
    assert "1 new failure, 1 known since" in output
    assert "test_it.py::test_it: broken since" in output
    assert "the last run that passed (2 read)" in output
    code, output = night(runner, weight=0)
    assert code == 0, output
    assert "1 fixed since" in output
