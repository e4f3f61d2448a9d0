"""grad_parity, grad_norm_parity and grad_accumulation_parity on hand-made evidence."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from pytest_fsdp_meta.checks.tracing.facts import OUTPUT, RankTrace, TracedCall
from pytest_fsdp_meta.checks.training.facts import FirstBackward, Objective
from pytest_fsdp_meta.checks.values.facts import Element
from pytest_fsdp_meta.evidence import Accumulation, Comparison, Evidence, Measure, SmallerWorld
from tests.checks.evidence_factory import (
    COUNTER,
    EMBEDDING,
    FROZEN,
    HEAD,
    MIDDLE,
    PARAMETERS,
    change,
    change_reference,
    declare,
    differ,
    empty,
    findings_of,
    from_checkpoint,
    healthy,
    in_slices,
    on_runs,
    place,
    remeasured,
    verdict,
    with_reference,
)

PARITY, NORM, ACCUMULATION, LOSS = "grad_parity", "grad_norm_parity", "grad_accumulation_parity", "loss_parity"
ALL = (PARITY, NORM, ACCUMULATION)
WITHIN = "equal within 0.0001"


def losses(evidence: Evidence, *curve: float) -> Evidence:
    return on_runs(evidence, None, losses=curve)


def test_a_model_without_tensors():
    evidence = on_runs(empty(), None, gradients=(), norm=None, accumulation=None)
    assert verdict(PARITY, evidence).status == "passed"
    for check in (NORM, ACCUMULATION):
        found = verdict(check, evidence)
        assert (found.status, found.reason.split(",")[0]) == ("skipped", "nothing is trainable")


@pytest.mark.parametrize("check", [*ALL, LOSS])
def test_a_checkpoint_cannot_be_trained(check):
    trained = replace(from_checkpoint(healthy()), training=healthy().training, unavailable={})
    reason = "a checkpoint directory cannot be trained; declare Subject(reference=<callable>)"
    assert (verdict(check, trained).status, verdict(check, trained).reason) == ("skipped", reason)


@pytest.mark.parametrize(("factor", "label"), [(2.0, "2"), (1 / 3, "1/3"), (1.04, "1.04"), (0.0, "0")])
def test_a_constant_factor_is_named(factor, label):
    found = verdict(PARITY, remeasured(healthy(), MIDDLE, factor))
    assert findings_of(found) == [(MIDDLE, (0, 1), f"gradient is {label} times the reference's", WITHIN, "")]


def cause_of(evidence: Evidence) -> str:
    (finding,) = verdict(PARITY, evidence).findings
    return finding.cause


def test_a_number_of_ranks_means_nothing_if_one_rank_is_enough():
    evidence = remeasured(healthy(2), MIDDLE, 2.0)
    alone = SmallerWorld((), {PARITY: (MIDDLE,)})
    (finding,) = verdict(PARITY, replace(evidence, smaller=(alone,))).findings
    assert finding.cause.startswith("the loss is divided once too rarely or too often")
    passes = SmallerWorld((), passed=(PARITY,))
    assert cause_of(replace(evidence, smaller=(passes,))) == cause_of(evidence)


def test_a_factor_equal_to_a_number_of_ranks_is_explained():
    assert cause_of(remeasured(healthy(4), MIDDLE, 0.25)).startswith(
        "divided once too often (4 is the number of data-parallel ranks)"
    )
    assert "constant that the reference does not have" in cause_of(remeasured(healthy(2), MIDDLE, 3.0))
    parallel = replace(healthy(2), world=replace(healthy(2).world, mesh=(("dp_shard", 2), ("tp", 4))))
    assert "(4 is the number of ranks along tp)" in cause_of(remeasured(parallel, MIDDLE, 4.0))
    assert "the loss does not depend on it" in cause_of(remeasured(healthy(2), MIDDLE, 0.0))


def test_one_odd_rank():
    found = verdict(PARITY, remeasured(healthy(4), MIDDLE, apart=1.0, ranks=[2]))
    assert [(f.ranks, f.actual) for f in found.findings] == [((2,), "gradient differs from the reference's")]
    assert found.findings[0].cause.startswith("something changes the gradient on these ranks only, after its reduction")
    assert not cause_of(remeasured(healthy(4), MIDDLE, apart=1.0)).startswith("something changes")


def test_a_gradient_that_is_slightly_off():
    """A relative error below 0.01 counts as slightly off."""
    far = verdict(PARITY, remeasured(healthy(), MIDDLE, apart=1.0)).findings[0]
    assert not far.cause.startswith("the error is small: ")
    size = next(c.measure.truth for c in healthy().training[0].gradients if c.name == MIDDLE)
    near = verdict(PARITY, remeasured(healthy(), MIDDLE, apart=0.005 * size)).findings[0]
    assert near.cause.startswith("the error is small: the forward differs slightly")
    factor = verdict(PARITY, remeasured(healthy(), MIDDLE, 0.9997)).findings[0]  # as a bias may have by chance
    assert (factor.actual, factor.cause) == ("gradient differs from the reference's", near.cause)


def test_a_parameter_that_the_reference_does_not_tie():
    evidence = remeasured(healthy(), MIDDLE, apart=1.0)
    identity = evidence.inventory[0].by_name[EMBEDDING].identity
    tied = change(evidence, MIDDLE, identity=identity)
    assert [f.cause.split(",")[0] for f in verdict(PARITY, tied).findings] == ["it is tied to another parameter"]
    # Another check reports ties that only the reference has.
    looser = change_reference(evidence, MIDDLE, identity=evidence.reference.inventory.by_name[EMBEDDING].identity)
    assert not [f for f in verdict(PARITY, looser).findings if f.cause.startswith("it is tied")]


@pytest.mark.parametrize(
    ("dtype", "apart", "status"),
    [("float32", 1e-4, "passed"), ("float32", 0.1, "failed"), ("bfloat16", 0.1, "passed"), ("bfloat16", 2.0, "failed")],
)
def test_the_tolerance_follows_the_dtype(dtype, apart, status):
    evidence = change_reference(change(healthy(), MIDDLE, dtype=dtype), MIDDLE, dtype=dtype)
    assert verdict(PARITY, remeasured(evidence, MIDDLE, apart=apart)).status == status


def with_policy(evidence: Evidence) -> Evidence:
    return replace(evidence, inventory=tuple(replace(r, computes_in=("bfloat16",)) for r in evidence.inventory))


def with_autocast(evidence: Evidence) -> Evidence:
    return replace(evidence, training=tuple(replace(run, autocast=("bfloat16",)) for run in evidence.training))


@pytest.mark.parametrize(("lowered", "how"), [(with_policy, "mixed-precision policy"), (with_autocast, "autocast")])
def test_the_loaders_compute_dtype_sets_the_tolerance_and_is_named(lowered, how):
    evidence = lowered(healthy())
    assert verdict(PARITY, remeasured(evidence, MIDDLE, apart=0.1)).status == "passed"
    [finding] = verdict(PARITY, remeasured(evidence, MIDDLE, apart=2.0)).findings
    assert "; the loader computes in bfloat16 (" in finding.cause
    assert finding.cause.endswith(f"{how}), the reference in float32")
    assert f"{how}, this check sees smaller differences" in finding.remedy


def test_a_gradient_that_is_only_rounding_is_not_compared():
    """The gradient of a key's bias is zero except for rounding, which differs between computations."""
    evidence = with_reference(healthy(), gradients={**healthy().reference.gradients, MIDDLE: 1e-7})
    small = Comparison(MIDDLE, False, 12, measure=replace(alike(), actual=2e-7, truth=1e-7, apart=1e-7, dot=2e-14))
    runs = tuple(replace(run, gradients=(small,)) for run in evidence.training)
    assert verdict(PARITY, replace(evidence, training=runs)).status == "passed"
    assert verdict(PARITY, on_runs(evidence, None, without_gradient=(MIDDLE,))).status == "passed"


