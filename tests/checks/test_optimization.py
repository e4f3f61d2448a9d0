"""Checks of optimizers, frozen weights, movement, replicas, ties and updates, on hand-made evidence."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from pytest_fsdp_meta.checks.training.facts import RankTrainingMode
from pytest_fsdp_meta.evidence import Evidence, Movement, OptimizerFacts, RankInventory, RankTraining
from tests.checks.evidence_factory import (
    EMBEDDING,
    FROZEN,
    HEAD,
    MIDDLE,
    add,
    buffer,
    change,
    change_reference,
    declare,
    differ,
    empty,
    findings_of,
    healthy,
    on_runs,
    on_some,
    place,
    remeasured,
    undeclared,
    verdict,
    with_reference,
)

OWNS, STAY, MOVES, REPLICAS = (
    "optimizer_owns_parameters",
    "frozen_weights_stay_frozen",
    "every_trainable_moves",
    "replicas_stay_equal",
)
UPDATES, TIED = "update_parity", "tied_weights_stay_tied"
HYBRID = {"dp_replicate": 2, "dp_shard": 2}
ALONE = "Subject(reference=...) is not declared"
STATISTIC = "verifier.norm.mean"


def after(evidence: Evidence, name: str, ranks=None, **facts) -> Evidence:
    """Change the facts of one tensor after the steps."""

    def edit(run: RankTraining) -> RankTraining:
        tensors = tuple(replace(t, **facts) if t.name == name else t for t in run.after.tensors)
        return replace(run, after=replace(run.after, tensors=tensors))

    return replace(evidence, training=on_some(evidence.training, ranks, edit))


def held(evidence: Evidence, ranks=None, others: tuple[tuple[str, bool], ...] = (), **counts: int) -> Evidence:
    """Set how often the optimizer holds parameters, named by the last part of the name before .weight."""
    usual = evidence.training[0].optimizer
    known = {name.removesuffix(".weight").replace("layers.0", "middle"): name for name in usual.held}
    facts = replace(usual, held=usual.held | {known[key]: count for key, count in counts.items()}, others=others)
    return on_runs(evidence, ranks, optimizer=facts)


def unmoved(evidence: Evidence, *names: str) -> Evidence:
    for name in names:
        evidence = after(evidence, name, digest=f"bits of {name}")
    return evidence


def untrained(evidence: Evidence, optimizer: OptimizerFacts | None) -> Evidence:
    inventory = tuple(replace(rank, optimizer=optimizer) for rank in evidence.inventory)
    return undeclared(replace(evidence, inventory=inventory), "training", why="Subject(batch=...) is not declared")


@pytest.mark.parametrize(
    ("check", "reason"),
    [
        (OWNS, "nothing is trainable"),
        (STAY, "nothing is frozen"),
        (MOVES, "nothing is trainable"),
        (REPLICAS, "no parameter is replicated, and training changes no replicated buffer"),
        (TIED, "no weights are tied, neither by Subject(tied=...) nor in the reference nor in the loaded model"),
    ],
)
def test_a_model_without_tensors(check, reason):
    found = verdict(check, on_runs(empty(), None, optimizer=None, movements=()))
    assert (found.status, found.reason) == ("skipped", reason)


def test_parameters_that_the_optimizer_does_not_hold():
    plain = verdict(OWNS, unmoved(held(healthy(4), [2], middle=0), MIDDLE))
    assert [(f.ranks, f.cause[:38]) for f in plain.findings] == [((2,), "the optimizer was built from other par")]


def test_an_optimizer_may_hold_copies_in_another_precision():
    """An optimizer with master weights steps copies and writes them back."""
    assert verdict(OWNS, held(healthy(), middle=0, others=(("float32", False),))).status == "passed"
    alone = OptimizerFacts("SGD", {EMBEDDING: 0}, (("bfloat16", False),))
    assert verdict(OWNS, untrained(healthy(), alone)).status == "passed"


def test_a_built_optimizer_is_judged_without_training():
    usual = healthy().training[0].optimizer
    assert verdict(OWNS, untrained(healthy(), usual)).status == "passed"
    found = verdict(OWNS, untrained(healthy(), replace(usual, held=usual.held | {MIDDLE: 0})))
    assert [finding.tensor for finding in found.findings] == [MIDDLE]
    unknown = untrained(healthy(), None)
    reason = "Subject(optimizer=...) is a callable, and nothing was trained"
    assert verdict(OWNS, unknown).reason == reason
    found = verdict(OWNS, undeclared(unknown, "training", why="rank 1 raised ValueError: no step", error=True))
    assert (found.status, "(rank 1 raised ValueError: no step)" in found.reason) == ("skipped", True)


def test_the_default_optimizer_is_not_judged():
    found = verdict(OWNS, declare(healthy(), declared=frozenset()))
    reason = "Subject(optimizer=...) is not declared, so the plugin built one itself, over the trainable parameters"
    assert (found.status, found.reason) == ("skipped", reason)


def test_frozen_and_repeated_parameters_in_the_groups():
    found = verdict(OWNS, held(held(healthy(), verifier=1), [1], verifier=1, middle=2))
    assert findings_of(found) == [
        (MIDDLE, (1,), "listed 2 times in the parameter groups of SGD", "listed once", ""),
        (FROZEN, (0, 1), "frozen and in a parameter group of SGD", "in none", ""),
    ]
    # One that was trained before it was frozen may stay, and one of two tied names is enough.
    frozen = held(healthy(), verifier=1)
    stepped = replace(frozen.training[0].optimizer, stepped=frozenset({FROZEN}))
    assert verdict(OWNS, on_runs(frozen, None, optimizer=stepped)).status == "passed"
    assert verdict(OWNS, unmoved(held(healthy(), head=0), HEAD)).status == "passed"


def test_an_optimizer_that_also_holds_old_parameters():
    found = verdict(OWNS, held(healthy(), others=(("float32", True), ("float32", False))))
    actual = "SGD holds 1 parameter without storage, not registered by the model"
    assert findings_of(found) == [(None, (0, 1), actual, "", "")]
    # They may belong to a loss with its own parameters.
    assert verdict(OWNS, held(healthy(), others=(("float32", False),))).status == "passed"


def test_a_frozen_weight_that_moves():
    evidence = after(healthy(4), FROZEN, [1, 3], digest="other")
    assert [(f.tensor, f.ranks) for f in verdict(STAY, evidence).findings] == [(FROZEN, (1, 3))]
    assert verdict(STAY, undeclared(evidence, "reference", "values", "verifier", why=ALONE)).status == "failed"


def test_a_moving_average_that_also_changes_in_the_reference():
    evidence = after(healthy(), FROZEN, digest="other")
    reference = evidence.reference.after
    moved = tuple(replace(t, digest="other") if t.name == FROZEN else t for t in reference.tensors)
    evidence = with_reference(evidence, after=replace(reference, tensors=moved))
    assert (verdict(STAY, evidence).status, verdict(STAY, evidence).reason) == ("skipped", "nothing is frozen")
    assert verdict(STAY, declare(evidence, frozen={FROZEN: FROZEN})).status == "failed"


def with_statistic(step, name=STATISTIC, declared=("train_step",), ranks=(0, 1), **facts) -> Evidence:
    """Add a buffer beside the frozen weight; ``step`` has what the step of production changes, weights on ``ranks``."""
    evidence = undeclared(add(healthy(), buffer(name, **facts)), "reference", "values", "verifier", why=ALONE)

    def end(rank: RankInventory) -> RankInventory:
        here = step if rank.rank in ranks else {name: digest for name, digest in step.items() if name != FROZEN}
        return replace(rank, tensors=tuple(replace(t, digest=here.get(t.name, t.digest)) for t in rank.tensors))

    steps = tuple(RankTrainingMode((0, 1), after=end(rank)) for rank in evidence.inventory)
    return declare(replace(evidence, training_mode=steps), declared=evidence.subject.declared | {*declared})


@pytest.mark.parametrize(
    ("evidence", "found"),
    [
        (with_statistic({STATISTIC: "other"}), {STATISTIC}),
        (with_statistic({"verifier.count": "other"}, "verifier.count"), {"verifier.count"}),
        (with_statistic({STATISTIC: "other"}, declared=()), set()),
        (declare(with_statistic({STATISTIC: "other"}, declared=()), frozen={STATISTIC: STATISTIC}), {STATISTIC}),
        (with_statistic({STATISTIC: "other"}, persistent=False), set()),
        (with_statistic({STATISTIC: "other", FROZEN: "other"}, ranks=[0]), set()),
        (with_statistic({"embed.mean": "other"}, "embed.mean"), set()),
    ],
    ids=["frozen", "beside", "a plain step", "declared", "not saved", "an average", "beside what trains"],
)
def test_a_buffer_of_a_frozen_part_that_a_step_changes(evidence, found):
    assert {finding.tensor for finding in verdict(STAY, evidence).findings} == found


def test_an_unreadable_tensor_is_not_reported_as_changed():
    assert verdict(STAY, after(change(healthy(), FROZEN, digest=None), FROZEN, digest=None)).status == "passed"


def still(evidence: Evidence, name: str, due: int, count: int, ranks=None, first: int | None = 3) -> Evidence:
    own = evidence.training[0].movements
    movements = tuple(Movement(name, due, count, first) if m.name == name else m for m in own)
    return on_runs(evidence, ranks, movements=movements)


def test_rows_that_do_not_move():
    found = verdict(MOVES, still(healthy(), MIDDLE, 3, 1))
    assert [(f.actual, f.detail) for f in found.findings] == [
        ("some rows did not change in 3 steps, although they have gradients", "1 of 3 rows on rank 0, first row 3")
    ]
    alone = still(undeclared(healthy(), "reference", "values", "verifier", why=ALONE), MIDDLE, 1, 1, first=None)
    assert [f.detail for f in verdict(MOVES, alone).findings] == ["1 of 1 rows on rank 0"]


def test_updates_below_rounding():
    evidence = on_runs(healthy(), None, movements=(Movement(MIDDLE, 0, 0),))
    found = verdict(MOVES, evidence)
    assert (found.status, found.reason.split(":")[0]) == ("skipped", "no update is larger than rounding")


def test_replicas_that_drift_apart():
    hybrid = healthy(mesh=HYBRID)
    found = verdict(REPLICAS, after(hybrid, MIDDLE, [2, 3], digest="other"))
    assert [(f.tensor, f.ranks, f.detail) for f in found.findings] == [(MIDDLE, (2, 3), "rank 2 differs from rank 0")]
    # Tensors that differ before the steps are not replicas.
    apart = change(hybrid, MIDDLE, [2, 3], digest="experts of another rank")
    assert verdict(REPLICAS, after(apart, MIDDLE, [2, 3], digest="other")).status == "passed"
    assert verdict(REPLICAS, place(healthy(2), MIDDLE, {}, shape=(6, 4))).status == "passed"
    assert verdict(REPLICAS, healthy(2)).reason.startswith("no parameter is replicated")


def with_settings(evidence, ours, theirs):
    """Return evidence in which the group of MIDDLE has these settings on the ranks, and those in the reference."""
    facts = replace(evidence.training[0].optimizer, settings={MIDDLE: ours})
    reference = replace(evidence.reference, settings={MIDDLE: theirs})
    return replace(on_runs(evidence, None, optimizer=facts), reference=reference)


def test_a_parameter_in_another_group_than_in_the_reference():
    theirs = {"lr": "0.1", "betas": "(0.9, 0.95)", "weight_decay": "0", "rank": "0"}
    ours = {**theirs, "weight_decay": "0.1", "rank": "1"}
    (found,) = verdict(OWNS, with_settings(healthy(), ours, theirs)).findings
    assert (found.tensor, found.expected) == (MIDDLE, "with weight_decay=0")
    assert found.actual.endswith(" with weight_decay=0.1")
    alike = with_settings(healthy(), theirs, {**theirs, "rank": "1"})
    assert verdict(OWNS, alike).reason == "SGD: 1 parameter with weight_decay=0"
    several = replace(alike.training[0].optimizer, settings={MIDDLE: ours, HEAD: theirs, EMBEDDING: theirs})
    reason = verdict(OWNS, undeclared(on_runs(alike, None, optimizer=several), "reference", why=ALONE)).reason
    assert reason == "SGD: 1 parameter with weight_decay=0.1; 2 parameters with weight_decay=0"
    wrong = remeasured(healthy(), MIDDLE, apart=4.0, observed="parameters")
    (alike,) = verdict(UPDATES, with_settings(wrong, ours, ours)).findings
    assert alike.cause.startswith("the settings of the parameter's group are the reference's: the optimizer computes")
    assert verdict(UPDATES, with_settings(wrong, ours, theirs)).why == "depends on a failed check"


@pytest.mark.parametrize(
    ("factors", "labels"),
    [
        ((1.03, 1.03, 1.03), {"1.03"}),
        ((1.0004, 1.0004, 1.0004), {"1.0004"}),
        ((0.2499, 0.25, 0.2501), {"0.25"}),
        ((0.251, 0.2501, 0.2503), {"0.25"}),
        ((0.333, 0.3335, 0.3337), {"0.333"}),
        ((0.1, 0.1, 0.137), {"0.1", "0.137"}),
        ((0.996, 0.994, 1.005), {"0.995", "1.005"}),
    ],
)
def test_nearly_equal_factors_have_one_label(factors, labels):
    evidence = replace(healthy(), tolerance={UPDATES: 1e-5})
    for name, factor in zip((EMBEDDING, MIDDLE, HEAD), factors, strict=True):
        evidence = remeasured(evidence, name, factor, observed="parameters")
    found = {f.actual for f in verdict(UPDATES, evidence).findings}
    assert found == {f"update is {factor} times the reference's" for factor in labels}


def test_a_factor_blurred_by_several_steps():
    evidence = healthy()
    for name, factor, apart in ((EMBEDDING, 0.24, 0.1), (MIDDLE, 0.262, 0.1), (HEAD, 0.25, 0.12)):
        evidence = remeasured(evidence, name, factor, apart, observed="parameters")
    found = verdict(UPDATES, evidence)
    assert {f.actual for f in found.findings} == {"update is 0.25 times the reference's"}
    # An update whose direction is off by more than its length has no factor.
    turned = remeasured(healthy(), MIDDLE, 1.05, 1.0, observed="parameters")
    assert [f.actual for f in verdict(UPDATES, turned).findings] == ["update differs from the reference's"]


def test_only_the_farthest_updates_are_reported():
    wrong = remeasured(healthy(), MIDDLE, 0.1, observed="parameters")
    both = remeasured(wrong, EMBEDDING, 0.9, observed="parameters")
    assert [finding.tensor for finding in verdict(UPDATES, both).findings] == [MIDDLE]
    rounding = with_reference(wrong, gradients={**wrong.reference.gradients, MIDDLE: 1e-7})
    assert verdict(UPDATES, rounding).status == "passed"


def test_wrong_parameters_explain_wrong_updates():
    wrong = remeasured(healthy(), MIDDLE, 0.1, observed="parameters")
    found = verdict(UPDATES, differ(wrong, EMBEDDING))
    assert (found.status, "findings of params_equal_reference explain" in found.reason) == ("skipped", True)


@pytest.mark.parametrize("ranks", [None, [1]])
def test_the_cause_of_a_wrong_update_holds_for_all_ranks_and_for_some(ranks):
    (finding,) = verdict(UPDATES, remeasured(healthy(), MIDDLE, 0.1, ranks=ranks, observed="parameters")).findings
    assert finding.cause.startswith("the optimizer's learning rate, weight decay or parameter groups are not the")


def test_a_tie_that_breaks():
    broken = after(healthy(), HEAD, storage="memory of its own", identity=-1)
    assert [(f.tensor, f.detail) for f in verdict(TIED, broken).findings] == [(EMBEDDING, "values differ")]
    same = after(broken, HEAD, digest=f"trained bits of {EMBEDDING}")
    assert verdict(TIED, same).findings[0].detail == "values are still equal"
    one = after(healthy(4), HEAD, [2], storage="memory of its own", identity=-1)
    assert verdict(TIED, one).findings[0].ranks == (2,)
    # A tie that nobody declares is found in the model.
    alone = undeclared(broken, "reference", "values", "verifier", why=ALONE)
    assert [finding.tensor for finding in verdict(TIED, alone).findings] == [EMBEDDING]


def test_a_tie_that_the_reference_does_not_have_is_not_missing():
    apart = {"storage": "memory of its own", "identity": -1}
    evidence = after(change(healthy(), HEAD, **apart), HEAD, **apart)
    assert verdict(TIED, change_reference(evidence, HEAD, **apart)).reason.startswith("no weights are tied")


def unreached(*names):
    """Return evidence in which these parameters have no gradient on any rank, and none in the reference."""
    found = healthy()
    sizes = {name: size for name, size in found.reference.gradients.items() if name not in names}
    runs = tuple(
        replace(run, without_gradient=names, movements=tuple(m for m in run.movements if m.name not in names))
        for run in found.training
    )
    return replace(found, reference=replace(found.reference, gradients=sizes), training=runs)


TRAINABLE = tuple(t.name for t in healthy().inventory[0].tensors if t.requires_grad)


def test_a_loss_that_does_not_reach_the_model():
    every = unreached(*TRAINABLE)
    idle = replace(every, reference=replace(every.reference, idle=TRAINABLE))  # a model that does not run at all
    for evidence in (every, idle):
        [found] = verdict(MOVES, evidence).findings
        assert found.cause.startswith("the loss does not depend on the parameters: it is constant")


@pytest.mark.parametrize(
    ("evidence", "reason"),
    [
        (unreached(MIDDLE), "the loss gives layers.0.weight no gradient, in the reference neither"),
        (
            undeclared(unreached(*TRAINABLE[:-1]), "reference", why="not declared"),
            "no gradient; freeze what is not trained",
        ),
    ],
    ids=["without a use", "no reference"],
)
def test_no_gradient_that_is_no_finding(evidence, reason):
    found = verdict(MOVES, evidence)
    assert (found.status, found.why) == ("skipped", "partly checked")
    assert reason in found.reason


def test_modules_that_the_batch_does_not_use_are_no_defect():
    """Most of a multimodal model gets no gradient from a batch of text alone."""
    text_only = unreached(*TRAINABLE[:-1])
    text_only = replace(text_only, reference=replace(text_only.reference, idle=TRAINABLE[:-1]))
    found = verdict(MOVES, text_only)
    assert (found.status, found.findings, found.why) == ("skipped", (), "partly checked")
    functional = replace(text_only, reference=replace(text_only.reference, idle=TRAINABLE[1:-1]))
    assert f"the loss gives {TRAINABLE[0]} no gradient, in the reference neither" in verdict(MOVES, functional).reason


@pytest.mark.parametrize(("reference", "status"), [(True, "skipped"), (False, "error")])
def test_losses_that_are_not_finite_are_no_movement(reference, status):
    evidence = on_runs(healthy(), None, losses=(1.0, math.nan))
    found = verdict(MOVES, evidence if reference else undeclared(evidence, "reference", why="not declared"))
    assert found.status == status
    assert found.reason.startswith("the losses are not finite (1.000000, nan)")


def test_updates_that_rounding_swallows():
    evidence = on_runs(healthy(), None, swallowed=(MIDDLE,))
    assert [finding.tensor for finding in verdict(MOVES, evidence).findings] == [MIDDLE]
    by_chance = verdict(MOVES, on_runs(evidence, None, steps_by_chance=True))
    assert by_chance.findings[0].cause.startswith("the step draws random numbers, but rounds this parameter to the ")
    # One rank moved its shard, so the learning rate is not too small; and the plugin's own is not judged.
    assert verdict(MOVES, on_runs(healthy(), [1], swallowed=(MIDDLE,))).status == "passed"
    own = declare(evidence, declared=evidence.subject.declared - {"optimizer"})
    assert verdict(MOVES, own).findings == ()
