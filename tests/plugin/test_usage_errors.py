"""Usage errors about loaders, fixtures and hooks: one line each, exit code 4, before any test runs."""

from __future__ import annotations

import pytest

from tests.conftest import CHECK, Project, errors

ARGUMENTS = "world_size, mesh, only, skip, xfail, tolerance, steps, timeout, process_group, simulate, simulate_ranks"
HINT = "(pytest --fsdp-list-checks shows all)"
NEAREST = f"there is no check 'no_meta_param'; did you mean 'no_meta_params'? {HINT}"


WRONG = [
    ("only=['no_meta_param']", f"only: {NEAREST}"),
    ("skip={'no_meta_param': 'why'}", f"skip: {NEAREST}"),
    ("xfail={'no_meta_param': 'why'}", f"xfail: {NEAREST}"),
    ("tolerance={'no_meta_param': 1e-3}", f"tolerance: {NEAREST}"),
    ("only='no_meta_buffer'", f"only: there is no check 'no_meta_buffer'; did you mean 'no_meta_buffers'? {HINT}"),
    ("skip={7: 'why'}", "skip: 7 should be a check id, a string (pytest --fsdp-list-checks lists them)"),
    ("only=[]", "only=[] should name one check or more (pytest --fsdp-list-checks lists them)"),
    ("world_size=0", "world_size=0 should be a positive int"),
    ("world_size='2'", "world_size='2' should be a positive int"),
    ("world_size=True", "world_size=True should be a positive int"),
    ("world_size=(2, -3)", "world_size=-3 should be a positive int"),
    ("world_size=()", "world_size=() should be a positive int or a tuple of distinct positive ints"),
    ("world_size=(2, 2)", "world_size=(2, 2) should be a positive int or a tuple of distinct positive ints"),
    ("simulate=0", "simulate=0 should be a positive int"),
    (
        "simulate=True, mesh={'tp': 2, 'dp_shard': -1}",
        "simulate=True needs a size: write simulate=1024, or give every size of the mesh",
    ),
    ("simulate=8, world_size=8", "simulate=8 is the size of the world; remove world_size"),
    (
        "simulate=9, mesh={'dp_shard': -1, 'tp': 2}",
        "mesh dp_shard=-1 x tp=2 does not fit a world of 9, which is not a multiple of 2",
    ),
    ("simulate=10**9", "a simulated world has at most 131072 ranks, not 1000000000; torch lists all of them"),
    ("mesh=[2, 2]", "mesh=[2, 2] should be a dict of dimension names to sizes, such as {'dp_shard': 2}"),
    (
        "world_size=4, mesh={'dp_replicate': 2, 'dp_shard': 3}",
        "mesh dp_replicate=2 x dp_shard=3 has 6 ranks, but the world size is 4",
    ),
    (
        "skip={'no_meta_params': 'a'}, xfail={'no_meta_params': 'b'}",
        "'no_meta_params' is in both skip and xfail; remove it from one",
    ),
    (
        "skip={'no_meta_params': ' '}",
        "skip={'no_meta_params': ' '} should be a dict of check ids to reasons, such as {'loss_parity': 'bf16 router'}",
    ),
    (
        "xfail=['no_meta_params']",
        "xfail=['no_meta_params'] should be a dict of check ids to reasons, such as {'loss_parity': 'bf16 router'}",
    ),
    ("worldsize=2", "unknown argument 'worldsize'; did you mean 'world_size'?"),
    ("gpus=2", f"unknown argument 'gpus'; the arguments are {ARGUMENTS}"),
    ("2", f"unexpected positional argument 2; the arguments are {ARGUMENTS}"),
    ("tolerance='1e-5'", "tolerance='1e-5' should be a relative tolerance such as 1e-5, or a dict by check id"),
    (
        "tolerance={'no_meta_params': 0.5}",
        "tolerance: check 'no_meta_params' has no tolerance; the checks that have one are grad_parity, "
        "grad_norm_parity, grad_clip_parity, buffers_follow_training, second_grad_parity, update_parity, loss_parity, "
        "grad_accumulation_parity, beside_parity, resume_parity",
    ),
    ("tolerance=-1", "tolerance=-1 should be a relative tolerance such as 1e-5, or a dict by check id"),
    ("steps=0", "steps=0 should be a positive int"),
    ("timeout=0", "timeout=0 should be a positive number of seconds below 1e9"),
    ("process_group='mine'", "process_group='mine' should be 'plugin' or 'loader'"),
]


