"""Checkpoints: a loaded model equals the saved one, under the reference's names, in a world of any size.

Loading itself is checked as well: the same loader in a fresh world gives the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from pytest_fsdp_meta.checks.checkpoint.facts import FOREIGN, NO_STATE, Fingerprint, RankSaved, Resharded
from pytest_fsdp_meta.evidence import Comparison, TensorFacts
from pytest_fsdp_meta.judging.findings import Explanation, Finding, Mismatch, either
from pytest_fsdp_meta.judging.registry import checkpoint_check
from pytest_fsdp_meta.judging.view import Blocked, Noted, NotJudged, PartlyJudged, View, ranks_by
from pytest_fsdp_meta.text import WRAPPERS, clean_name, first_of

MATERIALISED = ("same_manifest_on_every_rank", "no_meta_params", "no_meta_buffers", "no_uninitialized_memory")
SOUND = (
    *MATERIALISED,
    "names_match_reference",
    "shapes_match_reference",
    "managed_params_are_registered",
    "shards_tile_the_tensor",
    "collectives_match_on_every_rank",
    "replicas_equal",
)
"""Checks whose failure can make saving, loading or training raise or give arbitrary results."""
EQUAL = (*SOUND, "params_equal_reference", "buffers_equal_reference")
ROUNDING = 1e-2
"""Relative: error allowed to a loader that casts, against a reference that does not."""


@checkpoint_check(
    promise="loading twice, in fresh worlds, gives bit-identical models",
    needs=["inventory", "repetition"],
    after=MATERIALISED,
    why="A loader that does not repeat itself cannot be compared with any other run, and its checkpoints cannot be "
    "trusted.",
    cause="it is drawn from a generator that is not seeded, or it depends on the time, on the order of a set or on "
    "which rank comes first",
    remedy="load every weight that the checkpoint has, and seed every generator by step and tensor name, not by time",
    references=["LLaMA-Factory 0.9.5"],
)
def load_is_repeatable(view: View) -> Iterable[Finding]:
    second = {rank.rank: rank.by_name for rank in view.evidence.repetition or ()}
    drawn = view.evidence.subject.drawn
    for name, pairs in view.tensors("parameter", "buffer"):
        yield from view.findings_for(
            name, ((rank, _compare_loads(tensor, second[rank].get(name), name in drawn)) for rank, tensor in pairs)
        )
    known = {tensor.name for rank in view.evidence.inventory for tensor in rank.tensors}
    new = [(rank, name) for rank, tensors in second.items() for name in tensors if name not in known]
    for name, ranks in ranks_by(new).items():
        if view.judgeable(name):
            yield Finding(name, ranks, "only in the second load", "in both")


def _compare_loads(first: TensorFacts, second: TensorFacts | None, drawn: bool) -> Mismatch | None:
    if second is None:
        return Mismatch("missing in the second load", "in both")
    for attribute in ("shape", "local_shape", "dtype", "requires_grad"):
        expected, actual = getattr(first, attribute), getattr(second, attribute)
        if expected != actual:
            return Mismatch(f"{attribute} {actual} in the second load", f"{expected}, as in the first")
    if drawn or first.digest == second.digest:
        return None
    return Mismatch("different values in the second load", "the same as in the first")


@checkpoint_check(
    promise="the state dict has exactly the reference's keys (one name is enough for tied weights), without prefixes "
    "of wrappers",
    needs=["inventory", "reference", "state_dict"],
    after=["same_manifest_on_every_rank", "names_match_reference"],
    why="Code that loads the checkpoint by name does not find a renamed weight, and often does not report it.",
    cause="a state-dict hook drops or renames it, or the state dict is taken from a module that wraps the model",
    remedy="save the result of torch.distributed.checkpoint.state_dict.get_model_state_dict, which strips wrapper "
    "prefixes",
    references=["pytorch/pytorch#118119"],
)
def state_dict_names_clean(view: View) -> Iterable[Finding]:
    expected = set(view.reference.state_dict)
    by_rank = [(number, rank.keys) for number, rank in enumerate(view.evidence.state_dict or ())]
    prefixed = {
        key: clean_name(key) for _, keys in by_rank for key in keys if key not in expected and clean_name(key) != key
    }
    for key, ranks in ranks_by((rank, key) for rank, keys in by_rank for key in keys if key in prefixed).items():
        if view.judgeable(prefixed[key]):
            inserted = ", ".join(dict.fromkeys(part for part in key.split(".") if part in WRAPPERS))
            yield Finding(key, ranks, "key contains a wrapper's prefix", f"saved without {inserted}", **_WRAPPED)
    if not view.reference.complete or "export_reference" in view.evidence.subject.declared:
        return  # a checkpoint may rename its tensors and store one name of a tie, and so may an export
    # An author may gather the state dict on one rank, as torch does with full_state_dict and cpu_offload: the other
    # ranks then have no keys.
    gathered = "state_dict" in view.evidence.subject.declared and any(keys for _, keys in by_rank)
    clean = [(rank, {prefixed.get(key, key) for key in keys}) for rank, keys in by_rank if keys or not gathered]
    held = [rank.by_name for rank in view.evidence.inventory]
    elsewhere = [{name for name in view.on_some_ranks if name not in own} for own in held]
    # Loading one name of a tie loads all of them, and transformers' save_pretrained() writes only one.
    ties = view.reference_inventory.tied_with
    missing = (
        (rank, key)
        for rank, keys in clean
        for key in sorted(expected - keys - elsewhere[rank])
        if keys.isdisjoint(ties.get(key, ()))
    )
    lacking = ranks_by(missing)
    explanation = explain_lacking(view, lacking)
    for name, ranks in lacking.items():
        if view.judgeable(name):
            wanted = "saved under this name"
            yield Finding(name, ranks, "missing in the state dict", wanted, condemns=(name,), **explanation)
    for name, ranks in ranks_by((rank, key) for rank, keys in clean for key in sorted(keys - expected)).items():
        if view.judgeable(name):
            yield Finding(name, ranks, "extra key in the state dict: the reference has no such key", "")


def explain_lacking(view: View, names: Iterable[str]) -> Explanation:
    """Explain what a state dict of the author's lacks, if those are all buffers, and no others."""
    buffers = {t.name for t in view.evidence.inventory[0].tensors if t.kind == "buffer" and t.persistent}
    return _NO_BUFFERS if buffers == {*names} and "state_dict" in view.evidence.subject.declared else {}


