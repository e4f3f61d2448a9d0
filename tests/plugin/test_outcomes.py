"""Outcomes of items: verdicts, loaders that fail, checks that are expected to fail, and rerun commands."""

from __future__ import annotations

import re
import sys

import pytest

from pytest_fsdp_meta.catalogue import built_in
from tests.conftest import Project

SKIPS = "SKIPPED|NOT DECLARED|NOT APPLICABLE|DEPENDS ON A FAILED CHECK|NOT SUPPORTED|LEFT OUT"
WORDS = f"PASSED|DIFFERS|PARTLY CHECKED|FAILED|{SKIPS}|SAME ERROR|ERROR|XFAIL|XPASS"


def outcomes(result: pytest.RunResult) -> dict[str, str]:
    """Return test -> outcome, from the output of ``-v``."""
    found = re.findall(rf"^\S+?::(.+\]) ({WORDS})\b", result.stdout.str(), re.MULTILINE)
    return {name: outcome.lower() for name, outcome in found}


def story(result: pytest.RunResult, test: str) -> list[str]:
    """Return the lines that pytest shows for one test, without their headline."""
    lines = result.outlines
    start = next(n for n, line in enumerate(lines) if re.fullmatch(rf"_+ .*{re.escape(test)} _+", line))
    end = next(n for n in range(start + 1, len(lines)) if re.match(r"(_{3,} .* _{3,}|={3,} .* ={3,})$", lines[n]))
    return lines[start + 1 : end]


CHECKS = '["no_meta_params", "no_meta_buffers", "params_equal_reference"]'


def test_verdicts(project: Project) -> None:
    project.loaders(
        f"""
        def on_meta(fsdp):
            with torch.device("meta"):
                return build()

        @fsdp_conformance(only={CHECKS}, xfail={{"no_meta_params": "known"}})
        def test_xfail(fsdp):
            return on_meta(fsdp)

        @fsdp_conformance(only={CHECKS}, xfail={{"no_meta_params": "fixed since"}})
        def test_unexpected(fsdp):
            return load(fsdp)

        @fsdp_conformance(only={CHECKS}, skip={{"no_meta_params": "not needed"}})
        def test_skip(fsdp):
            return on_meta(fsdp)

        @fsdp_conformance(only={CHECKS}, xfail={{"no_meta_params": "known"}})
        def test_broken(fsdp):
            raise RuntimeError("boom")

        @fsdp_conformance(only={CHECKS}, xfail={{"params_equal_reference": "expected"}})
        def test_reference(fsdp):
            return load(fsdp, reference=lambda: 1 / 0)

        @fsdp_conformance(only=["names_match_reference", "params_equal_reference"])
        def test_reference_in_full_once(fsdp):
            return load(fsdp, reference=lambda: 1 / 0)

        @fsdp_conformance(only={CHECKS})
        def test_all_skip(fsdp):
            import pytest
            pytest.skip("no such machine")

        @fsdp_conformance(only={CHECKS})
        def test_one_skips(fsdp):
            import pytest
            if fsdp.rank == 1:
                pytest.skip("no such machine")
            fsdp.barrier()

        """
    )
    result = project.run("-v", "-rsxX")
    found: dict[str, list[str]] = {}
    for name, outcome in outcomes(result).items():
        found.setdefault(name.partition("[")[0], []).append(outcome)
    assert found == {
        "test_xfail": ["xfail", "passed", "not declared"],
        "test_unexpected": ["failed", "passed", "not declared"],
        "test_skip": ["left out", "passed", "not declared"],
        "test_broken": ["error", "same error", "same error"],
        "test_reference": ["passed", "passed", "error"],
        "test_reference_in_full_once": ["error", "same error"],
        "test_all_skip": ["skipped"] * 3,
        "test_one_skips": ["error", "same error", "same error"],
    }
    lines = result.outlines
    line = {
        name: n + 1
        for n, text in enumerate((project.path / "test_it.py").read_text().splitlines())
        for name in re.findall(r"def (test_\w+)", text)
    }
    not_declared = "Subject(reference=...) is not declared"
    # For pytest, a test begins at its decorator.
    assert f"SKIPPED [1] test_it.py:{line['test_xfail'] - 1}: {not_declared} [params_equal_reference]" in lines
    assert f"SKIPPED [1] test_it.py:{line['test_skip'] - 1}: not needed [no_meta_params]" in lines
    checks = ", ".join(name for name in built_in().ids() if name in CHECKS)
    assert f"SKIPPED [3] test_it.py:{line['test_all_skip'] - 1}: no such machine [{checks}]" in lines
    assert "XFAIL test_it.py::test_xfail[no_meta_params] - known" in lines
    assert story(result, "test_unexpected[no_meta_params]") == [
        "no_meta_params passes, but xfail expects it to fail (fixed since); remove it from xfail"
    ]
    assert story(result, "test_broken")[0] == ("test_broken: ranks 0, 1 raised RuntimeError: boom")
    headlines = [line for line in lines if " ERROR at setup of " in line]
    assert len(headlines) == list(outcomes(result).values()).count("error"), (
        "items with the same error have no headline"
    )
    first = "\n".join(story(result, "test_reference_in_full_once"))
    assert "ZeroDivisionError: division by zero" in first
    assert "return load(fsdp, reference=lambda: 1 / 0)" in first
    assert "rank 1 raised Skipped: no such machine" in story(result, "test_one_skips")[0]


