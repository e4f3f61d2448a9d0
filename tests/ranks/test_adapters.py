"""Test the parts of tensors that adapters describe: their arithmetic, their checks, and what judges make of them."""

from __future__ import annotations

import enum
import itertools
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import SGD

from pytest_fsdp_meta import Part, Subject, SubjectError
from pytest_fsdp_meta.catalogue import Selection, judge
from pytest_fsdp_meta.checks.structure.facts import boxes
from pytest_fsdp_meta.checks.training.observe.first_batch_again import accumulate, micro_batches
from pytest_fsdp_meta.checks.values.observe import compare
from pytest_fsdp_meta.evidence import Comparison, MeshFacts
from pytest_fsdp_meta.loader.adapter import PartError
from pytest_fsdp_meta.ranks import modes
from pytest_fsdp_meta.ranks.adapters.dtensor import mesh_facts
from pytest_fsdp_meta.ranks.adapters.lookup import Parts, parts_of, remember
from pytest_fsdp_meta.ranks.inventory import tensor_facts
from pytest_fsdp_meta.ranks.reference_record import Record, write_record
from pytest_fsdp_meta.worlds import CallFailed, current
from tests.checks.evidence_factory import CATALOGUE, MIDDLE, change, differ, drew, healthy, verdict
from tests.world_help import world_of

SHAPES = [(), (1,), (7,), (2, 3), (3, 1), (1, 5), (2, 3, 4), (3, 2, 1, 2), (2, 0, 3)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_boxes_cover_every_run_of_elements_in_order(shape):
    numbers = torch.arange(prod(shape)).reshape(shape)
    for first, last in itertools.combinations(range(numbers.numel() + 1), 2):
        read = [numbers[tuple(slice(*span) for span in box)].reshape(-1) for box in boxes(shape, first, last)]
        assert torch.cat(read).tolist() == list(range(first, last))
    assert boxes(shape, 0, 0) == []


def test_a_long_run_needs_few_boxes():
    assert boxes((1000, 1000), 500, 998_500) == [
        ((0, 1), (500, 1000)),
        ((1, 998), (0, 1000)),
        ((998, 999), (0, 500)),
    ]


@pytest.fixture
def reference(tmp_path):
    """Return a record of the tensors ``a`` (4 x 3: 0 to 11) and ``scalar``."""
    path = tmp_path / "values.safetensors"
    write_record(path, [("a", torch.arange(12.0).reshape(4, 3)), ("scalar", torch.tensor(5.0))])
    return Record(path)


WHOLE = torch.arange(12.0).reshape(4, 3)
ODD_RUN = torch.tensor([4.0, 5.0, 6.0, -1.0, 8.0])
"""A run whose element 7, of row 2 and column 1, is wrong."""
TWO_ROWS = [(0, 1), (2, 3)]
TURNED = {"equal": False, "differing": 6}


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        (Part.run(torch.arange(4.0, 9.0), (4, 3), 4), {"equal": True, "elements": 5}),
        (
            Part.run(ODD_RUN, (4, 3), 4),
            {"equal": False, "differing": 1, "index": (2, 1), "actual": -1.0, "expected": 7.0},
        ),
        (Part.run(torch.empty(0), (4, 3), 12), {"equal": True, "elements": 0}),
        (Part.run(torch.zeros(3), (3, 4), 0), {"problem": "shape (3, 4)", "should_be": "(4, 3), as in the reference"}),
        (Part.blocks(WHOLE[[0, 2]], (4, 3), TWO_ROWS), {"equal": True, "elements": 6}),
        (Part.blocks(WHOLE[[2, 0]], (4, 3), TWO_ROWS), {**TURNED, "index": (0, 0)}),
        (Part.blocks(WHOLE[[2, 0]], (4, 3), TWO_ROWS[::-1]), {"equal": True}),
        (Part.blocks(WHOLE[:, [0, 2]], (4, 3), TWO_ROWS, 1), {"equal": True}),
        (Part.blocks(WHOLE[:, [0, 2]], (4, 3), TWO_ROWS, -1), {"equal": True}),
        (Part.blocks(WHOLE[:0], (4, 3), []), {"equal": True, "elements": 0}),
        (Part.block(WHOLE[2:], (4, 3), (2, 0)), {"equal": True, "elements": 6}),
        (Part.block(WHOLE[2:], (4, 3), (1, 0)), {**TURNED, "index": (1, 0), "expected": 3.0}),
        (Part.block(torch.empty(0, 3), (4, 3), (4, 0)), {"equal": True, "elements": 0}),
        (Part(torch.zeros(2, 3), (4, 3), (((0, 1),), ((0, 3),)), by="hand"), {"should_be": "(1, 3), as hand says"}),
    ],
)
def test_a_part_is_compared_with_the_same_elements(reference, part, expected):
    found = compare("a", part, reference, "a")
    assert {name: getattr(found, name) for name in expected} == expected
    if found.equal:
        assert found == Comparison("a", True, elements=part.local.numel())


