"""What all comparisons of training with the reference share: when there is a truth, how far apart is apart."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from pytest_fsdp_meta.catalogue.view import Blocked, NotJudged, Unjudgeable, View
from pytest_fsdp_meta.evidence import Measure, RankTraining

TOLERANCE = {"float64": 1e-9, "float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2}
"""Of losses, relative, by the coarsest dtype among the parameters and what they are cast to."""
OF_GRADIENTS = {"float64": 1e-7, "float32": 1e-4, "float16": 2e-2, "bfloat16": 0.1}
"""Of the length of a gradient. Measured on all forms of tiny models: at most 7e-7 in float32, 2e-2 in bfloat16."""
OF_UPDATES = {"float64": 1e-4, "float32": 2e-2, "float16": 0.2, "bfloat16": 0.35}
"""Of how far a parameter moved. Adam makes whole steps of what rounding decides the sign of: 3e-3 in float32."""
BASIC = (
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
)
"""What may keep a step from being taken at all, or from being that of the parameters which the model registers."""
EXPLAINING = (
    *BASIC,
    "shards_tile_the_tensor",
    "replicas_equal",
    "params_equal_reference",
    "buffers_equal_reference",
    "frozen_weights_equal_verifier",
    "tied_weights_share_storage",
)
"""What makes training differ by itself: one cause, one finding."""


def trained(view: View) -> Sequence[RankTraining]:
    """What the ranks saw of training, beside a reference that was trained as well; raises where there is none."""
    runs, reference = view.evidence.training or (), view.reference
    if reference.losses is None:
        raise NotJudged("a checkpoint directory cannot be trained; declare Subject(reference=<callable>)")
    again = reference.losses_again or ()
    for step, loss in enumerate(reference.losses):
        if not math.isfinite(loss):
            raise Unjudgeable(
                f"the reference's own loss is {loss:g} at step {step}; give it a batch, a loss and an optimizer that "
                "keep it finite"
            )
    for step, (one, other) in enumerate(zip(reference.losses, again, strict=True)):
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
    return runs


def require_no_other_cause(view: View, told: str, first: bool = False) -> None:
    """Raises when the reference, or what more basic checks found, explains what is apart as ``told``.

    What was found of training explains nothing of the ``first`` forward.
    """
    if view.reference.unstable:
        raise Unjudgeable(
            f"{told}, and the reference does not reproduce itself: it gives other bits when it is built again "
            f"({view.reference.unstable[0]}); make it build the same model every time"
        )
    names = {t.name: None for rank in view.evidence.inventory for t in rank.tensors}
    by = {name: view.condemned_by(name) for name in names | dict.fromkeys(view.truth.by_name)}
    if [name for name, id in by.items() if id and (id in EXPLAINING or not first) and not view.judgeable(name)]:
        raise Blocked(f"{told}, which the findings of {', '.join(view.left_out)} explain; mend those first")
    in_training = [id for id in view.failed if id not in EXPLAINING]
    if in_training and not first:
        raise Blocked(f"{told}, which the findings of {', '.join(in_training)} explain; mend those first")


def require_same_forward(view: View, runs: Sequence[RankTraining]) -> None:
    """Raises NotJudged where the first losses are apart already: then everything later is, because of it."""
    expected, actual = view.reference.losses or (), mean_losses(runs)
    if expected and distance(actual, expected, 0) > tolerance(view, TOLERANCE, "loss_parity"):
        raise Blocked(
            f"the first loss is {actual[0]:.6g}, but should be {expected[0]:.6g}, which loss_parity judges; gradients "
            "and updates follow from it"
        )


def tolerance(view: View, by_dtype: Mapping[str, float], id: str = "") -> float:
    """The author's for the check, or that of the coarsest dtype that the ranks compute or reduce in."""
    first = view.evidence.inventory[0]
    return declared_or_coarsest(view, by_dtype, {*first.computes_in, *first.reduces_in}, id)


def declared_or_coarsest(
    view: View, by_dtype: Mapping[str, float], computed: Collection[str] = (), id: str = ""
) -> float:
    """The author's for the check, or that of the coarsest dtype among the parameters and what is ``computed`` in."""
    declared, id = view.evidence.tolerance, id or view.check_id
    if id in declared or "*" in declared:
        return declared.get(id, declared.get("*", 0.0))
    dtypes = {t.dtype for t in view.evidence.inventory[0].tensors if t.kind == "parameter"} | set(computed)
    return max((by_dtype[dtype] for dtype in dtypes if dtype in by_dtype), default=by_dtype["float32"])


def curve(losses: Sequence[float]) -> str:
    return ", ".join(f"{loss:.6f}" for loss in losses)


def other_precision(view: View) -> str:
    """What to add to a cause where the loader computes in another precision than the reference; else empty."""
    first = view.evidence.inventory[0]
    own = {t.dtype for t in view.truth.tensors if t.kind == "parameter" and t.dtype in TOLERANCE}
    if not own or not set(first.computes_in) - own:
        return ""
    return (
        f"; the loader computes in {' and '.join(first.computes_in)} (mixed-precision policy), the reference in "
        f"{' and '.join(sorted(own))}"
    )


def mean_losses(runs: Sequence[RankTraining]) -> tuple[float, ...]:
    """The loss over the global batch: the mean over data-parallel slices; ranks of one slice count once."""
    return tuple(map(_mean, zip(*slice_losses(runs).values(), strict=True)))


def slice_losses(runs: Sequence[RankTraining]) -> dict[int, list[float]]:
    """The losses of each data-parallel slice: the mean over its ranks."""
    slices: dict[int, list[tuple[float, ...]]] = {}
    for run in runs:
        slices.setdefault(run.data_parallel[0], []).append(run.losses)
    return {index: [_mean(step) for step in zip(*losses, strict=True)] for index, losses in slices.items()}


def _mean(losses: Sequence[float]) -> float:
    """fsum raises where infinities of both signs meet."""
    add = math.fsum if all(map(math.isfinite, losses)) else sum
    return add(losses) / len(losses)


def distance(actual: Sequence[float], expected: Sequence[float], step: int) -> float:
    """Relative to the largest loss of the curve: a loss that falls to zero, or through it, keeps a measure."""
    if not math.isfinite(actual[step]):
        return math.inf
    return abs(actual[step] - expected[step]) / max(1e-12, *(abs(loss) for loss in expected))


def typical_gradient(view: View) -> float:
    """The root mean square of all elements of the reference's gradients."""
    sizes = view.reference.gradients
    counts = {name: math.prod(view.truth.by_name[name].shape) for name in sizes if name in view.truth.by_name}
    total = sum(counts.values())
    return math.sqrt(sum(sizes[name] ** 2 * count for name, count in counts.items()) / total) if total else 0.0


def gradient_apart(measure: Measure, allowed: float, typical: float) -> bool:
    """Whether a gradient is another one.

    ``allowed`` is relative to its own length and to that of as many typical elements: where a gradient is the small
    difference of large ones, as that of the bias of attention keys is, rounding is as large as they make it.
    """
    if not math.isfinite(measure.apart):
        return True
    return measure.apart > allowed * (measure.truth + typical * math.sqrt(measure.elements))


def beyond_rounding(view: View) -> set[str]:
    """The parameters whose gradient in the reference is more than what rounding leaves of a zero on the ranks."""
    allowed = tolerance(view, OF_GRADIENTS, "grad_parity")
    floor = max(view.reference.noise, min(allowed, OF_GRADIENTS["bfloat16"]) / 10 * typical_gradient(view))
    return {name for name, size in view.reference.gradients.items() if not size <= floor}  # nor is NaN rounding
