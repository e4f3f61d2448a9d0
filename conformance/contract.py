"""No measured difference is green: what a judge has compared and found beyond its limit must show in its verdict."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import wraps
from typing import Any

from pytest_fsdp_meta.catalogue import Catalogue, Check, Finding, Verdict, View, built_in, judge
from pytest_fsdp_meta.evidence import Evidence
from pytest_fsdp_meta.judging import limits

SEEN = {"differs", "depends on a failed check"}
"""Kinds of skips that a difference may end as; the second one names a check that fails."""
MEASURED = re.compile(r"\d\.\d|\de-\d")
PROVED = {
    # Gradients that the optimizer itself reduces, of parameters whose updates are the reference's.
    *("grad_parity", "second_grad_parity", "grad_clip_parity", "grad_accumulation_parity"),
    "replicas_stay_equal",  # of buffers that differ from the reference's alike on all ranks
}
"""Checks that pass although something is beyond a limit, because another observation proves that they may."""
_judging: list[str] = []
_beyond: set[str] = set()


def _noting(measure: Callable[..., bool]) -> Callable[..., bool]:
    @wraps(measure)
    def measured(*args: Any) -> bool:
        found = measure(*args)
        if found and _judging:
            _beyond.add(_judging[-1])
        return found

    return measured


for kind, names in {limits.Limits: ("too_far", "exceeded"), limits.LossLimits: ("exceeded",)}.items():
    for name in names:
        setattr(kind, name, _noting(getattr(kind, name)))


def _watched(check: Check) -> Check:
    @wraps(check.judge)
    def watch(view: View) -> Iterator[Finding]:
        _judging.append(check.id)
        try:
            yield from check.judge(view)
        finally:
            _judging.pop()

    return replace(check, judge=watch)


WATCHED = Catalogue(map(_watched, built_in()))


def judge_all(evidence: Evidence) -> dict[str, Verdict]:
    """Return the verdict of every built-in check. Raises AssertionError if one hides what was measured."""
    _beyond.clear()
    verdicts = {check.id: judge(check, evidence, WATCHED) for check in WATCHED}
    hidden = [verdict for id, verdict in verdicts.items() if id in _beyond and not _shows(verdict, verdicts)]
    measured = [v for v in verdicts.values() if v.why == "not applicable" and MEASURED.search(v.reason)]
    bad = [f"{v.check.id}: {v.why or v.status} ({v.reason})" for v in (*hidden, *measured)]
    assert not bad, "measured and beyond its limit, but hidden: " + "; ".join(bad)
    return verdicts


def _shows(verdict: Verdict, verdicts: dict[str, Verdict]) -> bool:
    if verdict.why == "depends on a failed check":
        by = {*verdict.by, *verdict.unjudged}
        return any(verdicts[id].status == "failed" for id in by)
    proved = verdict.check.id in PROVED and (verdict.status == "passed" or verdict.why == "partly checked")
    return verdict.status in ("failed", "error") or verdict.why in SEEN or proved
