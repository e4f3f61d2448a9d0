"""Where the training departs from the reference's: measure the reference's noise, and trace the step that departs."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from pytest_fsdp_meta.catalogue import Selection, built_in, judge
from pytest_fsdp_meta.checks.tracing.facts import RankTrace
from pytest_fsdp_meta.checks.training.facts import BUFFERS, GRADIENTS
from pytest_fsdp_meta.checks.values.facts import GRADIENT_TOLERANCE, LOSS_TOLERANCE, UPDATE_TOLERANCE, smallest
from pytest_fsdp_meta.evidence import (
    Evidence,
    Noise,
    RankInventory,
    RankTraining,
    ReferenceFacts,
    autocast_of_ranks_only,
)
from pytest_fsdp_meta.text import name_ranks
from pytest_fsdp_meta.trial import on_ranks
from pytest_fsdp_meta.trial.on_ranks import run_on
from pytest_fsdp_meta.worlds import World, WorldError

RUNS, VARIES = 5, 10.0
"""Trainings under nudges. A single one may by chance keep the sign of a gradient that is only rounding, and of so few
the largest noise of one number may be so many times too small."""
PARITY = ("grad_parity", "second_grad_parity", "loss_parity")
"""The checks whose findings say at which step the training departs."""
STAGES = "the stages of a pipeline run by the author's schedule"
REFUSED = ("pytest_fsdp_meta.checks.tracing.observe.step.NotTraceable",)


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
    scratch = {tensor.name for tensor in inventory.tensors if not tensor.persistent}
    for name, found in (pair for run in runs for pair in (*run.compared.items(), ("beside", run.beside))):
        allowed = gradient if name in GRADIENTS else update
        for comparison in (one for one in found if one.name not in scratch):
            rounds = comparison.measure is not None and comparison.measure.grain > 0  # integers have to be equal
            if comparison.relative > (0.0 if name in BUFFERS and not rounds else allowed):
                return True
    return False


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
    autocast = autocast_of_ranks_only(runs, reference)
    dtypes = (*_trained_dtypes(inventory), *inventory.computes_in, *autocast), inventory.reduces_in
    whole, factors = _measure(reference_world, recipe, folder, runs[0].data_parallel[1], *dtypes, reference)
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
    # The noise of one number varies much, and grows slowly with the steps; but no update is in the first loss.
    largest = max((loss for noise in found for loss in noise.losses), default=0.0)
    first = min(largest, VARIES * max((noise.losses[0] for noise in found if noise.losses), default=0.0))
    whole = Noise(
        losses=tuple(largest if step else first for step, _ in enumerate(reference.losses or ())),
        norm=max(noise.norm for noise in found),
        own_norm=max(noise.own_norm for noise in found),
    )
    return whole, factors


def _trained_dtypes(inventory: RankInventory) -> frozenset[str]:
    return frozenset(t.dtype for t in inventory.tensors if t.kind == "parameter" and t.requires_grad)


def departing_step(evidence: Evidence, selection: Container[str] | None) -> int | None:
    """Return the first step whose loss or gradients depart, as a selected check finds; None if none does.

    Nothing is judged where no difference is so large that its noise was measured. A check that leaves the difference to
    a more basic one has found nothing, and its step is not traced.
    """
    if all(run.noise is None for run in evidence.training or ()):
        return None
    selected = frozenset(check.id for check in built_in() if selection is None or check.id in selection)
    catalogue, found = built_in(), Selection(selected)
    verdicts = [judge(catalogue[id], evidence, catalogue, found) for id in PARITY if id in selected]
    failed = [verdict for verdict in verdicts if verdict.status == "failed"]
    return min(
        (finding.step for verdict in failed for finding in verdict.findings if finding.step is not None), default=None
    )


def trace_step(
    evidence: Evidence, recipe: Mapping[str, bytes], world: World, reference_world: World, folder: Path, step: int
) -> tuple[RankTrace, ...]:
    """Run a step once more with hooks on all modules, in the reference's world and then on the ranks.

    It starts from the loaded weights, also where it is a later one: if its batch alone brings out what is wrong, that
    shows, and wrong updates are left to other checks. The author's own step may do anything with the model; there the
    forward alone runs. The step is left out, with the reason in every trace, if the reference refuses the hooks or
    lacks loaded values.
    """
    runs, inventory = evidence.training or (), evidence.inventory
    if evidence.subject.stages:
        return _left_out(runs, step, STAGES)
    trained = sorted({name for pair in zip(inventory, runs, strict=True) for name in _changed(*pair)})
    if unknown := _unknown(evidence, trained):
        return _left_out(runs, step, f"the reference lacks the loaded values of {unknown[0]}")
    dtypes = {t.dtype for t in inventory[0].tensors if t.kind == "parameter"}
    computing = sorted({*dtypes, *evidence.computes_in})
    backward = "train_step" not in evidence.subject.declared
    size = runs[0].data_parallel[1]
    try:
        trace_reference = on_ranks.traces.trace_reference
        traced = run_on(reference_world, trace_reference, recipe, str(folder), size, computing, step, backward)[0]
        if traced.problem:
            return _left_out(runs, step, traced.problem)
        trace_rank, given = on_ranks.traces.trace_rank, (traced, trained, str(folder))
        return tuple(world.call(trace_rank, given, doing=on_ranks.doing_in(trace_rank), unanimous_outcomes=REFUSED))
    except WorldError as error:
        first = error.failures[0]
        if first.exception not in REFUSED:
            return _left_out(runs, step, error.summary)
        alone = "" if error.unanimous else f"{name_ranks([first.rank])}: "
        return _left_out(runs, step, f"{alone}{first.message}")


def compare_objective(evidence: Evidence, world: World, folder: Path) -> tuple[RankTraining, ...]:
    """Return the runs with what ``Subject(loss=...)`` makes of the rows of the author's first step, if known."""
    runs, inventory = evidence.training or (), evidence.inventory
    trained = sorted({name for pair in zip(inventory, runs, strict=True) for name in _changed(*pair)})
    known = all(run.first_backward is not None and run.first_backward.pieces for run in runs)  # others may wait
    if not known or _unknown(evidence, trained) or not world.alive:
        return runs
    observe, given = on_ranks.traces.observe_objective, (trained, str(folder))
    try:
        found = world.call(observe, given, doing=on_ranks.doing_in(observe), unanimous_outcomes=REFUSED)
    except WorldError:  # the ranks may be unable to compute it, as with parts of a vocabulary
        return runs
    return tuple(replace(run, objective=objective) for run, objective in zip(runs, found, strict=True))


def _left_out(runs: Sequence[RankTraining], step: int, problem: str) -> tuple[RankTrace, ...]:
    return tuple(RankTrace(run.data_parallel, step=step, problem=problem) for run in runs)


def _changed(loaded: RankInventory, run: RankTraining) -> set[str]:
    after = run.after.by_name if run.after is not None else {}
    return {t.name for t in loaded.tensors if t.name not in after or after[t.name].digest != t.digest}


def _unknown(evidence: Evidence, trained: Sequence[str]) -> list[str]:
    """Return the tensors that the ranks cannot read from the reference's values before the step."""
    assert evidence.reference is not None
    known = evidence.reference.inventory.by_name
    held = [rank.by_name[name] for rank in evidence.inventory for name in trained if name in rank.by_name]
    return [tensor.name for tensor in held if tensor.name not in known or known[tensor.name].shape != tensor.shape]
