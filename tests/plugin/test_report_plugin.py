"""``--fsdp-report``: the report of a run, and the totals in the terminal."""

from __future__ import annotations

import html
import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from pytest_fsdp_meta.catalogue import built_in
from pytest_fsdp_meta.plugin.report_plugin import LOCK
from pytest_fsdp_meta.reports.io import read_report
from pytest_fsdp_meta.reports.schema import CheckRecord, LoaderRecord, Report
from pytest_fsdp_meta.worlds.leases import LockedFile
from tests.conftest import Project, errors
from tests.docs.report_schema import report_schema

LOADERS = """
    import os
    import pytest

    def left_out(fsdp):
        model = nn.Linear(4, 4)
        model.register_buffer("table", torch.empty(3), persistent=False)
        model.get_parameter("bias").requires_grad_(False)
        fully_shard(model, mesh=fsdp.mesh)
        return model

    @fsdp_conformance(
        only=["no_meta_params", "no_uninitialized_memory", "loss_parity", "dcp_reshards"],
        skip={"dcp_reshards": "slow & <b>bold</b>"},
    )
    def test_broken(fsdp):
        return left_out(fsdp)

    @fsdp_conformance(world_size=(1, 2), only=["no_meta_params", "no_uninitialized_memory"],
                      xfail={"no_uninitialized_memory": "issue 7"})
    def test_expected(fsdp):
        return left_out(fsdp)

    @fsdp_conformance(only=["no_meta_params"])
    def test_raises(fsdp):
        raise ValueError("no file")

    def test_other(): ...
"""
BROKEN = "test_it.py::test_broken"


def written(project: Project, folder: str = "out") -> Report:
    """Return the report of a folder, validated against the published schema."""
    path = project.path / folder / "report.json"
    jsonschema.validate(json.loads(path.read_text()), report_schema())
    return read_report(path)


def by_name(report: Report) -> dict[str, LoaderRecord]:
    return {loader.loader: loader for loader in report.loaders}


def offered(loader: LoaderRecord) -> dict[str, tuple[str, str]]:
    """Return the kind and reason of each check that was selected, or left out for a reason."""
    return {
        check.check: (check.kind, check.reason)
        for check in loader.checks
        if check.kind not in ("left out", "not selected") or check.reason
    }


def the(loader: LoaderRecord, check: str) -> CheckRecord:
    return next(one for one in loader.checks if one.check == check)


def test_the_report_has_every_check_of_every_loader(project: Project) -> None:
    project.loaders(LOADERS)
    result = project.run("--fsdp-report=out", "--junitxml=junit.xml")
    report = written(project)
    loaders = by_name(report)
    assert list(loaders) == [
        BROKEN,
        "test_it.py::test_expected[world1]",
        "test_it.py::test_expected[world2]",
        "test_it.py::test_raises",
    ]
    ids = built_in().ids_for(simulated=False)
    assert all([check.check for check in loader.checks] == ids for loader in report.loaders)
    assert offered(loaders[BROKEN]) == {
        "no_meta_params": ("passed", ""),
        "no_uninitialized_memory": ("failed", ""),
        "dcp_reshards": ("left out", "slow & <b>bold</b>"),
        "loss_parity": ("not declared", "Subject(reference=...) is not declared"),
    }
    assert offered(loaders["test_it.py::test_expected[world1]"]) == {
        "no_meta_params": ("passed", ""),
        "no_uninitialized_memory": ("xfailed", "issue 7"),
    }
    assert offered(loaders["test_it.py::test_raises"]) == {
        "no_meta_params": ("error", "ranks 0, 1 raised ValueError: no file")
    }
    assert the(loaders[BROKEN], "loss_parity").missing_field == "reference"
    (found,) = the(loaders[BROKEN], "no_uninitialized_memory").findings
    assert (found.tensor, found.ranks) == ("table", (0, 1))
    assert the(loaders["test_it.py::test_expected[world2]"], "no_uninitialized_memory").findings[0] == found
    assert loaders[BROKEN].seconds["loading"] > 0
    summary = loaders[BROKEN].summary
    assert summary is not None
    assert {tensor.name: [piece.ranks for piece in tensor.pieces] for tensor in summary.tensors} == {
        "weight": [(0,), (1,)],
        "bias": [(0,), (1,)],
        "table": [(0, 1)],
    }
    assert report.complete
    assert report.exit_status == result.ret == 1
    assert report.header.command[0] == "pytest"
    assert report.header.command[-2:] == ("--fsdp-report=out", "--junitxml=...")
    assert {"torch", "pytest", "pytest-fsdp-meta", "python"} <= set(report.header.versions)
    assert (project.path / "out" / "index.html").stat().st_size > 10_000
    output = result.stdout.str()
    assert "checks accounted for in 4 loaders" in output
    assert "FAILED test_it.py::test_broken[no_uninitialized_memory] - table, ranks" in output
    _in_junit(project.path / "junit.xml")