_NO_BUFFERS: Explanation = {
    "cause": "state_dict() has no buffers: it is made of named_parameters()",
    "remedy": "make it of model.state_dict(), which has the persistent buffers as well",
}
_WRAPPED: Explanation = {
    "cause": "the state dict is taken from the wrapper that torch.compile, checkpoint_wrapper or FSDP1 put around it",
}


_CHANGED = either(
    "",
    "saving casts or changes it, or save() returned before it had copied the values and training changed them",
    "saving writes one rank's shards only, or each rank's under one name",
    "save and load with torch.distributed.checkpoint, get_model_state_dict and set_model_state_dict, strictly; wait "
    "for an asynchronous save before the next step",
)


@checkpoint_check(
    promise="saving and loading into a fresh model restores every tensor bit for bit, including empty parameters and "
    "_extra_state",
    needs=["inventory", "saved", "restored"],
    uses=["continued", "resumed"],
    after=[
        *(*SOUND, "frozen_weights_stay_frozen", "replicas_stay_equal"),
        *("state_dict_names_clean", "load_is_repeatable"),
    ],
    why="A checkpoint that cannot be restored is noticed only when it is needed.",
    cause=_CHANGED["cause"],
    remedy=_CHANGED["remedy"],
    references=["NVIDIA/TransformerEngine#2713", "NVIDIA/TransformerEngine#1860"],
)
def dcp_round_trip(view: View) -> Iterable[Finding]:
    evidence = view.evidence
    before = evidence.saved or ()
    diverging = diverging_names(view, before)
    yield from _not_restored(view, before, evidence.restored or (), diverging)
    if diverging:
        raise PartlyJudged(
            f"ranks hold different values of {first_of(diverging)} in the same place of the tensor, and a checkpoint "
            "keeps only one of them; for a buffer of each rank's own, declare Subject(save=..., resume=...)"
        )
    left = [
        name
        for rank, held in zip(before, evidence.inventory, strict=False)
        for name in rank.left_out
        if held.tied_with.get(name, frozenset()) <= {*rank.left_out} and view.judgeable(name)
    ]
    if left and evidence.reference is None:
        raise NotJudged(f"the state dict has no key for {left[0]}; whether it should have one needs a reference")
    if rounded := list(dict.fromkeys(name for rank in before for name in rank.rounded)):
        raise Noted(f"save() itself changes {first_of(rounded)} within rounding; compared with the values after it")


