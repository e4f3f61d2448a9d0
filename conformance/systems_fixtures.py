"""Fixtures shared by the tests of real released packages."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from conformance.contract import judge_all
from conformance.released import count_lines, recipe_of
from pytest_fsdp_meta.judging.registry import OBSERVATIONS
from pytest_fsdp_meta.loader.call import Call
from pytest_fsdp_meta.reports.terminal import describe_failure
from pytest_fsdp_meta.trial import ON_RANKS, Trial
from pytest_fsdp_meta.worlds import ForkServerEngine, Sources, WorldSpec

Failures = dict[str, str]
LONGEST = 15
"""Lines of a recipe, without imports and blank lines."""


@pytest.fixture(scope="module")
def checkpoints(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a tiny checkpoint for each of the ARCHITECTURES that the test module names."""
    from fixtures.tiny import save_tiny  # not every package's environment has transformers

    names = request.module.ARCHITECTURES
    return {name: save_tiny(name, tmp_path_factory.mktemp("checkpoint") / name) for name in names}


@pytest.fixture(scope="session")
def failures_of() -> Callable[..., Failures]:
    """Return ``failures_of(loader, world, **arguments)``: the message of each check that fails, in one line.

    Tests use it where the message matters: ``xfail`` accepts any finding of its check.
    """

    def run(function: Callable[..., Any], world: WorldSpec, **arguments: Any) -> Failures:
        trial = Trial(world, ForkServerEngine(Sources(tuple(sys.path)), ON_RANKS), steps=3, tolerance={})
        packed = {name: cloudpickle.dumps(value) for name, value in arguments.items()}
        evidence = trial.observe(Call(cloudpickle.dumps(function), packed, "fsdp"), OBSERVATIONS)
        failed = {id: v for id, v in judge_all(evidence).items() if v.status in ("failed", "error")}
        return {id: " ".join(describe_failure(v, "world", "command").split()) for id, v in failed.items()}

    return run


@pytest.fixture
def recipe(tmp_path: Path) -> Callable[[str], str]:
    """Return ``recipe(system)``: run examples/frameworks/test_SYSTEM.py as a user would; return pytest's output.

    The test has to pass, and the file has to be short.
    """

    def run(system: str) -> str:
        file = tmp_path / "test_recipe.py"  # outside of the repository, whose settings a user does not have
        file.write_text(recipe_of(system), "utf-8")
        assert count_lines(recipe_of(system)) <= LONGEST
        done = subprocess.run(
            [sys.executable, "-m", "pytest", file.name, "-rs", "-p", "no:cacheprovider", "--color=no"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "no parameter is sharded" not in done.stdout
        return done.stdout

    return run