def alike() -> Measure:
    return healthy().training[0].gradients[0].measure


def test_no_gradient_where_the_reference_has_one():
    found = verdict(PARITY, on_runs(healthy(4), [1, 3], without_gradient=(MIDDLE,)))
    assert findings_of(found) == [(MIDDLE, (1, 3), "no gradient, although the reference has one", "", "")]
    # A parameter that the reference does not use has no gradient there either, nor has one that is frozen.
    unused = with_reference(healthy(), gradients={EMBEDDING: 1.0})
    assert verdict(PARITY, on_runs(unused, None, without_gradient=(MIDDLE,))).status == "passed"
    assert FROZEN not in healthy().reference.gradients
    assert verdict(PARITY, on_runs(healthy(), None, without_gradient=(FROZEN,))).status == "passed"
    # If no parameter has one, the reduction is the cause.
    every = verdict(PARITY, on_runs(healthy(), None, without_gradient=tuple(PARAMETERS))).findings
    assert {finding.cause.split(":")[0] for finding in every} == {"no parameter has a gradient"}


def test_what_explains_wrong_gradients():
    wrong = remeasured(healthy(), MIDDLE, 2.0)
    found = verdict(PARITY, differ(wrong, EMBEDDING))
    assert (found.status, "the findings of params_equal_reference explain" in found.reason) == ("skipped", True)
    found = verdict(PARITY, with_reference(wrong, unstable=(MIDDLE,)))
    assert (found.status, "the reference is not reproducible" in found.reason) == ("error", True)


