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
    findings_of,
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
        loading(
            [collective("scatter", shapes=((2,), (2,)))], [collective("scatter", shapes=())]
        ),  # only the root has something
        loading([collective("scatter", shapes=((2,), (2,)))], [collective("scatter", shapes=(), dtype="")]),
        loading([collective("barrier", shapes=(), dtype="")], [collective("barrier", shapes=(), dtype="")]),
        loading(
            [collective("all_gather", MIDDLE)], [collective("all_gather", EMBEDDING)]
        ),  # an optimizer that shards its work
        loading([collective("all_reduce", reduction="sum")], [collective("all_reduce")]),
        loading([A], [A], [B], [B]),  # two groups; the test changes their ranks
    ],
)
def test_what_matches_passes(evidence):
    if len(evidence.collectives) == 4:  # give the second group its own ranks
        others = tuple(replace(c, loading=(replace(B, ranks=(2, 3)),)) for c in evidence.collectives[2:])
        evidence = replace(evidence, collectives=evidence.collectives[:2] + others)
    assert verdict(MATCH, evidence).status == "passed"


def test_broadcasts_in_another_order_on_one_rank():
    found = verdict(MATCH, swapped())
    [finding] = found.findings
    assert (finding.tensor, finding.ranks, finding.detail) == (None, (1,), "2 of 3 differ")
    assert finding.actual == (
        f"collective 2 of ranks 0, 1 while loading is a broadcast of {MIDDLE} (float32 [8, 4]) from rank 0"
    )
    assert finding.expected == f"a broadcast of {EMBEDDING} (float32 [8, 4]) from rank 0, as on rank 0"
    assert set(finding.condemns) == {EMBEDDING, MIDDLE}


def swapped():
    first = collective("all_reduce")
    return loading([first, B, A], [first, A, B])


def test_swapped_values_are_not_reported_again():
    evidence = swapped()
    values = tuple(
        tuple(replace(c, equal=False, differing=1, index=(0, 0)) if c.name in (EMBEDDING, MIDDLE) else c for c in rank)
        for rank in evidence.values
    )
    found = verdict("params_equal_reference", replace(evidence, values=values))
    assert (found.status, found.findings) == ("skipped", ())
    assert set(found.unjudged) == {MATCH}


@pytest.mark.parametrize(
    ("one", "other", "what"),
    [
        (collective("broadcast"), collective("all_reduce"), "an all_reduce (float32 [8, 4])"),
        (collective("broadcast"), collective("broadcast", root=1), "a broadcast (float32 [8, 4]) from rank 1"),
        (collective("broadcast"), collective("broadcast", shape=(8, 5)), "a broadcast (float32 [8, 5]) from rank 0"),
        (
            collective("broadcast"),
            collective("broadcast", dtype="bfloat16"),
            "a broadcast (bfloat16 [8, 4]) from rank 0",
        ),
        (
            collective("all_reduce", reduction="sum"),
            collective("all_reduce", reduction="max"),
            "an all_reduce (float32 [8, 4]) by",
        ),
        (collective("reduce_scatter"), collective("reduce_scatter", shape=(4, 4)), "a reduce_scatter (float32 [4, 4])"),
    ],
)
def test_one_collective_that_differs(one, other, what):
    [finding] = verdict(MATCH, apart(one, other)).findings
    assert finding.ranks == (2,)
    assert finding.actual.startswith(f"collective 1 of ranks 0-2 while loading is {what}")
    assert finding.expected.endswith("as on ranks 0, 1")


def apart(one, other):
    ranks = (0, 1, 2)
    return loading([replace(one, ranks=ranks)], [replace(one, ranks=ranks)], [replace(other, ranks=ranks)])


def test_a_collective_that_one_rank_omits():
    [finding] = verdict(MATCH, loading([A], [])).findings
    assert finding.actual == "collective 1 of ranks 0, 1 while loading is missing"
    assert finding.ranks == (1,)


def test_a_step_that_differs():
    evidence = loading([], [])
    steps = (replace(evidence.collectives[0], step=(A,)), replace(evidence.collectives[1], step=(B,)))
    [finding] = verdict(MATCH, replace(evidence, collectives=steps)).findings
    assert "in one training step" in finding.actual


def test_without_a_step_only_loading_is_judged():
    evidence = undeclared(loading([A], [A]), "training", why="no batch")
    silent = replace(evidence, collectives=tuple(replace(one, step=None) for one in evidence.collectives))
    found = verdict(MATCH, silent)
    reason = "no training step was recorded (no batch)"
    assert (found.status, found.reason) == ("skipped", f"passed for what could be checked; {reason}")
    apart = replace(silent, collectives=(RankCollectives((A,)), RankCollectives((B,))))
    assert (verdict(MATCH, apart).status, verdict(MATCH, apart).reason) == ("failed", reason)


@pytest.mark.parametrize("id", [MATCH, BUDGET, UNSHARDED])
def test_a_missing_observation(id):
    evidence = undeclared(healthy(), "collectives", why="nobody asked")
    assert (verdict(id, evidence).status, verdict(id, evidence).reason) == ("skipped", "nobody asked")


GROUPS = (
    FsdpGroup((MIDDLE,), forwards=1, reshards=True, trainable=True),
    FsdpGroup(WHOLE, forwards=1, reshards=False, trainable=True),
)
GATHER, SCATTER = collective("all_gather", by_fsdp=True), collective("reduce_scatter", by_fsdp=True)
NEEDED = [GATHER] * 3 + [SCATTER] * 2


