"""The workflows: valid, without a known weakness, true of this repository, and their shell does what it says."""

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
    return yaml.load(path.read_text("utf-8"), Loader=yaml.BaseLoader)  # keeps "on", which YAML 1.1 takes for true


def steps(path: Path) -> Iterator[dict[str, Any]]:
    for job in read(path)["jobs"].values():
        yield from job.get("steps", ())


def step(path: Path, name: str) -> dict[str, Any]:
    return next(one for one in steps(path) if one.get("name") == name)


def told(command: list[str | Path], **options: Any) -> tuple[int, str]:
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    return done.returncode, done.stdout + done.stderr


def test_they_have_the_form_that_github_takes():
    assert told([TOOLS / "check-jsonschema", "--builtin-schema", "vendor.github-workflows", *WORKFLOWS])[0] == 0


def test_a_form_that_github_does_not_take_is_told(tmp_path):
    broken = tmp_path / "ci.yml"
    broken.write_text(CI.read_text().replace("timeout-minutes: 20", "timeout_minutes: 20"))
    code, text = told([TOOLS / "check-jsonschema", "--builtin-schema", "vendor.github-workflows", broken])
    assert code
    assert "timeout_minutes" in text


def test_they_have_no_weakness_that_zizmor_knows():
    code, text = told([TOOLS / "zizmor", "--offline", "--no-progress", "--quiet", *WORKFLOWS])
    assert code == 0, text


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: str(path.relative_to(ROOT)))
def test_their_shell_has_no_weakness_that_shellcheck_knows(path):
    for one in steps(path):
        if "run" in one:
            assert "${{" not in one["run"], "what a workflow is given comes by the environment, and is never shell"
            assert told([TOOLS / "shellcheck", "--shell=bash", "-"], input=one["run"]) == (0, "")


def test_the_script_for_the_downstream_repository_has_none_either():
    assert told([TOOLS / "shellcheck", ROOT / "examples/downstream.sh"]) == (0, "")


def test_ci_runs_what_there_is():
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    runs = [one["run"] for one in steps(CI) if "run" in one]
    asked = set(re.findall(r"make (\w+)", "\n".join(runs)))
    assert asked
    assert asked <= set(targets)
    assert any("examples/downstream.sh" in run for run in runs)


