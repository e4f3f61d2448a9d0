"""The items of loaders: names, selection, and how often a loader, its reference and its fixtures run."""

from __future__ import annotations

from textwrap import dedent

import pytest

from pytest_fsdp_meta.catalogue import built_in
from tests.conftest import CHECK, Project

COLLECTED = """
import pytest
from pytest_fsdp_meta import fsdp_conformance

@fsdp_conformance
def test_all(fsdp): ...

@fsdp_conformance()
def test_parentheses(fsdp): ...

@pytest.mark.fsdp_conformance(only=["no_meta_buffers", "no_meta_params"])
def test_marker(fsdp): ...

@pytest.mark.parametrize("config", ["tiny", "huge"])
@fsdp_conformance(only=["no_meta_params"], world_size=(1, 4))
def test_both(fsdp, config): ...

@fsdp_conformance(only=["no_meta_params"], mesh={"dp_replicate": 2, "dp_shard": -1}, world_size=(2, 4))
@pytest.mark.parametrize("config", ["tiny"])
def test_below(fsdp, config): ...

@fsdp_conformance(only=["no_meta_params"])
class TestDecorated:
    def test_method(self, fsdp): ...
    def helper(self): ...

class TestPlain:
    def test_plain(self): ...
"""


def collected(result: pytest.RunResult) -> list[str]:
    assert result.ret == 0, result.stdout.str()
    return [line for line in result.outlines if "::" in line]


def test_one_item_per_check(project: Project) -> None:
    project.write("test_it.py", COLLECTED)
    ids = built_in().ids_for(simulated=False)
    assert len(ids) >= 15
    assert collected(project.collect("--collect-only", "-q")) == [
        *(f"test_it.py::test_all[{id}]" for id in ids),
        *(f"test_it.py::test_parentheses[{id}]" for id in ids),
        "test_it.py::test_marker[no_meta_params]",
        "test_it.py::test_marker[no_meta_buffers]",
        "test_it.py::test_both[tiny-world1-no_meta_params]",
        "test_it.py::test_both[tiny-world4-no_meta_params]",
        "test_it.py::test_both[huge-world1-no_meta_params]",
        "test_it.py::test_both[huge-world4-no_meta_params]",
        "test_it.py::test_below[tiny-world2-no_meta_params]",
        "test_it.py::test_below[tiny-world4-no_meta_params]",
        "test_it.py::TestDecorated::test_method[no_meta_params]",
        "test_it.py::TestPlain::test_plain",
    ]


def test_marked_modules_and_world_sizes_on_the_command_line(project: Project) -> None:
    project.write(
        "test_it.py",
        """
        import pytest
        pytestmark = pytest.mark.fsdp_conformance(only=["no_meta_params"])
        def test_x(fsdp): ...
        class TestY:
            def test_y(self): ...
            @pytest.mark.fsdp_conformance(only=["no_meta_buffers"], world_size=3)
            def test_z(self): ...
        """,
    )
    assert collected(project.collect("--collect-only", "-q", "--fsdp-world-size=2,4")) == [
        "test_it.py::test_x[world2-no_meta_params]",
        "test_it.py::test_x[world4-no_meta_params]",
        "test_it.py::TestY::test_y[world2-no_meta_params]",
        "test_it.py::TestY::test_y[world4-no_meta_params]",
        "test_it.py::TestY::test_z[no_meta_buffers]",
    ]


@pytest.mark.parametrize("arg", ["--collect-only", "--setup-plan", "--setup-only"])
def test_no_rank_is_started_where_nothing_runs(project: Project, monkeypatch: pytest.MonkeyPatch, arg: str) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("started")

    monkeypatch.setattr("pytest_fsdp_meta.worlds.ForkServerEngine.start", refuse)
    monkeypatch.setattr("pytest_fsdp_meta.worlds.ForkServerEngine.launch", refuse)
    project.write("test_it.py", COLLECTED)
    assert project.collect(arg).ret == 0


def test_loader_reference_and_fixtures_run_as_often_as_needed(project: Project) -> None:
    """For the whole catalogue: the fixture is set up before the first load and torn down after the last one."""
    project.loaders(
        """
        import os
        import pytest

        @pytest.fixture
        def config(tmp_path, monkeypatch):
            monkeypatch.setenv("SEEN_ON_RANKS", "yes")
            note("setup")
            yield {"path": tmp_path}
            note("teardown")

        @pytest.fixture(autouse=True)
        def every_time():
            note("autouse")

        def reference():
            note("reference")
            return build()

        @fsdp_conformance
        def test_x(fsdp, config):
            assert config["path"].is_dir()
            note(f"rank{fsdp.rank}-{os.environ['SEEN_ON_RANKS']}")
            return load(fsdp, reference=reference, batch=lambda step: {"input": torch.ones(2, 4)},
                        loss=lambda model, batch: model(**batch).mean())
        """
    )
    result = project.run("-rA")
    assert result.ret == 0, result.stdout.str()
    notes = project.notes
    assert notes[:2] in (["autouse", "setup"], ["setup", "autouse"])
    assert sorted(notes[2:4]) == ["rank0-yes", "rank1-yes"]
    # Built twice in one run: once with poisoned memory, to see what it leaves uninitialised, and once to be recorded.
    assert notes[4:6] == ["reference", "reference"]
    # Checkpoints are loaded into a second model, and into one in a world of another size; fixtures are still set up.
    assert sorted(notes[6:8]) == ["rank0-yes", "rank1-yes"]
    assert notes[8:] == ["rank0-yes", "teardown"]


