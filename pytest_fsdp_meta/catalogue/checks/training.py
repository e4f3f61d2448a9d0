"""Training: N ranks learn what one device learns."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from pytest_fsdp_meta.catalogue.diagnosis.multiples import alike, multiple, number_of, whole
from pytest_fsdp_meta.catalogue.diagnosis.parity import (
    EXPLAINING,
    OF_GRADIENTS,
    OF_UPDATES,
    TOLERANCE,
    beyond_rounding,
    curve,
    distance,
    gradient_apart,
    mean_losses,
    other_precision,
    require_no_other_cause,
    require_same_forward,
    slice_losses,
    tolerance,
    trained,
    typical_gradient,
)
from pytest_fsdp_meta.catalogue.findings import Explanation, Finding
from pytest_fsdp_meta.catalogue.registry import check
from pytest_fsdp_meta.catalogue.view import NotJudged, View
from pytest_fsdp_meta.evidence import Comparison, Measure, RankTraining, splits_model, splits_sequence

LOOSE = 0.1
"""What a way of several steps may be off a multiple of the reference's: each step starts from another place."""
TURNED = 0.35
"""Relative: what a way of several steps may turn for being longer or shorter; by signs alone it turns by 0.6."""
ALIKE = 0.02
"""Relative: factors that differ by less have one cause."""
CHANCE = 0.1
"""Of a whole number: where so much of it is within the tolerance, that a factor is whole may be chance."""
BEFORE_UPDATES = (
    *EXPLAINING,
    "grad_parity",
    "optimizer_owns_parameters",
    "frozen_weights_stay_frozen",
    "tied_weights_stay_tied",
    "every_trainable_moves",
    "replicas_stay_equal",
)


@check(
    promise="after K steps, each parameter has moved as the reference's has",
    family="training",
    needs=["inventory", "reference", "training"],
    uses=["values", "verifier"],
    after=BEFORE_UPDATES,
    why="Right gradients in the wrong hands: a learning rate or a decay that a group lost shows late in the losses.",
    cause="the optimizer does something else on the ranks: another learning rate, decay or grouping of parameters",
    remedy="compare the optimizer's groups and their settings with the reference's, by parameter name",
    references=["pytorch/pytorch#149205"],
    since="0.2",
    tolerance=OF_UPDATES,
)
def update_parity(view: View) -> Iterable[Finding]:
    runs = trained(view)
    found = list(_moved_otherwise(view, runs))
    if found:
        require_same_forward(view, runs)
        require_no_other_cause(view, f"the updates differ ({found[0].tensor}: {found[0].actual})")
        yield from found


def _moved_otherwise(view: View, runs: Sequence[RankTraining]) -> Iterator[Finding]:
    """The parameters that are farthest off: those that merely follow them, through the forward, are less so."""
    allowed = tolerance(view, view.tolerance)
    off = {name: pairs for name, pairs in _off(view, runs, allowed).items() if pairs}
    worst = max((_way(m) for pairs in off.values() for _, m in pairs), default=0.0)
    least = min(worst, 1.0) / 2
    farthest = {name: [(rank, m) for rank, m in pairs if _way(m) >= least] for name, pairs in off.items()}
    measured = [m for pairs in farthest.values() for _, m in pairs]
    called = alike({_share(m): m.residual for m in measured if _share(m)}, max(allowed, ALIKE))
    for name, pairs in farthest.items():
        by_factor: dict[str, list[tuple[int, Measure]]] = {}
        for rank, m in pairs:
            by_factor.setdefault(called.get(_share(m), ""), []).append((rank, m))
        for factor, cases in by_factor.items():
            actual = f"moved {factor} times as far as the reference" if factor else "moved otherwise than the reference"
            detail = "" if factor else f"off by {max(_way(m) for _, m in cases):.2g} of the way"
            expected = f"moved as the reference within {allowed:g}"
            words = _stepped(view, runs, name, factor) if factor else Explanation()
            yield Finding(name, tuple(rank for rank, _ in cases), actual, expected, detail, **words)


