"""Training: the updates and losses of N ranks equal those of one device."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from pytest_fsdp_meta.catalogue.diagnosis.multiples import alike, number_of, whole
from pytest_fsdp_meta.catalogue.diagnosis.parity import (
    EXPLAINING_CHECKS,
    LOSS_TOLERANCE,
    UPDATE_TOLERANCE,
    comparable_training,
    describe_other_precision,
    format_losses,
    gradients_beyond_rounding,
    mean_losses,
    relative_distance,
    require_gradients,
    require_no_other_cause,
    require_same_forward,
    slice_losses,
    tolerance,
)
from pytest_fsdp_meta.catalogue.findings import Explanation, Finding
from pytest_fsdp_meta.catalogue.registry import check
from pytest_fsdp_meta.catalogue.view import View
from pytest_fsdp_meta.evidence import Measure, RankTraining, splits_model, splits_sequence

SAME_FACTOR = 0.1
"""Relative: how much the factors of later losses may differ from that of the first loss. A scaled loss has scaled
gradients, so every later step starts from other weights than the reference's."""
MOST_PERPENDICULAR = 0.35
"""Fraction: an update is a multiple of the reference's if at most this part of it is perpendicular to the reference's.
If only the signs agree, the part is about 0.6."""
SAME_UPDATE = 0.02
"""Relative: update factors that differ by less count as the same factor, with the same cause."""
CHANCE = 0.1
"""Fraction: if the tolerance covers more of the interval between whole numbers, a whole factor may be a coincidence."""
BEFORE_UPDATES = (
    *EXPLAINING_CHECKS,
    "forward_sees_current_weights",
    "grad_parity",
    "optimizer_owns_parameters",
    "frozen_weights_stay_frozen",
    "tied_weights_stay_tied",
    "every_trainable_moves",
    "replicas_stay_equal",
)


@check(
    promise="each parameter's update over the training steps equals the reference's",
    family="training",
    needs=["inventory", "reference", "training"],
    uses=["values", "verifier"],
    after=BEFORE_UPDATES,
    why="A parameter group without its learning rate or weight decay still has correct gradients and is noticed late.",
    cause="the optimizer is configured differently on the ranks: learning rate, weight decay or parameter groups",
    remedy="compare the optimizer's groups and their settings with the reference's, by parameter name",
    references=["pytorch/pytorch#149205"],
    since="0.2",
    tolerance=UPDATE_TOLERANCE,
)
def update_parity(view: View) -> Iterable[Finding]:
    runs = comparable_training(view)
    found = list(_wrong_updates(view, runs))
    if found:
        require_same_forward(view, runs)
        require_no_other_cause(view, f"the updates differ ({found[0].tensor}: {found[0].actual})")
        yield from found
    else:
        require_gradients(view)


def _wrong_updates(view: View, runs: Sequence[RankTraining]) -> Iterator[Finding]:
    """Report the parameters with the largest errors; smaller errors elsewhere may follow from these."""
    allowed = tolerance(view, view.tolerance)
    off = {name: pairs for name, pairs in _updates_beyond_tolerance(view, runs, allowed).items() if pairs}
    worst = max((_relative_error(m) for pairs in off.values() for _, m in pairs), default=0.0)
    least = min(worst, 1.0) / 2
    farthest = {name: [(rank, m) for rank, m in pairs if _relative_error(m) >= least] for name, pairs in off.items()}
    measured = [m for pairs in farthest.values() for _, m in pairs]
    labels = alike({_update_factor(m): m.residual for m in measured if _update_factor(m)}, max(allowed, SAME_UPDATE))
    for name, pairs in farthest.items():
        by_factor: dict[str, list[tuple[int, Measure]]] = {}
        for rank, m in pairs:
            by_factor.setdefault(labels.get(_update_factor(m), ""), []).append((rank, m))
        for factor, cases in by_factor.items():
            actual = f"update is {factor} times the reference's" if factor else "update differs from the reference's"
            detail = "" if factor else f"relative error {max(_relative_error(m) for _, m in cases):.2g}"
            explanation = _explain_factor(view, runs, name, factor) if factor else Explanation()
            ranks = tuple(rank for rank, _ in cases)
            yield Finding(name, ranks, actual, f"equal within {allowed:g}", detail, **explanation)


def _explain_factor(view: View, runs: Sequence[RankTraining], name: str, factor: str) -> Explanation:
    """Explain an update factor that equals a number of ranks; return {} if it equals none."""
    whole_factor = whole(float(factor), SAME_UPDATE)
    number, meaning = number_of(view, runs, whole_factor, name)
    if not meaning:
        return {}
    done = "divided" if whole_factor.startswith("1/") else "multiplied"
    return {
        "cause": f"the learning rate, or the optimizer's step, is {done} by {meaning} ({number}), and the reference's "
        "is not",
        "remedy": "use the reference's learning rate on the ranks: gradients are already averaged over the "
        "data-parallel ranks; and look for code that scales gradients between backward and the step",
    }


