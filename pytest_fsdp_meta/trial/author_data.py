"""Take the observations of the author's own loader of batches."""

from __future__ import annotations

from collections.abc import Callable

from pytest_fsdp_meta.evidence import Epoch, RankBatches, Unavailable
from pytest_fsdp_meta.trial.obstacles import DECLARE
from pytest_fsdp_meta.trial.on_ranks import author_data, run_on
from pytest_fsdp_meta.worlds import World, WorldError


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
    if packed.problem:
        return Epoch(ranks, problem=packed.problem)
    try:
        with alone:
            found = run_on(alone, author_data.read_alone, packed, size)[0]
    except WorldError as error:
        return Epoch(ranks, problem=error.summary)
    return Epoch(ranks, problem=found) if isinstance(found, str) else Epoch(ranks, found)


def resume_epoch(epoch: Epoch, world: Callable[[], World], folder: str) -> tuple[RankBatches, ...] | Unavailable:
    """Resume in another load from the checkpoint within the epoch, and read the rest."""
    if not all(rank.saved_after for rank in epoch.ranks if rank.loader):
        summary = f"the loader of batches has no state_dict and load_state_dict, which keep its position; {DECLARE}"
        return Unavailable(summary, kind="undeclared")
    return tuple(run_on(world(), author_data.resume_epoch, folder))
