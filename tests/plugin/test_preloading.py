"""The fork server's first imports begin while pytest still collects, and change nothing of what ranks see."""

from __future__ import annotations

import sys

import pytest

from pytest_fsdp_meta.plugin.preloading import _installed_imports
from pytest_fsdp_meta.worlds import ForkServerEngine, Sources, World, WorldSpec
from tests.conftest import Project
from tests.world_help import total

TEXT = """
import json
import pytest
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tests.conftest import Project
from pytest_fsdp_meta import Subject
from . import local

if True:
    import transformers


def inside():
    import hypothesis
"""


def test_only_installed_packages_at_the_top_of_a_file_are_imported_early() -> None:
    assert _installed_imports(TEXT) == {"torch.nn.functional": [], "safetensors.torch": ["load_file", "save_file"]}
    assert _installed_imports("def") == {}


def early_engine() -> ForkServerEngine:
    engine = ForkServerEngine(sources=Sources(tuple(sys.path)))
    engine.start_early({"safetensors.torch": ["load_file", "no_such_name"], "no_such_package": ["name"]}, sys.path)
    return engine


def test_a_world_starts_from_the_server_that_began_early() -> None:
    engine = early_engine()
    early = engine._server
    with World(WorldSpec({"dp_shard": 2}), engine) as world:
        assert world.run(total, 1.0) == [1.0, 1.0]
        assert world.run("tests.plugin.test_preloading:imported") == [True, True]
    assert engine._server is early is not None
    engine.close()


def imported() -> bool:
    return "safetensors.torch" in sys.modules


def test_a_changed_environment_starts_a_new_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test module may set a variable that torch reads when it is imported."""
    engine = early_engine()
    early = engine._server
    engine.start()
    assert engine._server is early
    engine.close()
    engine = early_engine()
    early = engine._server
    monkeypatch.setenv("TORCH_SHOW_CPP_STACKTRACES", "1")
    engine.start()
    assert engine._server is not early
    engine.close()


def test_a_run_without_tests_for_ranks_starts_nothing(project: Project) -> None:
    project.write("test_it.py", "def test_it(pytestconfig): assert started(pytestconfig) is None\n" + STARTED)
    project.loaders(f"def test_it(pytestconfig): assert started(pytestconfig) is not None\n{STARTED}", "test_marked.py")
    assert "fsdp_conformance" in (project.path / "test_marked.py").read_text()
    project.run("test_it.py").assert_outcomes(passed=1)
    project.run("test_marked.py").assert_outcomes(passed=1)


def test_no_garbage_is_looked_for_while_the_first_file_is_imported(project: Project) -> None:
    seen = (
        "import gc\n\nIMPORTING = gc.isenabled()\n\n\ndef test_it(): assert (IMPORTING, gc.isenabled()) == ({}, True)\n"
    )
    project.write("test_it.py", seen.format(True))
    project.loaders(seen.format(False), "test_marked.py")
    project.loaders(seen.format(True), "test_marked_too.py")
    project.loaders("import gc\n\nassert not gc.isenabled()\nraise ValueError", "broken/test_broken.py")
    project.run("test_it.py", "test_marked.py", "test_marked_too.py").assert_outcomes(passed=3)
    project.run("broken", "test_it.py", "--continue-on-collection-errors").assert_outcomes(errors=1, passed=1)


def test_it_is_known_about_how_many_worlds_start(project: Project) -> None:
    """A loader has four; tests on the ranks have one each, unless they share it."""
    project.loaders(
        """
        import pytest
        from pytest_fsdp_meta import fsdp_spmd

        @fsdp_conformance(world_size=(1, 2), only=["no_meta_params"])
        def test_x(fsdp): return load(fsdp)

        @fsdp_spmd(world_size=1)
        @pytest.mark.parametrize("n", [1, 2, 3])
        def test_own(fsdp, n): ...

        @pytest.mark.fsdp_world(world_size=1, scope="module")
        @pytest.mark.parametrize("n", [1, 2])
        def test_shared(fsdp_world, n): ...

        def test_it(pytestconfig):
            from pytest_fsdp_meta.plugin.session import SESSION
            assert pytestconfig.stash[SESSION].engine.worlds == 2 * 4 + 3 + 1
        """
    )
    project.run("-rf").assert_outcomes(passed=2 + 3 + 2 + 1)


STARTED = """
def started(config):
    from pytest_fsdp_meta.plugin.session import SESSION

    return config.stash[SESSION].engine._server
"""
