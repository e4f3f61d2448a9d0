"""tied_weights_share_storage on hand-made evidence."""

from __future__ import annotations

import pytest

from tests.checks.evidence_factory import (
    EMBEDDING,
    FROZEN,
    HEAD,
    MIDDLE,
    add,
    change,
    change_reference,
    declare,
    drop,
    empty,
    findings_of,
    from_checkpoint,
    healthy,
    left_out,
    parameter,
    undeclared,
    verdict,
)

TIED = "tied_weights_share_storage"
UNTIED = {"storage": "memory of its own", "identity": -1}
NOTHING = "no weights are tied, neither by Subject(tied=...) nor in the reference"


@pytest.mark.parametrize("evidence", [empty(1), empty(2)])
def test_without_tensors_there_is_nothing_to_judge(evidence):
    assert (verdict(TIED, evidence).status, verdict(TIED, evidence).reason) == ("skipped", NOTHING)


def test_on_a_device_without_storage_addresses_only_the_same_object_is_tied():
    blind = change(change(healthy(), HEAD, storage=None), EMBEDDING, storage=None)
    assert verdict(TIED, blind).status == "passed"
    assert verdict(TIED, change(blind, HEAD, identity=-1)).status == "failed"


@pytest.mark.parametrize("ranks", [(0,), (0, 1, 2, 3), (2,), (1, 3)])
def test_a_weight_with_two_storages(ranks):
    found = verdict(TIED, change(healthy(4), HEAD, ranks, **UNTIED))
    assert findings_of(found) == [(EMBEDDING, ranks, "does not share storage with head.weight", "tied to it", "")]
    assert found.findings[0].remedy == (
        "tie before fully_shard() with both modules in one FSDP group; call tie_weights() again after to_empty()"
    )


def test_three_names_for_one_weight():
    evidence = add(healthy(), parameter("third.weight", storage=f"memory of {EMBEDDING}", identity=1))
    evidence = declare(change(evidence, HEAD, [1], **UNTIED), tied=((EMBEDDING, HEAD, "third.weight"),))
    found = verdict(TIED, undeclared(evidence, "reference", why="not declared"))
    actual = "does not share storage with head.weight, third.weight"
    assert findings_of(found) == [(EMBEDDING, (1,), actual, "tied to them", "")]


def test_two_objects_with_one_storage_are_tied():
    assert verdict(TIED, change(healthy(), HEAD, identity=-1)).status == "passed"


def test_one_object_is_tied_even_without_a_storage():
    evidence = change(change(healthy(), HEAD, storage=None, local_shape=(0, 4)), EMBEDDING, storage=None)
    assert verdict(TIED, evidence).status == "passed"


def test_empty_shards_have_no_storage_to_share():
    evidence = healthy(4, parameters={EMBEDDING: (3, 4), HEAD: (3, 4)})
    assert evidence.inventory[3].by_name[HEAD].numel == 0
    found = verdict(TIED, change(evidence, HEAD, identity=-1))
    assert found.status == "passed"
    evidence = change(change(evidence, HEAD, identity=-1), HEAD, [0, 1, 2], storage="memory of its own")
    assert [finding.ranks for finding in verdict(TIED, evidence).findings] == [(0, 1, 2)]


def test_an_undeclared_tie_of_the_reference_counts_too():
    evidence = add(healthy(), parameter("other.weight", storage="memory of layers.0.weight"))
    evidence = change(declare(evidence, tied=((MIDDLE, "other.weight"),)), HEAD, **UNTIED)
    assert [finding.tensor for finding in verdict(TIED, evidence).findings] == [EMBEDDING]


def test_a_tie_that_is_declared_and_in_the_reference_is_reported_once():
    evidence = declare(change(healthy(), HEAD, **UNTIED), tied=((HEAD, EMBEDDING),))
    assert [finding.tensor for finding in verdict(TIED, evidence).findings] == [HEAD]


def test_a_declared_tie_need_not_be_in_the_reference():
    evidence = declare(change_reference(healthy(), HEAD, **UNTIED), tied=((EMBEDDING, HEAD),))
    assert verdict(TIED, evidence).status == "passed"
    assert verdict(TIED, change(evidence, HEAD, **UNTIED)).status == "failed"


def test_without_ties_there_is_nothing_to_judge():
    evidence = change(change_reference(healthy(), HEAD, **UNTIED), HEAD, **UNTIED)
    assert (verdict(TIED, evidence).status, verdict(TIED, evidence).reason) == ("skipped", NOTHING)


@pytest.mark.parametrize(
    "evidence",
    [undeclared(healthy(), "reference", why="not declared"), from_checkpoint(healthy())],
    ids=["nothing declared", "a checkpoint"],
)
def test_without_known_ties_the_fields_to_declare_are_named(evidence):
    found = verdict(TIED, evidence)
    assert (found.status, found.reason) == (
        "skipped",
        "no ties are known; declare Subject(reference=<callable>) or Subject(tied=[(name, name)])",
    )


@pytest.mark.parametrize("why_error", [False, True])
def test_declared_ties_are_judged_without_a_reference(why_error):
    evidence = undeclared(change(healthy(), HEAD, **UNTIED), "reference", why="no reference", error=why_error)
    assert verdict(TIED, declare(evidence, tied=((EMBEDDING, HEAD),))).status == "failed"


def test_declared_ties_are_judged_if_the_reference_is_a_checkpoint():
    evidence = declare(from_checkpoint(change(healthy(), HEAD, **UNTIED)), tied=((EMBEDDING, HEAD),))
    assert [finding.tensor for finding in verdict(TIED, evidence).findings] == [EMBEDDING]


@pytest.mark.parametrize(
    ("evidence", "by"),
    [
        (change(healthy(), HEAD, device="meta", **UNTIED), "no_meta_params"),
        (drop(healthy(), HEAD), "names_match_reference"),
        (drop(healthy(), HEAD, [1]), "same_manifest_on_every_rank"),
    ],
)
def test_a_tie_with_a_tensor_that_already_failed_is_not_judged(evidence, by):
    found = verdict(TIED, evidence)
    assert (found.status, found.reason) == ("skipped", left_out(by, HEAD))


def test_an_untied_tensor_that_already_failed_does_not_matter():
    assert verdict(TIED, change(healthy(), FROZEN, device="meta")).status == "passed"
