"""Warnings of ranks: shown once, with their ranks and source line, subject to the user's filters."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import warnings

import pytest

from pytest_fsdp_meta.worlds import Listener, World, current, forward_warnings
from pytest_fsdp_meta.worlds.rank.warnings import RankWarning, find_category, reissue
from tests.conftest import Project
from tests.world_help import world_of

WARNING = """
import warnings

class Mine(DeprecationWarning):
    pass

@fsdp_conformance(only=["no_meta_params", "no_meta_buffers"])
def test_x(fsdp):
    for _ in range(3):
        warnings.warn("careful")
    if fsdp.rank == 1:
        warnings.warn("the second only", Mine)
    warnings.warn("nobody wants it", ResourceWarning)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.warn("hushed")
    torch.empty(3).put_(torch.tensor([0]), torch.ones(1))
    return load(fsdp)
"""


def summary(result: pytest.RunResult) -> str:
    text = result.stdout.str()
    found = re.search(r"=+ warnings summary =+\n(.*?)\n-- Docs", text, re.DOTALL)
    return found[1] if found else ""


def test_each_warning_is_shown_once_with_its_ranks_and_line(project: Project) -> None:
    path = project.loaders(WARNING)
    result = project.run("-rA")
    result.assert_outcomes(passed=2, warnings=2)
    lines = path.read_text().splitlines()
    place = {text: next(n for n, line in enumerate(lines, 1) if text in line) for text in ("careful", "the second")}
    assert summary(result) == "\n".join(
        [
            "test_it.py::test_x[no_meta_params]",
            f"  {path}:{place['careful']}: UserWarning: careful (on ranks 0, 1)",
            '    warnings.warn("careful")',
            "",
            "test_it.py::test_x[no_meta_params]",
            f"  {path}:{place['the second']}: Mine: the second only (on rank 1)",
            '    warnings.warn("the second only", Mine)',
            "",
        ]
    )
    assert "careful" not in result.stdout.str().replace(summary(result), "")


def test_the_users_filters_apply(project: Project) -> None:
    path = project.loaders(WARNING)
    result = project.run("-W", "ignore:careful", "-W", "error::test_it.Mine")
    result.assert_outcomes(passed=1, errors=1)
    line = next(n for n, text in enumerate(path.read_text().splitlines(), 1) if "the second" in text)
    assert f"Mine: the second only (on rank 1)\nraised at {path}:{line}" in result.stdout.str()
    assert summary(result) == ""


def test_a_warning_in_the_teardown_of_a_fixture_is_its_tests(project: Project) -> None:
    project.write(
        "test_it.py",
        """
import pytest
import warnings

@pytest.fixture
def ends(fsdp_world):
    yield
    fsdp_world.run(warnings.warn, "at the end")