def _not_restored(
    view: View, before: Sequence[RankSaved], after: Sequence[RankSaved], skipped: Sequence[str]
) -> Iterator[Finding]:
    left_out = {name for rank in before for name in rank.left_out}
    for name in dict.fromkeys(name for rank in before for name in rank.tensors):
        if name in skipped or name in left_out or not view.judgeable(name):
            continue
        if moved := tuple(number for number, rank in enumerate(before) if name in rank.moved):
            yield Finding(name, moved, "save() itself changes it in the model", "the same after save()", **MOVED)
            continue
        ranks = _changed_on(name, [rank.tensors for rank in before], [rank.tensors for rank in after])
        untouched = tuple(rank for rank in ranks if name in after[rank].untouched)
        if untouched:
            yield Finding(name, untouched, "not restored: loading does not change it", SAVED, **_UNTOUCHED)
        if others := tuple(rank for rank in ranks if rank not in untouched):
            owner = _kept_beside(view, {rank: after[rank].tensors[name] for rank in others})
            inventory = view.evidence.inventory
            loaded = all(inventory[rank].by_name[name].digest == after[rank].tensors[name] for rank in others)
            kind = inventory[others[0]].by_name[name].kind
            as_loaded = _NOT_SAVED if loaded and _restores(view, kind, before, after) else _AS_LOADED
            explanation = _of_another(owner) if owner else as_loaded if loaded else _CHANGED
            yield Finding(name, others, "different values after loading", SAVED, **explanation)
    for key in dict.fromkeys(key for rank in before for key in rank.extra):
        ranks = _changed_on(key, [rank.extra for rank in before], [rank.extra for rank in after])
        if ranks:
            yield Finding(key, ranks, "different state after loading", "the saved state", **_EXTRA_STATE)


def _restores(view: View, kind: str, before: Sequence[RankSaved], after: Sequence[RankSaved]) -> bool:
    """Return whether a tensor of this kind that training has changed is restored."""
    return any(
        (tensor := loaded.by_name.get(name)) is not None
        and tensor.kind == kind
        and tensor.digest != digest == restored.tensors.get(name)
        for loaded, saved, restored in zip(view.evidence.inventory, before, after, strict=True)
        for name, digest in saved.tensors.items()
    )


def _kept_beside(view: View, loaded: Mapping[int, str]) -> str:
    """Return what beside the model had the ``loaded`` digest of each rank when it was saved; "" if nothing had."""
    saved = view.evidence.continued or ()
    owners = [
        {entry.partition(".")[0] for entry, value in saved[rank].beside.items() if value.content == digest}
        for rank, digest in loaded.items()
        if rank < len(saved)
    ]
    return min(set.intersection(*owners), default="") if owners else ""


def _of_another(owner: str) -> Explanation:
    return {
        "cause": f"save() writes what {owner!r} holds in place of the model's weights, or resume() loads that",
        "remedy": f"save both, the model's weights to train on with and those of {owner!r} to evaluate with, under "
        "names of their own",
    }


SAVED = "those of the model when it was saved"
_UNTOUCHED: Explanation = {
    "cause": "saving leaves it out, or loading skips it: a filter of names, strict=False, a renamed key, copies that "
    "are not written back",
}
_NOT_SAVED: Explanation = {
    "cause": "it has the values from before the training, and others are restored: save() leaves it out, as by a "
    "filter of names, and resume() loads the weights that the training began with",
    "remedy": "save all that state_dict() has, and load the checkpoint last",
}
_AS_LOADED: Explanation = {
    "cause": "it has the values from before the training: save() writes copies that were made then, or resume() loads "
    "the weights that the training began with",
    "remedy": "read the parameters when save() is called, and load the checkpoint last",
}
MOVED: Explanation = {
    "cause": "it swaps, averages, merges or casts weights in place and does not put them back as they were, so the "
    "training continues from other ones",
    "remedy": "save copies, or put copies back before save() returns (optimizers with eval() and train() do so): what "
    "is added and then subtracted, as a merged adapter, is rounded",
}
_EXTRA_STATE: Explanation = {
    "cause": "set_extra_state() does not restore what get_extra_state() returns, or it differs between ranks",
    "remedy": "restore all of it in set_extra_state(), and keep state that differs between ranks in tensors",
}


