"""Take the observations of the author's own loader of batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from pytest_fsdp_meta.evidence import Epoch, RankBatches, Unavailable
from pytest_fsdp_meta.trial.obstacles import DECLARE
from pytest_fsdp_meta.trial.on_ranks import author_data, run_on
from pytest_fsdp_meta.worlds import World, WorldError

MORE = "an epoch has more batches than are read"
LEFT = 3
"""Batches: with fewer after the first checkpoint, none follow the second one. Also how many too many are read."""


def read_epoch(world: World, alone: World, folder: str | None) -> Epoch:
    """Read an epoch on all ranks, and in a world of one rank where that shows the rows of all ranks.

    A checkpoint is saved in ``folder``, if it is given, after the first batches.
    """
    packed = run_on(world, author_data.pack_data)[0]  # before an epoch leaves iterators behind
    ranks = tuple(run_on(world, author_data.read_epoch, folder))
    size = ranks[0].data_parallel[1]
    if size == 1:
        return Epoch(ranks)
    assert packed is not None
    endless = "" if all(rank.ended for rank in ranks) else MORE
    if problem := packed.problem or endless:
        return Epoch(ranks, problem=problem)
    try:
        with alone:
            found = run_on(alone, author_data.read_alone, packed, size)[0]
    except WorldError as error:
        return Epoch(ranks, problem=error.summary)
    return Epoch(ranks, problem=found) if isinstance(found, str) else Epoch(ranks, found)


def resume_epoch(epoch: Epoch, new_load: Callable[[], World], folder: str) -> tuple[RankBatches, ...] | Unavailable:
    """Resume in a new load from the checkpoint within the epoch and read the rest; then once more, from within it."""
    if not all(rank.saved_after for rank in epoch.ranks if rank.loader):
        summary = f"the loader of batches has no state_dict and load_state_dict, which keep its position; {DECLARE}"
        return Unavailable(summary, kind="undeclared")
    rest = [len(rank.batches) - rank.saved_after for rank in epoch.ranks if rank.loader]
    again = f"{folder}-again" if min(rest) > LEFT else None
    most = max(rest) + LEFT  # more than that is not needed to see where a rank goes on
    first = run_on(new_load(), author_data.resume_epoch, folder, most, again)
    if again is None:
        return tuple(first)
    second = run_on(new_load(), author_data.resume_epoch, again, most, None)
    return tuple(replace(rank, resumed_again=later.batches) for rank, later in zip(first, second, strict=True))
