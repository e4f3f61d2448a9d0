"""When the failures with one cause began, for a card of "What broke" and for the summary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pytest_fsdp_meta.reports.causes import Place
from pytest_fsdp_meta.reports.compare import Change, Comparison
from pytest_fsdp_meta.reports.history import describe_moment, failures_of, run_of, starts_of, time_of
from pytest_fsdp_meta.reports.schema import CheckRecord, EarlierRun, Report
from pytest_fsdp_meta.text import counted


def describe_news(places: Sequence[Place], report: Report, comparison: Comparison | None) -> tuple[str, bool]:
    """Return since when a cause is known, and whether some of it is new; ("", False) without earlier runs.

    The history of a check counts more than the comparison, whose baseline may have been several failing runs ago.
    """
    changes = comparison.failures if comparison is not None else ()
    failures = {(change.loader, change.check): change for change in changes}
    new = [_new_parts(place, report, failures) for place in places]
    fresh = [place for place, number in zip(places, new, strict=True) if number]
    if not fresh:
        return _describe_known(places, comparison), False
    if len(fresh) < len(places):
        loaders, all_loaders = (len({id(place.loader) for place in some}) for some in (fresh, places))
        if loaders < all_loaders:
            return f"new in {loaders} of {counted(all_loaders, 'loader')}", True
        return f"new in {len(fresh)} of {counted(len(places), 'check')}", True
    found = sum(map(_parts, places))
    if sum(new) < found:
        return f"new in {sum(new)} of {counted(found, 'finding')}", True
    run = report.earlier[-1] if report.earlier else run_of(comparison.before) if comparison is not None else None
    return f"new since the run of {describe_moment(run)}" if run is not None else "", True


def _describe_known(places: Sequence[Place], comparison: Comparison | None) -> str:
    runs = [run for place in places for check in _checks(place) for run in starts_of(check)]
    if runs:
        return f"broken since {describe_moment(min(runs, key=lambda run: time_of(run.started)))}"
    is_known = comparison is not None and any(place.checks for place in places)
    return f"also in the run of {describe_moment(run_of(comparison.before))}" if comparison and is_known else ""


def _checks(place: Place) -> list[CheckRecord]:
    """Return the checks with those findings only that have the place's cause."""
    return [replace(check, findings=place.findings or check.findings) for check in place.checks]


def _parts(place: Place) -> int:
    return sum(len(check.findings) or 1 for check in _checks(place))


def _new_parts(place: Place, report: Report, failures: dict[tuple[str, str], Change]) -> int:
    """Return how many findings, or failures without any, were not there before, as far as is known."""
    this = run_of(report)
    return sum(_new_in(check, place, this, failures) for check in _checks(place))


def _new_in(check: CheckRecord, place: Place, this: EarlierRun, failures: dict[tuple[str, str], Change]) -> int:
    if check.history is not None:
        found = starts_of(check).get(this)
        return 0 if found is None else len(found) or 1
    names = place.loader.loader, f"{place.loader.loader}, {place.loader.world}"
    change = next((failures[name, check.check] for name in names if (name, check.check) in failures), None)
    if change is None:
        return 0
    known = failures_of(change.before) if change.before is not None else {}
    return sum(failure not in known for failure in failures_of(check))
