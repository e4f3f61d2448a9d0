"""params_equal_reference, buffers_equal_reference and frozen_weights_equal_verifier on hand-made evidence."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from pytest_fsdp_meta.checks.values.facts import Pattern
from pytest_fsdp_meta.evidence import Measure
from tests.checks.evidence_factory import (
    COUNTER,
    EMBEDDING,
    FROZEN,
    MIDDLE,
    ROTARY,
    change,
    change_reference,
    declare,
    differ,
    drop,
    findings_of,
    from_checkpoint,
    healthy,
    left_out,
    place,
    undeclared,
    verdict,
    with_reference,
)

PARAMS, BUFFERS, VERIFIER = "params_equal_reference", "buffers_equal_reference", "frozen_weights_equal_verifier"
IN_PART = "a part of it is right: rows, heads or experts were reordered, transposed or left out"
NOT_LOADED = (
    "the weight was not loaded (it still has its initialisation), was loaded from another tensor or checkpoint, or was "
    "initialised again after loading"
)
ODD_IN_PART = "a part was overwritten after loading, or was read, computed or rounded differently from the other ranks"
ZEROS = (
    "it holds only zeros on these ranks: it was created or initialised with zeros (like the B of LoRA), and the weight "
    "was not loaded after that"
)
ODD_WHOLE = (
    "these ranks did not receive the weight that the others have: it was loaded on some ranks only, or initialised "
    "from a seed that depends on the rank"
)


def shapes(problem: str, should_be: str, shape: tuple[int, ...] | None = None) -> dict:
    """The facts of a comparison with a slice of another shape, which compares no elements."""
    return {"elements": 0, "differing": 0, "problem": problem, "should_be": should_be, "shape": shape}


LOAD_BY_NAME = (
    "load by name, into the parameters themselves (.to() may return a copy), and fail on missing and unexpected keys; "
    "initialise before loading, never after; if the loader draws it on purpose (a new head, training from scratch), "
    "declare Subject(drawn=...)"
)


def patterned(evidence, name, kind, by="", ranks=None, **facts):
    """Let all elements of a tensor differ on these ranks, with this pattern."""
    pattern = Pattern(kind, by) if kind else None
    return differ(evidence, name, ranks, **{"differing": 12, "pattern": pattern, **facts})


@pytest.mark.parametrize(
    ("kind", "by", "cause", "odd_cause"),
    [
        ("", "", NOT_LOADED, ODD_WHOLE),
        ("zeros", "", ZEROS, ZEROS),
        ("rounded", "bfloat16", "it was rounded through bfloat16", ""),
        ("times", "2", "it is 2 times the expected value: ", ""),
        ("plus", "1", "every element is 1 more than expected: a constant", ""),
        ("plus", "-0.25", "every element is 0.25 less than expected: a constant was added", ""),
        ("transposed", "", "it is transposed, ", ""),
        ("elsewhere", "", "these ranks hold another part of the tensor", ""),
        ("alike", "", "these ranks hold the numbers of another rank's part", ""),
        ("reordered", "", "it has the right values in another order: ", ""),
        ("close", "", "its wrong elements are close to the right ones", ODD_IN_PART),
        ("part", "", IN_PART, ODD_IN_PART),
    ],
)
def test_the_cause_of_a_pattern(kind, by, cause, odd_cause):
    (found,) = verdict(PARAMS, patterned(healthy(), MIDDLE, kind, by)).findings
    assert found.cause.startswith(cause)
    (odd,) = verdict(PARAMS, patterned(healthy(), MIDDLE, kind, by, [1])).findings
    assert (odd.ranks, odd.cause.startswith(odd_cause or cause)) == ((1,), True)


def test_ranks_with_different_patterns_have_none():
    evidence = patterned(patterned(healthy(), MIDDLE, "times", "2", [0]), MIDDLE, "times", "3", [1])
    assert [finding.cause for finding in verdict(PARAMS, evidence).findings] == [NOT_LOADED]


def measured(evidence, name, rank, actual, reference, apart=1.0, **facts):
    """Let a tensor differ on one rank, with these norms of it, of the reference and of the difference."""
    measure = Measure(actual=actual, truth=reference, apart=apart, dot=0.0, elements=12)
    return differ(evidence, name, [rank], measure=measure, **{"differing": 12, **facts})


def test_tensors_that_are_wrong_on_different_ranks_were_not_swapped():
    evidence = measured(healthy(2), MIDDLE, 0, 5.0, 7.0, elements=12)
    evidence = measured(evidence, EMBEDDING, 1, 7.0, 5.0, elements=12)
    assert not [f for f in verdict(PARAMS, evidence).findings if f.cause.startswith("it holds the values of")]


def test_buffers_may_be_right_in_part_by_chance():
    # The first row of a cosine table is ones with any settings.
    shape = (8, 4)
    evidence = change(healthy(), ROTARY, shape=shape, local_shape=shape, regions=(((0, 8),), ((0, 4),)))
    evidence = differ(change_reference(evidence, ROTARY, shape=shape), ROTARY, differing=1)
    assert [finding.cause for finding in verdict(BUFFERS, evidence).findings] == [
        "the buffer was computed from other settings than the reference's or in another dtype, or was overwritten"
    ]


def test_empty_shards_do_not_make_other_ranks_exceptions():
    evidence = healthy(4)
    assert evidence.values[3][1].elements == 0
    for ranks, kind, cause in (
        ([0, 1, 2], "", NOT_LOADED),
        ([0, 1, 2], "part", IN_PART),
        ([0, 1], "part", ODD_IN_PART),
    ):
        found = verdict(PARAMS, patterned(evidence, MIDDLE, kind, ranks=ranks))
        assert [(finding.ranks, finding.cause) for finding in found.findings] == [(tuple(ranks), cause)]


def test_a_persistent_buffer_that_holds_zeros_was_not_loaded():
    """deepspeedai/DeepSpeed#8358: parameters are copied, and a buffer is none."""
    evidence = healthy()
    evidence = patterned(evidence, COUNTER, "zeros")
    # Another tensor of zeros proves nothing.
    evidence = change(evidence, COUNTER, digest=evidence.inventory[0].by_name[EMBEDDING].digest)
    (finding,) = verdict("buffers_equal_reference", evidence).findings
    assert finding.cause.startswith("it holds only zeros, as after its creation: nothing was loaded into it")