def _stepped(view: View, runs: Sequence[RankTraining], name: str, factor: str) -> Explanation:
    """What explains the part of the way; nothing where there are not just as many of anything."""
    told = whole(float(factor), ALIKE)
    number, of = number_of(view, runs, told, name)
    if not of:
        return {}
    done = "divided" if told.startswith("1/") else "multiplied"
    return {
        "cause": f"the learning rate, or the step that the optimizer takes, is {done} by {of}, which is {number}, and "
        "the reference's is not",
        "remedy": "give the ranks the learning rate of the reference: gradients are a mean over the data-parallel "
        "ranks already; and look for what scales gradients between backward and the step",
    }


def _off(view: View, runs: Sequence[RankTraining], allowed: float) -> dict[str, list[tuple[int, Measure]]]:
    """The ranks on which a parameter moved otherwise than rounding explains."""
    steps = len(view.reference.losses or ())
    due = beyond_rounding(view)
    names = [name for name in view.names("parameter", only=view.reference.gradients) if name in due]
    found = {}
    for name, pairs in view.comparisons(tuple(run.parameters for run in runs), names).items():
        measured = [(rank, c.measure) for rank, c in pairs if c.measure is not None]
        far = max((m.truth for _, m in measured), default=0.0)
        # Each step rounds each element once, on either side.
        found[name] = [(rank, m) for rank, m in measured if not m.apart <= allowed * far + 2 * steps * m.grain]
    return found


def _share(measure: Measure) -> float:
    """The part of the reference's way that was gone in the same direction; zero where it was another direction.

    Of what is apart, a factor near 1 explains less than a small turn does.
    """
    if not math.isfinite(measure.apart) or measure.residual > TURNED:
        return 0.0
    return measure.factor if measure.factor > 0 and abs(measure.factor - 1) >= measure.residual else 0.0


def _way(measure: Measure) -> float:
    """How far off, relative to the way that the reference went."""
    return measure.apart / measure.truth if measure.truth and math.isfinite(measure.apart) else math.inf


@check(
    promise="the losses of N ranks follow the single device's, step by step",
    family="training",
    needs=["inventory", "reference", "training"],
    uses=["values", "verifier"],
    after=[*BEFORE_UPDATES, "update_parity"],
    why="A forward that differs, or ranks whose losses are not weighed alike, show in nothing but the curve.",
    cause="the forward of the sharded model is not that of the reference",
    remedy="compare gradients and attention settings; make the loss a mean that all ranks weigh alike",
    references=["NVIDIA-NeMo/Automodel#2146", "pytorch/torchtune#2172"],
    tolerance=TOLERANCE,
)
def loss_parity(view: View) -> Iterable[Finding]:
    runs = trained(view)
    expected, actual = view.reference.losses or (), mean_losses(runs)
    allowed = tolerance(view, view.tolerance)
    apart = [step for step in range(len(expected)) if distance(actual, expected, step) > allowed]
    # Ranks that agree, and are wrong, for a step before they disagree do so because of it.
    diverged = [case for case in _diverged(view, runs, allowed) if not apart or case[2] <= apart[0]]
    if not apart and not diverged:
        return
    rank, other, step = diverged[0] if diverged else (0, 0, 0)
    told = _step(apart[0], actual, expected) if apart else _step(step, runs[rank].losses, runs[other].losses)
    first = apart[:1] == [0] or any(case[2] == 0 for case in diverged)
    require_no_other_cause(view, f"the losses differ ({told})", first)
    yield from (_disagreement(runs, *case) for case in diverged)
    if apart:
        ours, theirs = _told_apart(actual[apart[0]], expected[apart[0]])
        yield Finding(
            None,
            tuple(range(len(runs))),
            f"loss {ours} at step {apart[0]}",
            f"{theirs} within {allowed:g}",
            f"losses {curve(actual)}; the reference's {curve(expected)}",
            **_likely(view, apart[0], runs, allowed),
        )


