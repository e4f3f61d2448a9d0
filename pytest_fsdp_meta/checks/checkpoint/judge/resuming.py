"""Resuming: after saving and loading, optimizer state and losses equal those of the uninterrupted run."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from pytest_fsdp_meta.checks.checkpoint.facts import Fingerprint, RankResumed
from pytest_fsdp_meta.checks.checkpoint.judge.round_trip import SOUND, changes, diverging_names
from pytest_fsdp_meta.judging.findings import Explanation, Finding, Mismatch
from pytest_fsdp_meta.judging.gates import format_losses, require_finite
from pytest_fsdp_meta.judging.limits import declared_or_coarsest
from pytest_fsdp_meta.judging.registry import checkpoint_check
from pytest_fsdp_meta.judging.view import Blocked, NotDeclared, Noted, NotJudged, PartlyJudged, View, ranks_by
from pytest_fsdp_meta.text import first_of, grouped

TRAINING_CHECKS = (
    "tied_weights_share_storage",
    "tied_weights_stay_tied",
    "forward_sees_current_weights",
    "optimizer_owns_parameters",
    "frozen_weights_stay_frozen",
    "every_trainable_moves",
    "replicas_stay_equal",
    "loss_parity",
    "grad_parity",
    "second_grad_parity",
    "update_parity",
    "grad_accumulation_parity",
)
"""Checks whose failure makes a resumed run differ too, in another way."""
TOLERANCE = {"float64": 1e-12, "float32": 1e-6, "float16": 2e-4, "bfloat16": 2e-3}
"""Relative error of a loss, by the coarsest dtype among the parameters. It is tight because the same ranks compute
both runs, nearly bit for bit."""


@checkpoint_check(
    promise="the optimizer's state survives saving and loading, including that of frozen and empty parameters",
    needs=["inventory", "continued", "resumed"],
    after=[*SOUND, "tied_weights_share_storage", "optimizer_owns_parameters", "load_is_repeatable", "dcp_round_trip"],
    why="Lost momenta show as a bump in the loss, if at all.",
    cause="the state of some parameters is not saved or not loaded (frozen ones, those of another group), or the state "
    "is loaded by position",
    remedy="save and load it by name with get_optimizer_state_dict and set_optimizer_state_dict, and freeze the same "
    "parameters before loading as before saving",
    references=["pytorch/pytorch#192202"],
)
def optimizer_state_round_trip(view: View) -> Iterable[Finding]:
    before, after = view.evidence.continued or (), view.evidence.resumed or ()
    if not any(run.state or run.copies for run in before):
        raise NotJudged("the optimizer keeps no state; declare Subject(optimizer=...) with one that does")
    skipped = set(diverging_names(view, [run.model for run in before]))
    names = dict.fromkeys(name for run in (*before, *after) for name in run.state)
    pairs = list(enumerate(zip(before, after, strict=True)))
    found = {
        name: ranks_by((rank, mismatch) for rank, pair in pairs for mismatch in _compare_states(*pair, name))
        for name in names
        if name not in skipped and view.judgeable(name)
    }
    explanation = _explain_states(found.values(), before, after)
    for name, mismatches in found.items():
        for state, ranks in mismatches.items():
            yield Finding(name, ranks, state.actual, state.expected, **explanation)
    if not found or any(run.state for run in after):  # an optimizer that is not loaded has its first settings
        yield from view.findings_for(None, ((rank, found) for rank, pair in pairs for found in _compare_groups(*pair)))
    rebuilt = ((rank, entry) for rank, pair in pairs for entry in pair[0].copies if _is_rebuilt(entry, *pair))
    for entry, ranks in ranks_by(rebuilt).items():
        name, key = entry.rsplit(": ", 1)
        if view.judgeable(name):
            actual = f"{key} rounded to the dtype of the parameter after loading"
            yield Finding(name, ranks, actual, "as saved", **_REBUILT)
    if modes := sorted({mode for run in before for mode in run.saved_in_train}):
        raise Noted(
            f"save() does not call eval() of {modes[0]}, so the checkpoint has the weights with which it trains, not "
            "those that it evaluates (facebookresearch/schedule_free#48)"
        )


def _is_rebuilt(entry: str, before: RankResumed, after: RankResumed) -> bool:
    """Return whether a copy of a parameter in float32 had more than the parameter, and now has the same."""
    return before.copies.get(entry, False) and not after.copies.get(entry, True)


def _explain_states(
    found: Collection[Collection[Mismatch]], before: Sequence[RankResumed], after: Sequence[RankResumed]
) -> Explanation:
    """Explain the mismatches of each parameter if no rank has loaded a state, or if all parameters differ alike."""
    if not any(run.state for run in after):
        return _EMPTY_ENTRIES if any(run.empty_entries for run in after) else _NOTHING_LOADED
    if any(run.running for run in before):
        return _COPIED_LATE
    # On ranks that hold nothing of a parameter, nothing of it can differ.
    alike = len({frozenset(mismatches) for mismatches in found}) == 1
    lost = any(mismatch.actual == _LOST or mismatch.expected == _NOT_SAVED for some in found for mismatch in some)
    return _CHANGED if alike and not lost else {}


_LOST, _NOT_SAVED = "no optimizer state after loading", "none, as saved"
_NOTHING_LOADED: Explanation = {
    "cause": "no state is loaded: save() or resume() leaves the optimizer out, or loads into the state dict of one "
    "that has none yet; or gradients of the loader make set_optimizer_state_dict assume that it has one",
    "remedy": "save and load the optimizer with the model, and call zero_grad() after a warm-up",
}
_EMPTY_ENTRIES: Explanation = {
    "cause": "the optimizer's state has empty entries when it is loaded, which set_optimizer_state_dict takes for a "
    "state: train() or eval() of optimizers with modes leaves them when it looks up parameters without a state",
    "remedy": "call train() after loading, or delete the empty entries of optimizer.state before it",
}
_COPIED_LATE: Explanation = {
    "cause": "save() returned before it had copied the state, and training changed it: tensors on the CPU, such as "
    "AdamW's step, are not copied by what copies those on a GPU",
    "remedy": "copy each tensor, also on the CPU, before save() returns; or wait for the save before the next step",
}
_CHANGED: Explanation = {
    "cause": "the state is changed on the way: cast, reset or recomputed by save() or resume(), or loaded by position",
    "remedy": "save and load it as it is, by name, with get_optimizer_state_dict and set_optimizer_state_dict",
}
_RESET: Explanation = {
    "cause": "the settings of the groups are not saved, or they are overwritten after loading: by resume() itself, or "
    "by a scheduler that starts from the beginning",
    "remedy": "save param_groups with the state, load the scheduler as well, and set no option after loading",
}


def _compare_states(before: RankResumed, after: RankResumed, name: str) -> Iterator[Mismatch]:
    saved, loaded = before.state.get(name), after.state.get(name)
    if saved is None or loaded is None:
        if saved is not None:
            yield Mismatch(_LOST, f"{', '.join(saved)}, as saved")
        if loaded is not None:
            yield Mismatch(f"optimizer state ({', '.join(loaded)}) after loading", _NOT_SAVED)
    else:
        rebuilt = {key for key in saved if _is_rebuilt(f"{name}: {key}", before, after)}
        yield from _compare_values(*({key: own[key] for key in own if key not in rebuilt} for own in (saved, loaded)))


def _compare_values(saved: Mapping[str, Fingerprint], loaded: Mapping[str, Fingerprint]) -> Iterator[Mismatch]:
    """Yield the numbers that differ, the keys with another dtype, and all others that differ."""
    differing: dict[tuple[str, str] | None, list[str]] = {}
    for key, old, new in changes(saved, loaded):
        if numbers := _unlike(_number, new, old):
            yield Mismatch(f"{key} {numbers[0]} after loading", numbers[1])
        else:
            differing.setdefault(_unlike(_dtype, new, old), []).append(key)
    for dtypes, keys in differing.items():
        if dtypes:
            yield Mismatch(f"{', '.join(keys)} in {dtypes[0]} after loading", dtypes[1])
        else:
            yield Mismatch(f"different {', '.join(keys)} after loading", "the saved optimizer state")


def _unlike(
    read: Callable[[Fingerprint], str], new: Fingerprint | None, old: Fingerprint | None
) -> tuple[str, str] | None:
    """Return what is read of both values, if it can be read and differs."""
    now, once = (value and read(value) for value in (new, old))
    return (now, once) if now and once and now != once else None


def _number(value: Fingerprint) -> str:
    return "" if value.number is None else f"{value.number:.9g}"


def _dtype(value: Fingerprint) -> str:
    return value.dtype


def _compare_groups(before: RankResumed, after: RankResumed) -> Iterator[Mismatch]:
    if len(before.groups) != len(after.groups):
        expected = f"{len(before.groups)}, as saved"
        yield Mismatch(f"{len(after.groups)} parameter groups after loading", expected, **_RESET)
        return
    for number, (saved, loaded) in enumerate(zip(before.groups, after.groups, strict=True)):
        for key, old, new in changes(saved, loaded):
            actual = f"{key}={new or 'nothing'} in the optimizer's group {number} after loading"
            yield Mismatch(actual, f"{old or 'nothing'}, as saved", **_RESET)


@checkpoint_check(
    promise="the scheduler's state, and what is kept beside the model, survive saving and loading",
    needs=["inventory", "continued", "resumed"],
    after=[*SOUND, "tied_weights_share_storage", "optimizer_owns_parameters", "load_is_repeatable", "dcp_round_trip"],
    why="A resumed run starts its schedule, its average or its rounding errors from the beginning, and looks healthy.",
    cause="save() or resume() leaves it out, or resume() rebuilds it from the loaded model",
    remedy="save its state_dict() with the model, and load it after the model and the optimizer",
    references=["TensorAuto/OpenTau#185", "radixark/miles#3143", "NCAR/miles-credit#414"],
    fields=["scheduler or beside"],
)
def beside_round_trip(view: View) -> Iterable[Finding]:
    before, after = view.evidence.continued or (), view.evidence.resumed or ()
    if not any(run.beside for run in before):
        if {"scheduler", "beside"} & view.evidence.subject.declared:
            raise NotJudged("neither the scheduler nor what is kept beside the model has a state")
        raise NotDeclared("scheduler")
    by_rank = kept_by_one_rank(view, before)
    found: dict[str, list[tuple[int, Mismatch]]] = {}
    for rank, (saved, loaded) in enumerate(zip(before, after, strict=True)):
        for name, old, new in changes(saved.beside, loaded.beside):
            if name.startswith("scheduler.") and name.endswith(CALL_COUNT):
                continue
            mismatch = _describe_beside(name, old, new, saved, loaded)
            found.setdefault(name, []).append((rank, mismatch))
    for name in [name for name in found if name not in by_rank]:
        yield from view.findings_for(name, found[name])
    if by_rank:
        raise PartlyJudged(
            f"{first_of(by_rank)} differs between the ranks, and torch.distributed.checkpoint keeps one rank's value; "
            "declare Subject(save=..., resume=...) that keep each rank's"
        )


CALL_COUNT = "._step_count"
"""The entry in which torch's schedulers count calls, to warn of a wrong order; the schedule does not depend on it."""


