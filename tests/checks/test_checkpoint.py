"""load_is_repeatable and the checks of saving, loading and resuming, on hand-made evidence."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest

from pytest_fsdp_meta.catalogue import Selection, judge
from pytest_fsdp_meta.checks.checkpoint.facts import RankSaved, RankStateDict, Resharded
from pytest_fsdp_meta.evidence import Comparison, Evidence, Export
from tests.checks.evidence_factory import (
    CATALOGUE,
    COUNTER,
    EMBEDDING,
    FROZEN,
    HEAD,
    MIDDLE,
    ROTARY,
    change,
    declare,
    described,
    differ,
    drop,
    empty,
    findings_of,
    from_checkpoint,
    healthy,
    on_some,
    rename,
    undeclared,
    verdict,
    with_reference,
)

SAVED = "those of the model when it was saved"
REPEATABLE, NAMES, ROUND_TRIP = "load_is_repeatable", "state_dict_names_clean", "dcp_round_trip"
RESHARDS, EXPORTS = "dcp_reshards", "full_state_dict_exports"
TRAINABLE = "requires_grad_matches_reference"
OPTIMIZER, RESUME, AGAIN = "optimizer_state_round_trip", "resume_parity", "second_save_is_current"
NAN = math.nan
OTHER = Comparison(
    MIDDLE, False, elements=24, differing=12, max_abs=1.0, max_rel=0.5, index=(3, 0), expected=2.0, actual=1.0
)
NUMBERS = "12 of 24 elements differ, first at [3, 0]: 1, but should be 2"


def again(evidence: Evidence, observed: str, ranks: tuple[int, ...] = (0, 1), **facts: Any) -> Evidence:
    """Change facts of an observation on these ranks."""
    changed = on_some(getattr(evidence, observed), ranks, lambda record: replace(record, **facts))
    return replace(evidence, **{observed: changed})


def second_load(evidence: Evidence, name: str, ranks: tuple[int, ...] = (0, 1), **facts: Any) -> Evidence:
    changed = change(replace(evidence, inventory=evidence.repetition), name, ranks, **facts).inventory
    return replace(evidence, repetition=changed)


@pytest.mark.parametrize(
    ("name", "ranks", "facts", "actual", "expected"),
    [
        (ROTARY, (1,), {}, "different values in the second load", "the same as in the first"),
        (MIDDLE, (0, 1), {"dtype": "bfloat16"}, "dtype bfloat16 in the second load", "float32, as in the first"),
    ],
)
def test_a_second_load_that_differs(name, ranks, facts, actual, expected):
    found = verdict(REPEATABLE, second_load(healthy(), name, ranks, digest="other bits", **facts))
    assert findings_of(found) == [(name, ranks, actual, expected, "")]


def test_a_second_load_with_other_tensors():
    evidence = healthy()
    second = drop(rename(evidence, "new_", HEAD), MIDDLE, [0]).inventory
    found = verdict(REPEATABLE, replace(evidence, repetition=second))
    assert findings_of(found) == [
        (MIDDLE, (0,), "missing in the second load", "in both", ""),
        (HEAD, (0, 1), "missing in the second load", "in both", ""),
        (f"new_{HEAD}", (0, 1), "only in the second load", "in both", ""),
    ]


def keys(evidence: Evidence, ranks: tuple[int, ...] = (0, 1), **renamed: str) -> Evidence:
    """Rename keys of these ranks' state dicts, or drop those whose new name is empty."""
    names = {name.replace("__", "."): other for name, other in renamed.items()}
    new = [names.get(key, key) for key in evidence.reference.state_dict]
    return again(evidence, "state_dict", ranks, keys=tuple(filter(None, new)))


