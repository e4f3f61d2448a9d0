"""Measure the noise of the reference's training, where a difference on the ranks is large enough to need it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from pytest_fsdp_meta.checks.training.facts import BUFFERS, GRADIENTS
from pytest_fsdp_meta.checks.values.facts import GRADIENT_TOLERANCE, LOSS_TOLERANCE, UPDATE_TOLERANCE, smallest
from pytest_fsdp_meta.evidence import Comparison, Noise, RankInventory, RankTraining, ReferenceFacts
from pytest_fsdp_meta.trial import on_ranks
from pytest_fsdp_meta.trial.on_ranks import run_on
from pytest_fsdp_meta.worlds import World, WorldError

RUNS = 5
"""Trainings under nudges. A single one may by chance keep the sign of a gradient that is only rounding."""


def with_noise(
    runs: tuple[RankTraining, ...],
    inventory: RankInventory,
    reference: ReferenceFacts,
    ranks: World,
    reference_world: World,
    recipe: Mapping[str, bytes],
    folder: Path,
) -> tuple[RankTraining, ...]:
    """Return the runs with the noise of their slices; ``inventory`` is that of any rank."""
    computing, reducing = (*_trained_dtypes(inventory), *inventory.computes_in), inventory.reduces_in
    whole, factors = _measure(reference_world, recipe, folder, runs[0].data_parallel[1], computing, reducing, reference)
    if whole.problem:
        return tuple(replace(run, noise=whole) for run in runs)
    own = run_on(ranks, on_ranks.noise.read_noise, str(folder), factors)
    return tuple(
        replace(run, noise=replace(noise, losses=whole.losses, norm=whole.norm, own_norm=whole.own_norm))
        for run, noise in zip(runs, own, strict=True)
    )


def _measure(
    world: World,
    recipe: Mapping[str, bytes],
    folder: Path,
    size: int,
    computing: tuple[str, ...],
    reducing: tuple[str, ...],
    reference: ReferenceFacts,
) -> tuple[Noise, dict[str, dict[str, float]]]:
    """Return the noise of losses and norms, and the factors of tensors; or return why it is unknown.

    The distances of tensors are recorded in the folder.
    """
    found = []
    try:
        for number in range(RUNS):  # a call for each, because the author's timeout is for one training
            train_nudged = on_ranks.noise.train_nudged
            found += run_on(world, train_nudged, number, recipe, str(folder), size, computing, reducing, reference)
            if found[-1].problem:
                return found[-1], {}
        factors = run_on(world, on_ranks.noise.record_noise, str(folder))[0]
    except WorldError as error:
        return Noise(problem=error.summary, ended=True), {}
    # The noise of one number varies much, and grows slowly with the steps.
    largest = max((loss for noise in found for loss in noise.losses), default=0.0)
    whole = Noise(
        losses=tuple(largest for _ in reference.losses or ()),
        norm=max(noise.norm for noise in found),
        own_norm=max(noise.own_norm for noise in found),
    )
    return whole, factors


def departs(runs: tuple[RankTraining, ...], reference: ReferenceFacts, inventory: RankInventory, summed: bool) -> bool:
    """Return whether anything in the training differs from the reference's by more than the smallest tolerance.

    ``inventory`` is that of any rank, and ``summed`` says whether the ranks' losses add up to the global one. In
    float32 most right loaders are closer.
    """
    losses, dtypes = reference.losses or (), _trained_dtypes(inventory)
    largest = max(map(abs, losses), default=0.0)
    parts = len(runs) / runs[0].data_parallel[1] if summed else len(runs)
    means = [
        math.fsum(step) / parts if all(map(math.isfinite, step)) else math.nan
        for step in zip(*(run.losses for run in runs), strict=True)
    ]
    allowed = smallest(LOSS_TOLERANCE, dtypes) * largest
    if not all(abs(mean - loss) <= allowed for mean, loss in zip(means, losses, strict=False)):
        return True
    gradient, update = smallest(GRADIENT_TOLERANCE, dtypes), smallest(UPDATE_TOLERANCE, dtypes)
    for name, found in (pair for run in runs for pair in (*run.compared.items(), ("beside", run.beside))):
        allowed = gradient if name in GRADIENTS else update
        if any(c.relative > (0.0 if name in BUFFERS and not _rounds(c) else allowed) for c in found):
            return True
    return False


def _trained_dtypes(inventory: RankInventory) -> frozenset[str]:
    return frozenset(t.dtype for t in inventory.tensors if t.kind == "parameter" and t.requires_grad)


def _rounds(comparison: Comparison) -> bool:
    """Return whether the tensor has floating-point elements; integers have to be equal."""
    return comparison.measure is not None and comparison.measure.grain > 0
