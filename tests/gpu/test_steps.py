"""The steps of ``make gpu``, which no machine of ours can run: that each still has its tests, and what is written."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import gpu
from benchmarks.gpu import Run
from benchmarks.gpu_steps import STEPS, Step

PRINTS = Step("prints", 20, "print", ("-c", "print('printed')"))
FAILS = Step("fails", 20, "division", ("-c", "1 / 0"))
HANGS = Step("hangs", 1, "sleep", ("-c", "import time; time.sleep(60)"))
LARGE = Step("large", 20, "", ("-c", ""), gpus=8)
SMALL = (PRINTS, FAILS, HANGS, LARGE)


@pytest.mark.nightly
@pytest.mark.parametrize("step", [s for s in STEPS if "pytest" in s.arguments], ids=lambda step: step.name)
def test_each_step_selects_tests(step: Step) -> None:
    arguments = [argument for argument in step.arguments if not argument.startswith("--fsdp")]
    command = [sys.executable, *arguments, "--collect-only"]
    found = subprocess.run(command, cwd=gpu.ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr


def test_a_failure_does_not_stop_the_steps_after_it(tmp_path: Path) -> None:
    assert not Run(tmp_path, gpus=1).all(SMALL)
    page = (tmp_path / "gpu.md").read_text("utf-8")
    assert "| prints | 1 | 0 | 0 | 0 |" in page
    assert "| fails | 0 | 1 | 0 | 0 |" in page
    assert "| large | needs 8 GPUs | | | | |" in page
    assert "* ended with 1: ZeroDivisionError: division by zero" in page
    assert "* was ended after 1 s" in page
    assert "**prints**\n\nprinted" in page
    assert "Run it again: `python -c '1 / 0'`" in page


def test_a_step_that_passed_is_not_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those without a result go first, so that failures never keep the rest from running."""
    run = Run(tmp_path, gpus=1)
    run.all((FAILS, PRINTS))
    capsys.readouterr()
    run.all((FAILS, PRINTS, HANGS))
    said = [line.split(",")[0] for line in capsys.readouterr().out.splitlines() if line[0] != " "]
    assert said == ["hangs: failed", "fails: failed", "prints: passed before"]


def test_nothing_begins_without_time(tmp_path: Path) -> None:
    assert not Run(tmp_path, gpus=1, ends=time.monotonic() + 5).all((PRINTS,))
    assert "| prints | not run yet |" in (tmp_path / "gpu.md").read_text("utf-8")


def test_a_dry_run_says_so_and_is_no_result_of_a_gpu(tmp_path: Path) -> None:
    assert Run(tmp_path, gpus=8, dry=True).all((PRINTS,))
    assert "a dry run on the CPU: this has not run on a GPU" in (tmp_path / "gpu.md").read_text("utf-8")
    assert Run(tmp_path, gpus=8).result_of(PRINTS) is None
    asked = [argument for step in STEPS for argument in Run(tmp_path, 8, dry=True).arguments(step)]
    assert not [argument for argument in asked if "cuda" in argument or "require-gpu" in argument]
