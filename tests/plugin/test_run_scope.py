"""A loader that vanished fails the run; one that this run was not asked for does not."""

from __future__ import annotations

import json
import os
from itertools import dropwhile, islice, takewhile

import pytest

from pytest_fsdp_meta.evidence.codec import to_plain
from pytest_fsdp_meta.plugin.report_plugin import RunScope
from pytest_fsdp_meta.reports.schema import SCHEMA, Header, LoaderRecord, Report
from tests.conftest import Project, errors
from tests.reports.report_factory import check, loader

ONE = '@fsdp_conformance(only=["no_meta_params"])\ndef test_{name}(fsdp):\n    return load(fsdp)\n'


def before(*names: str) -> str:
    """Return a report of an earlier run, in which these loaders passed one check."""
    header = Header("2026-11-19T02:17:00+00:00", "project", ("pytest",), {}, {}, "local")
    loaders = tuple(_passed(name) for name in names)
    return json.dumps(to_plain(Report(SCHEMA, header, loaders, 1.0, 0, True)))


def _passed(name: str) -> LoaderRecord:
    one = loader(name, {"dp_shard": 2}, tensors=[])
    return LoaderRecord(one.loader, one.world, (check("no_meta_params", name=name),))


@pytest.fixture
def repository(project: Project) -> Project:
    """A repository with two files of loaders: a/test_it.py has one and two, b/test_it.py has three."""
    project.write("pytest.ini", "[pytest]\naddopts = --import-mode=importlib\n")
    project.loaders(ONE.format(name="one") + "\n\n" + ONE.format(name="two"), "a/test_it.py")
    project.loaders(ONE.format(name="three"), "b/test_it.py")
    names = ("a/test_it.py::test_one", "a/test_it.py::test_two", "b/test_it.py::test_three", "b/test_it.py::test_gone")
    project.write("old/report.json", before(*names))
    return project


REGRESSION = ("--fsdp-compare=old", "--fsdp-fail-on=regression", "--fsdp-report=new")


def gone(project: Project, result: pytest.RunResult) -> list[str]:
    """Return the missing loaders in the terminal; the report must name the same."""
    rest = dropwhile(lambda line: not line.startswith("missing loaders: "), result.outlines)
    listed = [line.strip() for line in takewhile(lambda line: line.startswith("  "), islice(rest, 1, None))]
    assert json.loads((project.path / "new/report.json").read_text())["missing"] == listed
    return listed


def test_a_loader_that_vanished_fails_a_run_of_everything(repository: Project) -> None:
    result = repository.run(*REGRESSION)
    assert gone(repository, result) == ["b/test_it.py::test_gone"]
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert "1 loader missing" in (repository.path / "new/summary.md").read_text()
    assert repository.run(*REGRESSION[:1]).ret == 0, "only with --fsdp-fail-on"


def test_what_was_deselected_or_is_allowed_is_not_missing(repository: Project) -> None:
    selected = repository.run(*REGRESSION, "-k", "one")
    assert gone(repository, selected) == ["b/test_it.py::test_gone"], "-k deselects what exists, and only that"
    assert "not selected in this run: 2" in selected.outlines
    some = repository.run(*REGRESSION, "a", "-o", "fsdp_allow_missing=c/*, b/test_it.py::test_gone")
    assert (some.ret, gone(repository, some)) == (0, [])
    allowed = repository.run(*REGRESSION, "--fsdp-allow-missing")
    assert (allowed.ret, gone(repository, allowed)) == (0, [])
    allowed.stdout.fnmatch_lines(["missing loaders that are allowed: 1", "  b/test_it.py::test_gone"])


@pytest.mark.parametrize(
    ("args", "has"),
    [
        ([], True),
        (["b"], True),
        (["b/"], True),
        (["./a", "b/test_it.py"], True),
        (["b/test_it.py::test_gone"], True),
        (["b/test_it.py::test_gone[no_meta_params]"], False),
        (["b/test_it.py::test_go"], False),
        (["b/test_it.py::test_three"], False),
        (["a"], False),
        (["a", "b2"], False),
        (["--ignore=b"], False),
        (["--ignore=a"], True),
        (["--ignore-glob=b*"], False),
        (["--ignore-glob=*/b"], True),
        (["--lf"], False),
        (["--stepwise"], False),
        (["--pyargs", "package.tests"], True),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_which_paths_cover_a_loader(pytester: pytest.Pytester, args: list[str], has: bool) -> None:
    for folder in ("a", "b", "b2"):
        (pytester.path / folder).mkdir()
    assert RunScope(pytester.parseconfig(*args)).has("b/test_it.py::test_gone") == has


def test_paths_are_relative_to_the_folder_of_the_command_and_names_to_the_root(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]")
    folder = pytester.mkdir("b")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        config = pytester.parseconfig("-c", str(pytester.path / "tox.ini"), "test_it.py")
        assert RunScope(config).has("b/test_it.py::test_gone")
        assert not RunScope(config).has("test_it.py::test_gone")


def test_parameters_of_a_loader_that_was_named_are_covered(pytester: pytest.Pytester) -> None:
    scope = RunScope(pytester.parseconfig("b/test_it.py::test_gone", "b/test_it.py::TestIt"))
    names = ("test_gone[world2]", "TestIt::test_gone", "TestIt::test_gone[a]", "TestItToo::test_gone")
    assert [scope.has(f"b/test_it.py::{name}") for name in names] == [True, True, True, False]


@pytest.mark.parametrize("name", ["a\0b.py::test_it", "\ud800.py::test_it"])
def test_a_name_that_no_file_has_is_not_covered(pytester: pytest.Pytester, name: str) -> None:
    assert not RunScope(pytester.parseconfig()).has(name)


@pytest.mark.nightly
def test_under_xdist(repository: Project) -> None:
    result = repository.run(*REGRESSION, "-n", "2", "-k", "not two")
    assert gone(repository, result) == ["b/test_it.py::test_gone"]
    assert result.ret == 1
    assert "not selected in this run: 1" in result.outlines, "the worker deselects, and the controller knows it"


def test_a_folder_with_damaged_reports_loses_no_run(repository: Project) -> None:
    (repository.path / "old").rename(repository.path / "night")
    repository.write("reports/1/report.json", (repository.path / "night/report.json").read_text())
    repository.write("reports/2/report.json", "{")
    repository.write("reports/3/report.json", '{"schema": 99}')
    (repository.path / "reports/4").mkdir()
    os.mkfifo(repository.path / "reports/4/report.json")  # to open it would wait for a writer
    result = repository.run("--fsdp-compare=reports", "--fsdp-fail-on=regression", "--fsdp-report=new", "a")
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        [
            "earlier reports left out: 2",
            "  reports/2/report.json: not JSON, or truncated: *",
            "  reports/3/report.json: a report of schema 99, *",
        ]
    )
    report = json.loads((repository.path / "new/report.json").read_text())
    assert [run["started"] for run in report["earlier"]] == ["2026-11-19T02:17:00+00:00"]


@pytest.mark.parametrize("value", ["maybe", "tests/test_it.py"])
def test_a_pattern_that_names_no_loader_is_refused(project: Project, value: str) -> None:
    (line,) = errors(project.collect("-o", f"fsdp_allow_missing={value}"))
    assert line == (
        f"ini option fsdp_allow_missing: invalid value '{value}' (choose true or false, or node ids such as "
        "tests/test_old.py::*)"
    )