def test_tensors_that_are_wrong_in_the_same_way_are_not_exchanged():
    """The rotary frequencies of all blocks, rounded alike, have equal bits."""
    evidence = healthy()
    for name in (MIDDLE, EMBEDDING):
        evidence = change(differ(evidence, name, differing=12), name, digest="rounded")
    found = verdict(PARAMS, evidence).findings
    assert {finding.tensor for finding in found} == {MIDDLE, EMBEDDING}
    assert not any("these are the values of" in finding.detail for finding in found)


def test_zeros_where_the_reference_has_none():
    (finding,) = verdict(PARAMS, patterned(healthy(), MIDDLE, "zeros")).findings
    assert (finding.ranks, finding.cause, finding.remedy) == ((0, 1), ZEROS, LOAD_BY_NAME)
    # Wrong values on other ranks are a finding of their own, with the cause for all ranks.
    mixed = patterned(patterned(healthy(), MIDDLE, ""), MIDDLE, "zeros", ranks=[1])
    found = verdict(PARAMS, mixed).findings
    assert [(f.ranks, f.cause) for f in found] == [((0,), NOT_LOADED), ((1,), ZEROS)]


def test_a_whole_tensor_is_not_called_a_slice():
    found = verdict(BUFFERS, differ(healthy(), ROTARY))
    assert [f.actual for f in found.findings] == ["values that differ from the reference"]
    whole = declare(place(healthy(), MIDDLE, {}), unsharded=(MIDDLE,))
    assert verdict(PARAMS, differ(whole, MIDDLE)).findings[0].actual == "values that differ from the reference"


