"""replicas_equal on hand-made evidence."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_fsdp_meta.evidence import Measure
from tests.catalogue.evidence_factory import (
    COUNTER,
    EMBEDDING,
    FROZEN,
    MIDDLE,
    ROTARY,
    change,
    declare,
    differ,
    drop,
    from_checkpoint,
    healthy,
    left_out,
    place,
    told,
    undeclared,
    verdict,
    with_reference,
)

REPLICAS = "replicas_equal"
HSDP = {"dp_replicate": 2, "dp_shard": 2}
ONE_OF_12 = "1 of 12 elements of rank 3's shard differ, first at [0, 0]: 2.5, but should be 2; largest difference 0.5"
NOT_GIVEN = "these ranks were not given the value that the others have, or replicas diverged after loading"
ZEROS = "nothing was ever written on these ranks (all zeros)"
ODD_SHARDS = "these ranks read the slice of another rank, or only the first replica was given the weight"
IN_PART = (
    "these ranks have it right but for some elements, or nearly: replicas diverged after loading (part was written "
    "over, or updated on some ranks only), or computed or rounded it each in its own way"
)
NONE_RIGHT = (
    "each rank drew or computed it by itself, and none as the truth has it: it was not loaded or not recomputed, and a "
    "seed or the rank went into it"
)


def alone(evidence):
    """Without a reference."""
    return undeclared(evidence, "reference", "values", "verifier", "training", why="not declared")


def odd(evidence, name, ranks, bits="other bits"):
    return change(evidence, name, ranks, digest=bits)


def test_shards_are_no_replicas():
    assert verdict(REPLICAS, alone(odd(healthy(4), MIDDLE, [1]))).status == "passed"


def test_a_replica_that_differs_without_a_reference():
    found = verdict(REPLICAS, alone(odd(healthy(mesh=HSDP), MIDDLE, [3])))
    assert told(found) == [(MIDDLE, (3,), "other bits", "those of rank 1, which holds the same elements", "")]
    assert found.findings[0].cause == (
        "each rank drew or computed it by itself, with a seed or a number that depends on the rank; or only some ranks "
        "were given it, or another part of it"
    )


@pytest.mark.parametrize(
    ("differing", "lengths", "cause"),
    [
        (1, None, IN_PART),
        (12, (5.0, 5.0, 0.1), IN_PART),
        (12, (5.0, 5.1, 7.0), ODD_SHARDS),
        (12, (0.0, 5.0, 5.0), ZEROS),
    ],
)
def test_what_a_replica_that_differs_holds(differing, lengths, cause):
    measure = lengths and Measure(*lengths, dot=0.0, elements=12)
    evidence = differ(odd(healthy(mesh=HSDP), MIDDLE, [3]), MIDDLE, [3], differing=differing, measure=measure)
    found = verdict(REPLICAS, evidence)
    assert [(f.ranks, f.cause) for f in found.findings] == [((3,), cause)]


def test_a_norm_that_kept_its_ones_is_near_the_truth_and_was_not_given_it():
    evidence = place(healthy(), MIDDLE, {}, shape=(12,))
    evidence = declare(odd(evidence, MIDDLE, [1]), unsharded=(MIDDLE,))
    near = Measure(5.0, 5.1, 0.1, dot=0.0, elements=12)
    found = verdict(REPLICAS, differ(evidence, MIDDLE, [1], differing=12, elements=12, index=(0,), measure=near))
    assert [(f.ranks, f.cause) for f in found.findings] == [((1,), NOT_GIVEN)]


def test_replicas_of_zeros_are_told_apart_from_others():
    evidence = odd(odd(healthy(4), ROTARY, [1], "zeros"), ROTARY, [2], "drawn")
    evidence = differ(evidence, ROTARY, [1], measure=Measure(0.0, 5.0, 5.0, 0.0, 2), differing=2)
    found = verdict(REPLICAS, differ(evidence, ROTARY, [2], differing=2))
    expected = "those of ranks 0, 3, which hold the same elements and equal the reference"
    assert [(f.ranks, f.expected, f.cause) for f in found.findings] == [
        ((2,), expected, NOT_GIVEN),
        ((1,), expected, ZEROS),
    ]


def test_one_of_several_replicas_without_a_reference():
    evidence = alone(odd(healthy(mesh={"dp_replicate": 3, "dp_shard": 1}), MIDDLE, [2]))
    assert [(f.ranks, f.cause) for f in verdict(REPLICAS, evidence).findings] == [
        ((2,), "these ranks read the slice of another rank, or only the first replica was given the weight")
    ]


def test_a_buffer_that_differs_on_one_rank():
    found = verdict(REPLICAS, alone(odd(healthy(4), ROTARY, [2])))
    assert told(found) == [(ROTARY, (2,), "other bits", "those of ranks 0, 1, 3, which hold the same elements", "")]
    assert (found.findings[0].cause, found.findings[0].remedy) == (
        NOT_GIVEN,
        "let every rank load or compute it alike, or broadcast it once loading is done",
    )


def test_the_rank_that_equals_the_reference_is_right():
    evidence = odd(healthy(mesh=HSDP), MIDDLE, [3])
    found = verdict(REPLICAS, differ(evidence, MIDDLE, [3]))
    expected = "those of rank 1, which holds the same elements and equals the reference"
    assert told(found) == [(MIDDLE, (3,), "other bits", expected, ONE_OF_12)]
    found = verdict(REPLICAS, differ(evidence, MIDDLE, [1]))
    assert [(f.ranks, f.expected) for f in found.findings] == [((1,), expected.replace("rank 1", "rank 3"))]


def test_the_ranks_that_equal_the_reference_are_right_though_few():
    evidence = odd(healthy(4), ROTARY, [3])
    found = verdict(REPLICAS, differ(evidence, ROTARY, [0, 1, 2]))
    assert [(f.ranks, f.expected) for f in found.findings] == [
        ((0, 1, 2), "those of rank 3, which holds the same elements and equals the reference")
    ]


def test_several_shards_of_one_replica_are_told_as_one():
    evidence = odd(odd(healthy(mesh=HSDP), MIDDLE, [2]), MIDDLE, [3], "more")
    found = verdict(REPLICAS, differ(evidence, MIDDLE, [2, 3]))
    expected = "those of ranks 0, 1, which hold the same elements and equal the reference"
    assert [(f.ranks, f.expected) for f in found.findings] == [((2, 3), expected)]
    # Of one of the shards, no replica is right.
    found = verdict(REPLICAS, differ(evidence, MIDDLE, [1, 2, 3]))
    assert [(f.ranks, f.expected) for f in found.findings] == [
        ((2,), "those of rank 0, which holds the same elements and equals the reference"),
        ((3,), "those of rank 1, which holds the same elements"),
    ]


def test_each_rank_has_other_values_and_none_is_right():
    evidence = healthy(4)
    for rank in range(4):
        evidence = odd(evidence, ROTARY, [rank], f"drawn on {rank}")
    found = verdict(REPLICAS, differ(evidence, ROTARY))
    assert told(found) == [(ROTARY, (1, 2, 3), "other bits", "those of rank 0, which holds the same elements", "")]
    assert found.findings[0].cause == NONE_RIGHT


def test_the_same_numbers_in_other_bits():
    # A zero and its negative, or two ways to write NaN: nothing computes otherwise with them.
    evidence = odd(healthy(), ROTARY, [1])
    assert verdict(REPLICAS, evidence).status == "passed"
    assert verdict(REPLICAS, alone(evidence)).status == "failed"


def test_what_is_frozen_is_told_beside_the_verifier():
    evidence = odd(healthy(mesh=HSDP), FROZEN, [2])
    found = verdict(REPLICAS, differ(evidence, FROZEN, [2], observed="verifier"))
    assert [(f.ranks, f.expected) for f in found.findings] == [
        ((2,), "those of rank 0, which holds the same elements and equals the verifier")
    ]


def test_a_checkpoint_knows_no_transient_buffer():
    found = verdict(REPLICAS, odd(from_checkpoint(healthy()), ROTARY, [1]))
    assert told(found) == [(ROTARY, (1,), "other bits", "those of rank 0, which holds the same elements", "")]


@pytest.mark.parametrize("dims", [{"tp": 2}, {"ep": 2}, {"pp": 2}])
def test_a_plain_tensor_may_be_a_part_cut_by_hand_along_what_splits_the_model(dims):
    evidence = odd(place(healthy(mesh=dims), MIDDLE, {}), MIDDLE, [1])
    assert verdict(REPLICAS, alone(evidence)).status == "passed"
    # Where it is as large as in the reference, it is no part.
    found = verdict(REPLICAS, differ(evidence, MIDDLE, [1]))
    assert [(finding.tensor, finding.ranks) for finding in found.findings] == [(MIDDLE, (1,))]


def test_the_meshes_of_the_loader_say_what_splits_the_model():
    # The marker said a world of 4; the loader made tensor parallelism of it by itself.
    evidence = place(alone(healthy(mesh={"dp_replicate": 2, "tp": 2})), MIDDLE, {})
    evidence = odd(replace(evidence, world=healthy(4).world), MIDDLE, [1, 3])
    evidence = declare(evidence, unsharded=(MIDDLE,))
    assert verdict(REPLICAS, evidence).status == "passed"
    found = verdict(REPLICAS, odd(evidence, MIDDLE, [2], "others"))
    assert told(found) == [(MIDDLE, (2,), "other bits", "those of rank 0, which holds the same elements", "")]


def test_replicated_over_tensor_parallelism_is_replicated():
    evidence = odd(alone(place(healthy(mesh={"tp": 2}), MIDDLE, {"tp": 2}, "R")), MIDDLE, [1])
    assert told(verdict(REPLICAS, evidence)) == [
        (MIDDLE, (1,), "other bits", "those of rank 0, which holds the same elements", "")
    ]


def test_the_parts_of_a_sum_differ():
    evidence = place(healthy(mesh={"tp": 2}), MIDDLE, {"tp": 2}, "P(sum)")
    assert verdict(REPLICAS, alone(odd(evidence, MIDDLE, [1]))).status == "passed"


def test_what_the_reference_draws_anew_tells_nothing():
    found = verdict(REPLICAS, with_reference(odd(healthy(), ROTARY, [1]), unstable=(ROTARY,)))
    assert (found.status, found.reason) == (
        *("skipped",),
        "the reference gives other bits of rotary.inv_freq each time that it is built, and so may each rank",
    )
    assert verdict(REPLICAS, with_reference(healthy(), unstable=(ROTARY,))).status == "passed"


def test_what_cannot_be_read_is_named():
    evidence = change(healthy(), COUNTER, [1], digest=None, unreadable="RuntimeError: packed")
    found = verdict(REPLICAS, evidence)
    assert (found.status, found.reason) == (
        *("skipped",),
        "kept by what could be judged; torch cannot read counter (RuntimeError: packed)",
    )
    assert verdict(REPLICAS, alone(odd(evidence, ROTARY, [1], "x"))).status == "failed"


@pytest.mark.parametrize(
    ("evidence", "by", "name"),
    [
        (change(healthy(), ROTARY, [1], nan=1, poisoned=2, digest="poison"), "no_uninitialized_memory", ROTARY),
        (drop(healthy(), ROTARY, [1]), "same_manifest_on_every_rank", ROTARY),
        (change(place(healthy(), EMBEDDING, {}), EMBEDDING, [1], digest="x"), "nothing_left_unsharded", EMBEDDING),
        (change(healthy(), MIDDLE, local_shape=(9, 4)), "shards_tile_the_tensor", MIDDLE),
    ],
)
def test_condemned_tensors_are_not_judged_again(evidence, by, name):
    found = verdict(REPLICAS, alone(evidence))
    assert (found.status, found.reason) == ("skipped", left_out(by, name))
