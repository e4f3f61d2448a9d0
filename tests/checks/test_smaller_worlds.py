"""What smaller worlds add to a finding: where it starts, and which of two causes remains."""

from __future__ import annotations

import pytest

from pytest_fsdp_meta.catalogue import Finding, built_in
from pytest_fsdp_meta.evidence import SmallerWorld
from pytest_fsdp_meta.judging.findings import either
from pytest_fsdp_meta.judging.smaller_worlds import COMPARE_RANKS, add_smaller_worlds, may_be_due_to_ranks

NAME = "layers.0.weight"
CAUSES = either("the gradient is wrong: ", "a hook changes it", "it is reduced over too few ranks", "look")
BOTH, ALONE, SHARDED = (CAUSES[key] for key in ("cause", "cause_alone", "cause_sharded"))
AS_WELL = "a world of one rank fails as well, so not in the sharding: compare the forward, the loss and the step"


def world(*mesh: tuple[str, int], fails: str | None = None, passes: bool = False, problem: str = "") -> SmallerWorld:
    failed = {} if fails is None else {"grad_parity": (fails,)}
    return SmallerWorld(mesh, failed, ("grad_parity",) if passes else (), problem)


def judged(smaller: list[SmallerWorld], check: str = "grad_parity", tensor: str | None = NAME, origin: str = ""):
    finding = Finding(tensor, (0, 1), "differs", "", origin=origin, **CAUSES)
    [found] = add_smaller_worlds(built_in()[check], [finding], smaller)
    return found.origin, found.cause


TP_FAILS = [world(passes=True), world(("dp_shard", 2), passes=True), world(("tp", 2), fails=NAME)]
ALL_PASS = [world(passes=True), world(("dp_shard", 2), passes=True), world(("tp", 2), passes=True)]
SEVERAL = (
    "a world of one rank passes, so it takes several ranks: compare how rows are divided, and how loss and gradients "
    "are reduced"
)
TOGETHER = "a world of one rank passes, and so do dp_shard=2 alone and tp=2 alone: only together do they fail"


@pytest.mark.parametrize(
    ("smaller", "expected"),
    [
        ([], ("", BOTH)),
        ([world(fails=NAME)], (AS_WELL, ALONE)),
        ([world(fails="")], (AS_WELL, ALONE)),
        ([world(fails="another.weight")], (SEVERAL, SHARDED)),
        ([world(passes=True)], (SEVERAL, SHARDED)),
        ([world()], ("", BOTH)),
        ([world(problem="in a world of 1, rank 0 raised E")], ("not known: in a world of 1, rank 0 raised E", BOTH)),
        (TP_FAILS, ("a world of one rank passes; tp=2 alone fails, dp_shard=2 alone passes", SHARDED)),
        (ALL_PASS, (TOGETHER, SHARDED)),
    ],
)
def test_where_it_starts_and_the_cause_that_is_left(smaller, expected):
    assert judged(smaller) == expected


def test_findings_of_one_cause_start_in_one_place():
    """In a smaller world, some of the tensors may differ by less than is noticed."""
    findings = [Finding(name, (0, 1), "differs", "", **CAUSES) for name in (NAME, "another.weight")]
    other = Finding("third.weight", (0, 1), "differs", "", cause="something else", remedy="look")
    found = add_smaller_worlds(built_in()["grad_parity"], [*findings, other], [world(fails=NAME)])
    assert [(one.origin, one.cause) for one in found] == [
        (AS_WELL, ALONE),
        (AS_WELL, ALONE),
        (SEVERAL, "something else"),
    ]


def test_a_finding_about_the_model_is_the_same_in_any_tensor():
    assert judged([world(fails="another.weight")], tensor=None)[1] == ALONE


def test_a_module_that_is_known_needs_no_advice():
    assert judged([world(fails=NAME)], origin="layers.0.act")[0] == "layers.0.act; a world of one rank fails as well"
    assert judged([world(passes=True)], origin="layers.0.act")[0] == "layers.0.act; a world of one rank passes"


def test_every_check_that_may_be_due_to_ranks_says_what_to_compare():
    checks = [check for check in built_in() if may_be_due_to_ranks(check)]
    for check in checks:
        finding = Finding(None, (0, 1), "differs", "", cause="", remedy="", cause_alone="alone")
        [found] = add_smaller_worlds(check, [finding], [SmallerWorld((), {}, (check.id,), "")])
        compare = COMPARE_RANKS.get(check.id, COMPARE_RANKS[check.family])
        assert found.origin == f"a world of one rank passes, so it takes several ranks: compare {compare}"
    assert {check.id for check in checks} | {check.family for check in checks} >= COMPARE_RANKS.keys()


@pytest.mark.parametrize("check", ["replicas_equal", "dtensor_placements", "no_meta_params"])
def test_checks_that_compare_ranks_or_say_enough_are_left_alone(check):
    assert judged([world(passes=True)], check=check) == ("", BOTH)