def test_a_loader_that_returns_no_subject(project: Project) -> None:
    project.loaders(
        """
        import pytest
        import sys
        import threading

        class Unreadable:
            def __reduce__(self):
                return (int, ("seven",))

        @pytest.fixture
        def lock():
            note("lock")
            return threading.Lock()

        @pytest.fixture
        def unreadable():
            return Unreadable()

        only = fsdp_conformance(only=["no_meta_params", "no_meta_buffers"])

        @only
        def test_none(fsdp): load(fsdp)
        @only
        def test_list(fsdp): return [load(fsdp).model]
        @only
        def test_pair(fsdp):
            model = load(fsdp).model
            return model, torch.optim.AdamW(model.parameters())
        @only
        def test_coroutine(fsdp):
            async def later(): ...
            return later()
        @only
        def test_raises(fsdp):
            print("rank", fsdp.rank, "says hello")
            print("on stderr", file=sys.stderr)
            if fsdp.rank == 1:
                raise KeyError("boom")
            fsdp.barrier()
        @only
        def test_lock(fsdp, lock): ...
        @only
        def test_unreadable(fsdp, unreadable): ...
        class TestSelf:
            @only
            def test_self(self, fsdp): ...
            def setup_method(self):
                self.lock = threading.Lock()
        @only
        def test_goes_on(fsdp): return load(fsdp)
        """
    )
    result = project.run("-v")
    found = outcomes(result)
    assert {name for name, outcome in found.items() if outcome == "passed"} == {
        "test_goes_on[no_meta_params]",
        "test_goes_on[no_meta_buffers]",
    }
    loader = "but should return the loaded model or a Subject"
    remedy = "return plain data, such as a path or a config, and build the rest on the ranks"
    summaries = {
        "none": f"the loader returned None, {loader}; is a return statement missing?",
        "list": f"the loader returned list, {loader}; return Subject(model)",
        "pair": f"the loader returned tuple, {loader}; return Subject(model, optimizer=optimizer)",
        "coroutine": f"the loader returned coroutine, {loader}; a loader must be a plain function, not a "
        "coroutine or generator function",
        "raises": "rank 1 raised KeyError: 'boom'",
        "lock": "fixture 'lock' returns a lock, which cannot be sent to the ranks "
        f"(TypeError: cannot pickle '_thread.lock' object); {remedy}",
        "unreadable": "'unreadable': its value cannot be unpickled on the ranks "
        f"(ValueError: invalid literal for int() with base 10: 'seven'); {remedy}",
        "self": "the test and its instance (self) cannot be sent to the ranks: TypeError: cannot pickle "
        "'_thread.lock' object",
    }
    for name, summary in summaries.items():
        lines = story(result, f"test_{name}")
        assert lines[0] == f"test_{name}: {summary}"
        again = next(line for line in lines if line.startswith("rerun: "))
        assert f"test_{name}[no_meta_params]" in again
    assert [name for name, outcome in found.items() if outcome == "same error"] == [
        name.replace("params", "buffers") for name, outcome in found.items() if outcome == "error"
    ]
    assert project.notes == ["lock"]
    raised = "\n".join(story(result, "test_raises"))
    assert 'raise KeyError("boom")' in raised
    assert "Captured rank 0 setup" in raised
    assert "Captured rank 1 setup" in raised
    assert result.stdout.str().count("rank 0 says hello") == result.stdout.str().count("rank 1 says hello") == 1


