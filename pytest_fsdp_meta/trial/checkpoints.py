"""Keep the files of checkpoints, and load them in a world of another size, to compare what it then has."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_fsdp_meta.evidence import Comparison, Resharded
from pytest_fsdp_meta.trial.giving import end_world
from pytest_fsdp_meta.trial.obstacles import refuses_checkpoint
from pytest_fsdp_meta.trial.on_ranks import checkpoint, run_on, saved_state
from pytest_fsdp_meta.worlds import World, WorldError

if TYPE_CHECKING:
    from pytest_fsdp_meta.checks.checkpoint.observe.saved_state import Held


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