def _diverged(view: View, runs: Sequence[RankTraining], allowed: float) -> list[tuple[int, int, int]]:
    """(rank, another of its slice, first step at which they differ): in the mean their deviations could cancel."""
    if any(size > 1 and splits_sequence(dim) for dim, size in view.evidence.world.mesh):
        return []  # of the same rows, each rank has another part of the sequence
    first: dict[int, tuple[int, RankTraining]] = {}
    found = []
    for rank, run in enumerate(runs):
        other, same = first.setdefault(run.data_parallel[0], (rank, run))
        finite = [step for step in range(len(run.losses)) if math.isfinite(run.losses[step] + same.losses[step])]
        apart = [step for step in finite if distance(run.losses, same.losses, step) > allowed]
        found += [(rank, other, step) for step in apart[:1]]
    return found


def _disagreement(runs: Sequence[RankTraining], rank: int, other: int, step: int) -> Finding:
    ours, theirs = _told_apart(runs[rank].losses[step], runs[other].losses[step])
    return Finding(
        None,
        (rank,),
        f"loss {ours} at step {step}",
        f"{theirs}, as on rank {other}, which sees the same rows",
        f"losses {curve(runs[rank].losses)}; rank {other}'s {curve(runs[other].losses)}",
        cause="ranks of one data-parallel slice compute different things: replicas that diverged, or a tensor-parallel "
        "layer that does not reduce its output",
        remedy="compare the parameters of these ranks, and the output layouts of the tensor-parallel plan",
    )


def _likely(view: View, first: int, runs: Sequence[RankTraining], allowed: float) -> Explanation:
    if first == 0 and _explained_by_labels(view, runs, allowed):
        return {
            "cause": "each rank averages over its own labels, and the ranks have different numbers of labels that "
            "count (-100 does not): weighed by these numbers, the losses of the ranks give the reference's",
            "remedy": "divide each rank's summed loss by the number of labels in the global batch, and multiply it by "
            "the number of data-parallel ranks, over which gradients are averaged",
        }
    if first == 0 and (words := _multiplied(view, runs, allowed)):
        return words
    if first == 0:
        return {
            "cause": "the first forward differs already though the weights are equal: the ranks' losses are not "
            "weighed alike, a module was left out or replaced, it draws random numbers, or a setting of it differs "
            "(attention, scale, activation, precision)" + _cut_across(view) + other_precision(view),
            "remedy": "compare attention settings and make the loss a mean that all ranks weigh alike; where the "
            "loader computes in another precision on purpose, set tolerance=...",
        }
    return {
        "cause": "the first forward and its gradients agree, later losses do not: something changes between the steps, "
        "such as a buffer or a cache that the forward updates on each rank for itself" + other_precision(view),
        "remedy": "compare what the forward keeps from one step to the next with the reference's",
    }


def _multiplied(view: View, runs: Sequence[RankTraining], allowed: float) -> Explanation:
    """What to say where the first loss is a whole multiple of the reference's, and the later ones nearly."""
    pairs = list(zip(mean_losses(runs), view.reference.losses or (), strict=True))
    factors = [ours / theirs if theirs and math.isfinite(ours) else math.nan for ours, theirs in pairs]
    factor = whole(factors[0], max(allowed, TOLERANCE["float64"]))
    # A scaled loss has scaled gradients, so later losses are those of another place.
    if not factor or not all(abs(other / factors[0] - 1) <= LOOSE for other in factors):
        return {}
    number, of = number_of(view, runs, factor)
    if not of and int(number) * allowed > CHANCE:
        return {}
    told = f"the loss is {factor} of" if factor.startswith("1/") else f"the loss is {factor} times"
    return {
        "cause": f"{told} the reference's in every step{f' ({number} is {of})' * bool(of)}: " + _why(factor, bool(of)),
        "remedy": "make each rank's loss the mean over its own rows, without a factor for the number of ranks, rows or "
        "micro-batches",
    }


