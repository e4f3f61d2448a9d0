"""Annotations at a loader's line: their escaping, their number, and when they are printed."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from pytest_fsdp_meta.reports.annotations import MOST, Location, annotate
from pytest_fsdp_meta.reports.schema import CheckRecord, FindingRecord, LoaderRecord
from tests.conftest import Project
from tests.reports.report_factory import HOSTILE, check, finding, loader

FIRST, SECOND = "no_meta_params", "params_equal_reference"
COMMAND = re.compile(r"::(error|warning) file=([^,:]*),line=(\d+),title=([^,:]*)::(.*)")


def failing(name: str, *records: CheckRecord) -> LoaderRecord:
    return replace(loader(name, tensors=[]), checks=records, summary=None)


def failed(name: str, id_: str, *findings: FindingRecord, status: str = "failed", **facts: object) -> CheckRecord:
    return check(id_, status, findings, name, **facts)


def lines(*loaders: LoaderRecord, excused: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Return the commands for these loaders, each in a line of its own, as (level, file, line, title, message)."""
    where = {
        one.nodeid: Location(record.loader.partition("::")[0], 10 + number)
        for number, record in enumerate(loaders)
        for one in record.checks
    }
    found = [COMMAND.fullmatch(line) for line in annotate(loaders, where, excused.__contains__)]
    assert all(found)
    return [one.groups() for one in found if one]


def test_each_cause_is_one_error_at_the_line_of_each_loader():
    buffer = {"cause": "it is a buffer", "remedy": "recompute it"}
    rounded = {"cause": "it was rounded", "remedy": "keep it"}
    one = failing(
        "t.py::one",
        failed("t.py::one", FIRST, finding("a", **buffer), finding("b", **buffer), finding("c", **rounded)),
        failed("t.py::one", SECOND, finding("d", **buffer)),
        check("loss_parity", "passed", name="t.py::one"),
        check("grad_parity", "xfailed", [finding("e")], "t.py::one"),
    )
    two = failing("t.py::two", failed("t.py::two", FIRST, finding("a", **buffer)))
    assert lines(one, two) == [
        (
            *("error", "t.py", "10", f"t.py%3A%3Aone%3A {FIRST}%2C {SECOND}"),
            "a, ranks 0-3: wrong, but should be right; 1 more finding%0Ait is a buffer; recompute it",
        ),
        (
            *("error", "t.py", "10", f"t.py%3A%3Aone%3A {FIRST}"),
            "c, ranks 0-3: wrong, but should be right%0Ait was rounded; keep it",
        ),
        (
            *("error", "t.py", "11", f"t.py%3A%3Atwo%3A {FIRST}"),
            "a, ranks 0-3: wrong, but should be right%0Ait is a buffer; recompute it",
        ),
    ]


def test_an_error_of_all_checks_is_one_annotation():
    reason = "rank 1 raised OSError: 100 %\r\nno space"
    one = failing("t.py::one", *(failed("t.py::one", id_, status="error", reason=reason) for id_ in (FIRST, SECOND)))
    assert lines(one) == [
        (
            *("error", "t.py", "10", f"t.py%3A%3Aone%3A {FIRST}%2C {SECOND}"),
            "rank 1 raised OSError: 100 %25%0D%0Ano space",
        )
    ]


def test_findings_without_a_cause_are_one_annotation_for_each_check():
    one = failing("t.py::one", failed("t.py::one", FIRST, finding("a")), failed("t.py::one", SECOND, finding("b")))
    assert [message for *_, message in lines(one)] == [
        "a, ranks 0-3: wrong, but should be right",
        "b, ranks 0-3: wrong, but should be right",
    ]


def test_errors_that_differ_in_numbers_are_one_cause_with_their_own_words():
    crashes = [
        replace(failing(f"t.py::{name}", failed(f"t.py::{name}", FIRST, status="error", reason=text)), error=text)
        for name, text in (("one", "rank 1 waited 5 s"), ("two", "rank 1 waited 7 s"))
    ]
    assert [message for *_, message in lines(*crashes)] == ["rank 1 waited 5 s", "rank 1 waited 7 s"]


