"""The steps of ``make gpu``, which no machine of ours can run: that each still has its tests, and what is written."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks import gpu
from benchmarks.gpu import STEPS, Outcome, Step

GREEN = Outcome({"passed": 3, "failed": 0, "error": 0, "skipped": 1}, 12.3, [])
RED = Outcome({"passed": 2, "failed": 1}, 4.0, ["tests.gpu::test_x: boom"])


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_each_step_selects_tests(step: Step) -> None:
    arguments = [argument for argument in step.arguments if not argument.startswith("--fsdp")]
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", *arguments]
    found = subprocess.run(command, cwd=gpu.ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr


def test_the_first_failure_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The outcomes are hand-made; no GPU is used."""
    monkeypatch.setattr(gpu, "run", lambda step: RED if step is STEPS[1] else GREEN)
    outcomes = gpu.run_all(gpus=1)
    assert list(outcomes) == [STEPS[0].name, STEPS[1].name]
    lines = gpu.page(1, outcomes, []).splitlines()
    assert f"| {STEPS[0].name} | 3 | 0 | 0 | 1 | 12 |" in lines
    assert f"| {STEPS[2].name} | not run: an earlier step failed | | | | |" in lines
    assert f"| {STEPS[-1].name} | needs 8 GPUs | | | | |" in lines
    start = lines.index("* tests.gpu::test_x: boom") - 2
    assert lines[start].startswith(f"**{STEPS[1].name}** failed. It means: {STEPS[1].red}. Run it again: `pytest ")


def test_all_steps_run_on_eight_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "run", lambda step: GREEN)
    assert list(gpu.run_all(gpus=8)) == [step.name for step in STEPS]
