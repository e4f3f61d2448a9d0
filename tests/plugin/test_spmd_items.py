"""Tests with ``@fsdp_spmd`` and ``fsdp_world``: fixtures, skips, scopes, Hypothesis and usage errors."""

from __future__ import annotations

import re

import pytest

from tests.conftest import Project, errors
from tests.plugin.test_outcomes import story

HEAD = """
import os
import pytest
import torch
import torch.distributed as dist
from pytest_fsdp_meta import WorldError, fsdp_spmd
from pytest_fsdp_meta.worlds import current

def summed(value):
    tensor = torch.tensor(float(value))
    dist.all_reduce(tensor)
    return tensor.item()
"""


BARE = "import pytest\nfrom pytest_fsdp_meta import fsdp_spmd\n"
"""Imports for inner runs in this process, which must not import torch a second time: its C code would crash."""


def run(project: Project, text: str, *args: str) -> pytest.RunResult:
    project.write("test_it.py", HEAD + text)
    return project.run("-v", *args)


def results(result: pytest.RunResult) -> dict[str, str]:
    found = re.findall(r"^\S+?::(\S+) (PASSED|FAILED|SKIPPED|ERROR|XFAIL|XPASS)\b", result.stdout.str(), re.MULTILINE)
    return {name: outcome.lower() for name, outcome in found}


def test_the_body_runs_on_every_rank(project: Project) -> None:
    result = run(
        project,
        """
@pytest.fixture
def three(): return 3

@fsdp_spmd(world_size=(1, 3))
def test_sizes(fsdp):
    assert summed(1) == fsdp.world_size == fsdp.mesh.size()

@fsdp_spmd(mesh={"dp_replicate": 2, "dp_shard": 2})
@pytest.mark.parametrize("n", [1, 2])
def test_mesh(fsdp, three, n, tmp_path):
    assert fsdp.mesh.mesh_dim_names == ("dp_replicate", "dp_shard")
    (tmp_path / str(fsdp.rank)).write_text(str(three * n))

@pytest.mark.fsdp_spmd
class TestClass:
    factor = 2
    def test_method(self, fsdp):
        assert summed(self.factor) == 4

@fsdp_spmd(process_group="loader")
def test_group(fsdp):
    dist.init_process_group("gloo")
    assert summed(1) == 2

@fsdp_spmd
def test_returns(fsdp): return fsdp.rank == 5

def test_plain(): ...
""",
    )
    result.assert_outcomes(passed=8, warnings=1)
    assert list(results(result)) == [
        "test_sizes[world1]",
        "test_sizes[world3]",
        "test_mesh[1]",
        "test_mesh[2]",
        "TestClass::test_method",
        "test_group",
        "test_returns",
        "test_plain",
    ]
    returned = "test_it.py::test_returns returned a bool, but a test should return None; did you mean assert?"
    assert returned in result.stdout.str()


def test_a_failing_assert_shows_its_values_and_its_rank(project: Project) -> None:
    result = run(
        project,
        """
def helper(rank):
    assert [1, 2, rank] == [1, 2, 0], "of the helper"

@fsdp_spmd
def test_fails(fsdp):
    print("hello from", fsdp.rank)
    helper(fsdp.rank)

@fsdp_spmd
def test_fails_everywhere(fsdp):
    pytest.fail("enough", pytrace=False)

@fsdp_spmd
def test_passes(fsdp): summed(1)

@fsdp_spmd
def test_other_addresses(fsdp): assert object() is None
""",
        "-p", "no:randomly",
    )  # fmt: skip
    assert list(results(result).values()) == ["failed", "failed", "passed", "failed"]
    lines = story(result, "test_fails")
    assert lines[:2] == ["rank 1 raised AssertionError: of the helper", "(while running test_fails)"]
    assert "E       assert [1, 2, 1] == [1, 2, 0]" in lines
    assert "E         At index 2 diff: 1 != 0" in lines
    assert '>       assert [1, 2, rank] == [1, 2, 0], "of the helper"' in lines
    assert "rerun: python -m pytest test_it.py::test_fails -p no:cacheprovider -p no:randomly" in lines
    assert not any("pytest_fsdp_meta" in line for line in lines), "the traceback should begin in the test"
    assert "hello from 0" in lines
    assert "hello from 1" in lines
    assert story(result, "test_fails_everywhere")[:4] == [
        "ranks 0, 1 raised Failed: enough",
        "(while running test_fails_everywhere)",
        "",
        "enough",
    ]
    lines = story(result, "test_other_addresses")
    assert lines[0].startswith("ranks 0, 1 raised AssertionError: assert <object object at 0x")
    assert not any(line.startswith("then rank") for line in lines)