@pytest.mark.parametrize(
    ("ranks", "facts", "detail"),
    [
        (
            [1],
            {"differing": 12, "max_abs": 3.0, "index": (3, 1), "expected": -1.0, "actual": 2.0},
            "all elements of rank 1's shard differ, first at [3, 1]: 2, but should be -1; largest difference 3",
        ),
        (
            None,
            {"max_abs": math.inf, "max_rel": math.inf, "actual": math.nan},
            "1 of 12 elements of rank 0's shard differ, first at [0, 0]: nan, but should be 2; largest difference inf",
        ),
    ],
    ids=["worst rank", "nan beside a number"],
)
def test_the_detail_of_values_that_differ(ranks, facts, detail):
    (finding,) = verdict(PARAMS, differ(differ(healthy(), MIDDLE), MIDDLE, ranks, **facts)).findings
    assert finding.detail == detail


def test_a_scalar_has_no_index():
    evidence = differ(healthy(), COUNTER, index=(), actual=3.0, expected=7.0)
    assert findings_of(verdict(BUFFERS, evidence)) == [
        (COUNTER, (0, 1), "values that differ from the reference", "", "3 on rank 0, but should be 7")
    ]


def odd_replica(evidence, name):
    evidence = change(differ(evidence, name, [1]), name, [1], digest="other bits")
    return differ(evidence, name, [1], observed="verifier")


def unwritten(name):
    return change(differ(healthy(), name), name, nan=1, poisoned=1)


def of_another_shape(name):
    wrong = shapes("shape (9, 4)", "(6, 4), as in the reference", (9, 4))
    return differ(change(healthy(), name, shape=(9, 4)), name, **wrong)


REPLICATED = {"dp_replicate": 2, "dp_shard": 1}


@pytest.mark.parametrize(
    ("check", "by", "name", "evidence"),
    [
        (BUFFERS, "shapes_match_reference", ROTARY, of_another_shape(ROTARY)),
        (VERIFIER, "no_uninitialized_memory", FROZEN, unwritten(FROZEN)),
        (VERIFIER, "replicas_equal", FROZEN, odd_replica(healthy(mesh=REPLICATED), FROZEN)),
    ],
)
def test_what_another_check_reports_is_left_out(check, by, name, evidence):
    found = verdict(check, evidence)
    assert (found.status, found.findings, found.reason) == ("skipped", (), left_out(by, name, rest=check != VERIFIER))


@pytest.mark.parametrize(("check", "own"), [(PARAMS, MIDDLE), (BUFFERS, ROTARY)])
def test_each_tensor_is_judged_by_one_check(check, own):
    evidence = healthy()
    for name in (MIDDLE, ROTARY, FROZEN):
        evidence = differ(evidence, name)
    assert [finding.tensor for finding in verdict(check, evidence).findings] == [own]


def test_another_shape_and_other_values_are_two_findings():
    wrong = shapes("shape (9, 4)", "(8, 4), as in the verifier", (9, 4))
    part = differ(healthy(4), FROZEN, observed="verifier", pattern=Pattern("part"))
    evidence = differ(part, FROZEN, [2], observed="verifier", **wrong, pattern=None)
    found = verdict(VERIFIER, evidence)
    assert [(finding.ranks, finding.actual, finding.expected) for finding in found.findings] == [
        ((0, 1, 3), "values that differ from the verifier", ""),
        ((2,), "shape (9, 4)", "(8, 4), as in the verifier"),
    ]
    assert found.findings[0].cause == IN_PART  # all ranks whose values were compared are wrong


@pytest.mark.parametrize(
    ("dtype", "rel", "cast", "status"),
    [
        ("bfloat16", 2.0**-7, True, "passed"),
        ("bfloat16", 2.0**-6, True, "failed"),
        ("bfloat16", 2.0**-9, False, "failed"),
        ("float16", 2.0**-10, True, "passed"),
        ("float16", 2.0**-7, True, "failed"),
        ("float32", 2.0**-23, True, "passed"),
        ("float32", 2.0**-9, True, "failed"),
        ("float8_e4m3fn", 2.0**-3, True, "passed"),
        ("int64", 2.0**-30, True, "failed"),
    ],
)
def test_only_a_cast_may_round_and_only_by_one_unit(dtype, rel, cast, status):
    evidence = differ(change(healthy(), MIDDLE, dtype=dtype), MIDDLE, cast=cast, max_rel=rel)
    assert verdict(PARAMS, evidence).status == status
    # A cast does not excuse another shape.
    odd = differ(evidence, MIDDLE, max_rel=0.0, problem="shape ()")
    assert [finding.actual for finding in verdict(PARAMS, odd).findings] == ["shape ()"]