def kept_by_one_rank(view: View, runs: Sequence[RankResumed]) -> list[str]:
    """Return the plain entries that differ between the ranks: torch's checkpoint keeps the value of one rank."""
    if "save" in view.evidence.subject.declared:
        return []
    plain = dict.fromkeys(name for run in runs for name in run.plain)
    return [name for name in plain if len({run.beside.get(name) for run in runs}) > 1]


def _describe_beside(
    name: str, old: Fingerprint | None, new: Fingerprint | None, saved: RankResumed, loaded: RankResumed
) -> Mismatch:
    if old is None:
        return Mismatch("a state after loading", "none, as saved")
    if new is None:
        return Mismatch("no state after loading", "a state, as saved")
    if new == saved.rounded.get(name):
        return Mismatch("rounded to the dtype of the parameters after loading", "as saved", **_REBUILT)
    explanation, owner = Explanation(), name.partition(".")[0]
    own = [entry for entry in loaded.beside_before if entry.partition(".")[0] == owner]
    if any(loaded.beside.get(entry) != loaded.beside_before[entry] for entry in own):  # resume() changes the object
        explanation = _LEFT_OUT if loaded.beside_before.get(name) == new else _CHANGED_AFTERWARDS
    if name.startswith("scheduler."):
        built = loaded.beside_before.get(name)
        # What training left as it was built is a setting.
        explanation = _STARTS_AGAIN if built == new else _OTHER_SETTINGS if built == old else _STEPPED
    for read in (_number, _dtype):
        if texts := _unlike(read, new, old):
            return Mismatch(f"{texts[0]} after loading", f"{texts[1]}, as saved", **explanation)
    return Mismatch("different after loading", "as saved", **explanation)