def _in_junit(path: Path) -> None:
    cases = {case.get("name"): case for case in ET.parse(path).iter("testcase")}
    case = cases["test_broken[no_uninitialized_memory]"]
    properties = [(one.get("name"), one.get("value")) for one in case.iter("property")]
    assert properties[:4] == [
        ("fsdp_loader", BROKEN),
        ("fsdp_world", "world of 2 (gloo on cpu)"),
        ("fsdp_check", "no_uninitialized_memory"),
        ("fsdp_status", "failed"),
    ]
    name, found = properties[4]
    assert name == "fsdp_finding"
    assert str(found).startswith("table, ranks 0, 1: never written")
    (failure,) = case.iter("failure")
    assert str(failure.get("message")).startswith("table, ranks 0, 1: never written")
    assert "remedy:" in str(failure.text)


def test_checks_that_were_not_run_are_reported(project: Project) -> None:
    project.loaders(LOADERS)
    result = project.run("--fsdp-report=out", "-x", "-k", "broken or raises")
    report = written(project)
    loaders = by_name(report)
    assert offered(loaders["test_it.py::test_raises"]) == {"no_meta_params": ("not run", "")}
    assert report.complete
    result.stdout.fnmatch_lines(["*checks accounted for in 2 loaders (*not run)"])