def test_one_name_of_a_tie_is_enough():
    """save_pretrained() of transformers writes one."""
    assert verdict(NAMES, keys(healthy(), head__weight="")).status == "passed"
    found = verdict(NAMES, keys(healthy(), (1,), head__weight="", embed__weight=""))
    assert [(f.tensor, f.ranks) for f in found.findings] == [(EMBEDDING, (1,)), (HEAD, (1,))]
    apart = healthy()
    untied = replace(apart.reference, inventory=change(apart, HEAD, storage="", identity=1).inventory[0])
    found = verdict(NAMES, keys(replace(apart, reference=untied), head__weight=""))
    assert [(f.tensor, f.ranks) for f in found.findings] == [(HEAD, (0, 1))]
    # Without a reference, only what no other name saves may be missing.
    alone = undeclared(again(healthy(), "saved", left_out=(HEAD,)), "reference", why="not declared")
    assert verdict(ROUND_TRIP, alone).status == "passed"


def test_a_state_dict_that_one_rank_gathers():
    evidence = again(healthy(), "state_dict", (1,), keys=())
    own = replace(evidence, subject=replace(evidence.subject, declared=evidence.subject.declared | {"state_dict"}))
    assert verdict(NAMES, own).status == "passed"
    nowhere = again(own, "state_dict", (0, 1), keys=())
    parameters = tuple(key for key in healthy().state_dict[0].keys if key != COUNTER)
    [found] = verdict(NAMES, again(own, "state_dict", (0, 1), keys=parameters)).findings
    assert (found.tensor, found.cause.startswith("state_dict() has no buffers")) == (COUNTER, True)
    for broken, ranks in ((evidence, (1,)), (nowhere, (0, 1))):
        assert {(f.ranks, f.actual) for f in verdict(NAMES, broken).findings} == {(ranks, "missing in the state dict")}


def test_a_key_with_a_wrappers_prefix_where_the_reference_is_a_checkpoint():
    found = verdict(NAMES, from_checkpoint(keys(healthy(), layers__0__weight="layers.0._orig_mod.weight")))
    assert [(f.tensor, f.ranks) for f in found.findings] == [("layers.0._orig_mod.weight", (0, 1))]


def test_keys_that_are_right():
    evidence = keys(healthy(), layers__0__weight="block._orig_mod.weight")
    named = with_reference(evidence, state_dict=evidence.state_dict[0].keys)
    assert verdict(NAMES, named).status == "passed", "a module is named like a wrapper"
    assert verdict(NAMES, from_checkpoint(healthy(), HEAD)).status == "passed", "one of two tied names is enough"
    refused = tuple(RankStateDict(rank.keys, "AttributeError: no such module") for rank in healthy().state_dict)
    assert verdict(NAMES, replace(healthy(), state_dict=refused)).status == "passed", "torch cannot save it"


def saved(**others: str) -> RankSaved:
    """Return the saved state of a healthy rank, with other digests for these names."""
    tensors = dict(healthy().saved[0].tensors)
    return RankSaved(tensors | {name.replace("__", "."): bits for name, bits in others.items()})


def test_a_tensor_that_loading_does_not_change():
    other = saved(layers__0__weight="other")
    found = verdict(ROUND_TRIP, replace(healthy(), restored=(replace(other, untouched=(MIDDLE,)), other)))
    assert [(f.ranks, "casts" in f.cause) for f in found.findings] == [((0,), False), ((1,), True)]
    loaded = saved(layers__0__weight=healthy().inventory[0].by_name[MIDDLE].digest)
    found = verdict(ROUND_TRIP, replace(healthy(), saved=(other, other), restored=(loaded, loaded)))
    assert ["others are restored: save() leaves it out" in f.cause for f in found.findings] == [True]
    as_loaded = RankSaved({t.name: t.digest for t in healthy().inventory[0].tensors if t.name in other.tensors})
    found = verdict(ROUND_TRIP, replace(healthy(), saved=(other, other), restored=(as_loaded,) * 2))
    assert {f.cause.partition(":")[0] for f in found.findings} == {"it has the values from before the training"}
    # A tensor that was saved with the same values is restored.
    alike = replace(healthy(), restored=(replace(saved(), untouched=(MIDDLE,)),) * 2)
    assert verdict(ROUND_TRIP, alike).status == "passed"


