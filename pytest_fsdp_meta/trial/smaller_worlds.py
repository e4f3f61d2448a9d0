"""Judge a loader that failed once more in smaller worlds, to tell the faults of its sharding from all others."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from pytest_fsdp_meta.catalogue import Catalogue, Selection, judge
from pytest_fsdp_meta.evidence import Evidence, SmallerWorld
from pytest_fsdp_meta.judging.smaller_worlds import may_be_due_to_ranks
from pytest_fsdp_meta.loader.call import Call
from pytest_fsdp_meta.trial.loads import describe_size
from pytest_fsdp_meta.trial.trial import LoaderFailed, Trial

PATIENCE, LEAST = 3, 20.0
"""A smaller world gets ``PATIENCE`` times the seconds that the loader's own world took, and ``LEAST`` seconds more."""


def judge_smaller_worlds(
    trial: Trial, loader: Call, evidence: Evidence, catalogue: Catalogue, checks: Sequence[str], selection: Selection
) -> Evidence:
    """Return the evidence with what the failed checks find in smaller worlds.

    The first has one rank. If some failed check passes there, each dimension of a mesh of several is tried alone.
    Failures that are expected start nothing.
    """
    spec, wide = trial.spec, [name for name, size in trial.spec.mesh.items() if size > 1]
    failed = [
        id
        for id in checks
        if id not in selection.xfailing
        and may_be_due_to_ranks(catalogue[id])
        and judge(catalogue[id], evidence, catalogue, selection).status == "failed"
    ]
    if not failed or not wide or spec.simulated:
        return evidence
    # What is saved depends on what else is observed: a model that has not trained, or without an optimizer.
    saving = any(catalogue[id].family == "checkpoint" for id in failed)
    wanted = catalogue.observations(checks if saving else failed)
    with trial.timing("smaller worlds"):
        worlds = [_judge_along((), trial, loader, catalogue, failed, wanted)]
        if len(wide) > 1 and worlds[0].passed:
            worlds += [_judge_along((name,), trial, loader, catalogue, worlds[0].passed, wanted) for name in wide]
    return replace(evidence, smaller=tuple(worlds))


def _judge_along(
    dims: Sequence[str],
    trial: Trial,
    loader: Call,
    catalogue: Catalogue,
    checks: Sequence[str],
    wanted: Collection[str],
) -> SmallerWorld:
    mesh = {name: size if name in dims else 1 for name, size in trial.spec.mesh.items()}
    seen = tuple((name, mesh[name]) for name in dims)
    timeout = min(trial.spec.timeout, PATIENCE * sum(trial.seconds.values()) + LEAST)
    spec = replace(trial.spec, mesh=mesh, timeout=timeout)
    spec = replace(spec, devices=spec.devices[: spec.size])
    selection = Selection(frozenset(checks))
    smaller = Trial(spec, trial.engine, trial.steps, trial.tolerance, trial.listener, selection)
    try:
        evidence = smaller.observe(loader, wanted)
    except LoaderFailed as failure:
        return SmallerWorld(seen, problem=f"in {describe_size(spec)}, {failure.summary}")
    verdicts = {id: judge(catalogue[id], evidence, catalogue, selection) for id in checks}
    failed: Mapping[str, tuple[str, ...]] = {
        id: tuple(dict.fromkeys(finding.tensor or "" for finding in verdict.findings))
        for id, verdict in verdicts.items()
        if verdict.status == "failed"
    }
    passed = tuple(
        id for id, verdict in verdicts.items() if verdict.status == "passed" or verdict.why == "partly checked"
    )
    return SmallerWorld(seen, failed, passed)
