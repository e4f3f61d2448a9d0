"""no_meta_*, no_uninitialized_memory, *_on_rank_device and managed_params_are_registered on hand-made evidence."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.catalogue.evidence_factory import (
    COUNTER,
    EMBEDDING,
    FROZEN,
    HEAD,
    MIDDLE,
    ROTARY,
    add,
    buffer,
    change,
    change_reference,
    declare,
    differ,
    drop,
    empty,
    healthy,
    left_out,
    on_ranks,
    place,
    told,
    undeclared,
    verdict,
    with_reference,
)

PARAMS, BUFFERS, WRITTEN = "no_meta_params", "no_meta_buffers", "no_uninitialized_memory"
PARAM_HOME, BUFFER_HOME = "params_on_rank_device", "buffers_on_rank_device"
META = {"device": "meta", "storage": None, "digest": None}


@pytest.mark.parametrize(("check", "name"), [(PARAMS, MIDDLE), (BUFFERS, ROTARY)])
@pytest.mark.parametrize("ranks", [(0, 1, 2, 3), (2,), (0, 3)])
def test_on_meta(check, name, ranks):
    found = verdict(check, change(healthy(4), name, ranks, **META))
    assert found.status == "failed"
    assert told(found) == [(name, ranks, "on meta", "materialised", "")]


@pytest.mark.parametrize(("check", "name"), [(PARAMS, ROTARY), (BUFFERS, MIDDLE)])
def test_the_other_kind_is_the_affair_of_the_other_check(check, name):
    assert verdict(check, change(healthy(), name, **META)).status == "passed"


def test_causes_of_meta_differ_by_kind():
    evidence = change(change(healthy(), MIDDLE, **META), ROTARY, **META)
    (parameter,), (buffer,) = verdict(PARAMS, evidence).findings, verdict(BUFFERS, evidence).findings
    assert parameter.remedy == "call to_empty() on the root after sharding, then load or initialise every parameter"
    assert buffer.cause == "the loader materialises parameters only; FSDP does not manage buffers"


@pytest.mark.parametrize("check", [PARAMS, PARAM_HOME])
def test_a_parameter_missing_on_one_rank_is_judged_where_it_is(check):
    evidence = drop(healthy(), MIDDLE, [0])
    status = {PARAMS: "passed", PARAM_HOME: "skipped"}
    assert verdict(check, evidence).status == status[check]


def test_nan_under_poison():
    found = verdict(WRITTEN, change(unequal(MIDDLE), MIDDLE, nan=5, poisoned=5))
    assert told(found) == [
        (MIDDLE, (0, 1), "uninitialised (NaN under poison)", "written by the loader", "5 of 12 elements")
    ]
    assert found.findings[0].cause == (
        "to_empty() or torch.empty() allocated it and nothing wrote it: it is not in the checkpoint, or its name did "
        "not match"
    )


def test_what_lost_its_tie_has_a_cause_of_its_own():
    untied = change(unequal(HEAD), HEAD, nan=5, poisoned=5, storage="its own", identity=7)
    (finding,) = verdict(WRITTEN, untied).findings
    assert finding.cause == (
        f"it is tied to {EMBEDDING}, which was written; the tie came apart (to_empty(), or two FSDP groups), and no "
        "checkpoint has this copy"
    )
    assert "call tie_weights() again after to_empty()" in finding.remedy
    # Where nothing of the tie was written, it is more than the tie that is missing.
    both = change(untied, EMBEDDING, nan=5, poisoned=5)
    assert all("did not match" in finding.cause for finding in verdict(WRITTEN, both).findings)


def test_one_rank_uninitialised():
    found = verdict(WRITTEN, change(unequal(MIDDLE, world=4), MIDDLE, [1], nan=8, poisoned=8))
    assert told(found) == [
        (MIDDLE, (1,), "uninitialised (NaN under poison)", "written by the loader", "8 of 8 elements")
    ]


def test_a_transient_buffer_has_a_cause_of_its_own():
    (finding,) = verdict(WRITTEN, change(unequal(ROTARY), ROTARY, nan=2, poisoned=2)).findings
    assert finding.cause == (
        "it is a non-persistent buffer, so no checkpoint has it, and nothing recomputed it after to_empty()"
    )
    assert finding.remedy == "recompute it after to_empty(), as the module's __init__ does"


def test_an_integer_at_its_maximum():
    found = verdict(WRITTEN, change(unequal(COUNTER), COUNTER, poisoned=1))
    assert told(found) == [
        (COUNTER, (0, 1), "uninitialised (int64 maximum under poison)", "written by the loader", "1 of 1 elements")
    ]


@pytest.mark.parametrize(
    ("dtype", "poisoned", "status"),
    [("uint8", 3, "passed"), ("uint8", 12, "failed"), ("int8", 11, "passed"), ("int16", 1, "failed")],
)
def test_bytes_are_poisoned_only_when_all_of_them_are(dtype, poisoned, status):
    evidence = change(unequal(MIDDLE), MIDDLE, dtype=dtype, poisoned=poisoned)
    assert verdict(WRITTEN, evidence).status == status


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
def test_an_empty_shard_of_bytes_is_not_poisoned(dtype):
    evidence = change(unequal(MIDDLE, world=4), MIDDLE, dtype=dtype)
    assert evidence.inventory[3].by_name[MIDDLE].numel == 0
    assert verdict(WRITTEN, evidence).status == "passed"


def test_what_equals_the_reference_is_meant():
    evidence = change(healthy(), COUNTER, poisoned=1)
    assert verdict(WRITTEN, evidence).status == "passed"


def test_what_equals_the_reference_is_meant_on_that_rank_only():
    evidence = change(differ(healthy(), COUNTER, [1]), COUNTER, poisoned=1)
    assert [finding.ranks for finding in verdict(WRITTEN, evidence).findings] == [(1,)]


def test_what_the_reference_never_writes_is_no_excuse():
    evidence = with_reference(change(healthy(), MIDDLE, nan=1, poisoned=1), uninitialised=(MIDDLE,))
    assert [finding.tensor for finding in verdict(WRITTEN, evidence).findings] == [MIDDLE]


def test_without_values_poison_is_believed():
    evidence = undeclared(change(healthy(), COUNTER, poisoned=1), "values", why="not declared")
    assert [finding.tensor for finding in verdict(WRITTEN, evidence).findings] == [COUNTER]


@pytest.mark.parametrize(("poisoned", "status"), [(1, "passed"), (11, "passed"), (12, "failed")])
@pytest.mark.parametrize("dtype", ["int64", "int32", "uint8"])
def test_without_values_one_integer_may_be_a_sentinel(dtype, poisoned, status):
    evidence = change(undeclared(healthy(), "values", why="not declared"), MIDDLE, dtype=dtype, poisoned=poisoned)
    evidence = undeclared(evidence, "reference", why="not declared")
    assert verdict(WRITTEN, evidence).status == status
    # Floating point has NaN, which nobody means.
    assert verdict(WRITTEN, change(evidence, MIDDLE, dtype="float32", nan=poisoned)).status == "failed"


def test_an_integer_that_only_some_ranks_compare():
    evidence = change(unequal(MIDDLE), MIDDLE, dtype="int64", poisoned=1)
    evidence = change_reference(evidence, MIDDLE, dtype="int64")
    assert [finding.ranks for finding in verdict(WRITTEN, evidence).findings] == [(0, 1)]
    evidence = replace(evidence, values=(evidence.values[0], ()))
    assert [finding.ranks for finding in verdict(WRITTEN, evidence).findings] == [(0,)]


def test_a_buffer_too_many_is_told_once():
    evidence = add(healthy(), buffer("extra", nan=2, poisoned=2))
    assert [finding.tensor for finding in verdict("names_match_reference", evidence).findings] == ["extra"]
    found = verdict(WRITTEN, evidence)
    assert (found.status, found.reason) == ("skipped", left_out("names_match_reference", "extra"))


def test_what_the_manifest_condemned_is_not_judged_for_poison():
    evidence = change(unequal(MIDDLE), MIDDLE, [1], dtype="float16", nan=1, poisoned=1)
    found = verdict(WRITTEN, evidence)
    assert found.status == "skipped"
    assert found.reason == left_out("same_manifest_on_every_rank", MIDDLE)


def gpus(world: int = 4):
    """Healthy on GPUs, one for each rank."""
    evidence = on_ranks(
        healthy(world), None, lambda rank: tuple(replace(t, device=f"cuda:{rank.rank}") for t in rank.tensors)
    )
    return replace(evidence, inventory=tuple(replace(r, device=f"cuda:{r.rank}") for r in evidence.inventory))


@pytest.mark.parametrize(("check", "name"), [(PARAM_HOME, MIDDLE), (BUFFER_HOME, ROTARY)])
def test_a_device_per_rank(check, name):
    assert verdict(check, gpus()).status == "passed"
    # All on the first GPU: right on rank 0, wrong elsewhere, and each rank has another home.
    assert told(verdict(check, change(gpus(), name, device="cuda:0"))) == [
        (name, (1,), "on cuda:0", "on cuda:1", ""),
        (name, (2,), "on cuda:0", "on cuda:2", ""),
        (name, (3,), "on cuda:0", "on cuda:3", ""),
    ]


@pytest.mark.parametrize(("check", "name"), [(PARAM_HOME, MIDDLE), (BUFFER_HOME, COUNTER)])
def test_one_rank_left_it_on_the_cpu(check, name):
    assert told(verdict(check, change(gpus(), name, [2], device="cpu"))) == [(name, (2,), "on cpu", "on cuda:2", "")]


@pytest.mark.parametrize(("check", "name"), [(PARAM_HOME, MIDDLE), (BUFFER_HOME, ROTARY)])
def test_declared_offload_lives_on_the_cpu(check, name):
    evidence = declare(change(gpus(2), name, device="cpu"), offloaded=(name,))
    assert verdict(check, evidence).status == "passed"


def test_declared_offload_that_did_not_happen():
    found = verdict(PARAM_HOME, declare(gpus(2), offloaded=(MIDDLE,)))
    assert told(found) == [
        (MIDDLE, (0,), "on cuda:0", "on cpu", ""),
        (MIDDLE, (1,), "on cuda:1", "on cpu", ""),
    ]


@pytest.mark.parametrize(("check", "name", "by"), [(PARAM_HOME, MIDDLE, PARAMS), (BUFFER_HOME, ROTARY, BUFFERS)])
def test_what_is_on_meta_has_no_home_to_judge(check, name, by):
    found = verdict(check, change(gpus(2), name, **META))
    assert (found.status, found.findings, found.unjudged) == ("skipped", (), {by: (name,)})
    assert found.reason == left_out(by, name)


def test_several_condemned_tensors_are_counted():
    evidence = gpus(2)
    for name in (EMBEDDING, FROZEN, HEAD):
        evidence = change(evidence, name, [1], **META)
    evidence = change(evidence, MIDDLE, [0], device="cpu")
    found = verdict(PARAM_HOME, evidence)
    assert told(found) == [(MIDDLE, (0,), "on cpu", "on cuda:0", "")]
    assert (found.reason, found.unjudged) == ("", {PARAMS: (EMBEDDING, FROZEN, HEAD)})
    kept = verdict(PARAM_HOME, change(evidence, MIDDLE, [0], device="cuda:0"))
    assert (kept.status, kept.reason) == ("skipped", left_out(PARAMS, EMBEDDING, FROZEN, HEAD))


def test_what_two_checks_condemned_is_told_of_each():
    evidence = change(change(gpus(2), MIDDLE, device="meta"), EMBEDDING, [1], dtype="float16")
    assert verdict(PARAM_HOME, evidence).reason == (
        "kept by what could be judged; not judged: 1 tensor that same_manifest_on_every_rank condemned (first: "
        "embed.weight), 1 tensor that no_meta_params condemned (first: layers.0.weight)"
    )


def unequal(name: str, world: int = 2):
    """Healthy but for one tensor that is not the reference's."""
    return differ(healthy(world), name)