def test_plain_asserts_stay_plain(project: Project) -> None:
    text = "@fsdp_spmd(world_size=1)\ndef test_x(fsdp): assert [1] == [2]\n"
    lines = story(run(project, text, "--assert=plain"), "test_x")
    assert lines[0] == "rank 0 raised AssertionError"


def test_skip_and_xfail_need_all_ranks(project: Project) -> None:
    result = run(
        project,
        """
@fsdp_spmd
def test_skip(fsdp): pytest.skip("no bf16")

@fsdp_spmd(scope="module")
def test_xfail(fsdp): pytest.xfail("issue 7")

@fsdp_spmd
def test_one_skips(fsdp):
    if fsdp.rank: pytest.skip("no bf16")

@fsdp_spmd
def test_they_differ(fsdp):
    pytest.skip("a") if fsdp.rank else pytest.xfail("b")

@fsdp_spmd
def test_one_skips_and_one_fails(fsdp):
    if fsdp.rank: pytest.skip("a")
    raise RuntimeError("boom")

@pytest.mark.xfail(reason="known", strict=True)
@fsdp_spmd
def test_marked(fsdp): assert fsdp.rank == 0

def test_skip_in_a_call(fsdp_world):
    fsdp_world.run(lambda: pytest.skip("from ranks"))

@fsdp_spmd
def test_skip_of_unittest(fsdp): raise __import__("unittest").SkipTest("no GPU")
""",
        "-rs",
    )
    assert list(results(result).values()) == [
        *("skipped", "xfail", "failed", "failed", "failed", "xfail", "skipped", "skipped")
    ]
    text = result.stdout.str()
    assert re.search(r"SKIPPED \[1\] test_it.py:\d+: no bf16", text)
    agree = "; all ranks should agree, so decide by something that is the same on every rank"
    assert f"rank 1 skipped (no bf16), but rank 0 did not{agree}" in result.outlines
    (differ,) = [line for line in result.outlines if "rank 1 skipped (a)" in line and "rank 0" in line]
    assert "rank 0 expected to fail (b)" in differ
    assert story(result, "test_one_skips_and_one_fails")[0] == "rank 0 raised RuntimeError: boom"


