"""Test which indices a rank holds, compared with torch.chunk and with the shards of FSDP2 and DTensor."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from pytest_fsdp_meta.checks.structure.facts import regions
from pytest_fsdp_meta.ranks.adapters.dtensor import held_regions
from pytest_fsdp_meta.ranks.reference_record import global_index
from pytest_fsdp_meta.worlds import World, WorldSpec, current


def indices(held) -> list[list[int]]:
    return [[index for start, stop in runs for index in range(start, stop)] for runs in held]


def everywhere(shape, shards, mesh):
    """Return the regions of every coordinate of the mesh."""
    return [regions(shape, shards, mesh, coordinate) for coordinate in product(*(range(size) for size in mesh))]


@pytest.mark.parametrize(
    ("shape", "shards", "mesh", "coordinate", "held"),
    [
        ((), (), (), (), ()),
        ((4, 3), (), (), (), (((0, 4),), ((0, 3),))),
        ((4, 0), (), (), (), (((0, 4),), ())),
        ((4, 3), [None], [2], [1], (((0, 4),), ((0, 3),))),
        ((), [None], [2], [1], ()),
        ((4, 6), [(0, 1), (1, 1)], [2, 3], [1, 2], (((2, 4),), ((4, 6),))),
        ((8,), [(0, 1), (0, 1)], [2, 2], [0, 1], (((2, 4),),)),
        # FSDP2 over tensor parallelism splits each tensor-parallel half again, so a rank of dp holds two runs.
        ((8,), [(0, 2), None], [2, 2], [0, 0], (((0, 2), (4, 6)),)),
        ((8,), [(0, 2), (0, 1)], [2, 2], [0, 1], (((4, 6),),)),
        ((7,), [(0, 2), (0, 1)], [2, 2], [1, 1], (((6, 7),),)),
        ((3,), [(0, 2), (0, 1)], [2, 2], [1, 1], ((),)),
        ((8,), [(0, 2)], [1], [0], (((0, 8),),)),
    ],
)
def test_regions_worked_out_by_hand(shape, shards, mesh, coordinate, held):
    assert regions(shape, shards, mesh, coordinate) == held


@given(size=st.integers(0, 40), ranks=st.integers(1, 9))
def test_an_ordinary_shard_equals_torch_chunk(size, ranks):
    chunks = [chunk.tolist() for chunk in torch.arange(size).chunk(ranks)] if size else []
    chunks += [[]] * (ranks - len(chunks))
    assert [indices(held)[0] for held in everywhere((size,), [(0, 1)], (ranks,))] == chunks


@given(size=st.integers(0, 60), dp=st.integers(1, 5), tp=st.integers(1, 5))
def test_a_strided_shard_is_a_shard_of_the_tensor_parallel_shard(size, dp, tp):
    def chunk(values: list[int], count: int, index: int) -> list[int]:
        step = -(-len(values) // count)
        return values[index * step : (index + 1) * step]

    right_to_left = [
        chunk(chunk(list(range(size)), tp, column), dp, row) for row, column in product(range(dp), range(tp))
    ]
    assert [indices(held)[0] for held in everywhere((size,), [(0, tp), (0, 1)], (dp, tp))] == right_to_left


shards = st.one_of(st.none(), st.tuples(st.integers(0, 1), st.just(1)))


@given(
    shape=st.tuples(st.integers(0, 12), st.integers(0, 12)),
    plan=st.lists(st.tuples(st.integers(1, 4), shards), max_size=3),
)
def test_the_shards_of_all_ranks_cover_the_tensor_once_per_replica(shape, plan):
    mesh, shards = [size for size, _ in plan], [shard for _, shard in plan]
    replicas = prod(size for size, shard in plan if shard is None)
    seen = [index for held in everywhere(shape, shards, mesh) for index in product(*indices(held))]
    assert sorted(seen) == sorted(list(product(*map(range, shape))) * replicas)


@given(size=st.integers(1, 60), dp=st.integers(1, 5), tp=st.integers(1, 5))
def test_runs_are_ordered_disjoint_and_not_empty(size, dp, tp):
    for held in everywhere((size,), [(0, tp), None], (dp, tp)):
        flat = [edge for run in held[0] for edge in run]
        assert flat == sorted(set(flat))


def test_a_local_index_maps_to_the_global_tensor():
    held = regions((8, 6), [(0, 2), (1, 1)], (2, 2), (1, 1))
    assert held == (((2, 4), (6, 8)), ((3, 6),))
    assert [global_index(held, (row, 0)) for row in range(4)] == [(2, 3), (3, 3), (6, 3), (7, 3)]
    assert global_index((), ()) == ()


WRONGLY_WHOLE = (2, 6) if torch.__version__ < (2, 11) else ()
"""Rows of column-wise weights whose full_tensor() of torch 2.9 has rows of zeros: some ranks have fewer than others."""


def hold_what_torch_holds(shapes):
    """Shard many layers on a rank; return where ``held_regions`` and the local shard differ, and what was checked."""
    me = current()
    wrong, seen = [], set()

    def check(case, tensor, whole):
        local, full = tensor.to_local().detach(), tensor.full_tensor().detach()
        held = indices(held_regions(tensor))
        implied = whole
        for dim, chosen in enumerate(held):
            implied = implied.index_select(dim, torch.tensor(chosen, dtype=torch.long))
        if style == "colwise" and rows in WRONGLY_WHOLE:
            full = whole
        seen.add((case[0], tuple(str(placement) for placement in tensor.placements)))
        if not torch.equal(implied, local) or not torch.equal(full, whole):
            wrong.append((case, me.rank, tuple(tensor.placements), held, local.tolist(), full.tolist()))

    def numbered(*shape):
        return torch.arange(prod(shape), dtype=torch.float32).reshape(shape)

    for rows, columns in shapes:
        for style, plan in (("colwise", ColwiseParallel()), ("rowwise", RowwiseParallel()), ("plain", None)):
            layer = nn.Linear(columns, rows)
            weight, bias = numbered(rows, columns), numbered(rows)
            with torch.no_grad():
                layer.weight.copy_(weight)
                layer.bias.copy_(bias)
            model = nn.Sequential(layer)
            if plan is not None:
                parallelize_module(model, me.mesh["tp"], {"0": plan})
            fully_shard(model, mesh=me.mesh["dp"])
            check((style, rows, columns), layer.weight, weight)
            check((style, rows, columns), layer.bias, bias)
    return wrong, seen


def test_regions_match_torch_in_a_world_of_four():
    # With fewer columns than ranks, full_tensor() of a row-wise weight never returns (gloo, torch 2.13).
    shapes = [(8, 8), (7, 5), (5, 3), (3, 9), (2, 2), (1, 2), (6, 4), (13, 2)]
    with World(WorldSpec({"dp": 2, "tp": 2}, timeout=15)) as world:
        answers = world.run(hold_what_torch_holds, shapes)
    assert [wrong for wrong, _ in answers] == [[], [], [], []]
    seen = answers[0][1]
    # The placements that make the comparison worthwhile: strided shards, and FSDP2 over row-wise and plain layers.
    assert ("colwise", ("_S(0, 2)", "S(0)")) in seen
    assert ("rowwise", ("S(0)", "S(1)")) in seen
    assert ("plain", ("S(0)",)) in seen


def embedding(rows):
    model = nn.Embedding(rows, 1)
    model.weight.data.copy_(torch.arange(rows).unsqueeze(1))
    return fully_shard(model, mesh=current().mesh).weight


def column_parallel(rows):
    layer = nn.Linear(1, rows, bias=False)
    layer.weight.data.copy_(torch.arange(rows).unsqueeze(1))
    parallelize_module(nn.Sequential(layer), current().mesh["tp"], {"0": ColwiseParallel()})
    return fully_shard(layer, mesh=current().mesh["dp"]).weight


def hold_rows(make, rows):
    """Return the rows of a weight that this rank holds by its regions, and by its numbers."""
    weight = make(rows)
    return indices(held_regions(weight))[0], weight.to_local().flatten().int().tolist()


@pytest.mark.parametrize(
    ("mesh", "make", "expected"),
    [
        (
            {"dp_shard": 4},
            embedding,
            {
                5: [[0, 1], [2, 3], [4], []],
                1: [[0], [], [], []],
                4: [[0], [1], [2], [3]],
                2: [[0], [1], [], []],
                9: [[0, 1, 2], [3, 4, 5], [6, 7, 8], []],
            },
        ),
        ({"dp_replicate": 2, "dp_shard": 2}, embedding, {5: [[0, 1, 2], [3, 4], [0, 1, 2], [3, 4]]}),
        # Reading (_S(0, 2), S(0)) from left to right would give row 6 to rank 4, and nothing to rank 5.
        ({"dp": 3, "tp": 2}, column_parallel, {7: [[0, 1], [4], [2, 3], [5], [], [6]]}),
    ],
    ids=["uneven", "hybrid", "over tensor parallelism"],
)
def test_the_rows_that_each_rank_holds(mesh, make, expected):
    with World(WorldSpec(mesh, timeout=30)) as world:
        for rows, held in expected.items():
            assert world.run(hold_rows, make, rows) == [(own, own) for own in held]
        assert all(held == local for held, local in world.run(hold_rows, make, 49))