def test_the_regions_of_blocks():
    assert Part.blocks(WHOLE[[0, 2]], (4, 3), TWO_ROWS).regions == (((0, 1), (2, 3)), ((0, 3),))
    assert Part.blocks(WHOLE[1:], (4, 3), [(1, 2), (2, 4)]).regions == Part.block(WHOLE[1:], (4, 3), (1, 0)).regions


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ranges": [(0, 1), (3, 5)]}, "(3, 5) in ranges should be (start, stop) within 0 to 4"),
        ({"ranges": [(2, 1)]}, "(2, 1) in ranges should be (start, stop) within 0 to 4"),
        ({"ranges": [(0, 1, 2)]}, "(0, 1, 2) in ranges should be (start, stop) within 0 to 4"),
        ({"ranges": [2]}, "ranges=2 should be a tuple of integers, one for each dim"),
        ({"ranges": [(1, 3), (0, 2)]}, "ranges=[(1, 3), (0, 2)] overlap"),
        (
            {"ranges": [(0, 3)]},
            "ranges=[(0, 3)] of dim 0 make a block of (3, 3), but the local tensor has (2, 3)",
        ),
        ({"shape": (4,)}, "shape=(4,) and dim=0 should fit the 2 dims of the local (2, 3)"),
        ({"dim": 2}, "shape=(4, 3) and dim=2 should fit the 2 dims of the local (2, 3)"),
    ],
)
def test_wrong_blocks(fields, message):
    with pytest.raises(PartError) as caught:
        Part.blocks(torch.zeros(2, 3), **{"shape": (4, 3), "ranges": [(0, 1), (2, 3)], **fields})
    assert str(caught.value) == message
    assert isinstance(caught.value, ValueError)


def shard_of_blocks() -> tuple[object, ...]:
    """Return the regions and elements of this rank's shard of rows 0, 1, 4 and 5 of eight."""
    model = nn.Module()
    local = torch.tensor([[0.0], [1.0], [4.0], [5.0], [6.0]])
    model.weight = nn.Parameter(distribute_tensor(local, current().mesh, [Shard(0)]))
    remember(model, lambda name, tensor: Part.blocks(tensor, (8, 1), [(0, 2), (4, 7)]))
    part = parts_of(model).of("weight", model.weight)
    return part.regions, part.local.flatten().tolist()


def test_this_ranks_shard_of_a_dtensor_that_holds_blocks():
    with world_of(2) as ranks:
        assert ranks.run(shard_of_blocks) == [
            ((((0, 2), (4, 5)), ((0, 1),)), [0.0, 1.0, 4.0]),
            ((((5, 7),), ((0, 1),)), [5.0, 6.0]),
        ]


def test_a_run_of_a_scalar_is_whole(reference):
    part = Part.run(torch.tensor(5.0), (), 0)
    assert compare("scalar", part, reference, "scalar").equal
    assert tensor_facts("scalar", "parameter", part.local, part, persistent=True, attributes=()).whole


def test_an_empty_run_is_read_as_an_empty_tensor(reference):
    assert [tuple(reference.read_run(name, ()).shape) for name in ("a", "scalar")] == [(0,), (0,)]


