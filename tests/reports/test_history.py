"""The history of checks over several runs: since when they are broken, what is flaky, and what is read of a folder."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

import pytest

from pytest_fsdp_meta.evidence import WorldFacts
from pytest_fsdp_meta.evidence.codec import from_plain, to_plain
from pytest_fsdp_meta.reports.history import (
    MOST_RUNS,
    Timeline,
    describe_history,
    describe_moment,
    describe_results,
    describe_since,
    is_flaky,
    read_timeline,
)
from pytest_fsdp_meta.reports.io import FILE, read_report
from pytest_fsdp_meta.reports.markdown import summarise_run
from pytest_fsdp_meta.reports.schema import (
    ABSENT,
    LETTERS,
    STATUSES,
    CheckHistory,
    CheckRecord,
    EarlierRun,
    FindingRecord,
    Header,
    LoaderRecord,
    Report,
    Summary,
)
from tests.reports.report_factory import HOSTILE, LLAMA, check, finding, header, loader, report, with_history

CHECK = "no_meta_params"
NOW = datetime(2026, 11, 30, tzinfo=timezone.utc)


def started(day: int) -> str:
    return f"2026-11-{day:02}T02:17:00+00:00"


def night(day: int, status: str = "passed", name: str = LLAMA, **facts: object) -> Report:
    """Return the run of one loader with one check, in the night of a day in November."""
    record = check(CHECK, status, [finding("a")] if status == "failed" else (), name)
    one = replace(loader(name), checks=(record,), summary=None)
    usual = {"exit_status": int(status in ("failed", "error")), "header": night_header(day)}
    return report(one, **usual | facts)


def night_header(day: int) -> Header:
    return header(started=started(day), commit=f"c{day}")


def nights(statuses: Iterable[str]) -> list[Report]:
    """Return runs in a row, each with the history that it would have written; "absent" has no loader."""
    made: list[Report] = []
    for day, status in enumerate(statuses, 1):
        one = night(day, "passed" if status == "absent" else status)
        one = replace(one, loaders=()) if status == "absent" else one
        made.append(with_history(one, made[-MOST_RUNS:]))
    return made


def history_of(one: Report) -> CheckHistory:
    found = one.loaders[0].checks[0].history
    assert found is not None
    return found


def days(history: CheckHistory) -> tuple[str, str]:
    """Return the commits of the first broken and of the last passed run."""
    return tuple(run.commit if run else "" for run in (history.broken_since, history.last_passed))  # type: ignore[return-value]


def test_every_status_has_a_letter_of_its_own():
    assert list(LETTERS) == list(STATUSES)
    assert len({*LETTERS.values(), ABSENT}) == len(STATUSES) + 1
    assert all(len(letter) == 1 for letter in LETTERS.values())


@pytest.mark.parametrize(
    ("results", "flaky"),
    [
        ("", False),
        (".F", False),
        (".F.", False),
        (".F.F", True),
        ("F.F", False),
        ("..FF..FF", True),
        (".pEXs-n.F", True),
        (".F-.sF", True),
        (".FxF.", False),
    ],
)
def test_flaky_is_passing_and_failing_in_turn_twice(results, flaky):
    assert is_flaky(results) == flaky


@pytest.mark.parametrize(
    ("statuses", "results", "since", "passed"),
    [
        (["passed", "failed"], ".", "c2", "c1"),
        (["passed", "failed", "failed"], ".F", "c2", "c1"),
        (["passed", "failed", "error", "xpassed"], ".FE", "c2", "c1"),
        (["failed", "failed"], "F", "c1", ""),
        (["passed", "failed", "passed", "failed"], ".F.", "c4", "c3"),
        (["passed", "failed", "not run", "absent", "failed"], ".Fn-", "c2", "c1"),
        (["passed", "not run", "absent", "failed"], ".n-", "c4", "c1"),
        (["passed", "failed", "xfailed", "failed"], ".Fx", "c2", "c1"),
        (["partly checked", "failed"], "p", "c2", "c1"),
        (["failed", "passed"], "F", "", ""),
        (["passed", "depends on a failed check"], ".", "", ""),
    ],
)
def test_since_when_a_check_is_broken(statuses, results, since, passed):
    last = history_of(nights(statuses)[-1])
    assert last.results == results
    assert days(last) == (since, passed)
    everything = nights(statuses)
    plain = [replace(one, earlier=(), loaders=without_history(one)) for one in everything]
    assert history_of(with_history(plain[-1], plain[:-1])) == last, "from the reports alone, in any order"
    assert history_of(with_history(plain[-1], plain[-2::-1])) == last


def without_history(one: Report) -> tuple[LoaderRecord, ...]:
    return tuple(
        replace(record, checks=tuple(replace(check, history=None) for check in record.checks)) for record in one.loaders
    )


def test_a_history_outlasts_the_runs_that_it_lists():
    last = nights(["passed", "passed", *["failed"] * 20])[-1]
    assert history_of(last).results == "F" * (MOST_RUNS - 1)
    assert days(history_of(last)) == ("c3", "c2")
    assert len(last.earlier) == MOST_RUNS - 1


def test_the_first_run_has_no_history_and_a_report_keeps_it():
    first, second = nights(["passed", "failed"])
    assert first.loaders[0].checks[0].history is None
    assert second.earlier == (EarlierRun(started(1), "c1", 0),)
    assert from_plain(Report, json.loads(json.dumps(to_plain(second)))) == second


def test_earlier_reports_are_read_once_however_often_the_report_is_written():
    turns: list[object] = []

    class Counted(tuple[LoaderRecord, ...]):
        def __iter__(self) -> Iterator[LoaderRecord]:
            turns.append(self)
            return super().__iter__()

    first = night(1)
    past = Timeline([replace(first, loaders=Counted(first.loaders))])
    assert days(history_of(past.add_to(night(2, "failed")))) == ("c2", "c1")
    read = len(turns)
    assert days(history_of(past.add_to(night(2, "failed")))) == ("c2", "c1")
    assert read == len(turns)


def test_a_run_between_two_reports_is_known_from_the_later_one():
    made = nights(["passed", "failed", "failed", "failed"])
    last = with_history(replace(made[3], earlier=(), loaders=without_history(made[3])), [made[0], made[2]])
    assert history_of(last) == history_of(made[3])


def test_a_loader_in_two_worlds_has_two_histories():
    small, large = (WorldFacts(size, (("dp_shard", size),), "cpu", "gloo") for size in (2, 3))

    def both(day: int, first: str, second: str) -> Report:
        one, other = night(day, first), night(day, second)
        worlds = (replace(one.loaders[0], world=small), replace(other.loaders[0], world=large))
        return replace(one, loaders=worlds)

    last = with_history(both(2, "failed", "failed"), [both(1, "passed", "failed")])
    assert [days(record.checks[0].history) for record in last.loaders] == [("c2", "c1"), ("c1", "")]


def test_what_is_said_of_broken_and_flaky_checks():
    assert list(describe_history(nights(["passed", "failed"])[-1])) == [], "it is a new failure"
    broken = nights(["passed", "failed", "failed"])[-1]
    line = "broken since 2026-11-02 02:17:00 (c2), last passed 2026-11-01 02:17:00 (c1)"
    assert list(describe_history(broken)) == [
        ("broken", "broken since an earlier run: 1", [f"{CHECK} in {LLAMA}: {line}"])
    ]
    assert "broken since 2026-11-02 02:17" in summarise_run(broken)
    flaky = nights(["passed", "failed", "passed", "failed"])[-1]
    ((_, headline, lines),) = describe_history(flaky)
    assert (headline, lines) == (
        "flaky checks: 1",
        [f"{CHECK} in {LLAMA}: flaky: 2 passed and 2 failed, in turn, of the last 4 runs"],
    )
    assert describe_results(".p..F-") == "1 passed, 1 partly checked, 2 passed, 1 failed, 1 not in the run"


def with_findings(*each: Sequence[FindingRecord] | str, history: bool = True) -> list[Report]:
    """Return runs of one check, with these findings or this status, each with the history that it would have."""
    made: list[Report] = []
    for day, what in enumerate(each, 1):
        facts = (what,) if isinstance(what, str) else ("failed", what)
        one = night(day, facts[0])
        records = (check(CHECK, *facts, reason="rank 1 hung, 30 s" if facts[0] == "error" else ""),)
        one = replace(one, loaders=(replace(one.loaders[0], checks=records),))
        made.append(with_history(one, made) if history else one)
    return made


def starts(one: Report) -> dict[str | None, str]:
    return {found.tensor: found.since.commit if found.since else "" for found in one.loaders[0].checks[0].findings}


A, OTHER, B = (finding(name, cause=cause) for name, cause in (("a", "2 rows"), ("a", "swapped"), ("b", "2 rows")))


@pytest.mark.parametrize(
    ("each", "expected"),
    [
        (["passed", [A], [B]], {"b": "c3"}),
        (["passed", [A], [A, B]], {"a": "c2", "b": "c3"}),
        (["passed", [A], [OTHER]], {"a": "c3"}),
        (["passed", [A], [replace(A, cause="3 rows", actual="else")]], {"a": "c2"}),
        (["passed", [A], "error", [A]], {"a": "c2"}),
        (["passed", [A], [B], [A]], {"a": "c4"}),
        (["passed", [A], "passed", [A]], {"a": "c4"}),
        ([[A], "depends on a failed check", [A]], {"a": "c1"}),
    ],
)
def test_each_finding_has_a_start_of_its_own(each, expected):
    made = with_findings(*each)
    assert starts(made[-1]) == expected
    plain = with_findings(*each, history=False)
    assert starts(with_history(plain[-1], plain[:-1])) == expected, "from the reports alone"
    if made[-2].loaders[0].checks[0].findings:
        assert starts(with_history(plain[-1], [made[-2]])) == expected, "from the last report alone"


def test_a_tensor_that_was_not_judged_in_between_is_not_new():
    first, second, third = with_findings([A, B], [B], [A, B], history=False)
    record = replace(second.loaders[0].checks[0], unjudged={"no_meta_buffers": ("a",)})
    second = replace(second, loaders=(replace(second.loaders[0], checks=(record,)),))
    assert starts(with_history(third, [first, second])) == {"a": "c1", "b": "c1"}


def test_an_error_with_another_reason_is_new():
    made = with_findings("passed", "error", "error")
    assert history_of(made[-1]).reason_since == EarlierRun(started(2), "c2", 1)
    record = replace(made[-1].loaders[0].checks[0], reason="killed", history=None)
    other = replace(made[-1], loaders=(replace(made[-1].loaders[0], checks=(record,)),), earlier=())
    assert history_of(with_history(other, made[:-1])).reason_since == EarlierRun(started(3), "c3", 1)


def test_what_is_new_is_not_listed_as_broken_since_an_earlier_run():
    assert list(describe_history(with_findings("passed", [A], [B])[-1])) == []
    ((_, headline, lines),) = describe_history(with_findings("passed", [A], [A, B])[-1])
    passed = ", last passed 2026-11-01 02:17:00 (c1)"
    assert headline == "broken since an earlier run: 1"
    assert lines == [f"{CHECK} (a) in {LLAMA}: broken since 2026-11-02 02:17:00 (c2){passed}"]


def test_the_starts_of_findings_are_read_from_a_file(tmp_path):
    made = with_findings("passed", [A], [A, B])
    path = write(tmp_path, "3/report.json", made[-1])
    assert read_report(path) == made[-1]
    now = with_findings("passed", [A], [A, B], [A, B], history=False)[-1]
    assert starts(with_history(now, read_timeline([str(tmp_path)], NOW).past)) == {"a": "c2", "b": "c3"}


def test_a_commit_is_shortened_and_a_time_that_is_none_is_shown_as_it_is():
    commit = EarlierRun("no time", "0123456789abcdef+")
    assert describe_since(commit, CheckHistory("", commit)) == "broken since no time (012345678+)"
    assert describe_moment(EarlierRun("0001-01-01T00:00:00+14:00")) == "0001-01-01T00:00:00+14:00"


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_stay_in_their_line(name):
    first = night(1, "failed", name, header=header(started=name, commit=name))
    last = with_history(night(2, "failed", name), [first])
    for _, _, lines in describe_history(last):
        assert all(line.isprintable() for line in lines)
    assert "<script" not in summarise_run(last)


def write(folder: Path, name: str, one: Report | str | bytes) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(to_plain(one), indent=1) if isinstance(one, Report) else one
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_a_folder_of_reports_is_read_in_the_order_of_time(tmp_path):
    runs = {"b/report.json": 3, "c/deep/report/report.json": 1, "2026-11-02.json": 2, "a/report.json": 4}
    for name, day in runs.items():
        write(tmp_path, name, night(day, "failed" if day == 4 else "passed"))
    write(tmp_path, "a/evidence/other.json", "{}")
    found = read_timeline([str(tmp_path)], NOW)
    assert [one.header.commit for one in found.past] == ["c1", "c2", "c3", "c4"]
    assert not found.notes
    assert found.before == read_report(tmp_path / "b/report.json")
    assert found.which == "the last run that passed (4 read)"


@pytest.mark.parametrize(
    "runs",
    [
        [{"status": "failed"}, {}, {"status": "failed"}],
        [{}, {}, {"status": "error"}],
        [{}, {}, {"complete": False, "exit_status": None}],
        [{}, {}, {"complete": False}],
        [{}, {}, {"exit_status": 3}],
    ],
    ids=["failed", "error", "killed", "incomplete", "failed otherwise"],
)
def test_the_last_run_that_passed_is_compared(tmp_path, runs):
    for number, facts in enumerate(runs, 1):
        write(tmp_path, f"{number}/report.json", night(number, **facts))
    found = read_timeline([str(tmp_path)], NOW)
    assert (found.before.header.commit, found.which) == ("c2", "the last run that passed (3 read)")
    assert len(found.past) == 3


def test_nothing_is_excused_if_none_passed_but_the_history_is_known(tmp_path):
    for day in (1, 2):
        write(tmp_path, f"{day}/report.json", night(day, "failed"))
    found = read_timeline([str(tmp_path)], NOW)
    assert found.before is None
    assert found.problem == "no comparison: no earlier run passed (2 read), so every failure counts"
    assert history_of(with_history(night(3, "failed"), found.past)).results == "FF"
    named = read_timeline([str(tmp_path / "1")], NOW)
    assert named.before.header.commit == "c1", "a single report is compared with, passed or not"


def test_what_is_wrong_in_a_folder_is_one_line_each_and_the_rest_is_read(tmp_path):
    good = write(tmp_path, "1/report.json", night(1))
    damaged = to_plain(night(2))
    damaged["loaders"][0]["checks"][0]["findings"] = 3
    wrong = {
        "2": good.read_bytes(),
        "3": "",
        "4": good.read_bytes()[:200],
        "5": "\x00\x01",
        "6": b"\xff\xfe\x00",
        "7": "[]",
        "8": '{"schema": 99}',
        "9": '{"schema": 2, "header": 3, "loaders": [3]}',
        "10": night(1, header=header(started="2030-01-01T00:00:00+00:00")),
        "11": "[" * 100_000,
        "12": json.dumps(damaged),
    }
    for name, content in wrong.items():
        write(tmp_path, f"{name}/report.json", content)
    (tmp_path / "13" / "report.json").mkdir(parents=True)
    found = read_timeline([str(tmp_path)], NOW)
    assert [one.header.commit for one in found.past if one.header.commit != "c2"] == ["c1"]
    assert found.before.header.commit == "c1"
    lines = sorted(note.removeprefix(f"{tmp_path}/") for note in found.notes)
    assert all("\n" not in line for line in lines)
    named = {line.split("/")[0]: line.split(": ", 1)[1] for line in lines}
    assert len(named) == len(lines) == len(wrong), "one of the two copies is noted"
    assert named.keys() | {"1", "2"} == {"1", *wrong}
    assert named.get("1", named.get("2")).startswith(f"the same run as {tmp_path}")
    assert named["3"].startswith("not JSON, or truncated: ")
    assert named["8"].startswith("a report of schema 99, but this version reads schema 2")
    assert named["9"].startswith("Report.header: 3, but should be dict")
    assert named["10"] == "started 2030-01-01 00:00:00 (0123abc+), later than this run"
    assert "findings: 3, but should be list; " in named["12"]


def test_an_empty_folder_has_nothing_to_compare(tmp_path):
    assert (
        read_timeline([str(tmp_path)], NOW).problem
        == f"no comparison: no report in {tmp_path}, so every failure counts"
    )
    write(tmp_path, "1/report.json", "")
    found = read_timeline([str(tmp_path)], NOW)
    assert found.problem == f"no comparison: no report in {tmp_path} (1 file left out), so every failure counts"
    assert len(found.notes) == 1


def test_a_named_file_that_is_not_a_report_is_an_error(tmp_path):
    good, bad = write(tmp_path, "1.json", night(1)), write(tmp_path, "2.json", "")
    with pytest.raises(ValueError, match=r"2\.json: not JSON"):
        read_timeline([str(good), str(bad)], NOW)


def test_only_the_last_reports_of_a_large_folder_are_read(tmp_path):
    for number in range(1, 26):
        write(tmp_path, f"{number}/report.json", night(number))
    write(tmp_path, "old/report.json", night(1).header.started.join(['{"header": {"started": "', '"}, cut']))
    found = read_timeline([str(tmp_path)], NOW)
    assert [one.header.commit for one in found.past] == [f"c{day}" for day in range(26 - MOST_RUNS + 1, 26)]
    assert not found.notes


def test_a_single_report_is_read_by_its_name_or_its_folder(tmp_path):
    """Of its summaries, the losses alone."""
    path = write(tmp_path, FILE, report(loader()))
    write(tmp_path, "older/report.json", night(1))
    for given in (path, tmp_path):
        found = read_timeline([str(given)], NOW)
        assert found.before == read_report(path, brief=True)
        summary = found.before.loaders[0].summary
        assert summary == Summary(losses=loader().summary.losses)
        assert found.which == ""


def test_a_report_without_history_is_read(tmp_path):
    data = to_plain(night(1, "partly checked", complete=True))
    del data["earlier"]
    for one in data["loaders"][0]["checks"]:
        del one["history"]
    write(tmp_path, "1/report.json", json.dumps(data))
    found = read_timeline([str(tmp_path)], NOW)
    assert history_of(with_history(night(2), found.past)).results == "p"


def test_a_history_that_does_not_fit_its_runs_is_harmless(tmp_path):
    broken = nights(["passed", "failed"])[-1]
    record = broken.loaders[0].checks[0]
    assert isinstance(record, CheckRecord)
    for results in ("", "?", "FFFFFF", "\x00"):
        changed = replace(record, history=CheckHistory(results))
        past = replace(broken, loaders=(replace(broken.loaders[0], checks=(changed,)),))
        assert len(history_of(with_history(night(3), [past])).results) == 2