_REBUILT: Explanation = {
    "cause": "it is rebuilt from the loaded parameters, which are rounded: what rounding took away is lost",
    "remedy": "save it in float32, and load it; then round it to the parameters, not the other way",
}
_LEFT_OUT: Explanation = {
    "cause": "resume() restores other entries of this object and leaves this one as it was built, as a "
    "load_state_dict() does that forgets it",
    "remedy": "restore all that state_dict() returns in load_state_dict()",
}
_CHANGED_AFTERWARDS: Explanation = {
    "cause": "resume() rebuilds it from the loaded model, or changes it after loading it, as by a step: torch's "
    "get_optimizer_state_dict() steps an optimizer without state once, through its wrapper as well",
    "remedy": "load its saved state_dict() last, after the model and the optimizer",
}
_STARTS_AGAIN: Explanation = {
    "cause": "the scheduler's state is not saved, or not loaded, so that the schedule starts from the beginning",
    "remedy": "save scheduler.state_dict() with the optimizer, and load it last",
}
_STEPPED: Explanation = {
    "cause": "resume() steps the scheduler, also after loading its state, so that the schedule continues from another "
    "step",
    "remedy": "load scheduler.state_dict() last, and step the scheduler in training only",
}
_OTHER_SETTINGS: Explanation = {
    "cause": "resume() builds a new schedule with other settings, or sets them after loading",
    "remedy": "load scheduler.state_dict() last, which has the settings, and build it by those of the first run",
}