def _changed_on(
    name: str, before: Sequence[Mapping[str, object]], after: Sequence[Mapping[str, object]]
) -> tuple[int, ...]:
    """Return the ranks that have the name before and after, with different bits.

    load_is_repeatable reports names that only one of the two loads has.
    """
    pairs = enumerate(zip(before, after, strict=True))
    return tuple(rank for rank, (old, new) in pairs if name in old and new.get(name, old[name]) != old[name])


def changes(
    old: Mapping[str, Fingerprint], new: Mapping[str, Fingerprint]
) -> Iterator[tuple[str, Fingerprint | None, Fingerprint | None]]:
    """Yield (entry, old, new) for values that differ between two moments of a rank; None where one lacks it."""
    pairs = ((entry, old.get(entry), new.get(entry)) for entry in {**old, **new})
    return (change for change in pairs if change[1] != change[2])


def diverging_names(view: View, before: Sequence[RankSaved]) -> list[str]:
    """Return the tensors with different values in the same place on several ranks; torch's checkpoint keeps only one.

    An author who saves without torch may keep each rank's buffers; replicas of a parameter are one in any checkpoint.
    """
    if not before:
        return []
    kinds = {"parameter"} if "save" in view.evidence.subject.declared else {"parameter", "buffer"}
    places: dict[tuple[str, object], set[str]] = {}
    for rank in view.evidence.inventory:
        for name, digest in before[rank.rank].tensors.items():
            tensor = rank.by_name.get(name)
            if tensor is not None and tensor.kind in kinds and tensor.numel:
                places.setdefault((name, tensor.regions), set()).add(digest)
    return list(dict.fromkeys(name for (name, _), digests in places.items() if len(digests) > 1))


@checkpoint_check(
    promise="a checkpoint saved in this world loads with equal values in a world of another size, of the model and of "
    "the optimizer, if it has one",
    needs=["inventory", "reference", "values", "resharded"],
    uses=["saved", "restored", "continued", "resumed"],
    after=[
        *(*EQUAL, "tied_weights_share_storage", "frozen_weights_stay_frozen", "state_dict_names_clean"),
        *("requires_grad_matches_reference", "replicas_stay_equal", "load_is_repeatable", "dcp_round_trip"),
    ],
    why="The next run may have more or fewer ranks, and it continues with whatever values it reads.",
    cause="shards are saved by rank instead of by their place in the tensor, or resume() reads its own rank's file",
    remedy="save DTensors with torch.distributed.checkpoint, which records the place of each shard",
    references=["pytorch/torchtitan#1136"],
)
def dcp_reshards(view: View) -> Iterable[Finding]:
    resharded = view.evidence.resharded
    assert resharded is not None
    size = math.prod(size for _, size in resharded.mesh)
    if resharded.refused:
        what = "the optimizer" if resharded.optimizer_refused else "the checkpoint"
        message = f"loading {what} in a world of {size} raises {resharded.refused}"
        if by := view.explaining(resharded.refused):
            raise Blocked(message, by)
        yield Finding(None, resharded.ranks, message, "")
        return
    equal = equal_to_reference(view)
    skipped = set(diverging_names(view, view.evidence.saved or ()))
    compared = view.comparisons(resharded.comparisons, view.names("parameter", "buffer"))
    wrong = {name: [(rank, c) for rank, c in pairs if not is_equal(c)] for name, pairs in compared.items()}
    # A weight that stages hold apart is one tensor again in a smaller world, with the values of one of its names.
    if any(compared[name] and not wrong[name] for name in view.tied_over_stages & compared.keys()):
        skipped |= view.tied_over_stages
    for name, cases in wrong.items():
        if cases and name in equal and name not in skipped:
            yield _moved(name, "", cases, f"a world of {size}")
    moved = list(_moved_state(view, resharded, f"a world of {size}"))
    yield from moved
    if resharded.saved_over is not None and not moved:
        right = {name for name, cases in wrong.items() if not cases and name in equal and name not in skipped}
        where = f"a world of {size} that has saved over a checkpoint of a world of {view.evidence.world.size}"
        yield from _left_by_the_larger_world(view, resharded.saved_over, where, right)
    if resharded.optimizer_problem:
        raise PartlyJudged(f"the optimizer's state was not compared: {resharded.optimizer_problem}")


