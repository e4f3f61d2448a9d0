"""same_manifest_on_every_rank, names_, shapes_, dtypes_, requires_grad_ and attributes on hand-made evidence."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_fsdp_meta.evidence import MeshFacts, RankInventory
from tests.checks.evidence_factory import (
    COUNTER,
    EMBEDDING,
    FROZEN,
    HEAD,
    MIDDLE,
    PARAMETERS,
    ROTARY,
    add,
    change,
    change_reference,
    declare,
    drop,
    drop_reference,
    findings_of,
    from_checkpoint,
    healthy,
    left_out,
    on_ranks,
    parameter,
    rename,
    undeclared,
    verdict,
    with_reference,
)

MANIFEST, NAMES = "same_manifest_on_every_rank", "names_match_reference"
DTYPES, TRAINABLE = "dtypes_match_reference", "requires_grad_matches_reference"
SHAPES, ATTRIBUTES = "shapes_match_reference", "parameter_attributes_kept"


@pytest.mark.parametrize(
    ("world", "absent", "finding"),
    [
        (2, [0], (MIDDLE, (1,), "present", "absent, as on rank 0", "")),
        (4, [3], (MIDDLE, (3,), "missing", "present, as on ranks 0-2", "")),
        (4, [0, 1], (MIDDLE, (2, 3), "present", "absent, as on ranks 0, 1", "")),
        (4, [0, 1, 3], (MIDDLE, (2,), "present", "absent, as on ranks 0, 1, 3", "")),
    ],
)
def test_a_name_that_some_ranks_lack_is_reported_for_the_minority(world, absent, finding):
    found = verdict(MANIFEST, drop(healthy(world), MIDDLE, absent))
    assert found.status == "failed"
    assert findings_of(found) == [finding]


@pytest.mark.parametrize(
    ("facts", "actual", "expected"),
    [
        ({"shape": (6, 5)}, "shape (6, 5)", "(6, 4), as on ranks 0, 1, 3"),
        ({"dtype": "bfloat16"}, "dtype bfloat16", "float32, as on ranks 0, 1, 3"),
        ({"requires_grad": False}, "requires_grad False", "True, as on ranks 0, 1, 3"),
        ({"kind": "buffer"}, "kind buffer", "parameter, as on ranks 0, 1, 3"),
        ({"persistent": False}, "persistent False", "True, as on ranks 0, 1, 3"),
    ],
)
def test_one_differing_rank_is_reported_with_the_others(facts, actual, expected):
    found = verdict(MANIFEST, change(healthy(4), MIDDLE, [2], **facts))
    assert findings_of(found) == [(MIDDLE, (2,), actual, expected, "")]


def test_ranks_with_different_values_are_separate_findings():
    evidence = change(change(healthy(4), MIDDLE, [1], dtype="float16"), MIDDLE, [2, 3], dtype="bfloat16")
    assert findings_of(verdict(MANIFEST, evidence)) == [
        (MIDDLE, (0,), "dtype float32", "bfloat16, as on ranks 2, 3", ""),
        (MIDDLE, (1,), "dtype float16", "bfloat16, as on ranks 2, 3", ""),
    ]
    # In a tie the value of the lowest rank counts.
    found = verdict(MANIFEST, change(healthy(2), MIDDLE, [1], dtype="bfloat16"))
    assert findings_of(found) == [(MIDDLE, (1,), "dtype bfloat16", "float32, as on rank 0", "")]


def test_another_order_is_one_finding_for_all_its_ranks():
    evidence = on_ranks(healthy(4), [0], lambda rank: rank.tensors[::-1])
    actual, expected = "parameters and buffers in a different order", "in the order of ranks 1-3"
    detail = f"first difference: {COUNTER} in place of {EMBEDDING}"
    assert findings_of(verdict(MANIFEST, evidence)) == [(None, (0,), actual, expected, detail)]
    evidence = on_ranks(healthy(8), [1, 5], lambda rank: rank.tensors[::-1])
    assert [finding.ranks for finding in verdict(MANIFEST, evidence).findings] == [(1, 5)]
    # The order is not judged if names are missing.
    evidence = on_ranks(healthy(4), [1], lambda rank: rank.tensors[:0:-1])
    assert [finding.tensor for finding in verdict(MANIFEST, evidence).findings] == [EMBEDDING]


OTHER_CONFIG = "the sharded model and the reference are built from different configs, or a wrapper renames the tensors"


def test_the_bias_of_a_module_that_one_side_lacks_is_not_disabled():
    renamed = add(drop(add(healthy(), parameter("new.bias", (8,))), HEAD), parameter("new.weight"))
    for evidence in (renamed, add(healthy(), parameter("bias", (8,)))):
        assert {finding.cause for finding in verdict(NAMES, evidence).findings} == {OTHER_CONFIG}


PREFIX = (
    *(None, (0, 1), "names have the prefix 'module.' (module.embed.weight)"),
    *("named as in the reference (embed.weight)", ""),
)
NAMED = (EMBEDDING, MIDDLE, FROZEN, HEAD, ROTARY, COUNTER)
SMALL, OF_SMALL = healthy(parameters={MIDDLE: (6, 4)}), [MIDDLE, ROTARY, COUNTER]


@pytest.mark.parametrize("stored", [False, True])
def test_a_prefix_before_every_name_is_one_finding(stored):
    evidence = rename(healthy(), "module.")
    found = verdict(NAMES, from_checkpoint(evidence) if stored else evidence)
    assert findings_of(found) == [PREFIX]
    (finding,) = found.findings
    assert finding.cause == "the loader returns a wrapper instead of the model inside it"
    assert finding.remedy == "return the inner module, which is .module of the returned one"
    names = [name for name in NAMED if name != ROTARY or not stored]
    assert finding.condemns == (*(f"module.{name}" for name in names), *names)


def test_checks_that_do_not_depend_on_names_judge_prefixed_tensors():
    found = verdict("no_meta_params", rename(change(healthy(), MIDDLE, device="meta"), "module."))
    assert [finding.tensor for finding in found.findings] == [f"module.{MIDDLE}"]


@pytest.mark.parametrize(
    ("evidence", "names"),
    [
        (rename(healthy(), "inner.", MIDDLE, HEAD), [f"inner.{MIDDLE}", f"inner.{HEAD}", MIDDLE, HEAD]),
        (rename(SMALL, "old_"), [f"old_{name}" for name in OF_SMALL] + OF_SMALL),
        (
            add(rename(SMALL, "module."), parameter("module.scale")),
            [*(f"module.{name}" for name in OF_SMALL), "module.scale", *OF_SMALL],
        ),
    ],
    ids=["some names", "no module", "one more"],
)
def test_names_without_a_common_prefix_are_reported_one_by_one(evidence, names):
    found = verdict(NAMES, evidence).findings
    assert [(finding.tensor, finding.cause, finding.condemns) for finding in found] == [
        (name, OTHER_CONFIG, ()) for name in names
    ]


def test_renamed_tensors_do_not_hide_a_tensor_of_another_kind():
    evidence = change(rename(healthy(), "inner.", MIDDLE), ROTARY, kind="parameter")
    assert [finding.tensor for finding in verdict(NAMES, evidence).findings] == [f"inner.{MIDDLE}", MIDDLE, ROTARY]


def test_a_parameter_that_became_a_buffer():
    found = verdict(NAMES, change(healthy(), MIDDLE, kind="buffer", requires_grad=False))
    assert findings_of(found) == [(MIDDLE, (0, 1), "a buffer", "a parameter, as in the reference", "")]
    assert found.findings[0].remedy.startswith("re-create parameters as torch.nn.Parameter")


@pytest.mark.parametrize(
    ("name", "now", "actual", "expected"),
    [
        (COUNTER, False, "a non-persistent buffer", "persistent, as in the reference"),
        (ROTARY, True, "a persistent buffer", "non-persistent, as in the reference"),
    ],
)
def test_a_buffer_with_another_persistence(name, now, actual, expected):
    found = verdict(NAMES, change(healthy(), name, persistent=now))
    assert findings_of(found) == [(name, (0, 1), actual, expected, "")]
    assert found.findings[0].cause.startswith("it was registered again with a different persistent=...")
    assert found.findings[0].remedy == f"call register_buffer(name, tensor, persistent={not now})"


def test_names_of_a_checkpoint():
    """It records no persistence, and omits non-persistent buffers and duplicates of tied weights."""
    assert verdict(NAMES, from_checkpoint(change(healthy(), COUNTER, persistent=False))).status == "passed"
    assert verdict(NAMES, from_checkpoint(drop_reference(healthy(), HEAD))).status == "passed"
    found = verdict(NAMES, from_checkpoint(drop_reference(healthy(), COUNTER)))
    assert findings_of(found) == [(COUNTER, (0, 1), "present (a buffer)", "absent, as in the reference", "")]
    found = verdict(NAMES, from_checkpoint(drop(healthy(), MIDDLE)))
    assert findings_of(found) == [(MIDDLE, (0, 1), "missing", "a tensor, as in the reference", "")]


def test_a_declared_tie_explains_a_name_that_a_checkpoint_lacks_even_if_broken():
    untied = change(healthy(), HEAD, storage="its own", identity=-1)
    evidence = from_checkpoint(drop_reference(untied, HEAD))
    assert [finding.tensor for finding in verdict(NAMES, evidence).findings] == [HEAD]
    assert verdict(NAMES, declare(evidence, tied=((EMBEDDING, HEAD),))).status == "passed"


def test_with_an_empty_reference_every_name_is_extra():
    nothing = with_reference(healthy(1), inventory=RankInventory(0, "cpu", ()))
    assert tuple(finding.tensor for finding in verdict(NAMES, nothing).findings) == NAMED


@pytest.mark.parametrize(
    ("evidence", "name", "now", "was"),
    [
        (change(healthy(), COUNTER, dtype="bfloat16"), COUNTER, "bfloat16", "int64"),
        (from_checkpoint(change(healthy(), MIDDLE, dtype="bfloat16")), MIDDLE, "bfloat16", "float32"),
        (change_reference(healthy(), MIDDLE, dtype="float64"), MIDDLE, "float32", "float64"),
    ],
)
def test_another_dtype(evidence, name, now, was):
    assert findings_of(verdict(DTYPES, evidence)) == [(name, (0, 1), now, was, "")]


@pytest.mark.parametrize(("computes_in", "kept"), [(("bfloat16",), True), ((), False), (("float16",), False)])
def test_weights_in_the_dtype_of_the_policy_have_no_masters(computes_in, kept):
    """NVIDIA-NeMo/Automodel#3979: casting to float32 master weights does nothing."""
    ranks = tuple(replace(rank, computes_in=computes_in) for rank in healthy().inventory)
    (finding,) = verdict(DTYPES, change(replace(healthy(), inventory=ranks), MIDDLE, dtype="bfloat16")).findings
    assert finding.cause.startswith("the weights have the dtype in which the mixed-precision policy computes") is kept