def test_a_name_with_different_values_on_ranks_is_not_judged():
    apart = (saved(counter="experts of rank 0"), saved(counter="experts of rank 1"))
    evidence = replace(healthy(), saved=apart, restored=(apart[0], apart[0]))
    found = verdict(ROUND_TRIP, evidence)
    assert found.status == "skipped"
    found = verdict(ROUND_TRIP, declare(evidence, declared=frozenset({"save"})))
    assert findings_of(found) == [(COUNTER, (1,), "different values after loading", SAVED, "")]


def test_replicas_of_a_parameter_that_differ_are_no_fault_of_saving():
    apart = (saved(layers__0__weight="of rank 0"), saved(layers__0__weight="of rank 1"))
    evidence = replace(healthy(mesh={"dp_replicate": 2}), saved=apart, restored=(apart[0], apart[0]))
    found = verdict(ROUND_TRIP, declare(evidence, declared=frozenset({"save"})))
    assert (found.status, found.findings) == ("skipped", ())


def test_whether_a_key_is_missing_needs_a_reference():
    evidence = again(keys(healthy(), layers__0__weight=""), "saved", left_out=(MIDDLE,))
    evidence = again(evidence, "restored", tensors=saved(layers__0__weight="other").tensors)
    alone = undeclared(evidence, "reference", why="Subject(reference=...) is not declared")
    assert verdict(ROUND_TRIP, alone).reason == (
        f"the state dict has no key for {MIDDLE}; whether it should have one needs a reference"
    )


def elsewhere(evidence: Evidence, *comparisons: Comparison) -> Evidence:
    return replace(evidence, resharded=replace(evidence.resharded, comparisons=(comparisons,)))


def test_a_world_of_another_size_loads_another_shape():
    off = Comparison(MIDDLE, False, problem="shape (3, 4)", should_be="(6, 4), as in the reference")
    detail = "shape (3, 4), but should be (6, 4), as in the reference"
    found = verdict(RESHARDS, elsewhere(healthy(), off))
    assert findings_of(found) == [(MIDDLE, (0,), "different values in a world of 1", SAVED, detail)]


def refused(evidence: Evidence, error: str = "RuntimeError in Subject(resume=...): another size") -> Evidence:
    return replace(evidence, resharded=replace(evidence.resharded, comparisons=(), refused=error, ranks=(0,)))


def test_a_world_of_another_size_cannot_load_the_checkpoint():
    found = verdict(RESHARDS, refused(healthy()))
    raised = "loading the checkpoint in a world of 1 raises RuntimeError in Subject(resume=...): another size"
    assert findings_of(found) == [(None, (0,), raised, "", "")]
    assert found.findings[0].cause == CATALOGUE[RESHARDS].cause
    # Parameters that differ from the reference do not explain an error.
    assert verdict(RESHARDS, refused(differ(healthy(), MIDDLE))).findings == found.findings


def test_a_parameter_that_is_frozen_here_only_is_left_to_the_check_that_reports_it():
    evidence = refused(change(healthy(), MIDDLE, requires_grad=False), f"KeyError: 'state of {MIDDLE!r}'")
    evidence = replace(evidence, repetition=evidence.inventory)
    found = verdict(RESHARDS, evidence)
    assert found.reason.endswith(f"which the findings of {TRAINABLE} explain; fix those first")
    for expected in ((), (TRAINABLE,)):  # a check that is left out or expected to fail explains nothing
        selection = Selection(frozenset({RESHARDS}), frozenset(expected))
        assert judge(CATALOGUE[RESHARDS], evidence, CATALOGUE, selection).status == "failed"


def over(evidence: Evidence, **facts: Any) -> Evidence:
    """Let the smaller world save over the checkpoint, and load that with these facts."""
    here = evidence.resharded
    return replace(evidence, resharded=replace(here, saved_over=Resharded(here.mesh, **facts)))


