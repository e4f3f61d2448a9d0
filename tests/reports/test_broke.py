"""The cards of "What broke", without a browser."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pytest_fsdp_meta.reports.page.rendering import Card, make_cards
from pytest_fsdp_meta.reports.page.view import build_view
from pytest_fsdp_meta.reports.schema import FindingRecord, LoaderRecord, Report
from tests.reports import report_factory as factory
from tests.reports.report_factory import check, finding, header, loader, raised, report, with_history

CAUSE = {"cause": "it is a non-persistent buffer", "remedy": "recompute it"}


def failing(
    name: str, actual: str = "never written", mesh: dict[str, int] | None = None, others: Sequence[FindingRecord] = ()
) -> LoaderRecord:
    found = [finding("rotary.inv_freq", actual=actual, **CAUSE), *others]
    return loader(name, mesh, {"no_meta_params": check("no_meta_params", "failed", found, name)})


def with_causes(made: Report) -> Report:
    """Return the report with a cause of its own for each failed check."""
    loaders = (
        replace(
            one,
            checks=tuple(
                replace(each, findings=tuple(replace(found, cause=each.check) for found in each.findings))
                for each in one.checks
            ),
        )
        for one in made.loaders
    )
    return replace(made, loaders=tuple(loaders))


EARLIER = header(started="2026-11-19T02:17:00Z", commit="before")


def cards(now: Report, before: Report | None = None) -> list[Card]:
    return make_cards(build_view(now if before is None else with_history(now, [replace(before, header=EARLIER)])))


def test_a_card_says_whether_its_cause_is_new():
    now = report(failing("a.py::a"), failing("a.py::b"))

    def news(before: Report | None) -> list[str]:
        return [card.story.since for card in cards(now, before)]

    assert news(None) == [""]
    assert news(factory.passing(now)) == ["new since the run of 2026-11-19 02:17:00 (before)"]
    assert news(now) == ["broken since 2026-11-19 02:17:00 (before)"]
    assert news(report(failing("a.py::a"), loader("a.py::b"))) == ["new in 1 of 2 loaders"]


def test_a_loader_in_two_worlds_is_new_in_one():
    worlds = [failing("a.py::a", mesh={"dp_shard": size}) for size in (2, 4)]
    passed = loader("a.py::a", {"dp_shard": 4})
    (card,) = cards(report(*worlds), report(worlds[0], passed))
    assert card.story.since == "new in 1 of 2 loaders"


def test_a_card_names_the_run_since_which_its_cause_is_known():
    """loss_parity fails since the tenth night, and params_equal_reference in the last one."""
    assert [card.story.since for card in cards(with_causes(factory.nights()))] == [
        "new since the run of 2026-11-13 02:17:00 (ddddddddd)",
        "broken since 2026-11-10 02:17:00 (aaaaaaaaa)",
    ]


def test_a_cause_is_new_although_its_check_failed_before_for_another_one():
    other = finding("lm_head.weight", cause="the tie is broken")
    before = report(failing("a.py::a"))
    now = report(failing("a.py::a", others=[other]))
    old, new = cards(now, before)
    assert (new.story.since, new.story.is_new) == ("new since the run of 2026-11-19 02:17:00 (before)", True)
    assert (old.story.since, old.story.is_new) == ("broken since 2026-11-19 02:17:00 (before)", False)


def test_one_of_several_tensors_with_a_cause_is_new():
    now = report(failing("a.py::a", others=[finding("rotary.original", **CAUSE)]))
    assert [card.story.since for card in cards(now, report(failing("a.py::a")))] == ["new in 1 of 2 findings"]


def test_equal_values_are_one_line_and_others_name_their_loader():
    (card,) = cards(report(failing("t.py::a"), failing("t.py::b"), failing("t.py::c", "on meta")))
    assert [(value.line.actual, value.loaders, value.where) for value in card.values] == [
        ("never written", 2, "a"),
        ("on meta", 1, "c"),
    ]
    assert [loader.short for loader, _ in card.chips] == ["a", "b", "c"]
    assert card.story.count == "3 checks failed in 3 loaders"
    assert card.story.again == "python -m pytest 't.py::a[no_meta_params]'"


def test_values_that_differ_only_in_numbers_are_one_line_as_in_the_terminal():
    others = [finding(f"layers.{one}.weight", actual="off", expected=f"within 0.{one + 1}") for one in range(3)]
    one = loader(checks={"grad_parity": check("grad_parity", "failed", others)})
    (card,) = cards(report(one))
    [value] = card.values
    assert (value.names, value.findings, card.left) == (("layers.{0..2}.weight",), 3, 0)
    assert value.note == "the numbers are those of layers.0.weight"
    apart = [finding(f"layers.{number}.weight", actual=f"is {word}") for number, word in enumerate("abcd")]
    (card,) = cards(report(loader(checks={"grad_parity": check("grad_parity", "failed", [*apart, apart[-1]])})))
    assert (len(card.values), card.left) == (4, 2)


def test_findings_on_all_tensors_of_a_kind_are_named_by_their_number():
    names = tuple(f"{letter}.weight" for letter in "abcd")
    failed = check("grad_parity", "failed", [finding(name) for name in names])
    (card,) = cards(report(loader(checks={"grad_parity": replace(failed, all_of={"parameter": names})})))
    assert (card.story.subject, card.values[0].names) == ("all 4 parameters", ("all 4 parameters",))
    (card,) = cards(report(loader(checks={"grad_parity": failed})))
    assert card.story.subject == "a.weight and 3 more"


def test_a_crash_names_the_line_of_the_user_and_leads_to_the_loader():
    crashed = raised()
    crashed = replace(crashed, checks=tuple(replace(one, place="pkg/b.py:88") for one in crashed.checks))
    (card,) = cards(report(crashed))
    assert (card.story.count, card.story.lines) == ("1 loader crashed", ("pkg/b.py:88",))
    assert [(target.anchor, target.cell) for _, target in card.chips] == [("loader-1", "cell-1")]
    bare = LoaderRecord("a.py::a", crashed.world, (), error="no rank started")
    assert [card.story.count for card in cards(report(bare))] == ["1 loader crashed"]
