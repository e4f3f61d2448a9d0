"""Checkpoints: what is saved comes back, under the names of the reference, and training goes on as if nothing had been.

And loading again: the same loader in a fresh world gives the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from pytest_fsdp_meta.catalogue.diagnosis.parity import curve, declared_or_coarsest
from pytest_fsdp_meta.catalogue.findings import Explanation, Finding, Mismatch
from pytest_fsdp_meta.catalogue.registry import check
from pytest_fsdp_meta.catalogue.view import Blocked, NotJudged, PartlyJudged, Unjudgeable, View, ranks_by
from pytest_fsdp_meta.evidence import Comparison, TensorFacts
from pytest_fsdp_meta.evidence.checkpoint import RankResumed, RankSaved
from pytest_fsdp_meta.text import WRAPPERS, clean_name, first_of

HERE = ("same_manifest_on_every_rank", "no_meta_params", "no_meta_buffers", "no_uninitialized_memory")
SOUND = (
    *HERE,
    "names_match_reference",
    "shapes_match_reference",
    "managed_params_are_registered",
    "shards_tile_the_tensor",
    "collectives_match_on_every_rank",
    "replicas_equal",
)
"""Without which saving, loading or training may fail or give anything."""
EQUAL = (*SOUND, "params_equal_reference", "buffers_equal_reference")
EXPLAINING_A_REFUSAL = (*SOUND, "state_dict_names_clean", "dcp_round_trip")
TRAINED = (
    "tied_weights_share_storage",
    "tied_weights_stay_tied",
    "optimizer_owns_parameters",
    "frozen_weights_stay_frozen",
    "every_trainable_moves",
    "replicas_stay_equal",
    "loss_parity",
    "grad_parity",
    "update_parity",
    "grad_accumulation_parity",
)
"""What goes wrong in training goes wrong in another way when it is resumed."""
EXTRA_STATE = "_extra_state"
TOLERANCE = {"float64": 1e-12, "float32": 1e-6, "float16": 2e-4, "bfloat16": 2e-3}
"""Relative, by the coarsest dtype among the parameters: the same ranks compute the same twice, nearly bit for bit."""
ROUNDING = 1e-2
"""Relative: what a loader that casts may be off by from a reference that does not."""


@check(
    promise="loading twice in fresh worlds gives the same bits",
    family="checkpoint",
    needs=["inventory", "repetition"],
    after=HERE,
    why="What one run cannot repeat, no other run can be compared with, and no checkpoint of it can be trusted.",
    cause="it is drawn from a generator that nobody seeds, or it depends on time, on a set's order or on which rank "
    "comes first",
    remedy="seed every generator by the step and the name, never by time, and load what can be loaded",
    references=["LLaMA-Factory 0.9.5"],
    since="0.2",
)
def load_is_repeatable(view: View) -> Iterable[Finding]:
    again = {rank.rank: rank.by_name for rank in view.evidence.repetition or ()}
    for name, pairs in view.tensors("parameter", "buffer"):
        yield from view.broken(name, ((rank, _again(tensor, again[rank].get(name))) for rank, tensor in pairs))
    known = {tensor.name for rank in view.evidence.inventory for tensor in rank.tensors}
    new = [(rank, name) for rank, tensors in again.items() for name in tensors if name not in known]
    for name, ranks in ranks_by(new).items():
        if view.judgeable(name):
            yield Finding(name, ranks, "only in the second load", "in both")


def _again(tensor: TensorFacts, other: TensorFacts | None) -> Mismatch | None:
    if other is None:
        return Mismatch("missing in the second load", "in both")
    for what in ("shape", "local_shape", "dtype", "requires_grad"):
        one, two = getattr(tensor, what), getattr(other, what)
        if one != two:
            return Mismatch(f"{what} {two} in the second load", f"{one}, as in the first")
    return None if tensor.digest == other.digest else Mismatch("other values in the second load", "those of the first")


@check(
    promise="the state dict has the reference's keys: no wrapper's prefix, none missing, none renamed",
    family="checkpoint",
    needs=["inventory", "reference", "state_dict"],
    after=["same_manifest_on_every_rank", "names_match_reference"],
    why="Whoever loads the checkpoint by name finds nothing under the name, and often says nothing about it.",
    cause="a state-dict hook drops or renames it, or the state dict is taken from a module that wraps the model",
    remedy="save what torch.distributed.checkpoint.state_dict.get_model_state_dict gives, which knows the wrappers",
    references=["pytorch/pytorch#118119"],
    since="0.2",
)
def state_dict_names_clean(view: View) -> Iterable[Finding]:
    expected = set(view.reference.state_dict)
    by_rank = [(number, rank.keys) for number, rank in enumerate(view.evidence.state_dict or ())]
    spoiled = {
        key: clean_name(key) for _, keys in by_rank for key in keys if key not in expected and clean_name(key) != key
    }
    for key, ranks in ranks_by((rank, key) for rank, keys in by_rank for key in keys if key in spoiled).items():
        if view.judgeable(spoiled[key]):
            inserted = ", ".join(dict.fromkeys(part for part in key.split(".") if part in WRAPPERS))
            yield Finding(key, ranks, "a name that a wrapper made", f"without {inserted}", **_WRAPPED)
    if not view.reference.complete:
        return  # what a checkpoint calls its tensors, and which of two tied ones it keeps, is its own affair
    # An author may gather it on one rank, as torch does with full_state_dict and cpu_offload: the others have nothing.
    gathered = "state_dict" in view.evidence.subject.declared and any(keys for _, keys in by_rank)
    told = [(rank, {spoiled.get(key, key) for key in keys}) for rank, keys in by_rank if keys or not gathered]
    for name, ranks in ranks_by((rank, key) for rank, keys in told for key in sorted(expected - keys)).items():
        if view.judgeable(name):
            yield Finding(name, ranks, "no key in the state dict", "saved under its name", condemns=(name,))
    for name, ranks in ranks_by((rank, key) for rank, keys in told for key in sorted(keys - expected)).items():
        if view.judgeable(name):
            yield Finding(name, ranks, "a key of the state dict", "none: the reference's has no such key")


_WRAPPED: Explanation = {
    "cause": "the state dict is taken from the module that torch.compile, checkpoint_wrapper or FSDP1 put around it",
    "remedy": "save what torch.distributed.checkpoint.state_dict.get_model_state_dict gives, which knows the wrappers",
}


@check(
    promise="what is saved and loaded into a fresh load of the same loader has equal bits, empty parameters and "
    "_extra_state included",
    family="checkpoint",
    needs=["inventory", "saved", "restored"],
    after=[*SOUND, "frozen_weights_stay_frozen", "state_dict_names_clean", "load_is_repeatable"],
    why="A checkpoint that does not come back is found out when it is needed.",
    cause="saving leaves it out, renames or casts it, writes the shards of one rank only, or loading skips it: a "
    "filter of names, strict=False, copies that nobody writes back",
    remedy="save and load by torch.distributed.checkpoint with get_model_state_dict and set_model_state_dict, strictly",
    references=["NVIDIA/TransformerEngine#2713", "NVIDIA/TransformerEngine#1860"],
    since="0.2",
)
def dcp_round_trip(view: View) -> Iterable[Finding]:
    evidence = view.evidence
    before = evidence.saved or ()
    apart = _not_one_tensor(view, before)
    yield from _not_restored(view, before, evidence.restored or (), apart)
    if apart:
        raise PartlyJudged(
            f"of {first_of(apart)} ranks hold what differs though it has one name and one place, and "
            "torch.distributed.checkpoint keeps one of each; declare Subject(save=..., resume=...)"
        )
    left = [name for rank in before for name in rank.left_out if view.judgeable(name)]
    if left and evidence.reference is None:
        raise NotJudged(f"the state dict has no key for {left[0]}, and no reference tells whether it should")


def _not_restored(
    view: View, before: Sequence[RankSaved], after: Sequence[RankSaved], but: Sequence[str]
) -> Iterator[Finding]:
    left_out = {name for rank in before for name in rank.left_out}
    for name in dict.fromkeys(name for rank in before for name in rank.tensors):
        if name in but or name in left_out or not view.judgeable(name):
            continue
        ranks = _differing(name, [rank.tensors for rank in before], [rank.tensors for rank in after])
        untouched = tuple(rank for rank in ranks if name in after[rank].untouched)
        if untouched:
            yield Finding(name, untouched, "not restored: loading leaves it as it was", SAVED, **_UNTOUCHED)
        if others := tuple(rank for rank in ranks if rank not in untouched):
            yield Finding(name, others, "other values once it is loaded", SAVED)
    for key in dict.fromkeys(key for rank in before for key in rank.extra):
        ranks = _differing(key, [rank.extra for rank in before], [rank.extra for rank in after])
        if ranks:
            yield Finding(key, ranks, "another state once it is loaded", "that which was saved", **_EXTRA)


SAVED = "those that were saved"
_UNTOUCHED: Explanation = {
    "cause": "saving leaves it out, or loading skips it: a filter of names, strict=False, a renamed key, copies that "
    "nobody writes back",
}
_EXTRA: Explanation = {
    "cause": "set_extra_state() does not restore what get_extra_state() gives, or it differs from rank to rank",
    "remedy": "restore all of it in set_extra_state(), and keep what differs between ranks in tensors",
}


def _differing(name: str, before: Sequence[Mapping[str, str]], after: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
    """The ranks on which it was there and is another. What the other load does not have is told by its own check."""
    pairs = enumerate(zip(before, after, strict=True))
    return tuple(rank for rank, (one, two) in pairs if name in one and name in two and one[name] != two[name])


def _not_one_tensor(view: View, before: Sequence[RankSaved]) -> list[str]:
    """Names under which ranks hold different things in the same place of a tensor: one checkpoint cannot hold both.

    None are known where nothing was saved, which may be so though another checkpoint was.
    """
    if "save" in view.evidence.subject.declared or not before:
        return []
    places: dict[tuple[str, object], set[str]] = {}
    for rank in view.evidence.inventory:
        for name, digest in before[rank.rank].tensors.items():
            if name in rank.by_name and rank.by_name[name].numel:
                places.setdefault((name, rank.by_name[name].regions), set()).add(digest)
    return list(dict.fromkeys(name for (name, _), digests in places.items() if len(digests) > 1))


@check(
    promise="a checkpoint saved in this world is equal in worlds of other sizes",
    family="checkpoint",
    needs=["inventory", "reference", "values", "resharded"],
    uses=["saved", "restored"],
    after=[*EQUAL, "state_dict_names_clean", "load_is_repeatable", "dcp_round_trip"],
    why="The next run has more ranks, or fewer, and continues from whatever it reads.",
    cause="shards are saved by rank and not by their place in the tensor, or resume() reads the file of its own rank",
    remedy="save DTensors by torch.distributed.checkpoint, which notes the place of each shard",
    references=["pytorch/torchtitan#1136"],
    since="0.2",
)
def dcp_reshards(view: View) -> Iterable[Finding]:
    resharded = view.evidence.resharded
    assert resharded is not None
    size = math.prod(size for _, size in resharded.mesh)
    if resharded.refused:
        told = f"loading it in a world of {size} raises {resharded.refused}"
        if by := [id for id in view.failed if id in EXPLAINING_A_REFUSAL]:
            raise Blocked(f"{told}; the findings of {', '.join(by)} may explain it")
        yield Finding(None, resharded.ranks, told, "the values that were saved")
        return
    equal = _equal_before(view)
    skipped = set(_not_one_tensor(view, view.evidence.saved or ()))
    names = view.names("parameter", "buffer")
    for name, pairs in view.comparisons(resharded.comparisons, names).items():
        wrong = [(rank, c) for rank, c in pairs if not c.equal and not (c.cast and c.max_rel <= ROUNDING)]
        if wrong and name in equal and name not in skipped:
            ranks = tuple(rank for rank, _ in wrong)
            yield Finding(
                name, ranks, f"other values in a world of {size}", "those that were saved", _numbers(wrong[0][1])
            )


def _equal_before(view: View) -> set[str]:
    """What the loader's own world had equal to the reference, on every rank."""
    by_name: dict[str, bool] = {}
    for rank in view.evidence.values or ():
        for c in rank:
            by_name[c.name] = by_name.get(c.name, True) and (c.equal or (c.cast and c.max_rel <= ROUNDING))
    return {name for name, equal in by_name.items() if equal}