def test_a_kept_world_is_reset_between_tests(project: Project) -> None:
    result = run(
        project,
        """
PIDS = []

@pytest.mark.parametrize("n", range(4))
@pytest.mark.fsdp_world(scope="module")
def test_kept(fsdp_world, n):
    def use():
        modes = torch.get_default_dtype(), torch.get_default_device().type
        found = os.environ.get("LEFT"), modes, dict(current().state), os.getcwd()
        os.environ["LEFT"] = "1"
        torch.set_default_dtype(torch.float64)
        current().state["left"] = 1
        os.chdir("/")
        drawn = torch.rand(1).item(), summed(1)
        torch.set_default_device("meta")
        return os.getpid(), found, drawn
    results = fsdp_world.run(use)
    PIDS.append([pid for pid, *_ in results])
    assert all(found[:3] == (None, (torch.float32, "cpu"), {}) and found[3] != "/" for _, found, _ in results)
    assert len({drawn for _, _, drawn in results}) == 1

def test_it_was_one_world(): assert len({tuple(pids) for pids in PIDS}) == 1

@fsdp_spmd(scope="module")
def test_unpaired(fsdp):
    if fsdp.rank == 0: dist.all_reduce(torch.ones(1), async_op=True)

@fsdp_spmd(scope="module")
def test_after(fsdp): assert summed(1) == 2

@fsdp_spmd(scope="module")
def test_destroys(fsdp): dist.destroy_process_group()

@fsdp_spmd(scope="module")
def test_after_that(fsdp): assert summed(1) == 2
""",
    )
    result.assert_outcomes(passed=9, errors=1)
    lines = story(result, "test_unpaired")[0]
    assert re.match(r"the ranks have not called the same number of collectives \(rank 0: \d+, rank 1: \d+\), so", lines)


def test_unpaired_collectives_are_found_where_the_mesh_has_a_group_of_its_own(project: Project) -> None:
    """DeviceMesh makes one on a machine with GPUs if the default group is gloo, with the same ranks."""
    result = run(
        project,
        """
torch.cuda.is_available = lambda: True  # only DeviceMesh asks

@fsdp_spmd(scope="module")
def test_unpaired(fsdp):
    assert fsdp.mesh.get_group().group_name != dist.group.WORLD.group_name
    if fsdp.rank == 0: dist.all_reduce(torch.ones(1), async_op=True)

@fsdp_spmd(scope="module")
def test_after(fsdp):
    if fsdp.rank == 0: dist.all_reduce(torch.ones(1), group=fsdp.mesh.get_group(), async_op=True)

@fsdp_spmd(scope="module")
def test_paired(fsdp): assert summed(1) == 2
""",
    )
    result.assert_outcomes(passed=3, errors=2)
    assert "the ranks have not called the same number of collectives (rank 0:" in story(result, "test_unpaired")[0]
    assert "the ranks have not called the same number of collectives (rank 0:" in story(result, "test_after")[0]


