"""What a card of "What broke" says of when its failures began."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_fsdp_meta.reports.causes import Place
from pytest_fsdp_meta.reports.compare import Comparison
from pytest_fsdp_meta.reports.history import describe_moment, is_new, run_of, time_of
from pytest_fsdp_meta.reports.schema import Report
from pytest_fsdp_meta.text import counted

Failures = set[tuple[str, str]]
"""(loader, check) of what is a new failure for a comparison."""


def describe_news(places: Sequence[Place], report: Report, comparison: Comparison | None) -> tuple[str, bool]:
    """Return since when a cause is known, and whether it is new for some loader; ("", False) without earlier runs.

    The history of a check counts more than the comparison, whose baseline may have been several failing runs ago.
    """
    changes = comparison.failures if comparison is not None else ()
    failures = {(change.loader, change.check) for change in changes}
    baseline = _baseline(comparison)
    fresh = [place for place in places if _is_fresh(place, report, failures)]
    if not fresh:
        return _describe_known(places, baseline), False
    if len(fresh) < len(places):
        loaders, all_loaders = (len({id(place.loader) for place in some}) for some in (fresh, places))
        if loaders < all_loaders:
            return f"new in {loaders} of {counted(all_loaders, 'loader')}", True
        return f"new in {len(fresh)} of {counted(len(places), 'check')}", True
    is_compared = all(_is_failure(place, failures) for place in places)
    return f"new since {baseline}" if is_compared else "new in this run", True


def _describe_known(places: Sequence[Place], baseline: str) -> str:
    checks = [check for place in places for check in place.checks]
    runs = [check.history.broken_since for check in checks if check.history and check.history.broken_since]
    if runs:
        return f"broken since {describe_moment(min(runs, key=lambda run: time_of(run.started)))}"
    return f"also in {baseline}" if baseline and checks else ""


def _baseline(comparison: Comparison | None) -> str:
    if comparison is None:
        return ""
    return comparison.which or f"the run of {describe_moment(run_of(comparison.before))}"


def _is_fresh(place: Place, report: Report, failures: Failures) -> bool:
    """Return whether some check of the place did not fail before, as far as is known."""
    if any(check.history is not None for check in place.checks):
        return any(is_new(check, report) for check in place.checks)
    return _is_failure(place, failures)


def _is_failure(place: Place, failures: Failures) -> bool:
    """Return whether a comparison has any of the checks as a new failure."""
    names = place.loader.loader, f"{place.loader.loader}, {place.loader.world}"
    return any((name, check.check) in failures for name in names for check in place.checks)
