"""Evidence about weights that the loader draws: each rank's own part beside the same part of the reference's draw."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """How the elements of one part of a tensor are spread, measured on a sample of them.

    ``variance`` and ``fourth`` are the second and the fourth moment about the mean. ``distinct`` counts the different
    values. ``surprise`` is the negative logarithm of the probability that another draw gives the same values in the
    same order: at least that, whatever the distribution. It is 0 for a constant.
    """

    elements: int
    distinct: int
    variance: float
    fourth: float
    surprise: float
    digest: str
    head: str = ""
    """A hash of the first elements, which an uneven shard shares with a longer one; empty if they say little."""


@dataclass(frozen=True)
class DrawnTensor:
    """One rank's part of a drawn weight; ``reference`` is the same part of what the reference drew itself.

    ``reference`` is None if the reference has no values of it, or does not write them.
    """

    name: str
    own: Spread
    reference: Spread | None = None


@dataclass(frozen=True)
class RankDraws:
    """All drawn weights of one rank."""

    draws: tuple[DrawnTensor, ...] = ()
    by_dtensor: bool = False
    """Whether torch drew numbers for any DTensor while the loader ran."""
