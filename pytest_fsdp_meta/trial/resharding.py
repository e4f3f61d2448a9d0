"""Load checkpoints in a world of another size, and compare what it then has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from pytest_fsdp_meta.evidence import Resharded
from pytest_fsdp_meta.trial.obstacles import refuses_checkpoint
from pytest_fsdp_meta.trial.on_ranks import checkpoint, optimizer_state, run_on
from pytest_fsdp_meta.worlds import World, WorldError


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


def record_optimizer(ranks: World, alone: World, folder: str) -> str:
    """Record the optimizer's whole state in the world of the reference, from the part that each rank has.

    Return why that fails, or an empty text.
    """
    held = run_on(ranks, optimizer_state.record_state, folder)
    if problems := [own for own in held if isinstance(own, str)]:
        return problems[0]
    try:
        return run_on(alone, optimizer_state.assemble_state, [own for own in held if not isinstance(own, str)], folder)[
            0
        ]
    except WorldError as error:
        return error.summary


def reshard_optimizer(world: World, saved: str, folder: str, resharded: Resharded) -> Resharded:
    """Load model and optimizer, which a world of the same size has loaded, and compare the optimizer's state."""
    try:
        run_on(world, checkpoint.load_all, saved, (), True)
        return replace(resharded, optimizer=tuple(run_on(world, optimizer_state.compare_state, folder)))
    except WorldError as error:
        if not refuses_checkpoint(error):
            return replace(resharded, optimizer_problem=error.summary)
        return replace(_refusal(resharded.mesh, error), optimizer_refused=True)


def _refusal(mesh: tuple[tuple[str, int], ...], error: WorldError) -> Resharded:
    first = error.failures[0]
    ranks = sorted(f.rank for f in error.failures if (f.kind, f.summary) == (first.kind, first.summary))
    return Resharded(mesh, refused=first.summary.removeprefix("raised "), ranks=tuple(ranks))
