"""How far losses, gradients and updates may be from the reference's: by its noise, or by dtype if that is unknown."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pytest_fsdp_meta.checks.training.facts import BUFFERS, GRADIENTS, UNKNOWN_DTYPE
from pytest_fsdp_meta.checks.values.facts import GRADIENT_TOLERANCE, LOSS_TOLERANCE, UPDATE_TOLERANCE, smallest
from pytest_fsdp_meta.evidence import Comparison, Evidence, Measure, Noise, RankTraining, TensorNoise
from pytest_fsdp_meta.judging.causes import Cases
from pytest_fsdp_meta.judging.view import PartlyJudged, Selection, View

MARGIN = 2.0
"""How many times the noise a tensor may differ by. Right loaders reach 1.4; see benchmarks/results, "power"."""
FEW = 12.0
"""The same for a single element: five trainings estimate its noise worst; see ``margin``."""
FACTOR_MARGIN = 4.0
"""The same for the length of a tensor along its own direction."""
CORRELATED = 0.1
"""The least share of a tensor's noise along its own direction, which a router that picks another expert changes."""
LOSS_MARGIN = 4.0
"""The same for a loss and a norm: the noise of a single number is known less well than that of many elements."""


def margin(elements: int) -> float:
    """Return how many times its noise a slice of so many elements may differ by.

    The noise of an element is the farthest that it moves in five trainings. By chance, a single element moves little in
    all five; of many elements, only some do. If elements move independently and normally, a sixth training moves n
    elements by more than m times their noise once in 100 000 trainings, for n = 1, 2, 3, 4, 6, 8, 16 at m = 11.6, 4.1,
    2.9, 2.4, 1.8, 1.6, 1.2. This margin is above all of them.
    """
    return max(MARGIN, FEW / max(elements, 1))


@dataclass(frozen=True)
class Limits:
    """The largest distances between tensors of ranks and the reference's that count as equal.

    ``relative`` is a fraction of the reference's norm. ``noise`` has, for each rank, the noise of its slices by
    parameter; None if it was not measured, or the author declares the tolerance. ``typical`` is then the size of a
    usual element: some gradients, such as that of an attention key's bias, are small differences of large numbers, and
    their rounding error is that of the large numbers. For updates, ``roundings`` counts the steps of both trainings:
    each step rounds each element once. ``longest`` has the length of the longest slice of each parameter.
    """

    relative: float
    noise: tuple[Mapping[str, TensorNoise], ...] | None = None
    typical: float = 0.0
    roundings: int = 0
    longest: Mapping[str, float] = field(default_factory=dict)

    def allowed(self, rank: int, name: str, measure: Measure) -> float:
        """Return the largest distance that counts as equal."""
        truth, rounded = max(measure.truth, self.longest.get(name, 0.0)), self.roundings * measure.grain
        if self.noise is None:
            return self.relative * (truth + self.typical * math.sqrt(measure.elements)) + rounded
        return max(self.relative * truth, self._noise_allowed(rank, name, measure)) + rounded

    def length_allowed(self, rank: int, name: str, measure: Measure) -> float:
        """Return the largest relative change of length, along the reference's direction; infinite if it is unknown."""
        noise = None if self.noise is None else self.noise[rank].get(name)
        if noise is None or not measure.truth or not math.isfinite(noise.factor):
            return math.inf
        # Nudges may round to the same weights each time, where an update is a few units in the last place.
        rounded = self.roundings * measure.grain / math.sqrt(max(measure.elements, 1))
        known = max(noise.factor, max(CORRELATED * noise.distance, rounded) / measure.truth)
        return self.relative + max(FACTOR_MARGIN, margin(measure.elements)) * known

    def scaled(self, rank: int, name: str, measure: Measure) -> bool:
        """Return whether the tensor is longer or shorter along the reference's direction than noise explains."""
        return abs(measure.factor - 1) > self.length_allowed(rank, name, measure)

    def too_far(self, rank: int, comparison: Comparison) -> bool:
        """Return whether the distance is too large, whatever the length; False for a comparison without a measure."""
        measure = comparison.measure
        if measure is None:
            return False
        return not math.isfinite(measure.apart) or measure.apart > self.allowed(rank, comparison.name, measure)

    def exceeded(self, rank: int, comparison: Comparison) -> bool:
        """Return whether the distance or the length is off; False for a comparison without a measure."""
        measure = comparison.measure
        return measure is not None and (self.too_far(rank, comparison) or self.scaled(rank, comparison.name, measure))

    def only_scaled(self, cases: Cases) -> bool:
        """Return whether these cases, which exceed the limits, do so by their lengths alone."""
        return not any(self.too_far(rank, comparison) for rank, comparison in cases)

    def tolerance(self, cases: Cases) -> float:
        """Return the largest relative distance or length of these cases that counts as equal: of what is off."""
        if self.only_scaled(cases):
            return max(self.length_allowed(rank, c.name, c.measure) for rank, c in cases if c.measure is not None)
        return self.relative_to([(rank, c) for rank, c in cases if self.too_far(rank, c)])

    def describe(self, cases: Cases) -> str:
        """Describe what these cases, which exceed the limits, should be."""
        what = "as long as the reference's," if self.only_scaled(cases) else "equal"
        return f"{what} within {self.tolerance(cases):.2g}"

    def relative_to(self, cases: Cases) -> float:
        """Return about the largest allowed distance of these ranks, relative to the norm of the reference's slice.

        It is the largest of what ``allowed`` adds up, so that parameters with the same tolerance share one finding.
        """
        pairs = [(rank, c.name, c.measure) for rank, c in cases if c.measure is not None and c.measure.truth]
        parts = [max(self._noise_allowed(*pair), self.roundings * pair[2].grain) / pair[2].truth for pair in pairs]
        return max([self.relative, *parts])

    def _noise_allowed(self, rank: int, name: str, measure: Measure) -> float:
        noise = None if self.noise is None else self.noise[rank].get(name)
        return margin(measure.elements) * noise.distance if noise else 0.0


