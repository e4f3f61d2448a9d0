"""Decide whether training can be compared with the reference, and by how much the two may differ."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from pytest_fsdp_meta.catalogue.diagnosis.coordinates import share_places
from pytest_fsdp_meta.catalogue.view import Blocked, NotJudged, Unjudgeable, View
from pytest_fsdp_meta.evidence import Evidence, Measure, RankTraining
from pytest_fsdp_meta.text import first_of

LOSS_TOLERANCE = {"float64": 1e-9, "float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2}
"""Relative error of a loss, by the coarsest dtype among the parameters and the dtypes they are cast to."""
GRADIENT_TOLERANCE = {"float64": 1e-7, "float32": 1e-4, "float16": 2e-2, "bfloat16": 0.1}
"""Relative to the gradient's norm. Measured on all tiny models: at most 7e-7 in float32, 2e-2 in bfloat16."""
UPDATE_TOLERANCE = {"float64": 1e-4, "float32": 2e-2, "float16": 0.2, "bfloat16": 0.35}
"""Relative to how far a parameter moved. Where rounding decides a gradient's sign, Adam still takes a full step: 3e-3
measured in float32."""
BLOCKING_CHECKS = (
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
"""Checks whose failure can make a training step raise, or train other parameters than the model registers."""
EXPLAINING_CHECKS = (
    *BLOCKING_CHECKS,
    "shards_tile_the_tensor",
    "replicas_equal",
    "params_equal_reference",
    "buffers_equal_reference",
    "frozen_weights_equal_verifier",
    "tied_weights_share_storage",
)
"""Checks whose failure alone makes training differ. The training checks then stay silent: one cause, one finding."""


def comparable_training(view: View) -> Sequence[RankTraining]:
    """Return each rank's training run, or raise if the reference's run is missing or is not comparable with them."""
    runs, reference = view.evidence.training or (), view.reference
    if reference.losses is None:
        raise NotJudged("a checkpoint directory cannot be trained; declare Subject(reference=<callable>)")
    for step, loss in enumerate(reference.losses):
        if not math.isfinite(loss) and reference.adopted:
            raise Blocked(
                f"with the loader's values of {first_of(reference.adopted)}, the reference's loss is {loss:g}"
            )
        if not math.isfinite(loss):
            raise Unjudgeable(
                f"the reference's own loss is {loss:g} at step {step}; give it a batch, a loss and an optimizer that "
                "keep it finite"
            )
    for step, (loss, rerun) in enumerate(zip(reference.losses, reference.losses_again or (), strict=True)):
        if loss != rerun:
            raise Unjudgeable(
                f"the reference is not reproducible: from the same weights, step {step} gives loss {loss:.9g} and, in "
                f"a second run, {rerun:.9g}; make its forward deterministic"
            )
    for rank, run in enumerate(runs):
        for step, (ours, theirs) in enumerate(zip(run.batches, reference.batches, strict=True)):
            if ours != theirs:
                raise Unjudgeable(
                    f"batch({step}) on rank {rank} differs from the reference's; make batch(step) depend on step only"
                )
    return runs


def require_no_other_cause(view: View, message: str, first_forward: bool = False) -> None:
    """Raise if an unreproducible reference or an earlier finding explains the difference that ``message`` describes.

    Findings about training do not explain the ``first_forward``, which runs before any step.
    """
    if view.reference.unstable:
        raise Unjudgeable(
            f"{message}, and the reference is not reproducible: building it again gives different values "
            f"({view.reference.unstable[0]}); make it build the same model every time"
        )
    names = {t.name: None for rank in view.evidence.inventory for t in rank.tensors}
    failed_by = {name: view.already_failed_in(name) for name in names | dict.fromkeys(view.reference_inventory.by_name)}
    explained = [
        name
        for name, check_id in failed_by.items()
        if check_id and (check_id in EXPLAINING_CHECKS or not first_forward) and not view.judgeable(name)
    ]
    if explained:
        raise Blocked(f"{message}, {view.attribute_to(tuple(view.left_out))}")
    in_training = [check_id for check_id in view.failed if check_id not in EXPLAINING_CHECKS]
    if in_training and not first_forward:
        raise Blocked(f"{message}, {view.attribute_to(in_training)}")


def leave_not_finite(view: View, message: str) -> None:
    """Raise Blocked if another check reports what makes losses infinite or NaN."""
    reference, runs = view.evidence.reference, view.evidence.training or ()
    compared = "loss_parity" in view.selection and reference is not None and reference.losses is not None
    wrong = compared and not all(math.isfinite(loss) for run in runs for loss in run.losses)
    if by := view.failed or ("loss_parity",) * wrong:
        raise Blocked(f"{message}, {view.attribute_to(by)}")


def require_gradients(view: View) -> None:
    """Raise NotJudged if the reference's gradients are all zero: two runs that train nothing are equal."""
    trainable = any(t.requires_grad for t in view.reference_inventory.tensors)
    # "not <=" keeps NaN, which is a gradient.
    if trainable and not any(not size <= view.reference.noise for size in view.reference.gradients.values()):
        raise NotJudged(
            "the reference's gradients are all zero, so there is nothing to compare; give Subject(loss=...) a loss "
            "that depends on the parameters, and Subject(batch=...) rows that are not zero"
        )


def require_same_forward(view: View, runs: Sequence[RankTraining]) -> None:
    """Raise Blocked if loss_parity reports the first loss: a wrong forward makes all gradients and updates wrong."""
    if "loss_parity" not in view.selection:
        return
    expected, actual = view.reference.losses or (), global_losses(view.evidence)
    if expected and relative_distance(actual, expected, 0) > tolerance(view, LOSS_TOLERANCE, "loss_parity"):
        raise Blocked(
            f"the first loss is {actual[0]:.6g}, but should be {expected[0]:.6g} (see loss_parity); gradients and "
            "updates depend on it"
        )


def tolerance(view: View, by_dtype: Mapping[str, float], check_id: str = "") -> float:
    """Return the author's tolerance for the check, or that of the coarsest dtype that ranks compute or reduce in."""
    first = view.evidence.inventory[0]
    return declared_or_coarsest(view, by_dtype, {*first.computes_in, *first.reduces_in}, check_id)


def declared_or_coarsest(
    view: View, by_dtype: Mapping[str, float], computed: Collection[str] = (), check_id: str = ""
) -> float:
    """Return the author's tolerance, or that of the coarsest dtype among the parameters and the ``computed`` dtypes."""
    declared, check_id = view.evidence.tolerance, check_id or view.check_id
    if check_id in declared or "*" in declared:
        return declared.get(check_id, declared.get("*", 0.0))
    dtypes = {t.dtype for t in view.evidence.inventory[0].tensors if t.kind == "parameter"} | set(computed)
    return max((by_dtype[dtype] for dtype in dtypes if dtype in by_dtype), default=by_dtype["float32"])


def format_losses(losses: Sequence[float]) -> str:
    return ", ".join(f"{loss:.6f}" for loss in losses)


def describe_other_precision(view: View) -> str:
    """Return an addition to a cause if the loader computes in another dtype than the reference, else ""."""
    first = view.evidence.inventory[0]
    own = {t.dtype for t in view.reference_inventory.tensors if t.kind == "parameter" and t.dtype in LOSS_TOLERANCE}
    if not own or not set(first.computes_in) - own:
        return ""
    return (
        f"; the loader computes in {' and '.join(first.computes_in)} (mixed-precision policy), the reference in "
        f"{' and '.join(sorted(own))}"
    )


def global_losses(evidence: Evidence) -> tuple[float, ...]:
    """Return the loss of the global batch at each step, as Subject(loss_over_ranks=...) combines those of the ranks."""
    runs = evidence.training or ()
    if evidence.subject.loss_over_ranks != "sum":
        return mean_losses(runs)
    places = share_places(evidence)
    shares: dict[object, list[tuple[float, ...]]] = {}
    for rank, run in enumerate(runs):
        shares.setdefault((run.data_parallel[0], places[rank]), []).append(run.losses)
    means = [[_mean(step) for step in zip(*losses, strict=True)] for losses in shares.values()]
    return tuple(_mean(step) * len(step) for step in zip(*means, strict=True))


def mean_losses(runs: Sequence[RankTraining]) -> tuple[float, ...]:
    """Return the loss of the global batch at each step: the mean over the data-parallel slices.

    Ranks that see the same slice count once.
    """
    return tuple(map(_mean, zip(*slice_losses(runs).values(), strict=True)))


def slice_losses(runs: Sequence[RankTraining]) -> dict[int, list[float]]:
    """Return the losses of each data-parallel slice of the batch, averaged over the ranks that see it."""
    slices: dict[int, list[tuple[float, ...]]] = {}
    for run in runs:
        slices.setdefault(run.data_parallel[0], []).append(run.losses)
    return {index: [_mean(step) for step in zip(*losses, strict=True)] for index, losses in slices.items()}


def _mean(losses: Sequence[float]) -> float:
    # fsum raises on infinities of both signs.
    add = math.fsum if all(map(math.isfinite, losses)) else sum
    return add(losses) / len(losses)


def relative_distance(actual: Sequence[float], expected: Sequence[float], step: int) -> float:
    """Return the error of one loss, relative to the largest loss of the curve.

    Relative to the loss itself, the error would grow without bound as the loss approaches or crosses zero.
    """
    if not math.isfinite(actual[step]):
        return math.inf
    return abs(actual[step] - expected[step]) / max(1e-12, *(abs(loss) for loss in expected))


def typical_gradient(view: View) -> float:
    """Return the root mean square of all elements of the reference's gradients."""
    sizes = view.reference.gradients
    counts = {
        name: math.prod(view.reference_inventory.by_name[name].shape)
        for name in sizes
        if name in view.reference_inventory.by_name
    }
    total = sum(counts.values())
    return math.sqrt(sum(sizes[name] ** 2 * count for name, count in counts.items()) / total) if total else 0.0


def gradient_differs(measure: Measure, allowed: float, typical: float) -> bool:
    """Return whether a gradient differs from the reference's by more than rounding.

    ``allowed`` is relative to the gradient's norm plus the norm of as many ``typical`` elements. Some gradients, such
    as that of an attention key's bias, are small differences of large numbers: their rounding error is that of the
    large numbers.
    """
    if not math.isfinite(measure.apart):
        return True
    return measure.apart > allowed * (measure.truth + typical * math.sqrt(measure.elements))


def gradients_beyond_rounding(view: View) -> set[str]:
    """Return the parameters whose gradient in the reference is larger than a zero that the ranks round."""
    allowed = tolerance(view, GRADIENT_TOLERANCE, "grad_parity")
    floor = max(view.reference.noise, min(allowed, GRADIENT_TOLERANCE["bfloat16"]) / 10 * typical_gradient(view))
    # "not <=" keeps NaN, which is not rounding.
    return {name for name, size in view.reference.gradients.items() if not size <= floor}
