"""What is said, before anything runs, about loaders and fixtures that cannot work: one line each, exit code 4."""

from __future__ import annotations

import pytest

from tests.conftest import CHECK, Project, errors

ARGUMENTS = "world_size, mesh, only, skip, xfail, tolerance, steps, timeout, process_group"
HINT = "(pytest --fsdp-list-checks shows all)"
NEAREST = f"there is no check 'no_meta_param'; did you mean 'no_meta_params'? {HINT}"


WRONG = [
    ("only=['no_meta_param']", f"only: {NEAREST}"),
    ("skip={'no_meta_param': 'why'}", f"skip: {NEAREST}"),
    ("xfail={'no_meta_param': 'why'}", f"xfail: {NEAREST}"),
    ("tolerance={'no_meta_param': 1e-3}", f"tolerance: {NEAREST}"),
    ("only='no_meta_buffer'", f"only: there is no check 'no_meta_buffer'; did you mean 'no_meta_buffers'? {HINT}"),
    ("skip={7: 'why'}", "skip: 7 is not the id of a check; ids are strings (pytest --fsdp-list-checks shows all)"),
    ("only=[]", "only=[] should be a list of check ids (pytest --fsdp-list-checks shows them)"),
    ("only=[7]", "only=[7] should be a list of check ids (pytest --fsdp-list-checks shows them)"),
    ("world_size=0", "world_size=0 should be a positive int"),
    ("world_size=-1", "world_size=-1 should be a positive int"),
    ("world_size='2'", "world_size='2' should be a positive int"),
    ("world_size=True", "world_size=True should be a positive int"),
    ("world_size=(2, -3)", "world_size=-3 should be a positive int"),
    ("world_size=()", "world_size=() should be a positive int or a tuple of different ones"),
    ("world_size=(2, 2)", "world_size=(2, 2) should be a positive int or a tuple of different ones"),
    ("mesh=[2, 2]", "mesh=[2, 2] should be a dict of dimension names to sizes, such as {'dp_shard': 2}"),
    ("mesh={}", "mesh names no dimension; write for example mesh={'dp_shard': 2}"),
    ("mesh={'tp': 0}", "mesh size tp=0 should be a positive int, or -1 for what is left over"),
    (
        "world_size=4, mesh={'dp_replicate': 2, 'dp_shard': 3}",
        "mesh dp_replicate=2 x dp_shard=3 multiplies out to 6, but the world size is 4",
    ),
    (
        "world_size=3, mesh={'dp_replicate': 2, 'dp_shard': -1}",
        "mesh dp_replicate=2 x dp_shard=-1 does not divide a world of 3: 3 / 2 is no int",
    ),
    (
        "mesh={'dp_replicate': -1, 'dp_shard': -1}",
        "mesh dp_replicate=-1 x dp_shard=-1 leaves 2 sizes open; only one may be -1",
    ),
    (
        "skip={'no_meta_params': 'a'}, xfail={'no_meta_params': 'b'}",
        "'no_meta_params' is in skip and in xfail; a check is either left out or expected to fail",
    ),
    (
        "skip={'no_meta_params': ' '}",
        "skip={'no_meta_params': ' '} should be a dict of check ids to reasons: {'loss_parity': 'bf16 router'}",
    ),
    (
        "xfail=['no_meta_params']",
        "xfail=['no_meta_params'] should be a dict of check ids to reasons: {'loss_parity': 'bf16 router'}",
    ),
    ("worldsize=2", "there is no argument 'worldsize'; did you mean 'world_size'?"),
    ("gpus=2", f"there is no argument 'gpus'; the arguments are {ARGUMENTS}"),
    ("2", f"2 has no name; the arguments are {ARGUMENTS}"),
    ("tolerance='1e-5'", "tolerance='1e-5' should be a relative tolerance such as 1e-5, or a dict by check id"),
    (
        "tolerance={'no_meta_params': 0.5}",
        "tolerance: 'no_meta_params' has no tolerance; those that have one are grad_parity, grad_norm_parity, "
        "update_parity, loss_parity, grad_accumulation_parity, resume_parity",
    ),
    ("tolerance=-1", "tolerance=-1 should be a relative tolerance such as 1e-5, or a dict by check id"),
    ("steps=0", "steps=0 should be a positive int"),
    ("steps=1.5", "steps=1.5 should be a positive int"),
    ("timeout=0", "timeout=0 should be a positive number of seconds"),
    ("timeout='5'", "timeout='5' should be a positive number of seconds"),
    ("process_group='mine'", "process_group='mine' should be 'plugin' or 'loader'"),
]


@pytest.mark.parametrize("decorator", ["fsdp_conformance", "pytest.mark.fsdp_conformance"])
def test_wrong_arguments(project: Project, decorator: str) -> None:
    """In one run, because each is told by itself."""
    functions = [f"@{decorator}({wrong})\ndef test_{n}(fsdp): ...\n" for n, (wrong, _) in enumerate(WRONG)]
    project.write("test_it.py", "import pytest\nfrom pytest_fsdp_meta import fsdp_conformance\n" + "".join(functions))
    assert errors(project.collect()) == [
        f"test_it.py::test_{n}: @fsdp_conformance: {message}" for n, (_, message) in enumerate(WRONG)
    ]