def test_what_the_larger_world_saved_in_the_folder_is_loaded():
    where = "in a world of 1 that has saved over a checkpoint of a world of 2"
    momentum = replace(OTHER, name=f"{MIDDLE}: momentum_buffer")
    found = verdict(RESHARDS, over(healthy(), comparisons=((OTHER,),), optimizer=((momentum,),)))
    assert findings_of(found) == [
        (MIDDLE, (0,), f"different values {where}", SAVED, NUMBERS),
        (MIDDLE, (0,), f"different momentum_buffer {where}", "the saved optimizer state", NUMBERS),
    ]
    assert all(finding.cause.startswith("files of the larger world ") for finding in found.findings)
    found = verdict(RESHARDS, over(healthy(), refused="ValueError: 2 files", ranks=(0,)))
    assert findings_of(found) == [(None, (0,), f"loading the checkpoint {where} raises ValueError: 2 files", "", "")]
    # What the smaller world loads wrongly in any case is reported once.
    wrong = elsewhere(over(healthy(), comparisons=((OTHER,),)), OTHER)
    assert [finding.actual for finding in verdict(RESHARDS, wrong).findings] == ["different values in a world of 1"]


def test_a_finding_explains_a_load_error_that_names_its_tensor():
    wrong = replace(healthy(), restored=(saved(layers__0__weight="other"),) * 2)
    error = f"RuntimeError in Subject(resume=...): {MIDDLE} has another size"
    assert verdict(RESHARDS, refused(wrong, error)).status == "skipped"
    assert verdict(RESHARDS, refused(wrong, error.replace(MIDDLE, f"{MIDDLE}_norm"))).status == "failed"
    selection = Selection(frozenset({RESHARDS}), frozenset({"dcp_round_trip"}))
    assert judge(CATALOGUE[RESHARDS], refused(wrong, error), CATALOGUE, selection).status == "failed"


def test_a_tensor_that_loading_rounds_is_not_reported():
    rounded = replace(OTHER, cast=True, max_rel=2.0**-8)
    assert verdict(RESHARDS, elsewhere(healthy(), rounded)).status == "passed"


def test_a_tie_that_stages_hold_apart_is_one_tensor_in_a_smaller_world():
    apart, lost = declare(healthy(), by_stage=(EMBEDDING, HEAD)), replace(OTHER, name=EMBEDDING)
    assert verdict(RESHARDS, elsewhere(apart, lost, Comparison(HEAD, True))).status == "passed"
    found = verdict(RESHARDS, elsewhere(apart, lost, replace(lost, name=HEAD)))
    assert {finding.tensor for finding in found.findings} == {EMBEDDING, HEAD}


def test_an_export_with_other_keys_or_values():
    evidence = replace(healthy(), export=Export((HEAD,), ("output.weight",)))
    assert findings_of(verdict(EXPORTS, evidence)) == [
        (HEAD, (0,), "missing in the gathered state dict", "exported", ""),
        ("output.weight", (0,), "extra key in the gathered state dict: the reference has no such key", "", ""),
    ]
    assert {"renames" in finding.cause for finding in verdict(EXPORTS, evidence).findings} == {True}
    evidence = replace(healthy(), export=Export(comparisons=(OTHER,)))
    assert [f.tensor for f in verdict(EXPORTS, evidence).findings] == [MIDDLE]
    # They are not compared with an unreproducible reference.
    assert verdict(EXPORTS, with_reference(evidence, unstable=(MIDDLE,))).status == "passed"


def test_an_export_that_rounds():
    found = verdict(EXPORTS, replace(healthy(), export=Export(rounded={MIDDLE: "bfloat16"})))
    assert [f.tensor for f in found.findings] == [MIDDLE]
    # The loader itself holds the tensor in that dtype, which other checks judge.
    cast = change(replace(healthy(), export=Export(rounded={MIDDLE: "bfloat16"})), MIDDLE, dtype="bfloat16")
    assert verdict(EXPORTS, cast).findings == ()


