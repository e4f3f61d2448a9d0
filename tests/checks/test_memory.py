"""shard_bytes_within_budget and load_peak_memory_bounded on hand-made evidence."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest

from pytest_fsdp_meta.checks.memory.facts import RankMemory
from tests.checks.evidence_factory import (
    EMBEDDING,
    HEAD,
    MIDDLE,
    ROTARY,
    change,
    declare,
    drop,
    empty,
    healthy,
    on_ranks,
    place,
    verdict,
)

KEPT, PEAK = "shard_bytes_within_budget", "load_peak_memory_bounded"
WIDTH = 4
BIG = {"a.weight": (4096, 16), "b.weight": (2048, 16), "c.weight": (1024, 16), "d.weight": (1024, 16)}
WHOLE = sum(map(prod, BIG.values())) * WIDTH


def stored(world=2, parameters=BIG, mesh=None):
    """Return healthy evidence in which each tensor has its own storage, tied ones share one."""
    evidence = healthy(world, mesh, parameters)

    def with_storage(tensor):
        own = tensor.numel * WIDTH
        return replace(tensor, width=WIDTH, backing=tensor.storage or tensor.name, backing_bytes=own)

    return on_ranks(evidence, None, lambda rank: tuple(map(with_storage, rank.tensors)))


def kept(evidence, name, size, ranks=None):
    return change(evidence, name, ranks, backing_bytes=size)


@pytest.mark.parametrize(
    "evidence",
    [
        stored(),
        stored(4),
        stored(parameters={**BIG, EMBEDDING: (8, 4), HEAD: (8, 4)}),  # tied
        stored(mesh={"dp_replicate": 2, "dp_shard": 2}),
        kept(stored(4), "a.weight", 0),  # a mapped file
        kept(stored(), "a.weight", 4096 * 16 * WIDTH // 2 + 4096),  # a little padding
        kept(stored(4, {"a.weight": (5, 1024)}), "a.weight", 2 * 1024 * WIDTH),  # padded by FSDP2, empty on the last
        kept(stored(parameters={**BIG, "s.weight": (2, 2)}), "s.weight", 512),  # alignment
        kept(stored(), ROTARY, 10**6),  # a buffer that is a view of a larger table
        kept(place(stored(), "a.weight", {}, shape=(4, 4)), "a.weight", 10**6),  # nothing_left_unsharded reports it
        change(kept(stored(), "a.weight", 4096 * 16 * WIDTH), "a.weight", sharded_by="megatron-fsdp"),  # flat, padded
    ],
)
def test_shards_that_explain_their_storage_pass(evidence):
    assert verdict(KEPT, evidence).status == "passed"


def test_small_excesses_of_many_shards_add_up():
    small = {f"layers.{number}.weight": (8, 8) for number in range(8)}
    evidence = stored(parameters=small)
    assert verdict(KEPT, kept(evidence, "layers.0.weight", 256)).status == "passed"
    for name in small:
        evidence = kept(evidence, name, 256)
    found = verdict(KEPT, evidence)
    assert [finding.tensor for finding in found.findings] == [*small]


def test_a_full_storage_on_one_rank():
    found = verdict(KEPT, kept(stored(4), "b.weight", 2048 * 16 * WIDTH, [2]))
    assert [(finding.tensor, finding.ranks) for finding in found.findings] == [("b.weight", (2,))]
    empty_shard = kept(stored(4, {"a.weight": (5, 1024)}), "a.weight", 5 * 1024 * WIDTH, [3])
    assert [(f.ranks, f.expected) for f in verdict(KEPT, empty_shard).findings] == [((3,), f"{2 * 1024 * WIDTH} bytes")]


def test_a_flat_buffer_of_several_shards():
    evidence = stored()
    names = list(BIG)
    for name in names:
        evidence = change(evidence, name, backing="flat", backing_bytes=WHOLE // 2 + 64)
    assert verdict(KEPT, evidence).status == "passed"
    for name in names:
        evidence = change(evidence, name, backing_bytes=WHOLE)
    found = verdict(KEPT, evidence)
    assert [finding.tensor for finding in found.findings] == names
    assert {f.actual for f in found.findings} == {
        f"a storage of {WHOLE} bytes behind its shard, shared with 3 more tensors"
    }


@pytest.mark.parametrize("evidence", [stored(1), empty(), stored(mesh={"dp_replicate": 2})])
def test_a_model_without_sharded_parameters(evidence):
    found = verdict(KEPT, evidence)
    assert (found.status, found.reason) == ("skipped", "no parameter is sharded")


def test_a_tensor_that_differs_between_ranks_is_not_judged_again():
    evidence = change(kept(stored(), "a.weight", 10**7), "a.weight", [1], dtype="bfloat16")
    assert verdict(KEPT, evidence).unjudged == {"same_manifest_on_every_rank": ("a.weight",)}


ELEMENTS, LARGEST = WHOLE // WIDTH, 4096 * 16 * WIDTH
LOADED = RankMemory(host=WHOLE // 2 + LARGEST, whole=4096 * 16)


def measured(*memory, world=4, **declared):
    """Return evidence of ranks with this memory while loading; the last of ``memory`` applies to all others."""
    ranks = [*memory, *[memory[-1]] * (world - len(memory))]
    return declare(replace(stored(world), memory=tuple(ranks)), **declared)


@pytest.mark.parametrize(
    "evidence",
    [
        measured(LOADED),
        measured(LOADED, world=2),
        measured(RankMemory(0)),
        measured(RankMemory(host=WHOLE + 64, whole=1024, beyond=64), world=2),  # two copies of its shards
        measured(RankMemory(host=0, device=3 * WHOLE)),  # of which an optimizer may have most
        measured(RankMemory(host=3 * WHOLE, whole=1024, beyond=2 * LARGEST), LOADED),
        measured(RankMemory(host=WHOLE, whole=ELEMENTS), LOADED, whole_while_loading=(0,)),
    ],
)
def test_a_few_tensors_at_a_time_pass(evidence):
    assert verdict(PEAK, evidence).status == "passed"


@pytest.mark.parametrize(
    "held",
    [
        RankMemory(host=WHOLE, whole=ELEMENTS),
        RankMemory(host=WHOLE, whole=ELEMENTS - 1024),  # except for a tiny part
        RankMemory(host=2 * WHOLE, whole=0, beyond=WHOLE // 4 + 4 * LARGEST),  # in pieces of other sizes
        RankMemory(host=0, whole=ELEMENTS, device=WHOLE),
    ],
)
def test_one_rank_holds_the_whole_model(held):
    [finding] = verdict(PEAK, measured(LOADED, held, LOADED)).findings
    assert finding.ranks == (1,)


def test_another_rank_than_declared():
    evidence = measured(RankMemory(host=WHOLE, whole=ELEMENTS), whole_while_loading=(0,))
    assert [finding.ranks for finding in verdict(PEAK, evidence).findings] == [(1, 2, 3)]


@pytest.mark.parametrize(
    ("memory", "declared", "suggested"),
    [
        ([RankMemory(host=WHOLE, whole=ELEMENTS)], (), "True"),
        ([RankMemory(host=WHOLE, whole=ELEMENTS)], (0,), "True"),
        ([LOADED, RankMemory(host=WHOLE, whole=ELEMENTS), LOADED], (), "(1,)"),
        ([LOADED, RankMemory(host=WHOLE, whole=ELEMENTS), LOADED], (0,), "(0, 1)"),
    ],
)
def test_the_remedy_names_the_ranks_that_hold_the_model(memory, declared, suggested):
    [finding] = verdict(PEAK, measured(*memory, whole_while_loading=declared)).findings
    assert finding.remedy.endswith(f"Subject(whole_while_loading={suggested})")


def test_memory_that_may_be_copies_of_shards_is_not_judged():
    found = verdict(PEAK, measured(RankMemory(host=WHOLE, beyond=3 * LARGEST + 1), LOADED, world=2))
    assert found.why == "differs"
    assert found.reason.startswith("on rank 0, as many bytes as the model has were alive at a time")


KEEPS = "every rank keeps nearly all of the model, so every rank has to hold it while loading"


@pytest.mark.parametrize(
    ("evidence", "reason"),
    [
        (measured(RankMemory(host=WHOLE, whole=ELEMENTS), world=1), KEEPS),
        (replace(stored(mesh={"dp_replicate": 2}), memory=(RankMemory(WHOLE, ELEMENTS),) * 2), KEEPS),
        (replace(empty(), memory=(RankMemory(0),) * 2), KEEPS),
        (
            measured(RankMemory(host=WHOLE, whole=ELEMENTS), whole_while_loading=(0, 1, 2, 3)),
            "Subject(whole_while_loading=...) allows every rank to hold the whole model",
        ),
        (
            replace(stored(2, {"a.weight": (1, 1)}), memory=(RankMemory(4, whole=1),) * 2),
            "the model has one or two large tensors or less than 2048 bytes, so reading it holds it whole",
        ),
    ],
)
def test_models_and_declarations_that_are_not_judged(evidence, reason):
    assert (verdict(PEAK, evidence).status, verdict(PEAK, evidence).reason) == ("skipped", reason)


def test_each_rank_is_judged_by_its_own_tensors():
    assert verdict(PEAK, drop(measured(LOADED), "d.weight", [3])).status == "passed"
    assert verdict(PEAK, change(measured(LOADED), MIDDLE, [0], dtype="bfloat16")).status == "passed"
