"""Measure the noise of the reference's training, where a difference on the ranks is large enough to need it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from pytest_fsdp_meta.evidence import Comparison, RankInventory, RankTraining, ReferenceFacts
from pytest_fsdp_meta.evidence.tolerances import GRADIENT_TOLERANCE, LOSS_TOLERANCE, UPDATE_TOLERANCE, smallest
from pytest_fsdp_meta.trial import on_ranks
from pytest_fsdp_meta.trial.on_ranks import run_on
from pytest_fsdp_meta.worlds import World


def with_noise(
    runs: tuple[RankTraining, ...],
    inventory: RankInventory,
    reference: ReferenceFacts,
    ranks: World,
    reference_world: World,
    recipe: Mapping[str, bytes],
    folder: Path,
) -> tuple[RankTraining, ...]:
    """Return the runs with the noise of their slices; unchanged if they are close enough to the reference without.

    ``inventory`` is that of any rank. In float32 most loaders are close enough, and noise costs three more trainings.
    """
    dtypes = frozenset(t.dtype for t in inventory.tensors if t.kind == "parameter")
    if not _departs(runs, reference, dtypes):
        return runs
    used = tuple(dtypes | {*inventory.computes_in, *inventory.reduces_in})
    size = runs[0].data_parallel[1]
    whole = run_on(reference_world, on_ranks.noise.record_noise, recipe, str(folder), size, used, reference)[0]
    if whole.problem:
        return tuple(replace(run, noise=whole) for run in runs)
    own = run_on(ranks, on_ranks.noise.read_noise, str(folder))
    return tuple(
        replace(run, noise=replace(noise, losses=whole.losses, norm=whole.norm))
        for run, noise in zip(runs, own, strict=True)
    )


def _departs(runs: tuple[RankTraining, ...], reference: ReferenceFacts, dtypes: frozenset[str]) -> bool:
    """Return whether any loss, gradient or update differs by more than the smallest tolerance."""
    losses = reference.losses or ()
    largest = max(map(abs, losses), default=0.0)
    means = [
        math.fsum(step) / len(runs) if all(map(math.isfinite, step)) else math.nan
        for step in zip(*(run.losses for run in runs), strict=True)
    ]
    allowed = smallest(LOSS_TOLERANCE, dtypes) * largest
    if not all(abs(mean - loss) <= allowed for mean, loss in zip(means, losses, strict=False)):
        return True
    gradient, update = smallest(GRADIENT_TOLERANCE, dtypes), smallest(UPDATE_TOLERANCE, dtypes)
    return any(_farther(c, gradient) for run in runs for c in _gradients(run)) or any(
        _farther(c, update) for run in runs for c in _updates(run)
    )


def _gradients(run: RankTraining) -> Iterator[Comparison]:
    yield from run.gradients
    if run.second is not None:
        yield from run.second.gradients
    if run.accumulation is not None:
        yield from run.accumulation.gradients


def _updates(run: RankTraining) -> Iterator[Comparison]:
    yield from run.parameters
    if run.second is not None:
        yield from run.second.parameters


def _farther(comparison: Comparison, allowed: float) -> bool:
    measure = comparison.measure
    return measure is not None and not measure.apart <= allowed * measure.truth