def _why(factor: str, ranks: bool) -> str:
    if factor.startswith("1/"):
        divided = "each rank's sum is divided by the count of the global batch in place of its own, or "
        return divided * ranks + "the loss is divided once too often (gradient accumulation, number of ranks or rows)"
    summed = "the losses of the ranks are summed or multiplied by their number, or "
    return summed * ranks + "the rank's own rows are summed where the reference takes the mean"


def _cut_across(view: View) -> str:
    """What tensor parallelism adds to the likely causes; empty where no dimension of a mesh splits the model."""
    meshes = {tensor.mesh for rank in view.evidence.inventory for tensor in rank.tensors if tensor.mesh is not None}
    sizes = [*view.evidence.world.mesh, *(pair for mesh in meshes for pair in zip(mesh.dims, mesh.shape, strict=True))]
    if not any(size > 1 and splits_model(dim) for dim, size in sizes):
        return ""
    return "; or a tensor-parallel plan cuts a fused weight (qkv) across its parts, or adds a bias once per rank"


def _explained_by_labels(view: View, runs: Sequence[RankTraining], allowed: float) -> bool:
    """Whether the mean of the first losses, weighed by the labels that each slice counts, is the reference's."""
    first = {run.data_parallel[0]: run.labels[0] for run in reversed(runs) if run.labels}
    losses = {index: curve[0] for index, curve in slice_losses(runs).items()}
    expected = view.reference.losses or ()
    for kind in (0, 1):
        weights = {index: labels[kind] for index, labels in first.items()}
        if len(set(weights.values())) > 1 and weights.keys() == losses.keys():
            weighed = math.fsum(weights[i] * losses[i] for i in weights if weights[i]) / sum(weights.values())
            if distance([weighed], expected, 0) <= allowed:
                return True
    return False


def _told_apart(actual: float, expected: float) -> tuple[str, str]:
    """Both in as many digits, at least four, as show that they differ."""
    for digits in range(4, 17):
        told = f"{actual:.{digits}g}", f"{expected:.{digits}g}"
        if told[0] != told[1]:
            break
    return told


def _step(step: int, actual: Sequence[float], expected: Sequence[float]) -> str:
    off = distance(actual, expected, step)
    return f"step {step}: {actual[step]:.6f}, but should be {expected[step]:.6f}, off by {off:.2g} relative"


@check(
    promise="gradients accumulated over micro-batches are those of one batch, and are reduced with the last one only",
    family="training",
    needs=["inventory", "reference", "training"],
    uses=["values", "verifier"],
    after=[*BEFORE_UPDATES, "update_parity", "loss_parity"],
    why="A switch that is ignored costs a reduction per micro-batch; one that sticks loses a whole step.",
    cause="the switch (set_requires_gradient_sync of FSDP2, no_sync of DDP) does not reach every wrapped module",
    remedy="pass the switch on to every FSDP module, and turn it on again before the backward of the last micro-batch",
    references=["nvidia-cosmos/cosmos-framework#161"],
    since="0.2",
    tolerance=OF_GRADIENTS,
)
def grad_accumulation_parity(view: View) -> Iterable[Finding]:
    runs = trained(view)
    seen = [run.accumulation for run in runs if run.accumulation is not None]
    if not seen or len(seen) < len(runs):
        raise NotJudged("nothing is trainable, so there are no gradients to accumulate")
    if problem := next((one.problem for one in seen if one.problem), ""):
        raise NotJudged(f"batch(0): {problem}; give it more rows")
    for name in view.names("parameter"):
        early = tuple(rank for rank, one in enumerate(seen) if name in one.early)
        if early:
            yield Finding(name, early, "reduced in the first micro-batch", "reduced with the last one only", **_IGNORED)
    found = list(_accumulated(view, runs))
    changing = next(_changed_by_the_forward(view), None)
    if found and changing is not None:
        raise NotJudged(
            f"the forward changes {changing} each time, and the reference takes more forwards for the same rows"
        )
    if found:
        require_same_forward(view, runs)
        require_no_other_cause(view, f"accumulated gradients differ ({found[0].tensor}: {found[0].actual})")
    yield from found