def _numbers(comparison: Comparison) -> str:
    if comparison.problem is not None:
        return f"{comparison.problem}, but should be {comparison.should_be}"
    index = ", ".join(map(str, comparison.index or ()))
    place = f"first at [{index}]: " if index else ""
    return (
        f"{comparison.differing} of {comparison.elements} elements differ, {place}{comparison.actual:.6g}, but should "
        f"be {comparison.expected:.6g}"
    )


@check(
    promise="the gathered state dict loads into the reference strictly and equals it, ties included",
    family="checkpoint",
    needs=["inventory", "reference", "values", "export"],
    after=[*EQUAL, "tied_weights_share_storage", "state_dict_names_clean"],
    why="What is exported is what is published and served: nobody looks at the shards any more.",
    cause="a state-dict hook saves it in another form: transposed, permuted, padded, cast, or a stale copy of a tie",
    remedy="undo in the export what sharding or a kernel wanted, and compare an exported checkpoint with the original",
    references=["huggingface/accelerate#4206", "pytorch/torchtitan#3764", "NVIDIA-NeMo/Automodel#2511"],
    since="0.2",
)
def full_state_dict_exports(view: View) -> Iterable[Finding]:
    export = view.evidence.export
    assert export is not None
    unusable = {*view.reference.unstable, *view.reference.uninitialised}
    equal = _equal_before(view)
    renamed = {clean_name(key) for key in export.unexpected}  # told of the key that a wrapper made
    for name in export.missing:
        if name not in renamed and view.judgeable(name):
            yield Finding(name, (0,), "missing in the gathered state dict", "exported")
    for name in export.unexpected:
        if view.judgeable(name):
            yield Finding(name, (0,), "in the gathered state dict", "none: the reference has no such key")
    for comparison in export.comparisons:
        if comparison.equal or comparison.name in unusable or not view.judgeable(comparison.name):
            continue
        if comparison.problem is not None:
            yield Finding(comparison.name, (0,), f"{comparison.problem} when gathered", comparison.should_be)
        elif comparison.name in equal and not (comparison.cast and comparison.max_rel <= ROUNDING):
            yield Finding(comparison.name, (0,), "other values when gathered", "the reference's", _numbers(comparison))