@checkpoint_check(
    promise="training after saving and loading has the losses and learning rates of the uninterrupted run, the same "
    "frozen and tied parameters, and the same modules in train()",
    needs=["inventory", "continued", "resumed"],
    after=[
        *(*SOUND, *TRAINING_CHECKS, "load_is_repeatable", "dcp_round_trip", "optimizer_state_round_trip"),
        "beside_round_trip",
    ],
    why="A resumed run is seen as a continuation of the first, even if it trains differently.",
    cause="the forward depends on something that the checkpoint does not contain: a non-persistent buffer, a counter, "
    "a module that resume() recreates, or a cached copy of a weight",
    remedy="register changing state as a persistent buffer or extra state, and recompute derived state after loading",
    references=["huggingface/transformers#31034"],
    tolerance=TOLERANCE,
)
def resume_parity(view: View) -> Iterable[Finding]:
    before, after = view.evidence.continued or (), view.evidence.resumed or ()
    tolerance = declared_or_coarsest(view, view.tolerance)
    changed = list(_changed_by_resuming(view, before, after))
    if changed:
        yield from changed
        return  # the losses follow
    if rates := list(_other_rates(view, before, after)):
        yield from rates
        return
    different: dict[int, list[int]] = {}
    for rank, (uninterrupted, resumed) in enumerate(zip(before, after, strict=True)):
        for step, (expected, actual) in enumerate(zip(uninterrupted.losses, resumed.losses, strict=True)):
            if _relative_error(actual, expected, uninterrupted.losses) > tolerance:
                different.setdefault(step, []).append(rank)
    if not different:
        # Losses that are not finite stay so, whether or not anything was loaded.
        require_finite(view, before, "the losses of the uninterrupted run")
        return
    step = min(different)
    rank = different[step][0]
    ours, theirs = after[rank].losses, before[rank].losses
    shown = f"{ours[step]:.9g} at step {step} after resuming, {theirs[step]:.9g} uninterrupted"
    _require_no_other_cause(view, "losses", shown)
    yield Finding(
        None,
        tuple(different[step]),
        f"loss {ours[step]:.9g} at step {step} after resuming",
        f"{theirs[step]:.9g} within {tolerance:g}, as in the uninterrupted run",
        f"losses of rank {rank}: {format_losses(ours)}; uninterrupted: {format_losses(theirs)}",
        **_explain_transient(before, after),
    )