def test_a_kept_world_has_the_environment_of_a_fresh_one(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTHERS", "2")
    result = run(
        project,
        """
import weakref

PIDS, MODELS = set(), []

@pytest.fixture
def away(tmp_path, monkeypatch):
    monkeypatch.setenv("MINE", "1")
    monkeypatch.delenv("OTHERS")
    monkeypatch.chdir(tmp_path)

def surroundings(): return os.environ.get("MINE"), os.environ.get("OTHERS"), os.getcwd()

@pytest.mark.fsdp_world(world_size=1, scope="module")
class TestKept:
    def test_first(self, fsdp_world):
        PIDS.update(fsdp_world.run(os.getpid))

    def test_second(self, away, fsdp_world):
        assert fsdp_world.run(surroundings) == [("1", None, os.getcwd())]

    def test_third(self, fsdp_world):
        assert fsdp_world.run(surroundings) == [(None, "2", os.getcwd())]
        assert PIDS == set(fsdp_world.run(os.getpid))

@pytest.mark.fsdp_world(world_size=1, scope="session")
class TestBegunElsewhere:
    def test_first(self, away, fsdp_world): ...

    def test_second(self, fsdp_world):
        assert fsdp_world.run(surroundings) == [(None, "2", os.getcwd())]

    def test_model(self, fsdp_world): fsdp_world.run(build)

    def test_skips(self, fsdp_world): fsdp_world.run(build, "no GPU")

    def test_after_models(self, fsdp_world): assert fsdp_world.run(models) == [[None, None]]

def build(reason=""):
    model = torch.nn.Linear(1, 1)
    model.cycle = [model]
    MODELS.append(weakref.ref(model))
    if reason: pytest.skip(reason)

def models(): return [model() for model in MODELS]
""",
        "-p", "no:randomly", "-o", "tmp_path_retention_policy=none",
    )  # fmt: skip
    result.assert_outcomes(passed=7, skipped=1)


def test_unpaired_collectives_in_a_kept_world(project: Project) -> None:
    result = run(
        project,
        """
def rows(): return current().mesh["dp_shard"].get_group()

@pytest.mark.fsdp_world(mesh={"dp_replicate": 2, "dp_shard": 2}, scope="module")
class TestKept:
    def test_unpaired_in_a_row(self, fsdp_world):
        def alone():
            if current().rank == 3:
                dist.all_reduce(torch.ones(1), group=rows(), async_op=True)
        fsdp_world.run(alone)

    def test_next(self, fsdp_world):
        def row():
            ones = torch.ones(1)
            dist.all_reduce(ones, group=rows())
            return ones.item()
        assert fsdp_world.run(row) == [2] * 4

    def test_two_of_them_talk(self, fsdp_world):
        def talk():
            if current().rank == 0: dist.send(torch.ones(1), 3)
            if current().rank == 3: dist.recv(torch.ones(1), 0)
        fsdp_world.run(talk)

    def test_destroys_a_row(self, fsdp_world): fsdp_world.run(lambda: dist.destroy_process_group(rows()))

    def test_last(self, fsdp_world): assert fsdp_world.run(lambda: dist.get_world_size(rows())) == [2] * 4
""",
        "-p", "no:randomly", "--fsdp-timeout=60",
    )  # fmt: skip
    result.assert_outcomes(passed=5, errors=1)
    lines = story(result, "test_unpaired_in_a_row")[0]
    count = (
        r"the ranks have not called the same number of collectives in the group of ranks 2, 3 \(rank 2: 0, rank 3: 1\)"
    )
    assert re.match(count, lines)


@pytest.mark.parametrize(("scope", "worlds"), [("function", 4), ("module", 2), ("session", 1)])
def test_scopes_of_worlds(project: Project, scope: str, worlds: int) -> None:
    text = (
        f"SCOPE = {scope!r}"
        + """
import pytest
import os, pathlib
pytestmark = pytest.mark.fsdp_world(scope=SCOPE)
def test_a(fsdp_world): note(fsdp_world)
def test_b(fsdp_world): note(fsdp_world)
def note(world):
    with open(pathlib.Path(__file__).parent / "notes", "a") as file:
        file.write(f"{world.run(os.getpid)[0]}\\n")
"""
    )
    for name in ("test_one.py", "test_two.py"):
        project.write(name, text)
    project.run().assert_outcomes(passed=4)
    assert len(set(project.notes)) == worlds


def test_fsdp_world(project: Project) -> None:
    result = run(
        project,
        """
import threading
LOCK = threading.Lock()

def double(x, plus=0): return 2 * x + plus + current().rank

@pytest.fixture
def warmed(fsdp_world):
    yield fsdp_world.run(summed, 1)
    assert fsdp_world.run(summed, 1) == [3, 3, 3]

@pytest.mark.fsdp_world(world_size=3)
def test_run(fsdp_world, warmed):
    assert fsdp_world.run(double, 2, plus=1) == [5, 6, 7]
    assert fsdp_world.run("os:getpid") != [os.getpid()] * 3
    assert (fsdp_world.size, fsdp_world.mesh, fsdp_world.backend, fsdp_world.device_type) == (
        3, {"dp_shard": 3}, "gloo", "cpu")
    assert repr(fsdp_world) == "<fsdp_world of 3 (gloo on cpu)>"

def test_failure(fsdp_world):
    def boom():
        if current().rank: raise KeyError("boom")
        summed(1)
    with pytest.raises(WorldError, match="rank 1 raised KeyError: 'boom'"):
        fsdp_world.run(boom)
    assert fsdp_world.run(summed, 2) == [4, 4]
    fsdp_world.run(boom)

def test_unsendable(fsdp_world): fsdp_world.run(print, LOCK)

def test_keyword(fsdp_world): fsdp_world.run(print, 1, end=LOCK)

def test_closure(fsdp_world):
    lock = threading.Lock()
    fsdp_world.run(lambda: lock.acquire())

def test_number(fsdp_world): fsdp_world.run(5)

def test_name(fsdp_world): fsdp_world.run("dist.get_rank")
""",
    )
    assert list(results(result).values()) == ["passed", *["failed"] * 6]
    lines = story(result, "test_failure")
    assert ">       fsdp_world.run(boom)" in lines
    assert "E       pytest_fsdp_meta.worlds.failures.WorldError: rank 1 raised KeyError: 'boom'" in lines
    assert not any("fixture_worlds.py" in line or "world.py" in line for line in lines)
    text = result.stdout.str()
    assert (
        "ValueError: argument 1 of fsdp_world.run is a lock, which cannot be sent to the ranks (TypeError: cannot"
        in text
    )
    assert "argument 'end' of fsdp_world.run is a lock, which cannot be sent to the ranks (TypeError: " in text
    assert (
        "function <lambda> of fsdp_world.run, or something it refers to, cannot be sent to the ranks (TypeErr" in text
    )
    assert "fsdp_world.run: 5 should be a function, or its name as 'module:name'" in text
    assert "fsdp_world.run: 'dist.get_rank' should be a function, or its name as 'module:name'" in text
    assert "cloudpickle" not in text


def test_fsdp_world_outside_of_its_test(project: Project) -> None:
    result = run(
        project,
        """
import threading
KEPT = []

@pytest.mark.fsdp_world(world_size=1)
class TestClass:
    def test_keeps(self, fsdp_world): KEPT.append(fsdp_world)

    def test_threads(self, fsdp_world):
        errors, busy = [], threading.Event()
        def call():
            busy.set()
            fsdp_world.run("time:sleep", 1000)
        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        while not errors:
            try:
                fsdp_world.run(os.getpid)
            except ValueError as error:
                errors.append(str(error))
        assert errors == ["fsdp_world: a call from another thread is running; make one call at a time"]

    def test_function(self, fsdp_world): assert fsdp_world.run(lambda function: function, function=3) == [3]

    def test_closure(self, fsdp_world): fsdp_world.run(lambda: fsdp_world.size)

def test_after(): KEPT[0].run(os.getpid)

def test_by_request(request): request.getfixturevalue("fsdp_world").run(os.getpid)
""",
        "-p", "no:randomly",
    )  # fmt: skip
    assert list(results(result).values()) == ["passed", "passed", "passed", "failed", "failed", "failed"]
    text = result.stdout.str()
    assert "TypeError: fsdp_world exists in the pytest process only; pass plain values to functions on ranks" in text
    for name in ("test_after", "test_by_request"):
        (line,) = [line for line in story(result, name) if line.startswith("E ")]
        assert "ValueError: fsdp_world: no test that requested it is running; a test, or one of its fixtures," in line


def test_a_test_collected_twice_gets_two_worlds(project: Project) -> None:
    text = """
import os
def test_x(fsdp_world):
    with open("notes", "a") as file:
        print(fsdp_world.run(os.getpid)[0], file=file)
"""
    project.write("test_it.py", text)
    project.run("--keep-duplicates", "--fsdp-world-size=1", "test_it.py", "test_it.py").assert_outcomes(passed=2)
    assert len(set(project.notes)) == 2


def test_hypothesis_draws_one_example_for_all_ranks(project: Project) -> None:
    result = run(
        project,
        """
from hypothesis import assume, given, settings, strategies as st

settings.register_profile("calm", deadline=None)  # the machine may be busy
settings.load_profile("calm")

@pytest.fixture(scope="module")
def limit(): return 300

@fsdp_spmd
@given(n=st.integers(0, 1000))
def test_given(fsdp, n, limit):
    assume(n != 3)
    assert summed(n) == 2 * n
    assert n < limit or fsdp.rank == 0

@given(st.integers(0, 1000))
@settings(max_examples=20)
@fsdp_spmd(scope="module")
def test_given_outside(fsdp, n):
    assert summed(n) == 2 * n

@given(n=st.integers(0, 1000))
@settings(max_examples=20)
def test_world(fsdp_world, n):
    assert fsdp_world.run(summed, n) == [2 * n, 2 * n]

class TestClass:
    @fsdp_spmd
    @given(n=st.integers(0, 5))
    def test_method(self, fsdp, n): assert summed(n) == 2 * n

@fsdp_spmd
@given(data=st.data())
def test_interactive(fsdp, data): ...

def make():
    @fsdp_spmd(world_size=1)
    @given(n=st.integers(0, 5))
    def test_made(fsdp, n): assert summed(n) == n
    return test_made
test_made = make()

@pytest.mark.fsdp_world(world_size=1)
@given(n=st.integers(0, 9))
def test_assume_in_a_call(fsdp_world, n):
    fsdp_world.run(lambda n: assume(n % 2), n)
""",
    )
    assert list(results(result).values()) == ["failed", "passed", "passed", "passed", "failed", "passed", "passed"]
    assert "outside a property-based test" not in result.stdout.str()
    lines = story(result, "test_given")
    assert lines[0] == "rank 1 raised AssertionError: assert (300 < 300 or 1 == 0)"
    drawn = sorted(line.strip() for line in lines if re.fullmatch(r"    \w+=\w+,", line))
    assert drawn == ["fsdp=fsdp,", "limit=300,", "n=300,"]
    assert "Explanation" not in "\n".join(lines)
    assert "argument 'data' is a DataObject, which cannot be sent to the ranks" in result.stdout.str()


def test_examples_that_fail_in_different_ways(project: Project) -> None:
    result = run(
        project,
        """
from hypothesis import example, given, settings, strategies as st
few = settings(database=None, deadline=None, max_examples=5)
CALLS = []

@fsdp_spmd
@few
@given(n=st.integers(0, 10))
@example(n=20)
@example(n=21)
def test_differ(fsdp, n):
    if n == 20 and fsdp.rank: pytest.skip("not twenty")
    assert n != 21

@fsdp_spmd(world_size=1)
@settings(database=None, deadline=None)
@given(n=st.integers(0, 1000))
def test_flaky(fsdp, n):
    with open(__file__ + ".calls", "a") as file:
        file.write("x")
    assert os.path.getsize(__file__ + ".calls") != 5
""",
    )
    (flaky,) = [line for line in story(result, "test_flaky") if "produces unreliable results" in line]
    assert flaky.startswith("(Hypothesis test_flaky(fsdp=fsdp, n=")
    lines = story(result, "test_differ")
    text = "\n".join(lines)
    assert "rank 1 skipped (not twenty), but rank 0 did not" in text
    assert "ranks 0, 1 raised AssertionError: assert 21 != 21" in text
    assert "    n=20," in lines
    assert "    n=21," in lines
    assert not any("pytest_fsdp_meta/" in line for line in lines)


def test_usage_errors(project: Project) -> None:
    project.write(
        "test_it.py",
        BARE
        + """
from pytest_fsdp_meta import fsdp_conformance

@fsdp_spmd(world_size=0)
def test_size(fsdp): ...
@fsdp_spmd(scope="class")
def test_scope(fsdp): ...
@fsdp_spmd(wrld_size=2)
def test_name(fsdp): ...
@fsdp_spmd(process_group="loader", scope="module")
def test_group(fsdp): ...
@fsdp_spmd
async def test_async(fsdp): ...
@fsdp_spmd
def test_world(fsdp_world): ...
@fsdp_spmd
@fsdp_conformance
def test_both(fsdp): ...
def test_neither(fsdp): ...
@pytest.mark.fsdp_world(4)
def test_positional(fsdp_world): ...
@pytest.mark.fsdp_world(world_size=4)
@fsdp_spmd
def test_other_mark(fsdp): ...
@pytest.mark.fsdp_world(world_size=4)
def test_unasked(): ...
@fsdp_spmd(world_size=2)
@fsdp_spmd(world_size=4)
def test_twice(fsdp): ...
@pytest.mark.fsdp_world(world_size=3)
class TestAll:
    def test_plain(self): ...
    @pytest.mark.fsdp_world(world_size=1)
    def test_other(self, fsdp_world): ...
class TestUnit(__import__("unittest").TestCase):
    @pytest.fixture(autouse=True)
    def world(self, fsdp_world): self.world = fsdp_world
    def test_unit(self): ...
""",
    )
    known = "the arguments are world_size, mesh, scope, timeout, process_group"
    assert errors(project.collect()) == [
        "test_it.py::test_size: @fsdp_spmd: world_size=0 should be a positive int",
        "test_it.py::test_scope: @fsdp_spmd: scope='class' should be 'function', 'module' or 'session'",
        "test_it.py::test_name: @fsdp_spmd: unknown argument 'wrld_size'; did you mean 'world_size'?",
        "test_it.py::test_group: @fsdp_spmd: scope='module' keeps the ranks for other tests, but with "
        "process_group='loader' each test creates its own process group; remove scope",
        "test_it.py::test_async: @fsdp_spmd: an SPMD test should be a plain function, not a coroutine or a generator",
        f"test_it.py::test_positional: @fsdp_world: unexpected positional argument 4; {known}",
        "test_it.py::test_world: fixture 'fsdp_world' exists in the pytest process only, but @fsdp_spmd runs the test "
        "on ranks; remove the fixture",
        "test_it.py::test_both: @fsdp_conformance and @fsdp_spmd cannot be combined: a test is either a loader or a "
        "body for every rank; remove one",
        "test_it.py::test_neither: the test requests 'fsdp', which exists on the ranks only; decorate it with "
        "@fsdp_conformance or @fsdp_spmd",
        "test_it.py::test_other_mark: @pytest.mark.fsdp_world configures fixture 'fsdp_world' only; pass its "
        "arguments to @fsdp_spmd",
        "test_it.py::test_unasked: @pytest.mark.fsdp_world configures fixture 'fsdp_world', which the test does not "
        "request, so nothing would run on ranks; request the fixture, or use @fsdp_spmd",
        "test_it.py::test_twice: @fsdp_spmd is applied twice; merge the two (for several sizes: world_size=(2, 4))",
        "test_it.py::TestUnit::test_unit: a test that requests fixture 'fsdp_world' should be a function or a method "
        "of a plain class; pytest cannot parametrize methods of unittest.TestCase",
    ]


def test_fixtures_on_ranks(project: Project) -> None:
    result = run(
        project,
        """
@fsdp_spmd(scope="module")
def test_patch(fsdp, monkeypatch):
    monkeypatch.setattr(torch, "of_the_test", 5, raising=False)
    assert torch.of_the_test == 5

@fsdp_spmd(scope="module")
def test_undone(fsdp): assert not hasattr(torch, "of_the_test")

@fsdp_spmd
def test_recwarn(fsdp, recwarn): ...

@fsdp_spmd
def test_property(fsdp, record_property): ...

@fsdp_spmd
def test_paths(fsdp, tmp_path, tmp_path_factory): assert tmp_path.exists()
""",
    )
    assert list(results(result).values()) == ["passed", "passed", "error", "error", "passed"]
    why = "works in the pytest process only; use something inside the body instead, such as pytest.warns"
    assert f"fixture 'recwarn' {why}" in result.stdout.str()
    assert f"fixture 'record_property' {why}" in result.stdout.str()
