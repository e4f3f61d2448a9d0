"""What the check of drawn weights makes of parts with equal numbers and of the spread of a shard's size."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from pytest_fsdp_meta.checks.drawn.judge import Measured, can_tell, fans_of, limit, wrong_fan
from pytest_fsdp_meta.evidence import DrawnTensor, Evidence, RankDraws, SmallerWorld
from tests.checks.evidence_factory import (
    EMBEDDING,
    HEAD,
    MIDDLE,
    change,
    declare,
    drew,
    drop,
    findings_of,
    healthy,
    on_some,
    parameter,
    place,
    spread,
    undeclared,
    verdict,
)

ID = "drawn_weights_are_one_draw"
SAME = ("the same numbers in different parts", "other numbers in each part", "")


def redraw(evidence: Evidence, name: str, ranks: Iterable[int] | None = None, **facts: Any) -> Evidence:
    """Change facts of what these ranks drew (default: all); ``own`` and ``reference`` replace a spread."""

    def edit(held: RankDraws) -> RankDraws:
        return replace(held, draws=tuple(replace(d, **facts) if d.name == name else d for d in held.draws))

    return replace(evidence, draws=on_some(evidence.draws, ranks, edit))


def one_seed(evidence: Evidence, name: str = MIDDLE, ranks: Iterable[int] | None = None) -> Evidence:
    return redraw(change(evidence, name, ranks, digest="one draw"), name, ranks, own=spread("one draw"))


def on_columns(world: int = 2) -> Evidence:
    """MIDDLE with 64 x 32 elements, sharded in columns."""
    evidence = place(healthy(world), MIDDLE, {"dp_shard": world}, "S(1)", shape=(64, 32))
    return drew(evidence, MIDDLE)


def test_parts_of_different_sizes_are_compared_by_their_first_elements():
    evidence = drew(healthy(4, parameters={MIDDLE: (7, 4)}), MIDDLE)  # three parts of two rows, one of one
    longer = redraw(evidence, MIDDLE, own=replace(spread("longer"), head="head of one draw"))
    found = redraw(longer, MIDDLE, [3], own=replace(spread("shorter"), head="head of one draw"))
    detail = "compared by their first elements, because the parts differ in size"
    assert findings_of(verdict(ID, found)) == [(MIDDLE, (0, 1, 2, 3), *SAME[:2], detail)]
    unknown = redraw(longer, MIDDLE, own=replace(spread("longer"), head=""))
    assert verdict(ID, unknown).findings == ()


def test_equal_parts_are_right_where_the_reference_repeats_itself():
    """Mamba's A_log has the same row for every channel, and a sparse upcycling copies one expert."""
    evidence = redraw(one_seed(drew(healthy(), MIDDLE)), MIDDLE, reference=spread("rows alike"))
    assert verdict(ID, evidence).status == "passed"


def without_reference(evidence: Evidence, *names: str) -> Evidence:
    for name in names:
        evidence = redraw(evidence, name, reference=None)
    return undeclared(replace(evidence, reference=None), "reference", why="Subject(reference=...) is not declared")


@pytest.mark.parametrize("dim", ["rows alike", "ep"])
def test_equal_parts_may_be_meant_where_no_reference_shows_that_they_are_not(dim):
    evidence = one_seed(drew(healthy(), MIDDLE))
    if dim == "ep":
        evidence = one_seed(drew(place(healthy(), MIDDLE, {"ep": 2}, "S(0)", shape=(6, 4)), MIDDLE))
    else:
        evidence = redraw(evidence, MIDDLE, own=spread("one draw", distinct=4))
    found = verdict(ID, without_reference(evidence, MIDDLE))
    alike = f"{MIDDLE} is alike on ranks 0, 1, which a reference could show to be meant; and 1 more"
    assert (found.status, found.why, found.reason) == ("skipped", "partly checked", alike)


def copied(evidence: Evidence, name: str, original: str, ranks: Iterable[int] | None = None) -> Evidence:
    """Let a tensor have the numbers of another one on these ranks."""
    chosen = range(len(evidence.inventory)) if ranks is None else ranks
    for rank in chosen:
        digest = evidence.inventory[rank].by_name[original].digest
        evidence = change(evidence, name, [rank], digest=digest)
    return evidence


def test_stages_that_draw_from_one_seed():
    """Modalities/modalities#426: tensors on different stages are alike."""
    whole = drew(healthy(mesh={"pp": 2}), EMBEDDING, MIDDLE)
    alike = change(whole, MIDDLE, [1], digest=whole.inventory[0].by_name[EMBEDDING].digest)
    parts = drop(drop(alike, EMBEDDING, [1]), MIDDLE, [0])
    (finding,) = verdict(ID, declare(parts, stages=((0,), (1,)), by_stage=(EMBEDDING, MIDDLE))).findings
    assert (finding.tensor, finding.actual) == (MIDDLE, f"the same numbers as {EMBEDDING}")
    assert finding.cause == "every stage of the pipeline draws its own layers from the same seed"


def test_tensors_may_be_equal_where_the_reference_copies_them_or_ties_them():
    evidence = copied(drew(healthy(), EMBEDDING, MIDDLE), MIDDLE, EMBEDDING)
    for rank in range(2):
        for name in (EMBEDDING, MIDDLE):
            evidence = redraw(evidence, name, [rank], reference=spread(f"reference's part {rank}"))
    assert verdict(ID, evidence).status == "passed"
    tied = copied(drew(healthy(), EMBEDDING, HEAD), HEAD, EMBEDDING)
    assert verdict(ID, tied).status == "passed"
    few = spread("few", distinct=2, surprise=3.0, elements=4, head="")
    small = redraw(redraw(copied(drew(healthy(), EMBEDDING, MIDDLE), MIDDLE, EMBEDDING), MIDDLE, own=few), EMBEDDING)
    assert verdict(ID, small).findings == ()