@pytest.mark.parametrize("arguments", ["", "(world_size=4)"])
def test_loaders_and_tests_on_ranks_fail_without_the_plugin(project: Project, arguments: str) -> None:
    project.write(
        "test_it.py",
        f"""
        import pytest
        from pytest_fsdp_meta import fsdp_conformance, fsdp_spmd
        @fsdp_spmd{arguments}
        def test_spmd(): ...
        @fsdp_conformance{arguments}
        @pytest.mark.parametrize("n", [1])
        def test_x(n): ...
        @fsdp_conformance{arguments}
        def test_y(fsdp): ...
        @fsdp_conformance{arguments}
        class TestZ:
            def test_z(self): ...
        """,
    )
    result = project.run("-p", "no:fsdp-meta", "-W", "ignore")
    result.assert_outcomes(failed=3, errors=1)
    for name in ("test_x", "test_z"):
        assert (
            f"{name} is a loader for pytest-fsdp-meta, whose plugin is not active, so no check ran; install "
            "pytest-fsdp-meta and remove '-p no:fsdp-meta'"
        ) in result.outlines
    assert "E       fixture 'fsdp' not found" in result.outlines
    assert (
        "test_spmd runs on ranks of pytest-fsdp-meta, whose plugin is not active, so it did not run; install "
        "pytest-fsdp-meta and remove '-p no:fsdp-meta'"
    ) in result.outlines


def test_the_rerun_command_runs_the_same_item(project: Project) -> None:
    """The command works in the folder that pytest was started in, whatever characters the names have."""
    project.write("pytest.ini", "[pytest]\nfsdp_world_size = 1")
    project.loaders(
        """
        import pytest

        class TestIt:
            @pytest.mark.parametrize("text", ["it's a \\"b", "[x]::y", "ä$HOME", "\\n"])
            @fsdp_conformance(only=["no_meta_params"])
            def test_x(self, fsdp, text):
                note(f"{len(text)}-{fsdp.world_size}")
                with torch.device("meta"):
                    return build()
        """,
        "some folder/test_it's.py",
    )
    (project.path / "other").mkdir()
    first = project.shell(
        "python -m pytest -p no:cacheprovider --rootdir=.. --fsdp-world-size=1,2 '../some folder'", "other"
    )
    commands = [line.removeprefix("rerun: ") for line in first.outlines if line.startswith("rerun: ")]
    first.assert_outcomes(failed=8)
    assert len(set(commands)) == 8
    begin, end = "python -m pytest ", " -p no:cacheprovider --rootdir=.. --fsdp-world-size=1,2"
    assert all(command.startswith(begin) and command.endswith(end) for command in commands)
    names = " ".join(command.removeprefix(begin).removesuffix(end) for command in commands)
    chosen = project.shell(f"{begin} {names} {end} --collect-only -q", "other")
    assert len([line for line in chosen.outlines if "::" in line]) == 8
    before = project.notes
    again = project.shell(commands[1], "other")
    again.assert_outcomes(failed=1)
    assert commands[1] in again.stdout.str()
    assert project.notes[len(before) :] == ["9-2", "9-2"]