def test_fixtures_of_every_kind(project: Project) -> None:
    """Loaders that differ in a parameter run separately, even if their ids look the same."""
    own = CHECK.format(name="own_check", after="()", value="[own_check]")
    project.write(
        "conftest.py",
        own
        + """
def pytest_fsdp_preload():
    return ["colorsys"]
"""
        + dedent("""
        import dataclasses
        import pytest

        @dataclasses.dataclass
        class Config:
            size: int

        def helper_of_conftest(config):
            return config.size

        @pytest.fixture(scope="session")
        def config():
            return Config(4)
        """),
    )
    project.loaders(
        """
        import pytest
        from conftest import Config, helper_of_conftest

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(torch.ones(4))

        @pytest.fixture(scope="module")
        def module_wide():
            note("module")
            return Net

        @pytest.fixture(params=["a", "b"], scope="session")
        def flavour(request):
            return request.param

        @fsdp_conformance(only=["no_meta_params", "params_equal_reference"])
        @pytest.mark.parametrize("text", ["-", "--", ""])
        def test_x(fsdp, config, module_wide, flavour, text):
            assert isinstance(config, Config) and helper_of_conftest(config) == 4
            assert module_wide is Net
            if fsdp.rank == 0:
                note(f"{flavour}/{text}")
            model = module_wide()
            fully_shard(model, mesh=fsdp.mesh)
            return Subject(model, reference=Net)

        @fsdp_conformance(only=["no_meta_params", "no_meta_buffers"])
        @pytest.mark.parametrize(("one", "two"), [("a", "b-c"), ("a-b", "c")])
        def test_same_names(fsdp, one, two):
            if fsdp.rank == 0:
                note(f"{one}/{two}")
            return load(fsdp)

        @fsdp_conformance(only=["own_check"])
        def test_defaults(fsdp, config, size=3):
            import sys
            assert size == 3 and "colorsys" in sys.modules
            return load(fsdp)

        @fsdp_conformance(only=["no_meta_params", "no_meta_buffers"])
        def test_no_arguments():
            note("no-arguments")
            return build()
        """
    )
    result = project.run()
    result.assert_outcomes(passed=19)
    assert project.notes[0] == "module"
    assert sorted(project.notes[1:]) == sorted(
        [
            *(f"{flavour}/{text}" for flavour in "ab" for text in ("-", "--", "")),
            *("a/b-c", "a-b/c"),
            *("no-arguments", "no-arguments"),
        ]
    )


def test_methods(project: Project) -> None:
    project.loaders(
        """
        import pytest

        @pytest.mark.fsdp_conformance(only=["no_meta_params", "params_equal_reference"])
        class TestMarked:
            size = 4
            def setup_method(self, method):
                note("setup")
                self.offset = 3
            def teardown_method(self, method):
                note("teardown")
            def reference(self):
                return nn.Linear(self.size, self.offset)
            def test_x(self, fsdp):
                note("load")
                torch.manual_seed(1)
                model = self.reference()
                fully_shard(model, mesh=fsdp.mesh)
                return Subject(model, reference=self.seeded)
            def seeded(self):
                torch.manual_seed(1)
                return self.reference()

        class TestDecorated:
            @pytest.fixture
            def four(self):
                return 4
            @fsdp_conformance(only=["no_meta_params"])
            def test_y(self, fsdp, four):
                assert four == 4
                return load(fsdp)
        """
    )
    result = project.run("-v")
    result.assert_outcomes(passed=3)
    assert project.notes == ["setup", "load", "load", "teardown"]


@pytest.mark.parametrize("mode", ["prepend", "append", "importlib"])
def test_import_modes(project: Project, mode: str) -> None:
    """A package with a relative import, a module outside of it, and in importlib mode a second one of that name."""
    project.write("pkg/__init__.py", "")
    project.write("pkg/helpers.py", "class Local:\n    size = 4\n")
    text = """
        import pytest
        {imported}

        class Here:
            size = 4

        @pytest.fixture
        def config():
            return Here()

        @fsdp_conformance(only=["params_equal_reference"])
        def test_x(fsdp, config):
            assert isinstance(config, Here)
            {local}
            return load(fsdp, reference=build)
        """
    project.loaders(text.format(imported="from .helpers import Local", local="assert Local.size == 4"), "pkg/test_p.py")
    project.loaders(text.format(imported="", local=""), "one/test_loose.py")
    project.write("one/conftest.py", "ONE = 1")
    if mode != "append":
        project.write("two/conftest.py", "TWO = 2")
    other = "loose" if mode == "importlib" else "other"
    project.loaders(text.format(imported="", local=""), f"two/test_{other}.py")
    project.run(f"--import-mode={mode}").assert_outcomes(passed=3)


def test_last_failed_and_first_failure(project: Project) -> None:
    project.loaders(
        """
        @fsdp_conformance(only=["no_meta_params", "no_meta_buffers", "no_uninitialized_memory"])
        def test_x(fsdp):
            if fsdp.rank == 0:
                note("load")
            with torch.device("meta"):
                return build()

        @fsdp_conformance(only=["no_meta_params"])
        def test_y(fsdp):
            note("y")
            return load(fsdp)
        """
    )
    first = project.run("-x", "-p", "cacheprovider")
    first.assert_outcomes(failed=1)
    again = project.run("--lf", "-p", "cacheprovider", "-rA")
    again.assert_outcomes(failed=1)
    assert "FAILED test_it.py::test_x[no_meta_params]" in again.stdout.str()
    assert project.notes == ["load", "load"]