@pytest.mark.parametrize("decorator", ["fsdp_conformance", "pytest.mark.fsdp_conformance"])
def test_wrong_arguments(project: Project, decorator: str) -> None:
    """One run reports them all, each in its own line."""
    functions = [f"@{decorator}({wrong})\ndef test_{n}(fsdp): ...\n" for n, (wrong, _) in enumerate(WRONG)]
    project.write("test_it.py", "import pytest\nfrom pytest_fsdp_meta import fsdp_conformance\n" + "".join(functions))
    assert errors(project.collect()) == [
        f"test_it.py::test_{n}: @fsdp_conformance: {message}" for n, (_, message) in enumerate(WRONG)
    ]


def test_arrays_as_arguments_are_named_in_one_line(project: Project) -> None:
    project.write(
        "test_it.py",
        """
        import numpy, torch
        from pytest_fsdp_meta import fsdp_conformance

        @fsdp_conformance(world_size=numpy.array([[1, 2], [3, 4]]))
        def test_a(fsdp): ...
        @fsdp_conformance(mesh={"dp": torch.tensor([1, 2])})
        def test_b(fsdp): ...
        @fsdp_conformance(only=numpy.array([1, 2]))
        def test_c(fsdp): ...
        @fsdp_conformance(process_group=numpy.array(["plugin", "loader"]))
        def test_d(fsdp): ...
        """,
    )
    starts = (
        "world_size=array([[1, 2], [3, 4]])",
        "mesh size dp=tensor([1, 2])",
        "only=array([1, 2])",
        "process_group=",
    )
    found = errors(project.collect())
    for line, start in zip(found, starts, strict=True):
        assert line.partition("@fsdp_conformance: ")[2].startswith(start)


@pytest.mark.parametrize("size", [1025, 10**20])
def test_a_world_that_no_machine_has_room_for(project: Project, size: int) -> None:
    project.write(
        "test_it.py", "from pytest_fsdp_meta import fsdp_conformance\n@fsdp_conformance\ndef test_a(fsdp): ..."
    )
    [line] = errors(project.run(f"--fsdp-world-size={size}"))
    assert line.endswith(f"a world of {size} is too large; use at most 1024 ranks")


FOLDERS = ["/proc/reports", "taken", "file", "~nobody-of-this-name/x", "loop", "dangling/x", "", "x" * 300]


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_report_that_cannot_be_written_is_refused_before_the_run(project: Project, folder: str) -> None:
    project.write("test_it.py", "def test_a(): ...")
    project.write("file", "")
    (project.path / "taken" / "report.json").mkdir(parents=True)
    (project.path / "loop").symlink_to("loop")
    (project.path / "dangling").symlink_to("nowhere")
    [line] = errors(project.collect(f"--fsdp-report={folder}"))
    right = "expected a writable folder, or one that can be created"
    assert line == f"--fsdp-report: invalid value {folder!r} ({right})"


def test_every_problem_is_reported_and_the_same_one_once(project: Project) -> None:
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


