"""With pytest-xdist, all items of a loader run on one worker, and workers share devices."""

from __future__ import annotations

import os
from tempfile import TemporaryDirectory

import pytest

from pytest_fsdp_meta.catalogue import built_in
from pytest_fsdp_meta.plugin.collection import loader_of, split_node_id
from pytest_fsdp_meta.plugin.xdist_scheduler import ByGroup
from tests.conftest import Project, errors

pytestmark = pytest.mark.slow

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


@pytest.mark.parametrize("dist", ["load", "loadfile", "loadgroup"])
def test_a_loader_runs_once(project: Project, dist: str) -> None:
    project.loaders(LOADERS)
    result = project.run("-n2", "--dist", dist, "-v", "--junitxml=junit.xml")
    assert result.parseoutcomes() == {"passed": 14, "errors": 1, "same": 1}
    text = result.stdout.str()
    assert "INTERNALERROR" not in text
    assert sorted(note for note in project.notes if "/" not in note) == ["x1", "x2", "y0", "y1"]
    assert len([note for note in project.notes if note.startswith("fixture")]) == 2
    assert "test_it.py::test_x[1-same_manifest_on_every_rank]" in text
    once = "no_meta_buffers: same error as test_y[no_meta_params]: ranks 0, 1 raised RuntimeError: boom"
    assert once in (project.path / "junit.xml").read_text()
    assert once not in text
    assert "rerun: python -m pytest 'test_it.py::test_y[no_meta_params]' -p no:cacheprovider" in result.outlines


def test_an_xdist_group_of_the_user_takes_precedence(pytester: pytest.Pytester) -> None:
    scheduling = ByGroup(pytester.parseconfig("--tx", "popen"), None, built_in())
    assert scheduling._split_scope("a.py::test_x[no_meta_params]@mine") == "mine"
    assert scheduling._split_scope("a.py::test_x[no_meta_params]") == "a.py::test_x["
    assert scheduling._split_scope("a.py::test_x[a@b]") == "a.py::test_x[a@b]"


@pytest.mark.parametrize("args", [("-n2", "--maxschedchunk=1"), ("-n2", "--dist=worksteal")])
def test_xdist_distributes_as_usual_without_loaders(project: Project, args: tuple[str, ...]) -> None:
    project.write("test_it.py", "import pytest\n@pytest.mark.parametrize('n', range(9))\ndef test_x(n): ...\n")
    project.run(*args).assert_outcomes(passed=9)


def test_without_xdist(project: Project) -> None:
    project.loaders("@fsdp_conformance(only=['no_meta_params'])\ndef test_x(fsdp): return load(fsdp)\n")
    project.run("-p", "no:xdist", "--fsdp-slots=1").assert_outcomes(passed=1)


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


TWINS = """
import pytest

@pytest.mark.parametrize("size", ["q-r", "r"])
@pytest.mark.parametrize("kind", ["p", "p-q"])
{what}
"""
LOADER = "@fsdp_conformance(only=['no_meta_params'])\ndef test_net(fsdp, kind, size): return load(fsdp)\n"


def test_loaders_with_the_same_node_id_are_a_usage_error(project: Project) -> None:
    project.loaders(TWINS.format(what=LOADER))
    (line,) = errors(project.collect())
    assert line == (
        "test_it.py::test_net[p-q-r-no_meta_params]: two parametrizations have this node id; give them different "
        "ids with pytest.param(..., id=...)"
    )


def test_tests_with_the_same_node_id_are_a_usage_error_next_to_a_loader(project: Project) -> None:
    plain = "def test_plain(kind, size): assert (kind, size) != ('p-q', 'r')"
    project.loaders(TWINS.format(what=plain) + "\n" + LOADER.replace(", kind, size", ""))
    project.run().assert_outcomes(passed=4, failed=1)
    (line,) = errors(project.run("-n2"))
    assert line.startswith("test_it.py::test_plain[p-q-r]: two parametrizations have this node id")


def test_a_parameter_that_looks_like_an_xdist_group() -> None:
    odd = "a.py::test_x[llama[no_meta_params]@hub-no_meta_buffers]"
    assert split_node_id(odd, built_in()) == ("a.py::test_x[llama[no_meta_params]@hub]", "no_meta_buffers")
    assert split_node_id(f"{odd}@group", built_in()) == split_node_id(odd, built_in())


