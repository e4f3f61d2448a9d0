"""Trace the first step module by module, where a parity check finds that it departs from the reference's."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from pathlib import Path

from pytest_fsdp_meta.catalogue import Selection, built_in, judge
from pytest_fsdp_meta.evidence import Evidence, RankInventory, RankTraining
from pytest_fsdp_meta.evidence.traces import RankTrace
from pytest_fsdp_meta.trial import on_ranks
from pytest_fsdp_meta.trial.on_ranks import run_on
from pytest_fsdp_meta.worlds import World, WorldError

PARITY = ("loss_parity", "grad_parity")
"""The checks whose findings are about the first step, which is the one that is traced."""


def may_be_traced(evidence: Evidence) -> bool:
    """Return whether a plain first step is what the ranks have trained; the author's own has forwards of its own."""
    return "train_step" not in evidence.subject.declared


def first_step_departs(evidence: Evidence, selection: Container[str] | None) -> bool:
    """Return whether a selected check finds that the loss or a gradient of the first step departs.

    Nothing is judged where no difference is so large that its noise was measured. A check that leaves the difference to
    a more basic one has found nothing, and its step is not traced.
    """
    if all(run.noise is None for run in evidence.training or ()):
        return False
    selected = frozenset(check.id for check in built_in() if selection is None or check.id in selection)
    catalogue, found = built_in(), Selection(selected)
    return any(id in selected and judge(catalogue[id], evidence, catalogue, found).status == "failed" for id in PARITY)


def trace_first_step(
    evidence: Evidence, recipe: Mapping[str, bytes], world: World, reference_world: World, folder: Path
) -> tuple[RankTrace, ...]:
    """Run the first step once more with hooks on all modules, in the reference's world and then on the ranks.

    The step is left out, with the reason in every trace, if the reference refuses the hooks or lacks loaded values.
    """
    runs, inventory = evidence.training or (), evidence.inventory
    trained = sorted({name for pair in zip(inventory, runs, strict=True) for name in _changed(*pair)})
    if unknown := _unknown(evidence, trained):
        return _left_out(runs, f"the reference lacks the loaded values of {unknown[0]}")
    computing = sorted({*_parameter_dtypes(inventory[0]), *inventory[0].computes_in})
    size = runs[0].data_parallel[1]
    try:
        trace_reference = on_ranks.traces.trace_reference
        traced = run_on(reference_world, trace_reference, recipe, str(folder), size, computing)[0]
        if traced.problem:
            return _left_out(runs, traced.problem)
        return tuple(run_on(world, on_ranks.traces.trace_rank, traced, trained, str(folder)))
    except WorldError as error:
        return _left_out(runs, error.summary)


def _left_out(runs: Sequence[RankTraining], problem: str) -> tuple[RankTrace, ...]:
    return tuple(RankTrace(run.data_parallel, problem=problem) for run in runs)


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