def _updates_beyond_tolerance(
    view: View, runs: Sequence[RankTraining], allowed: float
) -> dict[str, list[tuple[int, Measure]]]:
    """Return, by parameter, the ranks whose update differs from the reference's by more than rounding explains."""
    steps = len(view.reference.losses or ())
    due = gradients_beyond_rounding(view)
    names = [name for name in view.names("parameter", only=view.reference.gradients) if name in due]
    found = {}
    for name, pairs in view.comparisons(tuple(run.parameters for run in runs), names).items():
        measured = [(rank, c.measure) for rank, c in pairs if c.measure is not None]
        farthest = max((m.truth for _, m in measured), default=0.0)
        # Each step rounds each element once, on the ranks and in the reference.
        found[name] = [(rank, m) for rank, m in measured if not m.apart <= allowed * farthest + 2 * steps * m.grain]
    return found


def _update_factor(measure: Measure) -> float:
    """Return the factor of an update that is a multiple of the reference's; 0 if it is not a multiple.

    It does not count as a multiple if its different direction explains more of the error than the factor does.
    """
    if not math.isfinite(measure.apart) or measure.residual > MOST_PERPENDICULAR:
        return 0.0
    return measure.factor if measure.factor > 0 and abs(measure.factor - 1) >= measure.residual else 0.0


def _relative_error(measure: Measure) -> float:
    """Return the error of an update, relative to the length of the reference's update."""
    return measure.apart / measure.truth if measure.truth and math.isfinite(measure.apart) else math.inf


@check(
    promise="the losses of N ranks equal the reference's at every step",
    family="training",
    needs=["inventory", "reference", "training"],
    uses=["values", "verifier"],
    after=[*BEFORE_UPDATES, "update_parity"],
    why="A forward that differs, or a wrong average over the ranks' losses, shows nowhere but in the loss curve.",
    cause="the forward of the sharded model differs from the reference's",
    remedy="compare gradients and attention settings, and make the global loss a mean that weights all ranks correctly",
    references=["NVIDIA-NeMo/Automodel#2146", "pytorch/torchtune#2172"],
    tolerance=LOSS_TOLERANCE,
)
def loss_parity(view: View) -> Iterable[Finding]:
    runs = comparable_training(view)
    expected, actual = view.reference.losses or (), mean_losses(runs)
    allowed = tolerance(view, view.tolerance)
    wrong_steps = [step for step in range(len(expected)) if relative_distance(actual, expected, step) > allowed]
    # If all ranks have the same wrong loss at one step, a disagreement at a later step follows from that error.
    disagreements = [
        disagreement
        for disagreement in _disagreements(view, runs, allowed)
        if not wrong_steps or disagreement[2] <= wrong_steps[0]
    ]
    if not wrong_steps and not disagreements:
        require_gradients(view)
        return
    rank, other, step = disagreements[0] if disagreements else (0, 0, 0)
    message = (
        _describe_step(wrong_steps[0], actual, expected)
        if wrong_steps
        else _describe_step(step, runs[rank].losses, runs[other].losses)
    )
    first_forward = wrong_steps[:1] == [0] or any(disagreement[2] == 0 for disagreement in disagreements)
    require_no_other_cause(view, f"the losses differ ({message})", first_forward)
    yield from (_report_disagreement(runs, *disagreement) for disagreement in disagreements)
    if wrong_steps:
        ours, theirs = _distinct_digits(actual[wrong_steps[0]], expected[wrong_steps[0]])
        yield Finding(
            None,
            tuple(range(len(runs))),
            f"loss {ours} at step {wrong_steps[0]}",
            f"{theirs} within {allowed:g}",
            f"losses {format_losses(actual)}; reference {format_losses(expected)}",
            **_explain_losses(view, wrong_steps[0], runs, allowed),
        )


def _disagreements(view: View, runs: Sequence[RankTraining], allowed: float) -> list[tuple[int, int, int]]:
    """Return (rank, first rank that sees the same rows, first step at which their losses differ).

    The mean over ranks can hide such differences, since they may cancel.
    """
    if any(size > 1 and splits_sequence(dim) for dim, size in view.evidence.world.mesh):
        return []  # each rank sees another part of the sequence, so the losses of the same rows differ
    first: dict[int, tuple[int, RankTraining]] = {}
    found = []
    for rank, run in enumerate(runs):
        other, same = first.setdefault(run.data_parallel[0], (rank, run))
        finite = [step for step in range(len(run.losses)) if math.isfinite(run.losses[step] + same.losses[step])]
        different = [step for step in finite if relative_distance(run.losses, same.losses, step) > allowed]
        found += [(rank, other, step) for step in different[:1]]
    return found


def _report_disagreement(runs: Sequence[RankTraining], rank: int, other: int, step: int) -> Finding:
    ours, theirs = _distinct_digits(runs[rank].losses[step], runs[other].losses[step])
    return Finding(
        None,
        (rank,),
        f"loss {ours} at step {step}",
        f"{theirs}, as on rank {other}, which sees the same rows",
        f"losses {format_losses(runs[rank].losses)}; rank {other} {format_losses(runs[other].losses)}",
        cause="ranks of one data-parallel slice compute different outputs: their replicas diverged, or a "
        "tensor-parallel layer does not reduce its output",
        remedy="compare the parameters of these ranks, and the output layouts of the tensor-parallel plan",
    )


