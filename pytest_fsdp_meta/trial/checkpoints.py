"""Keep the files of checkpoints, and go on from them: in a world of another size, within epochs and at their ends."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_fsdp_meta.evidence import Comparison, Epoch, RankBatches, Resharded, Unavailable
from pytest_fsdp_meta.trial.giving import end_world
from pytest_fsdp_meta.trial.obstacles import DECLARE, refuses_checkpoint
from pytest_fsdp_meta.trial.on_ranks import author_data, checkpoint, run_on, saved_state
from pytest_fsdp_meta.worlds import World, WorldError

if TYPE_CHECKING:
    from pytest_fsdp_meta.checks.checkpoint.observe.saved_state import Held

MORE = "an epoch has more batches than are read"
TOO_MANY = 3
"""Batches that are read beyond those that follow a checkpoint."""


@contextmanager
def restored_if_deleted(folder: Path, kept: Path) -> Iterator[None]:
    """Put files back at the end that are gone by then: an author's save() may delete earlier checkpoints.

    What cannot be kept, because a background writer moves files, is then missing as the author left it.
    """
    with suppress(OSError):
        shutil.copytree(folder, kept, symlinks=True, copy_function=_link)
    try:
        yield
    finally:
        with suppress(OSError):
            shutil.copytree(kept, folder, symlinks=True, copy_function=_link, dirs_exist_ok=True)


def _link(source: str, target: str) -> None:
    """Link a file of a checkpoint, which may be large, if it is missing; copy it where no links are possible."""
    if not os.path.exists(target):
        try:
            os.link(source, target)
        except OSError:
            shutil.copy2(source, target)


@dataclass(frozen=True)
class Recorded:
    """What each rank has recorded of the model and the optimizer's state that it saved; empty if that failed."""

    folder: str = ""
    model: Sequence[Held] = ()
    state: Sequence[Held] = ()
    problem: str = ""
    """Why it failed on some rank."""

    def compare_model(self, world: World) -> list[tuple[Comparison, ...]]:
        return run_on(world, saved_state.compare_model, self.model, self.folder)


def record_saved(world: World, folder: str) -> Recorded:
    """Let the ranks that have saved record what it was. State that is recorded without the model is of no use."""
    model, problem = _all_or_none(run_on(world, saved_state.record_model, folder))
    if problem:
        return Recorded(problem=problem)
    state, problem = _all_or_none(run_on(world, saved_state.record_state, folder))
    return Recorded(folder, model, state, problem)


def _all_or_none(held: Sequence[Held | str]) -> tuple[list[Held], str]:
    problem = next((own for own in held if isinstance(own, str)), "")
    return [] if problem else [own for own in held if not isinstance(own, str)], problem


def reshard_model(
    world: World,
    saved: str,
    compare: Callable[[World], Sequence[tuple[Comparison, ...]]],
    loads_in_same_size: Callable[[], bool],
) -> Resharded:
    """Load the model that was ``saved``, and ``compare`` it.

    An error is a refusal only if a world of the size that saved can load the same checkpoint.
    """
    mesh = tuple(world.spec.mesh.items())
    try:
        run_on(world, checkpoint.load_over_other_values, saved)
    except WorldError as error:
        if not refuses_checkpoint(error) or not loads_in_same_size():
            raise
        return _refusal(mesh, error)
    return Resharded(mesh, tuple(compare(world)))


def reshard_all(world: World, load_again: Callable[[], World], saved: str, recorded: Recorded) -> Resharded:
    """Load model and optimizer, which a world of the same size has loaded, and compare both with what was saved.

    After an error the model is loaded alone, to see whether the optimizer made it.
    """
    mesh = tuple(world.spec.mesh.items())
    try:
        run_on(world, checkpoint.load_all_in_other_size, saved)
    except WorldError as error:
        alone = reshard_model(world if world.alive else load_again(), saved, recorded.compare_model, lambda: True)
        if alone.refused:
            return alone
        if not refuses_checkpoint(error):
            return replace(alone, optimizer_problem=error.summary)
        return replace(_refusal(mesh, error), optimizer_refused=True)
    resharded = Resharded(mesh, tuple(recorded.compare_model(world)))
    try:
        state = run_on(world, saved_state.compare_state, recorded.state, recorded.folder)
        return replace(resharded, optimizer=tuple(state))
    except WorldError as error:
        return replace(resharded, optimizer_problem=error.summary)


def save_over(
    world: World, load_again: Callable[[], World], steps: Sequence[int], saved: str, folder: str
) -> Resharded | None:
    """Train on in this smaller world, which has resumed, save in the same folder, and load that in another load.

    What the larger world has saved there must not come back. Return None where saving fails: an author may refuse to
    replace a checkpoint.
    """
    try:
        run_on(world, checkpoint.train_on, steps)
        run_on(world, checkpoint.save_all_over, saved)
        recorded = record_saved(world, folder)
        end_world(world)
        return None if recorded.problem else reshard_all(load_again(), load_again, saved, recorded)
    except WorldError:
        return None


def _refusal(mesh: tuple[tuple[str, int], ...], error: WorldError) -> Resharded:
    first = error.failures[0]
    ranks = sorted(f.rank for f in error.failures if (f.kind, f.summary) == (first.kind, first.summary))
    return Resharded(mesh, refused=first.summary.removeprefix("raised "), ranks=tuple(ranks))


# Epochs of the author's batches.


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
