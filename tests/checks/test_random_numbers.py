"""Random numbers of a step in training mode, and their state after resuming, judged on hand-made evidence."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_fsdp_meta.checks.random_numbers.facts import OWN_GENERATOR
from pytest_fsdp_meta.evidence import Evidence
from tests.checks.evidence_factory import (
    DROPOUT,
    HEAD,
    change,
    healthy,
    on_runs,
    redrawn,
    undeclared,
    verdict,
    with_random_state,
    with_reference,
)

FOLLOW, RESUME, AGAIN = "random_numbers_follow_the_mesh", "random_numbers_resume", "recomputation_draws_alike"
MIXED = {"dp_shard": 2, "tp": 2}
ONE_SEED = {"state": "seeded with 42", "seed": 42}
UNSEEDED = {"state": "seeded by the plugin", "seed": 1, "seeded": False}


def by_token(evidence: Evidence) -> Evidence:
    """Give each rank another activation."""
    for rank in range(len(evidence.inventory)):
        evidence = redrawn(evidence, [rank], operand=f"tokens of rank {rank}")
    return evidence


def test_tensor_parallel_ranks_with_other_parts_may_draw_anything():
    evidence = by_token(healthy(mesh={"tp": 2}))
    for state in ("seeded with 0", "seeded with 1"):
        found = verdict(FOLLOW, redrawn(evidence, [1], state=state))
        assert (found.status, found.why) == ("skipped", "not applicable")
        assert found.reason == "no two ranks draw numbers for the same activation, or for different rows"


def test_parts_of_a_sequence_need_other_numbers():
    alike = by_token(healthy(mesh={"cp": 2}))
    [finding] = verdict(FOLLOW, alike).findings
    assert finding.actual == "draws the same random numbers for different tokens of their rows"
    assert verdict(FOLLOW, redrawn(alike, [1], state="seeded with 1")).status == "passed"
    # They may be divided within tensor-parallel ranks.
    [finding] = verdict(FOLLOW, by_token(healthy(mesh={"cp": 2, "tp": 2}))).findings
    assert finding.ranks == (0, 1, 2, 3)
    assert finding.detail.startswith("bernoulli_ of 4x8 elements, first on ranks 0, 2")


def of_the_same_rows(evidence: Evidence) -> Evidence:
    steps = tuple(replace(step, data_parallel=(0, 1)) for step in evidence.training_mode or ())
    return replace(evidence, training_mode=steps)


@pytest.mark.parametrize(
    "evidence",
    [
        redrawn(healthy(mesh={"ep": 2}), [1], state="one number later"),
        of_the_same_rows(redrawn(healthy(), [1], operand="rows of slice 0")),
        redrawn(healthy(), operand="", **ONE_SEED),
        redrawn(healthy(), for_all_rows=True, **ONE_SEED),
        redrawn(healthy(), operand="a weight that all ranks hold", **ONE_SEED),
    ],
    ids=[
        "other experts",
        "declared to have the same rows",
        "a module skipped on all ranks",
        "one number for all rows",
        "not for rows",
    ],
)
def test_ranks_that_may_draw_anything(evidence):
    found = verdict(FOLLOW, evidence)
    assert (found.status, found.findings) == ("skipped", ())


def test_a_seed_of_building_the_reference_says_nothing_about_training():
    evidence = redrawn(with_reference(healthy(), seed=42), **ONE_SEED)
    assert verdict(FOLLOW, evidence).status == "skipped"
    assert verdict(FOLLOW, undeclared(evidence, "reference", why="none")).status == "failed"
    own = redrawn(evidence, generator=OWN_GENERATOR)
    assert verdict(FOLLOW, own).status == "failed"


def test_tensor_parallel_ranks_are_judged_without_a_seed():
    evidence = redrawn(healthy(mesh=MIXED), **UNSEEDED)
    found = verdict(FOLLOW, evidence)
    assert (found.status, found.why) == ("skipped", "partly checked")
    assert verdict(FOLLOW, redrawn(evidence, [1], state="one number later")).status == "failed"


def test_dtensor_ignores_the_mesh_on_the_cpu_only():
    evidence = redrawn(healthy(), by_dtensor=True, **ONE_SEED)
    assert verdict(FOLLOW, evidence).status == "skipped"
    assert verdict(FOLLOW, redrawn(evidence, generator="cuda")).status == "failed"


@pytest.mark.parametrize("id", [FOLLOW, RESUME])
def test_nothing_to_judge(id):
    evidence = with_random_state(healthy())
    steps = tuple(replace(step, draws=()) for step in evidence.training_mode or ())
    none = verdict(id, replace(evidence, training_mode=steps))
    assert (none.status, none.reason) == ("skipped", "the model draws no random numbers in training mode")
    hidden = verdict(id, replace(evidence, training_mode=tuple(replace(step, hidden=True) for step in steps)))
    assert hidden.reason.startswith("no operator draws random numbers in training mode, but a generator changes")


def test_a_meta_parameter_explains_a_step_that_fails():
    evidence = undeclared(healthy(), "training_mode", why="rank 0 raised", error=True, names=(HEAD,))
    assert verdict(FOLLOW, evidence).status == "error"
    found = verdict(FOLLOW, change(evidence, HEAD, device="meta", storage=None, digest=None))
    assert (found.status, found.why) == ("skipped", "depends on a failed check")


def test_save_may_draw_before_or_after_it_takes_the_state():
    evidence = with_random_state(healthy())
    drawing = tuple(
        replace(rank, generators={"cpu": replace(rank.generators["cpu"], after="drawn by save()")})
        for rank in evidence.continued or ()
    )
    assert verdict(RESUME, replace(evidence, continued=drawing)).status == "passed"
    resumed = with_random_state(healthy(), after="drawn by save()").resumed
    assert verdict(RESUME, replace(evidence, continued=drawing, resumed=resumed)).status == "passed"


def test_resume_may_seed_with_another_seed():
    found = verdict(RESUME, with_random_state(healthy(), after="seeded with 1007", seed=1007))
    assert (found.why, found.findings) == ("differs", ())
    assert found.reason == "resume() seeds the generators with other seeds instead of restoring their states"


def test_only_generators_that_the_model_draws_from_are_judged():
    lost = with_random_state(healthy(), after="loaded on rank 0")
    found = verdict(RESUME, redrawn(lost, generator=OWN_GENERATOR))
    assert found.reason == "the model draws from a generator of its own, whose state only the model knows"
    cuda = [run.generators["cpu"] for run in lost.continued or ()]
    both = {
        name: tuple(
            replace(run, generators={**run.generators, "cuda": state})
            for run, state in zip(getattr(lost, name), cuda, strict=True)
        )
        for name in ("continued", "resumed")
    }
    assert verdict(RESUME, redrawn(replace(lost, **both), generator="cuda")).status == "passed"
    assert verdict(RESUME, replace(lost, **both)).status == "failed"


def test_a_loss_that_differs_because_a_module_draws_although_dropout_is_off():
    evidence = on_runs(healthy(), None, losses=(3.0, 1.5, 1.25), drawing=("layers.0.drop", "last"))
    [finding] = verdict("loss_parity", evidence).findings
    assert finding.cause.startswith("random numbers are drawn (in layers.0.drop and 1 more) although dropout is off")
    later = on_runs(healthy(), None, losses=(2.0, 1.5, 1.0), drawing=("layers.0.drop",))
    [finding] = verdict("loss_parity", later).findings
    assert "random numbers" not in finding.cause


def in_backward(**facts) -> Evidence:
    """Change the draw of each rank's backward."""
    evidence = healthy()
    steps = (
        replace(step, draws=tuple(replace(draw, **facts) if draw.again else draw for draw in step.draws))
        for step in evidence.training_mode or ()
    )
    return replace(evidence, training_mode=tuple(steps))


def test_a_backward_that_computes_again_draws_what_the_forward_drew():
    [finding] = verdict(AGAIN, in_backward(state="another")).findings
    assert (finding.tensor, finding.ranks) == (DROPOUT, (0, 1))
    # A function is computed again outside of its module.
    assert verdict(AGAIN, in_backward(module="")).status == "passed"
    # Noise on a gradient repeats nothing.
    assert verdict(AGAIN, in_backward(module="", operator="rand_like", state="another")).status == "passed"
    assert verdict(AGAIN, in_backward(module="", shape=(8, 4), state="another")).status == "passed"