def test_a_gradient_that_is_nan():
    nan = replace(alike(), actual=math.nan, apart=math.nan, dot=math.nan)
    off = Comparison(MIDDLE, False, 12, 1, measure=nan, farthest=Element((0, 0), actual=math.nan, expected=0.5))
    found = verdict(PARITY, on_runs(healthy(), [1], gradients=(off,)))
    assert findings_of(found) == [
        (MIDDLE, (1,), "gradient differs from the reference's", WITHIN, "nan at [0, 0] on rank 1, but should be 0.5")
    ]


def test_parameters_that_share_storage_may_have_partial_gradients():
    evidence = remeasured(remeasured(healthy(), HEAD, apart=1.0), EMBEDDING, apart=1.0)
    assert verdict(PARITY, evidence).status == "failed"
    assert verdict(PARITY, change(evidence, HEAD, identity=-1)).status == "passed"


def apart(evidence: Evidence, name: str, *actual: float, observed: str = "gradients", **facts) -> Evidence:
    """Set each rank's value at the first index of an observed tensor; the reference has 0.5."""
    runs = []
    for run, value in zip(evidence.training, actual, strict=True):
        off = {"differing": 1, "max_abs": abs(value - 0.5), "index": (0, 0), "expected": 0.5, "actual": value, **facts}
        one = Comparison(name, value == 0.5, 24, **({} if value == 0.5 else off))
        others = (c for c in getattr(run, observed) if c.name != name)
        runs.append(replace(run, **{observed: (*others, one)}))
    return replace(evidence, training=tuple(runs))


def ignored(
    *gradients: float,
    parameters: tuple[float, ...] = (),
    world: int = 2,
    name: str = MIDDLE,
    of: Evidence | None = None,
    **facts,
) -> Evidence:
    """Return evidence of a plain parameter with these gradients by rank, and values that follow from them."""
    evidence = apart(place(of or healthy(world), name, {}, shape=(6, 4)), name, *gradients, **facts)
    runs = []
    for run, value in zip(evidence.training, parameters or gradients, strict=True):
        tensors = (replace(t, digest=f"moved to {value}") if t.name == name else t for t in run.after.tensors)
        kept = tuple(c for c in run.parameters if c.name != name)
        runs.append(replace(run, after=replace(run.after, tensors=tuple(tensors)), parameters=kept))
    return replace(evidence, training=tuple(runs))


IGNORED = (
    "it is left out of FSDP and DDP (ignored_params, or added after fully_shard(), as adapters may be), and nothing "
    "else reduces its gradients",
    "shard it, or reduce its gradients after backward (mean over the data-parallel ranks)",
)


@pytest.mark.parametrize(
    ("other", "cause"),
    [((0.5, 0.5), IGNORED[0]), ((0.75, 0.25), "nothing reduces the gradients of any parameter over these ranks: ")],
)
def test_unreduced_gradients_of_all_parameters_are_those_of_a_wrapper_that_is_bypassed(other, cause):
    both = ignored(*other, name=EMBEDDING, of=ignored(0.75, 0.25))
    held = (tuple(c for c in run.gradients if c.name in (MIDDLE, EMBEDDING)) for run in both.training)
    runs = tuple(replace(run, gradients=own) for run, own in zip(both.training, held, strict=True))
    found = verdict(PARITY, replace(both, training=runs)).findings
    assert len(found) == 1 + (other != (0.5, 0.5))
    assert all(finding.cause.startswith(cause) for finding in found)


def test_parameters_that_were_added_after_sharding():
    """hao-ai-lab/FastVideo#1666: adapters beside a frozen model that FSDP2 manages."""
    both = ignored(0.75, 0.25, name=EMBEDDING, of=ignored(0.75, 0.25))
    held = (tuple(c for c in run.gradients if c.name in (MIDDLE, EMBEDDING)) for run in both.training)
    runs = tuple(replace(run, gradients=own) for run, own in zip(both.training, held, strict=True))
    added = change(replace(both, training=runs), FROZEN, managed=True)
    assert {finding.cause for finding in verdict(PARITY, added).findings} == {IGNORED[0]}