def test_facts_of_a_run():
    part = Part.run(torch.zeros(5), (4, 3), 4, by="FSDP1")
    facts = tensor_facts("a", "parameter", part.local, part, persistent=True, attributes=())
    assert (facts.shape, facts.extent, facts.local_shape, facts.regions) == ((4, 3), (12,), (5,), (((4, 9),),))
    assert (facts.flat, facts.whole, facts.sharded_by, facts.placements) == (True, False, "FSDP1", None)


def test_facts_of_a_plain_tensor():
    facts = tensor_facts("a", "parameter", torch.zeros(2, 3), persistent=True, attributes=())
    assert (facts.extent, facts.flat, facts.whole, facts.sharded_by) == ((2, 3), False, True, "")


def halves(name, tensor):
    return Part.block(tensor, (4, 3), (2, 0), by="hand") if name == "experts.weight" else None


@pytest.fixture
def model():
    model = nn.Module()
    model.experts = nn.Linear(3, 2, bias=False)
    model.norm = nn.Linear(2, 2, bias=False)
    return model


def test_tensors_that_the_adapter_does_not_know_are_plain(model):
    remember(model, halves)
    parts = parts_of(model)
    experts = parts.of("experts.weight", model.experts.weight)
    assert (experts.shape, experts.regions, experts.by) == ((4, 3), (((2, 4),), ((0, 3),)), "hand")
    assert not experts.local.requires_grad
    norm = parts.of("norm.weight", model.norm.weight)
    assert (norm.shape, norm.regions, norm.by) == ((2, 2), (((0, 2),), ((0, 2),)), "")


def test_a_gradient_has_the_regions_of_its_parameter(model):
    remember(model, halves)
    parts = parts_of(model)
    assert parts.gradient("experts.weight", model.experts.weight) is None
    model.experts.weight.grad = torch.ones(2, 3)
    model.norm.weight.grad = torch.ones(2, 2)
    gradient = parts.gradient("experts.weight", model.experts.weight)
    assert (gradient.shape, gradient.regions, gradient.local.tolist()) == (
        (4, 3), (((2, 4),), ((0, 3),)), [[1.0] * 3] * 2,
    )  # fmt: skip
    assert parts.gradient("norm.weight", model.norm.weight).shape == (2, 2)


def test_an_adapter_may_return_the_gradient(model):
    own = torch.full((2, 3), 7.0)
    parts = Parts([lambda name, tensor: Part(tensor, (4, 3), (((2, 4),), ((0, 3),)), gradient=own)])
    assert parts.gradient("experts.weight", model.experts.weight).local.tolist() == own.tolist()


def test_an_adapter_must_return_a_part_or_none(model):
    remember(model, lambda name, tensor: (2, 0))
    parts = parts_of(model)
    with pytest.raises(SubjectError, match=r"returned tuple for 'norm.weight', but should return .*\.Part"):
        parts.of("norm.weight", model.norm.weight)


