"""collectives_match_on_every_rank, collectives_within_budget and unsharded_modules_are_not_gathered, on hand-made
evidence.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_fsdp_meta.checks.collectives.facts import Collective, FsdpGroup, RankCollectives
from tests.checks.evidence_factory import (
    EMBEDDING,
    HEAD,
    MIDDLE,
    change,
    declare,
    drop,
    empty,
    healthy,
    left_out,
    place,
    undeclared,
    verdict,
)

MATCH, BUDGET, UNSHARDED = (
    "collectives_match_on_every_rank",
    "collectives_within_budget",
    "unsharded_modules_are_not_gathered",
)
WHOLE = (EMBEDDING, HEAD)


def collective(op="broadcast", *tensors, ranks=(0, 1), shape=(8, 4), root=None, **facts) -> Collective:
    root = 0 if root is None and op in ("broadcast", "reduce", "scatter", "gather") else root
    facts = {"group": "0", "dtype": "float32", "shapes": (shape,), **facts}
    return Collective(op=op, ranks=tuple(ranks), root=root, tensors=tensors, **facts)


def loading(*by_rank, step=(), groups=()):
    """Return evidence of ranks with these collectives while loading, and ``step`` on each rank in a training step."""
    world = healthy(len(by_rank))
    return replace(world, collectives=tuple(RankCollectives(tuple(c), tuple(step), tuple(groups)) for c in by_rank))


A, B = collective("broadcast", MIDDLE), collective("broadcast", EMBEDDING)
OF_OTHERS = replace(B, ranks=(2, 3))
SCATTERING = collective("scatter", shapes=((2,), (2,)))


@pytest.mark.parametrize(
    "evidence",
    [
        loading([], []),
        loading([A, B], [A, B]),
        loading([], [], step=[A]),
        loading([A]),  # a single rank
        loading([A], [collective("broadcast")]),  # a name that only one rank knows
        loading([collective("broadcast", MIDDLE, HEAD)], [collective("broadcast", HEAD)]),  # tied
        loading([collective("broadcast", shape=(32,))], [A]),  # the same elements, flat
        loading([collective("all_to_all", shape=(3, 4))], [collective("all_to_all", shape=(5, 4))]),
        loading([collective("all_gather of lists", shape=(3,))], [collective("all_gather of lists", shape=(2,))]),
        loading([collective("gather", shape=(3,))], [collective("gather", shape=(2,))]),
        loading([SCATTERING], [collective("scatter", shapes=())]),  # only the root has something
        loading([SCATTERING], [collective("scatter", shapes=(), dtype="")]),
        loading([collective("barrier", shapes=(), dtype="")], [collective("barrier", shapes=(), dtype="")]),
        loading([collective("all_gather", MIDDLE)], [collective("all_gather", EMBEDDING)]),  # an optimizer's work
        loading([collective("all_reduce", reduction="sum")], [collective("all_reduce")]),
        loading([A], [A], [OF_OTHERS], [OF_OTHERS]),  # two groups
    ],
)
def test_what_matches_passes(evidence):
    assert verdict(MATCH, evidence).status == "passed"


ONE = collective("broadcast")


@pytest.mark.parametrize(
    ("one", "other", "what"),
    [
        (ONE, collective("all_reduce"), "an all_reduce (float32 [8, 4])"),
        (ONE, collective("broadcast", root=1), "a broadcast (float32 [8, 4]) from rank 1"),
        (ONE, collective("broadcast", shape=(8, 5)), "a broadcast (float32 [8, 5]) from rank 0"),
        (ONE, collective("broadcast", dtype="bfloat16"), "a broadcast (bfloat16 [8, 4]) from rank 0"),
        (
            *(collective("all_reduce", reduction="sum"), collective("all_reduce", reduction="max")),
            "an all_reduce (float32 [8, 4]) by",
        ),
        (collective("reduce_scatter"), collective("reduce_scatter", shape=(4, 4)), "a reduce_scatter (float32 [4, 4])"),
    ],
)
def test_one_collective_that_differs(one, other, what):
    ranks = (0, 1, 2)
    one, other = replace(one, ranks=ranks), replace(other, ranks=ranks)
    [finding] = verdict(MATCH, loading([one], [one], [other])).findings
    assert finding.ranks == (2,)
    assert finding.actual.startswith(f"collective 1 of ranks 0-2 while loading is {what}")
    assert finding.expected.endswith("as on ranks 0, 1")


def test_a_collective_that_one_rank_omits_and_a_step_that_differs():
    [finding] = verdict(MATCH, loading([A], [])).findings
    actual = "collective 1 of ranks 0, 1 while loading is missing"
    assert (finding.ranks, finding.actual) == ((1,), actual)
    steps = (RankCollectives((), (A,), ()), RankCollectives((), (B,), ()))
    [finding] = verdict(MATCH, replace(healthy(), collectives=steps)).findings
    assert "in one training step" in finding.actual


def test_without_a_step_only_loading_is_judged():
    evidence = undeclared(loading([A], [A]), "training", why="no batch")
    silent = replace(evidence, collectives=tuple(replace(one, step=None) for one in evidence.collectives))
    found = verdict(MATCH, silent)
    reason = "no training step was recorded (no batch)"
    assert (found.status, found.reason) == ("skipped", reason)
    apart = replace(silent, collectives=(RankCollectives((A,)), RankCollectives((B,))))
    assert (verdict(MATCH, apart).status, verdict(MATCH, apart).reason) == ("failed", reason)


GROUPS = (
    FsdpGroup((MIDDLE,), forwards=1, reshards=True, trainable=True),
    FsdpGroup(WHOLE, forwards=1, reshards=False, trainable=True),
)
GATHER, SCATTER = collective("all_gather", by_fsdp=True), collective("reduce_scatter", by_fsdp=True)
NEEDED = [GATHER] * 3 + [SCATTER] * 2


def step(*collectives, groups=GROUPS, size=2):
    return loading(*[[]] * size, step=collectives, groups=groups)


def whole(*collectives, **facts):
    """Return evidence in which the middle layer is declared unsharded and is whole on both ranks."""
    return declare(place(step(*collectives, **facts), MIDDLE, {}, shape=(6, 4)), unsharded=(MIDDLE,))


NO_GROUPS = "FSDP2 manages no parameters here, so there are no FSDP groups to gather"


@pytest.mark.parametrize(
    "evidence",
    [
        step(*NEEDED),
        step(),
        step(*NEEDED, collective("all_reduce", shape=())),  # a loss
        step(*NEEDED, collective("all_gather"), collective("all_gather")),  # gathers the batch for a contrastive loss
        step(*NEEDED, collective("all_gather", MIDDLE, optimizing=True)),
        step(*NEEDED, collective("all_gather", FROZEN := "verifier.weight")),  # not managed by FSDP2
        step(*NEEDED * 2, groups=[replace(group, forwards=2) for group in GROUPS]),
        step(*NEEDED, collective("all_reduce", by_fsdp=True), groups=[replace(GROUPS[0], replicates=True), GROUPS[1]]),
    ],
)
def test_what_groups_explain_passes(evidence):
    assert verdict(BUDGET, evidence).status == "passed"


@pytest.mark.parametrize(
    ("dtype", "shape", "policy", "noted"),
    [
        ("bfloat16", (6, 4), "float32", True),
        ("float32", (6, 4), "float32", False),
        ("bfloat16", (6, 4), "bfloat16", False),
        ("bfloat16", (2, 6, 4), "float32", False),  # an activation
    ],
)
def test_gradients_that_dtensor_sums_in_low_precision_pass_with_a_note(dtype, shape, policy, noted):
    """pytorch#190626: norms under sequence parallelism, for example, are replicated over tp."""
    reduced = replace(collective("all_reduce", shape=shape), dtype=dtype)
    evidence = place(step(*NEEDED, reduced), MIDDLE, {"tp": 2}, "R", shape=(6, 4))
    evidence = replace(evidence, inventory=tuple(replace(own, reduces_in=(policy,)) for own in evidence.inventory))
    found = verdict(BUDGET, evidence)
    assert (found.status, f"such as that of {MIDDLE} are summed" in found.reason) == ("passed", noted)


