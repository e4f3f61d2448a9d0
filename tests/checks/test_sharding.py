"""dtensor_placements, nothing_left_unsharded and unsharded_modules_stay_whole on hand-made evidence."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_fsdp_meta.evidence import splits_experts, splits_model
from tests.checks.evidence_factory import (
    EMBEDDING,
    FROZEN,
    HEAD,
    MIDDLE,
    change,
    change_reference,
    declare,
    findings_of,
    healthy,
    place,
    verdict,
)

PLACEMENTS = "dtensor_placements"
LEFT, STAYS = "nothing_left_unsharded", "unsharded_modules_stay_whole"
PLAIN = "a plain tensor, whole on every rank"
HSDP = {"dp_replicate": 2, "dp_shard": 2}
TWO = {"dp_shard": 2}
TWO_D = {"dp_shard": 2, "tp": 2}


def all_on(evidence, mesh, *placements):
    """Place every parameter on this mesh."""
    for tensor in evidence.inventory[0].tensors:
        if tensor.kind == "parameter":
            evidence = place(evidence, tensor.name, mesh, *placements, shape=tensor.shape)
    return evidence


def whole(evidence, *names):
    """Judge by nothing_left_unsharded, and assert that dtensor_placements leaves these tensors out."""
    found, later = verdict(LEFT, evidence), verdict(PLACEMENTS, evidence)
    assert (later.status, later.unjudged) == ("skipped", {LEFT: names or tuple(f.tensor for f in found.findings)})
    return found


def test_a_plain_parameter_on_one_rank():
    evidence = change(healthy(4), MIDDLE, [2], placements=None, mesh=None)
    assert findings_of(verdict(PLACEMENTS, evidence)) == [
        (MIDDLE, (2,), "a plain tensor, not a DTensor", "sharded over dp_shard=4", "")
    ]
    # Ranks are not compared with ranks that are wrong: the one that sharded it is right.
    evidence = change(healthy(4), MIDDLE, [0, 1, 2], placements=None, mesh=None)
    assert [finding.ranks for finding in verdict(PLACEMENTS, evidence).findings] == [(0, 1, 2)]


@pytest.mark.parametrize(
    "evidence",
    [
        place(healthy(1), MIDDLE, {}),
        place(healthy(), MIDDLE, {}, shape=()),
        place(healthy(), MIDDLE, {"dp_shard": 2}, "R", shape=()),
        place(healthy(), MIDDLE, {}, shape=(0, 4)),
        all_on(healthy(mesh={"dp_replicate": 2}), {}),
        all_on(healthy(mesh={"ddp": 2}), {}),
        all_on(healthy(mesh={"tp": 2}), {}),
        all_on(healthy(mesh={"pp": 2}), {}),
        change(place(healthy(mesh=TWO_D), MIDDLE, {"tp": 2}, "S(0)"), MIDDLE, ddp=True),
    ],
    ids=["alone", "scalar", "scalar DTensor", "no elements", "dp_replicate", "ddp", "tp", "pp", "tp in DDP"],
)
def test_what_may_be_whole(evidence):
    assert [verdict(id, evidence).status for id in (PLACEMENTS, LEFT)] == ["passed", "passed"]
    one_element = place(healthy(), MIDDLE, {}, shape=(1,))
    assert whole(one_element).status == "failed"


def test_a_parameter_outside_ddp_is_still_reported():
    evidence = change(place(place(healthy(), MIDDLE, {}), EMBEDDING, {}), EMBEDDING, ddp=True)
    found = whole(evidence, MIDDLE)
    assert (found.status, [finding.tensor for finding in found.findings]) == ("failed", [MIDDLE])
    assert found.reason.startswith("DistributedDataParallel keeps embed.weight whole")


FOUR = {"dp_shard": 4}


@pytest.mark.parametrize(
    ("world", "mesh", "placements", "shape"),
    [
        (FOUR, FOUR, ("S(0)",), (5, 2)),
        (FOUR, FOUR, ("S(0)",), (1, 2)),
        (FOUR, FOUR, ("S(0)",), (0, 2)),
        (FOUR, FOUR, ("S(0)",), (3,)),
        (FOUR, FOUR, ("S(1)",), None),
        (HSDP, {"dp": 4}, ("S(0)",), None),  # flattened
        (TWO_D, TWO_D, ("S(0)", "R"), None),
        (TWO_D, TWO_D, ("S(0)", "S(1)"), None),
        (TWO_D, TWO_D, ("_S(0, 2)", "S(0)"), None),
        ({**TWO_D, "cp": 1}, {**TWO_D, "cp": 1}, ("S(0)", "S(1)", "R"), None),
        ({"dp_shard": 1, "tp": 4}, {"dp_shard": 1, "tp": 4}, ("R", "S(0)"), None),
        ({"dp_replicate": 4, "dp_shard": 1}, {"dp_replicate": 4, "dp_shard": 1}, ("R", "R"), None),
        ({"dp_replicate": 1, "dp_shard": 4}, FOUR, ("S(0)",), None),  # no dimension replicates
    ],
)
def test_right_placements_pass(world, mesh, placements, shape):
    assert verdict(PLACEMENTS, place(healthy(mesh=world), MIDDLE, mesh, *placements, shape=shape)).status == "passed"


@pytest.mark.parametrize(
    "evidence",
    [
        change(place(healthy(mesh=HSDP), MIDDLE, {"dp_shard": 2}, "S(0)"), MIDDLE, requires_grad=False),
        declare(place(healthy(1), MIDDLE, {}), placements={MIDDLE: ("S(0)",)}),
        declare(place(healthy(), MIDDLE, {}), unsharded=(MIDDLE,), placements={MIDDLE: ("S(0)",)}),
    ],
    ids=["frozen: no reduction over replicas", "alone", "unsharded takes precedence"],
)
def test_placements_that_do_not_matter_pass(evidence):
    assert verdict(PLACEMENTS, evidence).status == "passed"


@pytest.mark.parametrize(
    ("mesh", "placements", "actual", "expected"),
    [
        ({"dp_shard": 4}, ("R",), "R on mesh dp_shard=4", "sharded over dp_shard=4"),
        (HSDP, ("R", "R"), "(R, R) on mesh dp_replicate=2 x dp_shard=2", "sharded over dp_shard=2"),
        ({None: 4}, ("R",), "R on mesh unnamed=4", "sharded over the mesh"),
    ],
)
def test_replicated_over_a_sharding_dimension(mesh, placements, actual, expected):
    (found,) = whole(place(healthy(mesh={"dp_shard": 4}), MIDDLE, mesh, *placements)).findings
    assert (found.tensor, found.ranks, found.actual, found.detail) == (MIDDLE, (0, 1, 2, 3), actual, "")
    assert found.expected.startswith(expected)


@pytest.mark.parametrize(
    ("mesh", "placements", "actual", "expected"),
    [
        ({"dp_shard": 4}, ("P(sum)",), "P(sum) on mesh dp_shard=4", "sharded over dp_shard=4"),
        (HSDP, ("S(0)", "S(0)"), "(S(0), S(0)) on mesh dp_replicate=2 x dp_shard=2", "replicated over dp_replicate=2"),
        (TWO_D, ("R", "S(0)"), "(R, S(0)) on mesh dp_shard=2 x tp=2", "sharded over dp_shard=2"),
    ],
)
def test_placements_that_are_wrong_by_default(mesh, placements, actual, expected):
    evidence = place(healthy(mesh={"dp_shard": 4}), MIDDLE, mesh, *placements)
    found = verdict(PLACEMENTS, evidence).findings[0]
    assert (found.tensor, found.ranks, found.actual) == (MIDDLE, (0, 1, 2, 3), actual)
    assert found.expected.startswith(expected)


def test_the_mesh_of_the_loader_takes_precedence_over_that_of_the_world():
    # The marker gave a world of 4; the loader created a hybrid-sharding mesh.
    evidence = replace(healthy(mesh=HSDP), world=healthy(4).world)
    assert verdict(PLACEMENTS, evidence).status == "passed"
    assert findings_of(whole(place(evidence, MIDDLE, {}))) == [
        (MIDDLE, (0, 1, 2, 3), PLAIN, "sharded over dp_shard=2", "")
    ]


def test_an_unnamed_mesh_of_two_dimensions_is_hybrid_sharding():
    evidence = all_on(healthy(4), HSDP, "R", "S(0)")
    for rank in evidence.inventory:
        unnamed = replace(rank.by_name[MIDDLE].mesh, dims=(None, None))
        for name in (EMBEDDING, MIDDLE, FROZEN, HEAD):
            evidence = change(evidence, name, [rank.rank], mesh=unnamed)
    assert verdict(PLACEMENTS, evidence).status == "passed"
    found = verdict(PLACEMENTS, change(evidence, MIDDLE, placements=("S(0)", "R")))
    actual = "(S(0), R) on mesh unnamed=2 x unnamed=2"
    assert findings_of(found) == [(MIDDLE, (0, 1, 2, 3), actual, "replicated over the first mesh dimension=2", "")]


REPLICAS = "replicated over dp_replicate=2 as well (by fully_shard(mesh=...))"


@pytest.mark.parametrize(
    ("mesh", "part", "expected"),
    [(HSDP, {"dp_shard": 2}, REPLICAS), (TWO_D, {"tp": 2}, "sharded over dp_shard=2 as well")],
)
def test_one_parameter_or_a_model_on_the_submesh(mesh, part, expected):
    actual = f"S(0) on mesh {next(iter(part))}=2"
    one = verdict(PLACEMENTS, place(healthy(mesh=mesh), MIDDLE, part, "S(0)"))
    assert findings_of(one) == [(MIDDLE, (0, 1, 2, 3), actual, expected, "")]
    every = verdict(PLACEMENTS, all_on(healthy(mesh=mesh), part, "S(0)"))
    assert findings_of(every) == [
        (name, (0, 1, 2, 3), actual, expected, "") for name in (EMBEDDING, MIDDLE, FROZEN, HEAD)
    ]


def test_a_model_with_tensor_parallelism_on_the_submesh_is_not_replicated():
    mesh = {"dp_replicate": 2, "dp_shard": 2, "tp": 2}
    evidence = all_on(healthy(mesh=mesh), {"dp_shard": 2, "tp": 2}, "S(0)", "S(1)")
    assert {(finding.actual, finding.expected) for finding in verdict(PLACEMENTS, evidence).findings} == {
        ("(S(0), S(1)) on mesh dp_shard=2 x tp=2", REPLICAS)
    }
    evidence = all_on(healthy(mesh=mesh), mesh, "R", "S(0)", "S(1)")
    assert verdict(PLACEMENTS, evidence).status == "passed"


def test_tensor_parallel_alone_may_be_replicated_by_ddp():
    mesh = {"dp_replicate": 2, "tp": 2}
    evidence = all_on(healthy(mesh=mesh), {"tp": 2}, "S(0)")
    assert verdict(PLACEMENTS, evidence).status == "passed"
    assert verdict(PLACEMENTS, place(evidence, MIDDLE, {"tp": 2}, "R")).status == "passed"
    # If it also shards over a dimension of its own, FSDP2 is used and does not reduce over dp_replicate.
    evidence = all_on(healthy(mesh=mesh), {"fsdp": 1, "tp": 2}, "S(0)", "S(0)")
    assert {finding.expected for finding in verdict(PLACEMENTS, evidence).findings} == {REPLICAS}


@pytest.mark.parametrize(
    ("world", "mesh", "placements"),
    [
        (HSDP, {"dp_replicate": 2, "fsdp": 2}, ("R", "S(0)")),
        ({"dp_shard": 4}, {"dp_replicate": 2, "fsdp": 2}, ("R", "S(0)")),
        (HSDP, {"ddp": 2, "fsdp": 2}, ("R", "S(0)")),
        ({"dp_shard": 2, "cp": 2}, {"dp_shard_cp": 4}, ("S(0)",)),
        ({"dp_replicate": 2, "dp_shard": 2, "cp": 2}, {"dp_replicate": 2, "dp_shard_cp": 4}, ("R", "S(0)")),
        ({"dp_replicate": 2, "dp_shard": 2, "tp": 2}, {"dp": 4, "tp": 2}, ("S(0)", "S(1)")),
    ],
)
def test_a_loader_may_use_any_names_for_dimensions(world, mesh, placements):
    evidence = all_on(healthy(mesh=world), mesh, *placements)
    assert verdict(PLACEMENTS, evidence).status == "passed"
    # A replicated parameter is still found.
    evidence = place(evidence, MIDDLE, mesh, *("R" for _ in mesh))
    assert [finding.tensor for finding in whole(evidence).findings] == [MIDDLE]


def test_tensor_parallel_alone_passes_if_no_dimension_shards():
    evidence = all_on(healthy(2), {"tp": 2}, "S(0)")
    evidence = replace(evidence, world=replace(evidence.world, mesh=(("tp", 2),)))
    assert verdict(PLACEMENTS, place(evidence, MIDDLE, {})).status == "passed"
    # A mesh of the loader that spans the world replaces the marker's.
    evidence = replace(evidence, world=replace(evidence.world, mesh=(("dp_shard", 2),)))
    assert verdict(PLACEMENTS, evidence).status == "passed"


@pytest.mark.parametrize(
    ("mesh", "placements"),
    [({"ep": 2}, ("S(0)",)), ({"ep": 4}, ("S(0)",)), ({"dp_shard_mod_ep": 2, "ep": 2}, ("S(1)", "S(0)"))],
)
def test_experts_may_have_their_own_mesh(mesh, placements):
    for world in ({"dp_shard": 4}, HSDP):
        assert verdict(PLACEMENTS, place(healthy(mesh=world), MIDDLE, mesh, *placements)).status == "passed"


def test_the_mesh_of_experts_applies_to_experts_only():
    # Parameters are not on the tensor-parallel dimension; experts use those ranks on their own mesh.
    evidence = all_on(healthy(mesh={"dp_shard": 4, "tp": 2}), {"dp_shard": 4}, "S(0)")
    experts = {"dp_shard_mod_ep": 2, "ep": 4}
    assert verdict(PLACEMENTS, place(evidence, MIDDLE, experts, "S(1)", "S(0)")).status == "passed"
    found = verdict(PLACEMENTS, place(evidence, MIDDLE, experts, "R", "S(0)"))
    actual = "(R, S(0)) on mesh dp_shard_mod_ep=2 x ep=4"
    assert findings_of(found) == [(MIDDLE, tuple(range(8)), actual, "sharded over dp_shard_mod_ep=2", "")]


@pytest.mark.parametrize("placements", [(), ("R",)])
def test_declared_unsharded_is_whole_plain_or_replicated(placements):
    evidence = declare(place(healthy(), MIDDLE, {"dp_shard": 2}, *placements), unsharded=(MIDDLE,))
    assert [verdict(id, evidence).status for id in (PLACEMENTS, LEFT, STAYS)] == ["passed"] * 3


def test_a_partial_tensor_is_not_whole_but_a_shard_of_one_is():
    evidence = declare(place(healthy(), MIDDLE, {"dp_shard": 2}, "P(sum)"), unsharded=(MIDDLE,))
    assert [finding.actual for finding in verdict(STAYS, evidence).findings] == ["P(sum) on mesh dp_shard=2"]
    assert verdict(STAYS, declare(healthy(1), unsharded=(MIDDLE,))).status == "passed"


def test_a_sharded_parameter_that_lost_its_attribute_is_found_twice():
    evidence = declare(healthy(), unsharded=(MIDDLE,), kept_attributes=("_fsdp_no_shard",))
    evidence = change_reference(evidence, MIDDLE, attributes={"_fsdp_no_shard": "True"})
    assert [f.tensor for f in verdict("parameter_attributes_kept", evidence).findings] == [MIDDLE]
    [sharded] = verdict(STAYS, evidence).findings
    assert (sharded.tensor, sharded.expected) == (MIDDLE, "whole on every rank, as declared")
    assert sharded.cause.startswith("it lost the attribute _fsdp_no_shard, which may be what the loader reads")


@pytest.mark.parametrize(
    ("mesh", "actual", "declared", "status"),
    [
        ({"dp_shard": 4}, ("S(0)",), ("S(0)",), "passed"),
        ({"dp_shard": 4}, ("S(0)",), ("S(1)",), "failed"),
        ({"dp_shard": 4}, ("R",), ("R",), "passed"),
        ({"dp_shard": 4}, ("S(0)",), ("R", "S(0)"), "failed"),
        (TWO_D, ("_S(0, 2)", "S(0)"), ("S(0)", "S(0)"), "passed"),
        (TWO_D, ("_S(0, 2)", "S(0)"), ("_S(0, 2)", "S(0)"), "passed"),
        (TWO_D, ("_S(0, 2)", "S(0)"), ("S(1)", "S(0)"), "failed"),
        (TWO_D, ("_S(1, 2)", "S(1)"), ("_S(1, 4)", "S(1)"), "failed"),
        (TWO_D, ("S(0)", "S(0)"), ("_S(0, 2)", "S(0)"), "failed"),
    ],
)
def test_declared_placements(mesh, actual, declared, status):
    evidence = declare(place(healthy(mesh=mesh), MIDDLE, mesh, *actual), placements={MIDDLE: declared})
    assert verdict(PLACEMENTS, evidence).status == status


def test_a_finding_shows_declared_and_actual_placements():
    evidence = declare(place(healthy(mesh=TWO_D), MIDDLE, TWO_D, "S(0)", "R"), placements={MIDDLE: ("S(0)", "S(1)")})
    [finding] = verdict(PLACEMENTS, evidence).findings
    assert finding.actual.startswith("(S(0), R) on mesh ")
    assert finding.expected.startswith("(S(0), S(1)),")


@pytest.mark.parametrize(
    ("mesh", "actual", "declared", "remedy"),
    [
        (TWO, ("S(0)",), ("R",), "keep it whole: exclude it from fully_shard() (ignored_params) or "),
        (TWO_D, ("S(0)", "R"), ("R", "R"), "keep it whole: "),
        (HSDP, ("S(0)", "S(0)"), ("R", "S(0)"), "pass fully_shard() a mesh of two dimensions, the first of which "),
        (TWO, ("S(0)",), ("S(1)",), "shard it on the declared dim (shard_placement_fn of fully_shard(), or the plan)"),
        (TWO_D, ("S(0)", "S(0)"), ("_S(0, 2)", "S(0)"), "shard it, "),
        (TWO, ("P(sum)",), ("R",), "shard it, "),
        (TWO, ("S(0)",), ("S(0)", "S(1)"), "add its module to the plan, or declare one placement per "),
        (TWO_D, ("S(0)", "S(1)"), ("S(0)",), "declare one placement per mesh dimension, in order"),
        (TWO, (), ("S(0)",), "shard it, "),
        (TWO, (), ("R",), "declare Subject(unsharded=...) instead of Subject(placements=...)"),
        (HSDP, ("S(0)", "S(0)"), None, "pass fully_shard() a mesh of two dimensions"),
    ],
)
def test_the_remedy_depends_on_the_placements(mesh, actual, declared, remedy):
    evidence = place(healthy(mesh=mesh), MIDDLE, mesh if actual else {}, *actual)
    evidence = evidence if declared is None else declare(evidence, placements={MIDDLE: declared})
    (finding,) = verdict(PLACEMENTS, evidence).findings
    assert finding.remedy.startswith(remedy)


def test_ranks_on_a_mesh_with_other_names_or_outside_it():
    found = verdict(PLACEMENTS, moved(healthy(4), [1], dims=("fsdp",)))
    expected = "S(0) on mesh dp_shard=4, as on ranks 0, 2, 3"
    assert findings_of(found) == [(MIDDLE, (1,), "S(0) on mesh fsdp=4", expected, "")]
    assert verdict(PLACEMENTS, moved(healthy(4), range(4), dims=("fsdp",))).status == "passed"
    assert verdict(PLACEMENTS, moved(healthy(4), [3], coordinate=None)).status == "passed"


def moved(evidence, ranks, name=MIDDLE, **facts):
    """Give one parameter other placements or another mesh on these ranks."""
    mesh = replace(evidence.inventory[0].by_name[name].mesh, **{k: v for k, v in facts.items() if k != "placements"})
    placements = facts.get("placements", evidence.inventory[0].by_name[name].placements)
    return change(evidence, name, ranks, mesh=mesh, placements=placements)


@pytest.mark.parametrize(
    ("ranks", "finding"),
    [
        ([3], ((3,), "S(1) on mesh dp_shard=4", "S(0) on mesh dp_shard=4, as on ranks 0-2")),
        ([0], ((0,), "S(1) on mesh dp_shard=4", "S(0) on mesh dp_shard=4, as on ranks 1-3")),
        ([0, 1], ((2, 3), "S(0) on mesh dp_shard=4", "S(1) on mesh dp_shard=4, as on ranks 0, 1")),
    ],
)
def test_ranks_that_shard_on_different_dims(ranks, finding):
    found = verdict(PLACEMENTS, moved(healthy(4), ranks, placements=("S(1)",)))
    assert findings_of(found) == [(MIDDLE, *finding, "")]
    assert found.findings[0].cause.startswith("sharding depends on the rank, or ranks created different meshes")
    assert verdict(PLACEMENTS, moved(healthy(4), range(4), placements=("S(1)",))).status == "passed"


def test_a_parameter_declared_whole_has_the_same_placements_on_every_rank():
    evidence = declare(place(healthy(4), MIDDLE, {"dp_shard": 4}, "R"), unsharded=(MIDDLE,))
    found = verdict(PLACEMENTS, change(evidence, MIDDLE, [2], placements=None, mesh=None))
    assert findings_of(found) == [
        (MIDDLE, (2,), "a plain tensor, not a DTensor", "R on mesh dp_shard=4, as on ranks 0, 1, 3", "")
    ]


@pytest.mark.parametrize("dim", ["dp_shard", "data_parallel"])
def test_a_mesh_of_one_rank_does_not_shard(dim):
    """lightning's ModelParallelStrategy has as many data-parallel ranks as nodes, unless it is told otherwise."""
    evidence = all_on(healthy(), {dim: 1}, "S(0)")
    facts = ((0, 1), f"S(0) on mesh {dim}=1", "sharded over dp_shard=2")
    found = whole(evidence).findings
    assert [(f.tensor, f.ranks, f.actual, f.expected) for f in found] == [
        (name, *facts) for name in (EMBEDDING, MIDDLE, FROZEN, HEAD)
    ]
    if dim == "data_parallel":
        tensor_parallel = place(evidence, MIDDLE, {"model": 2}, "S(0)")
        assert verdict(LEFT, tensor_parallel).status == "passed", "all ranks are in use"
    else:
        one = whole(place(healthy(), MIDDLE, {dim: 1}, "S(0)")).findings
        assert [(f.tensor, f.ranks, f.actual, f.expected) for f in one] == [(MIDDLE, *facts)]


