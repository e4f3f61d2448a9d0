"""Tell by a statistical test whether a weight was drawn with the spread that its shard's size gives, not its own."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from statistics import NormalDist
from typing import NamedTuple

from pytest_fsdp_meta.evidence import DrawnTensor, Spread, TensorFacts

ERROR_RATE = 1e-6
"""The probability that chance alone gives a finding in a run. It is divided by the number of tests of the run."""
LEAST = 128
"""Fewest different values of a spread that is tested. Below, the logarithm of a variance is not nearly normal."""
NORMAL_KURTOSIS = 3.0
NORMAL_TAILS = 24.0
"""The variance of a normal sample's kurtosis, times the number of its elements."""
SIMILAR_TAILS = 0.1
"""Absolute: kurtoses that differ by less are the same. A normal has 3, a uniform distribution 1.8."""
EXACT = 0.02
"""Absolute, of the logarithm of a ratio of variances: ratios of large samples that differ by less are the same."""
CONSISTENT = 3.0
"""Standard errors by which a measured ratio may miss the one that a shard's size gives."""


@dataclass(frozen=True)
class Fan:
    """A size by which an initialisation scales: ``ratio`` is the variance that the shard's size gives, divided by that
    of the whole tensor's size."""

    ratio: float
    shard: tuple[int, ...]
    whole: tuple[int, ...]
    of: str = ""
    """The name of the weight whose fan it is, for a bias; empty for the tensor itself."""


@dataclass(frozen=True)
class Measured:
    """The ratio of two variances: its logarithm with the standard error, and both standard deviations.

    ``distinct`` counts the different values of the side that has fewer.
    """

    log: float
    error: float
    own: float
    reference: float
    elements: int
    distinct: int
    alike: bool = True
    """Whether both have the tails of one distribution: other weights than draws, such as trained ones, rarely do."""


def fans_of(tensor: TensorFacts, weight: TensorFacts | None) -> list[Fan]:
    """Return the sizes that a draw on the local shard would have used by mistake; ``weight`` is that of a bias."""
    if tensor.flat:
        return []
    own, of = (tensor, "") if len(tensor.shape) > 1 else (weight, weight.name if weight is not None else "")
    if own is None or own.flat or len(own.shape) < 2 or len(own.shape) != len(own.local_shape):
        return []
    whole, shard = own.shape, own.local_shape
    if not prod(shard):
        return []
    cut = [size / part for size, part in zip(whole, shard, strict=True) if size != part]
    ratios = {*cut, prod(cut), sum(_fans(whole)) / sum(_fans(shard))} if cut else set()
    return [Fan(ratio, shard, whole, of) for ratio in sorted(ratios) if ratio > 1]


def _fans(shape: Sequence[int]) -> tuple[int, int]:
    """Return fan-in and fan-out, as ``torch.nn.init`` counts them."""
    field = prod(shape[2:])
    return shape[1] * field, shape[0] * field


def measure_ratio(draws: Iterable[DrawnTensor]) -> Measured | None:
    """Compare the variance within these parts with that within the reference's; None if too little varies."""
    pairs = [(draw.own, draw.reference) for draw in draws if draw.reference is not None]
    if not pairs:
        return None
    own, reference = _pooled(own for own, _ in pairs), _pooled(reference for _, reference in pairs)
    if own is None or reference is None:
        return None
    # A sample underestimates heavy tails; draws with lighter tails, such as uniform ones, are tested as if normal.
    error = math.sqrt(sum((max(part.kurtosis, NORMAL_KURTOSIS) - 1) / part.distinct for part in (own, reference)))
    tails = math.sqrt(sum(NORMAL_TAILS / part.distinct for part in (own, reference)))
    elements = sum(spread.elements for spread, _ in pairs)
    return Measured(
        log=math.log(own.variance / reference.variance),
        error=error,
        own=math.sqrt(own.variance),
        reference=math.sqrt(reference.variance),
        elements=elements,
        distinct=min(own.distinct, reference.distinct),
        alike=abs(own.kurtosis - reference.kurtosis) <= SIMILAR_TAILS + 2 * CONSISTENT * tails,
    )


class _Pooled(NamedTuple):
    variance: float
    kurtosis: float
    distinct: int
    """Elements that repeat one another, such as equal columns, were not drawn one by one."""


def _pooled(spreads: Iterable[Spread]) -> _Pooled | None:
    """Return what the parts have in common, each about its own mean; None for a constant or values not finite."""
    parts = list(spreads)
    total = sum(part.elements for part in parts)
    variance = sum(part.elements * part.variance for part in parts) / total
    if not (math.isfinite(variance) and variance > 0):
        return None
    fourth = sum(part.elements * part.fourth for part in parts) / total
    return _Pooled(variance, fourth / variance**2, sum(part.distinct for part in parts))


def limit(tests: int) -> float:
    """Return the number of standard errors that chance exceeds in half of ``ERROR_RATE`` of the runs."""
    return NormalDist().inv_cdf(1 - ERROR_RATE / 2 / max(tests, 1))


def wrong_fan(measured: Measured, fans: Iterable[Fan], tests: int) -> Fan | None:
    """Return the shard's fan that explains the spread, if it is not the reference's; else None."""
    if measured.distinct < LEAST or not measured.alike or measured.log <= limit(tests) * measured.error:
        return None
    slack = max(CONSISTENT * measured.error, EXACT)
    near = [fan for fan in fans if abs(measured.log - math.log(fan.ratio)) <= slack]
    return min(near, key=lambda fan: abs(measured.log - math.log(fan.ratio)), default=None)


def can_tell(measured: Measured, fans: Iterable[Fan], tests: int) -> bool:
    """Return whether there are enough elements that the spread of the largest ratio would be a finding."""
    largest = max((fan.ratio for fan in fans), default=math.inf)
    return measured.distinct >= LEAST and math.log(largest) > (limit(tests) + CONSISTENT) * measured.error


def excludes_chance(spread: Spread, pairs: int) -> bool:
    """Return whether two draws of these values are equal by chance in less than half of ``ERROR_RATE`` of the runs."""
    return spread.surprise > math.log(2 * max(pairs, 1) / ERROR_RATE)


def weight_of(name: str, by_name: Mapping[str, TensorFacts]) -> TensorFacts | None:
    """Return the weight beside a bias, whose fan scales both."""
    return by_name.get(f"{name.rpartition('.')[0]}.weight") if name.endswith(".bias") else None