def describe_length(cases: Cases) -> str:
    """Describe the length of the slice whose length is farthest off, along the reference's direction."""
    measures = [(rank, c.measure.factor) for rank, c in cases if c.measure is not None]
    rank, factor = max(measures, key=lambda pair: abs(pair[1] - 1))
    return f"{factor:.4g} times as long on rank {rank}"


def limits_of(view: View, snapshot: str) -> Limits:
    """Return the limits of a snapshot, which is named as its field of the noise."""
    gradients = snapshot in GRADIENTS
    by_dtype = GRADIENT_TOLERANCE if gradients else UPDATE_TOLERANCE
    check_id = view.check_id if gradients else "buffers_follow_training" if snapshot in BUFFERS else "update_parity"
    noise = _noise(view, check_id)
    if noise is not None:
        return Limits(_smallest(view, by_dtype), tuple(getattr(own, snapshot) for own in noise))
    return Limits(tolerance(view, by_dtype, check_id), typical=typical_gradient(view) if gradients else 0.0)


@dataclass(frozen=True)
class LossLimits:
    """The largest differences of losses that count as equal, relative to the largest loss of the reference's curve."""

    relative: float
    noise: tuple[float, ...] = ()

    def at(self, expected: Sequence[float], step: int) -> float:
        noise = self.noise[step] if step < len(self.noise) else 0.0
        return max(self.relative, LOSS_MARGIN * noise / largest_of(expected))

    def exceeded(self, actual: Sequence[float], expected: Sequence[float], step: int) -> bool:
        return relative_distance(actual, expected, step) > self.at(expected, step)


def loss_limits(view: View) -> LossLimits:
    noise = _noise(view, "loss_parity")
    if noise is None:
        return LossLimits(tolerance(view, LOSS_TOLERANCE, "loss_parity"))
    # Nudges change what modules return, not how the author's loss is computed from it.
    rounding = max((LOSS_TOLERANCE[dtype] for dtype in _returned(view) if dtype in LOSS_TOLERANCE), default=0.0)
    return LossLimits(max(rounding, _smallest(view, LOSS_TOLERANCE)), noise[0].losses)


def loss_tolerances(evidence: Evidence) -> tuple[float, ...]:
    """Return how far the losses may be from the reference's at each step; empty without a reference or training."""
    expected = (evidence.reference.losses or ()) if evidence.reference else ()
    if not expected or not evidence.training:
        return ()
    limits = loss_limits(View(evidence, "loss_parity", LOSS_TOLERANCE, {}, (), Selection()))
    return tuple(limits.at(expected, step) for step in range(len(expected)))


def norm_limit(view: View, expected: float, own: bool = False) -> float:
    """Return the largest difference between gradient norms that counts as equal: torch's norms, or the author's.

    Rounding to bfloat16 lengthens or shortens all gradients a little, which the nudges show in part: see CORRELATED.
    """
    noise = _noise(view, view.check_id)
    if noise is None:
        return tolerance(view, GRADIENT_TOLERANCE) * expected
    nudged = noise[0].own_norm if own else noise[0].norm
    along = CORRELATED * expected * max(map(_relative_noise, view.evidence.training or (), noise), default=0.0)
    return max(_smallest(view, GRADIENT_TOLERANCE) * expected, LOSS_MARGIN * max(nudged, along))


def _relative_noise(run: RankTraining, noise: Noise) -> float:
    """Return the noise of all gradients of a rank together, relative to their length."""
    truths = {c.name: c.measure.truth for c in run.gradients if c.measure is not None}
    moved = math.hypot(*(noise.gradients[name].distance for name in truths if name in noise.gradients))
    length = math.hypot(*truths.values())
    return moved / length if length > 0 and math.isfinite(moved) else 0.0