def test_a_failure_that_does_not_fail_the_run_is_a_warning_and_comes_last():
    known = failing("t.py::one", failed("t.py::one", FIRST, finding("a")))
    new = failing("t.py::two", failed("t.py::two", SECOND, finding("b")))
    assert [level for level, *_ in lines(known, new, excused=(f"t.py::one[{FIRST}]",))] == ["error", "warning"]


def test_the_number_is_bounded_and_every_cause_comes_first():
    many = [
        failing(
            f"t.py::test_{number}",
            failed(f"t.py::test_{number}", FIRST, finding("a", cause="common")),
            failed(f"t.py::test_{number}", SECOND, *([finding("a", cause="rare")] if number == 40 else [])),
        )
        for number in range(50)
    ]
    where = {one.nodeid: Location("t.py", number) for number, record in enumerate(many) for one in record.checks}
    printed = list(annotate(many, where, lambda nodeid: False))
    assert len(printed) == MOST + 1
    assert sum("rare" in line for line in printed[:3]) == 1
    assert printed[-1] == "::notice::90 more annotations of fsdp conformance: see the summary"


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_stay_in_one_command(name):
    text = f"{name} ::error::, 50% \r\n::stop-commands::x"
    one = failing(f"t.py::{text}", failed("x", FIRST, FindingRecord(text, (0,), text, text, text, text, text)))
    (line,) = annotate([one], {f"x[{FIRST}]": Location(f"{text}.py", 3)}, lambda nodeid: False)
    assert len(line.splitlines()) == 1 or "\u2028" in name
    properties, _, _ = line[len("::error ") :].partition("::")
    assert [part.partition("=")[0] for part in properties.split(",")] == ["file", "line", "title"]


LOADERS = """
@fsdp_conformance(only=["no_meta_params", "requires_grad_matches_reference"])
def test_one(fsdp):
    subject = load(fsdp, reference=build)
    subject.model.bias.requires_grad_(False)
    return subject


@fsdp_conformance(only=["no_meta_params", "requires_grad_matches_reference"])
def test_raises(fsdp):
    raise ValueError("100 %")
"""


def printed(result: pytest.RunResult) -> list[tuple[str, ...]]:
    return [found.groups() for line in result.outlines if (found := COMMAND.fullmatch(line))]


@pytest.mark.parametrize("workers", [[], pytest.param(["-n", "2"], marks=pytest.mark.nightly)])
def test_a_run_in_github_actions_annotates_its_loaders(project: Project, monkeypatch, workers) -> None:
    path = project.loaders(LOADERS, "sub/test_it.py")
    text = path.read_text().splitlines()
    at = [str(number) for number, line in enumerate(text, 1) if line.startswith("@fsdp_conformance")]
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_WORKSPACE", str(project.path.parent))
    result = project.run("-q", *workers)
    assert result.ret == 1
    file = f"{project.path.name}/sub/test_it.py"
    assert [one[:3] for one in printed(result)] == [("error", file, at[1]), ("error", file, at[0])]
    (_, _, _, raised, second), (_, _, _, frozen, first) = printed(result)
    assert frozen == "sub/test_it.py%3A%3Atest_one%3A requires_grad_matches_reference"
    assert first.startswith("bias, ranks 0, 1: frozen, but should be trainable")
    assert raised == "sub/test_it.py%3A%3Atest_raises%3A requires_grad_matches_reference%2C no_meta_params"
    assert "ValueError: 100 %25" in second


def test_another_ci_gets_no_annotations(project: Project, monkeypatch) -> None:
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    monkeypatch.setenv("CI", "true")
    monkeypatch.setenv("GITLAB_CI", "true")
    project.loaders(LOADERS)
    assert printed(project.run("-q")) == []
