"""The table of a loader's losses beside the reference's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

from pytest_fsdp_meta.reports.schema import Curves


@dataclass(frozen=True)
class LossRow:
    """One training step; without a reference, what is compared with it is None."""

    mean: float
    reference: float | None
    difference: float | None
    """Relative to the largest loss of the reference, as ``loss_parity`` judges it; infinite for a NaN."""
    allowed: float | None
    slices: tuple[float | None, ...]

    @property
    def is_off(self) -> bool:
        return self.difference is not None and self.allowed is not None and self.difference > self.allowed


@dataclass(frozen=True)
class LossTable:
    """The losses of all steps."""

    rows: tuple[LossRow, ...]
    slices: int

    @property
    def has_reference(self) -> bool:
        return any(row.reference is not None for row in self.rows)


def loss_table(losses: Curves) -> LossTable:
    """Return the losses, with their difference from the reference's if there is one."""
    largest = max([1e-12, *(abs(value) for value in losses.reference if isfinite(value))])
    rows = tuple(_row(losses, step, largest) for step in range(len(losses.mean)))
    return LossTable(rows, len(losses.ranks))


def _row(losses: Curves, step: int, largest: float) -> LossRow:
    mean, reference = losses.mean[step], _at(losses.reference, step)
    difference = None
    if reference is not None:
        difference = abs(mean - reference) / largest if isfinite(mean) and isfinite(reference) else float("inf")
    allowed = _at(losses.tolerance, step)
    return LossRow(mean, reference, difference, allowed, tuple(_at(one, step) for one in losses.ranks))


def _at(values: Sequence[float], step: int) -> float | None:
    return values[step] if step < len(values) else None


def describe_loss(value: float) -> str:
    """Return a loss with six digits, or "nan" or "inf"."""
    return f"{value:.6g}" if isfinite(value) else str(value)