def _left_by_the_larger_world(view: View, over: Resharded, where: str, right: Collection[str]) -> Iterator[Finding]:
    """Report the ``right`` tensors, and the state, that differ once a smaller world has saved in the same folder."""
    if over.refused:
        yield Finding(None, over.ranks, f"loading the checkpoint in {where} raises {over.refused}", "", **_LEFT)
    for name, pairs in view.comparisons(over.comparisons, right).items():
        if cases := [(rank, c) for rank, c in pairs if not c.equal]:
            yield _moved(name, "", cases, where).explained_by(_LEFT)
    for finding in _moved_state(view, over, where):
        yield finding.explained_by(_LEFT)


_LEFT: Explanation = {
    "cause": "files of the larger world that the smaller one does not replace stay in the folder, and are loaded",
    "remedy": "empty the folder before saving, or save the number of ranks as well and load the files of these only",
}


def _moved_state(view: View, resharded: Resharded, world: str) -> Iterator[Finding]:
    """Report the parameters whose optimizer state differs in the world of another size."""
    lost = _lost_in_same_world(view) | view.tied_over_stages
    wrong: dict[tuple[str, str], list[tuple[int, Comparison]]] = {}
    for rank, comparisons in enumerate(resharded.optimizer):
        for c in comparisons:
            name, key = c.name.rsplit(": ", 1)
            if not c.equal and name not in lost and view.judgeable(name):
                wrong.setdefault((name, key), []).append((rank, c))
    for (name, key), cases in wrong.items():
        yield _moved(name, key, cases, world)


def _moved(name: str, key: str, cases: Sequence[tuple[int, Comparison]], world: str) -> Finding:
    """Report a tensor, or the ``key`` of its optimizer state, that is not what was saved."""
    ranks, first = tuple(dict.fromkeys(rank for rank, _ in cases)), cases[0][1]
    saved, explanation = ("the saved optimizer state", _MOVED_STATE) if key else (SAVED, Explanation())
    if first.problem == FOREIGN:
        actual, explanation = f"{key} is {FOREIGN}" if key else FOREIGN, {**explanation, "cause": _PICKLED}
        return Finding(name, ranks, actual, f"on the mesh of {world}", **explanation)
    if first.problem == NO_STATE:
        return Finding(name, ranks, f"no {key} in {world}", saved, **explanation)
    actual = f"different {key or 'values'} in {world}"
    return Finding(name, ranks, actual, saved, describe_difference(first), **explanation)


def _lost_in_same_world(view: View) -> set[str]:
    """Return the parameters whose state a world of the same size has not loaded either, if a check reports that."""
    if "optimizer_state_round_trip" not in view.selection:
        return set()
    pairs = zip(view.evidence.continued or (), view.evidence.resumed or (), strict=False)
    return {name for saved, loaded in pairs for name in saved.state if saved.state[name] != loaded.state.get(name)}


_PICKLED = (
    "each rank loads what the rank of its number pickled, as with torch.save(optimizer.state_dict(), ...): a DTensor "
    "comes back with its old mesh and the part that this number had there"
)
_MOVED_STATE: Explanation = {
    "cause": "the optimizer's state is saved or loaded by the number of the rank, or cut where the old world cut it",
    "remedy": "save and load it with get_optimizer_state_dict and set_optimizer_state_dict, which know whole tensors",
}


def equal_to_reference(view: View) -> set[str]:
    """Return the tensors that equal the reference on every rank of the loader's own world."""
    by_name = dict.fromkeys(view.evidence.subject.drawn, False)  # another load may draw other values
    for rank in view.evidence.values or ():
        for c in rank:
            by_name[c.name] = by_name.get(c.name, True) and is_equal(c)
    return {name for name, equal in by_name.items() if equal}


def is_equal(comparison: Comparison) -> bool:
    """Return whether the values are equal, within rounding if one side casts."""
    return comparison.equal or (comparison.cast and comparison.max_rel <= ROUNDING)


def describe_difference(comparison: Comparison) -> str:
    if comparison.problem is not None:
        return f"{comparison.problem}, but should be {comparison.should_be}"
    index = ", ".join(map(str, comparison.index or ()))
    place = f"first at [{index}]: " if index else ""
    return (
        f"{comparison.differing} of {comparison.elements} elements differ, {place}{comparison.actual:.6g}, but should "
        f"be {comparison.expected:.6g}"
    )
