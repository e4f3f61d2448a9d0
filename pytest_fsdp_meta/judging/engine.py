"""Judge evidence: turn the evidence of a trial into one verdict per check."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple
from weakref import WeakKeyDictionary

from pytest_fsdp_meta.checks.simulation.facts import NO_VALUES
from pytest_fsdp_meta.evidence import VALUES_CHECKS, Evidence, Unavailable
from pytest_fsdp_meta.judging.findings import Finding
from pytest_fsdp_meta.judging.registry import Catalogue, Check
from pytest_fsdp_meta.judging.smaller_worlds import add_smaller_worlds
from pytest_fsdp_meta.judging.view import (
    DEPENDS,
    Blocked,
    Differs,
    NotDeclared,
    Noted,
    NotJudged,
    NotTaken,
    PartlyJudged,
    Selection,
    Unjudgeable,
    View,
)
from pytest_fsdp_meta.text import counted, first_line

AS_LOADED = ("inventory", "reference", "values", "verifier", "repetition")
"""Observations that load the model and inspect it, without running it: no finding explains an error there."""
EXPLAINING_A_CRASH = {"structure", "materialisation", "tying", "shards_tile_the_tensor", "optimizer_owns_parameters"}
"""Families and checks whose findings may explain an error raised while running or saving the model."""
PACKAGE = Path(__file__).parents[1]
REST_PASSED = "the rest passed"
RETRAINED = "requires_grad_matches_reference"
"""The check whose findings the reference shares, as it trains what the loader trains."""
KINDS = {
    "undeclared": NotDeclared.why,
    "unselected": "not selected",
    "unsupported": "not supported",
    "refused": PartlyJudged.why,
}
"""``Unavailable.kind`` -> ``Verdict.why``."""


@dataclass(frozen=True)
class Verdict:
    """The outcome of one check.

    ``status`` is "passed", "failed", "skipped" or "error"; ``reason`` says what was not judged and why;
    of a check that passed, what else is to be known.
    ``unjudged`` maps each more basic check to the tensors that already failed it and were therefore left out here.
    ``model`` has the names of all tensors by kind ("parameter", "buffer"; "trainable parameter" if some are not), so
    that reports recognise a finding about all of them. ``ties`` has the names that are one parameter on all ranks.
    Where ``status`` is "skipped", ``why`` is the kind of the skip: "not declared" (a field of Subject is missing),
    "depends on a failed check", "not selected" (no selected check asked for the observation), "not supported" (by this
    release of torch), "not applicable" (the model has nothing of the kind), "partly checked" (something could not be
    judged, and the rest passed), or "differs" (a measured difference is beyond its limit, and is not judged).
    ``missing_field`` is the field, if a single one is missing.
    ``by`` are the checks that may explain what was not judged.
    """

    check: Check
    status: str
    findings: tuple[Finding, ...] = ()
    reason: str = ""
    detail: str = ""
    unjudged: dict[str, tuple[str, ...]] = field(default_factory=dict)
    model: Mapping[str, frozenset[str]] = field(default_factory=dict)
    ties: frozenset[frozenset[str]] = frozenset()
    why: str = ""
    missing_field: str = ""
    by: tuple[str, ...] = ()


_Memo = WeakKeyDictionary[Catalogue, dict[tuple[int, Selection, Check], Verdict]]
"""Weak keys: the id() of a catalogue that was deleted may be given to the next one."""
EVERY_CHECK = Selection()


def judge(check: Check, evidence: Evidence, catalogue: Catalogue, selection: Selection = EVERY_CHECK) -> Verdict:
    """Return the verdict of one check, computed once per evidence, catalogue and selection.

    A check skips the tensors in which a more basic check of the selection found something. If the selection lacks the
    more basic check, this one judges them.
    """
    run = _Run(evidence, catalogue, selection)
    verdict = run.judged(check)
    return _name_the_explaining(verdict, run) if verdict.by else verdict


class _Run(NamedTuple):
    evidence: Evidence
    catalogue: Catalogue
    selection: Selection

    def judged(self, check: Check) -> Verdict:
        """Return the verdict before those checks are named that explain it: they may be judged after this one."""
        by_catalogue: _Memo = self.evidence.memo.setdefault("verdicts", WeakKeyDictionary())
        verdicts = by_catalogue.setdefault(self.catalogue, {})
        key = len(self.catalogue), self.selection, check  # a check added to the catalogue may change earlier verdicts
        if key not in verdicts:
            verdicts[key] = _judge(check, self)
        return verdicts[key]

    def findings(self, check_id: str) -> tuple[Finding, ...]:
        """Return the findings of a check in the selection, else ()."""
        return self.judged(self.catalogue[check_id]).findings if check_id in self.selection else ()

    def fails(self, check_id: str) -> bool:
        """Return whether the check has findings that fail the run."""
        return check_id not in self.selection.xfailing and bool(self.findings(check_id))


def _judge(check: Check, run: _Run) -> Verdict:
    evidence = run.evidence
    if evidence.world.simulated and not check.simulated:
        return Verdict(check, "skipped", reason=NO_VALUES, why="not applicable")
    for need in (*check.needs, check.id):
        if need in evidence.unavailable:
            return _unavailable(check, need, run)
    # Where the check of requires_grad is expected to fail, it explains nothing: the reference trains what ranks train.
    shared = {RETRAINED} & {*run.selection.xfailing}
    failed = tuple(id for id in check.after if id not in shared and run.findings(id))
    view = View(evidence, check.id, check.tolerance, _already_failed(check, run), failed, run.selection)
    findings: list[Finding] = []
    reason = note = ""
    try:
        found = check.judge(view)
        if isinstance(found, Finding):
            raise TypeError("it returned a Finding; yield findings, or return a list of them")
        findings.extend(_complete(check, finding, run) for finding in found)
    except Unjudgeable as error:
        if not findings:
            return Verdict(check, "error", reason=str(error), unjudged=view.left_out)
        reason = str(error)
    except Noted as error:
        note = str(error)
    except NotTaken as error:
        return _unavailable(check, str(error), run)
    except NotJudged as error:
        if not findings:
            return _not_judged(check, error, view, run)
        reason = str(error)
    except Exception as error:
        reason = f"the custom check {check.id} raised {_one_line(error)}"
        if check.built_in:
            reason = f"this check of pytest-fsdp-meta raised {_one_line(error)}; please report this"
        if not findings:
            return Verdict(check, "error", reason=reason, detail=_traceback(check, error), unjudged=view.left_out)
    if findings:
        findings = add_smaller_worlds(check, findings, evidence.smaller)
        model, ties = _by_kind(evidence), _ties(evidence)
        return Verdict(check, "failed", tuple(findings), reason, unjudged=view.left_out, model=model, ties=ties)
    if view.left_out:
        reason = describe_left_out(view.left_out) + (f"; {REST_PASSED}" if view.has_judgeable else "")
        return Verdict(check, "skipped", reason=reason, unjudged=view.left_out, why=_left_out_by(view, run))
    return Verdict(check, "passed", reason=note)


def _not_judged(check: Check, error: NotJudged, view: View, run: _Run) -> Verdict:
    if isinstance(error, Blocked):
        return Verdict(check, "skipped", reason=str(error), unjudged=view.left_out, why=error.why, by=error.by)
    reason, why, missing = str(error), error.why, ""
    if isinstance(error, NotDeclared):
        missing = error.field if error.field not in view.evidence.subject.declared else ""
    if view.left_out and isinstance(error, Differs):  # what was measured must not wait for a fix of other tensors
        reason = f"{error}; {describe_left_out(view.left_out)}"
    elif view.left_out:  # without these tensors, the reason alone may be false
        rest = f"{error}; {REST_PASSED}" if isinstance(error, PartlyJudged) else f"otherwise {error}"
        reason, why = f"{describe_left_out(view.left_out)}; {rest}", _left_out_by(view, run)
    return Verdict(check, "skipped", reason=reason, unjudged=view.left_out, why=why, missing_field=missing)


def _left_out_by(view: View, run: _Run) -> str:
    """Return the kind of a skip for tensors that were left out: partly checked if no check that they failed fails."""
    return DEPENDS if any(map(run.fails, view.left_out)) else PartlyJudged.why


def _name_the_explaining(verdict: Verdict, run: _Run) -> Verdict:
    """Say which of the checks explain what was not judged; if none of them fails the run, a difference remains."""
    known = [id for id in verdict.by if id in run.catalogue]
    # One that depends on a failed check itself may have left out the tensor that matters here.
    ids = dict.fromkeys(other for id in known for other in (id, *run.judged(run.catalogue[id]).unjudged))
    if failing := [id for id in ids if run.fails(id)]:
        reason = f"{verdict.reason.rstrip('.')}, which the findings of {', '.join(failing)} explain; fix those first"
        return replace(verdict, reason=reason)
    left_to = f"{', '.join(verdict.by)}, which {'do' if len(verdict.by) > 1 else 'does'} not fail this run"
    return replace(verdict, reason=f"{verdict.reason}; it is left to {left_to}", why=Differs.why)


def _by_kind(evidence: Evidence) -> dict[str, frozenset[str]]:
    tensors = [tensor for rank in evidence.inventory for tensor in rank.tensors]
    kinds = {kind: frozenset(t.name for t in tensors if t.kind == kind) for kind in ("parameter", "buffer")}
    trained = frozenset(t.name for t in tensors if t.kind == "parameter" and t.requires_grad)
    tied = frozenset(name for _, *others in evidence.inventory[0].ties() for name in others)
    parts = {"trainable parameter": trained, "distinct parameter": kinds["parameter"] - tied}
    return kinds | {kind: names for kind, names in parts.items() if names < kinds["parameter"]}


def _ties(evidence: Evidence) -> frozenset[frozenset[str]]:
    by_rank = [frozenset(map(frozenset, rank.ties())) for rank in evidence.inventory]
    return frozenset.intersection(*by_rank) if by_rank else frozenset()


def _unavailable(check: Check, need: str, run: _Run) -> Verdict:
    unavailable = run.evidence.unavailable[need]
    if not unavailable.error:
        why, missing = KINDS.get(unavailable.kind, NotJudged.why), unavailable.missing_field
        return Verdict(check, "skipped", reason=unavailable.summary, why=why, missing_field=missing)
    if need not in AS_LOADED and (by := tuple(_explaining(check, unavailable, run))):
        return Verdict(check, "skipped", reason=unavailable.summary, why=DEPENDS, by=by)
    return Verdict(check, "error", reason=unavailable.summary, detail=unavailable.detail)


def _explaining(check: Check, unavailable: Unavailable, run: _Run) -> Iterator[str]:
    """Yield the earlier checks that fail the run in one of the tensors that the error names."""
    for earlier in takewhile(lambda other: other.id != check.id, run.catalogue):
        if not EXPLAINING_A_CRASH.isdisjoint((earlier.family, earlier.id)) and run.fails(earlier.id):
            found = {name for finding in run.findings(earlier.id) for name in finding.failed_tensors}
            if earlier.id in unavailable.by or found.intersection(unavailable.names):
                yield earlier.id


def _one_line(error: Exception) -> str:
    text = first_line(error, 200)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _traceback(check: Check, error: Exception) -> str:
    """Format the traceback, of a custom check without the frames of this package, which do not help its author."""
    report = traceback.TracebackException.from_exception(error)
    frames = [one for one in report.stack if check.built_in or not Path(one.filename).is_relative_to(PACKAGE)]
    report.stack = traceback.StackSummary.from_list(frames)
    return "".join(report.format()).rstrip()


def describe_left_out(left_out: dict[str, tuple[str, ...]]) -> str:
    """Describe left-out tensors: "not checked: 3 tensors that already failed no_meta_params (first: norm.weight)"."""
    return "not checked: " + ", ".join(
        f"{counted(len(names), 'tensor')} that already failed {by} (first: {names[0]})"
        for by, names in left_out.items()
    )


def _already_failed(check: Check, run: _Run) -> dict[str, str]:
    """Return the tensors that failed a more basic check, mapped to the first such check."""
    already_failed: dict[str, str] = {}
    reference = run.evidence.reference
    # In these tensors the reference trained as the loader does, so that these findings do not make training differ.
    shared: dict[str, tuple[str, ...]] = {}
    if reference is not None and "training" in check.needs:
        shared = dict.fromkeys(VALUES_CHECKS.values(), reference.adopted)
        shared[RETRAINED] = reference.retrained if "reference" in check.needs else ()
    for id in check.after:
        for finding in run.findings(id):
            for name in finding.failed_tensors:
                if name not in shared.get(id, ()):
                    already_failed.setdefault(name, id)
    return already_failed


def _complete(check: Check, finding: Finding, run: _Run) -> Finding:
    """Add the cause and remedy of the check to a finding that has none of its own."""
    if not check.built_in:
        finding = _convert_types(finding)
    if basic := _cause_left_out(check, finding, run):
        return basic
    return replace(finding, cause=finding.cause or check.cause, remedy=finding.remedy or check.remedy)


def _cause_left_out(check: Check, finding: Finding, run: _Run) -> Finding | None:
    """Return the finding with the cause that a more basic check gives, if one that is not selected finds it too."""
    for id in check.after:
        if id in run.selection:
            continue
        for basic in run.judged(run.catalogue[id]).findings:
            if finding.tensor in basic.failed_tensors:
                cause = f"{id}, which this run leaves out, fails as well ({basic.actual}): {basic.cause}"
                return finding.explained_by({"cause": cause, "remedy": basic.remedy})
            if finding.tensor is None:
                other = f"{basic.tensor}: {basic.actual}" if basic.tensor else basic.actual
                cause = f"{finding.cause or check.cause}; or {id}, which this run leaves out and which fails ({other})"
                return finding.explained_by({"cause": cause, "remedy": finding.remedy or check.remedy})
    return None


def _convert_types(finding: Finding) -> Finding:
    """Convert ranks (NumPy integers, for example) to int. Raises TypeError for a text field that is not a str."""
    for name in ("tensor", "actual", "expected", "detail", "cause", "remedy"):
        value = getattr(finding, name)
        if not isinstance(value, str) and not (name == "tensor" and value is None):
            raise TypeError(f"Finding({name}={value!r:.60}): {name} should be a str")
    return replace(finding, ranks=tuple(int(rank) for rank in finding.ranks), condemns=tuple(finding.condemns))
