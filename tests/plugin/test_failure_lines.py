"""``--tb=line``: one line for each failure, with the file of the user."""

from __future__ import annotations

import re

from pytest_fsdp_meta.reports.io import read_report
from tests.conftest import Project


def test_one_line_with_the_users_file(project: Project) -> None:
    file = project.loaders(
        """
        from pytest_fsdp_meta import fsdp_spmd

        only = fsdp_conformance(only=["no_meta_params", "no_meta_buffers"])

        def deeper():
            raise KeyError("layers.0")  # deeper

        @only
        def test_raises(fsdp):
            if fsdp.rank == 1:
                deeper()
            fsdp.barrier()

        @only
        def test_misuse(fsdp):
            return Subject(build(), tolerance=1)  # misuse

        class TestNothing:
            @only  # nothing
            def test_nothing(self, fsdp):
                if fsdp.rank == 0:
                    return build()

        @only  # finding
        def test_finding(fsdp):
            with torch.device("meta"):
                return build()

        @fsdp_conformance(only=["no_meta_params"], xfail={"no_meta_params": "issue 7"})  # unexpected
        def test_unexpected(fsdp):
            return build()

        @fsdp_spmd
        def test_spmd(fsdp):
            assert fsdp.rank == 0  # spmd
        """
    )
    lines = {
        found[1]: number
        for number, text in enumerate(file.read_text().splitlines(), 1)
        if (found := re.search(r"  # (\w+)$", text))
    }
    result = project.run("--tb=line", "-q")
    shown = [line for line in result.outlines if line.startswith(str(file))]
    expected = {
        "deeper": "test_raises: rank 1 raised KeyError: 'layers.0'",
        "misuse": r"test_misuse: Subject\(tolerance=...\).*",
        "nothing": "test_nothing: rank 1: the loader returned None, but should return .*",
        "finding": r"no_meta_params: weight, ranks 0, 1: .*; 1 more finding",
        "unexpected": r"no_meta_params: passes, but xfail expects it to fail \(issue 7\)",
        "spmd": "test_spmd: rank 1 raised AssertionError: assert 1 == 0.*",
    }
    assert len(shown) == len(expected), "\n".join(result.outlines)
    for line, (mark, text) in zip(shown, expected.items(), strict=True):
        assert re.fullmatch(rf"{re.escape(str(file))}:{lines[mark]}: {text}", line)
    output = result.stdout.str()
    assert "Traceback" not in output
    assert "rerun: " not in output
    assert "FAILED test_it.py::test_spmd - test_spmd: rank 1 raised AssertionError" in output


def test_other_styles_point_to_the_users_file_in_the_summary(project: Project) -> None:
    project.loaders(
        """
        @fsdp_conformance(only=["no_meta_params"])
        def test_raises(fsdp):
            raise KeyError("boom")
        """
    )
    project.write(
        "conftest.py",
        """
        def pytest_runtest_logreport(report):
            if report.failed:
                crash = report.longrepr.reprcrash
                print(f"\\ncrash: {crash.path}:{crash.lineno}: {crash.message}")
        """,
    )
    result = project.run("-s")
    line = next(line for line in result.outlines if line.startswith("crash: "))
    assert re.fullmatch(rf"crash: {project.path}/test_it.py:\d+: ranks 0, 1 raised KeyError: 'boom'", line)
    assert "test_raises: ranks 0, 1 raised KeyError: 'boom'" in result.outlines


def test_the_report_has_the_users_line_although_torch_raised(project: Project) -> None:
    file = project.loaders(
        """
        @fsdp_conformance(only=["no_meta_params"])
        def test_raises(fsdp):
            torch.nn.Linear(2, 2)(torch.zeros(2, 3))  # here
        """,
        "sub/test_it.py",
    )
    number = next(number for number, text in enumerate(file.read_text().splitlines(), 1) if "# here" in text)
    project.run("--fsdp-report=report")
    (loader,) = read_report(project.path / "report/report.json").loaders
    assert {check.place for check in loader.checks if check.status == "error"} == {f"sub/test_it.py:{number}"}
