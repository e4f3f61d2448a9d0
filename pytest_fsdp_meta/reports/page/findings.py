"""Findings as the page tells them: by cause, and like tensors in one line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pytest_fsdp_meta.reports.schema import FindingRecord
from pytest_fsdp_meta.reports.terminal import alike, by_cause
from pytest_fsdp_meta.text import fold_names

MOST_DETAILS = 500
"""Tensors of one line whose details are listed one by one; the record has them all."""


@dataclass(frozen=True)
class Line:
    """Tensors that broke a promise in the same way on the same ranks; no names for the whole model."""

    names: tuple[str, ...]
    ranks: tuple[int, ...]
    actual: str
    expected: str
    details: tuple[tuple[str, str], ...] = ()
    """(name, detail) of those that have one."""

    @property
    def folded(self) -> tuple[str, ...]:
        return tuple(fold_names(self.names))


@dataclass(frozen=True)
class Cause:
    """What probably broke these tensors, and what usually helps."""

    cause: str
    remedy: str
    lines: tuple[Line, ...]


def causes(findings: Iterable[FindingRecord]) -> tuple[Cause, ...]:
    """In the order in which the judge told them."""
    return tuple(
        Cause(cause, remedy, tuple(map(_line, alike(found)))) for (cause, remedy), found in by_cause(findings).items()
    )


def _line(findings: Sequence[FindingRecord]) -> Line:
    first = findings[0]
    return Line(
        names=tuple(dict.fromkeys(one.tensor for one in findings if one.tensor is not None)),
        ranks=first.ranks,
        actual=first.actual,
        expected=first.expected,
        details=tuple((one.tensor or "", one.detail) for one in findings if one.detail),
    )