@pytest.mark.parametrize(
    ("ops", "groups", "actual", "expected"),
    [
        ([GATHER], GROUPS, "4 all_gathers", 3),
        ([SCATTER], GROUPS, "3 reduce_scatters", 2),
        ([], [replace(GROUPS[0], trainable=False), GROUPS[1]], "2 reduce_scatters", 1),
        ([collective("all_reduce", by_fsdp=True)], GROUPS, "1 all_reduce", 0),
    ],
)
def test_more_than_groups_explain(ops, groups, actual, expected):
    evidence = step(*NEEDED, *ops, groups=groups)
    [finding] = verdict(BUDGET, evidence).findings
    assert (finding.tensor, finding.ranks) == (None, (0, 1))
    assert finding.actual == f"{actual} of FSDP groups in one training step"
    assert finding.expected.startswith(f"at most {expected} for 2 groups")
    right = step(*NEEDED).collectives[0]
    if ops:
        one = verdict(BUDGET, replace(evidence, collectives=(right, evidence.collectives[1])))
        assert [finding.ranks for finding in one.findings] == [(1,)]


PART = collective("all_gather", MIDDLE, shape=(3, 4))


def test_a_parameter_gathered_in_addition_to_fsdp():
    found = verdict(BUDGET, step(*NEEDED, PART, PART, collective("broadcast", MIDDLE)))
    what = "2 all_gathers (float32 [3, 4]) and 1 broadcast (float32 [8, 4])"
    assert [(f.tensor, f.actual.split(" in one")[0]) for f in found.findings] == [(MIDDLE, what)]


