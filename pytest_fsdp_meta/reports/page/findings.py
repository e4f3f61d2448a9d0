"""Findings as the page shows them: grouped by cause, with similar tensors on one line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pytest_fsdp_meta.reports.schema import FindingRecord
from pytest_fsdp_meta.reports.terminal import by_cause, group_similar
from pytest_fsdp_meta.text import fold_names

MOST_DETAILS = 500
"""Tensors of one line whose details are listed; report.json has them all."""


@dataclass(frozen=True)
class Line:
    """Tensors with the same mismatch on the same ranks. ``names`` is empty for the whole model."""

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
    """A likely cause and its remedy, with the findings that it explains."""

    cause: str
    remedy: str
    lines: tuple[Line, ...]


def group_by_cause(findings: Iterable[FindingRecord]) -> tuple[Cause, ...]:
    """Group findings by cause, in the order in which the judge reported them."""
    return tuple(
        Cause(cause, remedy, tuple(map(as_line, group_similar(group))))
        for (cause, remedy), group in by_cause(findings).items()
    )


def as_line(findings: Sequence[FindingRecord]) -> Line:
    """Return findings that differ only in tensor and detail as one line."""
    first = findings[0]
    return Line(
        names=tuple(dict.fromkeys(one.tensor for one in findings if one.tensor is not None)),
        ranks=first.ranks,
        actual=first.actual,
        expected=first.expected,
        details=tuple((one.tensor or "", one.detail) for one in findings if one.detail),
    )