@pytest.mark.parametrize(
    "evidence",
    [
        # checks/training/observe/reference.py freezes it there; tests/trial/test_trial.py tests both together.
        change_reference(healthy(), MIDDLE, requires_grad=False),
        undeclared(healthy(), "reference", "values", "training", why="not declared"),
        undeclared(healthy(), "reference", "values", "training", why="rank 0 was killed", error=True),
        from_checkpoint(healthy()),
    ],
    ids=["the recorded reference", "no reference", "a reference that failed", "a checkpoint"],
)
def test_a_parameter_that_is_declared_frozen(evidence):
    evidence = declare(evidence, frozen={MIDDLE: MIDDLE})
    found = verdict(TRAINABLE, evidence)
    assert [(f.tensor, f.expected) for f in found.findings] == [(MIDDLE, "frozen, as declared")]
    assert verdict(TRAINABLE, change(evidence, MIDDLE, requires_grad=False)).status == "passed"


def test_a_declared_parameter_that_already_failed_is_not_judged_without_a_reference():
    evidence = undeclared(change(healthy(), MIDDLE, [1], dtype="float16"), "reference", why="not declared")
    found = verdict(TRAINABLE, declare(evidence, frozen={MIDDLE: MIDDLE}))
    assert (found.status, found.reason) == ("skipped", left_out(MANIFEST, MIDDLE, rest=False))
    # Without a reference, only declared parameters are judged.
    evidence = declare(change(evidence, FROZEN, requires_grad=False), frozen={FROZEN: FROZEN})
    assert verdict(TRAINABLE, evidence).status == "passed"