@pytest.mark.parametrize(
    ("world", "shape", "cause"),
    [
        (2, (16, 4), "a state-dict hook changes its form"),
        (4, (2, 4), "state_dict() returns a rank's own shard"),
    ],
)
def test_an_export_of_another_shape(world, shape, cause):
    should_be = "(8, 4), as in the reference"
    odd = Comparison(EMBEDDING, False, problem=f"shape {shape}", should_be=should_be, shape=shape)
    found = verdict(EXPORTS, replace(healthy(world), export=Export(comparisons=(odd,))))
    actual = f"shape {shape} in the gathered state dict"
    assert findings_of(found) == [(EMBEDDING, (0,), actual, "(8, 4), as in the reference", "")]
    assert found.findings[0].cause.startswith(cause)
    assert ("full_tensor()" in found.findings[0].remedy) == (shape != (16, 4))


def resumed(evidence: Evidence, ranks: tuple[int, ...] = (0, 1), **state: Any) -> Evidence:
    """Change the optimizer state of these parameters after resuming."""
    kept = dict(evidence.continued[0].state) | {name.replace("__", "."): value for name, value in state.items()}
    return again(evidence, "resumed", ranks, state={name: value for name, value in kept.items() if value})


@pytest.mark.parametrize(
    ("evidence", "finding"),
    [
        (
            resumed(healthy(), verifier__weight=described(step="1.0")),
            (FROZEN, (0, 1), "optimizer state (step) after loading", "none, as saved", ""),
        ),
        (
            again(healthy(), "resumed", (1,), groups=()),
            (None, (1,), "0 parameter groups after loading", "1, as saved", ""),
        ),
    ],
    ids=["additional", "fewer groups"],
)
def test_an_optimizer_that_is_not_restored(evidence, finding):
    assert findings_of(verdict(OPTIMIZER, evidence)) == [finding]


def test_a_copy_in_float32_that_is_rebuilt_from_its_parameter():
    entry = f"{MIDDLE}: master"
    evidence = again(resumed(healthy(), layers__0__weight=described(master="b")), "continued", copies={entry: True})
    evidence = again(evidence, "continued", state={**evidence.continued[0].state, MIDDLE: described(master="a")})
    found = verdict(OPTIMIZER, again(evidence, "resumed", copies={entry: False}))
    actual = "master rounded to the dtype of the parameter after loading"
    assert findings_of(found) == [(MIDDLE, (0, 1), actual, "as saved", "")]
    # A copy that was never more than its parameter, or still is, has lost nothing.
    whole = again(again(healthy(), "continued", copies={entry: False}), "resumed", copies={entry: False})
    assert verdict(OPTIMIZER, whole).status == "passed"
    kept = again(again(healthy(), "continued", copies={entry: True}), "resumed", copies={entry: True})
    assert verdict(OPTIMIZER, kept).status == "passed"


def test_an_optimizer_without_any_loaded_state():
    names = {name.replace(".", "__"): None for name in healthy().continued[0].state}
    assert all(f.cause.startswith("no state is") for f in verdict(OPTIMIZER, resumed(healthy(), **names)).findings)
    # If only one rank has no state, the cause is another.
    found = verdict(OPTIMIZER, resumed(healthy(), (1,), **names)).findings
    assert not [finding for finding in found if finding.cause.startswith("no state is")]


def test_weights_of_training_in_a_checkpoint_are_noted():
    """facebookresearch/schedule_free#48: eval() of the optimizer belongs before saving."""
    found = verdict(OPTIMIZER, again(healthy(), "continued", saved_in_train=("AdamWScheduleFree",)))
    assert (found.status, found.reason.split(",")[0]) == ("passed", "save() does not call eval() of AdamWScheduleFree")