@pytest.mark.parametrize(
    "evidence",
    [
        ignored(0.5, 0.5),
        ignored(0.75, 0.75),  # scaled alike or from another batch: loss_parity reports it
        ignored(0.501, 0.499),
        ignored(0.75, 0.25, parameters=(0.625, 0.625)),  # the optimizer reduces the gradients
        ignored(0.75, 0.25, expected=0.0, max_abs=1e-9),
        ignored(0.75, math.nan),
    ],
    ids=["equal", "alike", "rounded", "reduced later", "noise", "nan"],
)
def test_gradients_that_agree_or_nearly(evidence):
    assert verdict(PARITY, evidence).status == "passed"


@pytest.mark.parametrize(
    ("evidence", "ranks", "detail"),
    [
        (ignored(0.5, 1.5, 0.5, 0.5, world=4), (0, 1, 2, 3), "at [0, 0]: 0.5 on rank 0, 1.5 on rank 1"),
        (ignored(0.75, 0.25, index=()), (0, 1), "0.25 on rank 1, 0.75 on rank 0"),
    ],
    ids=["right on some ranks by chance", "scalar"],
)
def test_the_detail_of_an_unreduced_gradient(evidence, ranks, detail):
    (finding,) = verdict(PARITY, evidence).findings
    assert (finding.ranks, finding.detail) == (ranks, f"first step, {detail}")


def test_shards_and_partial_sums_may_have_different_gradients():
    shards = apart(apart(healthy(2), MIDDLE, 0.75, 0.25), MIDDLE, 0.75, 0.25, observed="parameters")
    assert verdict(PARITY, shards).status == "passed"
    sums = ignored(0.75, 0.25, 0.75, 0.25, world=4)
    assert verdict(PARITY, in_slices(sums, 0, 0, 1, 1)).status == "passed"
    assert verdict(PARITY, in_slices(sums, 0, 0, 0, 0)).status == "passed"
    assert [finding.ranks for finding in verdict(PARITY, in_slices(sums, 0, 1, 0, 1)).findings] == [(0, 1, 2, 3)]


def test_unreduced_gradients_explain_later_losses_but_not_the_first():
    later = losses(ignored(0.75, 0.25), 2.0, 1.4, 1.0)
    assert [verdict(id, later).status for id in (PARITY, LOSS)] == ["failed", "skipped"]
    at_once = losses(later, 2.5, 1.4, 1.0)
    assert [verdict(id, at_once).status for id in (PARITY, LOSS)] == ["failed", "failed"]


def test_gradients_of_a_wrong_parameter_are_not_judged():
    found = verdict(PARITY, differ(ignored(0.75, 0.25), MIDDLE))
    assert (found.status, found.unjudged) == ("skipped", {"params_equal_reference": (MIDDLE,)})
    # Another wrong tensor does not excuse unreduced gradients.
    found = verdict(PARITY, differ(ignored(0.75, 0.25), EMBEDDING))
    assert [finding.tensor for finding in found.findings] == [MIDDLE]


OWN_SHARDS, OTHERS = "the norm is that of the rank's own shards", "all ranks "


@pytest.mark.parametrize(
    ("norms", "findings", "cause"),
    [
        ((3.0001, 3.0001), [], ""),
        ((3.1, 3.1), [((0, 1), "3.1")], f"{OTHERS}count"),
        ((2.0, 2.0), [((0, 1), "2")], f"{OTHERS}leave"),
        ((0.0, 0.0), [((0, 1), "0")], f"{OTHERS}leave"),
        ((math.nan, math.nan), [((0, 1), "nan")], ""),
        ((2.0, 2.5), [((0,), "2"), ((1,), "2.5")], OWN_SHARDS),
        ((3.0, 2.0), [((1,), "2")], OWN_SHARDS),
    ],
)
def test_norms(norms, findings, cause):
    evidence = healthy()
    for rank, norm in enumerate(norms):
        evidence = on_runs(evidence, [rank], norm=norm)
    found = verdict(NORM, evidence)
    assert findings_of(found) == [
        (None, ranks, f"gradient norm {norm}", "3 within 0.0003", "") for ranks, norm in findings
    ]
    assert all(finding.cause.startswith(cause) for finding in found.findings)