def test_a_buffer_declared_frozen_does_not_replace_the_reference_for_parameters():
    evidence = undeclared(declare(healthy(), frozen={ROTARY: ROTARY}), "reference", why="not declared")
    assert (verdict(TRAINABLE, evidence).status, verdict(TRAINABLE, evidence).reason) == ("skipped", "not declared")


@pytest.mark.parametrize(("check", "what"), [(TRAINABLE, "what is trainable"), (ATTRIBUTES, "attributes")])
def test_what_a_checkpoint_does_not_record(check, what):
    found = verdict(check, declare(from_checkpoint(healthy()), kept_attributes=("_fsdp_no_shard",)))
    reason = f"a checkpoint does not record {what}; declare Subject(reference=<callable>)"
    assert (found.status, found.reason) == ("skipped", reason)


def test_tensors_that_already_failed_do_not_hide_others():
    evidence = change(change(healthy(), MIDDLE, [1], dtype="float16"), ROTARY, dtype="bfloat16")
    found = verdict(DTYPES, evidence)
    assert findings_of(found) == [(ROTARY, (0, 1), "bfloat16", "float32", "")]
    assert found.unjudged == {MANIFEST: (MIDDLE,)}


@pytest.mark.parametrize(("name", "shape"), [(MIDDLE, (12, 4)), (MIDDLE, (6, 4, 1)), (ROTARY, ()), (COUNTER, (1,))])
def test_another_shape_than_the_reference(name, shape):
    evidence = change(healthy(), name, shape=shape)
    expected = f"{evidence.reference.inventory.by_name[name].shape}, as in the reference"
    assert findings_of(verdict(SHAPES, evidence)) == [(name, (0, 1), f"shape {shape}", expected, "")]