def step(*collectives, groups=GROUPS, size=2):
    return loading(*[[]] * size, step=collectives, groups=groups)


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
    ("evidence", "actual", "expected"),
    [
        (step(*NEEDED, GATHER), "4 all_gathers of FSDP groups in one training step", "at most 3 for 2 groups"),
        (step(*NEEDED, SCATTER), "3 reduce_scatters of FSDP groups in one training step", "at most 2 for 2 groups"),
        (
            step(*NEEDED, groups=[replace(GROUPS[0], trainable=False), GROUPS[1]]),
            "2 reduce_scatters of FSDP groups in one training step",
            "at most 1 for 2 groups",
        ),
        (
            step(*NEEDED, collective("all_reduce", by_fsdp=True)),
            "1 all_reduce of FSDP groups in one training step",
            "at most 0 for 2 groups",
        ),
    ],
)
def test_more_than_groups_explain(evidence, actual, expected):
    [finding] = verdict(BUDGET, evidence).findings
    assert (finding.tensor, finding.ranks, finding.actual) == (None, (0, 1), actual)
    assert finding.expected.startswith(expected)


def test_one_rank_gathers_more():
    evidence = step(*NEEDED)
    odd = replace(evidence.collectives[1], step=(*NEEDED, GATHER))
    assert [
        f.ranks for f in verdict(BUDGET, replace(evidence, collectives=(evidence.collectives[0], odd))).findings
    ] == [(1,)]


def test_a_parameter_gathered_in_addition_to_fsdp():
    gather = collective("all_gather", MIDDLE, shape=(3, 4))
    assert findings_of(verdict(BUDGET, step(*NEEDED, gather, gather, collective("broadcast", MIDDLE)))) == [
        (
            MIDDLE,
            (0, 1),
            "2 all_gathers (float32 [3, 4]) and 1 broadcast (float32 [8, 4]) in one training step, in addition to "
            "FSDP2's own",
            "communicated by FSDP2 only",
            "",
        )
    ]


def test_collectives_of_lists_in_the_plural():
    gather = collective("all_gather of lists", MIDDLE)
    [finding] = verdict(BUDGET, step(*NEEDED, gather, gather)).findings
    assert finding.actual.startswith("2 all_gathers of lists (float32 [8, 4]) in one training step")


def test_a_declared_unsharded_parameter_is_reported_by_its_own_check():
    evidence = declare(step(*NEEDED, collective("broadcast", MIDDLE)), unsharded=(MIDDLE,))
    assert verdict(BUDGET, evidence).status == "passed"
    assert verdict(UNSHARDED, place(evidence, MIDDLE, {})).status == "failed"


@pytest.mark.parametrize(
    ("evidence", "reason"),
    [
        (step(*NEEDED, groups=()), "FSDP2 manages no parameters here, so there are no FSDP groups to gather"),
        (step(*NEEDED, size=1), "a single rank does not communicate"),
        (replace(step(), collectives=(RankCollectives(()),) * 2), "no training step was recorded"),
        (
            replace(empty(), collectives=(RankCollectives((), (), ()),) * 2),
            "FSDP2 manages no parameters here, so there are no FSDP groups",
        ),
    ],
)
def test_where_there_is_no_budget(evidence, reason):
    found = verdict(BUDGET, evidence)
    assert found.status == "skipped"
    assert found.reason.startswith(reason)


def whole(*collectives, **facts):
    """Return evidence in which the middle layer is declared unsharded and is whole on both ranks."""
    return declare(place(step(*collectives, **facts), MIDDLE, {}, shape=(6, 4)), unsharded=(MIDDLE,))


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


def test_an_unsharded_parameter_that_is_communicated():
    moves = [collective("broadcast", MIDDLE, shape=(6, 4))] * 2
    expected = "used locally, because it is declared unsharded"
    assert findings_of(verdict(UNSHARDED, whole(*moves))) == [
        (MIDDLE, (0, 1), "communicated by 2 broadcasts (float32 [6, 4]) in one training step", expected, "")
    ]


def test_an_unsharded_parameter_that_one_rank_communicates():
    evidence = whole(collective("all_to_all"))
    odd = replace(evidence.collectives[1], step=(collective("all_to_all", MIDDLE),))
    found = verdict(UNSHARDED, replace(evidence, collectives=(evidence.collectives[0], odd)))
    assert [finding.ranks for finding in found.findings] == [(1,)]


def test_a_sharded_parameter_is_reported_by_another_check():
    evidence = declare(step(collective("broadcast", MIDDLE)), unsharded=(MIDDLE,))
    found = verdict(UNSHARDED, evidence)
    assert (found.status, found.findings) == ("skipped", ())
    assert MIDDLE in str(found.reason)


@pytest.mark.parametrize(
    ("evidence", "reason"),
    [
        (step(*NEEDED), "Subject(unsharded=...) is not declared"),
        (whole(size=1), "a single rank does not communicate"),
        (replace(empty(), collectives=(RankCollectives((), (), ()),) * 2), "Subject(unsharded=...) is not declared"),
    ],
)
def test_nothing_to_judge(evidence, reason):
    assert (verdict(UNSHARDED, evidence).status, verdict(UNSHARDED, evidence).reason) == ("skipped", reason)


def test_a_tensor_of_another_shape_is_reported_by_another_check():
    evidence = change(step(*NEEDED, collective("all_gather", MIDDLE)), MIDDLE, [1], shape=(5, 5))
    found = verdict(BUDGET, evidence)
    assert (found.status, found.reason) == ("skipped", left_out("same_manifest_on_every_rank", MIDDLE))
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