def test_an_adapter_that_raises_is_named(model):
    remember(model, lambda name, tensor: 1 // 0)
    parts = parts_of(model)
    with pytest.raises(CallFailed, match=r"Subject\(adapter=\.\.\.\), adapter\('norm.weight', \.\.\.\)"):
        parts.of("norm.weight", model.norm.weight)


def refusal(model, make, ask="of"):
    """Return the error for ``make(weight)`` as the part of ``norm.weight``, which is 2 x 2."""
    remember(model, lambda name, tensor: make(tensor))
    with pytest.raises(SubjectError) as refused:
        getattr(parts_of(model), ask)("norm.weight", model.norm.weight)
    message = str(refused.value)
    assert message.startswith("Subject(adapter=...): 'norm.weight': ")
    assert "\n" not in message
    return message.removeprefix("Subject(adapter=...): 'norm.weight': ")


RUNS = (((0, 2),), ((0, 2),))
MESH = MeshFacts(("dp",), (2,), (0,))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda t: Part(None, (2, 2), RUNS), "Part(local=...): None should be a tensor"),
        (lambda t: Part(t, "shape", RUNS), "Part(shape=...): str 'shape' should be a tuple of sizes: (4, 8)"),
        (
            lambda t: Part(t, (2, 2), ((0, 2), (0, 2))),
            "Part(regions=...): tuple ((0, 2), (0, 2)) should be one tuple of (start, stop) for each dim: "
            "(((0, 4),), ((0, 8),))",
        ),
        (
            lambda t: Part(t, (2, 2), (((0, 2),),)),
            "Part(regions=(((0, 2),),)) should have one entry for each of the 2 dims of the shape (2, 2)",
        ),
        (
            lambda t: Part(t.reshape(-1), (2, 2), RUNS, flat=True),
            "Part(regions=(((0, 2),), ((0, 2),))) should have one entry, because it is flat",
        ),
        (
            lambda t: Part(t, (2, 2), (((0, 99),), ((0, 2),))),
            "Part(regions=...): (0, 99) is not within the 2 of the shape (2, 2)",
        ),
        (
            lambda t: Part(t, (4, 2), (((0, 1),), ((0, 2),))),
            "Part(local=...) has the shape (2, 2), but should have (1, 2), as its regions say",
        ),
        (
            lambda t: Part(t.reshape(-1), (2, 2), (((0, 3),),), flat=True),
            "Part(local=...) has the shape (4,), but should have (3,), as its regions say",
        ),
        (
            lambda t: Part(t, (2, 2), RUNS, placements="R"),
            "Part(placements=...): str 'R' should be None or a tuple of strings: ('S(0)',)",
        ),
        (
            lambda t: Part(t, (2, 2), RUNS, placements=("R",)),
            "Part(placements=('R',)) needs mesh=... as well, or should have no placements",
        ),
        (
            lambda t: Part(t, (2, 2), RUNS, placements=("R", "R"), mesh=MESH),
            "Part(placements=('R', 'R')) should have one entry for each of the 1 dims of its mesh",
        ),
        (lambda t: Part(t, (2, 2), RUNS, mesh="dp"), "Part(mesh=...): str 'dp' should be None or MeshFacts"),
        (lambda t: Part(t, (2, 2), RUNS, by=3), "Part(by=...): int 3 should be a string"),
        (lambda t: Part(t, (2, 2), RUNS, flat=None), "Part(flat=...): None should be True or False"),
        (lambda t: Part(t, (2, 2), RUNS, gradient=3), "Part(gradient=...): int 3 should be None or a tensor"),
        (
            lambda t: Part(t, (2, 2), RUNS, gradient=torch.zeros(3)),
            "Part(gradient=...) is a gradient of shape (3,), but should have the part's (2, 2)",
        ),
        (lambda t: Part.block(t, (2, 2), (1, 0)), "indices 1 to 3 are outside the whole tensor (0 to 2)"),
        (lambda t: Part.block(t, (2, 2), (-1, 0)), "indices -1 to 1 are outside the whole tensor (0 to 2)"),
        (
            lambda t: Part.block(t, (2, 2), (0,)),
            "start=(0,) and shape=(2, 2) should have one entry for each of the 2 dims of the local (2, 2)",
        ),
        (lambda t: Part.run(t, (1,), 0), "indices 0 to 4 are outside the whole tensor (0 to 1)"),
        (
            lambda t: Part.block(t, (2.0, 2), (0, 0)),
            "shape=(2.0, 2) should be a tuple of integers, one for each dim",
        ),
        (lambda t: Part.block(t, (2, 2), 0), "start=0 should be a tuple of integers, one for each dim"),
        (lambda t: Part.run(t, (2, 2), 0.5), "start=0.5 should be an integer"),
        (lambda t: Part.block([1], (2, 2), (0, 0)), "local=[1] should be a tensor"),
    ],
)
def test_an_invalid_part_is_reported_with_its_tensor(model, make, message):
    assert refusal(model, make) == message