def test_a_teardown_that_fails_after_a_skip_always_fails_the_run(project: Project) -> None:
    project.loaders(
        """
        import os, pytest

        @pytest.fixture(scope="module")
        def cluster():
            yield
            if "BREAK" in os.environ: raise OSError("the lock is held")

        @fsdp_conformance(only=["no_meta_params", "loss_parity"], world_size=1)
        def test_x(fsdp, cluster): return load(fsdp)
        """
    )
    project.run("--fsdp-report=old").assert_outcomes(passed=1, skipped=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BREAK", "1")
        failed = project.run("--fsdp-compare=old/report.json", "--fsdp-fail-on=regression", "--fsdp-report=new")
    assert failed.ret == pytest.ExitCode.TESTS_FAILED
    summary = (project.path / "new" / "summary.md").read_text()
    assert summary.startswith("### ❌ fsdp conformance fails: failures outside of the checks\n")


def test_each_worker_has_its_own_record_with_dist_each(project: Project) -> None:
    project.loaders(
        """
        import os, pytest

        @pytest.fixture
        def worker(): return os.environ["PYTEST_XDIST_WORKER"]

        @fsdp_conformance(only=["no_meta_buffers"], world_size=1)
        def test_x(fsdp, worker):
            model = build()
            if worker == "gw1":
                model.register_buffer("table", torch.empty(3, device="meta"))
            fully_shard(model, mesh=fsdp.mesh)
            return model
        """
    )
    project.run("-n2", "--dist=each", "--fsdp-report=out").assert_outcomes(passed=1, failed=1)
    found = {name: offered(one)["no_meta_buffers"][0] for name, one in by_name(written(project)).items()}
    assert found == {"test_it.py::test_x on gw0": "passed", "test_it.py::test_x on gw1": "failed"}


def test_a_failed_collection_replaces_the_earlier_report(project: Project) -> None:
    project.write("test_it.py", "def test_x(): ...")
    project.collect("--fsdp-report=out").assert_outcomes(passed=1)
    project.write("test_it.py", "import absent_of_all")
    assert project.collect("--fsdp-report=out").ret == pytest.ExitCode.INTERRUPTED
    assert written(project).exit_status == pytest.ExitCode.INTERRUPTED
    why = "test_it.py: ModuleNotFoundError: No module named 'absent_of_all'"
    assert written(project).stopped_by == why
    assert f"Nothing ran: {why}" in html.unescape((project.path / "out/index.html").read_text())
    assert "Nothing ran: test_it.py: ModuleNotFoundError" in (project.path / "out/summary.md").read_text()
    project.write("test_good.py", "def test_x(): ...")
    project.run("--fsdp-report=out", "--continue-on-collection-errors").assert_outcomes(passed=1, errors=1)
    assert written(project).stopped_by == "", "something ran"


def test_a_report_says_which_mistake_in_a_test_stopped_the_run(project: Project) -> None:
    project.loaders("@fsdp_conformance(skip={'nope': 'no reason'})\ndef test_x(fsdp): return load(fsdp)\n")
    assert project.run("--fsdp-report=out").ret == pytest.ExitCode.USAGE_ERROR
    assert written(project).stopped_by.startswith(
        "test_it.py::test_x: @fsdp_conformance: skip: there is no check 'nope'"
    )


def test_values_that_may_be_secret_are_neither_stored_nor_printed(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.write(
        "conftest.py",
        """
        def pytest_addoption(parser):
            parser.addoption("--hf-token")
            parser.addini("hf_key", "", default="")
        """,
    )
    project.loaders("@fsdp_conformance(only=['no_meta_params'])\ndef test_x(fsdp): raise ValueError('no file')\n")
    monkeypatch.setenv("PYTEST_ADDOPTS", "--hf-token SECRET -k x")
    result = project.run(
        "-n1", "--fsdp-report=out", "--junitxml=j.xml", "--hf-token=SECRET", "-ohf_key=SECRET", "test_it.py"
    )
    header = written(project).header
    assert header.command[-6:] == (
        *("-n1", "--fsdp-report=out", "--junitxml=...", "--hf-token=...", "-ohf_key=...", "test_it.py"),
    )
    assert header.settings == {"PYTEST_ADDOPTS": "--hf-token ... -k x"}
    rerun = "python -m pytest 'test_it.py::test_x[no_meta_params]' -p no:cacheprovider -ohf_key=..."
    assert f"rerun: {rerun}" in result.outlines
    assert the(written(project).loaders[0], "no_meta_params").again == rerun
    files = [path for path in project.path.rglob("*") if path.suffix in (".json", ".html", ".md", ".xml", ".svg")]
    assert len(files) == 4
    assert not [path for path in files if "SECRET" in path.read_text()]


def test_a_report_that_another_run_writes_is_a_usage_error(project: Project) -> None:
    project.write("test_it.py", "def test_x(): ...")
    project.write("out/report.json", "theirs")
    lock = LockedFile.attempt(project.path / "out" / LOCK)
    assert lock is not None
    assert errors(project.collect("--fsdp-report=out")) == [
        f"--fsdp-report: another run of pytest is writing its report to {project.path / 'out'}; wait until it has "
        "ended, or choose another folder"
    ]
    assert project.collect("--fsdp-report=out", "--collect-only").ret == 0, "it writes nothing"
    assert (project.path / "out" / "report.json").read_text() == "theirs"
    lock.release()  # as the system does for a run that is killed
    for _ in range(2):
        project.collect("--fsdp-report=out").assert_outcomes(passed=1)


def test_a_foreign_page_is_not_overwritten(project: Project) -> None:
    project.write("test_it.py", "def test_x(): ...")
    project.write("site/index.html", "mine")
    (message,) = errors(project.collect("--fsdp-report=site"))
    assert "site has an index.html that pytest-fsdp-meta did not write and would overwrite" in message
    assert (project.path / "site" / "index.html").read_text() == "mine"


def test_a_run_without_judged_checks_does_not_pass_though_its_failure_is_known(project: Project) -> None:
    project.loaders(
        """
        @fsdp_conformance(only=["no_meta_params", "no_meta_buffers"], world_size=1)
        def test_x(fsdp): raise ValueError("first line\\nsecond line")
        """
    )
    assert "1 error, 1 same error in" in project.run("--fsdp-report=old").stdout.str()
    known = project.run("--fsdp-compare=old/report.json", "--fsdp-fail-on=regression", "--fsdp-report=new")
    assert known.ret == pytest.ExitCode.NO_TESTS_COLLECTED
    # The traceback is in the report once.
    first, second = (one for one in written(project, "new").loaders[0].checks if one.status == "error")
    assert "def test_x(fsdp): raise ValueError" in first.detail
    assert second.detail == ""
    assert "second line" in (project.path / "new" / "index.html").read_text()
    summary = (project.path / "new" / "summary.md").read_text()
    assert summary.count("raised ValueError: first line") == 1, "a known failure is listed once"
    assert written(project, "new").outcome is None, "it neither passes nor fails by --fsdp-fail-on"
    assert "passes: " not in known.stdout.str()


def test_a_run_without_judged_checks_does_not_pass(project: Project) -> None:
    project.loaders(
        """
        import pytest

        @fsdp_conformance(only=["loss_parity"])
        def test_bare(fsdp): return build()

        @pytest.mark.skip(reason="needs a GPU")
        @fsdp_conformance(only=["no_meta_params"])
        def test_marked(fsdp): return build()

        def test_other(): ...
        """
    )
    result = project.run("-k", "not marked")
    assert result.ret == pytest.ExitCode.NO_TESTS_COLLECTED
    result.stdout.fnmatch_lines(["*nothing was judged, so nothing has passed"])
    assert project.run("-k", "marked or other").ret == 0, "its author skips it"


def test_a_file_that_never_ends_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^/dev/zero: more than 512 MiB of JSON, which is the limit"):
        read_report(Path("/dev/zero"))


def test_the_published_schema_is_current() -> None:
    published: Any = json.loads(Path("docs/report.schema.json").read_text())
    assert published == report_schema(), "run `make docs`"
    jsonschema.Draft202012Validator.check_schema(published)


def test_the_report_shows_the_example_that_failed(project: Project) -> None:
    project.loaders(
        """
        from hypothesis import given, settings, strategies as st

        @settings(max_examples=20)
        @fsdp_conformance(only=["no_meta_params"])
        @given(n=st.integers(1, 9))
        def test_drawn(fsdp, n):
            if n < 3:
                return load(fsdp)
            with torch.device("meta"):
                model = nn.Linear(n, n)
            fully_shard(model, mesh=fsdp.mesh)
            return model
        """
    )
    project.run("--fsdp-report=out").assert_outcomes(failed=1)
    (loader,) = written(project).loaders
    assert loader.summary is not None
    assert {(tensor.shape, tensor.pieces[0].device) for tensor in loader.summary.tensors} == {
        ((3, 3), "meta"),
        ((3,), "meta"),
    }
    (found,) = (one for one in loader.checks if one.status == "failed")
    assert "n=3" in found.detail


def test_a_failing_teardown_hides_no_finding(project: Project) -> None:
    project.loaders(
        """
        import pytest

        @pytest.fixture
        def brittle():
            yield 1
            raise OSError("disk gone")

        @fsdp_conformance(only=["no_meta_params", "no_uninitialized_memory"])
        def test_broken(fsdp, brittle):
            model = build()
            model.register_buffer("table", torch.empty(3), persistent=False)
            fully_shard(model, mesh=fsdp.mesh)
            return model
        """
    )
    project.run("--fsdp-report=out", "-k", "uninitialized", "--junitxml=j.xml")
    record = the(written(project).loaders[0], "no_uninitialized_memory")
    assert (record.status, record.reason, len(record.findings)) == ("failed", "OSError: disk gone", 1)
    properties = ET.parse(project.path / "j.xml").iter("property")
    assert {one.get("value") for one in properties if one.get("name") == "fsdp_status"} == {"failed"}


MARKED = [
    ("xfail(reason='later')", "raise ValueError('no file')", ("error", "ranks 0, 1 raised ValueError: no file")),
    ("xfail(strict=True)", "os._exit(0)", ("error", "ranks 0, 1 exited with code 0 before it answered")),
    (
        "xfail(raises=pytest.fail.Exception)",
        "fsdp.barrier(); fsdp.rank and os.kill(os.getpid(), 9); fsdp.barrier()",
        ("error", "rank 1 was killed by SIGKILL"),
    ),
    ("xfail(raises=OSError)", "return left_out(fsdp)", ("failed", "")),
    ("xfail(reason='later')", "return left_out(fsdp)", ("xfailed", "later")),
    ("xfail(reason='later', strict=True)", "return load(fsdp)", ("xpassed", "later")),
    ("usefixtures()", "pytest.skip('no such GPU')", ("by the test", "no such GPU")),
]


def test_marks_of_pytest_itself(project: Project) -> None:
    loaders = [
        f"""
    @pytest.mark.{mark}
    @fsdp_conformance(only=["no_uninitialized_memory"])
    def test_{number}(fsdp):
        {outcome}
"""
        for number, (mark, outcome, _) in enumerate(MARKED)
    ]
    project.loaders(LOADERS.partition("    @fsdp_conformance")[0] + "".join(loaders))
    result = project.run("--fsdp-report=out")
    result.assert_outcomes(errors=3, failed=2, xfailed=1, skipped=1)
    found = written(project).loaders
    for loader, (_, _, status) in zip(found, MARKED, strict=True):
        assert offered(loader) == {"no_uninitialized_memory": status}
        assert loader.error == (status[1] if status[0] == "error" else "")


def test_ordinary_tests_named_like_those_of_a_loader_are_not_reported(project: Project) -> None:
    project.write(
        "test_it.py",
        """
        import pytest

        @pytest.mark.parametrize("check", ["no_meta_params", "loss_parity", "grad_parity"])
        def test_x(check):
            if check == "loss_parity":
                pytest.skip("later")
            assert check == "grad_parity"
        """,
    )
    result = project.run("--fsdp-report=out", "-n2")
    result.assert_outcomes(passed=1, failed=1, skipped=1)
    assert written(project).loaders == ()


def test_parameters_that_come_after_the_check(project: Project) -> None:
    project.write(
        "conftest.py",
        """
        import pytest

        @pytest.hookimpl(trylast=True)
        def pytest_generate_tests(metafunc):
            metafunc.fixturenames.append("repeat")
            metafunc.parametrize("repeat", range(2))
        """,
    )
    text = "@fsdp_conformance(only=['no_meta_params'])\ndef test_x(fsdp): return load(fsdp)\n"
    project.loaders(text, name="test_\u200bit.py")  # what is planned and what is sent are one record
    project.run("--fsdp-report=out").assert_outcomes(passed=2)
    assert list(by_name(written(project))) == ["test_\\u200bit.py::test_x[0]", "test_\\u200bit.py::test_x[1]"]


@pytest.mark.parametrize("option", ["--fixtures", "--setup-plan", "--cache-show"])
def test_options_that_run_no_test_leave_the_report_alone(project: Project, option: str) -> None:
    project.loaders("@fsdp_conformance(only=['no_meta_params'])\ndef test_x(fsdp): return load(fsdp)\n")
    project.write("out/report.json", "mine")
    result = project.run("--fsdp-report=out", "-p", "cacheprovider", option)
    assert result.ret == 0
    assert (project.path / "out" / "report.json").read_text() == "mine"
    assert "fsdp conformance" not in result.stdout.str()


def test_a_module_that_cannot_be_imported_always_fails_the_run(project: Project) -> None:
    project.loaders("@fsdp_conformance(only=['no_meta_params'])\ndef test_x(fsdp): return load(fsdp)\n")
    assert project.run("--fsdp-report=old").ret == 0
    project.write("test_bad.py", "import nowhere\n")
    regression = ("--fsdp-compare=old/report.json", "--fsdp-fail-on=regression")
    assert project.run(*regression, "--continue-on-collection-errors").ret == pytest.ExitCode.TESTS_FAILED


def test_a_mistyped_path_leaves_the_earlier_report_alone(project: Project) -> None:
    project.loaders("@fsdp_conformance(only=['no_meta_params'])\ndef test_x(fsdp): return load(fsdp)\n")
    project.run("--fsdp-report=out")
    files = {path: path.read_bytes() for path in (project.path / "out").rglob("*") if path.is_file()}
    for arguments in (["out"], ["nowhere.py"]):
        assert project.run(*arguments, "--fsdp-report=out").ret not in (0, 1)
    assert {path: path.read_bytes() for path in (project.path / "out").rglob("*") if path.is_file()} == files


def test_the_report_is_written_before_an_ordinary_test(project: Project) -> None:
    project.loaders(
        """
        import os

        @fsdp_conformance(only=["no_meta_params"])
        def test_first(fsdp): return load(fsdp)

        def test_last():
            os._exit(3)
        """
    )
    assert project.run("--fsdp-report=out").ret == 3
    report = written(project)
    assert (report.complete, report.exit_status) == (False, None)
    assert offered(report.loaders[0]) == {"no_meta_params": ("passed", "")}


def test_the_report_is_the_same_under_xdist(project: Project) -> None:
    project.loaders(LOADERS)
    project.run("--fsdp-report=alone")
    project.run("--fsdp-report=shared", "-n2")
    alone, shared = by_name(written(project, "alone")), by_name(written(project, "shared"))
    assert {name: offered(loader) for name, loader in alone.items()} == {
        name: offered(loader) for name, loader in shared.items()
    }
    assert {name: loader.summary and loader.summary.tensors for name, loader in alone.items()} == {
        name: loader.summary and loader.summary.tensors for name, loader in shared.items()
    }