def _explain_transient(before: Sequence[RankResumed], after: Sequence[RankResumed]) -> Explanation:
    """Name the non-persistent buffers that differ; caches may, so they are no finding of their own."""
    pairs = [(old.model.transient, new.model.transient) for old, new in zip(before, after, strict=True)]
    off = dict.fromkeys(name for old, new in pairs for name in old if old[name] != new.get(name, old[name]))
    if not off:
        return {}
    return {
        "cause": f"after loading, {first_of(list(off))} has other values than in the uninterrupted run, on which the "
        "loss may depend: it is a non-persistent buffer, so no checkpoint has it",
        "remedy": "recompute it after loading, or register it with persistent=True if training changes it",
    }


def _changed_by_resuming(view: View, before: Sequence[RankResumed], after: Sequence[RankResumed]) -> Iterator[Finding]:
    """Report what is frozen, tied or in ``eval()`` otherwise after loading, even if the losses do not show it yet."""
    pairs = enumerate(zip(before, after, strict=True))
    found = ((name, (rank, mismatch)) for rank, pair in pairs for name, mismatch in _compare_models(*pair))
    for name, mismatches in grouped(found).items():
        if view.judgeable(name):
            yield from view.findings_for(name, mismatches)


def _compare_models(old: RankResumed, new: RankResumed) -> Iterator[tuple[str, Mismatch]]:
    yield from ((name, _LEFT_IN_EVAL) for name in new.evaluating if name not in old.evaluating)
    yield from ((name, _WOKEN) for name in old.kept if name not in new.resting)
    for name, due in old.dropouts.items():
        if (fraction := new.dropouts.get(name, due)) != due:
            yield name, Mismatch(f"is {fraction:g} after resuming", f"{due:g}, as uninterrupted", **_OTHER_DROPOUT)
    thawed = Mismatch("trainable after loading", "frozen, as before saving", **_OTHERWISE_FROZEN)
    yield from ((name, thawed) for name in old.frozen if name not in new.frozen)
    froze = Mismatch("frozen after loading", "trainable, as before saving", **_OTHERWISE_FROZEN)
    yield from ((name, froze) for name in new.frozen if name not in old.frozen)
    together = {name: group for group in new.tied for name in group}
    for first, *others in old.tied:
        untied = Mismatch(
            f"does not share storage with {first} after loading", "tied to it, as before saving", **_UNTIED
        )
        yield from ((name, untied) for name in others if name not in together.get(first, ()))