def require_noise(view: View, by_dtype: Mapping[str, float], differences: Iterable[float]) -> None:
    """Raise PartlyJudged if relative ``differences`` pass only because the reference's world ended before its noise
    was known: they are within the tolerance of the dtype at best.

    Call this last, in a check that found nothing.
    """
    problem = next((run.noise.problem for run in view.evidence.training or () if run.noise and run.noise.ended), "")
    largest = max(differences, default=0.0)
    if problem and not _declared(view, view.check_id) and largest > _smallest(view, by_dtype):
        raise PartlyJudged(
            f"measuring the reference's noise failed ({problem}), so a difference of {largest:.2g} may be an error"
        )


def _declared(view: View, check_id: str) -> bool:
    return check_id in view.evidence.tolerance or "*" in view.evidence.tolerance


def _noise(view: View, check_id: str) -> tuple[Noise, ...] | None:
    """Return each rank's noise; None if it was not measured, or the author declares this check's tolerance."""
    if _declared(view, check_id):
        return None
    measured = tuple(
        run.noise for run in view.evidence.training or () if run.noise is not None and not run.noise.problem
    )
    return measured if measured and len(measured) == len(view.evidence.training or ()) else None


def _smallest(view: View, by_dtype: Mapping[str, float]) -> float:
    """Return the tolerance that needs no measurement: a loss in float32 rounds the gradients of float64 parameters."""
    parameters = {t.dtype for t in view.evidence.inventory[0].tensors if t.kind == "parameter"}
    return smallest(by_dtype, parameters | _returned(view))


def _returned(view: View) -> set[str]:
    """Return the dtypes of the ranks' losses.

    A loss that the author returned as a number may have been computed in any dtype that the ranks use.
    """
    found = {run.loss_dtype for run in view.evidence.training or () if run.loss_dtype}
    if UNKNOWN_DTYPE in found:
        found |= {"float32", *view.evidence.computes_in}
        found |= {t.dtype for t in view.evidence.inventory[0].tensors if t.kind == "parameter"}
    return found


def tolerance(view: View, by_dtype: Mapping[str, float], check_id: str = "") -> float:
    """Return the author's tolerance for the check, or that of the coarsest dtype of what ranks compute and reduce."""
    first = view.evidence.inventory[0]
    computed = {*view.evidence.computes_in, *first.reduces_in, *_returned(view)}
    return declared_or_coarsest(view, by_dtype, computed, check_id)


def declared_or_coarsest(
    view: View, by_dtype: Mapping[str, float], computed: Collection[str] = (), check_id: str = ""
) -> float:
    """Return the author's tolerance, or that of the coarsest dtype among the parameters and the ``computed`` dtypes."""
    declared, check_id = view.evidence.tolerance, check_id or view.check_id
    if _declared(view, check_id):
        return declared.get(check_id, declared.get("*", 0.0))
    dtypes = {t.dtype for t in view.evidence.inventory[0].tensors if t.kind == "parameter"} | set(computed)
    return max((by_dtype[dtype] for dtype in dtypes if dtype in by_dtype), default=by_dtype["float32"])


def relative_distance(actual: Sequence[float], expected: Sequence[float], step: int) -> float:
    """Return the error of one loss, relative to the largest loss of the curve.

    Relative to the loss itself, the error would grow without bound as the loss approaches or crosses zero.
    """
    if not math.isfinite(actual[step]):
        return math.inf
    return abs(actual[step] - expected[step]) / largest_of(expected)


def largest_of(losses: Sequence[float]) -> float:
    """Return the largest loss of a curve, to which the errors of all its losses are relative."""
    return max(1e-12, *(abs(loss) for loss in losses))


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


def gradients_beyond_rounding(view: View) -> set[str]:
    """Return the parameters whose gradient in the reference is larger than a zero that the ranks round."""
    noise = _noise(view, "grad_parity")
    if noise is None:
        allowed = tolerance(view, GRADIENT_TOLERANCE, "grad_parity")
        floor = max(view.reference.noise, min(allowed, GRADIENT_TOLERANCE["bfloat16"]) / 10 * typical_gradient(view))
        # "not <=" keeps NaN, which is not rounding.
        return {name for name, size in view.reference.gradients.items() if not size <= floor}
    return {name for name, size in view.reference.gradients.items() if not size <= _usual_noise(view, noise, name)}


def _usual_noise(view: View, noise: Sequence[Noise], name: str) -> float:
    """Return the noise of a usual element of this gradient, with the margin."""
    held = [
        (rank.by_name[name].numel, own.gradients[name].distance)
        for rank, own in zip(view.evidence.inventory, noise, strict=True)
        if name in rank.by_name and name in own.gradients
    ]
    usual = max((norm / math.sqrt(count) for count, norm in held if count), default=0.0)
    return max(view.reference.noise, MARGIN * usual)
