"""Lines that run on ranks are measured by coverage, without any configuration."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.conftest import Project
from tests.world_help import world_of

pytestmark = pytest.mark.slow

LIBRARY = """
def on_both(rank):
    if rank == 0:
        word = "first"
    else:
        word = "second"
    return word


def on_the_second(rank):
    if rank != 1:
        return None
    return "only there"


def nowhere():
    return 3


def before_it_fails():
    return 1 / 0
"""
RUN = [1, 2, 3, 5, 6, 9, 10, 11, 12, 15, 19, 20]
"""Lines of ``LIBRARY`` that should be measured, counted without its empty first line, which is not written."""
LOADERS = """
import pytest

@pytest.mark.parametrize("n", [1, 2])
@fsdp_conformance(only=["no_meta_params"])
def test_x(fsdp, n):
    import library
    library.on_both(fsdp.rank)
    if fsdp.world_size == 1:
        library.nowhere()
    library.on_the_second(fsdp.rank)
    return load(fsdp)

@fsdp_conformance(only=["no_meta_params"])
def test_fails(fsdp):
    import library
    library.before_it_fails()
"""
PRELOADING = """
def pytest_fsdp_preload():
    return ["library"]
"""


@pytest.fixture
def measured(project: Project) -> Project:
    project.write("library.py", LIBRARY.lstrip("\n"))
    project.loaders(LOADERS)
    project.write("conftest.py", "")
    return project


def executed(project: Project) -> dict[str, list[int]]:
    """Return the executed lines of each file from the coverage data that a run has left."""
    command = [sys.executable, "-m", "coverage", "json", "-o", "-"]
    run = subprocess.run(command, cwd=project.path, capture_output=True, text=True, check=True, timeout=60)
    return {name: file["executed_lines"] for name, file in json.loads(run.stdout)["files"].items()}


@pytest.mark.parametrize(
    "args",
    [
        ("--cov=library",),
        pytest.param(("--cov=.", "--cov-branch"), marks=pytest.mark.nightly),
        pytest.param(("--cov", "-n2"), marks=pytest.mark.nightly),
    ],
)
def test_pytest_cov(measured: Project, args: tuple[str, ...]) -> None:
    result = measured.run(*args)
    result.assert_outcomes(passed=2, errors=1)
    assert executed(measured)["library.py"] == RUN
    assert "ranks are spawned" not in result.stdout.str()
    assert [path.name for path in measured.path.glob(".coverage*")] == [".coverage"]


def test_modules_that_the_fork_server_imports(measured: Project) -> None:
    measured.write("conftest.py", PRELOADING)
    measured.run("--cov=library").assert_outcomes(passed=2, errors=1)
    assert executed(measured)["library.py"] == RUN


BODIES = """
from pytest_fsdp_meta import fsdp_spmd

@fsdp_spmd(world_size=2, scope="module")
def test_body(fsdp):
    if fsdp.rank == 0:
        value = 1
    else:
        value = 2
    assert value == fsdp.rank + 1
    if fsdp.rank == 7:
        value = 3

@fsdp_spmd(world_size=2, scope="module")
def test_more(fsdp):
    helper(fsdp.rank)

def helper(rank):
    if rank == 1:
        return 5
    return 6

def test_world(fsdp_world):
    assert fsdp_world.run(helper, 1) == [5, 5]
"""


def test_branches_of_spmd_tests(project: Project) -> None:
    path = project.write("test_it.py", BODIES)
    result = project.run("--cov=.", "--cov-branch", "--cov-report=term-missing")
    result.assert_outcomes(passed=3)
    missed = next(n for n, line in enumerate(path.read_text().splitlines(), 1) if "value = 3" in line)
    result.stdout.re_match_lines([rf"test_it\.py +18 +1 +6 +1 +\d+% +{missed}$"])


@pytest.mark.nightly
def test_coverage_run(measured: Project) -> None:
    command = f"{sys.executable} -m coverage run --source=. -m pytest -p no:cacheprovider"
    measured.shell(command).assert_outcomes(passed=2, errors=1)
    assert executed(measured)["library.py"] == RUN


def test_the_users_configuration_applies(measured: Project) -> None:
    measured.write(".coveragerc", "[run]\nomit = library.py\n")
    measured.run("--cov=.").assert_outcomes(passed=2, errors=1)
    files = executed(measured)
    assert "library.py" not in files
    lines = (measured.path / "test_it.py").read_text().splitlines()
    number = next(n for n, line in enumerate(lines, 1) if "library.on_both" in line)
    assert number in files["test_it.py"]


def test_ranks_do_not_import_coverage_unless_it_measures() -> None:
    with world_of(1) as world:
        assert world.run(lambda: "coverage" in __import__("sys").modules) == [False]