CRASHING = """
import os
import pytest

@pytest.fixture
def ending():
    note("fixture")
    os._exit(7)

@fsdp_conformance(only=["no_meta_params", "no_meta_buffers", "same_manifest_on_every_rank"])
def test_crash(fsdp, ending): ...

@pytest.mark.parametrize("n", [1, 2])
@fsdp_conformance(only=["no_meta_params", "no_meta_buffers"])
def test_x(fsdp, n):
    note(f"{n}/{fsdp.rank}")
    return load(fsdp)

def test_plain():
    note("plain")
"""


def test_a_worker_that_crashes_in_a_loader(project: Project) -> None:
    """Its items are reported once, its devices become free, and a new worker runs the rest."""
    project.loaders(CRASHING)
    result = project.run("-n2", "--fsdp-slots=2")
    assert result.parseoutcomes() == {"passed": 5, "failed": 1, "same": 2}
    text = result.stdout.str()
    assert "INTERNALERROR" not in text
    result.stdout.re_match_lines([r"1\. (crash|error): worker '?gw\d'? (crashed while running|ended)"])
    assert project.notes.count("fixture") == project.notes.count("plain") == 1
    assert sorted(note for note in project.notes if "/" in note) == ["1/0", "1/1", "2/0", "2/1"]


SHARED = """
import time
import pytest

@pytest.mark.parametrize("n", range(4))
@fsdp_conformance(only=["no_meta_params", "no_meta_buffers"])
def test_x(fsdp, n):
    if fsdp.rank == 0:
        note("in")
        time.sleep(0.3)
        note("out")
    fsdp.barrier()
    return load(fsdp)
"""


@pytest.mark.parametrize("slots", ["--fsdp-slots=3", "--fsdp-slots=1"])
def test_workers_share_the_slots(project: Project, slots: str) -> None:
    """Worlds of 2 run one at a time on 3 slots, and also on a single slot."""
    project.loaders(SHARED)
    project.run("-n2", slots).assert_outcomes(passed=8)
    assert project.notes == ["in", "out"] * 4


def test_worlds_of_tests_share_the_slots(project: Project) -> None:
    """A world that is kept for the next test holds no slot while it is idle."""
    project.loaders(
        """
        import time
        import pytest
        from pytest_fsdp_meta import fsdp_spmd

        @pytest.mark.parametrize("n", range(6))
        @fsdp_spmd(scope="session")
        def test_x(fsdp, n):
            fsdp.barrier()
            if fsdp.rank == 0:
                note("in")
                time.sleep(0.2)
                note("out")
            fsdp.barrier()
        """
    )
    project.run("-n2", "--fsdp-slots=3").assert_outcomes(passed=6)
    assert project.notes == ["in", "out"] * 6


def test_nothing_is_left_in_the_temporary_folder(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    project.loaders("@fsdp_conformance(only=['no_meta_params'])\ndef test_x(fsdp): return load(fsdp)\n")
    with TemporaryDirectory(prefix="a b ", dir="/tmp") as odd:
        monkeypatch.setenv("TMPDIR", odd)
        project.run("-n1").assert_outcomes(passed=1)
        assert not [name for name in os.listdir(odd) if name.startswith(("fsdp-", "pymp-"))]


@pytest.mark.nightly
def test_a_long_wait_is_reported(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    project.write("conftest.py", "from pytest_fsdp_meta.plugin import xdist_workers\nxdist_workers.LONG = 1.0\n")
    project.loaders(
        """
        import pytest, time

        @pytest.mark.parametrize("n", [1, 2])
        @fsdp_conformance(only=["no_meta_params"])
        def test_x(fsdp, n):
            time.sleep(6)
            return load(fsdp)
        """
    )
    result = project.run("-n2", "--fsdp-slots=2")
    result.assert_outcomes(passed=2)
    result.stderr.re_match_lines(
        [r"\[gw\d\] test_it.py::test_x: waiting for 2 of 2 CPU slots .*: gw\d uses 2 for test_it.py::test_x \(\d+ s\)"]
    )
