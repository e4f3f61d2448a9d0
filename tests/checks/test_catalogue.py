"""The catalogue and the engine: verdicts of custom checks, the memo of verdicts, and required observations."""

from __future__ import annotations

from dataclasses import replace

import numpy
import pytest

from pytest_fsdp_meta.catalogue import Catalogue, Differs, Finding, Selection, View, check, judge
from tests.checks.evidence_factory import CATALOGUE, MIDDLE, healthy, left_out, undeclared

PARITY = "loss_parity"


def finding(**facts):
    return Finding(**{"tensor": "weight", "ranks": (0,), "actual": "odd", "expected": "even", **facts})


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ([finding(ranks=[numpy.int64(1), 2])], None),
        ([finding(actual=None)], "raised TypeError: Finding(actual=None): actual should be a str"),
        ([finding(detail=3.5)], "raised TypeError: Finding(detail=3.5): detail should be a str"),
        ([finding(tensor=1)], "raised TypeError: Finding(tensor=1): tensor should be a str"),
        (finding(), "raised TypeError: it returned a Finding; yield findings, or return a list of them"),
        (None, "raised TypeError: 'NoneType' object is not iterable"),
    ],
)
def test_findings_of_an_own_check_are_converted_or_an_error(found, message):
    texts = dict.fromkeys(("promise", "family", "why", "cause", "remedy"), "")

    @check(needs=["inventory"], **texts)
    def own(view):
        return found

    verdict = judge(own, healthy(4), Catalogue([own]))
    if message is None:
        assert [converted.ranks for converted in verdict.findings] == [(1, 2)]
        assert {type(rank) for rank in verdict.findings[0].ranks} == {int}
    else:
        assert (verdict.status, verdict.reason) == ("error", f"the custom check own {message}")


def made(id: str, needs: list[str], after: tuple[str, ...] = (), uses: tuple[str, ...] = (), finds=(), family=""):
    def judge(view: View) -> list[Finding]:
        return list(finds)

    judge.__name__ = id
    texts = dict.fromkeys(("promise", "why", "cause", "remedy"), "")
    return check(needs=needs, after=after, uses=uses, family=family, **texts)(judge)


def test_a_second_catalogue_on_the_same_evidence_has_its_own_verdicts():
    evidence = healthy()
    passing, failing = made("basic", ["inventory"]), made("basic", ["inventory"], finds=[finding(tensor=MIDDLE)])
    later = made("later", ["inventory"], after=("basic",))
    assert judge(later, evidence, Catalogue([passing, later])).status == "passed"
    assert judge(failing, evidence, Catalogue([failing, later])).status == "failed"
    assert judge(passing, evidence, Catalogue([passing, later])).status == "passed"


def test_two_checks_with_one_id_have_their_own_verdicts():
    evidence, catalogue = healthy(), Catalogue()
    assert judge(made("own", ["inventory"]), evidence, catalogue).status == "passed"
    assert judge(made("own", ["inventory"], finds=[finding()]), evidence, catalogue).status == "failed"


def test_a_check_that_is_added_changes_the_verdicts_that_depend_on_it():
    evidence = undeclared(healthy(), "training", why="rank 1 raised RuntimeError", error=True, names=("weight",))
    catalogue, own = Catalogue(), made("own", ["training"])
    assert judge(own, evidence, catalogue).status == "error"
    catalogue.add(made("basic", ["inventory"], finds=[finding()], family="structure"))
    found = judge(own, evidence, catalogue)
    assert (found.status, found.reason) == (
        "skipped",
        "rank 1 raised RuntimeError, which the findings of basic explain; fix those first",
    )


def test_a_verdict_is_computed_once_per_evidence_and_catalogue():
    calls = []

    @check(needs=["inventory"], **dict.fromkeys(("promise", "family", "why", "cause", "remedy"), ""))
    def own(view):
        calls.append(view)
        return []

    evidence, catalogue = healthy(), Catalogue([own])
    assert judge(own, evidence, catalogue) is judge(own, evidence, catalogue)
    judge(own, healthy(), catalogue)
    assert len(calls) == 2


def test_the_observations_of_a_check_include_those_of_more_basic_ones():
    catalogue = Catalogue(
        [
            made("one", ["inventory"], uses=("values",)),
            made("two", ["reference"], after=("one",)),
            made("three", ["memory"], after=("two",)),
        ]
    )
    assert catalogue.observations(["one"]) == {"inventory", "values"}
    assert catalogue.observations(["three"]) == {"inventory", "values", "reference", "memory"}
    assert catalogue.observations(["one", "two"]) == {"inventory", "values", "reference"}
    assert catalogue.observations([]) == set()