def test_a_dimension_that_is_too_small():
    evidence = place(healthy(4), MIDDLE, {"dp_shard": 2}, "S(0)")
    assert findings_of(verdict(PLACEMENTS, evidence)) == [
        (MIDDLE, (0, 1, 2, 3), "S(0) on mesh dp_shard=2", "sharded over dp_shard=4", "")
    ]
    # With a second dimension, the mesh uses all ranks.
    assert verdict(PLACEMENTS, place(healthy(4), MIDDLE, HSDP, "R", "S(0)")).status == "passed"
    evidence = place(healthy(mesh=HSDP), MIDDLE, {"dp_replicate": 1, "dp_shard": 2}, "R", "S(0)")
    assert [finding.expected for finding in verdict(PLACEMENTS, evidence).findings] == [
        "replicated over dp_replicate=2 (by fully_shard(mesh=...))"
    ]


@pytest.mark.parametrize(
    ("dim", "model", "experts"),
    [
        (None, False, False),
        ("tp", True, False),
        ("Pipeline", True, False),
        ("decoder_pp", True, False),
        ("moe_EP", True, True),
        ("etp", True, True),
        ("expert", True, True),
        ("dp_shard", False, False),
        ("dp_shard_cp", False, False),  # flattened from the dimensions that split the batch and the sequence
        ("dp_shard_mod_ep", False, False),
        ("edp_ep", False, False),
        ("fsdp", False, False),
        ("data", False, False),
        ("_tp", True, False),
        ("http", False, False),
        ("step", False, False),
    ],
)
def test_which_dimensions_split_the_model(dim, model, experts):
    assert (splits_model(dim), splits_experts(dim)) == (model, experts)