def test_every_mistake_is_told_and_the_same_one_once(project: Project) -> None:
    project.write(
        "test_it.py",
        """
        import pytest
        from pytest_fsdp_meta import fsdp_conformance
        @fsdp_conformance(world_size=0)
        @pytest.mark.parametrize("n", [1, 2])
        def test_a(fsdp, n): ...
        class TestB:
            @fsdp_conformance(world_size=0)
            def test_b(self, fsdp): ...
        @fsdp_conformance(steps=0)
        def test_c(fsdp): ...
        """,
    )
    assert errors(project.collect()) == [
        "test_it.py::test_a and 1 more: @fsdp_conformance: world_size=0 should be a positive int",
        "test_it.py::test_c: @fsdp_conformance: steps=0 should be a positive int",
    ]


def test_places_where_there_is_no_fsdp(project: Project) -> None:
    project.write(
        "test_it.py",
        """
        import unittest
        import pytest
        from pytest_fsdp_meta import fsdp_conformance
        @pytest.fixture
        def sharded(fsdp): ...
        @pytest.fixture
        def outer(sharded): ...
        @fsdp_conformance
        def test_a(fsdp, outer): ...
        def test_b(fsdp): ...
        @fsdp_conformance
        @pytest.mark.parametrize("fsdp", [1])
        def test_c(fsdp): ...
        @pytest.mark.fsdp_conformance
        class TestD(unittest.TestCase):
            def test_d(self): ...
        """,
    )
    assert errors(project.collect()) == [
        "test_it.py::test_a: fixture 'sharded' asks for 'fsdp', which exists on the ranks only, while fixtures are "
        "evaluated in the pytest process; ask for fsdp in the test itself",
        "test_it.py::test_b: it asks for 'fsdp', which exists on the ranks only; decorate it with @fsdp_conformance "
        "or @fsdp_spmd",
        "test_it.py::test_c: the test would get another 'fsdp' than that of pytest-fsdp-meta, which it hides; "
        "rename the other one",
        "test_it.py::TestD::test_d: @fsdp_conformance: a loader is a function, or a method of a plain class; "
        "pytest cannot parametrize one of unittest.TestCase",
    ]


def test_what_is_no_plain_function(project: Project) -> None:
    project.write(
        "test_it.py",
        """
        import pytest
        from pytest_fsdp_meta import fsdp_conformance
        @fsdp_conformance
        async def test_c(fsdp): ...
        @pytest.mark.fsdp_conformance
        async def test_d(fsdp): ...
        @fsdp_conformance
        def test_e(fsdp):
            yield
        """,
    )
    assert errors(project.collect()) == [
        "test_it.py::test_c and 2 more: @fsdp_conformance: a loader is a plain function, not a coroutine or a "
        "generator",
    ]


def test_fsdp_through_getfixturevalue(project: Project) -> None:
    project.write("test_it.py", "def test_x(request): request.getfixturevalue('fsdp').rank")
    result = project.collect()
    result.assert_outcomes(failed=1)
    told = "fsdp.rank: 'fsdp' exists on the ranks only; a loader or an SPMD test asks for it as an argument"
    assert told in result.outlines


def test_a_fixture_of_that_name_elsewhere_is_no_concern_of_ours(project: Project) -> None:
    project.write(
        "conftest.py", "import pytest\n@pytest.fixture\ndef fsdp(): return 7\n@pytest.fixture\ndef a(fsdp): return fsdp"
    )
    project.write("test_it.py", "def test_x(fsdp, a): assert fsdp == a == 7")
    project.collect().assert_outcomes(passed=1)


@pytest.mark.parametrize("extra", [(), ("--dist", "loadfile"), ("--dist", "each"), ("-k", "test_other")])
def test_under_xdist_it_is_the_same_line(project: Project, extra: tuple[str, ...]) -> None:
    project.write(
        "test_it.py",
        """
        from pytest_fsdp_meta import fsdp_conformance
        @fsdp_conformance(world_size=0)
        def test_x(fsdp): ...
        def test_other(): ...
        """,
    )
    message = "test_it.py::test_x: @fsdp_conformance: world_size=0 should be a positive int"
    assert errors(project.run("-n2", *extra)) == [message]


@pytest.mark.parametrize(
    ("name", "after", "value", "message"),
    [
        ("no_meta_params", "()", "[no_meta_params]", "two checks are named 'no_meta_params'"),
        ("own", "['no_meta_param']", "[own]", NEAREST),
        ("own", "()", "own", "it should return a list of checks, but returned Check(id='own', promise='every"),
        ("own", "()", "None", "it should return a list of checks, but returned None"),
        ("own", "()", "[print]", "<built-in function print> is not a check; decorate the judge with @check(...)"),
    ],
)
@pytest.mark.parametrize("args", [(), ("--fsdp-list-checks",), ("-n2",)])
def test_bad_check_of_downstream(
    project: Project, args: tuple[str, ...], name: str, after: str, value: str, message: str
) -> None:
    project.write("conftest.py", CHECK.format(name=name, after=after, value=value))
    project.write("test_it.py", "def test_x(): ...")
    (line,) = errors(project.collect(*args))
    assert line.startswith(f"conftest.py: hook pytest_fsdp_checks: {message}")


def test_check_that_pytest_finds_too_late(project: Project) -> None:
    project.write("pkg/deep/conftest.py", CHECK.format(name="own", after="()", value="[own]"))
    project.write("pkg/deep/test_it.py", "def test_x(): ...")
    assert errors(project.collect()) == [
        "pkg/deep/conftest.py: pytest found hook pytest_fsdp_checks too late, while collecting; move it to the "
        "conftest.py of the root folder, or name this folder in testpaths or on the command line"
    ]
    project.collect("pkg/deep").assert_outcomes(passed=1)