def test_first(ends): ...
def test_second(): ...
""",
    )
    result = project.run("-p", "no:randomly")
    result.assert_outcomes(passed=2, warnings=1)
    assert summary(result).splitlines()[0] == "test_it.py::test_first"
    assert "UserWarning: at the end (on ranks 0, 1)" in summary(result)


def test_a_failure_takes_precedence_over_a_warning_as_error(project: Project) -> None:
    project.loaders(
        """
        import warnings

        @fsdp_conformance(only=["no_meta_params"])
        def test_x(fsdp):
            warnings.warn("on the way to it")
            raise RuntimeError("boom")
        """
    )
    result = project.run("-W", "error")
    result.assert_outcomes(errors=1)
    assert "ranks 0, 1 raised RuntimeError: boom" in result.stdout.str()


def test_warnings_of_declared_functions_are_shown_and_those_during_observation_are_not(project: Project) -> None:
    project.loaders(
        """
        import warnings

        def reference():
            warnings.warn("it is old")
            return build()

        class Noisy(nn.Linear):
            def state_dict(self, *args, **kwargs):
                warnings.warn("while it is observed")
                return super().state_dict(*args, **kwargs)

        def batch(step):
            warnings.warn("a batch")
            return {"x": torch.ones(8, 4)}

        @fsdp_conformance()
        def test_x(fsdp):
            model = Noisy(4, 4)
            model.load_state_dict(build().state_dict())
            fully_shard(model, mesh=fsdp.mesh)
            return Subject(model, reference=reference, batch=batch, loss=lambda model, batch: model(batch["x"]).sum())
        """
    )
    result = project.run()
    result.assert_outcomes(**{name: count for name, count in result.parseoutcomes().items() if name != "warnings"})
    texts = re.findall(r": UserWarning: (.*)", summary(result))
    assert sorted(texts) == ["a batch (on ranks 0, 1)", "it is old (in the reference)"]


class RecordingListener(Listener):
    def __init__(self) -> None:
        self.warnings: list[tuple[int, str]] = []

    def on_note(self, world: World, rank: int, kind: str, what: object) -> None:
        assert isinstance(what, RankWarning)
        self.warnings.append((rank, what.text))


def test_each_call_to_a_shared_world_warns_again() -> None:
    listener = RecordingListener()

    def warn() -> None:
        with forward_warnings(unless="^not this"):
            for text in ("this", "this", "not this"):
                warnings.warn(f"{text}, {current().rank}", stacklevel=1)
        with warnings.catch_warnings():  # Python 3.12 warns of a fork beside other threads
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if not pid:
            warnings.warn("a child has nobody to tell", stacklevel=1)
            os._exit(0)
        os.waitpid(pid, 0)

    with world_of(2, listener=listener) as world:
        world.run(warn)
        world.run(warn)
        output = world.outputs()[0]
    assert sorted(listener.warnings) == [(0, "this, 0"), (0, "this, 0"), (1, "this, 1"), (1, "this, 1")]
    assert output.count("UserWarning: a child has nobody to tell") == 2


def test_a_function_called_by_name_does_not_warn_by_itself() -> None:
    listener = RecordingListener()
    with world_of(1, listener=listener) as world:
        world.run("warnings:warn", "by name")
        world.run("warnings:warn", "by name", DeprecationWarning)
        assert world.outputs()[0].count("UserWarning: by name") == 1
        assert "DeprecationWarning" not in world.outputs()[0]
    assert listener.warnings == []


def test_warnings_of_a_world_without_a_listener() -> None:
    with world_of(2) as world, pytest.warns(UserWarning, match="^this .on rank 1.$") as caught:
        world.run(lambda: current().rank == 1 and warnings.warn("this", stacklevel=1))
    assert len(caught) == 1


class Odd(UserWarning):
    def __init__(self, one: object, other: object) -> None:
        super().__init__(one)


@pytest.mark.parametrize(
    ("classes", "category", "known"),
    [
        (("builtins:FutureWarning", "builtins:Warning"), FutureWarning, True),
        (("no_such_module:Gone", "builtins:DeprecationWarning", "builtins:Warning"), DeprecationWarning, False),
        (("os:path.sep", "builtins:Warning"), Warning, False),
        (("no_such_module:Gone",), UserWarning, False),
        ((f"{__name__}:Odd", "builtins:UserWarning"), Odd, True),
    ],
)
def test_the_class_of_a_warning_where_this_process_has_it(
    classes: tuple[str, ...], category: type, known: bool
) -> None:
    assert find_category(classes) == (category, known)


def test_a_class_that_cannot_be_instantiated_here() -> None:
    with pytest.warns(UserWarning, match=r"^Odd: text \(on rank 1\)$"):
        reissue(RankWarning("text", (f"{__name__}:Odd",), "file.py", 3, "file"), "on rank 1")
    with pytest.warns(DeprecationWarning, match=r"^torch.Gone: text \(on rank 1\)$"):
        reissue(RankWarning("text", ("torch:Gone", "builtins:DeprecationWarning"), "file.py", 3, ""), "on rank 1")


def test_no_module_is_imported_for_the_class_of_a_warning() -> None:
    script = """
    import sys
    from pytest_fsdp_meta.worlds.rank.warnings import find_category
    assert find_category(["torch.jit:TracerWarning", "builtins:Warning"]) == (Warning, False)
    assert "torch" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=60)
