"""The judges of schedulers, averaged weights and other state beside the model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_fsdp_meta.checks.training.facts import Followed
from pytest_fsdp_meta.evidence import Comparison, Evidence, Noise, TensorNoise
from tests.checks.evidence_factory import (
    COUNTER,
    MIDDLE,
    add,
    described,
    healthy,
    kept_beside,
    measured,
    on_runs,
    remeasured,
    verdict,
    with_reference,
)

PARITY, ROUND_TRIP = "beside_parity", "beside_round_trip"
EMA = f"ema.{MIDDLE}"
HEALTHY = kept_beside(healthy())


def shown(check: str, evidence: Evidence) -> list[tuple[str | None, tuple[int, ...], str, str]]:
    return [(f.tensor, f.ranks, f.actual, f.expected) for f in verdict(check, evidence).findings]


def test_an_average_that_moves_otherwise():
    [found] = verdict(PARITY, remeasured(HEALTHY, EMA, 2.0, observed="beside")).findings
    assert (found.tensor, found.ranks, found.actual) == (EMA, (0, 1), "moves 2 times as far as the reference's")


@pytest.mark.parametrize(
    ("moved", "shares"), [(45, ["1.1%"]), (4100, []), (0, [])], ids=["rounded away", "follows", "updated less often"]
)
def test_an_average_that_stands_still_while_the_parameters_move(moved, shares):
    found = verdict(PARITY, on_runs(HEALTHY, None, followed=(Followed("ema", "bfloat16", moved, 4139),)))
    actual = [f"moves in {share} of the elements in which the parameters move" for share in shares]
    assert [(f.tensor, f.ranks, f.actual) for f in found.findings] == [("ema", (0, 1), text) for text in actual]
    assert all(f.cause.startswith("it is kept in bfloat16") for f in found.findings)


def test_a_rank_without_the_parameter_keeps_no_average_of_it():
    first, second = HEALTHY.training
    entry = replace(first.beside[0], name="ema.expert.weight")
    evidence = replace(HEALTHY, training=(replace(first, beside=(*first.beside, entry)), second))
    assert [one[:3] for one in shown(PARITY, evidence)] == [("ema.expert.weight", (1,), "is not kept")]
    assert shown(PARITY, add(evidence, replace(HEALTHY.inventory[0].by_name[MIDDLE], name="expert.weight"), [0])) == []


def test_what_the_reference_has_under_no_name_is_said():
    found = verdict(PARITY, on_runs(HEALTHY, None, beside=(), beside_alone=("ema.module.x",)))
    assert (found.status, found.reason) == (
        "skipped",
        "ema.module.x: the reference keeps nothing of that name, so this was not compared",
    )


def test_an_average_where_the_reference_lacks_what_the_ranks_have():
    off = remeasured(with_reference(HEALTHY, not_given={COUNTER: "differs"}), EMA, 1.0, 2.0, observed="beside")
    assert verdict(PARITY, off).why == "differs"
    still = remeasured(with_reference(HEALTHY, not_given={COUNTER: "differs"}), EMA, 0.0, observed="beside")
    assert [one[0] for one in shown(PARITY, still)] == [EMA]


def test_a_counter_is_compared_exactly():
    counter = Comparison("ema.n_averaged", False, elements=1, differing=1, expected=3.0, actual=6.0)
    counted = on_runs(HEALTHY, None, beside=(counter,))
    assert shown(PARITY, counted) == [("ema.n_averaged", (0, 1), "6 after the training", "3")]


STILL = Comparison(EMA, True, elements=24, measure=replace(measured(24), actual=0.0, truth=0.0, apart=0.0, dot=0.0))
PLAIN = Comparison(EMA, False, problem="shape (3, 4)", should_be="(6, 4), as in the reference")


@pytest.mark.parametrize(
    ("beside", "reason"),
    [
        (
            (STILL,),
            "nothing that is kept beside the model moves in these steps, neither here nor in the reference",
        ),
        ((*HEALTHY.training[0].beside, PLAIN), "plain tensors of another shape than the reference's"),
        ((), "the reference keeps no tensors of it: give Subject(beside=...) a function of the model"),
    ],
    ids=["nothing moves", "plain tensors that hold a shard", "only the ranks keep it"],
)
def test_what_is_not_compared_with_the_reference(beside, reason):
    found = verdict(PARITY, on_runs(HEALTHY, None, beside=beside))
    assert found.status == "skipped"
    assert reason in found.reason


def test_what_is_rounded_away_altogether_may_be_updated_less_often():
    still = on_runs(HEALTHY, None, beside=(STILL,), followed=(Followed("ema", "bfloat16", 0, 4139),))
    assert verdict(PARITY, still).reason.endswith("steps= if it begins later); ema is kept in bfloat16")


@pytest.mark.parametrize(("distance", "status"), [(0.5, "passed"), (0.01, "failed")])
def test_an_average_may_differ_by_the_noise_of_its_parameter(distance, status):
    noise = Noise(updates={MIDDLE: TensorNoise(distance, 0.0)})
    runs = on_runs(remeasured(HEALTHY, EMA, apart=0.5, observed="beside"), None, noise=noise)
    assert verdict(PARITY, runs).status == status


@pytest.mark.parametrize(
    ("value", "actual", "expected"),
    [
        ("float32 (6, 4) other", "different after loading", "as saved"),
        ("bfloat16 (6, 4) rounded", "bfloat16 after loading", "float32, as saved"),
        (None, "no state after loading", "a state, as saved"),
    ],
)
def test_other_values_another_dtype_and_no_state_at_all(value, actual, expected):
    first, second = HEALTHY.resumed
    states = {name: kept for name, kept in second.beside.items() if name != EMA}
    states |= described(ema__layers__0__weight=value) if value else {}
    evidence = replace(HEALTHY, resumed=(first, replace(second, beside=states)))
    assert shown(ROUND_TRIP, evidence) == [(EMA, (1,), actual, expected)]


def average(**entries):
    return described(**{f"ema__{entry}": text for entry, text in entries.items()})


@pytest.mark.parametrize(
    ("built", "cause"),
    [
        ({"n": "0", "weight": "zeros"}, "resume() restores other entries of this object and leaves this one"),
        ({"n": "7", "weight": "zeros"}, "resume() rebuilds it from the loaded model, or changes it after"),
        ({"n": "0"}, "save() or resume() leaves it out"),
    ],
    ids=["as it was built", "changed otherwise", "all of it as it was built"],
)
def test_an_entry_of_an_average_that_is_not_as_it_was_saved(built, cause):
    saved = average(n="3", weight="ones")
    before = tuple(replace(run, beside=saved) for run in HEALTHY.continued)
    loaded = average(n="0", weight="ones")
    after = tuple(replace(run, beside=loaded, beside_before=average(**built)) for run in before)
    found = verdict(ROUND_TRIP, replace(HEALTHY, continued=before, resumed=after))
    assert [finding.cause[: len(cause)] for finding in found.findings] == [cause]


def test_how_often_a_scheduler_was_called_is_not_compared():
    before, after = (
        tuple(replace(run, beside={**run.beside, **described(scheduler___step_count=count)}) for run in HEALTHY.resumed)
        for count in ("4", "1")
    )
    assert verdict(ROUND_TRIP, replace(HEALTHY, continued=before, resumed=after)).status == "passed"