def test_a_whole_tensor_that_is_taken_for_a_part():
    evidence = change(healthy(), MIDDLE, shape=(12, 4), local_shape=(6, 4))
    assert {finding.cause for finding in verdict(SHAPES, evidence).findings} == {
        "each rank passed the whole tensor to DTensor.from_local as if it were the rank's part"
    }


CUT = "each rank of {} holds a part that was cut by hand, or the local shard of a DTensor, and "
NOWHERE = "nothing says which part of the whole it is"


def plain(mesh, shapes):
    """Return the evidence of plain tensors of these shapes, which the loader made without the mesh."""
    evidence = healthy(mesh=mesh)
    for name in PARAMETERS:
        evidence = change(
            evidence, name, placements=None, mesh=None, **({"shape": shapes[name]} if name in shapes else {})
        )
    return evidence


@pytest.mark.parametrize(
    ("mesh", "shapes", "where"),
    [
        ({"tp": 2}, {MIDDLE: (3, 4), HEAD: (8, 2)}, "tp=2"),
        ({"tp": 2}, {MIDDLE: (3, 4), HEAD: (7, 4)}, "tp=2"),  # the vocabulary's rows are padded
        ({"tp": 4}, {EMBEDDING: (4, 4)}, "tp=4"),  # each part on two ranks, as of key heads
        ({"dp_shard": 2, "tp": 2}, {EMBEDDING: (4, 4)}, "dp_shard=2 or tp=2"),
    ],
)
def test_plain_parts_of_the_reference_are_a_layout_by_hand(mesh, shapes, where):
    evidence = plain(mesh, shapes)
    found = verdict(SHAPES, evidence).findings
    assert [finding.tensor for finding in found] == [name for name in PARAMETERS if name in shapes]
    assert {finding.cause for finding in found} == {CUT.format(where) + NOWHERE}
    assert all("Part.block(tensor, shape, start)" in finding.remedy for finding in found)
    (declared,) = {f.cause for f in verdict(SHAPES, declare(evidence, declared=frozenset({"adapter"}))).findings}
    assert declared == CUT.format(where) + "Subject(adapter=...) returns None for it"