def test_the_rerun_command_names_this_python_if_python_is_another(project: Project, monkeypatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    project.loaders(
        """
        @fsdp_conformance(only=["no_meta_params"], world_size=1)
        def test_x(fsdp):
            with torch.device("meta"):
                return build()
        """
    )
    # In CI pytest repeats the whole message in its summary.
    lines = [line for line in project.run().outlines if line.startswith("rerun: ")]
    assert lines[0].startswith(f"rerun: {sys.executable} -m pytest 'test_it.py::test_x[no_meta_params]'")


OWN = """
import pytest
from pytest_fsdp_meta.catalogue import Finding, check

def owned(name):
    return {"weight": 1}[name]

@check(promise="it holds", family="own", needs=["inventory"], why="", cause="a cause", remedy="a remedy")
def my_broken_check(view):
    yield Finding(None, (0,), owned("oops"), "none")

@check(promise="so too", family="own", needs=["inventory"], after=["my_broken_check"], why="", cause="", remedy="")
def my_other_check(view):
    yield Finding("weight", (0,), "odd", "even")
    owned("oops")

def pytest_fsdp_checks():
    return [my_broken_check, my_other_check]
"""


def test_an_own_check_that_raises_has_its_authors_frames_only_and_keeps_its_findings(project: Project) -> None:
    project.write("conftest.py", OWN)
    project.loaders(
        """
        @fsdp_conformance(only=["my_broken_check", "my_other_check"])
        def test_it(fsdp):
            return load(fsdp)
        """
    )
    result = project.run()
    result.assert_outcomes(failed=1, errors=1)
    output = result.stdout.str()
    assert "my_broken_check: error: the custom check my_broken_check raised KeyError: 'oops'" in output
    before, _, _ = output.partition("short test summary info")  # the summary repeats it if CI is set
    frames = [line.strip() for line in before.splitlines() if line.strip().startswith("File ")]
    assert [line.partition(", line ")[0].endswith('conftest.py"') for line in frames] == [True, True]
    assert "rerun: python -m pytest 'test_it.py::test_it[my_broken_check]'" in output
    assert "  weight, rank 0: odd, but should be even" in result.outlines
    assert "and not judged: the custom check my_other_check raised KeyError: 'oops'" in result.outlines


def test_a_partly_checked_result_has_a_mark_and_a_count_of_its_own_under_xdist(project: Project) -> None:
    project.loaders(
        """
        checks = ["collectives_match_on_every_rank", "no_meta_params", "params_equal_reference"]
        checks += ["frozen_weights_equal_verifier"]

        @fsdp_conformance(world_size=1, only=checks)
        def test_bare(fsdp): return load(fsdp)
        """
    )
    result = project.run("-rs", "-n2")
    summary = "1 passed, 1 partly checked, 2 skipped (1 not declared, 1 not applicable), 55 left out"
    why = "no training step was recorded (Subject(batch=...) is not declared)"
    result.stdout.fnmatch_lines(
        [
            "*.pss *",
            f"test_it.py::test_bare, world of 1 (gloo on cpu): {summary}; *",
            f"partly checked: collectives_match_on_every_rank in test_it.py::test_bare: {why}",
            "SKIPPED [[]1[]] test_it.py:*: nothing is frozen: *",
            "SKIPPED [[]1[]] test_it.py:*: Subject(reference=...) is not declared [[]params_equal_reference[]]",
            "*= 1 passed, 2 skipped,* 1 partly checked in *",
        ]
    )


def test_a_fixture_that_does_not_exist_is_one_error(project: Project) -> None:
    project.loaders(
        """
        import pytest
        @pytest.fixture
        def checkpoint(tmp_pth): ...
        only = fsdp_conformance(only=["no_meta_params", "no_meta_buffers"])
        @only
        def test_own(fsdp, checkpont): ...
        @only
        def test_of_a_fixture(fsdp, checkpoint): ...
        @only
        def test_unlike_any(fsdp, xyzzy): ...
        """
    )
    result = project.run()
    result.assert_outcomes(errors=3)
    assert "3 errors, 3 same error" in result.outlines[-1]
    assert [
        line.partition(": ")[2] for line in result.outlines if line.startswith("test_") and ": fixture" in line
    ] == [
        "fixture 'checkpont' does not exist; did you mean 'checkpoint'?",
        "fixture 'tmp_pth', which fixture 'checkpoint' requests, does not exist; did you mean 'tmp_path'?",
        "fixture 'xyzzy' does not exist; pytest --fixtures lists those that there are",
    ]
    assert "available fixtures" not in result.stdout.str()


def test_a_fixture_that_raises_is_one_error(project: Project) -> None:
    project.loaders(
        f"""
        import itertools
        import pytest
        numbers = itertools.count()

        @pytest.fixture(scope="session")
        def checkpoint():
            raise OSError("no such folder")

        @pytest.fixture
        def anew():
            raise OSError(f"attempt {{next(numbers)}}")

        @fsdp_conformance(only={CHECKS})
        def test_session(fsdp, checkpoint): ...

        @fsdp_conformance(only={CHECKS})
        def test_another(fsdp, checkpoint): ...

        @fsdp_conformance(only=["no_meta_params", "no_meta_buffers"])
        def test_anew(fsdp, anew): ...
        """
    )
    result = project.run("-v")
    result.assert_outcomes(errors=4)
    found = outcomes(result)
    assert {name for name, outcome in found.items() if outcome == "error"} == {
        *("test_session[no_meta_params]", "test_another[no_meta_params]"),
        *("test_anew[no_meta_params]", "test_anew[no_meta_buffers]"),
    }
    assert list(found.values()).count("same error") == 4
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert "E       OSError: no such folder" in story(result, "test_session[no_meta_params]")
    assert "177 of 177 checks accounted for in 3 loaders" in result.stdout.str()
