"""From evidence to a verdict, without ranks and without torch."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from weakref import WeakKeyDictionary

from pytest_fsdp_meta.catalogue.findings import Finding
from pytest_fsdp_meta.catalogue.registry import Catalogue, Check
from pytest_fsdp_meta.catalogue.view import Blocked, NotDeclared, NotJudged, NotTaken, PartlyJudged, Unjudgeable, View
from pytest_fsdp_meta.evidence import Evidence
from pytest_fsdp_meta.text import counted, first_line

AS_LOADED = ("inventory", "reference", "values", "verifier")
"""Observations that look at the model and do not use it."""
EXPLAINING_A_CRASH = ("structure", "materialisation")
"""Families whose findings may explain why the model fails when it is used, whatever it is used for."""
PACKAGE = Path(__file__).parents[1]
KEPT = "kept by what could be judged"
KINDS = {"undeclared": "not declared", "blocked": "depends on a failed check", "unselected": "not selected"}
"""``Unavailable.kind`` -> ``Verdict.why``."""


@dataclass(frozen=True)
class Verdict:
    """``status`` is "passed", "failed", "skipped" or "error"; ``reason`` says why it is not a plain pass or fail.

    ``unjudged`` maps each more basic check to the tensors that it condemned and that were therefore left out here.
    ``model`` has the names of the model by kind, "parameter" or "buffer", beside which those of findings may be all.
    Where ``status`` is "skipped", ``why`` is the kind of the skip: "not declared" (a field of Subject is missing),
    "depends on a failed check", "not selected" (no selected check asked for the observation), "not applicable" (the
    model has nothing of the kind), or "partly checked" (something could not be judged, and the rest passed).
    """

    check: Check
    status: str
    findings: tuple[Finding, ...] = ()
    reason: str = ""
    detail: str = ""
    unjudged: dict[str, tuple[str, ...]] = field(default_factory=dict)
    model: Mapping[str, frozenset[str]] = field(default_factory=dict)
    why: str = ""


_Memo = WeakKeyDictionary[Catalogue, dict[tuple[int, Check], Verdict]]
"""Weak keys: the id() of a catalogue that was deleted may be given to the next one."""


def judge(check: Check, evidence: Evidence, catalogue: Catalogue) -> Verdict:
    """Return the verdict of one check; it is computed once per evidence, catalogue and number of checks in it."""
    by_catalogue: _Memo = evidence.memo.setdefault("verdicts", WeakKeyDictionary())
    verdicts = by_catalogue.setdefault(catalogue, {})
    key = len(catalogue), check
    if key not in verdicts:
        verdicts[key] = _judge(check, evidence, catalogue)
    return verdicts[key]


def _judge(check: Check, evidence: Evidence, catalogue: Catalogue) -> Verdict:
    failed = tuple(id for id in check.after if judge(catalogue[id], evidence, catalogue).findings)
    for need in check.needs:
        if need in evidence.unavailable:
            return _unavailable(check, need, evidence, catalogue, failed)
    view = View(evidence, check.id, check.tolerance, _condemned(check, evidence, catalogue), failed)
    findings: list[Finding] = []
    reason = ""
    try:
        findings.extend(_worded(check, finding) for finding in _found(check, view))
    except Unjudgeable as error:
        if not findings:
            return Verdict(check, "error", reason=str(error), unjudged=view.left_out)
        reason = str(error)
    except NotTaken as error:
        return _unavailable(check, str(error), evidence, catalogue, failed)
    except NotJudged as error:
        if not findings:
            return _not_judged(check, error, view)
        reason = str(error)
    except Exception as error:
        if check.built_in:
            raise
        reason = f"the own check {check.id} raised {_one_line(error)}"
        if not findings:
            return Verdict(check, "error", reason=reason, detail=_traceback(error), unjudged=view.left_out)
    if findings:
        return Verdict(check, "failed", tuple(findings), reason, unjudged=view.left_out, model=_by_kind(evidence))
    if view.left_out:
        reason = f"{KEPT}; {describe_left_out(view.left_out)}"
        return Verdict(check, "skipped", reason=reason, unjudged=view.left_out, why=KINDS["blocked"])
    return Verdict(check, "passed")


def _not_judged(check: Check, error: NotJudged, view: View) -> Verdict:
    reason, why = str(error), KINDS["blocked"] if isinstance(error, Blocked) else "not applicable"
    if isinstance(error, NotDeclared):
        why = KINDS["undeclared"]
    elif isinstance(error, PartlyJudged):
        reason, why = f"{KEPT}; {error}", KINDS["blocked"] if view.left_out else "partly checked"
    return Verdict(check, "skipped", reason=reason, unjudged=view.left_out, why=why)


def _by_kind(evidence: Evidence) -> dict[str, frozenset[str]]:
    tensors = [tensor for rank in evidence.inventory for tensor in rank.tensors]
    return {kind: frozenset(t.name for t in tensors if t.kind == kind) for kind in ("parameter", "buffer")}


def _unavailable(check: Check, need: str, evidence: Evidence, catalogue: Catalogue, failed: Sequence[str]) -> Verdict:
    why = evidence.unavailable[need]
    if not why.error:
        return Verdict(check, "skipped", reason=why.summary, why=KINDS.get(why.kind, "not applicable"))
    if need not in AS_LOADED:  # what uses a model that is missing tensors, or has wrong ones, may well fail
        basic = _failed_basics(check, evidence, catalogue) if need != "repetition" else ()
        if by := ", ".join(dict.fromkeys((*failed, *basic))):
            reason = f"{why.summary}; the findings of {by} may explain it"
            return Verdict(check, "skipped", reason=reason, why=KINDS["blocked"])
    return Verdict(check, "error", reason=why.summary, detail=why.detail)


def _failed_basics(check: Check, evidence: Evidence, catalogue: Catalogue) -> Iterator[str]:
    """The checks before this one that found the model itself wrong, in its ``after`` or not.

    What a model crashes of, every check that uses it meets, so all of them have to tell it alike.
    """
    for one in takewhile(lambda one: one.id != check.id, catalogue):
        basic = one.family in EXPLAINING_A_CRASH and set(one.needs) <= set(AS_LOADED)
        if basic and judge(one, evidence, catalogue).findings:
            yield one.id


def _one_line(error: Exception) -> str:
    text = first_line(error, 200)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _traceback(error: Exception) -> str:
    """Where it was raised, by its author's frames: those of this package say nothing about an own check."""
    told = traceback.TracebackException.from_exception(error)
    frames = [frame for frame in told.stack if not Path(frame.filename).is_relative_to(PACKAGE)]
    told.stack = traceback.StackSummary.from_list(frames)
    return "".join(told.format()).rstrip()