def test_ci_begins_with_the_oldest_python_that_is_promised_and_goes_beyond_the_torch_that_is_pinned():
    matrix = read(CI)["jobs"]["test"]["strategy"]["matrix"]
    assert f'requires-python = ">={matrix["python"][0]}"' in (ROOT / "pyproject.toml").read_text()
    pinned = re.search(r"^torch==(.*)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[1]
    oldest, newest = (tuple(map(int, version.split("."))) for version in matrix["torch"])
    assert oldest < tuple(map(int, pinned.split("."))) <= newest


@pytest.mark.parametrize("path", [CI, CALLER], ids=["ours", "downstream"])
def test_a_caller_gives_inputs_that_there_are_and_the_rights_that_are_needed(path):
    called = next(job for job in read(path)["jobs"].values() if "nightly.yml" in job.get("uses", ""))
    assert set(called["with"]) <= set(read(NIGHTLY)["on"]["workflow_call"]["inputs"])
    assert called["permissions"] == read(NIGHTLY)["permissions"]


@dataclass
class Runner:
    """A machine of GitHub's: a step's shell runs as there, beside the commands that a test has put into ``bin``."""

    folder: Path

    def command(self, name: str, text: str) -> None:
        path = self.folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!{sys.executable}\n{text}")
        path.chmod(0o755)

    def run(self, name: str, **environ: str) -> tuple[int, str]:
        script = self.folder / "step.sh"
        script.write_text(step(NIGHTLY, name)["run"])
        names = {"GITHUB_OUTPUT": "output", "GITHUB_STEP_SUMMARY": "summary", "GITHUB_PATH": "path", "RUNNER_TEMP": ""}
        paths = os.pathsep.join([str(self.folder / "bin"), str(TOOLS), os.environ["PATH"]])
        environ |= {name: os.environ[name] for name in ("PYTHONPATH", "TMPDIR") if name in os.environ}
        environ = {variable: str(self.folder / file) for variable, file in names.items()} | environ | {"PATH": paths}
        return told(["bash", "--noprofile", "--norc", "-eo", "pipefail", script], env=environ, cwd=self.folder)

    def written(self, name: str) -> str:
        path = self.folder / name
        return path.read_text() if path.exists() else ""


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    return Runner(tmp_path)


GH = """
import json, os, sys
import jq  # gh has one built in

answers = json.loads(os.environ["ANSWERS"])
arguments = sys.argv[1:]
if arguments[:2] == ["run", "list"]:
    asked = dict(zip(arguments[2::2], arguments[3::2]))
    assert asked["--workflow"] == "Nightly" and asked["--branch"] == "main", asked
    answer = answers["runs"][asked["--status"]]
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
KEPT, EXPIRED = [{"id": 1, "expired": False}], [{"id": 2, "expired": True}]


@pytest.mark.parametrize(
    ("status", "artifacts", "found"),
    [
        ("completed", {"9": KEPT, "8": KEPT, "7": EXPIRED, "6": KEPT, "5": KEPT}, "run=6\n"),
        ("success", {"6": KEPT, "5": KEPT}, "run=5\n"),
        ("completed", {"9": KEPT, "8": KEPT}, ""),
        ("completed", {}, ""),
    ],
    ids=["the last that left one", "the last that was green", "none but this one and a fork's", "none"],
)
def test_the_run_before_is_found(runner: Runner, status, artifacts, found):
    runner.command("gh", GH)
    code, text = runner.run(
        "Find the last run with a report",
        ANSWERS=json.dumps({"runs": RUNS, "artifacts": artifacts}),
        GITHUB_WORKFLOW="Nightly",
        GITHUB_REF_NAME="main",
        GITHUB_RUN_ID="9",
        GH_REPO="o/r",
        STATUS=status,
        NAME="fsdp-report",
    )
    assert code == 0, text
    assert runner.written("output") == found
    assert ("nothing is compared" in text) == (not found)


def test_a_question_that_github_refuses_is_no_first_night(runner: Runner):
    runner.command("gh", "raise SystemExit('HTTP 403')")
    code, text = runner.run("Find the last run with a report", STATUS="completed", NAME="x", GITHUB_WORKFLOW="x")
    assert code
    assert "HTTP 403" in text


def test_the_environment_is_new_and_first_in_the_path(runner: Runner):
    code, text = runner.run("Create a virtual environment")
    assert code == 0, text
    assert Path(runner.written("path").strip(), "python").exists()


def test_what_is_installed_fails_at_the_first_line_that_does(runner: Runner):
    code, text = runner.run("Install", INSTALL="echo one\nfalse\necho two\n")
    assert (code, text) == (1, "one\n")


def test_the_summary_is_shown_or_missed(runner: Runner):
    assert runner.run("Show the summary")[0] == 0
    assert runner.written("summary") == "pytest wrote no report: see the previous step.\n"
    (runner.folder / "fsdp-report").mkdir()
    (runner.folder / "fsdp-report" / "summary.md").write_text("| all | well |\n")
    assert runner.run("Show the summary")[0] == 0
    assert runner.written("summary").endswith("\n| all | well |\n")
    assert runner.run("Clean up")[0] == 0
    assert not (runner.folder / "fsdp-report").exists()


PYTHON = """
import os, sys
print([word.replace(os.environ["RUNNER_TEMP"], "TEMP") for word in sys.argv[1:]], os.environ["PYTEST_ADDOPTS"])
assert "WORLD_SIZE" not in os.environ
raise SystemExit(1)
"""


@pytest.mark.parametrize("before", [False, True], ids=["the first night", "a later night"])
@pytest.mark.parametrize("gpu", ["true", "false"])
def test_pytest_is_asked_to_compare_once_there_is_something_to_compare_with(runner: Runner, before, gpu):
    runner.command("python", PYTHON)
    if before:
        (runner.folder / "fsdp-before").mkdir()
        (runner.folder / "fsdp-before" / "report.json").write_text("{}")
    given = {"TEST_PATH": "my tests", "WORLD_SIZE": "1,2", "FAIL_ON": "any", "PYTEST_ADDOPTS": "-m 'not slow'"}
    code, text = runner.run("Judge", REQUIRE_GPU=gpu, **given)
    assert code == 1, "the step fails as pytest does"
    asked = ["-m", "pytest", "my tests", "--fsdp-world-size=1,2", "--fsdp-report=TEMP/fsdp-report"]
    asked += ["--fsdp-require-gpu"] if gpu == "true" else []
    asked += ["--fsdp-compare=TEMP/fsdp-before/report.json", "--fsdp-fail-on=any"] if before else []
    assert text == f"{asked} -m 'not slow'\n"


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
    """The steps of the job from the tests on, with the report that the night before has left."""
    text = TINY.format(folder=str(runner.folder)) + LOADER.format(weight=weight, grad=grad)
    (runner.folder / "test_it.py").write_text(text)
    report, before = runner.folder / "fsdp-report", runner.folder / "fsdp-before"
    if report.exists():
        report.replace(before)  # the artifact, kept and fetched
    given = {"TEST_PATH": "test_it.py", "WORLD_SIZE": "2", "FAIL_ON": "regression", "REQUIRE_GPU": "false"} | given
    code, text = runner.run("Judge", PYTEST_ADDOPTS="-p no:cacheprovider", **given)
    assert runner.run("Show the summary")[0] == 0
    if before.exists():
        shutil.rmtree(before)
    return code, text


def test_four_nights(runner: Runner):
    code, told = night(runner, weight=1)
    assert code == 1, told
    assert "❌ fsdp conformance: 1 kept, 1 broken" in runner.written("summary")
    code, told = night(runner, weight=1)
    assert code == 0, told
    assert "1 known since" in runner.written("summary").replace("&#58;", ":")
    code, told = night(runner, weight=1, grad=False)
    assert code == 1, told
    assert "1 new failure, 1 known since" in told
    code, told = night(runner, weight=0)
    assert code == 0, told
    assert "2 fixed since" in told


def test_a_night_without_gpus_is_told_in_one_line(runner: Runner):
    code, told = night(runner, weight=0, REQUIRE_GPU="true", CUDA_VISIBLE_DEVICES="")
    assert code
    assert "--fsdp-require-gpu" in told
    assert "Traceback" not in told