def test_a_constant_is_not_a_draw():
    zeros = spread("zeros", 0.0, distinct=1, surprise=0.0)
    found = verdict(ID, redraw(change(drew(healthy(), MIDDLE), MIDDLE, digest="zeros"), MIDDLE, own=zeros))
    assert (found.status, found.reason) == ("skipped", f"every drawn weight is constant (first: {MIDDLE})")
    both = redraw(drew(change(healthy(), MIDDLE, digest="zeros"), MIDDLE, HEAD), MIDDLE, own=zeros)
    assert verdict(ID, both).status == "passed"


ZEROS = spread("zeros", 0.0, distinct=1, surprise=0.0)
FEW = spread("two numbers", elements=4, distinct=2, surprise=2.8, head="")
ALIKE = f"{MIDDLE} is alike on ranks 0, 1, but"


@pytest.mark.parametrize(
    ("evidence", "reason"),
    [
        (
            redraw(one_seed(drew(healthy(), MIDDLE)), MIDDLE, reference=None),
            f"{ALIKE} the reference does not draw it; and 1 more",
        ),
        (redraw(one_seed(drew(healthy(), MIDDLE)), MIDDLE, reference=ZEROS), f"{ALIKE} the reference does not draw it"),
        (
            redraw(change(drew(healthy(), MIDDLE), MIDDLE, digest="two numbers"), MIDDLE, own=FEW),
            f"{ALIKE} so few elements may be equal by chance",
        ),
        (
            one_seed(drew(healthy(), MIDDLE, by_dtensor=True)),
            "on the CPU torch gives each rank the same numbers for its part; judge this on GPUs",
        ),
    ],
    ids=["no values", "zeros in the reference", "few elements", "DTensor"],
)
def test_parts_that_may_be_equal_are_partly_checked(evidence, reason):
    found = verdict(ID, evidence)
    assert (found.status, found.why) == ("skipped", "partly checked")
    assert reason in found.reason


def test_dtensor_draws_are_judged_on_gpus():
    evidence = one_seed(drew(healthy(), MIDDLE, by_dtensor=True))
    on_gpus = replace(evidence, world=replace(evidence.world, device_type="cuda", backend="nccl"))
    assert verdict(ID, on_gpus).status == "failed"


def with_spread(factor: float) -> Evidence:
    evidence = redraw(on_columns(), MIDDLE, [0], own=spread("first half", factor))
    return redraw(evidence, MIDDLE, [1], own=spread("second half", factor))


@pytest.mark.parametrize("factor", [0.02, 0.5, 0.9, 1.0, 1.25, 1.7, 2.5])
def test_another_spread_than_a_shards_is_the_authors_choice(factor):
    assert verdict(ID, with_spread(factor)).status == "passed"


@pytest.mark.parametrize(("alone", "status"), [(2**0.5, "passed"), (1.0, "failed")])
def test_a_shards_spread_is_the_authors_choice_if_one_rank_draws_it_as_well(alone, status):
    drawn = (DrawnTensor(MIDDLE, spread("whole", alone), spread("whole")),)
    smaller = (SmallerWorld((), draws=drawn), SmallerWorld((("tp", 2),), draws=drawn))
    assert verdict(ID, replace(with_spread(2**0.5), smaller=smaller)).status == status


def test_other_tails_are_another_distribution():
    """Trained weights in the reference have some spread by chance, but hardly the tails of a draw."""
    evidence = on_columns()
    for rank in range(2):
        own = spread(f"part {rank}", 2**0.5)
        trained = spread(f"part {rank}", fourth=5.0)
        evidence = redraw(evidence, MIDDLE, [rank], own=own, reference=trained)
    assert verdict(ID, evidence).status == "passed"


def test_a_bias_is_scaled_by_the_fan_of_its_weight():
    weight = parameter("out.weight", (32, 64), {"tp": 4}, ["S(1)"], [0])
    fans = fans_of(parameter("out.bias", (32,)), weight)
    assert [(fan.ratio, fan.shard, fan.whole, fan.of) for fan in fans] == [
        (96 / 48, (32, 16), (32, 64), "out.weight"),
        (4.0, (32, 16), (32, 64), "out.weight"),
    ]
    assert fans_of(parameter("out.bias", (32,)), None) == []
    assert fans_of(parameter("out.weight", (32, 64)), None) == []


def test_the_error_rate_is_divided_by_the_number_of_tests():
    assert limit(1) == pytest.approx(4.89, abs=0.01)
    assert limit(1000) == pytest.approx(6.11, abs=0.01)
    fans = fans_of(parameter("a", (64, 32), {"tp": 2}, ["S(1)"], [0]), None)
    measured = Measured(log=0.69, error=0.13, own=1.41, reference=1.0, elements=500, distinct=500)
    assert wrong_fan(measured, fans, tests=1) is not None
    assert wrong_fan(measured, fans, tests=1000) is None
    assert not can_tell(measured, fans, tests=1)
    assert can_tell(replace(measured, error=0.08), fans, tests=1)


def test_a_drawn_weight_that_every_rank_holds_whole_has_no_parts():
    assert verdict(ID, drew(place(healthy(), MIDDLE, {}), MIDDLE)).status == "skipped"
    assert DrawnTensor(MIDDLE, spread("a")).reference is None