@check(
    promise="the optimizer's state survives saving and loading, that of frozen and empty parameters included",
    family="checkpoint",
    needs=["inventory", "continued", "resumed"],
    after=[*SOUND, "tied_weights_share_storage", "optimizer_owns_parameters", "load_is_repeatable", "dcp_round_trip"],
    why="Momenta that are lost show as a bump in the loss, if they show at all.",
    cause="the state of some parameters is not saved or not loaded: of frozen ones, of another group, or all of it is "
    "loaded by position",
    remedy="save and load it by name, with get_optimizer_state_dict and set_optimizer_state_dict, after freezing as "
    "it was when it was saved",
    references=["pytorch/pytorch#192202"],
    since="0.2",
)
def optimizer_state_round_trip(view: View) -> Iterable[Finding]:
    before, after = view.evidence.continued or (), view.evidence.resumed or ()
    if not any(run.state for run in before):
        raise NotJudged("the optimizer keeps no state; declare Subject(optimizer=...) with one that does")
    skipped = set(_not_one_tensor(view, [run.model for run in before]))
    names = dict.fromkeys(name for run in (*before, *after) for name in run.state)
    words = {} if any(run.state for run in after) else _NOTHING
    for name in names:
        if name in skipped or not view.judgeable(name):
            continue
        told = ((rank, _lost(one, two, name)) for rank, (one, two) in enumerate(zip(before, after, strict=True)))
        yield from (replace(finding, **words) for finding in view.broken(name, told))
    pairs = enumerate(zip(before, after, strict=True))
    for group, ranks in ranks_by((rank, told) for rank, two in pairs for told in _groups_apart(*two)).items():
        yield Finding(None, ranks, group.actual, group.expected, **_SET_ANEW)