def test_shards_of_fsdp2_over_parts_cut_by_hand():
    evidence = healthy(mesh={"dp_shard": 2, "tp": 2})
    for rank in range(4):
        mesh = MeshFacts(("dp_shard",), (2,), (rank // 2,))
        evidence = change(evidence, MIDDLE, [rank], shape=(6, 2), mesh=mesh, placements=("S(0)",))
    assert {finding.cause for finding in verdict(SHAPES, evidence).findings} == {CUT.format("tp=2") + NOWHERE}


@pytest.mark.parametrize(
    "evidence",
    [
        plain({"tp": 2}, {MIDDLE: (3, 2)}),  # narrower in two dims: another model
        plain({"tp": 2}, {MIDDLE: (3, 4), HEAD: (16, 4)}),
        plain({"tp": 2}, {MIDDLE: (5, 4)}),
        plain({"tp": 2}, {MIDDLE: (2, 4)}),  # a third on two ranks
        plain({"dp_replicate": 2}, {MIDDLE: (3, 4)}),
        plain({"pp": 2}, {MIDDLE: (3, 4)}),
        change(healthy(mesh={"dp_shard": 2, "tp": 2}), MIDDLE, shape=(3, 4)),  # a DTensor on both dimensions
        change(plain({"tp": 2}, {MIDDLE: (3, 4)}), MIDDLE, sharded_by="adapter"),
    ],
)
def test_other_shapes_are_not_a_layout_by_hand(evidence):
    found = verdict(SHAPES, evidence).findings
    assert found
    assert not any("by hand" in finding.cause for finding in found)


@pytest.mark.parametrize(("mesh", "by_hand"), [({"tp": 2}, True), ({"dp_shard": 2}, False), ({"pp": 2}, False)])
def test_uneven_parts_cut_by_hand(mesh, by_hand):
    (finding,) = verdict(MANIFEST, change(plain(mesh, {EMBEDDING: (5, 4)}), EMBEDDING, [1], shape=(3, 4))).findings
    assert finding.actual == "shape (3, 4)"
    assert finding.cause == CUT.format("tp=2") + NOWHERE if by_hand else finding.cause.startswith("the loader depends")


def test_the_shape_of_a_tensor_that_the_checkpoint_lacks_is_unknown():
    assert verdict(SHAPES, change(from_checkpoint(healthy()), ROTARY, shape=(9,))).status == "passed"
    found = verdict(SHAPES, change(from_checkpoint(healthy()), MIDDLE, shape=(9,)))
    assert [finding.tensor for finding in found.findings] == [MIDDLE]


def kept(evidence, *names, key="_fsdp_no_shard", value="True"):
    """Declare the attribute as kept, and set it on these parameters of the reference."""
    evidence = declare(evidence, kept_attributes=(*evidence.subject.kept_attributes, key))
    for name in names:
        others = evidence.reference.inventory.by_name[name].attributes
        evidence = change_reference(evidence, name, attributes={**others, key: value})
    return evidence


@pytest.mark.parametrize(
    ("ranks", "attributes", "actual"),
    [
        ([1], {}, "without the attribute _fsdp_no_shard"),
        (None, {"_fsdp_no_shard": "False"}, "_fsdp_no_shard=False"),
    ],
)
def test_attributes_that_were_lost(ranks, attributes, actual):
    evidence = change(kept(healthy(), MIDDLE), MIDDLE, attributes={"_fsdp_no_shard": "True"})
    assert verdict(ATTRIBUTES, evidence).status == "passed"
    found = verdict(ATTRIBUTES, change(evidence, MIDDLE, ranks, attributes=attributes))
    expected = "_fsdp_no_shard=True, as in the reference"
    assert findings_of(found) == [(MIDDLE, tuple(ranks or (0, 1)), actual, expected, "")]


def test_an_attribute_that_the_reference_lacks():
    evidence = kept(kept(healthy(), MIDDLE), key="sequence_parallel")
    reason = "no parameter of the reference has the attribute 'sequence_parallel'"
    found = verdict(ATTRIBUTES, evidence)
    assert (found.status, [f.tensor for f in found.findings], reason in found.reason) == ("failed", [MIDDLE], True)
    found = verdict(ATTRIBUTES, change(evidence, MIDDLE, attributes={"_fsdp_no_shard": "True"}))
    assert (found.status, reason in found.reason) == ("skipped", True)