def test_a_norm_that_torch_cannot_compute():
    found = verdict(NORM, on_runs(healthy(), None, norm=None, norm_problem="RuntimeError: mixed"))
    reason = "torch cannot compute the norm of these gradients (RuntimeError: mixed)"
    assert (found.status, found.reason.split(";")[0]) == ("skipped", reason)


def accumulated(evidence: Evidence, ranks=None, **facts) -> Evidence:
    return on_runs(evidence, ranks, accumulation=replace(evidence.training[0].accumulation, **facts))


def test_a_reduction_that_is_not_turned_on_again():
    found = verdict(ACCUMULATION, accumulated(healthy(4), [3], without_gradient=(MIDDLE,)))
    assert [(f.tensor, f.ranks) for f in found.findings] == [(MIDDLE, (3,))]
    # An unused parameter has no gradient in an ordinary step either.
    unused = on_runs(with_reference(healthy(), gradients={EMBEDDING: 1.0}), None, without_gradient=(MIDDLE,))
    assert verdict(ACCUMULATION, accumulated(unused, without_gradient=(MIDDLE,))).status == "passed"


@pytest.mark.parametrize("reference", [math.inf, math.nan])
def test_a_reference_whose_training_diverges(reference):
    measure = Measure(actual=reference, truth=reference, apart=math.nan, dot=math.nan, elements=4)
    gradients = tuple(replace(c, measure=measure) for c in healthy().training[0].accumulation.gradients)
    found = verdict(ACCUMULATION, accumulated(healthy(), gradients=gradients))
    assert (found.status, "its training diverges" in found.reason) == ("skipped", True)


def short_step(gradients, **facts) -> Evidence:
    """Return a healthy training by a step of the author's, with these gradients of a step with half of the rows."""
    stepping = declare(healthy(), declared=healthy().subject.declared | {"train_step"})
    return on_runs(stepping, None, backwards=(2, 2), short=Accumulation(gradients), **facts)


def test_a_short_step_that_never_reduces():
    evidence = short_step(())
    lost = replace(evidence.training[0].short, without_gradient=(MIDDLE,))
    [finding] = verdict(ACCUMULATION, on_runs(evidence, None, short=lost)).findings
    assert (finding.tensor, finding.actual) == (MIDDLE, "no gradient in a step with half of the rows")
    assert "the last micro-batch of a full window only" in finding.cause


def test_a_short_step_after_a_training_that_diverges_is_not_compared():
    measure = Measure(actual=1.0, truth=math.inf, apart=math.inf, dot=math.inf, elements=4)
    gradients = tuple(replace(c, measure=measure) for c in healthy().training[0].accumulation.gradients)
    found = verdict(ACCUMULATION, short_step(gradients))
    assert found.status == "skipped"
    assert "its training diverges" in found.reason


def test_a_forward_that_changes_a_buffer_is_not_compared():
    seen = remeasured(healthy(), MIDDLE, 2.0).training[0].gradients
    evidence = with_reference(accumulated(healthy(), gradients=seen), steered_by_forward=(COUNTER,))
    found = verdict(ACCUMULATION, evidence)
    assert (found.status, found.why) == ("skipped", "differs")
    assert found.reason.endswith("; every forward changes counter, and the reference runs fewer forwards")
    assert verdict(ACCUMULATION, accumulated(evidence, early=(MIDDLE,))).status == "failed"
    lost = accumulated(evidence, without_gradient=(MIDDLE,))
    assert [f.actual for f in verdict(ACCUMULATION, lost).findings] == ["no gradient after the last micro-batch"]


@pytest.mark.parametrize(("ranks", "expected"), [(None, ("skipped", "partly checked")), ([1], ("error", ""))])
def test_a_step_that_refuses_half_of_the_rows(ranks, expected):
    refused = Accumulation(refused="ValueError: expected 8 rows")
    found = verdict(ACCUMULATION, on_runs(short_step(healthy().training[0].gradients), ranks, short=refused))
    assert (found.status, found.why) == expected
    assert found.reason == "train_step refuses half of the rows of a batch: ValueError: expected 8 rows"


def test_a_batch_that_cannot_be_split():
    problem = "'input_ids' has 2 rows, which do not divide into 2 micro-batches for each of 2 ranks"
    found = verdict(ACCUMULATION, on_runs(healthy(), None, accumulation=Accumulation(problem=problem)))
    assert (found.status, found.reason) == ("skipped", f"batch(0): {problem}; give it more rows")


UNKNOWN = "train_step differs from one backward of Subject(loss=...) in a way that was not found"


