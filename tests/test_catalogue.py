"""The catalogue: what its checks read of the evidence."""

from __future__ import annotations

from pytest_fsdp_meta.catalogue import Catalogue, Finding, View, check


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
