"""replicas_equal on hand-made evidence."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_fsdp_meta.checks.values.facts import Pattern
from tests.checks.evidence_factory import (
    COUNTER,
    FROZEN,
    MIDDLE,
    ROTARY,
    change,
    declare,
    differ,
    findings_of,
    from_checkpoint,
    healthy,
    place,
    undeclared,
    verdict,
    with_reference,
)

REPLICAS = "replicas_equal"
HSDP = {"dp_replicate": 2, "dp_shard": 2}
ONE_OF_12 = "1 of 12 elements of rank 3's shard differ, first at [0, 0]: 2.5, but should be 2; largest difference 0.5"
BY_ITSELF = (
    "each rank initialised or computed it by itself, from a seed or a value that depends on the rank; or only some "
    "ranks received it, or received another part of it"
)
NOT_GIVEN = "these ranks did not receive the value that the others have, or replicas diverged after loading"
ZEROS = (
    "it holds only zeros on these ranks: it was created or initialised with zeros (like the B of LoRA), and the weight "
    "was not loaded after that"
)
IN_PART = "a part was overwritten after loading, or was read, computed or rounded differently from the other ranks"
OTHER_PART = "these ranks hold another part of the tensor: they read the slice of another rank"
NONE_RIGHT = (
    "each rank initialised or computed it by itself, none as in the reference: it was not loaded or not recomputed, "
    "and depends on a seed or on the rank"
)


def alone(evidence):
    """Remove the reference and what depends on it."""
    return undeclared(evidence, "reference", "values", "verifier", "training", why="not declared")


def altered(evidence, name, ranks, bits="other bits"):
    return change(evidence, name, ranks, digest=bits)


def all_other(evidence):
    for rank in evidence.inventory:
        evidence = altered(evidence, ROTARY, [rank.rank], f"random on {rank.rank}")
    return evidence


def unlike(*ranks, equals=""):
    """Return the text about bits that differ from those of these ranks, which equal the reference or nothing."""
    one = len(ranks) == 1
    others = f"rank{'' if one else 's'} {', '.join(map(str, ranks))}"
    agree = (
        f"{'has' if one else 'have'} the {equals}'s values" if equals else f"hold{'s' if one else ''} the same elements"
    )
    return f"bits that differ from those of {others}, which {agree}"


def test_shards_and_partial_tensors_may_differ():
    assert verdict(REPLICAS, alone(altered(healthy(4), MIDDLE, [1]))).status == "passed"
    partial = place(healthy(mesh={"tp": 2}), MIDDLE, {"tp": 2}, "P(sum)")
    assert verdict(REPLICAS, alone(altered(partial, MIDDLE, [1]))).status == "passed"


ON_TP = place(healthy(mesh={"tp": 2}), MIDDLE, {"tp": 2}, "R")
THREE = {"dp_replicate": 3, "dp_shard": 1}


@pytest.mark.parametrize(
    ("evidence", "name", "ranks", "others", "cause"),
    [
        (alone(altered(healthy(mesh=HSDP), MIDDLE, [3])), MIDDLE, (3,), (1,), BY_ITSELF),
        (alone(altered(healthy(mesh=THREE), MIDDLE, [2])), MIDDLE, (2,), (0, 1), NOT_GIVEN),
        (alone(altered(healthy(4), ROTARY, [2])), ROTARY, (2,), (0, 1, 3), NOT_GIVEN),
        (altered(from_checkpoint(healthy()), ROTARY, [1]), ROTARY, (1,), (0,), BY_ITSELF),
        (alone(altered(ON_TP, MIDDLE, [1])), MIDDLE, (1,), (0,), BY_ITSELF),
        (differ(all_other(healthy(4)), ROTARY), ROTARY, (1, 2, 3), (0,), NONE_RIGHT),
    ],
    ids=["shard", "one of three", "buffer", "a checkpoint lacks it", "over tp", "none is right"],
)
def test_replicas_that_differ_without_a_right_one(evidence, name, ranks, others, cause):
    found = verdict(REPLICAS, evidence)
    assert findings_of(found) == [(name, ranks, unlike(*others), "", "")]
    assert found.findings[0].cause == cause


@pytest.mark.parametrize(
    ("kind", "cause"),
    [("part", IN_PART), ("elsewhere", OTHER_PART), ("zeros", ZEROS), ("", NOT_GIVEN)],
)
def test_the_values_of_a_differing_replica_determine_the_cause(kind, cause):
    pattern = Pattern(kind) if kind else None
    found = verdict(REPLICAS, differ(altered(healthy(mesh=HSDP), MIDDLE, [3]), MIDDLE, [3], pattern=pattern))
    assert [(f.ranks, f.cause) for f in found.findings] == [((3,), cause)]


def test_replicas_of_zeros_are_findings_of_their_own():
    evidence = altered(altered(healthy(4), ROTARY, [1], "zeros"), ROTARY, [2], "random")
    evidence = differ(evidence, ROTARY, [1], pattern=Pattern("zeros"), differing=2)
    found = verdict(REPLICAS, differ(evidence, ROTARY, [2], differing=2)).findings
    actual = unlike(0, 3, equals="reference")
    assert [(f.ranks, f.actual, f.cause) for f in found] == [((2,), actual, NOT_GIVEN), ((1,), actual, ZEROS)]


ODD_SHARD = altered(healthy(mesh=HSDP), MIDDLE, [3])
ODD_REPLICA = altered(altered(healthy(mesh=HSDP), MIDDLE, [2]), MIDDLE, [3], "more")


@pytest.mark.parametrize(
    ("evidence", "findings"),
    [
        (differ(ODD_SHARD, MIDDLE, [3]), [((3,), unlike(1, equals="reference"), ONE_OF_12)]),
        (differ(ODD_SHARD, MIDDLE, [1]), [((1,), unlike(3, equals="reference"))]),
        (
            differ(altered(healthy(4), ROTARY, [3]), ROTARY, [0, 1, 2]),
            [((0, 1, 2), unlike(3, equals="reference"))],
        ),
        (differ(ODD_REPLICA, MIDDLE, [2, 3]), [((2, 3), unlike(0, 1, equals="reference"))]),
        # If no replica of a shard equals the reference, the finding does not mention it.
        (
            differ(ODD_REPLICA, MIDDLE, [1, 2, 3]),
            [((2,), unlike(0, equals="reference")), ((3,), unlike(1))],
        ),
        (
            differ(altered(healthy(mesh=HSDP), FROZEN, [2]), FROZEN, [2], observed="verifier"),
            [((2,), unlike(0, equals="verifier"))],
        ),
    ],
    ids=["one", "the other one", "one of four", "shards of one replica", "none right for a shard", "frozen"],
)
def test_the_ranks_that_equal_the_reference_are_right(evidence, findings):
    found = verdict(REPLICAS, evidence).findings
    assert [(f.ranks, f.actual, f.detail)[: len(findings[0])] for f in found] == findings


def test_the_same_numbers_in_other_bits():
    # 0.0 and -0.0, or two NaNs, are equal in computations.
    evidence = altered(healthy(), ROTARY, [1])
    assert verdict(REPLICAS, evidence).status == "passed"
    assert verdict(REPLICAS, alone(evidence)).status == "failed"


@pytest.mark.parametrize("dims", [{"tp": 2}, {"ep": 2}, {"pp": 2}])
def test_a_plain_tensor_may_be_a_part_along_a_dimension_that_splits_the_model(dims):
    evidence = altered(place(healthy(mesh=dims), MIDDLE, {}), MIDDLE, [1])
    assert verdict(REPLICAS, alone(evidence)).status == "passed"
    # A tensor as large as in the reference is not a part.
    found = verdict(REPLICAS, differ(evidence, MIDDLE, [1]))
    assert [(finding.tensor, finding.ranks) for finding in found.findings] == [(MIDDLE, (1,))]


def test_meshes_of_the_loader_define_what_splits_the_model():
    # The marker gave a world of 4 without names; the loader created a tensor-parallel mesh.
    evidence = place(alone(healthy(mesh={"dp_replicate": 2, "tp": 2})), MIDDLE, {})
    evidence = altered(replace(evidence, world=healthy(4).world), MIDDLE, [1, 3])
    evidence = declare(evidence, unsharded=(MIDDLE,))
    assert verdict(REPLICAS, evidence).status == "passed"
    found = verdict(REPLICAS, altered(evidence, MIDDLE, [2], "others"))
    assert findings_of(found) == [(MIDDLE, (2,), unlike(0), "", "")]


def test_a_tensor_that_the_reference_randomises_is_not_judged():
    found = verdict(REPLICAS, with_reference(altered(healthy(), ROTARY, [1]), unstable=(ROTARY,)))
    reason = "rotary.inv_freq differs between its ranks, and each time the reference is built"
    assert (found.why, found.reason) == ("differs", reason)
    assert verdict(REPLICAS, with_reference(healthy(), unstable=(ROTARY,))).status == "passed"


def test_what_cannot_be_read_is_named():
    evidence = change(healthy(), COUNTER, [1], digest=None, unreadable="RuntimeError: packed")
    found = verdict(REPLICAS, evidence)
    reason = "torch cannot read counter (RuntimeError: packed)"
    assert (found.status, found.reason) == ("skipped", reason)
    assert verdict(REPLICAS, alone(altered(evidence, ROTARY, [1], "x"))).status == "failed"