MANAGED = "managed_params_are_registered"


def managed(evidence, live=True):
    """fully_shard manages every parameter."""
    for tensor in evidence.inventory[0].tensors:
        if tensor.kind == "parameter":
            evidence = change(evidence, tensor.name, managed=live)
    return evidence


@pytest.mark.parametrize("world", [1, 2, 4])
def test_what_fsdp_manages_is_registered(world):
    assert verdict(MANAGED, managed(healthy(world))).status == "passed"
    assert verdict(MANAGED, change(managed(healthy(world)), MIDDLE, managed=None)).status == "passed"
    assert verdict(MANAGED, empty(world)).status == "passed"


def test_where_fsdp_manages_nothing():
    found = verdict(MANAGED, healthy())
    assert (found.status, found.reason) == ("skipped", "fully_shard manages no parameter of the model")


@pytest.mark.parametrize("ranks", [None, [1]])
def test_a_parameter_that_fsdp_does_not_know(ranks):
    evidence = change(managed(healthy()), MIDDLE, ranks, managed=False)
    found = verdict(MANAGED, evidence)
    assert told(found) == [
        (MIDDLE, tuple(ranks or (0, 1)), "a parameter that FSDP does not know", "the one that FSDP manages", "")
    ]
    assert found.findings[0].cause == (
        "the parameter was made anew after fully_shard() and a first forward: FSDP keeps the old one, and puts it back"
    )
    for later in ("dtensor_placements", "shards_tile_the_tensor", "params_equal_reference"):
        assert verdict(later, evidence).unjudged == {MANAGED: (MIDDLE,)}