_NOTHING: Explanation = {
    "cause": "none of it is loaded: save() or resume() leaves the optimizer out, or the loader left gradients, with "
    "which torch takes the optimizer for one that has a state (set_optimizer_state_dict)",
    "remedy": "save and load the optimizer beside the model, and zero_grad() after a warm-up",
}
_SET_ANEW: Explanation = {
    "cause": "the settings of the groups are not saved, or something sets them anew after they were loaded: resume() "
    "itself, or a scheduler that starts from the beginning",
    "remedy": "save param_groups with the state, load the scheduler as well, and set no option after loading",
}


def _lost(before: RankResumed, after: RankResumed, name: str) -> Mismatch | None:
    one, two = before.state.get(name), after.state.get(name)
    if one == two:
        return None
    if two is None:
        return Mismatch("no optimizer state once it is loaded", f"{', '.join(one or ())} as saved")
    if one is None:
        return Mismatch(f"an optimizer state once it is loaded ({', '.join(two)})", "none, as saved")
    wrong = [key for key in {**one, **two} if one.get(key) != two.get(key)]
    return Mismatch(f"another {', '.join(wrong)} once it is loaded", "the optimizer state that was saved")


def _groups_apart(before: RankResumed, after: RankResumed) -> Iterator[Mismatch]:
    if len(before.groups) != len(after.groups):
        yield Mismatch(f"{len(after.groups)} parameter groups once it is loaded", f"{len(before.groups)}, as saved")
        return
    for number, (one, two) in enumerate(zip(before.groups, after.groups, strict=True)):
        for key in {**one, **two}:
            if one.get(key) != two.get(key):
                where = f"in group {number} of the optimizer once it is loaded"
                yield Mismatch(f"{key}={two.get(key, 'nothing')} {where}", f"{one.get(key, 'nothing')}, as saved")


