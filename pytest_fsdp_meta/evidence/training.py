"""TODO."""

from __future__ import annotations

from dataclasses import dataclass

from pytest_fsdp_meta.evidence.tensors import OptimizerFacts, RankInventory


@dataclass(frozen=True)
class Measure:
    """A rank's shard and the same slice of the truth as vectors: their lengths, their distance, their product.

    ``grain`` is what one rounding of every element may come to.
    """

    actual: float
    truth: float
    apart: float
    dot: float
    elements: int
    grain: float = 0.0

    @property
    def factor(self) -> float:
        """The multiple of the truth that comes nearest; zero where the truth is zero."""
        return self.dot / self.truth**2 if self.truth else 0.0

    @property
    def residual(self) -> float:
        """What that multiple does not explain, relative to the rank's own length."""
        square = self.actual**2 - (self.dot / self.truth) ** 2 if self.truth else self.actual**2
        return max(square, 0.0) ** 0.5 / self.actual if self.actual else 0.0


@dataclass(frozen=True)
class Movement:
    """Of one trainable parameter: rows (dim 0) of a rank's shard that must move in training, and those that do not.

    ``first`` is the global index of the first of them; None where there is none, or no row.
    """

    name: str
    due: int
    still: int
    first: int | None = None


@dataclass(frozen=True)
class Comparison:
    """A rank's own shard beside the same slice of the truth.

    ``problem`` is set, and nothing else, when the two cannot be laid side by side (a shape differs). ``cast`` tells
    that the truth was cast to the shard's dtype first. ``index`` is the first differing *global* index.
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
    """What ``problem`` is in place of."""
    measure: Measure | None = None
    """Taken of gradients, of how far trained parameters moved, and of loaded values that differ."""


@dataclass(frozen=True)
class Accumulation:
    """The gradients of the first batch in micro-batches, reduced with the last, beside the reference's.

    ``early`` names the parameters whose gradients were reduced in the first already, though told not to.
    """

    gradients: tuple[Comparison, ...] = ()
    without_gradient: tuple[str, ...] = ()
    early: tuple[str, ...] = ()
    problem: str = ""
    """Why none was made."""


@dataclass(frozen=True)
class RankTraining:
    """K training steps as one rank saw them. ``losses`` are this rank's own, over its slice of the batch."""

    losses: tuple[float, ...]
    data_parallel: tuple[int, int]
    batches: tuple[str, ...] = ()
    """A hash of the global batch of each step."""
    gradients: tuple[Comparison, ...] = ()
    parameters: tuple[Comparison, ...] = ()
    unreduced: bool = False
    """True when every parameter is a plain tensor and no DDP wraps the model: nobody reduces its gradients."""
    labels: tuple[tuple[int, int], ...] = ()
    """Of each step: the labels of this rank's rows that are not ignored, and so without the first of each row."""
    without_gradient: tuple[str, ...] = ()
    """Trainable parameters that the first backward left without a gradient."""
    norm: float | None = None
    """Of all gradients of the first step, as clipping sees it."""
    norm_problem: str = ""
    """Why torch gave none."""
    after: RankInventory | None = None
    """The inventory once the steps are over."""
    optimizer: OptimizerFacts | None = None
    movements: tuple[Movement, ...] = ()
    accumulation: Accumulation | None = None
