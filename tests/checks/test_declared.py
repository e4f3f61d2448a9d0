"""What the checks make of declarations of what is right: drawn weights, names on some ranks, and summed losses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_fsdp_meta.catalogue import judge
from pytest_fsdp_meta.checks.checkpoint.facts import RankStateDict
from pytest_fsdp_meta.judging.view import Selection
from tests.checks.evidence_factory import (
    CATALOGUE,
    FROZEN,
    HEAD,
    MIDDLE,
    PARAMETERS,
    change,
    declare,
    differ,
    drop,
    drop_reference,
    equal,
    from_checkpoint,
    healthy,
    in_slices,
    measured,
    on_ranks,
    place,
    reloaded,
    remeasured,
    trained,
    undeclared,
    verdict,
    with_reference,
)

VALUES = "params_equal_reference"


def exported_otherwise():
    export = healthy().export
    facts = {"equal": False, "differing": 1, "index": (0, 0), "expected": 1.0, "actual": 2.0}
    other = tuple(replace(c, **facts) if c.name == MIDDLE else c for c in export.comparisons)
    return replace(healthy(), export=replace(export, comparisons=other))


@pytest.mark.parametrize(
    ("check", "name", "evidence"),
    [
        (VALUES, MIDDLE, differ(healthy(), MIDDLE, differing=12, measure=measured(12, apart=2.0))),
        (VALUES, MIDDLE, differ(healthy(), MIDDLE, differing=12, measure=measured(12, factor=0.0))),
        ("frozen_weights_equal_verifier", FROZEN, differ(healthy(), FROZEN, observed="verifier")),
        (
            *("no_uninitialized_memory", MIDDLE),
            change(differ(healthy(), MIDDLE), MIDDLE, dtype="int64", poisoned=1),
        ),
        ("load_is_repeatable", MIDDLE, replace(healthy(), repetition=change(healthy(), MIDDLE, digest="1").inventory)),
        ("full_state_dict_exports", MIDDLE, exported_otherwise()),
        ("names_match_reference", MIDDLE, drop_reference(from_checkpoint(healthy()), MIDDLE)),
    ],
    ids=[
        "other values",
        "zeros",
        "frozen",
        "largest integers",
        "another load",
        "another export",
        "not in a checkpoint",
    ],
)
def test_what_is_drawn_may_differ(check, name, evidence):
    assert verdict(check, evidence).status == "failed"
    assert verdict(check, declare(evidence, drawn=(name,))).status == "passed"


@pytest.mark.parametrize(
    ("check", "evidence", "name", "actual"),
    [
        (VALUES, differ(differ(healthy(), MIDDLE), HEAD), HEAD, "values that differ from the reference's slice"),
        (
            *("no_uninitialized_memory", change(differ(healthy(), MIDDLE, [1]), MIDDLE, [1], nan=12, poisoned=12)),
            *(MIDDLE, "never written (poison value NaN)"),
        ),
        ("names_match_reference", drop(healthy(), MIDDLE), MIDDLE, "missing"),
        (
            *("grad_parity", differ(remeasured(healthy(), MIDDLE, factor=2.0), MIDDLE), MIDDLE),
            "gradient is 2 times the reference's",
        ),
    ],
    ids=["beside other values", "not written", "missing", "trained"],
)
def test_what_is_drawn_is_judged_otherwise(check, evidence, name, actual):
    found = verdict(check, declare(evidence, drawn=(MIDDLE,)))
    assert [(finding.tensor, finding.actual) for finding in found.findings] == [(name, actual)]


def test_another_load_of_drawn_values_has_the_same_shapes():
    smaller = change(healthy(), MIDDLE, [0], shape=(1,), digest="again").inventory
    evidence = declare(replace(healthy(), repetition=smaller), drawn=(MIDDLE,))
    assert [finding.tensor for finding in verdict("load_is_repeatable", evidence).findings] == [MIDDLE]


def reached_later(evidence, *names):
    """Return evidence in which these parameters have no gradient in the first step, in the reference neither."""
    evidence = with_reference(evidence, gradients=evidence.reference.gradients | dict.fromkeys(names, 0.0))
    runs = (replace(run, without_gradient=names) for run in evidence.training)
    return replace(evidence, training=tuple(runs))


def test_gradients_that_begin_with_the_second_step():
    """The first step of LoRA reaches one matrix only; behind a head of zeros it reaches nothing."""
    lora = reached_later(healthy(), MIDDLE)
    assert "no gradient" in verdict("every_trainable_moves", lora).reason
    assert verdict("every_trainable_moves", with_reference(lora, reached_later=(MIDDLE,))).status == "passed"
    behind = tuple(t.name for t in healthy().inventory[0].tensors if t.requires_grad and t.name != HEAD)
    zeros = reached_later(healthy(), *behind)
    assert verdict("every_trainable_moves", zeros).status == "failed"
    assert verdict("every_trainable_moves", with_reference(zeros, reached_later=behind)).status == "passed"


def test_without_a_reference_drawn_weights_are_judged_as_before():
    bare = declare(undeclared(healthy(), "reference", "values", "verifier", why="no"), drawn=(MIDDLE,))
    assert verdict(VALUES, bare).status == "skipped"
    assert verdict("no_uninitialized_memory", bare).status == "passed"


PARITY = "loss_parity"
SHARES = ((0.5, 0.5, 0.25), (1.5, 1.0, 1.0))
"""Losses of two ranks, whose sums are those of the reference."""


def with_losses(evidence, *curves):
    runs = (replace(run, losses=curve) for run, curve in zip(evidence.training, curves, strict=True))
    return replace(evidence, training=tuple(runs))


CP, FLATTENED, OWN_NAME, TP = {"dp_shard": 2, "cp": 2}, {"dp_shard_cp": 4}, {"fsdp": 4}, {"dp_shard": 2, "tp": 2}


def in_slice(evidence, *indices):
    """Assign each rank to a slice of the batch, as an author does who declares ``data_parallel``."""
    evidence = in_slices(evidence, *indices)
    return declare(evidence, declared=evidence.subject.declared | {"data_parallel"})


def test_shares_of_the_loss_add_up():
    shares = with_losses(healthy(), *SHARES)
    found = verdict(PARITY, shares)
    assert found.findings[0].actual == "loss 1 at step 0"
    assert verdict(PARITY, declare(shares, loss_over_ranks="sum")).status == "passed"


@pytest.mark.parametrize(("mesh", "parts"), [(TP, 1), (CP, 2), (FLATTENED, 2), (OWN_NAME, 2)])
def test_tensor_parallel_ranks_compute_one_share_together_and_those_of_a_sequence_their_own(mesh, parts):
    curves = (tuple(loss / parts for loss in SHARES[rank // 2]) for rank in range(4))
    shares = in_slice(with_losses(healthy(mesh=mesh), *curves), 0, 0, 1, 1)
    assert verdict(PARITY, declare(shares, loss_over_ranks="sum")).status == "passed"


@pytest.mark.parametrize(
    ("first", "loss", "multiple"),
    [((1.5, 1.0, 1.0), "4", "2 times"), ((1.6, 1.0, 1.0), "4.1", "about 2 times")],
    ids=["means", "means over different numbers of labels"],
)
def test_means_do_not_add_up(first, loss, multiple):
    means = declare(with_losses(healthy(), first, (2.5, 2.0, 1.5)), loss_over_ranks="sum")
    found = verdict(PARITY, means)
    assert found.findings[0].actual == f"loss {loss} at step 0"
    assert found.findings[0].cause.startswith(f"the sum of the ranks' losses is {multiple} the reference's")


def test_global_losses_do_not_add_up():
    (finding,) = verdict(PARITY, declare(healthy(), loss_over_ranks="sum")).findings
    assert finding.cause.endswith("each rank's loss is the global loss itself, not a share of it")
    assert finding.remedy == 'declare Subject(loss_over_ranks="same")'


def test_every_rank_returns_the_same_loss_if_declared():
    own = with_losses(healthy(), (1.0, 1.5, 1.25), (3.0, 1.5, 1.25))
    assert verdict(PARITY, own).status == "passed"
    found = verdict(PARITY, declare(own, loss_over_ranks="same"))
    assert [(f.ranks, f.actual) for f in found.findings] == [((1,), "loss 3 at step 0")]
    assert verdict(PARITY, declare(healthy(), loss_over_ranks="same")).status == "passed"


def test_a_loss_that_is_reduced_over_some_ranks_only():
    one, other = (1.0, 1.5, 1.25), (3.0, 1.5, 1.25)
    cause = (
        "the loss is reduced over some of the data-parallel ranks only: one loss is on ranks 0, 1 and one on ranks 2, 3"
    )
    for losses, ranks, expected in [
        ((one, one, other, other), [(2, 3)], cause),
        (
            (one, other, (2.0, 1.5, 1.25), (4.0, 1.5, 1.25)),
            [(1,), (2,), (3,)],
            "the loss is not reduced over all ranks",
        ),
    ]:
        evidence = with_losses(healthy(mesh={"dp_replicate": 2, "dp_shard": 2}), *losses)
        found = verdict(PARITY, declare(evidence, loss_over_ranks="same")).findings
        assert [finding.ranks for finding in found if "as on rank 0" in finding.expected] == ranks
        assert found[0].cause.startswith(expected)


@pytest.mark.parametrize("mesh", [CP, FLATTENED, OWN_NAME])
def test_losses_of_one_row_are_compared_by_their_mean_if_ranks_divide_the_sequence(mesh):
    parts = ((1.0, 1.5, 1.25), (3.0, 1.5, 1.25), (1.5, 1.5, 1.25))
    for last, status in (((2.5, 1.5, 1.25), "passed"), ((3.5, 1.5, 1.25), "failed")):
        assert verdict(PARITY, in_slice(with_losses(healthy(mesh=mesh), *parts, last), 0, 0, 1, 1)).status == status


def test_ranks_with_the_same_part_of_a_sequence_are_compared_one_by_one():
    mesh = {"cp": 2, "tp": 2}
    parts = ((1.0, 1.5, 1.25), (1.5, 1.5, 1.25), (3.0, 1.5, 1.25), (2.5, 1.5, 1.25))
    found = verdict(PARITY, in_slice(with_losses(healthy(mesh=mesh), *parts), 0, 0, 0, 0))
    assert found.status == "passed"  # the author assigned the rows, and the mean is right
    derived = in_slice(with_losses(healthy(mesh=mesh), *parts), 0, 0, 0, 0)
    derived = replace(derived, subject=healthy().subject)
    assert [(f.ranks, f.expected) for f in verdict(PARITY, derived).findings] == [
        ((1,), "1, as on rank 0, which sees the same rows"),
        ((3,), "3, as on rank 2, which sees the same rows"),
    ]


MANIFEST, NAMES = "same_manifest_on_every_rank", "names_match_reference"
FIRST, SECOND = "experts.0.weight", "experts.1.weight"


def with_experts():
    """Return evidence in which rank 0 has one expert and rank 1 the other, as declared."""
    evidence = healthy(parameters={**PARAMETERS, FIRST: (4, 4), SECOND: (4, 4)})
    for rank, name in enumerate((FIRST, SECOND)):
        evidence = drop(place(evidence, name, {}), name, [1 - rank])
    return declare(observed_again(evidence), on_some_ranks=(FIRST, SECOND))


def observed_again(evidence):
    """Return the evidence with values, training and checkpoints of the tensors that the ranks have."""
    ranks, reference = evidence.inventory, evidence.reference
    return replace(
        evidence,
        values=tuple(tuple(equal(tensor) for tensor in rank.tensors) for rank in ranks),
        training=tuple(trained(rank, len(ranks), reference.losses, reference.batches) for rank in ranks),
        **reloaded(ranks, reference.inventory),
    )


def test_ranks_may_have_other_names_if_declared():
    evidence = with_experts()
    for id in (MANIFEST, NAMES, "shards_tile_the_tensor", "nothing_left_unsharded", "dtensor_placements"):
        assert verdict(id, evidence).status == "passed", id
    undeclared = declare(evidence, on_some_ranks=())
    assert [f.tensor for f in verdict(MANIFEST, undeclared).findings] == [FIRST, SECOND]


def test_other_names_are_still_compared():
    gone = drop(with_experts(), MIDDLE, [1])
    assert [(f.tensor, f.ranks) for f in verdict(MANIFEST, gone).findings] == [(MIDDLE, (1,))]
    reversed_ = on_ranks(with_experts(), [1], lambda rank: rank.tensors[::-1])
    assert [(f.ranks, f.actual) for f in verdict(MANIFEST, reversed_).findings] == [
        ((1,), "parameters and buffers in a different order")
    ]
    # The holders of a declared name have to agree.
    odd = change(declare(healthy(3), on_some_ranks=(MIDDLE,)), MIDDLE, [1], dtype="bfloat16")
    found = verdict(MANIFEST, drop(odd, MIDDLE, [2]))
    assert [(f.tensor, f.ranks, f.actual) for f in found.findings] == [(MIDDLE, (1,), "dtype bfloat16")]


def test_a_name_that_no_rank_has_is_missing():
    gone = observed_again(drop(with_experts(), SECOND))
    assert [(f.tensor, f.ranks) for f in verdict(NAMES, gone).findings] == [(SECOND, (0, 1))]
    alone = Selection(frozenset({VALUES}))
    found = judge(CATALOGUE[VALUES], gone, CATALOGUE, alone)
    assert [(f.tensor, f.ranks) for f in found.findings] == [(SECOND, (0, 1))]
    # A rank that lacks a declared name is no finding of the values.
    assert judge(CATALOGUE[VALUES], with_experts(), CATALOGUE, alone).status == "passed"


def test_all_experts_on_every_rank_are_not_sharded():
    everywhere = healthy(parameters={**PARAMETERS, FIRST: (4, 4)})
    everywhere = declare(place(everywhere, FIRST, {}), on_some_ranks=(FIRST,))
    assert [f.tensor for f in verdict("nothing_left_unsharded", everywhere).findings] == [FIRST]


def test_torch_cannot_clip_what_some_ranks_have():
    evidence = with_experts()
    assert "(experts.0.weight and 1 more on some ranks only)" in verdict("grad_norm_parity", evidence).reason
    own = declare(evidence, declared=evidence.subject.declared | {"clip_grad_norm"})
    assert verdict("grad_norm_parity", own).status == "passed"


def test_the_keys_of_a_rank_are_those_that_it_has():
    evidence = with_experts()
    keys = tuple(RankStateDict(tuple(t.name for t in rank.tensors if t.persistent)) for rank in evidence.inventory)
    evidence = replace(evidence, state_dict=keys)
    assert verdict("state_dict_names_clean", evidence).status == "passed"
    lost = replace(keys[1], keys=tuple(key for key in keys[1].keys if key != SECOND))
    found = verdict("state_dict_names_clean", replace(evidence, state_dict=(keys[0], lost)))
    assert [(f.tensor, f.ranks) for f in found.findings] == [(SECOND, (1,))]


def test_every_check_judges_ranks_with_other_names():
    evidence = with_experts()
    statuses = {check.id: verdict(check.id, evidence).status for check in CATALOGUE}
    assert {id for id, status in statuses.items() if status not in ("passed", "skipped")} == set()
