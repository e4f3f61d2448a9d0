"""What a run did not check: what the models hide, fields that are not declared, partly checked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pytest_fsdp_meta.reports.page.checks import CheckView

UNCHECKED = ("partly checked", "not declared")
"""Kinds of checks that check more if the test or the model changes, in the order in which the page shows them."""


@dataclass(frozen=True)
class Unchecked:
    """Checks that did not check everything, for the same reason, and the number of loaders with one of them."""

    kind: str
    reason: str
    checks: tuple[CheckView, ...]
    loaders: int


def group_by_reason(loaders: Iterable[Iterable[CheckView]], kinds: Sequence[str] = UNCHECKED) -> list[Unchecked]:
    """Return each reason why checks are of these kinds, in their order. ``loaders`` has the checks of each loader."""
    found: dict[tuple[str, str], dict[str, CheckView]] = {}
    where: dict[tuple[str, str], set[int]] = {}
    for number, checks in enumerate(loaders):
        for check in checks:
            if check.kind in kinds:
                key = check.kind, check.record.reason
                found.setdefault(key, {}).setdefault(check.record.check, check)
                where.setdefault(key, set()).add(number)
    groups = (Unchecked(*key, tuple(checks.values()), len(where[key])) for key, checks in found.items())
    return sorted(groups, key=lambda group: kinds.index(group.kind))
