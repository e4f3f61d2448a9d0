"""Trace a step module by module, where a parity check finds that it departs from the reference's."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from pathlib import Path

from pytest_fsdp_meta.catalogue import Selection, built_in, judge
from pytest_fsdp_meta.checks.tracing.facts import RankTrace
from pytest_fsdp_meta.evidence import Evidence, RankInventory, RankTraining
from pytest_fsdp_meta.text import name_ranks
from pytest_fsdp_meta.trial import on_ranks
from pytest_fsdp_meta.trial.on_ranks import run_on
from pytest_fsdp_meta.worlds import World, WorldError

PARITY = ("grad_parity", "second_grad_parity", "loss_parity")
"""The checks whose findings say at which step the training departs."""
STAGES = "the stages of a pipeline run by the author's schedule"
REFUSED = ("pytest_fsdp_meta.checks.tracing.observe.step.NotTraceable",)


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
    computing = sorted({*_parameter_dtypes(inventory[0]), *inventory[0].computes_in})
    backward = "train_step" not in evidence.subject.declared
    size = runs[0].data_parallel[1]
    try:
        trace_reference = on_ranks.traces.trace_reference
        traced = run_on(reference_world, trace_reference, recipe, str(folder), size, computing, step, backward)[0]
        if traced.problem:
            return _left_out(runs, step, traced.problem)
        trace_rank = on_ranks.traces.trace_rank
        return tuple(world.call(trace_rank, (traced, trained, str(folder)), unanimous_outcomes=REFUSED))
    except WorldError as error:
        first = error.failures[0]
        if first.exception not in REFUSED:
            return _left_out(runs, step, error.summary)
        alone = "" if error.unanimous else f"{name_ranks([first.rank])}: "
        return _left_out(runs, step, f"{alone}{first.message}")


def _left_out(runs: Sequence[RankTraining], step: int, problem: str) -> tuple[RankTrace, ...]:
    return tuple(RankTrace(run.data_parallel, step=step, problem=problem) for run in runs)


def _parameter_dtypes(inventory: RankInventory) -> set[str]:
    return {t.dtype for t in inventory.tensors if t.kind == "parameter"}


def _changed(loaded: RankInventory, run: RankTraining) -> set[str]:
    """Return the tensors that have other values after the training than when they were loaded."""
    after = run.after.by_name if run.after is not None else {}
    return {t.name for t in loaded.tensors if t.name not in after or after[t.name].digest != t.digest}


def _unknown(evidence: Evidence, trained: Sequence[str]) -> list[str]:
    """Return the tensors that the ranks cannot read from the reference's values before the step."""
    assert evidence.reference is not None
    known = evidence.reference.inventory.by_name
    held = [rank.by_name[name] for rank in evidence.inventory for name in trained if name in rank.by_name]
    return [tensor.name for tensor in held if tensor.name not in known or known[tensor.name].shape != tensor.shape]