def test_a_plain_parameter_in_place_of_a_managed_one():
    evidence = change(place(managed(healthy()), MIDDLE, {}), MIDDLE, managed=False)
    found = verdict(MANAGED, evidence)
    assert [(f.tensor, f.actual) for f in found.findings] == [(MIDDLE, "a plain parameter that FSDP does not know")]
    assert found.findings[0].cause.startswith("a plain parameter was put where fully_shard() had made a DTensor")
    assert verdict("nothing_left_unsharded", evidence).unjudged == {MANAGED: (MIDDLE,)}


def test_a_shard_in_place_of_a_managed_parameter_has_another_shape():
    evidence = change(place(managed(healthy()), MIDDLE, {}), MIDDLE, managed=False, shape=(3, 4), local_shape=(3, 4))
    assert verdict(MANAGED, evidence).unjudged == {"shapes_match_reference": (MIDDLE,)}
    (finding,) = verdict("shapes_match_reference", evidence).findings
    assert finding.cause == (
        "another parameter was put where fully_shard() had made a DTensor, perhaps of its local shard"
    )


def test_a_tie_that_came_apart_is_the_affair_of_the_ties():
    evidence = change(managed(healthy()), HEAD, managed=False, storage="its own", identity=7)
    assert verdict(MANAGED, evidence).status == "passed"
    assert [f.tensor for f in verdict("tied_weights_share_storage", evidence).findings] == [EMBEDDING]
    # Where both names have the same new parameter, the tie is kept.
    both = managed(healthy())
    for name in (HEAD, EMBEDDING):
        both = change(both, name, managed=False)
    assert [f.tensor for f in verdict(MANAGED, both).findings] == [EMBEDDING, HEAD]
    # And where nobody knows of a tie, nothing else would tell.
    alone = undeclared(evidence, "reference", "values", why="not declared")
    assert [f.tensor for f in verdict(MANAGED, alone).findings] == [HEAD]
