"""Read the author's batches through epochs, and go on from checkpoints within them and at their ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from pytest_fsdp_meta.evidence import Epoch, RankBatches, Unavailable
from pytest_fsdp_meta.trial.checkpoints import restored_if_deleted
from pytest_fsdp_meta.trial.obstacles import DECLARE
from pytest_fsdp_meta.trial.on_ranks import author_data, run_on
from pytest_fsdp_meta.worlds import World, WorldError

MORE = "an epoch has more batches than are read"
TOO_MANY = 3
"""Batches that are read beyond those that follow a checkpoint."""


def read_epoch(world: World, alone: World, folder: str | None) -> Epoch:
    """Read two epochs on all ranks, and one in a world of one rank where that shows the rows of all ranks.

    A checkpoint is saved after the first batches of each, and at the end of the second, if ``folder`` is given.
    """
    packed = run_on(world, author_data.pack_data)[0]  # before an epoch leaves iterators behind
    first = run_on(world, author_data.read_epoch, folder)
    ranks = tuple(rank for rank, _ in first)
    if all(again for _, again in first):
        later = run_on(world, author_data.read_later_epoch, folder and _within(folder, 1))
        if any(own.refused for own in later):
            ranks = tuple(replace(rank, refused=own.refused) for own, rank in zip(later, ranks, strict=True))
        else:
            ranks = tuple(replace(own, batches=rank.batches) for own, rank in zip(later, ranks, strict=True))
            if folder and all(rank.ended for rank in ranks):
                with _restored(folder, 1):
                    run_on(world, author_data.save_at_end, _within(folder, 2))
            ranks = _with_next_rows(world, ranks)
    size = ranks[0].data_parallel[1]
    if size == 1 or packed is None:
        return Epoch(ranks)
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
    """Resume in a new load from a checkpoint within the epoch and read the rest; then from within it, and its end."""
    if not all(rank.saved_after for rank in epoch.ranks if rank.loader):
        summary = f"the loader of batches has no state_dict and load_state_dict, which keep its position; {DECLARE}"
        return Unavailable(summary, kind="undeclared")
    rest = min(len(rank.resumable) - rank.saved_after for rank in epoch.ranks if rank.loader)
    after = _second_save(epoch.ranks, rest)
    again = f"{folder}-again" if rest > after + 1 else None
    world = new_load()
    last = _last(epoch)
    with _restored(folder, 2):
        found = _read_on(world, epoch, _within(folder, last), last, again, after)
    if last:
        found = _with_next_rows(world, found)
    if again is not None:
        second = _read_on(new_load(), epoch, again, last)
        found = tuple(replace(own, resumed_again=more.batches) for own, more in zip(found, second, strict=True))
    # Where a function returns the rest of an epoch, whoever calls it decides what follows an empty one.
    if all(rank.next_rows is not None for rank in found if rank.loader):
        ended = [sum(map(len, rank.batches)) for rank in _read_on(new_load(), epoch, _within(folder, 2), 2)]
        found = tuple(replace(own, rows_after_end=rows) for own, rows in zip(found, ended, strict=True))
    return found


def resume_last_epoch(world: World, epoch: Epoch, folder: str, times: int) -> tuple[RankBatches, ...]:
    """Resume in a world whose ranks read ``times`` as many batches, from the checkpoint that is judged."""
    last = _last(epoch)
    return _read_on(world, epoch, _within(folder, last), last, times=times)


def _read_on(
    world: World, epoch: Epoch, folder: str, number: int, again: str | None = None, after: int = 0, times: int = 1
) -> tuple[RankBatches, ...]:
    """Resume from the folder, and read ``times`` the epoch and a little more, to see where a rank goes on."""
    most = times * max(len(rank.resumable) for rank in epoch.ranks) + TOO_MANY
    return tuple(run_on(world, author_data.resume_epoch, folder, most, number, again, after))


def _second_save(ranks: Sequence[RankBatches], rest: int) -> int:
    """Return after how many batches a resumed run saves; ``rest`` is how many there are.

    In a stream that begins again by itself, it is in the second pass of each rank, at another position than before.
    """
    passes = [rank.first_pass - rank.saved_after for rank in ranks if not rank.ended]
    after = max(passes, default=-1) + 3
    return after if after + 1 < rest else 2


def _with_next_rows(world: World, ranks: tuple[RankBatches, ...]) -> tuple[RankBatches, ...]:
    """Begin the third epoch on all ranks, unless the second goes on on one: a loader may communicate as it begins."""
    if not all(rank.ended for rank in ranks):
        return ranks
    rows = run_on(world, author_data.count_third_epoch)
    return tuple(replace(rank, next_rows=own) for rank, own in zip(ranks, rows, strict=True))


def _restored(folder: str, number: int) -> AbstractContextManager[None]:
    """Put back the checkpoint of an epoch; it is kept elsewhere, as an author may delete all that lie beside theirs."""
    return restored_if_deleted(Path(_within(folder, number)), Path(folder).parents[1] / f"batches-{number}")


def _last(epoch: Epoch) -> int:
    """Return the number of the epoch within which resuming is judged: 1 if there is a second."""
    return int(any(rank.later is not None for rank in epoch.ranks))


def _within(folder: str, number: int) -> str:
    """Return where the checkpoint is from which an epoch goes on."""
    return f"{folder}-{number}" if number else folder