@check(
    promise="training after saving and loading follows the uninterrupted run",
    family="checkpoint",
    needs=["inventory", "continued", "resumed"],
    after=[*SOUND, *TRAINED, "load_is_repeatable", "dcp_round_trip", "optimizer_state_round_trip"],
    why="A run that is resumed is taken for the run that it continues.",
    cause="the forward depends on something that no checkpoint keeps: a buffer that is not persistent, a counter, a "
    "module that resume() made anew",
    remedy="register what changes as a persistent buffer or as extra state, and recompute what is derived from it "
    "after loading",
    references=["huggingface/transformers#31034"],
    since="0.2",
    tolerance=TOLERANCE,
)
def resume_parity(view: View) -> Iterable[Finding]:
    before, after = view.evidence.continued or (), view.evidence.resumed or ()
    tolerance = declared_or_coarsest(view, view.tolerance)
    apart: dict[int, list[int]] = {}
    for rank, (one, two) in enumerate(zip(before, after, strict=True)):
        for step, (expected, actual) in enumerate(zip(one.losses, two.losses, strict=True)):
            if _off(actual, expected, one.losses) > tolerance:
                apart.setdefault(step, []).append(rank)
    if not apart:
        if endless := _not_finite(before):
            # Whatever was not loaded, it would give the same.
            raise NotJudged(
                f"the losses of the uninterrupted run are not finite ({curve(endless)}), nor those after it"
            )
        return
    step = min(apart)
    rank = apart[step][0]
    ours, theirs = after[rank].losses, before[rank].losses
    _require_no_other_cause(view, f"step {step} after the checkpoint: {ours[step]:.9g}, without it {theirs[step]:.9g}")
    yield Finding(
        None,
        tuple(apart[step]),
        f"loss {ours[step]:.9g} at step {step} after the checkpoint",
        f"{theirs[step]:.9g} within {tolerance:g}, as without it",
        f"losses of rank {rank} {curve(ours)}; uninterrupted {curve(theirs)}",
    )


def _require_no_other_cause(view: View, told: str) -> None:
    before, after = view.evidence.continued or (), view.evidence.resumed or ()
    if _not_finite(before):
        raise Unjudgeable(f"the losses of the uninterrupted run are not finite ({told})")
    pairs = list(zip(before, after, strict=True))
    if any(one.model != two.model for one, two in pairs):
        raise Blocked(
            f"the losses differ ({told}), and so does the model that was loaded, which may explain it; see "
            "dcp_round_trip"
        )
    if any((one.state, one.groups) != (two.state, two.groups) for one, two in pairs):
        raise Blocked(
            f"the losses differ ({told}), and so does the optimizer that was loaded, which may explain it; see "
            "optimizer_state_round_trip"
        )
    if view.failed:
        raise Blocked(f"the losses differ ({told}), which the findings of {', '.join(view.failed)} explain")


def _not_finite(runs: Sequence[RankResumed]) -> Sequence[float]:
    """The losses of the first rank that has one that is not finite."""
    return next((run.losses for run in runs if not all(map(math.isfinite, run.losses))), ())


def _off(actual: float, expected: float, curve: Sequence[float]) -> float:
    """Relative to the largest loss of the curve."""
    if actual == expected or (math.isnan(actual) and math.isnan(expected)):
        return 0.0
    if not math.isfinite(actual) or not math.isfinite(expected):
        return math.inf
    return abs(actual - expected) / max(1e-12, *(abs(loss) for loss in curve if math.isfinite(loss)))
