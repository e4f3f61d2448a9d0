"""What a run did not check: what the models hide, fields that are not declared, partly checked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pytest_fsdp_meta.reports.page.checks import CheckView

UNCHECKED = ("partly checked", "not declared")
"""Kinds of checks that check more if the test or the model changes, in the order in which the page shows them."""


@dataclass(frozen=True)
class Unchecked:
    """Checks that did not check everything, for the same reason, and the loaders with one of them."""

    kind: str
    reason: str
    checks: tuple[CheckView, ...]
    loaders: tuple[str, ...]


def group_by_reason(loaders: Iterable[tuple[str, Iterable[CheckView]]], kinds: Sequence[str]) -> list[Unchecked]:
    """Return each reason why checks are of these kinds, in their order. ``loaders`` has names and checks."""
    found: dict[tuple[str, str], dict[str, CheckView]] = {}
    where: dict[tuple[str, str], dict[str, None]] = {}
    for name, checks in loaders:
        for check in checks:
            if check.kind in kinds:
                key = check.kind, check.record.reason
                found.setdefault(key, {}).setdefault(check.record.check, check)
                where.setdefault(key, {})[name] = None
    groups = (Unchecked(*key, tuple(views.values()), tuple(where[key])) for key, views in found.items())
    return sorted(groups, key=lambda group: kinds.index(group.kind))