def test_a_declared_unsharded_parameter_is_reported_by_its_own_check():
    evidence = declare(step(*NEEDED, collective("broadcast", MIDDLE)), unsharded=(MIDDLE,))
    assert verdict(BUDGET, evidence).status == "passed"
    assert verdict(UNSHARDED, place(evidence, MIDDLE, {})).status == "failed"


@pytest.mark.parametrize(
    ("check", "evidence", "reason"),
    [
        (BUDGET, step(*NEEDED, groups=()), NO_GROUPS),
        (BUDGET, replace(empty(), collectives=(RankCollectives((), (), ()),) * 2), NO_GROUPS),
        (BUDGET, step(*NEEDED, size=1), "a single rank does not communicate"),
        (BUDGET, replace(step(), collectives=(RankCollectives(()),) * 2), "no training step was recorded"),
        (UNSHARDED, whole(size=1), "a single rank does not communicate"),
        (UNSHARDED, step(*NEEDED), "Subject(unsharded=...) is not declared"),
    ],
)
def test_nothing_to_judge(check, evidence, reason):
    assert (verdict(check, evidence).status, verdict(check, evidence).reason) == ("skipped", reason)


@pytest.mark.parametrize(
    "evidence",
    [
        whole(*NEEDED),
        whole(collective("all_reduce", shape=(6, 4))),  # reduces its gradient
        whole(collective("broadcast", EMBEDDING)),
        whole(collective("broadcast", MIDDLE, optimizing=True)),
        whole(groups=()),  # a loader that shards by itself
    ],
)
def test_an_unsharded_parameter_that_is_used_locally_passes(evidence):
    assert verdict(UNSHARDED, evidence).status == "passed"


def test_a_sharded_parameter_is_reported_by_another_check():
    evidence = declare(step(collective("broadcast", MIDDLE)), unsharded=(MIDDLE,))
    found = verdict(UNSHARDED, evidence)
    assert (found.status, found.findings) == ("skipped", ())
    assert MIDDLE in str(found.reason)


def test_a_tensor_of_another_shape_is_reported_by_another_check():
    evidence = change(step(*NEEDED, collective("all_gather", MIDDLE)), MIDDLE, [1], shape=(5, 5))
    found = verdict(BUDGET, evidence)
    assert (found.status, found.reason) == ("skipped", left_out("same_manifest_on_every_rank", MIDDLE, rest=False))
    assert verdict(MATCH, drop(evidence, MIDDLE)).status == "passed"


@pytest.mark.parametrize("id", [MATCH, BUDGET, UNSHARDED])
def test_an_operator_that_the_recorder_does_not_know_is_partly_checked(id):
    evidence = whole(*NEEDED)
    ranks = (replace(evidence.collectives[0], unknown=("fsdp::new_copy_in",)), evidence.collectives[1])
    found = verdict(id, replace(evidence, collectives=ranks))
    assert (found.status, found.why) == ("skipped", "partly checked")
    assert "torch ran fsdp::new_copy_in, which pytest-fsdp-meta does not know" in found.reason


@pytest.mark.parametrize(
    ("evidence", "op"),
    [
        (step(*[GATHER] * 3, *[replace(SCATTER, by_fsdp=False)] * 2), "reduce_scatter"),
        (step(*[replace(GATHER, by_fsdp=False)] * 3, *[SCATTER] * 2), "all_gather"),
    ],
)
def test_collectives_of_which_none_is_recognised_as_fsdps_are_partly_checked(evidence, op):
    found = verdict(BUDGET, evidence)
    assert (found.status, found.why) == ("skipped", "partly checked")
    assert f"none of the {op}s could be attributed to FSDP2" in found.reason
    assert ("set_requires_gradient_sync(False)" in found.reason) == (op == "reduce_scatter")


@pytest.mark.parametrize(
    "evidence",
    [
        step(*[GATHER] * 3, groups=[replace(group, trainable=False) for group in GROUPS]),
        step(*[replace(GATHER, by_fsdp=False)] * 3, groups=[replace(group, ranks=1) for group in GROUPS]),
        step(*[replace(GATHER, by_fsdp=False)] * 3, groups=[replace(group, forwards=0) for group in GROUPS]),
        step(*[GATHER] * 3),  # nothing got a gradient
    ],
)
def test_groups_that_need_no_collective_leave_nothing_to_recognise(evidence):
    assert verdict(BUDGET, evidence).status == "passed"