def test_a_basic_check_that_uses_the_training_does_not_cause_it():
    basic = made("basic", ["inventory"], uses=("training",))
    catalogue = Catalogue(
        [basic, made("values", ["values"], after=("basic",)), made("trained", ["training"], after=("basic",))]
    )
    assert "training" in catalogue.observations(["basic"])
    assert "training" not in catalogue.observations(["values"])
    assert "training" in catalogue.observations(["trained"])


def basic_and_later(name: str | None = MIDDLE) -> tuple[Catalogue, str]:
    """Return a catalogue in which both checks find something wrong with the tensor of this name."""
    basic = made("basic", ["inventory"], finds=[finding(tensor=name, cause="its origin", remedy="mend it")])

    def judge(view: View) -> list[Finding]:
        return [finding(tensor=MIDDLE)] if view.judgeable(MIDDLE) else []

    judge.__name__ = "later"
    texts = dict.fromkeys(("promise", "family", "why", "cause", "remedy"), "")
    return Catalogue([basic, check(needs=["inventory"], after=["basic"], **texts)(judge)]), "later"


def test_a_check_leaves_a_tensor_to_a_selected_check_only():
    catalogue, later = basic_and_later()
    selected = judge(catalogue[later], healthy(), catalogue, Selection(frozenset({"basic", "later"})))
    assert (selected.status, selected.unjudged) == ("skipped", {"basic": (MIDDLE,)})
    alone = judge(catalogue[later], healthy(), catalogue, Selection(frozenset({"later"})))
    assert alone.status == "failed"
    assert alone.unjudged == {}


@pytest.mark.parametrize(
    ("finds", "already_failed", "status", "why", "reason"),
    [
        ([], False, "skipped", "differs", "0.5 apart"),
        ([], True, "skipped", "differs", f"0.5 apart; {left_out('basic', MIDDLE, rest=False)}"),
        ([finding()], True, "failed", "", "0.5 apart"),
    ],
)
def test_a_check_that_differs_does_so_with_tensors_left_out_but_not_with_findings(
    finds, already_failed, status, why, reason
):
    def later(view: View):
        view.judgeable(MIDDLE)
        yield from finds
        raise Differs("0.5 apart")

    texts = dict.fromkeys(("promise", "family", "why", "cause", "remedy"), "")
    basic = made("basic", ["inventory"], finds=[finding(tensor=MIDDLE)] if already_failed else [])
    catalogue = Catalogue([basic, check(needs=["inventory"], after=["basic"], **texts)(later)])
    verdict = judge(catalogue["later"], healthy(), catalogue)
    assert (verdict.status, verdict.why, verdict.reason) == (status, why, reason)


def test_the_cause_is_that_of_the_check_that_is_left_out():
    catalogue, later = basic_and_later()
    found = judge(catalogue[later], healthy(), catalogue, Selection(frozenset({"later"}))).findings[0]
    assert found.cause == "basic, which this run leaves out, fails as well (odd): its origin"
    assert found.remedy == "mend it"


def test_the_finding_of_a_check_that_is_left_out_explains_its_own_tensor_only():
    catalogue, later = basic_and_later(name="another")
    found = judge(catalogue[later], healthy(), catalogue, Selection(frozenset({"later"}))).findings[0]
    assert (found.cause, found.remedy) == ("", "")


def test_an_expected_failure_is_left_to_its_check():
    catalogue, later = basic_and_later()
    selection = Selection(frozenset({"later"}), frozenset({"basic"}))
    assert judge(catalogue[later], healthy(), catalogue, selection).status == "skipped"


def test_a_judge_of_the_package_that_raises_is_an_error_of_its_check_alone():
    def broken(view: View) -> list[Finding]:
        return [{}["odd"]]

    broken.__module__ = CATALOGUE[PARITY].judge.__module__
    catalogue = Catalogue([replace(one, judge=broken) if one.id == PARITY else one for one in CATALOGUE])
    verdicts = {one.id: judge(one, healthy(), catalogue) for one in catalogue}
    wrong = {id: found for id, found in verdicts.items() if found.status in ("error", "failed")}
    assert list(wrong) == [PARITY]
    assert wrong[PARITY].reason == "this check of pytest-fsdp-meta raised KeyError: 'odd'; please report this"
    assert 'return [{}["odd"]]' in wrong[PARITY].detail
