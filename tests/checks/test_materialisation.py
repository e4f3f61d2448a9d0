"""no_meta_*, no_uninitialized_memory, *_on_rank_device and managed_params_are_registered on hand-made evidence."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.checks.evidence_factory import (
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
    findings_of,
    healthy,
    left_out,
    on_ranks,
    place,
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
    assert findings_of(found) == [(name, ranks, "on meta", "materialised", "")]


@pytest.mark.parametrize(("check", "name"), [(PARAMS, ROTARY), (BUFFERS, MIDDLE)])
def test_each_kind_of_tensor_is_judged_by_one_check(check, name):
    assert verdict(check, change(healthy(), name, **META)).status == "passed"


def test_the_cause_of_a_tensor_on_meta_depends_on_its_kind():
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
    assert findings_of(found) == [
        (MIDDLE, (0, 1), "never written (poison value NaN)", "written by the loader", "5 of 12 elements")
    ]
    assert found.findings[0].cause == (
        "to_empty() or torch.empty() allocated it and nothing wrote to it: the checkpoint does not contain it, or the "
        "names differ"
    )


def test_an_unwritten_tensor_that_lost_its_tie_has_a_specific_cause():
    untied = change(unequal(HEAD), HEAD, nan=5, poisoned=5, storage="its own", identity=7)
    (finding,) = verdict(WRITTEN, untied).findings
    assert finding.cause == (
        f"it should be tied to {EMBEDDING}, which was written; to_empty() or separate FSDP groups broke the tie, and "
        "no checkpoint contains this copy"
    )
    assert "call tie_weights() again after to_empty()" in finding.remedy
    # If no name of the tie was written, the missing tie is not the cause.
    both = change(untied, EMBEDDING, nan=5, poisoned=5)
    assert all("the names differ" in finding.cause for finding in verdict(WRITTEN, both).findings)


def test_one_rank_uninitialised():
    found = verdict(WRITTEN, change(unequal(MIDDLE, world=4), MIDDLE, [1], nan=8, poisoned=8))
    assert findings_of(found) == [
        (MIDDLE, (1,), "never written (poison value NaN)", "written by the loader", "8 of 8 elements")
    ]


def test_a_non_persistent_buffer_has_a_specific_cause():
    (finding,) = verdict(WRITTEN, change(unequal(ROTARY), ROTARY, nan=2, poisoned=2)).findings
    assert finding.cause == (
        "it is a non-persistent buffer, so no checkpoint has it, and nothing recomputed it after to_empty()"
    )
    assert finding.remedy == "recompute it after to_empty(), as the module's __init__ does"


def test_an_integer_at_its_maximum():
    found = verdict(WRITTEN, change(unequal(COUNTER), COUNTER, poisoned=1))
    assert findings_of(found) == [
        (COUNTER, (0, 1), "never written (poison value int64 maximum)", "written by the loader", "1 of 1 elements")
    ]


@pytest.mark.parametrize(
    ("dtype", "poisoned", "status"),
    [("uint8", 3, "passed"), ("uint8", 12, "failed"), ("int8", 11, "passed"), ("int16", 1, "failed")],
)
def test_a_tensor_of_bytes_is_poisoned_only_if_all_elements_are(dtype, poisoned, status):
    evidence = change(unequal(MIDDLE), MIDDLE, dtype=dtype, poisoned=poisoned)
    assert verdict(WRITTEN, evidence).status == status


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
def test_an_empty_shard_of_bytes_is_not_poisoned(dtype):
    evidence = change(unequal(MIDDLE, world=4), MIDDLE, dtype=dtype)
    assert evidence.inventory[3].by_name[MIDDLE].numel == 0
    assert verdict(WRITTEN, evidence).status == "passed"


def test_a_poison_value_that_the_reference_has_too_is_a_value():
    evidence = change(healthy(), COUNTER, poisoned=1)
    assert verdict(WRITTEN, evidence).status == "passed"


def test_a_poison_value_is_a_value_only_on_ranks_that_equal_the_reference():
    evidence = change(differ(healthy(), COUNTER, [1]), COUNTER, poisoned=1)
    assert [finding.ranks for finding in verdict(WRITTEN, evidence).findings] == [(1,)]


def test_a_tensor_that_the_reference_never_writes_is_still_uninitialised():
    evidence = with_reference(change(healthy(), MIDDLE, nan=1, poisoned=1), uninitialised=(MIDDLE,))
    assert [finding.tensor for finding in verdict(WRITTEN, evidence).findings] == [MIDDLE]


def test_without_a_comparison_poison_values_are_findings():
    evidence = undeclared(change(healthy(), COUNTER, poisoned=1), "values", why="not declared")
    assert [finding.tensor for finding in verdict(WRITTEN, evidence).findings] == [COUNTER]


@pytest.mark.parametrize(("poisoned", "status"), [(1, "passed"), (11, "passed"), (12, "failed")])
@pytest.mark.parametrize("dtype", ["int64", "int32", "uint8"])
def test_without_a_comparison_single_integers_may_be_sentinels(dtype, poisoned, status):
    evidence = change(undeclared(healthy(), "values", why="not declared"), MIDDLE, dtype=dtype, poisoned=poisoned)
    evidence = undeclared(evidence, "reference", why="not declared")
    assert verdict(WRITTEN, evidence).status == status
    # A single NaN in a floating-point tensor suffices.
    assert verdict(WRITTEN, change(evidence, MIDDLE, dtype="float32", nan=poisoned)).status == "failed"


def test_an_integer_tensor_that_only_some_ranks_compared():
    evidence = change(unequal(MIDDLE), MIDDLE, dtype="int64", poisoned=1)
    evidence = change_reference(evidence, MIDDLE, dtype="int64")
    assert [finding.ranks for finding in verdict(WRITTEN, evidence).findings] == [(0, 1)]
    evidence = replace(evidence, values=(evidence.values[0], ()))
    assert [finding.ranks for finding in verdict(WRITTEN, evidence).findings] == [(0,)]


def test_an_extra_buffer_is_reported_once():
    evidence = add(healthy(), buffer("extra", nan=2, poisoned=2))
    assert [finding.tensor for finding in verdict("names_match_reference", evidence).findings] == ["extra"]
    found = verdict(WRITTEN, evidence)
    assert (found.status, found.reason) == ("skipped", left_out("names_match_reference", "extra"))


def test_a_tensor_that_differs_between_ranks_is_not_judged_again():
    evidence = change(unequal(MIDDLE), MIDDLE, [1], dtype="float16", nan=1, poisoned=1)
    found = verdict(WRITTEN, evidence)
    assert found.status == "skipped"
    assert found.reason == left_out("same_manifest_on_every_rank", MIDDLE)


def gpus(world: int = 4):
    """Return healthy evidence on GPUs, one per rank."""
    evidence = on_ranks(
        healthy(world), None, lambda rank: tuple(replace(t, device=f"cuda:{rank.rank}") for t in rank.tensors)
    )
    return replace(evidence, inventory=tuple(replace(r, device=f"cuda:{r.rank}") for r in evidence.inventory))


@pytest.mark.parametrize(("check", "name"), [(PARAM_HOME, MIDDLE), (BUFFER_HOME, ROTARY)])
def test_a_device_per_rank(check, name):
    assert verdict(check, gpus()).status == "passed"
    # All on the first GPU: right on rank 0 only; every other rank expects another device.
    assert findings_of(verdict(check, change(gpus(), name, device="cuda:0"))) == [
        (name, (1,), "on cuda:0", "on cuda:1", ""),
        (name, (2,), "on cuda:0", "on cuda:2", ""),
        (name, (3,), "on cuda:0", "on cuda:3", ""),
    ]


@pytest.mark.parametrize(("check", "name"), [(PARAM_HOME, MIDDLE), (BUFFER_HOME, COUNTER)])
def test_a_tensor_left_on_the_cpu_by_one_rank(check, name):
    assert findings_of(verdict(check, change(gpus(), name, [2], device="cpu"))) == [
        (name, (2,), "on cpu", "on cuda:2", "")
    ]


@pytest.mark.parametrize(("check", "name"), [(PARAM_HOME, MIDDLE), (BUFFER_HOME, ROTARY)])
def test_declared_offload_is_on_the_cpu(check, name):
    evidence = declare(change(gpus(2), name, device="cpu"), offloaded=(name,))
    assert verdict(check, evidence).status == "passed"


def test_declared_offload_that_did_not_happen():
    found = verdict(PARAM_HOME, declare(gpus(2), offloaded=(MIDDLE,)))
    assert findings_of(found) == [
        (MIDDLE, (0,), "on cuda:0", "on cpu", ""),
        (MIDDLE, (1,), "on cuda:1", "on cpu", ""),
    ]


@pytest.mark.parametrize(("check", "name", "by"), [(PARAM_HOME, MIDDLE, PARAMS), (BUFFER_HOME, ROTARY, BUFFERS)])
def test_a_tensor_on_meta_is_not_judged_for_its_device(check, name, by):
    found = verdict(check, change(gpus(2), name, **META))
    assert (found.status, found.findings, found.unjudged) == ("skipped", (), {by: (name,)})
    assert found.reason == left_out(by, name)


def test_several_tensors_that_already_failed_are_counted():
    evidence = gpus(2)
    for name in (EMBEDDING, FROZEN, HEAD):
        evidence = change(evidence, name, [1], **META)
    evidence = change(evidence, MIDDLE, [0], device="cpu")
    found = verdict(PARAM_HOME, evidence)
    assert findings_of(found) == [(MIDDLE, (0,), "on cpu", "on cuda:0", "")]
    assert (found.reason, found.unjudged) == ("", {PARAMS: (EMBEDDING, FROZEN, HEAD)})
    rest = verdict(PARAM_HOME, change(evidence, MIDDLE, [0], device="cuda:0"))
    assert (rest.status, rest.reason) == ("skipped", left_out(PARAMS, EMBEDDING, FROZEN, HEAD))


def test_tensors_that_failed_two_checks_are_listed_by_check():
    evidence = change(change(gpus(2), MIDDLE, device="meta"), EMBEDDING, [1], dtype="float16")
    assert verdict(PARAM_HOME, evidence).reason == (
        "passed for what could be checked; not checked: 1 tensor that already failed same_manifest_on_every_rank "
        "(first: embed.weight), 1 tensor that already failed no_meta_params (first: layers.0.weight)"
    )


def unequal(name: str, world: int = 2):
    """Return healthy evidence in which one tensor differs from the reference."""
    return differ(healthy(world), name)


MANAGED = "managed_params_are_registered"


def managed(evidence, live=True):
    """Let FSDP manage every parameter; ``live`` if modules register the managed objects."""
    for tensor in evidence.inventory[0].tensors:
        if tensor.kind == "parameter":
            evidence = change(evidence, tensor.name, managed=live)
    return evidence


@pytest.mark.parametrize("world", [1, 2, 4])
def test_managed_parameters_that_are_registered(world):
    assert verdict(MANAGED, managed(healthy(world))).status == "passed"
    assert verdict(MANAGED, change(managed(healthy(world)), MIDDLE, managed=None)).status == "passed"
    assert verdict(MANAGED, empty(world)).status == "passed"


def test_a_model_that_fsdp_does_not_manage():
    found = verdict(MANAGED, healthy())
    assert (found.status, found.reason) == ("skipped", "fully_shard() manages no parameter of the model")


@pytest.mark.parametrize("ranks", [None, [1]])
def test_a_parameter_that_fsdp_does_not_manage(ranks):
    evidence = change(managed(healthy()), MIDDLE, ranks, managed=False)
    found = verdict(MANAGED, evidence)
    assert findings_of(found) == [
        (MIDDLE, tuple(ranks or (0, 1)), "not the Parameter object that FSDP manages", "", "")
    ]
    assert found.findings[0].cause == (
        "the parameter was re-created after fully_shard() and a first forward; FSDP still holds the old one and "
        "restores it"
    )
    for later in ("dtensor_placements", "shards_tile_the_tensor", "params_equal_reference"):
        assert verdict(later, evidence).unjudged == {MANAGED: (MIDDLE,)}


def test_a_plain_parameter_in_place_of_a_managed_one():
    evidence = change(place(managed(healthy()), MIDDLE, {}), MIDDLE, managed=False)
    found = verdict(MANAGED, evidence)
    assert [(f.tensor, f.actual) for f in found.findings] == [
        (MIDDLE, "a plain parameter in place of the DTensor that FSDP manages")
    ]
    assert found.findings[0].cause.startswith(
        "the DTensor that fully_shard() created was replaced by a plain parameter"
    )
    assert verdict("nothing_left_unsharded", evidence).unjudged == {MANAGED: (MIDDLE,)}


def test_a_shard_in_place_of_a_managed_parameter_has_another_shape():
    evidence = change(place(managed(healthy()), MIDDLE, {}), MIDDLE, managed=False, shape=(3, 4), local_shape=(3, 4))
    assert verdict(MANAGED, evidence).unjudged == {"shapes_match_reference": (MIDDLE,)}
    (finding,) = verdict("shapes_match_reference", evidence).findings
    assert finding.cause == (
        "the DTensor that fully_shard() created was replaced by another parameter, perhaps by its local shard"
    )


def test_a_broken_tie_is_reported_by_tied_weights_share_storage():
    evidence = change(managed(healthy()), HEAD, managed=False, storage="its own", identity=7)
    assert verdict(MANAGED, evidence).status == "passed"
    assert [f.tensor for f in verdict("tied_weights_share_storage", evidence).findings] == [EMBEDDING]
    # If both names have the same new parameter, the tie is intact.
    both = managed(healthy())
    for name in (HEAD, EMBEDDING):
        both = change(both, name, managed=False)
    assert [f.tensor for f in verdict(MANAGED, both).findings] == [EMBEDDING, HEAD]
    # If no tie is known, this check reports the parameter.
    alone = undeclared(evidence, "reference", "values", why="not declared")
    assert [f.tensor for f in verdict(MANAGED, alone).findings] == [HEAD]