@pytest.mark.parametrize(
    "make",
    [
        lambda t: Part(t, t.shape, RUNS, placements=("R",), mesh=MESH, gradient=torch.zeros(2, 2)),
        lambda t: Part(t.reshape(-1), (2, 2), (((0, 4),),), flat=True, gradient=torch.zeros(2, 2)),
        lambda t: Part(t[:0], (2, 2), ((), ((0, 2),))),
        lambda t: Part(t, (4, 2), (((0, 1), (2, 3)), ((0, 2),))),
        lambda t: Part.block(t, torch.Size((4, 2)), [torch.tensor(2), 0]),
    ],
)
def test_a_valid_part_is_accepted(model, make):
    remember(model, lambda name, tensor: make(tensor))
    part = parts_of(model).of("norm.weight", model.norm.weight)
    assert type(part.shape) is tuple
    assert part.regions == make(model.norm.weight).regions


def test_a_gradient_of_another_shape_than_its_part_is_an_error(model):
    """Without the error, checks of gradients would pass, because they have nothing to compare."""
    model.norm.weight.grad = torch.ones(2, 2)
    message = refusal(model, lambda t: Part.block(t[:1], (2, 2), (0, 0)), "gradient")
    assert message == "parameter.grad is a gradient of shape (2, 2), but should have the part's (1, 2)"
    bare = Parts([lambda name, tensor: Part(tensor, (2, 2), RUNS, gradient=torch.zeros(3))])
    with pytest.raises(
        SubjectError, match=r"'w': Part\(gradient=\.\.\.\) is a gradient of shape \(3,\), but should have"
    ):
        bare.gradient("w", model.norm.weight)


def test_the_gradient_of_a_run_is_flat(model):
    remember(model, lambda name, tensor: Part.run(tensor, (2, 2), 0))
    model.norm.weight.grad = torch.arange(4.0).reshape(2, 2)
    assert parts_of(model).gradient("norm.weight", model.norm.weight).local.tolist() == [0, 1, 2, 3]


def test_a_plain_model_has_no_adapters(model):
    assert parts_of(model).adapters == ()


def in_runs(*held: tuple[int, int], shape: tuple[int, ...] = (6, 4)):
    """Return evidence in which an adapter says that each rank holds this run of elements of the middle weight."""
    evidence = healthy(len(held))
    for rank, (start, stop) in enumerate(held):
        runs = ((start, stop),) if start < stop else ()
        facts = {"local_shape": (stop - start,), "regions": (runs,), "flat": True, "sharded_by": "FSDP1"}
        evidence = change(evidence, MIDDLE, [rank], placements=None, mesh=None, **facts)
    return evidence


SHARDING = ("nothing_left_unsharded", "dtensor_placements", "unsharded_modules_stay_whole", "shards_tile_the_tensor")


@pytest.mark.parametrize(
    ("held", "expected"),
    [
        ([(0, 7), (8, 24)], ((0, 1), "no rank holds [7:8]")),
        ([(0, 9), (7, 24)], ((0, 1), "2 ranks hold [7:9]")),
    ],
)
def test_runs_with_gaps_or_overlaps_are_found(held, expected):
    findings = verdict("shards_tile_the_tensor", in_runs(*held)).findings
    assert [(f.tensor, f.ranks, f.actual, f.expected) for f in findings] == [
        (MIDDLE, *expected, "shards that cover (24,) exactly once")
    ]


def in_rows(*held: tuple[str, int, int]):
    """Return evidence in which each rank holds these rows of the middle weight, described as a block or as a run.

    A "plain" tensor is one for which the adapter returns None.
    """
    evidence = in_runs(*((4 * first, 4 * last) for _, first, last in held))
    for rank, (form, first, last) in enumerate(held):
        if form != "run":
            rows = ((first, last),) if first < last else ()
            facts = {"regions": (rows, ((0, 4),)), "sharded_by": "hand" if form == "block" else "", "flat": False}
            evidence = change(evidence, MIDDLE, [rank], local_shape=(last - first, 4), **facts)
    return evidence


MIXED = [("block", 0, 4), ("run", 4, 6)]


@pytest.mark.parametrize(
    "held",
    [
        MIXED,
        MIXED[::-1],
        [("block", 0, 6), ("run", 0, 0)],
        [("plain", 0, 6), ("run", 0, 0)],
        [("run", 0, 0), ("plain", 0, 6)],
        [("block", 0, 3), ("block", 3, 6), ("run", 0, 3), ("run", 3, 6)],
    ],
    ids=str,
)
def test_blocks_on_some_ranks_and_runs_on_others_cover_a_parameter(held):
    assert [verdict(id, in_rows(*held)).findings for id in SHARDING] == [()] * len(SHARDING)


