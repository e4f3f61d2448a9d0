"""pytest-rerunfailures: a rerun of an item loads again, and the totals say so."""

from __future__ import annotations

import pytest

from tests.conftest import Project
from tests.plugin.test_outcomes import outcomes

pytest.importorskip("pytest_rerunfailures")
FLAKY = """
import os

import pytest

CHECKS = ["no_meta_params", "no_meta_buffers", "params_equal_reference"]


def load_number(fsdp, name, folder):
    if fsdp.rank == 0:
        note(name)
    fsdp.barrier()
    return open(f"{folder}/notes").read().split().count(name)


@pytest.fixture
def folder(pytestconfig):
    return os.fspath(pytestconfig.rootpath)


@fsdp_conformance(only=CHECKS)
def test_raises_once(fsdp, folder):
    if load_number(fsdp, "once", folder) < 2:
        raise RuntimeError("the first time")
    return load(fsdp, reference=build)


@fsdp_conformance(only=CHECKS)
def test_always_raises(fsdp, folder):
    load_number(fsdp, "always", folder)
    raise RuntimeError("always")


@fsdp_conformance(only=CHECKS)
def test_wrong_once(fsdp, folder):
    subject = load(fsdp, reference=build)
    if load_number(fsdp, "wrong", folder) < 2:
        with torch.no_grad():
            subject.model.weight.zero_()
    return subject
"""


@pytest.mark.parametrize("options", [(), ("-n1",)])
def test_a_rerun_loads_again(project: Project, options: tuple[str, ...]) -> None:
    project.loaders(FLAKY)
    result = project.run("-v", "-p", "rerunfailures", "--reruns=2", *options)
    if not options:  # xdist prints other lines
        assert {name for name, outcome in outcomes(result).items() if outcome != "passed"} == {
            f"test_always_raises[{check}]" for check in ("no_meta_params", "no_meta_buffers", "params_equal_reference")
        }
    output = result.stdout.str()
    assert "6 passed" in output
    assert "1 error" in output
    assert "2 same error" in output
    # The other items of the loader that always raises do not load again: the first of them has tried.
    assert {name: project.notes.count(name) for name in ("once", "always", "wrong")} == {
        "once": 2,
        "always": 3,
        "wrong": 3,  # also in a world of one rank, as it failed
    }
    totals = {line.partition(",")[0]: line for line in result.outlines if ", world of 2 (" in line}
    assert "; loaded 2 times (1 rerun); " in totals["test_it.py::test_raises_once"]
    assert "; loaded 3 times (2 reruns); " in totals["test_it.py::test_always_raises"]
    assert "3 passed" in totals["test_it.py::test_wrong_once"]