def test_a_state_that_training_changed_while_it_was_saved():
    """NVIDIA/nvidia-resiliency-ext#376: what copies tensors from a GPU leaves AdamW's step, on the CPU, as it is."""
    changed = adam(healthy(), tuple(healthy().continued[0].state), step="float32 () 4.0")
    running = again(changed, "continued", running=True)
    assert {finding.cause.split(",")[0] for finding in verdict(OPTIMIZER, running).findings} == {
        "save() returned before it had copied the state"
    }


ADAM = {"step": "float32 () 3.0", "exp_avg": "float32 (6, 4) a", "exp_avg_sq": "float32 (6, 4) b"}
CHANGED = "the state is changed on the way: cast, reset or recomputed by save() or resume(), or loaded by position"


def adam(evidence: Evidence, names: Collection[str], **changes: str) -> Evidence:
    """Give every parameter the state of Adam, and change it for these after loading."""
    saved = dict.fromkeys(evidence.continued[0].state, described(**ADAM))
    loaded = saved | dict.fromkeys(names, described(**ADAM | changes))
    return again(again(evidence, "continued", state=saved), "resumed", state=loaded)


@pytest.mark.parametrize(
    ("changes", "actual", "expected"),
    [
        ({"step": "float32 () 0.0"}, "step 0 after loading", "3"),
        ({"step": "0"}, "step 0 after loading", "3"),
        (
            {"exp_avg": "bfloat16 (6, 4) c", "exp_avg_sq": "bfloat16 (6, 4) d"},
            "exp_avg, exp_avg_sq in bfloat16 after loading",
            "float32",
        ),
        ({"step": "int64 () 3"}, "step in int64 after loading", "float32"),
        ({"step": "float32 () 0f0f"}, "different step after loading", "the saved optimizer state"),
    ],
)
def test_optimizer_state_that_differs_is_shown_with_its_values(changes, actual, expected):
    one = verdict(OPTIMIZER, adam(healthy(), [MIDDLE], **changes))
    assert findings_of(one) == [(MIDDLE, (0, 1), actual, expected, "")]
    assert one.findings[0].cause.startswith("the state of some parameters is not saved or not loaded")
    every = verdict(OPTIMIZER, adam(healthy(), healthy().continued[0].state, **changes))
    assert {(f.actual, f.expected, f.cause) for f in every.findings} == {(actual, expected, CHANGED)}


def test_optimizer_state_that_is_reset_and_cast():
    changes = {"step": "float32 () 0.0", "exp_avg": "bfloat16 (6, 4) c"}
    found = verdict(OPTIMIZER, adam(healthy(), [MIDDLE], **changes)).findings
    assert [f.actual for f in found] == ["step 0 after loading", "exp_avg in bfloat16 after loading"]


def test_an_optimizer_without_state():
    found = verdict(OPTIMIZER, empty())
    assert found.status == "skipped"
    assert found.reason == "the optimizer keeps no state; declare Subject(optimizer=...) with one that does"


@pytest.mark.parametrize(("ranks", "loss", "shown"), [((1,), 1.5, "1.5"), ((0, 1), NAN, "nan")])
def test_losses_that_differ_after_resuming(ranks, loss, shown):
    found = verdict(RESUME, again(healthy(), "resumed", ranks, losses=(1.25, loss)))
    assert [(f.ranks, f.actual) for f in found.findings] == [(ranks, f"loss {shown} at step 1 after resuming")]


def test_losses_that_differ_by_rounding_or_as_declared():
    close = again(healthy(), "resumed", losses=(1.25, 1.0 + 1e-7))
    assert verdict(RESUME, close).status == "passed"
    far = again(healthy(), "resumed", losses=(1.25, 1.01))
    assert verdict(RESUME, far).status == "failed"
    assert verdict(RESUME, replace(far, tolerance={RESUME: 0.1})).status == "passed"


def test_what_save_rounds_does_not_explain_the_losses():
    rounded = again(again(healthy(), "saved", rounded=(MIDDLE,)), "resumed", losses=(1.25, 1.01))
    model = replace(rounded.continued[0].model, rounded=(MIDDLE,))
    rounded = again(rounded, "continued", model=model)
    assert (verdict(ROUND_TRIP, rounded).status, verdict(RESUME, rounded).status) == ("passed", "failed")