@pytest.mark.parametrize(
    ("held", "expected"),
    [
        ([("block", 0, 4), ("run", 5, 6)], ((0, 1), "no rank holds [4:5, 0:4]")),
        ([("run", 0, 5), ("block", 4, 6)], ((0, 1), "2 ranks hold [4:5, 0:4]")),
        ([("block", 0, 4), ("run", 0, 0)], ((0, 1), "no rank holds [4:6, 0:4]")),
        ([("plain", 0, 6), ("run", 2, 4)], ((0, 1), "2 ranks hold [2:4, 0:4]")),
    ],
    ids=str,
)
def test_blocks_and_runs_with_gaps_or_overlaps_are_found(held, expected):
    found = verdict("shards_tile_the_tensor", in_rows(*held)).findings
    assert [(f.ranks, f.actual, f.expected) for f in found] == [(*expected, "shards that cover (6, 4) exactly once")]
    assert found[0].remedy.endswith("describe the same part in Subject(adapter=...)")


def test_a_block_and_a_run_of_the_same_elements_are_replicas():
    evidence = in_rows(*[(form, *rows) for form in ("block", "run") for rows in ((0, 3), (3, 6))])
    apart = differ(change(evidence, MIDDLE, [3], digest="other bits"), MIDDLE, [3])
    assert verdict("replicas_equal", evidence).status == "passed"
    assert [f.ranks for f in verdict("replicas_equal", apart).findings] == [(3,)]
    drawn = drew(evidence, MIDDLE)  # each part is drawn once, whatever form it is described in
    assert verdict("drawn_weights_are_one_draw", drawn).findings == ()


@pytest.mark.parametrize("id", CATALOGUE.ids())
def test_each_check_judges_mixed_forms_as_it_judges_one_form(id):
    """Also if it is the only one selected."""
    blocks = in_rows(*(("block", first, last) for _, first, last in MIXED))
    twice = (replace(one, repetition=one.inventory) for one in (blocks, in_rows(*MIXED)))
    alone = Selection(frozenset({id}))
    expected, found = (judge(CATALOGUE[id], one, CATALOGUE, alone) for one in twice)
    assert (found.status, found.findings) == (expected.status, expected.findings)


def test_shapes_with_other_dims_are_told_by_the_tiling_itself_if_it_is_selected_alone():
    evidence = change(in_rows(*MIXED), MIDDLE, [1], shape=(24,), flat=False, regions=(((16, 24),),))
    alone = Selection(frozenset({"shards_tile_the_tensor"}))
    [found] = judge(CATALOGUE["shards_tile_the_tensor"], evidence, CATALOGUE, alone).findings
    assert (found.ranks, found.actual, found.expected) == ((1,), "shape (24,)", "(6, 4), as on the other ranks")


def test_a_tensor_that_an_adapter_keeps_whole_is_unsharded():
    evidence = change(healthy(2), MIDDLE, [0, 1], placements=None, mesh=None, sharded_by="hand", local_shape=(6, 4),
                      regions=(((0, 6),), ((0, 4),)))  # fmt: skip
    findings = verdict("nothing_left_unsharded", evidence).findings
    assert [(f.tensor, f.actual) for f in findings] == [(MIDDLE, "a plain tensor, whole on every rank")]


def test_an_unsharded_tensor_held_in_parts_is_found():
    evidence = in_runs((0, 7), (7, 24))
    evidence = replace(evidence, subject=replace(evidence.subject, unsharded=(MIDDLE,)))
    findings = verdict("unsharded_modules_stay_whole", evidence).findings
    assert [(f.ranks, f.actual) for f in findings] == [((0, 1), "split into parts by FSDP1")]


