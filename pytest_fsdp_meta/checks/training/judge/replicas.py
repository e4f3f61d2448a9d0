"""Check that replicas are still equal after training steps."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from pytest_fsdp_meta.checks.training.facts import LAST_BUFFERS
from pytest_fsdp_meta.checks.training.judge.buffers import (
    changed_buffers,
    comparable_buffers,
    moved_otherwise,
)
from pytest_fsdp_meta.checks.training.judge.optimization import count_steps, inventories_after_steps
from pytest_fsdp_meta.checks.values.judge import model_coordinates, replica_sets
from pytest_fsdp_meta.judging.families import training_check
from pytest_fsdp_meta.judging.findings import Explanation, Finding
from pytest_fsdp_meta.judging.gates import EXPLAINING_CHECKS
from pytest_fsdp_meta.judging.view import NotJudged, View, majority, ranks_by

WRONG_STEPS = ("grad_parity", "optimizer_owns_parameters", "every_trainable_moves")
"""Checks whose failure may make the ranks step differently."""


@training_check(
    promise="replicated parameters and persistent buffers are bit-identical on all their ranks after training steps",
    needs=["inventory", "training"],
    uses=["reference", "values", "verifier"],
    after=[*EXPLAINING_CHECKS, *WRONG_STEPS],
    why="Replicas that drift apart compute different outputs for the same rows, and full_tensor() shows only one of "
    "them.",
    cause="the replicas are stepped with different gradients, or by code that depends on the rank",
    remedy="reduce gradients over every mesh dimension that replicates, and keep optimizer settings and hooks "
    "independent of the rank",
    references=["NVIDIA-NeMo/RL#3716", "NVIDIA/Megatron-LM#1446"],
)
def replicas_stay_equal(view: View) -> Iterable[Finding]:
    after, judged = inventories_after_steps(view), False
    changed = _changed_buffers(view)
    for name, kind, held in _replicated(view, changed):
        odd: dict[int, int] = {}
        for ranks in held:
            before = {view.evidence.inventory[rank].by_name[name].digest for rank in ranks}
            # Ranks that differ before the steps hold no replica, or replicas_equal reports them.
            if len(ranks) > 1 and len(before) == 1:
                judged = True
                odd |= _odd([(rank, after[rank].by_name[name].digest) for rank in ranks if name in after[rank].by_name])
        if odd and (kind == "parameter" or changed[name]):
            rank, usual = min(odd.items())
            actual = f"differs from its replicas after {count_steps(view)}"
            detail = f"rank {rank} differs from rank {usual}"
            explanation = _OWN_ROWS if kind == "buffer" else {}
            yield Finding(name, tuple(sorted(odd)), actual, "bit-identical", detail, **explanation)
    if not judged:
        raise NotJudged("nothing is replicated: no two ranks hold the same part of a tensor")


def _changed_buffers(view: View) -> dict[str, bool]:
    """Map the persistent buffers that training changes to whether any rank's differs from the reference's.

    Within the noise of the reference's, each rank may round them otherwise. Where gradients differ, so may statistics.
    """
    if set(WRONG_STEPS).intersection(view.failed):
        return {}
    changed = changed_buffers(view)
    apart = moved_otherwise(view, changed, LAST_BUFFERS) if comparable_buffers(view) else changed
    return {name: name in apart for name in changed}


def _replicated(view: View, changed: Collection[str]) -> Iterator[tuple[str, str, list[tuple[int, ...]]]]:
    """Yield each parameter and each of these buffers with its kind and the ranks that hold the same part of it."""
    for name, tensors in view.tensors("parameter"):
        held = ranks_by(
            (rank, tensor.regions) for rank, tensor in tensors if tensor.digest is not None and tensor.numel
        )
        yield name, "parameter", list(held.values())
    places = model_coordinates(view)
    for name, tensors in view.tensors("buffer", only=changed):
        sets = replica_sets(view, tensors, places)
        yield name, "buffer", [tuple(rank for rank, _ in ranks) for ranks in sets]


_OWN_ROWS: Explanation = {
    "cause": "each rank updates it from its own rows, and a checkpoint keeps the values of one rank",
    "remedy": "reduce it over the data-parallel ranks (SyncBatchNorm for running statistics); or register it with "
    "persistent=False if it is each rank's own",
}


def _odd(digests: list[tuple[int, str | None]]) -> dict[int, int]:
    """Map each rank outside the majority to the first rank of the majority."""
    usual = majority(digests)
    first = next(rank for rank, digest in digests if digest == usual)
    return {rank: first for rank, digest in digests if digest != usual}
