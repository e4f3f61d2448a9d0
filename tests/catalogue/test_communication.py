"""collectives_match_on_every_rank, collectives_within_budget and unsharded_modules_are_not_gathered, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_fsdp_meta.evidence.collectives import Collective, FsdpGroup, RankCollectives
from tests.catalogue.evidence_factory import (
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
    told,
    undeclared,
    verdict,
)

MATCH, BUDGET, UNSHARDED = (
    "collectives_match_on_every_rank",
    "collectives_within_budget",
    "unsharded_modules_are_not_gathered",
)
WHOLE = (EMBEDDING, HEAD)


def said(op="broadcast", *tensors, ranks=(0, 1), shape=(8, 4), root=None, **facts) -> Collective:
    root = 0 if root is None and op in ("broadcast", "reduce", "scatter", "gather") else root
    facts = {"group": "0", "dtype": "float32", "shapes": (shape,), **facts}
    return Collective(op=op, ranks=tuple(ranks), root=root, tensors=tensors, **facts)


def loading(*by_rank, step=(), groups=()):
    """Evidence of ranks that said this while loading, each of them ``step`` in the step."""
    world = healthy(len(by_rank))
    return replace(world, collectives=tuple(RankCollectives(tuple(c), tuple(step), tuple(groups)) for c in by_rank))


A, B = said("broadcast", MIDDLE), said("broadcast", EMBEDDING)


@pytest.mark.parametrize(
    "evidence",
    [
        loading([], []),
        loading([A, B], [A, B]),
        loading([], [], step=[A]),
        loading([A]),  # alone
        loading([A], [said("broadcast")]),  # a name that only one rank knows
        loading([said("broadcast", MIDDLE, HEAD)], [said("broadcast", HEAD)]),  # tied
        loading([said("broadcast", shape=(32,))], [A]),  # the same elements, flat
        loading([said("all_to_all", shape=(3, 4))], [said("all_to_all", shape=(5, 4))]),
        loading([said("all_gather of lists", shape=(3,))], [said("all_gather of lists", shape=(2,))]),
        loading([said("gather", shape=(3,))], [said("gather", shape=(2,))]),
        loading([said("scatter", shapes=((2,), (2,)))], [said("scatter", shapes=())]),  # only the root has something
        loading([said("scatter", shapes=((2,), (2,)))], [said("scatter", shapes=(), dtype="")]),
        loading([said("barrier", shapes=(), dtype="")], [said("barrier", shapes=(), dtype="")]),
        loading([said("all_gather", MIDDLE)], [said("all_gather", EMBEDDING)]),  # an optimizer that shares the work
        loading([said("all_reduce", reduction="sum")], [said("all_reduce")]),
        loading([A], [A], [B], [B]),  # not this group's ranks: see below
    ],
)
def test_what_matches_passes(evidence):
    if len(evidence.collectives) == 4:  # two groups of two, each with its own order
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
    first = said("all_reduce")
    return loading([first, B, A], [first, A, B])


def test_values_that_were_exchanged_are_not_told_again():
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
        (said("broadcast"), said("all_reduce"), "an all_reduce (float32 [8, 4])"),
        (said("broadcast"), said("broadcast", root=1), "a broadcast (float32 [8, 4]) from rank 1"),
        (said("broadcast"), said("broadcast", shape=(8, 5)), "a broadcast (float32 [8, 5]) from rank 0"),
        (said("broadcast"), said("broadcast", dtype="bfloat16"), "a broadcast (bfloat16 [8, 4]) from rank 0"),
        (said("all_reduce", reduction="sum"), said("all_reduce", reduction="max"), "an all_reduce (float32 [8, 4]) by"),
        (said("reduce_scatter"), said("reduce_scatter", shape=(4, 4)), "a reduce_scatter (float32 [4, 4])"),
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


def test_a_collective_that_one_rank_leaves_out():
    [finding] = verdict(MATCH, loading([A], [])).findings
    assert finding.actual == "collective 1 of ranks 0, 1 while loading is missing"
    assert finding.ranks == (1,)


def test_a_step_that_differs():
    evidence = loading([], [])
    steps = (replace(evidence.collectives[0], step=(A,)), replace(evidence.collectives[1], step=(B,)))
    [finding] = verdict(MATCH, replace(evidence, collectives=steps)).findings
    assert "in one training step" in finding.actual


def test_no_step_is_no_promise():
    evidence = undeclared(loading([A], [A]), "training", why="no batch")
    silent = replace(evidence, collectives=tuple(replace(one, step=None) for one in evidence.collectives))
    found = verdict(MATCH, silent)
    reason = "no training step was watched (no batch)"
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
GATHER, SCATTER = said("all_gather", by_fsdp=True), said("reduce_scatter", by_fsdp=True)
NEEDED = [GATHER] * 3 + [SCATTER] * 2


def step(*collectives, groups=GROUPS, size=2):
    return loading(*[[]] * size, step=collectives, groups=groups)


@pytest.mark.parametrize(
    "evidence",
    [
        step(*NEEDED),
        step(),
        step(*NEEDED, said("all_reduce", shape=())),  # a loss
        step(*NEEDED, said("all_gather"), said("all_gather")),  # of a batch, for a contrastive loss
        step(*NEEDED, said("all_gather", MIDDLE, optimizing=True)),
        step(*NEEDED, said("all_gather", FROZEN := "verifier.weight")),  # not FSDP2's to manage
        step(*NEEDED * 2, groups=[replace(group, forwards=2) for group in GROUPS]),
        step(*NEEDED, said("all_reduce", by_fsdp=True), groups=[replace(GROUPS[0], replicates=True), GROUPS[1]]),
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
            step(*NEEDED, said("all_reduce", by_fsdp=True)),
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


def test_a_parameter_gathered_besides():
    gather = said("all_gather", MIDDLE, shape=(3, 4))
    assert told(verdict(BUDGET, step(*NEEDED, gather, gather, said("broadcast", MIDDLE)))) == [
        (
            MIDDLE,
            (0, 1),
            "2 all_gathers (float32 [3, 4]) and 1 broadcast (float32 [8, 4]) in one training step, besides FSDP2's own",
            "gathered by FSDP2 alone",
            "",
        )
    ]


def test_collectives_of_lists_in_the_plural():
    gather = said("all_gather of lists", MIDDLE)
    [finding] = verdict(BUDGET, step(*NEEDED, gather, gather)).findings
    assert finding.actual.startswith("2 all_gathers of lists (float32 [8, 4]) in one training step")


def test_a_declared_unsharded_parameter_is_told_by_its_own_check():
    evidence = declare(step(*NEEDED, said("broadcast", MIDDLE)), unsharded=(MIDDLE,))
    assert verdict(BUDGET, evidence).status == "passed"
    assert verdict(UNSHARDED, place(evidence, MIDDLE, {})).status == "failed"


@pytest.mark.parametrize(
    ("evidence", "reason"),
    [
        (step(*NEEDED, groups=()), "FSDP2 manages nothing here, so no groups say what is to be gathered"),
        (step(*NEEDED, size=1), "alone, a rank has nobody to communicate with"),
        (replace(step(), collectives=(RankCollectives(()),) * 2), "no training step was watched"),
        (replace(empty(), collectives=(RankCollectives((), (), ()),) * 2), "FSDP2 manages nothing here, so no groups"),
    ],
)
def test_where_there_is_no_budget(evidence, reason):
    found = verdict(BUDGET, evidence)
    assert found.status == "skipped"
    assert found.reason.startswith(reason)


def whole(*collectives, **facts):
    """The middle layer is declared unsharded, and lies whole on both ranks."""
    return declare(place(step(*collectives, **facts), MIDDLE, {}, shape=(6, 4)), unsharded=(MIDDLE,))


@pytest.mark.parametrize(
    "evidence",
    [
        whole(*NEEDED),
        whole(said("all_reduce", shape=(6, 4))),  # of its gradient
        whole(said("broadcast", EMBEDDING)),
        whole(said("broadcast", MIDDLE, optimizing=True)),
        whole(groups=()),  # a loader that shards by itself
    ],
)
def test_what_stays_where_it_is_passes(evidence):
    assert verdict(UNSHARDED, evidence).status == "passed"


def test_an_unsharded_parameter_that_is_moved():
    moves = [said("broadcast", MIDDLE, shape=(6, 4))] * 2
    expected = "used where it is, as declared unsharded"
    assert told(verdict(UNSHARDED, whole(*moves))) == [
        (MIDDLE, (0, 1), "moved by 2 broadcasts (float32 [6, 4]) in one training step", expected, "")
    ]


def test_moved_on_one_rank():
    evidence = whole(said("all_to_all"))
    odd = replace(evidence.collectives[1], step=(said("all_to_all", MIDDLE),))
    found = verdict(UNSHARDED, replace(evidence, collectives=(evidence.collectives[0], odd)))
    assert [finding.ranks for finding in found.findings] == [(1,)]


def test_what_is_sharded_all_the_same_is_told_elsewhere():
    evidence = declare(step(said("broadcast", MIDDLE)), unsharded=(MIDDLE,))
    found = verdict(UNSHARDED, evidence)
    assert (found.status, found.findings) == ("skipped", ())
    assert MIDDLE in str(found.reason)


@pytest.mark.parametrize(
    ("evidence", "reason"),
    [
        (step(*NEEDED), "Subject(unsharded=...) is not declared"),
        (whole(size=1), "alone, a rank has nobody to communicate with"),
        (replace(empty(), collectives=(RankCollectives((), (), ()),) * 2), "Subject(unsharded=...) is not declared"),
    ],
)
def test_nothing_to_keep_in_place(evidence, reason):
    assert (verdict(UNSHARDED, evidence).status, verdict(UNSHARDED, evidence).reason) == ("skipped", reason)


def test_a_tensor_of_another_shape_is_judged_elsewhere():
    evidence = change(step(*NEEDED, said("all_gather", MIDDLE)), MIDDLE, [1], shape=(5, 5))
    found = verdict(BUDGET, evidence)
    assert (found.status, found.reason) == ("skipped", left_out("same_manifest_on_every_rank", MIDDLE))
    assert verdict(MATCH, drop(evidence, MIDDLE)).status == "passed"