@pytest.mark.parametrize(
    ("bound", "factor", "scales", "cause"),
    [
        (
            0.5,
            3.0,
            (1.0, 1.0),
            "train_step leaves gradients as they are after the last backward, and clipping to max_grad",
        ),
        (
            0.5,
            2.0,
            (2 / 3, 2 / 3),
            "train_step scales gradients by 0.667 after the last backward, and clipping to max_gr",
        ),
        (0.5, 2.0, (1 / 3, 2 / 3), "ranks scale their gradients unlike each other (0.333 to 0.667)"),
        (0.5, 3.0, (1 / 3, 1 / 3), UNKNOWN),
        (
            None,
            0.4,
            (0.4, 0.4),
            "train_step scales gradients by 0.4 after the last backward, and the reference does not",
        ),
        (None, 0.4, (2**-16, 2**-16), UNKNOWN),
        (None, 0.4, (), UNKNOWN),
    ],
)
def test_what_scales_the_gradients_after_the_last_backward_is_named_if_it_explains_them(bound, factor, scales, cause):
    evidence = with_reference(healthy(), norm=0.5, norm_before_clipping=1.5)
    clips = declare(evidence, declared=evidence.subject.declared | {"train_step"}, max_grad_norm=bound)
    for rank, scale in enumerate(scales):
        watched = FirstBackward(((0, 2),), (math.nan,), ((0.0, False), (2.0, False), (2.0 * scale, True)))
        clips = on_runs(clips, [rank], first_backward=watched, rows=2)
    for name in (EMBEDDING, MIDDLE, HEAD):
        clips = remeasured(clips, name, factor)
    assert {finding.cause[: len(cause)] for finding in verdict(PARITY, clips).findings} == {cause}


ALL, MULTIPLE = (
    "the losses that train_step differentiates add up to 2 times",
    "of the first micro-batch, train_step dif",
)
OTHER, DIFFERENT = "train_step differentiates another loss", "the forward is correct and the backward is not"
OWN_ROWS = "each rank computes the loss of its own rows only"
SAME_VALUE = "of the first micro-batch, train_step's loss is that of Subject(loss=...)"


@pytest.mark.parametrize(
    ("values", "objective", "declared", "cause"),
    [
        ((1.0, 1.0), (1.0, 1.0, 0.0), {}, ALL),
        ((0.6, 0.6), (1.2, 0.5, 0.0), {}, MULTIPLE),
        ((0.6, 0.6), (1.0, 0.6, 0.5), {}, OTHER),
        ((0.6, 0.6), (1.0, 0.6, 0.5, 1.2), {}, OWN_ROWS),
        ((0.5, 0.5), (1.0, 0.2, 0.5), {}, SAME_VALUE),
        ((0.6, 0.6), (1.0, 0.5, 0.0), {"loss_over_ranks": "same"}, MULTIPLE),
        ((0.6, 0.6), (1.0, 0.5, 0.0), {}, DIFFERENT),
        ((0.5, 0.5), (1.0, 0.5, 0.0), {}, DIFFERENT),
        ((65536.0, 65536.0), (1.0, 65536.0, 0.0), {}, DIFFERENT),
        ((math.nan, 0.5), (math.nan, math.nan, math.nan), {}, DIFFERENT),
        ((0.0, 1.0), (1.0, 0.5, 0.0), {}, DIFFERENT),
        ((), (1.0, 0.5, 0.0), {}, DIFFERENT),
    ],
)
def test_what_the_step_differentiates_explains_only_what_it_can(values, objective, declared, cause):
    right = healthy().reference.losses[0]
    norms = tuple((float((number + 1) // 2), True) for number in range(2 * len(values) + 1))
    watched = FirstBackward(((0, 1), (1, 2))[: len(values)], tuple(right * value for value in values), norms)
    whole = [(right * loss, 2.0) for loss in objective[3:]]
    tried = Objective(right * objective[0], *objective[1:3], *whole)
    evidence = declare(on_runs(healthy(), None, first_backward=watched, objective=tried, rows=2), **declared)
    agrees = RankTrace(forward=(TracedCall(OUTPUT, "layers.0", compared=1, noise=1e-6),))
    evidence = replace(evidence, traces=(agrees, agrees))
    factor = sum(values) if sum(values) == 2 else 1.0
    wrong = evidence
    for name in (MIDDLE, EMBEDDING, HEAD):
        wrong = remeasured(wrong, name, factor, apart=0.0 if factor == 2 else 9.0)
    assert {finding.cause[: len(cause)] for finding in verdict(PARITY, wrong).findings} == {cause}
