"""What the checks make of declarations of what is right: drawn weights, names on some ranks, and summed losses."""

from __future__ import annotations

import math
from dataclasses import replace

from tests.catalogue.evidence_factory import (
    FROZEN,
    HEAD,
    MIDDLE,
    change,
    declare,
    differ,
    drop,
    drop_reference,
    findings_of,
    from_checkpoint,
    healthy,
    measured,
    remeasured,
    undeclared,
    verdict,
    with_reference,
)

VALUES = "params_equal_reference"


def test_drawn_values_need_not_equal_the_reference():
    other = differ(healthy(), MIDDLE, differing=12, measure=measured(12, apart=2.0))
    assert verdict(VALUES, other).status == "failed"
    assert verdict(VALUES, declare(other, drawn=(MIDDLE,))).status == "passed"


def test_zeros_that_are_drawn_are_not_a_finding():
    zeros = differ(healthy(), MIDDLE, differing=12, measure=measured(12, factor=0.0))
    assert verdict(VALUES, declare(zeros, drawn=(MIDDLE,))).status == "passed"


def test_drawn_values_have_to_be_finite():
    for value in (math.inf, math.nan):
        infinite = differ(healthy(), MIDDLE, [1], measure=replace(measured(12), actual=value))
        assert findings_of(verdict(VALUES, declare(infinite, drawn=(MIDDLE,)))) == [
            (MIDDLE, (1,), "values that are infinite or NaN", "finite: it is declared drawn", "")
        ]


def test_other_values_are_reported_beside_drawn_ones():
    other = declare(differ(differ(healthy(), MIDDLE), HEAD), drawn=(MIDDLE,))
    assert [finding.tensor for finding in verdict(VALUES, other).findings] == [HEAD]


def test_a_drawn_frozen_weight_is_not_compared_with_the_verifier():
    other = differ(healthy(), FROZEN, observed="verifier")
    assert verdict("frozen_weights_equal_verifier", other).status == "failed"
    assert verdict("frozen_weights_equal_verifier", declare(other, drawn=(FROZEN,))).status != "failed"


def test_a_drawn_weight_has_to_be_written():
    poisoned = change(differ(healthy(), MIDDLE, [1]), MIDDLE, [1], nan=12, poisoned=12)
    poisoned = declare(poisoned, drawn=(MIDDLE,))
    assert verdict("no_uninitialized_memory", poisoned).status == "failed"


def test_a_few_largest_integers_may_be_drawn():
    drawn = change(differ(healthy(), MIDDLE), MIDDLE, dtype="int64", poisoned=1)
    assert verdict("no_uninitialized_memory", drawn).status == "failed"
    assert verdict("no_uninitialized_memory", declare(drawn, drawn=(MIDDLE,))).status == "passed"


def test_drawn_replicas_have_to_be_equal():
    mesh = {"dp_replicate": 2, "dp_shard": 1}
    apart = declare(differ(change(healthy(mesh=mesh), MIDDLE, [1], digest="other"), MIDDLE), drawn=(MIDDLE,))
    found = verdict("replicas_equal", apart)
    assert [(finding.tensor, finding.ranks) for finding in found.findings] == [(MIDDLE, (1,))]
    assert found.findings[0].cause.startswith("each rank initialised or computed it by itself, from a seed")


def test_another_load_may_draw_other_values():
    second = tuple(
        replace(rank, tensors=tuple(replace(t, digest="again") if t.name == MIDDLE else t for t in rank.tensors))
        for rank in healthy().inventory
    )
    evidence = replace(healthy(), repetition=second)
    assert verdict("load_is_repeatable", evidence).status == "failed"
    assert verdict("load_is_repeatable", declare(evidence, drawn=(MIDDLE,))).status == "passed"
    smaller = replace(second[0], tensors=tuple(replace(t, shape=(1,)) for t in second[0].tensors))
    reshaped = replace(evidence, repetition=(smaller, *second[1:]))
    assert MIDDLE in [f.tensor for f in verdict("load_is_repeatable", declare(reshaped, drawn=(MIDDLE,))).findings]


def test_another_load_may_export_other_drawn_values():
    export = healthy().export
    other = tuple(
        replace(c, equal=False, differing=1, index=(0, 0), expected=1.0, actual=2.0) if c.name == MIDDLE else c
        for c in export.comparisons
    )
    evidence = replace(healthy(), export=replace(export, comparisons=other))
    assert verdict("full_state_dict_exports", evidence).status == "failed"
    assert verdict("full_state_dict_exports", declare(evidence, drawn=(MIDDLE,))).status == "passed"


def test_a_checkpoint_lacks_what_is_drawn():
    evidence = drop_reference(from_checkpoint(healthy()), MIDDLE)
    assert verdict("names_match_reference", evidence).status == "failed"
    assert verdict("names_match_reference", declare(evidence, drawn=(MIDDLE,))).status == "passed"


def test_a_drawn_weight_may_not_be_missing():
    gone = declare(drop(healthy(), MIDDLE), drawn=(MIDDLE,))
    assert [finding.tensor for finding in verdict("names_match_reference", gone).findings] == [MIDDLE]


def test_training_from_drawn_values_is_judged_in_full():
    doubled = declare(differ(remeasured(healthy(), MIDDLE, factor=2.0), MIDDLE), drawn=(MIDDLE,))
    found = verdict("grad_parity", doubled)
    assert [(finding.tensor, finding.actual) for finding in found.findings] == [
        (MIDDLE, "gradient is 2 times the reference's")
    ]


def reached_later(evidence, *names):
    """Return evidence in which these parameters have no gradient in the first step, in the reference neither."""
    evidence = with_reference(evidence, gradients=evidence.reference.gradients | dict.fromkeys(names, 0.0))
    runs = (replace(run, without_gradient=names) for run in evidence.training)
    return replace(evidence, training=tuple(runs))


def test_the_first_step_of_lora_reaches_one_matrix_only():
    lora = reached_later(healthy(), MIDDLE)
    assert "no gradient" in verdict("every_trainable_moves", lora).reason
    assert verdict("every_trainable_moves", declare(lora, drawn=(MIDDLE, HEAD))).status == "passed"
    alone = declare(lora, drawn=(MIDDLE,))  # nothing that is drawn has a gradient: the loss does not reach it
    assert "no gradient" in verdict("every_trainable_moves", alone).reason


def test_without_a_reference_drawn_weights_are_judged_as_before():
    bare = declare(undeclared(healthy(), "reference", "values", "verifier", why="no"), drawn=(MIDDLE,))
    assert verdict(VALUES, bare).status == "skipped"
    assert verdict("no_uninitialized_memory", bare).status == "passed"
