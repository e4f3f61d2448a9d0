"""Values of a rank compared with the reference's, and how far they may differ where its noise was not measured."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

LOSS_TOLERANCE = {"float64": 1e-9, "float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2}
"""Relative error of a loss, by the coarsest dtype among the parameters and the dtypes they are cast to."""
GRADIENT_TOLERANCE = {"float64": 1e-7, "float32": 1e-4, "float16": 2e-2, "bfloat16": 0.1}
"""Relative to the gradient's norm."""
UPDATE_TOLERANCE = {"float64": 1e-4, "float32": 2e-3, "float16": 0.2, "bfloat16": 0.35}
"""Relative to how far a parameter moved."""


def smallest(by_dtype: Mapping[str, float], dtypes: Collection[str]) -> float:
    """Return the tolerance of float64 if all of these dtypes have it, else that of float32.

    No check rejects a smaller difference.
    """
    return by_dtype["float64" if dtypes and {"float64"}.issuperset(dtypes) else "float32"]


@dataclass(frozen=True)
class Measure:
    """A rank's shard and the same slice of the reference, compared as vectors.

    ``actual`` and ``truth`` are the Euclidean norms of the shard and of the reference's slice, ``apart`` is the norm of
    their difference, and ``dot`` their dot product. ``grain`` is the norm of an error of one rounding per element.
    """

    actual: float
    truth: float
    apart: float
    dot: float
    elements: int
    grain: float = 0.0

    @property
    def factor(self) -> float:
        """The multiple of the reference that is nearest to the shard; zero if the reference is zero."""
        return self.dot / self.truth**2 if self.truth else 0.0

    @property
    def residual(self) -> float:
        """The norm of what that multiple does not explain, relative to the norm of the shard."""
        square = self.actual**2 - (self.dot / self.truth) ** 2 if self.truth else self.actual**2
        return max(square, 0.0) ** 0.5 / self.actual if self.actual else 0.0


@dataclass(frozen=True)
class Element:
    """An element that differs: its *global* index, and its values."""

    index: tuple[int, ...]
    actual: float
    expected: float


@dataclass(frozen=True)
class Pattern:
    """What gives a wrong shard if it is done to the reference.

    Its ``kind`` is "zeros", "rounded" (through the dtype ``by``), "times" or "plus" (the number ``by``), "transposed",
    "elsewhere" (another place's part; "alike" if DTensors drew it), "reordered"; "close" or "part" if most is right.
    """

    kind: str
    by: str = ""


@dataclass(frozen=True)
class Comparison:
    """A rank's own shard compared element by element with the same slice of the reference.

    If the two cannot be compared, only ``problem`` and ``should_be`` are set, and ``shape``, the whole tensor's, if it
    is not the reference's. ``cast`` says that the reference was cast to the shard's dtype first. ``index`` is the
    *global* index of the first element that differs, ``expected`` and ``actual`` are its values, and ``max_abs`` and
    ``max_rel`` the largest differences.
    """

    name: str
    equal: bool
    elements: int = 0
    differing: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0
    index: tuple[int, ...] | None = None
    expected: float | None = None
    actual: float | None = None
    cast: bool = False
    problem: str | None = None
    should_be: str = ""
    """What was expected instead of ``problem``."""
    shape: tuple[int, ...] | None = None
    measure: Measure | None = None
    """Set for gradients, for the updates of trained parameters, and for loaded values that differ."""
    pattern: Pattern | None = None
    """Looked for where loaded values differ; None if they have none."""
    farthest: Element | None = None
    """The first of the elements with the largest absolute difference."""

    @property
    def relative(self) -> float:
        """The distance, relative to the norm of the reference's slice; 0 without a measure, infinite for NaN."""
        if self.measure is None or self.measure.apart == 0:
            return 0.0
        known = self.measure.truth and math.isfinite(self.measure.apart)
        return self.measure.apart / self.measure.truth if known else math.inf