def test_loaders_and_fixtures_that_cannot_work(project: Project) -> None:
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
        @fsdp_conformance
        async def test_e(fsdp): ...
        @pytest.mark.fsdp_conformance
        async def test_f(fsdp): ...
        @fsdp_conformance
        def test_g(fsdp):
            yield
        """,
    )
    assert errors(project.collect()) == [
        "test_it.py::test_e and 2 more: @fsdp_conformance: a loader should be a plain function, not a coroutine or a "
        "generator",
        "test_it.py::test_a: fixture 'sharded' requests 'fsdp', which exists on the ranks only, while fixtures run "
        "in the pytest process; request fsdp in the test itself",
        "test_it.py::test_b: the test requests 'fsdp', which exists on the ranks only; decorate it with "
        "@fsdp_conformance or @fsdp_spmd",
        "test_it.py::test_c: another fixture or parameter 'fsdp' overrides the fixture of pytest-fsdp-meta; "
        "rename the other one",
        "test_it.py::TestD::test_d: @fsdp_conformance: a loader should be a function or a method of a plain class; "
        "pytest cannot parametrize methods of unittest.TestCase",
    ]


def test_fsdp_through_getfixturevalue(project: Project) -> None:
    project.write("test_it.py", "def test_x(request): request.getfixturevalue('fsdp').rank")
    result = project.collect()
    result.assert_outcomes(failed=1)
    message = "fsdp.rank: 'fsdp' exists on the ranks only; request it as an argument of a loader or an SPMD test"
    assert message in result.outlines


def test_another_fixture_called_fsdp_is_left_alone(project: Project) -> None:
    project.write(
        "conftest.py", "import pytest\n@pytest.fixture\ndef fsdp(): return 7\n@pytest.fixture\ndef a(fsdp): return fsdp"
    )
    project.write("test_it.py", "def test_x(fsdp, a): assert fsdp == a == 7")
    project.collect().assert_outcomes(passed=1)


@pytest.mark.parametrize("extra", [(), ("--dist", "each"), ("-k", "test_other")])
def test_xdist_reports_the_same_line(project: Project, extra: tuple[str, ...]) -> None:
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
    ("args", "name", "after", "value", "message"),
    [
        ((), "no_meta_params", "()", "[no_meta_params]", "two checks are named 'no_meta_params'"),
        ((), "own", "['no_meta_param']", "[own]", NEAREST),
        ((), "own", "()", "own", "should return a list of checks, but returned Check(id='own', promise='every"),
        (("--fsdp-list-checks",), "own", "()", "None", "should return a list of checks, but returned None"),
        (("-n2",), "own", "()", "[print]", "<built-in function print> is not a check; decorate the judge with @check("),
    ],
)
def test_bad_checks_of_downstream(
    project: Project, args: tuple[str, ...], name: str, after: str, value: str, message: str
) -> None:
    project.write("conftest.py", CHECK.format(name=name, after=after, value=value))
    project.write("test_it.py", "def test_x(): ...")
    (line,) = errors(project.collect(*args))
    assert line.startswith(f"conftest.py: hook pytest_fsdp_checks: {message}")


def test_a_check_that_pytest_finds_too_late(project: Project) -> None:
    project.write("pkg/deep/conftest.py", CHECK.format(name="own", after="()", value="[own]"))
    project.write("pkg/deep/test_it.py", "def test_x(): ...")
    assert errors(project.collect()) == [
        "pkg/deep/conftest.py: pytest found the hook pytest_fsdp_checks only during collection, which is too late; "
        "move it to the conftest.py of the root folder, or name this folder in testpaths or on the command line"
    ]
    project.collect("pkg/deep").assert_outcomes(passed=1)


@pytest.mark.parametrize(
    ("launcher", "variables"),
    [
        ("torchrun", {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2"}),
        ("srun", {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}),
    ],
)
def test_pytest_starts_the_ranks_itself(project: Project, monkeypatch: pytest.MonkeyPatch, launcher, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    project.loaders("def test_plain(): pass\n\n@fsdp_conformance\ndef test_it(fsdp): return load(fsdp)\n")
    assert project.collect("-k", "test_plain").ret == 0
    name, value = list(variables.items())[1]
    message = f"run pytest once, without {launcher}; it starts the ranks itself (found {name}={value} of {launcher})"
    assert errors(project.collect()) == [f"pytest-fsdp-meta: {message}"]
