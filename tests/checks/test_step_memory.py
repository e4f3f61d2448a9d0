"""step_memory_bounded on hand-made evidence."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_fsdp_meta.checks.memory.facts import GatheredGroup, StepMemory
from pytest_fsdp_meta.checks.training.facts import Accumulation
from tests.checks.evidence_factory import (
    KEPT,
    change,
    declare,
    healthy,
    on_ranks,
    on_runs,
    place,
    undeclared,
    verdict,
    with_reference,
)

BOUNDED = "step_memory_bounded"
BLOCKS = {f"layers.{index}.mlp.{kind}": (16, 4) for index in range(3) for kind in ("up", "down")}
NET = {"embed.weight": (16, 4), **BLOCKS, "head.weight": (16, 4)}
ALL = tuple(NET)


def gathering(*groups: tuple[str, ...], parameters=NET, ranks=2):
    """Return evidence of a model whose parameters FSDP2 gathers in these groups."""
    memory = StepMemory(KEPT // 2, groups=tuple(GatheredGroup(names, ranks) for names in groups))
    sized = on_ranks(healthy(parameters=parameters), None, lambda r: tuple(replace(t, width=4) for t in r.tensors))
    return on_runs(sized, None, memory=memory)


def block(index: int) -> tuple[str, ...]:
    return tuple(name for name in BLOCKS if f".{index}." in name)


def keeping(kept: int | None, ranks=None, world: int = 2, **modules: int):
    return on_runs(healthy(world), ranks, memory=StepMemory(kept, modules=modules))


@pytest.mark.parametrize(
    "groups",
    [
        [("embed.weight", "head.weight"), *map(block, range(3))],
        [("embed.weight", "head.weight", *block(2)), block(0), block(1)],
        [("embed.weight", "head.weight"), block(0) + block(1), block(2)],
    ],
    ids=["a group per block", "the last block in the root", "two blocks together"],
)
def test_fewer_than_all_blocks_at_a_time(groups):
    assert verdict(BOUNDED, gathering(*groups)).status == "passed"


def test_all_blocks_of_an_encoder_and_a_decoder():
    """Each is less than half of what the ranks share."""
    sides = {f"{side}.{index}.mlp.up": (16, 4) for side in ("encoder", "decoder") for index in range(2)}
    parameters = {"embed.weight": (16, 4), **sides}
    found = verdict(BOUNDED, gathering(tuple(parameters), parameters=parameters))
    assert [side in f.actual for f, side in zip(found.findings, ("encoder", "decoder"), strict=True)] == [True, True]


def test_all_blocks_of_a_model_whose_name_has_a_digit():
    parameters = {f"wav2vec2.encoder.layers.{index}.mlp.up": (16, 4) for index in range(2)}
    found = verdict(BOUNDED, gathering(tuple(parameters), parameters=parameters))
    assert "all 2 blocks of wav2vec2.encoder.layers at once" in found.findings[0].actual


def test_blocks_of_one_kind_that_are_left_to_the_root():
    """A wrapping policy has the name of the dense block only; the sparse ones are larger."""
    sparse = {f"layers.{index}.experts.{kind}": (64, 4) for index in (1, 3) for kind in ("up", "down")}
    dense = {f"layers.{index}.mlp.up": (16, 4) for index in (0, 2)}
    groups = [("embed.weight", *sparse), *((name,) for name in dense)]
    found = verdict(BOUNDED, gathering(*groups, parameters={"embed.weight": (16, 4), **sparse, **dense}))
    assert ["all 2 blocks of layers at once: 4096 of the 4864 bytes" in f.actual for f in found.findings] == [True]


@pytest.mark.parametrize(
    "parameters",
    [
        {"layers.0.mlp.up": (16, 4), "embed.weight": (4, 4)},
        {"layers.0.experts.0.up": (16, 4), "layers.0.experts.1.up": (16, 4)},
        {"0.weight": (16, 4), "2.weight": (16, 4)},
        {"layers.0.mlp.up": (16, 4), "layers.1.mlp.up": (8, 4)},
        {"layers.0.mlp.up": (2, 4), "layers.1.mlp.up": (2, 4), "embed.weight": (64, 4)},
    ],
    ids=["one block", "experts of one block", "bare layers", "unequal blocks", "mostly an embedding"],
)
def test_models_without_large_repeated_blocks_may_be_one_group(parameters):
    assert verdict(BOUNDED, gathering(tuple(parameters), parameters=parameters)).status == "passed"


def test_groups_that_may_have_all_blocks():
    shared = gathering(ALL)
    for index in range(3):
        shared = change(shared, f"layers.{index}.mlp.up", storage="shared", identity=7)
    assert verdict(BOUNDED, shared).status == "passed"
    assert verdict(BOUNDED, gathering(ALL, ranks=1)).status == "passed", "no ranks share it"
    adapters = {f"layers.{index}.q.lora.{half}": (4, 4) for index in range(3) for half in ("up", "down")}
    assert verdict(BOUNDED, gathering(tuple(adapters), parameters={**NET, **adapters})).status == "passed"


def test_each_rank_is_compared_with_the_reference_for_its_own_rows():
    """Rows without padding have unequal lengths."""
    short, long = StepMemory(KEPT // 8), StepMemory(KEPT)
    evidence = with_reference(keeping(KEPT, [1]), memory=(short, long))
    assert [finding.ranks for finding in verdict(BOUNDED, evidence).findings] == [(0,)]
    assert verdict(BOUNDED, on_runs(evidence, [0], memory=short)).status == "passed"


def test_some_more_is_no_finding():
    assert verdict(BOUNDED, keeping(KEPT // 4 * 3, world=2)).status == "passed"
    assert verdict(BOUNDED, keeping(KEPT // 4 * 3 + 4097, world=2)).status == "failed"


def test_ranks_with_experts_may_get_the_tokens_of_all():
    evidence = keeping(KEPT, world=4)
    assert verdict(BOUNDED, evidence).status == "failed"
    ranks = tuple(
        replace(rank, tensors=tuple(t for t in rank.tensors if t.name != "layers.0.weight" or rank.rank))
        for rank in evidence.inventory
    )
    declared = replace(declare(evidence, on_some_ranks=("layers.0.weight",)), inventory=ranks)
    assert verdict(BOUNDED, declared).status == "passed"
    assert verdict(BOUNDED, place(evidence, "layers.0.weight", {"ep": 4}, "S(0)")).status == "passed"


def test_without_a_reference_groups_are_still_judged():
    evidence = undeclared(gathering(ALL), "reference", "values", "verifier", why="not declared")
    assert verdict(BOUNDED, evidence).status == "failed"
    assert "no reference was trained" in verdict(BOUNDED, undeclared(healthy(), "reference", why="no")).reason
    few = on_runs(with_reference(healthy(), memory=()), None, accumulation=Accumulation(problem="'x' has 6 rows"))
    assert verdict(BOUNDED, few).reason.endswith(" to be compared with: batch(0): 'x' has 6 rows; give it more rows")
    found = verdict(BOUNDED, on_runs(healthy(), None, memory=StepMemory(None, problem="no hooks")))
    assert found.status == "skipped"
    assert "what backward keeps is not compared: no hooks" in found.reason


def test_ranks_that_keep_what_the_reference_does_not_keep_at_all():
    """Where the reference offloads its activations."""
    found = verdict(BOUNDED, with_reference(keeping(KEPT), memory=(StepMemory(0),) * 2))
    assert found.findings[0].expected == "at most 1.5 times the 0 bytes that the reference keeps for the same rows"
    assert verdict(BOUNDED, with_reference(keeping(0), memory=(StepMemory(0),) * 2)).status == "passed"
