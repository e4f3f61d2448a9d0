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
    change,
    change_reference,
    declare,
    differ,
    drop,
    findings_of,
    healthy,
    left_out,
    on_ranks,
    place,
    undeclared,
    verdict,
    with_reference,
)

PARAMS, WRITTEN = "no_meta_params", "no_uninitialized_memory"
PARAM_HOME, BUFFER_HOME = "params_on_rank_device", "buffers_on_rank_device"
META = {"device": "meta", "storage": None, "digest": None}


def unequal(name: str, world: int = 2):
    """Return healthy evidence in which one tensor differs from the reference."""
    return differ(healthy(world), name)


def gpus(world: int = 4):
    """Return healthy evidence on GPUs, one per rank."""
    evidence = on_ranks(
        healthy(world), None, lambda rank: tuple(replace(t, device=f"cuda:{rank.rank}") for t in rank.tensors)
    )
    return replace(evidence, inventory=tuple(replace(r, device=f"cuda:{r.rank}") for r in evidence.inventory))


@pytest.mark.parametrize("check", [PARAMS, PARAM_HOME])
def test_a_parameter_missing_on_one_rank_is_judged_where_it_is(check):
    evidence = drop(healthy(), MIDDLE, [0])
    status = {PARAMS: "passed", PARAM_HOME: "skipped"}
    assert verdict(check, evidence).status == status[check]


def test_a_drawn_tensor_that_was_never_written_is_in_no_checkpoint():
    evidence = declare(change(unequal(MIDDLE, 2), MIDDLE, nan=12, poisoned=12), drawn=(MIDDLE,))
    (finding,) = verdict(WRITTEN, evidence).findings
    assert finding.cause.startswith("it is declared drawn, and what draws it did not reach it: a slice or view")


def test_an_unwritten_tensor_that_lost_its_tie_has_a_specific_cause():
    untied = change(unequal(HEAD), HEAD, nan=5, poisoned=5, storage="its own", identity=7)
    (finding,) = verdict(WRITTEN, untied).findings
    assert finding.cause.startswith(f"it should be tied to {EMBEDDING}, which was written")
    assert "call tie_weights() again after to_empty()" in finding.remedy
    # If no name of the tie was written, the missing tie is not the cause.
    both = change(untied, EMBEDDING, nan=5, poisoned=5)
    assert all(finding.cause.startswith("a part of it was written") for finding in verdict(WRITTEN, both).findings)
    size = both.inventory[0].by_name[EMBEDDING].numel
    whole = change(change(both, HEAD, poisoned=size), EMBEDDING, poisoned=size)
    assert all("loading skips it" in finding.cause for finding in verdict(WRITTEN, whole).findings)


@pytest.mark.parametrize(
    ("dtype", "poisoned", "status"),
    [("uint8", 3, "passed"), ("uint8", 12, "failed"), ("int8", 11, "passed"), ("int16", 1, "failed")],
)
def test_a_tensor_of_bytes_is_poisoned_only_if_all_elements_are(dtype, poisoned, status):
    evidence = change(unequal(MIDDLE), MIDDLE, dtype=dtype, poisoned=poisoned)
    assert verdict(WRITTEN, evidence).status == status
    empty_shard = change(unequal(MIDDLE, world=4), MIDDLE, dtype=dtype)
    assert empty_shard.inventory[3].by_name[MIDDLE].numel == 0
    assert verdict(WRITTEN, empty_shard).status == "passed"


def test_a_poison_value_is_a_value_only_on_ranks_that_equal_the_reference():
    evidence = change(healthy(), COUNTER, poisoned=1)
    assert verdict(WRITTEN, evidence).status == "passed"
    assert [f.ranks for f in verdict(WRITTEN, differ(evidence, COUNTER, [1])).findings] == [(1,)]
    uncompared = undeclared(evidence, "values", why="not declared")
    assert [finding.tensor for finding in verdict(WRITTEN, uncompared).findings] == [COUNTER]
    # A tensor that the reference never writes is still uninitialised.
    evidence = with_reference(change(healthy(), MIDDLE, nan=1, poisoned=1), uninitialised=(MIDDLE,))
    assert [finding.tensor for finding in verdict(WRITTEN, evidence).findings] == [MIDDLE]


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


@pytest.mark.parametrize(("check", "name"), [(PARAM_HOME, MIDDLE), (BUFFER_HOME, ROTARY), (BUFFER_HOME, COUNTER)])
def test_a_device_per_rank(check, name):
    assert verdict(check, gpus()).status == "passed"
    # All on the first GPU: right on rank 0 only; every other rank expects another device.
    found = verdict(check, change(gpus(), name, device="cuda:0"))
    assert [(f.ranks, f.expected) for f in found.findings] == [((rank,), f"on cuda:{rank}") for rank in (1, 2, 3)]
    on_cpu = verdict(check, change(gpus(), name, [2], device="cpu"))
    assert findings_of(on_cpu) == [(name, (2,), "on cpu", "on cuda:2", "")]
    offloaded = declare(change(gpus(2), name, device="cpu"), offloaded=(name,))
    assert verdict(check, offloaded).status == "passed"


def test_declared_offload_that_did_not_happen():
    found = verdict(PARAM_HOME, declare(gpus(2), offloaded=(MIDDLE,)))
    assert findings_of(found) == [
        (MIDDLE, (0,), "on cuda:0", "on cpu", ""),
        (MIDDLE, (1,), "on cuda:1", "on cpu", ""),
    ]


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


def test_there_is_no_rest_if_every_tensor_already_failed():
    names = [tensor.name for tensor in gpus(2).inventory[0].tensors if tensor.kind == "parameter"]
    evidence = gpus(2)
    for name in names:
        evidence = change(evidence, name, [1], **META)
    assert verdict(PARAM_HOME, evidence).reason == left_out(PARAMS, *names, rest=False)


def test_tensors_that_failed_two_checks_are_listed_by_check():
    evidence = change(change(gpus(2), MIDDLE, device="meta"), EMBEDDING, [1], dtype="float16")
    assert verdict(PARAM_HOME, evidence).unjudged == {
        "same_manifest_on_every_rank": (EMBEDDING,),
        PARAMS: (MIDDLE,),
    }


MANAGED = "managed_params_are_registered"


def managed(evidence):
    """Let FSDP manage every parameter, of which modules register the managed objects."""
    for tensor in evidence.inventory[0].tensors:
        if tensor.kind == "parameter":
            evidence = change(evidence, tensor.name, managed=True)
    return evidence


def test_managed_parameters_that_are_registered():
    assert verdict(MANAGED, managed(healthy(4))).status == "passed"
    assert verdict(MANAGED, change(managed(healthy()), MIDDLE, managed=None)).status == "passed"
    found = verdict(MANAGED, healthy())
    assert (found.status, found.reason) == ("skipped", "fully_shard() manages no parameter of the model")


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