def split_like_megatron_fsdp():
    """Build a weight of five rows: one on rank 0 and four on rank 1, as their place in a flat buffer decides."""
    me, rows = current(), [(0, 1), (1, 5)]
    whole = nn.Parameter(torch.arange(15.0).reshape(5, 3))
    first, last = rows[me.rank]
    local = whole.detach()[first:last].clone()
    sharded = DTensor.from_local(local, me.mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())
    model = nn.Module()
    model.weight = nn.Parameter(sharded)
    model.weight.orig_param = whole
    model.weight.megatron_fsdp_slice = slice(first * 3, last * 3)
    model.bias = nn.Parameter(torch.zeros(2))
    model.weight.grad = DTensor.from_local(
        local + 1, me.mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
    )
    parts = parts_of(model)
    seen = [parts.of("weight", model.weight), parts.gradient("weight", model.weight)]
    plain = parts.of("bias", model.bias)
    return [(p.shape, p.regions, p.local.tolist(), p.placements, p.by) for p in seen], (plain.by, plain.regions)


def test_uneven_rows_of_megatron_fsdp():
    with world_of(2) as world:
        seen = world.run(split_like_megatron_fsdp)
    numbers = torch.arange(15.0).reshape(5, 3)
    for (held, plain), (first, last) in zip(seen, [(0, 1), (1, 5)], strict=True):
        for (shape, regions, local, placements, by), more in zip(held, (0, 1), strict=True):
            assert (shape, regions) == ((5, 3), (((first, last),), ((0, 3),)))
            assert (local, placements, by) == ((numbers[first:last] + more).tolist(), ("S(0)",), "megatron-fsdp")
        assert plain == ("", (((0, 2),),))


class MegatronFSDP(nn.Module):
    """A stand-in for megatron-fsdp's wrapper, which records its two switches at each forward."""

    __module__ = "megatron_fsdp.megatron_fsdp"

    def __init__(self, auto_sync: bool) -> None:
        super().__init__()
        self.module = nn.Linear(2, 1)
        self.model_auto_sync, self.is_last_microbatch = auto_sync, True
        self.switches: list[tuple[bool, bool]] = []

    def set_model_auto_sync(self, sync_model: bool = True) -> None:
        self.model_auto_sync = sync_model

    @contextmanager
    def no_sync(self):
        self.is_last_microbatch = False
        try:
            yield
        finally:
            self.is_last_microbatch = True

    def forward(self, x):
        self.switches.append((self.model_auto_sync, self.is_last_microbatch))
        return self.module(x)


@pytest.fixture
def a_rank(monkeypatch):
    monkeypatch.setattr(modes, "current", lambda: SimpleNamespace(device=torch.device("cpu"), state={}))


@pytest.mark.usefixtures("a_rank")
@pytest.mark.parametrize("auto_sync", [True, False])
def test_megatron_fsdp_reduces_in_the_last_micro_batch_only(auto_sync):
    model = MegatronFSDP(auto_sync)
    subject = Subject(model, batch=lambda step: {"x": torch.ones(4, 2)}, loss=lambda model, rows: model(**rows).sum())
    accumulate(subject, SGD(model.parameters()), torch.device("cpu"), [[piece] for piece in micro_batches((0, 1))])
    assert model.switches == [(False, False), (auto_sync, True)]


@pytest.mark.usefixtures("a_rank")
def test_megatron_fsdp_switches_are_restored_after_an_error():
    model = MegatronFSDP(auto_sync=True)
    subject = Subject(model, batch=lambda step: {"x": torch.ones(4, 3)}, loss=lambda model, rows: model(**rows).sum())
    with pytest.raises(CallFailed, match="Subject"):
        accumulate(subject, SGD(model.parameters()), torch.device("cpu"), [[piece] for piece in micro_batches((0, 1))])
    assert (model.model_auto_sync, model.is_last_microbatch) == (True, True)


class Axis(str, enum.Enum):
    """As NeMo Automodel names the dimensions of its meshes."""

    SHARDING = "dp_shard"


def dims_of_an_enumeration():
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=(Axis.SHARDING,))
    [dim] = mesh_facts(distribute_tensor(torch.ones(2), mesh, [Shard(0)])).dims
    return type(dim).__name__, dim


def test_dimensions_that_an_enumeration_names_are_plain_text():
    with world_of(1) as world:
        assert world.run(dims_of_an_enumeration)[0] == ("str", "dp_shard")
