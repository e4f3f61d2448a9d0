"""Training: N ranks learn what one device learns."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from pytest_fsdp_meta.catalogue.judging import NotJudged, Unjudgeable, View, ranks_by
from pytest_fsdp_meta.catalogue.registry import Finding, Words, check
from pytest_fsdp_meta.evidence import Comparison, RankTraining, splits_sequence

TOLERANCE = {"float64": 1e-9, "float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2}
"""Relative, by the coarsest dtype among the parameters."""
EXPLAINING = (
    "same_manifest_on_every_rank",
    "names_match_reference",
    "shapes_match_reference",
    "collectives_match_on_every_rank",
    "dtypes_match_reference",
    "requires_grad_matches_reference",
    "no_meta_params",
    "no_meta_buffers",
    "no_uninitialized_memory",
    "managed_params_are_registered",
    "shards_tile_the_tensor",
    "replicas_equal",
    "params_equal_reference",
    "buffers_equal_reference",
    "frozen_weights_equal_verifier",
    "tied_weights_share_storage",
)
"""What makes losses differ by itself: one cause, one finding."""
ROUNDING = 1e-2
"""Relative: reduced gradients are the same bits on every rank, or nearly; those of other rows differ by far more."""
NOISE = 1e-7
"""Gradients this small are what rounding leaves of a zero, as of the bias of attention keys."""


@check(
    promise="the losses of N ranks follow the single device's, step by step",
    family="training",
    needs=["inventory", "reference", "training"],
    uses=["values", "verifier"],
    after=EXPLAINING,
    why="A gradient that is not reduced, or scaled by the world size, shows in nothing but the curve.",
    cause="the forward of the sharded model is not that of the reference",
    remedy="compare gradients and attention settings; make the loss a mean that all ranks weigh alike",
    references=["NVIDIA-NeMo/Automodel#2146", "pytorch/torchtune#2172"],
)
def loss_parity(view: View) -> Iterable[Finding]:
    runs, expected = view.evidence.training or (), view.reference.losses or ()
    _require_truth(view, runs)
    actual = mean_losses(runs)
    tolerance = _tolerance(view)
    apart = [step for step in range(len(expected)) if _distance(actual, expected, step) > tolerance]
    diverged = _diverged(view, runs, tolerance)
    unreduced = list(_unreduced(view, runs))
    yield from unreduced
    if unreduced and apart and apart[0] > 0:
        apart = []  # what nobody reduces shows in the losses of later steps by itself
    if not apart and not diverged:
        return
    rank, other, step = diverged[0] if diverged else (0, 0, 0)
    told = _step(apart[0], actual, expected) if apart else _step(step, runs[rank].losses, runs[other].losses)
    _require_no_other_cause(view, told)
    yield from (_disagreement(runs, *case) for case in diverged)
    if apart:
        ours, theirs = _told_apart(actual[apart[0]], expected[apart[0]])
        yield Finding(
            None,
            tuple(range(len(runs))),
            f"loss {ours} at step {apart[0]}",
            f"{theirs} within {tolerance:g}",
            f"losses {_curve(actual)}; the reference's {_curve(expected)}",
            **_likely(view, apart[0], runs),
        )


def _require_no_other_cause(view: View, told: str) -> None:
    """Raises when the reference, or what more basic checks found, explains losses that differ as ``told``."""
    if view.reference.unstable:
        raise Unjudgeable(
            f"the losses differ ({told}), and the reference does not reproduce itself: it gives other bits when it is "
            f"built again ({view.reference.unstable[0]}); make it build the same model every time"
        )
    if [name for name in _known_names(view) if not view.judgeable(name)]:
        explaining = ", ".join(view.left_out)
        raise NotJudged(f"the losses differ ({told}), which the findings of {explaining} explain; mend those first")


def _unreduced(view: View, runs: Sequence[RankTraining]) -> Iterator[Finding]:
    """Parameters that ranks hold alike and that each slice of the batch pulls its own way.

    Their effect on the loss may be too small to see in a few steps.
    """
    gradients = [{comparison.name: comparison for comparison in run.gradients} for run in runs]
    updated = [{comparison.name: comparison for comparison in run.parameters} for run in runs]
    words = _PLAIN if any(run.unreduced for run in runs) else _IGNORED
    for name in dict.fromkeys(name for by_name in gradients for name in by_name):
        for ranks in _replicas(view, runs, name):
            # One rank of each slice; the others of a slice, tensor-parallel ones, may hold parts of a sum.
            apart = {runs[rank].data_parallel[0]: rank for rank in reversed(ranks)}
            seen = {rank: gradients[rank][name] for rank in sorted(apart.values()) if name in gradients[rank]}
            # An optimizer may reduce what backward left apart; its parameters are then equal.
            together = len({updated[rank].get(name) for rank in seen}) < 2
            detail = "" if together else _scattered(seen)
            if detail and view.judgeable(name):
                yield Finding(name, ranks, *_SCATTERED, detail, **words)


def _replicas(view: View, runs: Sequence[RankTraining], name: str) -> Iterator[tuple[int, ...]]:
    """Ranks that hold the same part of a parameter and do not all see the same rows."""
    inventory = view.evidence.inventory
    held = [(rank.rank, rank.by_name[name].regions) for rank in inventory if name in rank.by_name]
    for ranks in ranks_by(held).values():
        if len({runs[rank].data_parallel for rank in ranks}) > 1:
            yield ranks


def _scattered(seen: Mapping[int, Comparison]) -> str:
    """Where tensors differ from one another by more than rounding; empty where they do not.

    All are compared with one truth, so a rank that does not differ from it at an index has the truth's value there.
    """
    indices = [c.index for c in seen.values() if c.index is not None]
    if not indices or max(c.max_abs for c in seen.values()) < NOISE:
        return ""
    index = min(indices)
    truth = next(c.expected for c in seen.values() if c.index == index)
    values = {rank: c.actual if c.index == index else truth for rank, c in seen.items()}
    ordered = sorted((value, rank) for rank, value in values.items() if value is not None)
    (low, least), (high, most) = ordered[0], ordered[-1]
    if not high - low > ROUNDING * max(abs(low), abs(high)):  # nor where one is NaN, which the losses tell
        return ""
    place = f"at [{', '.join(map(str, index))}]: " if index else ""
    return f"of the first step, {place}{low:.6g} on rank {least}, {high:.6g} on rank {most}"


_SCATTERED = ("gradients that differ from rank to rank", "reduced over the data-parallel ranks")
_IGNORED: Words = {
    "cause": "it is left out of FSDP and DDP (ignored_params), and nothing else reduces its gradients",
    "remedy": "shard it, or reduce its gradients after backward (mean over the data-parallel ranks)",
}
_PLAIN: Words = {
    "cause": "all parameters are plain tensors and no DDP wraps the model, so nobody reduces their gradients",
    "remedy": "shard or wrap the model; or declare Subject(data_parallel=(0, 1)) if every rank sees the whole batch",
}


def _diverged(view: View, runs: Sequence[RankTraining], tolerance: float) -> list[tuple[int, int, int]]:
    """(rank, another of its slice, first step at which they differ): in the mean their deviations could cancel."""
    if any(size > 1 and splits_sequence(dim) for dim, size in view.evidence.world.mesh):
        return []  # of the same rows, each rank has another part of the sequence
    first: dict[int, tuple[int, RankTraining]] = {}
    found = []
    for rank, run in enumerate(runs):
        other, same = first.setdefault(run.data_parallel[0], (rank, run))
        finite = [step for step in range(len(run.losses)) if math.isfinite(run.losses[step] + same.losses[step])]
        apart = [step for step in finite if _distance(run.losses, same.losses, step) > tolerance]
        found += [(rank, other, step) for step in apart[:1]]
    return found


def _disagreement(runs: Sequence[RankTraining], rank: int, other: int, step: int) -> Finding:
    ours, theirs = _told_apart(runs[rank].losses[step], runs[other].losses[step])
    return Finding(
        None,
        (rank,),
        f"loss {ours} at step {step}",
        f"{theirs}, as on rank {other}, which sees the same rows",
        f"losses {_curve(runs[rank].losses)}; rank {other}'s {_curve(runs[other].losses)}",
        cause="ranks of one data-parallel slice compute different things: replicas that diverged, or a tensor-parallel "
        "layer that does not reduce its output",
        remedy="compare the parameters of these ranks, and the output layouts of the tensor-parallel plan",
    )


def mean_losses(runs: Sequence[RankTraining]) -> tuple[float, ...]:
    """The loss over the global batch: the mean over data-parallel slices; ranks of one slice count once."""
    slices: dict[int, list[tuple[float, ...]]] = {}
    for run in runs:
        slices.setdefault(run.data_parallel[0], []).append(run.losses)
    per_slice = [[math.fsum(step) / len(step) for step in zip(*losses, strict=True)] for losses in slices.values()]
    return tuple(math.fsum(step) / len(step) for step in zip(*per_slice, strict=True))


def _require_truth(view: View, runs: Sequence[RankTraining]) -> None:
    """Raises Unjudgeable when the reference's losses tell nothing of the subject's."""
    reference = view.reference
    first, again = reference.losses or (), reference.losses_again or ()
    for step, loss in enumerate(first):
        if not math.isfinite(loss):
            raise Unjudgeable(
                f"the reference's own loss is {loss:g} at step {step}; give it a batch, a loss and an optimizer that "
                "keep it finite"
            )
    for step, (one, other) in enumerate(zip(first, again, strict=True)):
        if one != other:
            raise Unjudgeable(
                f"the reference does not reproduce itself: step {step} gives {one:.9g}, then {other:.9g} from the same "
                "weights; make its forward deterministic"
            )
    for rank, run in enumerate(runs):
        for step, (ours, theirs) in enumerate(zip(run.batches, reference.batches, strict=True)):
            if ours != theirs:
                raise Unjudgeable(
                    f"batch({step}) on rank {rank} is not the reference's; make batch(step) a function of the step "
                    "alone"
                )


def _tolerance(view: View) -> float:
    declared = view.evidence.tolerance
    if view.check.id in declared or "*" in declared:
        return declared.get(view.check.id, declared.get("*", 0.0))
    dtypes = {t.dtype for t in view.evidence.inventory[0].tensors if t.kind == "parameter"}
    return max((TOLERANCE[dtype] for dtype in dtypes if dtype in TOLERANCE), default=TOLERANCE["float32"])


def _known_names(view: View) -> dict[str, None]:
    names = {t.name: None for rank in view.evidence.inventory for t in rank.tensors}
    return names | dict.fromkeys(view.truth.by_name)


def _distance(actual: Sequence[float], expected: Sequence[float], step: int) -> float:
    """Relative to the largest loss of the curve: a loss that falls to zero, or through it, keeps a measure."""
    if not math.isfinite(actual[step]):
        return math.inf
    return abs(actual[step] - expected[step]) / max(1e-12, *(abs(loss) for loss in expected))


def _likely(view: View, first: int, runs: Sequence[RankTraining]) -> Words:
    if first == 0:
        return {
            "cause": "the first forward differs already though the weights are equal: the ranks' losses are not "
            "weighed alike, a module was left out or replaced, or an attention or precision setting differs",
            "remedy": "compare attention settings and make the loss a mean that all ranks weigh alike; where the "
            "loader computes in another precision on purpose, set tolerance=...",
        }
    if any(run.unreduced for run in runs) and len(runs) > 1:
        return _PLAIN
    wrong = [c for run in runs for c in run.gradients if not c.equal and c.max_rel > ROUNDING]
    shown = f" (of the first step, {wrong[0].name} for one)" if wrong else ""
    return {
        "cause": f"the first forward agrees, later ones do not: gradients are not reduced, or scaled{shown}, or the "
        "optimizer does not hold the live parameters",
        "remedy": "look at the gradient reduction (mean over data-parallel ranks) and make the optimizer after "
        "sharding",
    }


def _curve(losses: Sequence[float]) -> str:
    return ", ".join(f"{loss:.6f}" for loss in losses)


def _told_apart(actual: float, expected: float) -> tuple[str, str]:
    """Both in as many digits, at least four, as show that they differ."""
    for digits in range(4, 17):
        told = f"{actual:.{digits}g}", f"{expected:.{digits}g}"
        if told[0] != told[1]:
            break
    return told


def _step(step: int, actual: Sequence[float], expected: Sequence[float]) -> str:
    off = _distance(actual, expected, step)
    return f"step {step}: {actual[step]:.6f}, but should be {expected[step]:.6f}, off by {off:.2g} relative"
