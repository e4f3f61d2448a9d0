"""The catalogue: what its checks read of the evidence."""

from __future__ import annotations

import numpy
import pytest

from pytest_fsdp_meta.catalogue import Catalogue, Finding, View, check, judge
from tests.catalogue.evidence_factory import healthy


def finding(**facts):
    return Finding(**{"tensor": "weight", "ranks": (0,), "actual": "odd", "expected": "even", **facts})


@pytest.mark.parametrize(
    ("found", "told"),
    [
        ([finding(ranks=[numpy.int64(1), 2])], None),
        ([finding(actual=None)], "raised TypeError: Finding(actual=None), but it should be a str"),
        ([finding(detail=3.5)], "raised TypeError: Finding(detail=3.5), but it should be a str"),
        ([finding(tensor=1)], "raised TypeError: Finding(tensor=1), but it should be a str"),
        (finding(), "raised TypeError: it returned a Finding; yield each, or return a list of them"),
        (None, "raised TypeError: 'NoneType' object is not iterable"),
    ],
)
def test_what_an_own_check_finds_is_plain_or_an_error_of_its_own(found, told):
    words = dict.fromkeys(("promise", "family", "why", "cause", "remedy"), "")

    @check(needs=["inventory"], **words)
    def own(view):
        return found

    verdict = judge(own, healthy(4), Catalogue([own]))
    if told is None:
        assert [one.ranks for one in verdict.findings] == [(1, 2)]
        assert {type(rank) for rank in verdict.findings[0].ranks} == {int}
    else:
        assert (verdict.status, verdict.reason) == ("error", f"the own check own {told}")


def made(id: str, needs: list[str], after: tuple[str, ...] = (), uses: tuple[str, ...] = ()):
    def judge(view: View) -> list[Finding]:
        return []

    judge.__name__ = id
    words = dict.fromkeys(("promise", "family", "why", "cause", "remedy"), "")
    return check(needs=needs, after=after, uses=uses, **words)(judge)


def test_a_check_reads_what_more_basic_ones_read():
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


def test_nothing_is_trained_for_a_more_basic_check():
    basic = made("basic", ["inventory"], uses=("training",))
    catalogue = Catalogue(
        [basic, made("values", ["values"], after=("basic",)), made("trained", ["training"], after=("basic",))]
    )
    assert "training" in catalogue.observations(["basic"])
    assert "training" not in catalogue.observations(["values"])
    assert "training" in catalogue.observations(["trained"])
