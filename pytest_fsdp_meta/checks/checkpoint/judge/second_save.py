"""Saving more than once: a later checkpoint has the values of its own moment."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from pytest_fsdp_meta.checks.checkpoint.facts import Fingerprint, RankResumed
from pytest_fsdp_meta.checks.checkpoint.judge.resuming import kept_by_one_rank
from pytest_fsdp_meta.checks.checkpoint.judge.round_trip import SAVED, SOUND, changes, diverging_names
from pytest_fsdp_meta.evidence import TensorFacts
from pytest_fsdp_meta.judging.findings import Explanation, Finding, Mismatch
from pytest_fsdp_meta.judging.gates import require_finite
from pytest_fsdp_meta.judging.registry import checkpoint_check
from pytest_fsdp_meta.judging.view import NotJudged, View

CURRENT = "the current values"


class _Saves(NamedTuple):
    """What one rank held when it saved, saved again after more training, and loaded the second checkpoint."""

    first: RankResumed
    second: RankResumed
    loaded: RankResumed


@checkpoint_check(
    promise="a checkpoint that is saved after more training has the values of that moment, not those of an earlier one",
    needs=["inventory", "continued", "saved_again", "restored_again"],
    after=[
        *(*SOUND, "frozen_weights_stay_frozen", "replicas_stay_equal", "state_dict_names_clean", "load_is_repeatable"),
        *("dcp_round_trip", "optimizer_owns_parameters", "optimizer_state_round_trip", "resume_parity"),
    ],
    why="The first checkpoint of a run is right, all later ones repeat it, and only resuming shows it.",
    cause="the first save keeps its copies (a cached state dict, staging memory that is reused, a structure that is "
    "assumed not to change), and later ones write these again",
    remedy="copy the current values at each save; a cache may keep shapes and plans, but no values",
    references=["NVIDIA-NeMo/RL#3312"],
)
def second_save_is_current(view: View) -> Iterable[Finding]:
    evidence = view.evidence
    runs = (evidence.continued or (), evidence.saved_again or (), evidence.restored_again or ())
    ranks = [_Saves(*saves) for saves in zip(*runs, strict=True)]
    if all((rank.first.model, rank.first.state) == (rank.second.model, rank.second.state) for rank in ranks):
        require_finite(view, (rank.first for rank in ranks), "the losses between the two saves")
        raise NotJudged("training changed nothing between the two saves, so they cannot be distinguished")
    diverging = diverging_names(view, [rank.second.model for rank in ranks])
    left_out = {name for rank in ranks for name in rank.second.model.left_out}
    names = dict.fromkeys(name for rank in ranks for name in (*rank.second.model.tensors, *rank.second.state))
    for name in [name for name in names if name not in left_out and name not in diverging and view.judgeable(name)]:
        held = [rank.by_name.get(name) for rank in evidence.inventory]
        yield from view.findings_for(name, ((rank, _compare_tensors(saves, name)) for rank, saves in enumerate(ranks)))
        yield from view.findings_for(name, ((rank, _compare_states(saves, name)) for rank, saves in enumerate(ranks)))
        exports = ((rank, _compare_exports(saves, held[rank])) for rank, saves in enumerate(ranks))
        yield from view.findings_for(name, exports)
    yield from _compare_rest(view, ranks)


def _compare_tensors(rank: _Saves, name: str) -> Mismatch | None:
    first, second, loaded = (run.model.tensors.get(name) for run in rank)
    if loaded is None or loaded == second:
        return None
    if loaded == first:
        return Mismatch("the second save has the values of the first", CURRENT)
    if name in rank.loaded.model.untouched:
        return Mismatch("not restored from the second save: loading does not change it", SAVED, **_OTHERWISE)
    return Mismatch("different values after loading the second save", SAVED, **_OTHERWISE)


def _compare_states(rank: _Saves, name: str) -> Mismatch | None:
    first, second, loaded = (run.state.get(name, {}) for run in rank)
    wrong = [key for key, *_ in changes(second, loaded)]
    if not wrong:
        return None
    if not loaded:
        return Mismatch(
            "no optimizer state after loading the second save", f"{', '.join(second)}, as saved", **_OTHERWISE
        )
    if all(key in loaded and loaded[key] == first.get(key) for key in wrong):
        return Mismatch(f"the second save has the {', '.join(wrong)} of the first", "the optimizer's current state")
    return Mismatch(
        f"different {', '.join(wrong)} after loading the second save", "the saved optimizer state", **_OTHERWISE
    )


def _compare_exports(rank: _Saves, tensor: TensorFacts | None) -> Mismatch | None:
    """Compare the state dict of the author with the earlier one, if this rank's values have changed since then."""
    if tensor is None:
        return None
    before, now = (run.model.tensors.get(tensor.name) for run in (rank.first, rank.second))
    exported = rank.second.exported.get(tensor.name)
    # In a coarser dtype, a small step may round to the same values.
    exact = exported is not None and exported.dtype in (tensor.dtype, "float64")
    if before == now or not exact or exported != rank.first.exported.get(tensor.name):
        return None
    return Mismatch("state_dict() still returns the values of the first save", CURRENT)


def _compare_rest(view: View, ranks: Sequence[_Saves]) -> Iterator[Finding]:
    """Compare what is not of one parameter: extra state, what is beside the model, and settings of the optimizer.

    They are judged where the first checkpoint restored them; another check reports where it did not.
    """
    for key in dict.fromkeys(key for rank in ranks for key in rank.second.model.extra):
        if stale := _stale_on([[run.model.extra.get(key) for run in rank] for rank in ranks]):
            yield Finding(key, stale, "the second save has the state of the first", "the current state")
    by_rank = kept_by_one_rank(view, [rank.second for rank in ranks])
    for entry in dict.fromkeys(e for rank in ranks for e in rank.second.beside if e not in by_rank):
        if stale := _stale_on([[run.beside.get(entry) for run in rank] for rank in ranks]):
            yield Finding(entry, stale, "the second save has the values of the first", CURRENT)
    settings = ((rank, found) for rank, saves in enumerate(ranks) for found in _stale_settings(saves))
    yield from view.findings_for(None, settings)


def _stale_on(values: Sequence[Sequence[Fingerprint | None]]) -> tuple[int, ...]:
    """Return the ranks that load the first value although they saved another; ``values`` has first, second, loaded."""
    return tuple(rank for rank, (first, second, loaded) in enumerate(values) if first == loaded != second)


def _stale_settings(rank: _Saves) -> Iterator[Mismatch]:
    for number, (first, second, loaded) in enumerate(zip(*(run.groups for run in rank), strict=False)):
        for key, current, stale in changes(second, loaded):
            if current and stale and stale == first.get(key):
                actual = f"the second save has {key}={stale} of the first in the optimizer's group {number}"
                yield Mismatch(actual, f"the current {current}")


_OTHERWISE: Explanation = {
    "cause": "the first checkpoint is restored and the second one is not: saving again leaves it out, writes beside "
    "what it should replace, or finds the state of the first save",
    "remedy": "save twice in one process, load the second checkpoint and compare the weights",
}