def describe_left_out(left_out: dict[str, tuple[str, ...]]) -> str:
    """ "not judged: 3 tensors that no_meta_params condemned (first: model.norm.weight)"."""
    parts = []
    for by, names in left_out.items():
        parts.append(f"{counted(len(names), 'tensor')} that {by} condemned (first: {names[0]})")
    return "not judged: " + ", ".join(parts)


def _condemned(check: Check, evidence: Evidence, catalogue: Catalogue) -> dict[str, str]:
    condemned: dict[str, str] = {}
    for id in check.after:
        for finding in judge(catalogue[id], evidence, catalogue).findings:
            for name in finding.condemns or filter(None, [finding.tensor]):
                condemned.setdefault(name, id)
    return condemned


def _found(check: Check, view: View) -> Iterable[Finding]:
    found = check.judge(view)
    if isinstance(found, Finding):
        raise TypeError("it returned a Finding; yield each, or return a list of them")
    return found


def _worded(check: Check, finding: Finding) -> Finding:
    if not check.built_in:
        finding = _plain(finding)
    return replace(finding, cause=finding.cause or check.cause, remedy=finding.remedy or check.remedy)


def _plain(finding: Finding) -> Finding:
    """With ranks that are plain numbers, whatever the judge counts with. Raises TypeError for what is no text."""
    for name in ("tensor", "actual", "expected", "detail", "cause", "remedy"):
        value = getattr(finding, name)
        if not isinstance(value, str) and not (name == "tensor" and value is None):
            raise TypeError(f"Finding({name}={value!r:.60}), but it should be a str")
    return replace(finding, ranks=tuple(int(rank) for rank in finding.ranks), condemns=tuple(finding.condemns))
