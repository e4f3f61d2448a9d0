"""Output of ranks: in the report of the failing item, or live with ``-s``."""

from __future__ import annotations

import pytest

from tests.conftest import Project

TALKING = """
def say(fsdp):
    print("hello from", fsdp.rank)
    print("and more", end="")

@fsdp_conformance(only=["no_meta_params", "no_meta_buffers"])
def test_passes(fsdp):
    say(fsdp)
    return load(fsdp)

@fsdp_conformance(only=["no_meta_params", "no_meta_buffers"])
def test_fails(fsdp):
    say(fsdp)
    raise RuntimeError("boom")

def other():
    print("hello from one world more")
    return build()

@fsdp_conformance(only=["params_equal_reference"])
def test_reference(fsdp):
    return load(fsdp, reference=other)
"""


@pytest.mark.parametrize("args", [(), ("-s", "-n1")], ids=["alone", "live on a worker"])
def test_output_is_shown_with_the_first_failing_item(project: Project, args: tuple[str, ...]) -> None:
    project.loaders(TALKING)
    result = project.run(*args)
    text = result.stdout.str()
    assert result.parseoutcomes() == {"passed": 3, "errors": 1, "same": 1}
    assert text.count("Captured rank 0 setup") == 1
    assert text.count("Captured rank 1 setup") == 1
    assert text.count("hello from 0") == 1
    assert "[rank" not in text


@pytest.mark.parametrize("args", [("-s", "-v"), ("-p", "no:capture")])
def test_output_is_live_with_s(project: Project, args: tuple[str, ...]) -> None:
    project.loaders(TALKING)
    result = project.run(*args)
    assert result.parseoutcomes() == {"passed": 3, "errors": 1, "same": 1}
    lines = result.outlines
    for rank in (0, 1):
        assert lines.count(f"[rank {rank}] hello from {rank}") == 2
        assert lines.count(f"[rank {rank}] and more") == 2
    assert lines.count("[the reference] hello from one world more") == 2, "the reference is built twice"
    assert "Captured rank" not in result.stdout.str(), "live output is not shown again"


BODIES = """
import warnings
import pytest
from pytest_fsdp_meta import fsdp_spmd

def speak(word):
    from pytest_fsdp_meta.worlds import current
    print(f"{word} from {current().rank}")
    warnings.warn(f"{word} again", DeprecationWarning)

pytestmark = pytest.mark.fsdp_world(scope="module")

def test_first(fsdp_world):
    with pytest.warns(DeprecationWarning, match="first again .on ranks 0, 1."):
        fsdp_world.run(speak, "first")

def test_second(fsdp_world):
    fsdp_world.run(speak, "second")
    assert fsdp_world.size == 3

@fsdp_spmd(world_size=2, scope="module")
def test_third(fsdp):
    speak("third")
    assert fsdp.rank == 0
"""


def test_each_test_in_a_shared_world_has_its_own_output(project: Project) -> None:
    project.write("test_it.py", BODIES)
    result = project.run()
    result.assert_outcomes(passed=1, failed=2, warnings=2)
    text = result.stdout.str()
    for word in ("second", "third"):
        for rank in (0, 1):
            section = text.split(f"Captured rank {rank} call")[1 if word == "second" else 2]
            assert section.split("\n")[1] == f"{word} from {rank}"
        assert f"DeprecationWarning: {word} again (on ranks 0, 1)" in text
    assert "first from" not in text
    assert "first again" not in text


def test_a_warning_that_is_an_error_is_raised_by_the_call(project: Project) -> None:
    project.write("test_it.py", BODIES)
    result = project.run("-k", "second", "-W", "error:second")
    result.assert_outcomes(failed=1)
    assert "DeprecationWarning: second again (on ranks 0, 1)" in result.stdout.str()


@pytest.mark.parametrize("options", [(), ("-s",)])
def test_escape_sequences_of_ranks_are_not_obeyed(project: Project, options: tuple[str, ...]) -> None:
    project.loaders(
        r"""
        @fsdp_conformance(only=["no_meta_params"])
        def test_x(fsdp):
            print("\x1b[2J\x1b]0;title\x07 cleared \x1b[31mred")
            raise RuntimeError("\x1b[31mboom")
        """
    )
    result = project.run(*options)
    output = result.stdout.str()
    assert "\x1b" not in output
    assert output.count(r"\x1b[2J\x1b]0;title\x07 cleared \x1b[31mred") == 2
    assert "test_x: ranks 0, 1 raised RuntimeError: boom" in result.outlines
