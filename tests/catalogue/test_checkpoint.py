"""load_is_repeatable and the checks of checkpoints on hand-made evidence."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from pytest_fsdp_meta.evidence import Comparison, Evidence, Export
from pytest_fsdp_meta.evidence.checkpoint import RankSaved, RankStateDict
from tests.catalogue.evidence_factory import (
    CATALOGUE,
    COUNTER,
    EMBEDDING,
    HEAD,
    MIDDLE,
    ROTARY,
    change,
    declare,
    differ,
    drop,
    empty,
    from_checkpoint,
    healthy,
    left_out,
    rename,
    told,
    undeclared,
    verdict,
    with_reference,
)

REPEATABLE, NAMES, ROUND_TRIP = "load_is_repeatable", "state_dict_names_clean", "dcp_round_trip"
RESHARDS, EXPORTS = "dcp_reshards", "full_state_dict_exports"
OPTIMIZER, RESUME = "optimizer_state_round_trip", "resume_parity"
ALL = (REPEATABLE, NAMES, ROUND_TRIP, RESHARDS, EXPORTS, OPTIMIZER, RESUME)
NAN = math.nan
OTHER = Comparison(
    MIDDLE, False, elements=24, differing=12, max_abs=1.0, max_rel=0.5, index=(3, 0), expected=2.0, actual=1.0
)
NUMBERS = "12 of 24 elements differ, first at [3, 0]: 1, but should be 2"


@pytest.mark.parametrize("check", ALL)
@pytest.mark.parametrize("evidence", [healthy(1), healthy(2), healthy(mesh={"dp_replicate": 2, "dp_shard": 2})])
def test_healthy_evidence_passes(check, evidence):
    found = verdict(check, evidence)
    assert (found.status, found.findings, found.unjudged) == ("passed", (), {})


@pytest.mark.parametrize("check", [check for check in ALL if check != OPTIMIZER])
def test_an_empty_model_passes(check):
    assert verdict(check, empty()).status == "passed"


@pytest.mark.parametrize(
    ("check", "observation"),
    [
        (REPEATABLE, "repetition"),
        (NAMES, "state_dict"),
        (NAMES, "reference"),
        (ROUND_TRIP, "saved"),
        (ROUND_TRIP, "restored"),
        (RESHARDS, "resharded"),
        (EXPORTS, "export"),
        (OPTIMIZER, "resumed"),
        (RESUME, "continued"),
    ],
)
def test_what_was_not_observed(check, observation):
    skipped = verdict(check, undeclared(healthy(), observation, why="not declared"))
    assert (skipped.status, skipped.reason) == ("skipped", "not declared")
    failed = verdict(check, undeclared(healthy(), observation, why="rank 1 hung", error=True, detail="stacks"))
    assert (failed.status, failed.reason, failed.detail) == ("error", "rank 1 hung", "stacks")


def again(evidence: Evidence, observed: str, ranks: tuple[int, ...] = (0, 1), **facts: Any) -> Evidence:
    """What these ranks show once more, with other facts."""
    taken = getattr(evidence, observed)
    changed = tuple(replace(one, **facts) if rank in ranks else one for rank, one in enumerate(taken))
    return replace(evidence, **{observed: changed})


def second_load(evidence: Evidence, name: str, ranks: tuple[int, ...] = (0, 1), **facts: Any) -> Evidence:
    changed = change(replace(evidence, inventory=evidence.repetition), name, ranks, **facts).inventory
    return replace(evidence, repetition=changed)


def test_a_second_load_with_other_values():
    found = verdict(REPEATABLE, second_load(healthy(), MIDDLE, digest="other bits"))
    assert told(found) == [(MIDDLE, (0, 1), "other values in the second load", "those of the first", "")]


def test_a_second_load_that_is_other_on_one_rank():
    found = verdict(REPEATABLE, second_load(healthy(), ROTARY, (1,), digest="other bits"))
    assert told(found) == [(ROTARY, (1,), "other values in the second load", "those of the first", "")]


def test_a_second_load_of_another_dtype():
    found = verdict(REPEATABLE, second_load(healthy(), MIDDLE, dtype="bfloat16", digest="other bits"))
    assert told(found) == [(MIDDLE, (0, 1), "dtype bfloat16 in the second load", "float32, as in the first", "")]


def test_a_second_load_with_other_tensors():
    evidence = healthy()
    second = drop(rename(evidence, "new_", HEAD), MIDDLE, [0]).inventory
    found = verdict(REPEATABLE, replace(evidence, repetition=second))
    assert told(found) == [
        (MIDDLE, (0,), "missing in the second load", "in both", ""),
        (HEAD, (0, 1), "missing in the second load", "in both", ""),
        (f"new_{HEAD}", (0, 1), "only in the second load", "in both", ""),
    ]


def test_memory_that_is_garbage_differs_by_itself():
    garbage = change(differ(healthy(), MIDDLE), MIDDLE, nan=1, poisoned=1)
    found = verdict(REPEATABLE, second_load(garbage, MIDDLE, digest="garbage"))
    assert (found.status, found.reason) == ("skipped", left_out("no_uninitialized_memory", MIDDLE))


def keys(evidence: Evidence, ranks: tuple[int, ...] = (0, 1), **renamed: str) -> Evidence:
    """The state dict of these ranks with keys called otherwise, or left out where they are called nothing."""
    names = {name.replace("__", "."): other for name, other in renamed.items()}
    there = [names.get(key, key) for key in evidence.reference.state_dict]
    return again(evidence, "state_dict", ranks, keys=tuple(filter(None, there)))


def test_a_key_that_is_missing():
    found = verdict(NAMES, keys(healthy(), head__weight=""))
    assert told(found) == [(HEAD, (0, 1), "no key in the state dict", "saved under its name", "")]


def test_a_key_that_is_missing_on_one_rank():
    found = verdict(NAMES, keys(healthy(), (1,), head__weight=""))
    assert told(found) == [(HEAD, (1,), "no key in the state dict", "saved under its name", "")]


def test_a_state_dict_that_one_rank_gathers():
    evidence = again(healthy(), "state_dict", (1,), keys=())
    own = replace(evidence, subject=replace(evidence.subject, declared=evidence.subject.declared | {"state_dict"}))
    assert verdict(NAMES, own).status == "passed"
    nowhere = again(own, "state_dict", (0, 1), keys=())
    for broken, ranks in ((evidence, (1,)), (nowhere, (0, 1))):
        assert {(f.ranks, f.actual) for f in verdict(NAMES, broken).findings} == {(ranks, "no key in the state dict")}


def test_a_key_that_is_renamed():
    found = verdict(NAMES, keys(healthy(), head__weight="output.weight"))
    assert told(found) == [
        (HEAD, (0, 1), "no key in the state dict", "saved under its name", ""),
        ("output.weight", (0, 1), "a key of the state dict", "none: the reference's has no such key", ""),
    ]


@pytest.mark.parametrize("from_disk", [False, True])
def test_a_key_with_what_a_wrapper_inserted(from_disk):
    evidence = keys(healthy(), layers__0__weight="layers.0._orig_mod.weight")
    if from_disk:
        evidence = from_checkpoint(evidence)
    found = verdict(NAMES, evidence)
    assert told(found) == [("layers.0._orig_mod.weight", (0, 1), "a name that a wrapper made", "without _orig_mod", "")]
    assert found.findings[0].cause.startswith("the state dict is taken from the module that torch.compile")


def test_a_module_that_is_called_like_a_wrapper():
    renamed = "block._orig_mod.weight"
    evidence = keys(healthy(), layers__0__weight=renamed)
    assert verdict(NAMES, with_reference(evidence, state_dict=evidence.state_dict[0].keys)).status == "passed"


def test_a_checkpoint_may_leave_out_one_of_two_tied_names():
    evidence = from_checkpoint(healthy(), HEAD)
    assert verdict(NAMES, evidence).status == "passed"


def saved(**others: str) -> RankSaved:
    """What a healthy rank holds, with other bits under these names."""
    tensors = dict(healthy().saved[0].tensors)
    return RankSaved(tensors | {name.replace("__", "."): bits for name, bits in others.items()})


def test_a_tensor_that_does_not_come_back():
    found = verdict(ROUND_TRIP, replace(healthy(), restored=(saved(layers__0__weight="other"),) * 2))
    assert told(found) == [
        (MIDDLE, (0, 1), "other values once it is loaded", "those that were saved", ""),
    ]


def test_a_tensor_that_loading_leaves_as_it_was():
    other = saved(layers__0__weight="other")
    found = verdict(ROUND_TRIP, replace(healthy(), restored=(replace(other, untouched=(MIDDLE,)), other)))
    assert told(found) == [
        (MIDDLE, (0,), "not restored: loading leaves it as it was", "those that were saved", ""),
        (MIDDLE, (1,), "other values once it is loaded", "those that were saved", ""),
    ]
    assert ["casts" in finding.cause for finding in found.findings] == [False, True]
    # What was saved with those very values is restored.
    alike = replace(healthy(), restored=(replace(saved(), untouched=(MIDDLE,)),) * 2)
    assert verdict(ROUND_TRIP, alike).status == "passed"


def test_a_tensor_that_does_not_come_back_on_one_rank():
    found = verdict(ROUND_TRIP, replace(healthy(), restored=(saved(), saved(counter="other"))))
    assert told(found) == [(COUNTER, (1,), "other values once it is loaded", "those that were saved", "")]


def test_an_extra_state_that_does_not_come_back():
    evidence = again(healthy(), "saved", extra={"norm._extra_state": "scale 3"})
    evidence = again(evidence, "restored", extra={"norm._extra_state": "scale 1"})
    found = verdict(ROUND_TRIP, evidence)
    assert told(found) == [
        ("norm._extra_state", (0, 1), "another state once it is loaded", "that which was saved", ""),
    ]


def test_what_ranks_hold_apart_under_one_name_is_not_judged():
    apart = (saved(counter="experts of rank 0"), saved(counter="experts of rank 1"))
    evidence = replace(healthy(), saved=apart, restored=(apart[0], apart[0]))
    found = verdict(ROUND_TRIP, evidence)
    assert found.status == "skipped"
    assert found.reason == (
        "passed for what could be checked; of counter ranks hold what differs though it has one name and one place, "
        "and torch.distributed.checkpoint keeps one of each; declare Subject(save=..., resume=...)"
    )
    found = verdict(ROUND_TRIP, declare(evidence, declared=frozenset({"save"})))
    assert told(found) == [(COUNTER, (1,), "other values once it is loaded", "those that were saved", "")]


def test_a_key_that_is_left_out_has_one_judge():
    evidence = again(keys(healthy(), head__weight=""), "saved", left_out=(HEAD,))
    evidence = again(evidence, "restored", tensors=saved(head__weight="other").tensors)
    assert verdict(NAMES, evidence).status == "failed"
    found = verdict(ROUND_TRIP, evidence)
    assert (found.status, found.reason) == ("skipped", left_out(NAMES, HEAD))
    alone = undeclared(evidence, "reference", why="Subject(reference=...) is not declared")
    assert verdict(ROUND_TRIP, alone).reason == (
        f"the state dict has no key for {HEAD}, and no reference tells whether it should"
    )


def elsewhere(evidence: Evidence, *comparisons: Comparison) -> Evidence:
    return replace(evidence, resharded=replace(evidence.resharded, comparisons=(comparisons,)))


def test_a_world_of_another_size_that_reads_other_values():
    found = verdict(RESHARDS, elsewhere(healthy(), OTHER))
    assert told(found) == [(MIDDLE, (0,), "other values in a world of 1", "those that were saved", NUMBERS)]


REFUSED = {"comparisons": (), "refused": "RuntimeError in Subject(resume=...): another size", "ranks": (0,)}


def refused(evidence: Evidence) -> Evidence:
    return replace(evidence, resharded=replace(evidence.resharded, **REFUSED))


def test_a_world_of_another_size_that_cannot_load_it():
    found = verdict(RESHARDS, refused(healthy()))
    raised = "loading it in a world of 1 raises RuntimeError in Subject(resume=...): another size"
    assert told(found) == [(None, (0,), raised, "the values that were saved", "")]
    assert found.findings[0].cause == CATALOGUE[RESHARDS].cause
    # Other values than the reference's explain no refusal.
    assert verdict(RESHARDS, refused(differ(healthy(), MIDDLE))).findings == found.findings


def test_a_refusal_that_a_more_basic_finding_may_explain():
    broken = replace(refused(healthy()), restored=(saved(layers__0__weight="other"),) * 2)
    found = verdict(RESHARDS, broken)
    assert (found.status, found.reason) == (
        "skipped",
        "loading it in a world of 1 raises RuntimeError in Subject(resume=...): another size; the findings of "
        "dcp_round_trip may explain it",
    )


def test_another_shape_in_a_world_of_another_size():
    odd = Comparison(MIDDLE, False, problem="shape (3, 4)", should_be="(6, 4), as in the reference")
    found = verdict(RESHARDS, elsewhere(healthy(), odd))
    assert [finding.detail for finding in found.findings] == ["shape (3, 4), but should be (6, 4), as in the reference"]


def test_what_was_not_the_reference_when_it_was_saved():
    found = verdict(RESHARDS, elsewhere(differ(healthy(), MIDDLE), OTHER))
    assert (found.status, found.reason) == ("skipped", left_out("params_equal_reference", MIDDLE))


def test_what_was_rounded_when_it_was_loaded():
    rounded = replace(OTHER, cast=True, max_rel=2.0**-8)
    assert verdict(RESHARDS, elsewhere(healthy(), rounded)).status == "passed"


def test_an_export_without_a_key_and_with_one_too_many():
    evidence = replace(healthy(), export=Export((HEAD,), ("output.weight",)))
    assert told(verdict(EXPORTS, evidence)) == [
        (HEAD, (0,), "missing in the gathered state dict", "exported", ""),
        ("output.weight", (0,), "in the gathered state dict", "none: the reference has no such key", ""),
    ]


def test_an_export_with_other_values():
    found = verdict(EXPORTS, replace(healthy(), export=Export(comparisons=(OTHER,))))
    assert told(found) == [(MIDDLE, (0,), "other values when gathered", "the reference's", NUMBERS)]


def test_an_export_that_is_padded():
    padded = Comparison(EMBEDDING, False, problem="shape (16, 4)", should_be="(8, 4), as in the reference")
    found = verdict(EXPORTS, replace(healthy(), export=Export(comparisons=(padded,))))
    assert told(found) == [(EMBEDDING, (0,), "shape (16, 4) when gathered", "(8, 4), as in the reference", "")]


def test_an_export_beside_a_reference_that_is_no_truth():
    evidence = replace(with_reference(healthy(), unstable=(MIDDLE,)), export=Export(comparisons=(OTHER,)))
    assert verdict(EXPORTS, evidence).status == "passed"


def resumed(evidence: Evidence, ranks: tuple[int, ...] = (0, 1), **state: Any) -> Evidence:
    """A second load whose optimizer keeps other things of these parameters."""
    kept = dict(evidence.continued[0].state) | {name.replace("__", "."): value for name, value in state.items()}
    return again(evidence, "resumed", ranks, state={name: value for name, value in kept.items() if value})


def test_an_optimizer_that_forgets():
    found = verdict(OPTIMIZER, resumed(healthy(), layers__0__weight=None))
    assert told(found) == [
        (MIDDLE, (0, 1), "no optimizer state once it is loaded", "momentum_buffer as saved", ""),
    ]


def test_an_optimizer_of_which_nothing_is_loaded():
    names = {name.replace(".", "__"): None for name in healthy().continued[0].state}
    found = verdict(OPTIMIZER, resumed(healthy(), **names)).findings
    assert {finding.cause.split(":")[0] for finding in found} == {"none of it is loaded"}
    # On one rank, something else is wrong.
    found = verdict(OPTIMIZER, resumed(healthy(), (1,), **names)).findings
    assert not [finding for finding in found if finding.cause.startswith("none of it")]


def test_an_optimizer_with_another_state_on_one_rank():
    found = verdict(OPTIMIZER, resumed(healthy(), (1,), layers__0__weight={"momentum_buffer": "zeros"}))
    assert told(found) == [
        (MIDDLE, (1,), "another momentum_buffer once it is loaded", "the optimizer state that was saved", ""),
    ]


def test_an_optimizer_that_makes_something_up():
    found = verdict(OPTIMIZER, resumed(healthy(), verifier__weight={"step": "1.0"}))
    assert [finding.actual for finding in found.findings] == ["an optimizer state once it is loaded (step)"]


def test_an_optimizer_with_another_learning_rate():
    found = verdict(OPTIMIZER, again(healthy(), "resumed", groups=({"lr": "0.2"},)))
    assert told(found) == [
        (None, (0, 1), "lr=0.2 in group 0 of the optimizer once it is loaded", "0.1, as saved", ""),
    ]
    assert [finding.cause.split(":")[0] for finding in found.findings] == [
        "the settings of the groups are not saved, or something sets them anew after they were loaded"
    ]


def test_an_optimizer_with_fewer_groups():
    found = verdict(OPTIMIZER, again(healthy(), "resumed", (1,), groups=()))
    assert told(found) == [(None, (1,), "0 parameter groups once it is loaded", "1, as saved", "")]


def test_an_optimizer_that_keeps_nothing():
    found = verdict(OPTIMIZER, empty())
    assert found.status == "skipped"
    assert found.reason == "the optimizer keeps no state; declare Subject(optimizer=...) with one that does"


def test_losses_that_differ_after_the_checkpoint():
    found = verdict(RESUME, again(healthy(), "resumed", (1,), losses=(1.25, 1.5)))
    assert told(found) == [
        (
            None,
            (1,),
            "loss 1.5 at step 1 after the checkpoint",
            "1 within 1e-06, as without it",
            "losses of rank 1 1.250000, 1.500000; uninterrupted 1.250000, 1.000000",
        )
    ]


def test_losses_that_differ_by_rounding_or_as_declared():
    close = again(healthy(), "resumed", losses=(1.25, 1.0 + 1e-7))
    assert verdict(RESUME, close).status == "passed"
    far = again(healthy(), "resumed", losses=(1.25, 1.01))
    assert verdict(RESUME, far).status == "failed"
    assert verdict(RESUME, replace(far, tolerance={RESUME: 0.1})).status == "passed"


def test_losses_that_a_loss_of_weights_explains():
    evidence = again(healthy(), "resumed", losses=(9.0, 9.0), model=saved(head__weight="other"))
    found = verdict(RESUME, evidence)
    assert found.status == "skipped"
    assert found.reason == (
        "the losses differ (step 0 after the checkpoint: 9, without it 1.25), and so does the model that was loaded, "
        "which may explain it; see dcp_round_trip"
    )


def test_losses_that_a_loss_of_momenta_explains():
    found = verdict(RESUME, again(resumed(healthy(), head__weight=None), "resumed", losses=(1.25, 9.0)))
    assert found.status == "skipped"
    assert found.reason.endswith(
        "and so does the optimizer that was loaded, which may explain it; see optimizer_state_round_trip"
    )


def test_losses_that_a_load_explains_that_is_another_each_time():
    evidence = again(second_load(healthy(), ROTARY, digest="other"), "resumed", losses=(9.0, 9.0))
    found = verdict(RESUME, evidence)
    assert found.status == "skipped"
    assert found.reason.endswith(f"which the findings of {REPEATABLE} explain")


def test_losses_that_are_not_finite():
    endless = again(again(healthy(), "continued", losses=(1.25, float("inf"))), "resumed", losses=(1.25, 1.0))
    assert verdict(RESUME, endless).status == "error"


@pytest.mark.parametrize(
    ("losses", "shown"), [((NAN, NAN), "nan, nan"), ((1.25, math.inf), "1.250000, inf"), ((1.25, NAN), "1.250000, nan")]
)
def test_losses_that_are_not_finite_in_either_run_tell_nothing(losses, shown):
    alike = again(again(healthy(), "continued", losses=losses), "resumed", losses=losses)
    found = verdict(RESUME, alike)
    assert found.status == "skipped"
    assert found.reason == f"the losses of the uninterrupted run are not finite ({shown}), nor those after it"


def test_losses_that_are_not_finite_on_one_rank_tell_nothing():
    alike = again(again(healthy(), "continued", (1,), losses=(NAN, NAN)), "resumed", (1,), losses=(NAN, NAN))
    assert verdict(RESUME, alike).status == "skipped"


def test_a_loss_that_is_not_finite_only_after_the_checkpoint():
    found = verdict(RESUME, again(healthy(), "resumed", losses=(1.25, NAN)))
    assert told(found) == [
        (
            None,
            (0, 1),
            "loss nan at step 1 after the checkpoint",
            "1 within 1e-06, as without it",
            "losses of rank 0 1.250000, nan; uninterrupted 1.250000, 1.000000",
        )
    ]


@pytest.mark.parametrize("check", ALL)
@pytest.mark.parametrize("missing", ["saved", "restored", "continued", "resumed", "repetition", "resharded", "export"])
def test_no_judge_raises_where_one_observation_failed_and_others_did_not(check, missing):
    evidence = undeclared(healthy(), missing, why="rank 1 ended", error=True)
    needed = missing in CATALOGUE[check].needs
    assert verdict(check, evidence).status == ("error" if needed else "passed")


def test_a_state_dict_that_torch_refuses_has_keys_all_the_same():
    evidence = healthy()
    refused = tuple(RankStateDict(rank.keys, "AttributeError: no such module") for rank in evidence.state_dict)
    assert verdict(NAMES, replace(evidence, state_dict=refused)).status == "passed"


def test_names_that_are_wrong_in_the_model_have_one_judge():
    called = f"module.{MIDDLE}"
    evidence = keys(rename(healthy(), "module.", MIDDLE), layers__0__weight=called)
    found = verdict(NAMES, evidence)
    assert found.status == "skipped"
    assert found.unjudged == {"names_match_reference": (MIDDLE, called)}