_LEFT_IN_EVAL = Mismatch(
    "trains in eval() after resuming",
    "in train(), as uninterrupted",
    "resume() leaves the model in eval(), and train_step does not call train()",
    "call model.train() at the beginning of each step, or at the end of resume()",
)
_WOKEN = Mismatch(
    "in train() after resuming",
    "in eval(), as uninterrupted",
    "resume() calls train() of the whole model, also of parts that the loader has put into eval()",
    "put it back into eval() at the end of resume(), or let the model's own train() leave it out",
)
_OTHER_DROPOUT: Explanation = {
    "cause": "resume() sets the fraction of this dropout, or builds its module again with other settings",
    "remedy": "build it from the settings of the first run, and leave them as they are",
}


def _other_rates(view: View, before: Sequence[RankResumed], after: Sequence[RankResumed]) -> Iterator[Finding]:
    """Report the first step with another learning rate, unless a more basic check explains it."""
    first: list[tuple[int, tuple[int, int, float, float]]] = []
    for rank, (old, new) in enumerate(zip(before, after, strict=True)):
        for step, (expected, actual) in enumerate(zip(old.rates, new.rates, strict=False)):
            pairs = enumerate(zip(actual, expected, strict=False))
            if off := [group for group, pair in pairs if not math.isclose(*pair, rel_tol=1e-6)]:
                first.append((rank, (step, off[0], actual[off[0]], expected[off[0]])))
                break
    for (step, group, ours, theirs), ranks in ranks_by(first).items():
        shown = f"{ours:g} at step {step} after resuming"
        _require_no_other_cause(view, "learning rates", f"{shown}, {theirs:g} uninterrupted")
        yield Finding(
            None,
            ranks,
            f"learning rate {shown}",
            f"{theirs:g}, as in the uninterrupted run",
            f"group {group}",
            **_OTHER_SCHEDULE,
        )


_OTHER_SCHEDULE: Explanation = {
    "cause": "the schedule continues from another step: its counter is not saved, a scheduler is built after the "
    "optimizer was loaded, or resume() steps it",
    "remedy": "save and load what the schedule counts, or declare Subject(scheduler=...), so that the checks save it",
}


_OTHERWISE_FROZEN: Explanation = {
    "cause": "a checkpoint does not keep requires_grad, and loading or the loader sets it differently than before "
    "saving",
    "remedy": "freeze the same parameters in the loader or in resume() as before saving",
}
_UNTIED: Explanation = {
    "cause": "loading replaces the parameters instead of copying into them (assign=True, setattr), so that each name "
    "gets a tensor of its own",
    "remedy": "copy into the loaded parameters, or tie the weights again at the end of resume()",
}


def _require_no_other_cause(view: View, what: str, message: str) -> None:
    before, after = view.evidence.continued or (), view.evidence.resumed or ()
    require_finite(view, before, "the losses of the uninterrupted run", message)
    # ``untouched`` and the like do not say that a model differs.
    models = [[(run.model.tensors, run.model.extra) for run in runs] for runs in (before, after)]
    optimizers = [[(run.state, run.groups) for run in runs] for runs in (before, after)]
    loaded = (("dcp_round_trip", "model", models), ("optimizer_state_round_trip", "optimizer", optimizers))
    for check_id, part, (saved, resumed) in loaded:
        if check_id in view.selection and saved != resumed:
            by = dict.fromkeys((check_id, *view.failed))
            raise Blocked(f"the {what} differ ({message}), and so does the loaded {part}", by)
    if view.failed:
        raise Blocked(f"the {what} differ ({message})", view.failed)


def _relative_error(actual: float, expected: float, curve: Sequence[float]) -> float:
    """Return the error of one loss, relative to the largest loss of the curve."""
    if actual == expected or (math.isnan(actual) and math.isnan(expected)):
        return 0.0
    if not math.isfinite(actual) or not math.isfinite(expected):
        return math.inf
    return abs(actual - expected) / max(1e-12, *(abs(loss) for loss in curve if math.isfinite(loss)))
