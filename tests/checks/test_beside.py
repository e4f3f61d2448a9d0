"""The judges of schedulers, averaged weights and other state beside the model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_fsdp_meta.evidence import Comparison, Evidence, Noise, TensorNoise
from tests.checks.evidence_factory import (
    MIDDLE,
    healthy,
    kept_beside,
    measured,
    on_runs,
    remeasured,
    verdict,
)

PARITY, ROUND_TRIP, UPDATES, RESUME = "beside_parity", "beside_round_trip", "update_parity", "resume_parity"
EMA = f"ema.{MIDDLE}"
HEALTHY = kept_beside(healthy())


def shown(check: str, evidence: Evidence) -> list[tuple[str | None, tuple[int, ...], str, str]]:
    return [(f.tensor, f.ranks, f.actual, f.expected) for f in verdict(check, evidence).findings]


def with_entry(comparison: Comparison) -> Evidence:
    return on_runs(HEALTHY, None, beside=(comparison,))


def test_an_average_that_moves_another_way_or_farther():
    assert shown(PARITY, remeasured(HEALTHY, EMA, 2.0, observed="beside")) == [
        (EMA, (0, 1), "moves 2 times as far as the reference's", "equal within 0.002")
    ]
    assert shown(PARITY, remeasured(HEALTHY, EMA, apart=2.0, ranks=[1], observed="beside")) == [
        (EMA, (1,), "moves otherwise than the reference's", "equal within 0.002")
    ]


def test_an_average_that_one_rank_never_updates():
    found = verdict(PARITY, remeasured(HEALTHY, EMA, 0.0, ranks=[1], observed="beside")).findings
    assert [(f.ranks, f.actual, f.expected) for f in found] == [((1,), "does not move", "updated after each step")]
    assert found[0].cause.startswith("nothing updates it")


def test_a_counter_is_compared_exactly():
    counter = Comparison("ema.n_averaged", False, elements=1, differing=1, expected=3.0, actual=6.0)
    assert shown(PARITY, with_entry(counter)) == [("ema.n_averaged", (0, 1), "6 after the training", "3")]


def test_an_average_that_moves_nowhere_shows_nothing():
    still = Comparison(EMA, True, elements=24, measure=replace(measured(24), actual=0.0, truth=0.0, apart=0.0, dot=0.0))
    found = verdict(PARITY, with_entry(still))
    assert (found.status, found.reason) == (
        "skipped",
        "nothing that is kept beside the model moves in these steps, neither here nor in the reference",
    )


def test_plain_tensors_that_hold_a_shard_are_not_judged():
    plain = Comparison(EMA, False, problem="shape (3, 4)", should_be="(6, 4), as in the reference")
    found = verdict(PARITY, on_runs(HEALTHY, None, beside=(*HEALTHY.training[0].beside, plain)))
    assert found.status == "skipped"
    assert "holds plain tensors of another shape than the reference's" in found.reason


def test_what_only_the_ranks_keep_is_not_compared_with_the_reference():
    found = verdict(PARITY, on_runs(HEALTHY, None, beside=()))
    assert found.status == "skipped"
    assert found.reason.startswith("the reference keeps none of it: give Subject(beside=...) a function of the model")


@pytest.mark.parametrize(("distance", "status"), [(0.5, "passed"), (0.01, "failed")])
def test_an_average_may_differ_by_the_noise_of_its_parameter(distance, status):
    noise = Noise(updates={MIDDLE: TensorNoise(distance, 0.0)})
    runs = on_runs(remeasured(HEALTHY, EMA, apart=0.5, observed="beside"), None, noise=noise)
    assert verdict(PARITY, runs).status == status


def resumed(**states: str) -> Evidence:
    before, after = HEALTHY.continued, HEALTHY.resumed
    changed = tuple(
        replace(run, beside={**run.beside, **{k.replace("__", "."): v for k, v in states.items()}}) for run in after
    )
    return replace(HEALTHY, continued=before, resumed=changed)


def test_a_scheduler_that_starts_again():
    found = verdict(ROUND_TRIP, resumed(scheduler__last_epoch="0")).findings
    assert [(f.tensor, f.ranks, f.actual, f.expected) for f in found] == [
        ("scheduler.last_epoch", (0, 1), "0 after loading", "3, as saved")
    ]
    assert found[0].cause.startswith("the scheduler's state is not saved")


def test_other_values_another_dtype_and_no_state_at_all():
    def only(value: str | None) -> list[tuple[str, str]]:
        first, second = HEALTHY.resumed
        states = {name: text for name, text in second.beside.items() if name != EMA}
        states |= {} if value is None else {EMA: value}
        found = verdict(ROUND_TRIP, replace(HEALTHY, resumed=(first, replace(second, beside=states)))).findings
        assert [f.ranks for f in found] == [(1,)]
        return [(f.actual, f.expected) for f in found]

    assert only("float32 (6, 4) other") == [("different after loading", "as saved")]
    assert only("bfloat16 (6, 4) rounded") == [("bfloat16 after loading", "float32, as saved")]
    assert only(None) == [("no state after loading", "a state, as saved")]


def test_copies_that_are_rebuilt_from_rounded_weights():
    rounded = tuple(replace(run, rounded={EMA: "float32 (6, 4) rounded"}) for run in HEALTHY.continued)
    after = tuple(replace(run, beside={**run.beside, EMA: "float32 (6, 4) rounded"}) for run in HEALTHY.resumed)
    [found] = verdict(ROUND_TRIP, replace(HEALTHY, continued=rounded, resumed=after)).findings
    assert (found.actual, found.expected) == ("rounded to the dtype of the parameters after loading", "as saved")
    assert found.cause.startswith("it is rebuilt from the loaded parameters")


def test_an_update_by_another_learning_rate_names_the_step():
    wrong = remeasured(healthy(), MIDDLE, 0.75, observed="parameters")
    wrong = replace(wrong, reference=replace(wrong.reference, rates=((0.1,), (0.05,), (0.025,))))
    [found] = verdict(UPDATES, on_runs(wrong, None, rates=((0.1,), (0.025,), (0.00625,)))).findings
    assert found.cause.startswith("the learning rate of step 1 is 0.025 on these ranks, and 0.05 in the reference")
    [other] = verdict(UPDATES, on_runs(wrong, None, rates=((0.1,), (0.05,), (0.025,)))).findings
    assert "learning rate of step" not in other.cause


def test_another_learning_rate_after_resuming_names_the_first_step():
    rates = ((0.1,), (0.05,))
    before = tuple(replace(run, rates=rates) for run in HEALTHY.continued)
    after = tuple(replace(run, rates=((0.1,), (0.1,))) for run in HEALTHY.resumed)
    [found] = verdict(RESUME, replace(HEALTHY, continued=before, resumed=after)).findings
    assert (found.actual, found.expected, found.detail) == (
        "learning rate 0.1 at step 1 after resuming",
        "0.05, as in the uninterrupted run",
        "group 0",
    )
