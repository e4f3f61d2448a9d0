"""Load checkpoints in a world of another size, and compare what it then has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_fsdp_meta.evidence import Resharded
from pytest_fsdp_meta.trial.obstacles import refuses_checkpoint
from pytest_fsdp_meta.trial.on_ranks import checkpoint, optimizer_state, run_on
from pytest_fsdp_meta.worlds import World, WorldError

if TYPE_CHECKING:
    from pytest_fsdp_meta.observers.optimizer_state import Held


def reshard_model(world: World, saved: str, reference_path: str, loads_in_same_size: Callable[[], bool]) -> Resharded:
    """Load the model that was ``saved`` and compare it with the reference.

    An error is a refusal only if a world of the size that saved can load the same checkpoint.
    """
    mesh = tuple(world.spec.mesh.items())
    try:
        run_on(world, checkpoint.load_over_other_values, saved)
    except WorldError as error:
        if not refuses_checkpoint(error) or not loads_in_same_size():
            raise
        return _refusal(mesh, error)
    return Resharded(mesh, tuple(run_on(world, checkpoint.compare_loaded, reference_path)))


def reshard_optimizer(
    world: World, saved: str, recorded: Sequence[Held], folder: str, resharded: Resharded
) -> Resharded:
    """Load model and optimizer, which a world of the same size has loaded, and compare the optimizer's state.

    ``recorded`` has what ``record_state`` returned on each rank that saved.
    """
    try:
        run_on(world, checkpoint.load_all_in_other_size, saved)
    except WorldError as error:
        if not refuses_checkpoint(error):
            return replace(resharded, optimizer_problem=error.summary)
        return replace(_refusal(resharded.mesh, error), optimizer_refused=True)
    try:
        return replace(resharded, optimizer=tuple(run_on(world, optimizer_state.compare_state, recorded, folder)))
    except WorldError as error:
        return replace(resharded, optimizer_problem=error.summary)


def _refusal(mesh: tuple[tuple[str, int], ...], error: WorldError) -> Resharded:
    first = error.failures[0]
    ranks = sorted(f.rank for f in error.failures if (f.kind, f.summary) == (first.kind, first.summary))
    return Resharded(mesh, refused=first.summary.removeprefix("raised "), ranks=tuple(ranks))