@pytest.mark.parametrize(
    ("losses", "shown"), [((NAN, NAN), "nan, nan"), ((1.25, math.inf), "1.250000, inf"), ((1.25, NAN), "1.250000, nan")]
)
@pytest.mark.parametrize("ranks", [(0, 1), (1,)])
def test_losses_that_are_not_finite_in_either_run_are_not_judged(losses, shown, ranks):
    endless = again(healthy(), "continued", ranks, losses=losses)
    found = verdict(RESUME, again(endless, "resumed", ranks, losses=losses))
    assert (found.status, found.reason) == ("error", f"the losses of the uninterrupted run are not finite ({shown})")
    assert verdict(RESUME, again(endless, "resumed", losses=(1.25, 1.0))).status == "error"


def loaded_again(
    evidence: Evidence, tensors: dict[str, str], ranks: tuple[int, ...] = (0, 1), **facts: Any
) -> Evidence:
    """Change the tensors that the second checkpoint restored on these ranks, and facts of the loaded model."""
    model = evidence.restored_again[0].model
    changed = replace(model, tensors={**model.tensors, **tensors}, **facts)
    return again(evidence, "restored_again", ranks, model=changed)


def test_a_second_save_that_is_not_restored():
    evidence = loaded_again(healthy(), {MIDDLE: "other", HEAD: "overwritten"}, untouched=(HEAD,))
    assert findings_of(verdict(AGAIN, evidence)) == [
        (MIDDLE, (0, 1), "different values after loading the second save", SAVED, ""),
        (HEAD, (0, 1), "not restored from the second save: loading does not change it", SAVED, ""),
    ]


@pytest.mark.parametrize(
    ("loaded", "actual", "expected"),
    [
        ({}, "no optimizer state", "momentum_buffer, as saved"),
        (described(momentum_buffer="zeros"), "different momentum_buffer", "the saved optimizer state"),
    ],
)
def test_a_second_save_without_the_optimizer(loaded, actual, expected):
    evidence = healthy()
    state = evidence.saved_again[0].state
    evidence = again(evidence, "restored_again", (1,), state={**state, MIDDLE: loaded})
    assert findings_of(verdict(AGAIN, evidence)) == [
        (MIDDLE, (1,), f"{actual} after loading the second save", expected, "")
    ]


def test_master_weights_of_the_first_save():
    master = "(parameter 3 of the optimizer)"
    first = again(healthy(), "continued", state={master: described(exp_avg="first")})
    first = again(first, "resumed", state={master: described(exp_avg="first")})
    stale = again(first, "saved_again", state={master: described(exp_avg="later")})
    stale = again(stale, "restored_again", state={master: described(exp_avg="first")})
    assert [found[:2] for found in findings_of(verdict(AGAIN, stale))] == [(master, (0, 1))]


def test_extra_state_and_settings_of_the_first_save():
    evidence = healthy()
    for observed, count in (("continued", 1), ("saved_again", 2), ("restored_again", 1)):
        model = replace(
            getattr(evidence, observed)[0].model, extra=described(counter___extra_state=f"forwards={count}")
        )
        evidence = again(evidence, observed, model=model, groups=(described(lr=f"{1 / count:g}", betas="0.9"),))
    assert findings_of(verdict(AGAIN, evidence)) == [
        ("counter._extra_state", (0, 1), "the second save has the state of the first", "the current state", ""),
        (None, (0, 1), "the second save has lr=1 of the first in the optimizer's group 0", "the current 0.5", ""),
    ]


def exporting(evidence: Evidence, later: str, dtype: str = "float32") -> Evidence:
    evidence = again(evidence, "continued", exported=described(layers__0__weight=f"{dtype} (8, 3) first"))
    return again(evidence, "saved_again", exported=described(layers__0__weight=f"{dtype} (8, 3) {later}"))


