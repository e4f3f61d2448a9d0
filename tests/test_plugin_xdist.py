"""With xdist: the items of one loader stay on one worker, and nothing else changes."""

from __future__ import annotations

import pytest

from pytest_fsdp_meta.catalogue import built_in
from pytest_fsdp_meta.scheduling import by_loader, loader_of
from tests.conftest import Project

LOADERS = """
import os
import pytest

def worker():
    return os.environ["PYTEST_XDIST_WORKER"]

@pytest.fixture
def where():
    note(f"fixture/{worker()}")
    return worker()

@pytest.mark.parametrize("size", [1, 2])
@fsdp_conformance(only=["no_meta_params", "no_meta_buffers", "params_equal_reference", "same_manifest_on_every_rank"])
def test_x(fsdp, where, size):
    if fsdp.rank == 0:
        note(f"x{size}")
    return load(fsdp, reference=build)

@fsdp_conformance(only=["no_meta_params", "no_meta_buffers"])
def test_y(fsdp):
    note(f"y{fsdp.rank}")
    raise RuntimeError("boom")

@pytest.mark.parametrize("n", range(6))
def test_plain(n):
    note(f"plain/{worker()}")
"""


@pytest.mark.parametrize("dist", ["load", "loadfile"])
def test_a_loader_runs_once(project: Project, dist: str) -> None:
    project.loaders(LOADERS)
    result = project.run("-n2", "--dist", dist, "-v")
    result.assert_outcomes(passed=14, errors=2)
    text = result.stdout.str()
    assert "INTERNALERROR" not in text
    assert sorted(note for note in project.notes if "/" not in note) == ["x1", "x2", "y0", "y1"]
    assert len([note for note in project.notes if note.startswith("fixture")]) == 2
    assert "test_it.py::test_x[1-same_manifest_on_every_rank]" in text
    assert (
        "no_meta_buffers could not be judged, see test_y[no_meta_params]: ranks 0, 1 raised RuntimeError: boom" in text
    )
    assert "run it again: python -m pytest 'test_it.py::test_y[no_meta_params]' -p no:cacheprovider" in result.outlines


def test_worksteal(project: Project) -> None:
    project.loaders(
        """
        import pytest

        @pytest.mark.parametrize("n", [1, 2])
        @fsdp_conformance(only=["no_meta_params", "no_meta_buffers"])
        def test_x(fsdp, n):
            note(f"{n}/{fsdp.rank}")
            return load(fsdp)

        def test_plain(): ...
        """
    )
    project.run("-n2", "--dist", "worksteal").assert_outcomes(passed=5)
    assert sorted(project.notes) == ["1/0", "1/1", "2/0", "2/1"]


def test_a_group_of_the_user_goes_first(pytester: pytest.Pytester) -> None:
    scheduling = by_loader(pytester.parseconfig("--tx", "popen"), None, built_in())
    assert scheduling._split_scope("a.py::test_x[no_meta_params]@mine") == "mine"
    assert scheduling._split_scope("a.py::test_x[no_meta_params]") == "a.py::test_x["
    assert scheduling._split_scope("a.py::test_x[a@b]") == "a.py::test_x[a@b]"


@pytest.mark.parametrize("args", [("-n2", "--maxschedchunk=1"), ("-n2", "--dist=worksteal"), ("-p", "no:xdist")])
def test_where_nothing_is_a_loader_xdist_is_left_alone(project: Project, args: tuple[str, ...]) -> None:
    project.write("test_it.py", "import pytest\n@pytest.mark.parametrize('n', range(9))\ndef test_x(n): ...\n")
    project.run(*args).assert_outcomes(passed=9)


def test_without_xdist(project: Project) -> None:
    project.loaders("@fsdp_conformance(only=['no_meta_params'])\ndef test_x(fsdp): return load(fsdp)\n")
    project.run("-p", "no:xdist").assert_outcomes(passed=1)


def test_loader_of() -> None:
    catalogue = built_in()
    assert loader_of("a.py::test_x[no_meta_params]", catalogue) == "a.py::test_x["
    assert loader_of("a.py::T::test_x[p-world2-no_meta_params]", catalogue) == "a.py::T::test_x[p-world2-"
    # Different parameters are different loaders, however they end.
    assert loader_of("a.py::test_x[p--no_meta_params]", catalogue) != loader_of(
        "a.py::test_x[p-no_meta_params]", catalogue
    )
    for other in ("a.py::test_x", "a.py::test_no_meta_params", "a.py::test_x[own]", "a.py::test_x[xno_meta_params]"):
        assert loader_of(other, catalogue) is None