def _explain_losses(view: View, first: int, runs: Sequence[RankTraining], allowed: float) -> Explanation:
    if first == 0 and _weighting_by_labels_explains(view, runs, allowed):
        return {
            "cause": "each rank averages over its own labels, and the ranks have different numbers of labels (-100 "
            "does not count): weighted by these numbers, the ranks' losses give the reference's loss",
            "remedy": "divide each rank's summed loss by the number of labels in the global batch, and multiply it by "
            "the number of data-parallel ranks, because gradients are averaged over them",
        }
    if first == 0 and (explanation := _explain_multiple(view, runs, allowed)):
        return explanation
    if first == 0:
        return {
            "cause": "the first forward already differs although the weights are equal: the ranks' losses are not "
            "averaged correctly, or a module is missing, replaced, random or configured differently (attention, "
            "scale, activation, precision)" + _tensor_parallel_causes(view) + describe_other_precision(view),
            "remedy": "compare attention settings, and make the global loss a mean that weights all ranks correctly; "
            "if the loader uses another precision on purpose, set tolerance=...",
        }
    return {
        "cause": "the first forward and its gradients are correct, later losses are not: something changes between the "
        "steps, such as a buffer or a cache that the forward updates on each rank separately"
        + describe_other_precision(view),
        "remedy": "compare the state that the forward keeps between steps with the reference's",
    }


def _explain_multiple(view: View, runs: Sequence[RankTraining], allowed: float) -> Explanation:
    """Explain a first loss that is a whole multiple of the reference's, with later losses close to that multiple."""
    pairs = list(zip(mean_losses(runs), view.reference.losses or (), strict=True))
    factors = [ours / theirs if theirs and math.isfinite(ours) else math.nan for ours, theirs in pairs]
    factor = whole(factors[0], max(allowed, LOSS_TOLERANCE["float64"]))
    if not factor or not all(abs(later / factors[0] - 1) <= SAME_FACTOR for later in factors):
        return {}
    number, meaning = number_of(view, runs, factor)
    if not meaning and int(number) * allowed > CHANCE:
        return {}
    multiple_of = f"{factor} of" if factor.startswith("1/") else f"{factor} times"
    in_ranks = f" ({number} is {meaning})" if meaning else ""
    return {
        "cause": f"the loss is {multiple_of} the reference's in every step{in_ranks}: "
        + _explain_scaled_loss(factor, bool(meaning)),
        "remedy": "make each rank's loss the mean over its own rows, without a factor for the number of ranks, rows or "
        "micro-batches",
    }


def _explain_scaled_loss(factor: str, counts_ranks: bool) -> str:
    if factor.startswith("1/"):
        divided = "each rank divides its sum by the count of the global batch instead of its own, or "
        return (divided if counts_ranks else "") + (
            "the loss is divided once too often (gradient accumulation, number of ranks or rows)"
        )
    summed = "the ranks' losses are summed or multiplied by the number of ranks, or "
    return (summed if counts_ranks else "") + "each rank sums over its rows while the reference takes the mean"


def _tensor_parallel_causes(view: View) -> str:
    """Return more possible causes if a mesh dimension splits the model, else ""."""
    meshes = {tensor.mesh for rank in view.evidence.inventory for tensor in rank.tensors if tensor.mesh is not None}
    sizes = [*view.evidence.world.mesh, *(pair for mesh in meshes for pair in zip(mesh.dims, mesh.shape, strict=True))]
    if not any(size > 1 and splits_model(dim) for dim, size in sizes):
        return ""
    return (
        "; or a tensor-parallel plan shards a fused weight (qkv) without regard to its parts, or adds a bias once per "
        "rank"
    )


def _weighting_by_labels_explains(view: View, runs: Sequence[RankTraining], allowed: float) -> bool:
    """Return whether the first losses, weighted by each slice's number of labels, average to the reference's."""
    labels_of = {run.data_parallel[0]: run.labels[0] for run in reversed(runs) if run.labels}
    losses = {index: curve[0] for index, curve in slice_losses(runs).items()}
    expected = view.reference.losses or ()
    for kind in (0, 1):
        weights = {index: labels[kind] for index, labels in labels_of.items()}
        if len(set(weights.values())) > 1 and weights.keys() == losses.keys():
            weighted = math.fsum(weights[i] * losses[i] for i in weights if weights[i]) / sum(weights.values())
            if relative_distance([weighted], expected, 0) <= allowed:
                return True
    return False


def _distinct_digits(actual: float, expected: float) -> tuple[str, str]:
    """Format both numbers with as many digits as distinguish them, but at least four."""
    for digits in range(4, 17):
        formatted = f"{actual:.{digits}g}", f"{expected:.{digits}g}"
        if formatted[0] != formatted[1]:
            break
    return formatted


def _describe_step(step: int, actual: Sequence[float], expected: Sequence[float]) -> str:
    error = relative_distance(actual, expected, step)
    return f"step {step}: {actual[step]:.6f}, but should be {expected[step]:.6f}, relative error {error:.2g}"