@pytest.mark.parametrize(
    ("check", "already_failed"), [(PARAMS, ROTARY), (PARAMS, FROZEN), (BUFFERS, MIDDLE), (VERIFIER, MIDDLE)]
)
def test_a_tensor_that_another_check_judges_is_not_left_out_here(check, already_failed):
    evidence = change(differ(healthy(), already_failed), already_failed, nan=1, poisoned=1)
    assert verdict("no_uninitialized_memory", evidence).status == "failed"
    found = verdict(check, evidence)
    assert (found.status, found.unjudged) == ("passed", {})


@pytest.mark.parametrize(("check", "name"), [(PARAMS, MIDDLE), (BUFFERS, ROTARY), (VERIFIER, FROZEN)])
def test_a_missing_tensor_is_reported_by_names_match_reference(check, name):
    found = verdict(check, drop(healthy(), name))
    assert (found.status, found.findings) == ("passed", ())
    assert [finding.tensor for finding in verdict("names_match_reference", drop(healthy(), name)).findings] == [name]


@pytest.mark.parametrize(
    ("facts", "what"),
    [
        ({"unstable": (MIDDLE,)}, "it has other bits each time it is built (layers.0.weight)"),
        ({"unstable": (MIDDLE, EMBEDDING)}, "it has other bits each time it is built (embed.weight and 1 more)"),
        ({"uninitialised": (MIDDLE,)}, "it never writes the tensor (layers.0.weight)"),
    ],
)
def test_an_unstable_reference_is_an_error(facts, what):
    found = verdict(PARAMS, with_reference(differ(healthy(), MIDDLE), **facts))
    reason = f"the reference is not reproducible: {what}; make it build the same model every time"
    assert (found.status, found.reason, found.findings) == ("error", reason, ())


def test_an_unstable_tensor_does_not_hide_findings_of_others():
    found = verdict(PARAMS, with_reference(differ(healthy(), EMBEDDING), unstable=(MIDDLE,)))
    assert (found.status, [finding.tensor for finding in found.findings]) == ("failed", [EMBEDDING])
    assert found.reason.startswith("the reference is not reproducible")
    # A tensor that another check judges may be unstable.
    evidence = with_reference(healthy(), unstable=(ROTARY,))
    assert (verdict(PARAMS, evidence).status, verdict(BUFFERS, evidence).status) == ("passed", "error")


def test_a_checkpoint_has_no_non_persistent_buffers():
    found = verdict(BUFFERS, from_checkpoint(healthy()))
    reason = "a checkpoint does not contain non-persistent buffers (1 here, first: rotary.inv_freq)"
    assert (found.status, found.reason[: len(reason)]) == ("skipped", reason)
    assert verdict(PARAMS, from_checkpoint(healthy())).status == "passed"
    found = verdict(BUFFERS, differ(from_checkpoint(healthy()), COUNTER))
    assert (found.status, [finding.tensor for finding in found.findings]) == ("failed", [COUNTER])
    assert verdict(BUFFERS, from_checkpoint(drop(healthy(), ROTARY))).status == "passed"


@pytest.mark.parametrize(
    ("world", "ranks", "facts", "cause"),
    [
        (4, [2], {"differing": 4}, ODD_WHOLE),
        (2, None, {"pattern": Pattern("part")}, IN_PART),
        (
            *(2, None, shapes("shape (4, 2)", "(4, 4), as in the reference", (4, 2))),
            "the verifier is another model, has the tensor under another name, or has a vocabulary of another size",
        ),
    ],
)
def test_a_frozen_weight_has_the_inferred_cause(world, ranks, facts, cause):
    evidence = differ(healthy(world), FROZEN, ranks, observed="verifier", **facts)
    assert [finding.cause for finding in verdict(VERIFIER, evidence).findings] == [cause]


