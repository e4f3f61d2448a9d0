"""A verdict as the terminal shows it: the promise, what broke it, why probably, and how to see it again."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from pytest_fsdp_meta.catalogue import Check, Finding, Verdict, describe_left_out
from pytest_fsdp_meta.reports.schema import FindingRecord
from pytest_fsdp_meta.text import counted, fold_names, name_ranks

MOST_LINES = 20
FEWEST_OF_ALL = 4
"""Fewer tensors are told by their names, even where the model has no others of their kind."""
FIELDS = {
    "reference": "reference",
    "values": "reference",
    "verifier": "verifier or reference, and something frozen",
    "training": "batch",
    "continued": "batch",
}
"""What an author declares for an observation to be taken."""
WIDTH = 118
Found = TypeVar("Found", Finding, FindingRecord)


def printable(name: str) -> str:
    """A name may hold anything; a control character would not stay in its line."""
    return name if name.isprintable() else repr(name)[1:-1]


def describe_failure(verdict: Verdict, world: str, again: str) -> str:
    """The whole message of a failed check."""
    check = verdict.check
    lines = [f"{check.id}: {check.promise}", f"broken in a {world}:"]
    for (cause, remedy), findings in by_cause(verdict.findings).items():
        lines += [
            "",
            *_lines(findings, verdict.model),
            "",
            paragraph("likely cause: ", cause),
            paragraph("remedy: ", remedy),
        ]
    if verdict.unjudged:
        lines += ["", describe_left_out(verdict.unjudged)]
    if verdict.reason:
        lines += ["", f"and not judged: {verdict.reason}"]
    return "\n".join([*lines, "", f"run it again: {again}"])


def describe_error(check: Check, reason: str, detail: str, again: str) -> str:
    """The message of a check that could not be judged because something went wrong."""
    story = detail if detail.startswith(reason) else "\n\n".join(filter(None, [reason, detail]))
    return f"{check.id} could not be judged: {story}\n\nrun it again: {again}"


def describe_checks(checks: Iterable[Check]) -> str:
    """The catalogue for ``--fsdp-list-checks``."""
    lines: list[str] = []
    family = ""
    for check in checks:
        if check.family != family:
            family = check.family
            lines += ["", family]
        needs = describe_needs(check)
        lines.append(textwrap.fill(check.promise, WIDTH, initial_indent=f"  {check.id}: ", subsequent_indent="      "))
        if needs:
            lines.append(f"      needs of Subject: {needs}")
    return "\n".join(lines[1:])


def describe_needs(check: Check) -> str:
    """The fields of Subject without which there is nothing to judge; empty where the model is enough."""
    observed = (FIELDS[need] for need in check.needs if need in FIELDS)
    return ", ".join(dict.fromkeys((*observed, *check.fields)))


def describe_finding(found: Finding | FindingRecord) -> str:
    """One finding in one line."""
    detail = f" ({found.detail})" if found.detail else ""
    what = "the model" if found.tensor is None else printable(found.tensor)
    return f"{what}, {name_ranks(found.ranks)}: {found.actual}, but should be {found.expected}{detail}"


def by_cause(findings: Iterable[Found]) -> dict[tuple[str, str], list[Found]]:
    """(cause, remedy) -> what it has broken, in the order in which the judge told them."""
    groups: dict[tuple[str, str], list[Found]] = {}
    for finding in findings:
        groups.setdefault((finding.cause, finding.remedy), []).append(finding)
    return groups


def alike(findings: Iterable[Found]) -> list[list[Found]]:
    """Those that broke the promise in the same way on the same ranks; what is true of the whole model for itself."""
    groups: dict[tuple[object, ...], list[Found]] = {}
    for finding in findings:
        key = (finding.tensor is None, finding.actual, finding.expected, finding.ranks)
        groups.setdefault(key, []).append(finding)
    return list(groups.values())


def _lines(findings: Sequence[Finding], model: Mapping[str, frozenset[str]]) -> list[str]:
    """One line per set of like tensors that broke the promise in the same way on the same ranks."""
    lines = [line for group in alike(findings) for line in _alike(group, model)]
    if len(lines) > MOST_LINES:
        left = len(lines) - MOST_LINES
        lines = [*lines[:MOST_LINES], f"  ... and {counted(left, 'line')} more"]
    return lines


def _alike(group: Sequence[Finding], model: Mapping[str, frozenset[str]]) -> list[str]:
    first = group[0]
    ranks = name_ranks(first.ranks)
    tail = f"{first.actual}, but should be {first.expected}"
    if first.tensor is None:
        told = dict.fromkeys(finding.detail for finding in group)
        return [f"  the model, {ranks}: {tail}" + (f" ({detail})" if detail else "") for detail in told]
    details = {printable(str(finding.tensor)): finding.detail for finding in group}
    lines = []
    for folded, name in _folded(list(details), model).items():
        detail = details[name]
        where = "" if name == folded or not detail else f"{name}: "
        lines.append(f"  {folded}, {ranks}: {tail}" + (f" ({where}{detail})" if detail else ""))
    return lines


def _folded(names: Sequence[str], model: Mapping[str, frozenset[str]]) -> dict[str, str]:
    """What to call the names, with the first name of each; all of a kind, where they are many, by their number."""
    folded: dict[str, str] = {}
    left = list(names)
    for kind, known in model.items():
        if len(known) >= FEWEST_OF_ALL and known <= set(names):
            folded[f"all {len(known)} {kind}s"] = next(name for name in names if name in known)
            left = [name for name in left if name not in known]
    return folded | fold_names(left)


def paragraph(label: str, text: str) -> str:
    indent = " " * len(label)
    return textwrap.fill(
        text, WIDTH, initial_indent=label, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