def test_a_state_dict_that_keeps_its_first_values():
    assert verdict(AGAIN, exporting(healthy(), "later")).status == "passed"
    assert findings_of(verdict(AGAIN, exporting(healthy(), "first"))) == [
        (MIDDLE, (0, 1), "state_dict() still returns the values of the first save", "the current values", "")
    ]
    assert verdict(AGAIN, exporting(healthy(), "first", "bfloat16")).status == "passed", (
        "a small step may be rounded off"
    )
    held = {"model": healthy().continued[0].model, "state": {}}
    unchanged = again(again(healthy(), "saved_again", **held), "restored_again", **held)
    assert verdict(AGAIN, exporting(unchanged, "first")).status == "passed"


def test_a_training_that_changes_nothing_between_two_saves():
    evidence = replace(healthy(), saved_again=healthy().continued, restored_again=healthy().continued)
    found = verdict(AGAIN, evidence)
    assert found.status == "skipped"
    assert found.reason == "training changed nothing between the two saves, so they cannot be distinguished"
    runs = tuple(replace(run, losses=(math.nan, math.nan)) for run in evidence.continued)
    garbage = change(differ(replace(evidence, continued=runs), MIDDLE), MIDDLE, nan=12, poisoned=12)
    assert (found := verdict(AGAIN, garbage)).why == "depends on a failed check"
    assert (
        verdict(AGAIN, undeclared(replace(evidence, continued=runs), "reference", "values", why="no")).status == "error"
    )


def test_parameters_that_are_frozen_or_untied_by_resuming():
    before = {"frozen": (FROZEN,), "tied": ((EMBEDDING, HEAD),)}
    same = again(again(healthy(), "continued", **before), "resumed", **before)
    assert verdict(RESUME, same).status == "passed"
    other = again(same, "resumed", (1,), frozen=(MIDDLE,), tied=(), losses=(9.0, 9.0))
    assert {(f.tensor, f.ranks) for f in verdict(RESUME, other).findings} == {
        (FROZEN, (1,)),
        (MIDDLE, (1,)),
        (HEAD, (1,)),
    }


def test_dropouts_and_frozen_parts_that_resuming_sets_otherwise():
    frozen = {"kept": ("teacher.drop",), "dropouts": {"drop.p": 0.1}}
    first = again(healthy(), "continued", **frozen, resting=("teacher", "teacher.drop"))
    # It is trainable after resuming, and still in eval().
    resting = again(first, "resumed", resting=("teacher", "teacher.drop"), dropouts={"drop.p": 0.1})
    assert verdict(RESUME, resting).status == "passed"
    woken = again(resting, "resumed", (1,), resting=("teacher",))
    assert [f[:3] for f in findings_of(verdict(RESUME, woken))] == [("teacher.drop", (1,), "in train() after resuming")]
    other = again(resting, "resumed", dropouts={"drop.p": 0.5})
    assert [f[:4] for f in findings_of(verdict(RESUME, other))] == [
        ("drop.p", (0, 1), "is 0.5 after resuming", "0.1, as uninterrupted")
    ]


def test_a_second_save_of_the_first_average():
    entry = "ema.layers.0.weight"
    first, second, other = (described(ema__layers__0__weight=text) for text in ("first", "second", "other"))
    evidence = again(again(healthy(), "continued", beside=first), "saved_again", beside=second)
    assert verdict(AGAIN, again(evidence, "restored_again", beside=second)).status == "passed"
    # Each rank has a counter of its own, and torch keeps one of them.
    unlike = again(again(evidence, "saved_again", plain=(entry,)), "saved_again", (1,), beside=other)
    assert verdict(AGAIN, again(unlike, "restored_again", beside=first)).status == "passed"
    assert findings_of(verdict(AGAIN, again(evidence, "restored_again", (1,), beside=first))) == [
        (entry, (1,), "the second save has the values of the first", "the current values", "")
    ]