def test_a_mapped_name_is_shown_as_in_the_verifier():
    evidence = declare(differ(healthy(), FROZEN, observed="verifier"), frozen={FROZEN: "lm_head.weight"})
    [finding] = verdict(VERIFIER, evidence).findings
    assert (finding.tensor, finding.actual) == (FROZEN, "values that differ from the verifier's lm_head.weight")
    wrong = shapes("shape (4, 2)", "(4, 4), as in the reference", (4, 2))
    assert findings_of(verdict(VERIFIER, differ(evidence, FROZEN, observed="verifier", **wrong))) == [
        (FROZEN, (0, 1), "shape (4, 2)", "(4, 4), as in the reference", "")
    ]


def test_a_part_whose_size_contradicts_its_adapter_is_not_blamed_on_the_verifier():
    evidence = change(healthy(), FROZEN, [0, 1], sharded_by="hand")
    wrong = shapes("local shape (2,)", "(16, 8), as hand says")
    finding = verdict(VERIFIER, differ(evidence, FROZEN, observed="verifier", **wrong)).findings[0]
    assert finding.cause == "the adapter describes another part of the tensor than the rank holds"


def test_a_declared_verifier_is_not_replaced_by_the_reference():
    evidence = declare(differ(healthy(), FROZEN), frozen={FROZEN: FROZEN})
    evidence = undeclared(evidence, "verifier", why="rank 0 was killed", error=True)
    evidence = replace(evidence, subject=replace(evidence.subject, declared=frozenset({"verifier", "reference"})))
    assert verdict(PARAMS, evidence).status == "passed"
    assert verdict(VERIFIER, evidence).status == "error"


@pytest.mark.parametrize(("own", "status"), [(False, "error"), (True, "passed")])
def test_an_unstable_reference_does_not_affect_a_declared_verifier(own, status):
    evidence = with_reference(healthy(), unstable=(FROZEN,))
    if own:
        evidence = declare(evidence, declared=evidence.subject.declared | {"verifier"}, frozen={FROZEN: FROZEN})
    assert verdict(VERIFIER, evidence).status == status


def test_an_unstable_tensor_is_named_as_in_the_reference():
    evidence = with_reference(declare(healthy(), frozen={FROZEN: EMBEDDING}), unstable=(EMBEDDING,))
    found = verdict(VERIFIER, evidence)
    assert (found.status, f"({EMBEDDING})" in found.reason) == ("error", True)


def test_a_vocabulary_of_five_in_a_world_of_four():
    evidence = healthy(4, parameters={"embed.weight": (5, 2)})
    assert [rank.tensors[0].local_shape for rank in evidence.inventory] == [(2, 2), (2, 2), (1, 2), (0, 2)]
    assert verdict(PARAMS, evidence).status == "passed"
    (found,) = verdict(PARAMS, differ(evidence, "embed.weight", [2], index=(4, 1), differing=2)).findings
    assert (found.tensor, found.ranks) == ("embed.weight", (2,))


def verified(evidence, name):
    """Declare one frozen tensor, so that only this one was compared with the verifier."""
    taken = tuple(tuple(c for c in rank if c.name == name) for rank in evidence.values)
    return replace(declare(evidence, frozen={name: name}), verifier=taken)


@pytest.mark.parametrize(
    "evidence",
    [
        change_reference(healthy(), FROZEN, requires_grad=True),
        undeclared(healthy(), "verifier", why="no selected check needs it"),
        verified(healthy(), MIDDLE),
    ],
    ids=["the reference trains it", "verifier not selected", "another tensor is declared"],
)
def test_frozen_weights_that_are_compared_with_the_reference(evidence):
    found = verdict(PARAMS, differ(evidence, FROZEN))
    assert [finding.tensor for finding in found.findings] == [FROZEN]


def test_declared_tensors_are_compared_with_the_verifier():
    assert verdict(VERIFIER, differ(verified(healthy(), MIDDLE), FROZEN)).status == "passed"
    evidence = differ(verified(healthy(), ROTARY), ROTARY, observed="verifier")
    assert [finding.tensor for finding in verdict(VERIFIER, evidence).findings] == [ROTARY]
    assert verdict(BUFFERS, differ(evidence, ROTARY)).status == "passed"
