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
UNKNOWN = "no ties are known; declare Subject(reference=<callable>) or Subject(tied=[(name, name)])"


@pytest.mark.parametrize(
    ("evidence", "reason"),
    [
        (empty(), NOTHING),
        (change(change_reference(healthy(), HEAD, **UNTIED), HEAD, **UNTIED), NOTHING),
        (undeclared(healthy(), "reference", why="not declared"), UNKNOWN),
        (from_checkpoint(healthy()), UNKNOWN),
    ],
    ids=["no tensors", "no ties", "nothing declared", "a checkpoint"],
)
def test_without_ties_there_is_nothing_to_judge(evidence, reason):
    assert (verdict(TIED, evidence).status, verdict(TIED, evidence).reason) == ("skipped", reason)


def test_one_storage_or_one_object_is_a_tie():
    assert verdict(TIED, change(healthy(), HEAD, identity=-1)).status == "passed"
    # On a device without storage addresses, only the same object is tied.
    blind = change(change(healthy(), HEAD, storage=None), EMBEDDING, storage=None)
    assert verdict(TIED, blind).status == "passed"
    assert verdict(TIED, change(blind, HEAD, local_shape=(0, 4))).status == "passed"
    assert verdict(TIED, change(blind, HEAD, identity=-1)).status == "failed"
    # An untied tensor that already failed does not matter.
    assert verdict(TIED, change(healthy(), FROZEN, device="meta")).status == "passed"


def test_three_names_for_one_weight():
    evidence = add(healthy(), parameter("third.weight", storage=f"memory of {EMBEDDING}", identity=1))
    evidence = declare(change(evidence, HEAD, [1], **UNTIED), tied=((EMBEDDING, HEAD, "third.weight"),))
    found = verdict(TIED, undeclared(evidence, "reference", why="not declared"))
    actual = "does not share storage with head.weight, third.weight"
    assert findings_of(found) == [(EMBEDDING, (1,), actual, "tied to them", "")]


def test_empty_shards_have_no_storage_to_share():
    evidence = change(healthy(4, parameters={EMBEDDING: (3, 4), HEAD: (3, 4)}), HEAD, identity=-1)
    assert evidence.inventory[3].by_name[HEAD].numel == 0
    assert verdict(TIED, evidence).status == "passed"
    broken = verdict(TIED, change(evidence, HEAD, [0, 1, 2], storage="memory of its own"))
    assert [finding.ranks for finding in broken.findings] == [(0, 1, 2)]


@pytest.mark.parametrize(
    ("evidence", "tied", "found"),
    [
        (
            add(healthy(), parameter("other.weight", storage="memory of layers.0.weight")),
            (MIDDLE, "other.weight"),
            EMBEDDING,
        ),
        (healthy(), (HEAD, EMBEDDING), HEAD),
        (from_checkpoint(healthy()), (EMBEDDING, HEAD), EMBEDDING),
        (undeclared(healthy(), "reference", why="no reference"), (EMBEDDING, HEAD), EMBEDDING),
        (undeclared(healthy(), "reference", why="no reference", error=True), (EMBEDDING, HEAD), EMBEDDING),
    ],
    ids=[
        "undeclared, in the reference",
        "declared and in the reference",
        "a checkpoint",
        "no reference",
        "a failed one",
    ],
)
def test_ties_that_are_declared_or_in_the_reference_are_reported_once(evidence, tied, found):
    broken = declare(change(evidence, HEAD, **UNTIED), tied=(tied,))
    assert [finding.tensor for finding in verdict(TIED, broken).findings] == [found]


def test_a_declared_tie_need_not_be_in_the_reference():
    evidence = declare(change_reference(healthy(), HEAD, **UNTIED), tied=((EMBEDDING, HEAD),))
    assert verdict(TIED, evidence).status == "passed"
    assert verdict(TIED, change(evidence, HEAD, **UNTIED)).status == "failed"


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