def _changed_by_the_forward(view: View) -> Iterator[str]:
    """Buffers, and what else is not trained, that change in the reference."""
    after = view.reference.after
    for tensor in view.truth.tensors:
        if after is not None and not tensor.requires_grad and after.by_name[tensor.name].digest != tensor.digest:
            yield tensor.name


def _accumulated(view: View, runs: Sequence[RankTraining]) -> Iterator[Finding]:
    # The steps are over: what tells the parameters from the reference's tells their gradients apart as well, the more
    # the more sensitive the model is.
    drift = [c.measure.apart / c.measure.truth for run in runs for c in run.parameters if c.measure and c.measure.truth]
    drift = [one for one in drift if one < OF_UPDATES["bfloat16"]]
    carried = max(drift, default=0.0) * max(view.reference.sensitivity, 1.0)
    allowed, typical = tolerance(view, view.tolerance) + carried, typical_gradient(view)
    names = view.names("parameter", only=view.reference.gradients)
    seen = [run.accumulation for run in runs if run.accumulation is not None]
    pairs = view.comparisons(tuple(one.gradients for one in seen), names)
    endless = [
        name for name, found in pairs.items() if any(c.measure and not math.isfinite(c.measure.truth) for _, c in found)
    ]
    if endless:
        raise NotJudged(
            f"after the steps the reference's own gradient of {endless[0]} is not finite: its training diverges; give "
            "Subject(optimizer=...) a smaller learning rate"
        )
    for name in names:
        lost = [rank for rank, one in enumerate(seen) if name in one.without_gradient]
        lost = [rank for rank in lost if name not in runs[rank].without_gradient]
        if lost:
            yield Finding(name, tuple(lost), "no gradient once the last micro-batch is over", _MEAN, **_NEVER)
        yield from _unlike(name, pairs.get(name, []), allowed, typical)


def _unlike(name: str, pairs: list[tuple[int, Comparison]], allowed: float, typical: float) -> Iterator[Finding]:
    by_factor: dict[str, list[int]] = {}
    for rank, comparison in pairs:
        if comparison.measure is not None and gradient_apart(comparison.measure, allowed, typical):
            by_factor.setdefault(multiple(comparison.measure, allowed), []).append(rank)
    for factor, ranks in by_factor.items():
        actual = f"a gradient {factor} times as large" if factor else "another gradient"
        yield Finding(name, tuple(ranks), f"{actual} once the last micro-batch is over", _MEAN, **_UNLIKE)


_MEAN = "the mean of the micro-batches"
_IGNORED: Explanation = {
    "cause": "the switch (set_requires_gradient_sync of FSDP2) is ignored: each micro-batch costs a reduction",
    "remedy": "pass the switch on to every FSDP module",
}
_UNLIKE: Explanation = {
    "cause": "what an earlier micro-batch left is lost or changed by a later one: a zero_grad() in the forward or in a "
    "hook, or a hook that scales or reduces all that is accumulated each time",
    "remedy": "touch gradients once per step, after the last backward: no zero_grad() between micro-batches, no hook "
    "on p.grad that runs in each backward",
}
_NEVER: Explanation = {
    "cause": "the reduction is not turned on again for the last micro-batch, so gradients stay unreduced inside FSDP",
    "remedy": "call set_requires_gradient_sync(True) before the backward of the last micro-batch, on every FSDP module",
}
