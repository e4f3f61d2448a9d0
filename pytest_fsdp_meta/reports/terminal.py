"""Messages for the terminal: a failed check with its findings, causes and rerun command, and the list of checks."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TypeVar

from pytest_fsdp_meta.catalogue import Check, Finding, Verdict, describe_left_out
from pytest_fsdp_meta.reports.schema import FindingRecord
from pytest_fsdp_meta.text import counted, first_of, fold_names, grouped, name_ranks, printable, without_numbers

MOST_LINES = 20
"""Lines of one list."""
MOST_ALIKE = 6
"""Most lines that differ only in numbers, before one line stands for them, and most names in that line."""
FEWEST_OF_ALL = 4
"""Fewer tensors are named one by one, even if they are all tensors of their kind."""
FIELDS = {
    "reference": "reference",
    "values": "reference",
    "verifier": "verifier or reference, and something frozen",
    "training": "batch",
    "continued": "batch",
    "training_mode": "batch",
    "not_finite": "batch",
    "batches": "data",
}
"""Observation -> the fields of Subject that it needs."""
WIDTH = 118
Found = TypeVar("Found", Finding, FindingRecord)
Kinds = Mapping[str, Collection[str]]
"""Kind of tensors, such as "parameter" -> all tensors of the kind."""


def shorten_list(lines: Iterable[str]) -> list[str]:
    """Return the first ``MOST_LINES`` lines, and how many are left out."""
    listed = list(lines)
    return listed if len(listed) <= MOST_LINES else [*listed[:MOST_LINES], f"... and {len(listed) - MOST_LINES} more"]


def describe_failure(verdict: Verdict, world: str, rerun_command: str) -> str:
    """Return the whole message of a failed check."""
    check = verdict.check
    lines = [f"{check.id}: {check.promise}", f"failed in a {world}:"]
    starts = origins(verdict.findings)
    if len(starts) == 1:
        lines += ["", paragraph("where it starts: ", starts[0])]
    for (cause, remedy), findings in by_cause(verdict.findings).items():
        advice = [paragraph(label, text) for label, text in (("likely cause: ", cause), ("remedy: ", remedy)) if text]
        if len(starts) > 1:  # each belongs to its findings
            advice[:0] = [paragraph("where it starts: ", start) for start in origins(findings)]
        found = [line for group in group_for_lines(findings) for line in _describe_group(group, verdict)]
        if len(found) > MOST_LINES:
            found = [*found[:MOST_LINES], f"  ... and {counted(len(found) - MOST_LINES, 'more line')}"]
        lines += ["", *found, *(["", *advice] if advice else [])]
    if verdict.unjudged:
        lines += ["", describe_left_out(verdict.unjudged)]
    if verdict.reason:
        lines += ["", f"and not judged: {verdict.reason}"]
    return "\n".join([*lines, "", f"rerun: {rerun_command}"])


def describe_error(subject: str, reason: str, detail: str, rerun_command: str) -> str:
    """Return the whole message of an error. ``subject`` is the loader, or the check that alone has the error."""
    text = detail if detail.startswith(reason) else "\n\n".join(filter(None, [reason, detail]))
    return f"{subject}: {text}\n\nrerun: {rerun_command}"


def describe_checks(checks: Iterable[Check]) -> str:
    """Return the catalogue as ``--fsdp-list-checks`` prints it."""
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
    """Return the fields of Subject that the check needs; "" if it needs only the model."""
    observed = (FIELDS[need] for need in check.needs if need in FIELDS)
    return ", ".join(dict.fromkeys((*observed, *check.fields)))


def describe_finding(found: Finding | FindingRecord) -> str:
    """Return one finding as one line: "<tensor>, <ranks>: <actual>, but should be <expected> (<detail>)"."""
    detail = f" ({found.detail})" if found.detail else ""
    tensor = "the model" if found.tensor is None else printable(found.tensor)
    return f"{tensor}, {name_ranks(found.ranks)}: {describe_mismatch(found)}{detail}"


def describe_mismatch(found: Finding | FindingRecord) -> str:
    """Return "<actual>, but should be <expected>"; "<actual>" alone if nothing is expected in its place."""
    return f"{found.actual}, but should be {found.expected}" if found.expected else found.actual


def by_cause(findings: Iterable[Found]) -> dict[tuple[str, str], list[Found]]:
    """Return (cause, remedy) -> the findings with this cause, in the order in which the judge reported them."""
    return grouped(((finding.cause, finding.remedy), finding) for finding in findings)


def origins(findings: Iterable[Found]) -> tuple[str, ...]:
    """Return where the differences that these findings describe start, each place once."""
    return tuple(dict.fromkeys(finding.origin for finding in findings if finding.origin))


def group_similar(findings: Iterable[Found], but_numbers: bool = False) -> list[list[Found]]:
    """Group findings that differ only in tensor and detail, or in numbers as well.

    Findings about the whole model have groups of their own.
    """

    def alike(finding: Found) -> object:
        text = describe_mismatch(finding)
        text = without_numbers(text) if but_numbers and finding.tensor is not None else text
        return finding.tensor is None, text, finding.ranks

    return list(grouped((alike(finding), finding) for finding in findings).values())


def group_for_lines(findings: Sequence[Found], most: int = MOST_ALIKE) -> list[list[Found]]:
    """Group similar findings. With more than ``most`` groups, mismatches that differ only in numbers are similar."""
    groups = group_similar(findings)
    return group_similar(findings, but_numbers=True) if len(groups) > most else groups


def describe_findings(findings: Sequence[Found], kinds: Kinds, with_detail: bool = True) -> str:
    """Return findings in one line: those of the first tensors that have one name, and the number of the others."""
    name, alike = _name_first(group_for_lines(findings)[0], kinds)
    note, more = describe_first(alike, with_detail), len(findings) - len(alike)
    line = f"{name}, {name_ranks(alike[0].ranks)}: {describe_mismatch(alike[0])}" + (f" ({note})" if note else "")
    return line + (f"; {counted(more, 'more finding')}" if more else "")


def describe_first(similar: Sequence[Found], with_detail: bool = True) -> str:
    """Return the detail of the first finding, and that detail or numbers are its own if others have other ones."""
    name, detail = printable(str(similar[0].tensor)), similar[0].detail if with_detail else ""
    if any(describe_mismatch(one) != describe_mismatch(similar[0]) for one in similar):
        return "; ".join(filter(None, [f"the numbers are those of {name}", detail]))
    return f"{name}: {detail}" if detail and any(one.detail != detail for one in similar) else detail


def _name_first(group: Sequence[Found], kinds: Kinds) -> tuple[str, Sequence[Found]]:
    """Return one name for the first tensors of similar findings, and their findings."""
    names = dict.fromkeys(one.tensor for one in group if one.tensor is not None)
    for text, known in _whole_kinds(names, kinds).items():
        return text, [one for one in group if one.tensor in known]
    folded = list(fold_names(names))
    if len(folded) == 1 < len(names):
        return printable(folded[0]), group
    return printable(next(iter(names), "the model")), group[:1]


def _describe_group(group: Sequence[Finding], verdict: Verdict) -> list[str]:
    """Return one line for each set of similar tensors with the same mismatch on the same ranks."""
    ranks, mismatch = name_ranks(group[0].ranks), describe_mismatch(group[0])
    if group[0].tensor is None:
        distinct = dict.fromkeys(finding.detail for finding in group)
        return [f"  the model, {ranks}: {mismatch}" + (f" ({detail})" if detail else "") for detail in distinct]
    details = {printable(str(finding.tensor)): finding.detail for finding in group}
    names = fold_tensors(list(details), verdict.model)
    if any(describe_mismatch(finding) != mismatch for finding in group):
        return [f"  {first_of(list(names), MOST_ALIKE)}, {ranks}: {mismatch} ({describe_first(group)})"]
    lines, shown = [], set[str]()
    for folded, name in names.items():
        detail = details[name]
        where = "" if name == folded or not detail else f"{name}: "
        same = next((tie - {name} for tie in verdict.ties if folded in tie), frozenset[str]())
        also = [other for other in names if other in same and details[other] == detail]
        tied = f" (also {', '.join(also)}, tied to it)" if also else ""
        if name not in shown:
            lines.append(f"  {folded}{tied}, {ranks}: {mismatch}" + (f" ({where}{detail})" if detail else ""))
        shown.update(also)
    return lines


def fold_tensors(names: Sequence[str], kinds: Kinds) -> dict[str, str]:
    """Return a text for several names -> the first of them. All tensors of a kind become "all 40 buffers"."""
    folded: dict[str, str] = {}
    left = list(names)
    for text, known in _whole_kinds(names, kinds).items():
        if known.issubset(left):  # else a larger kind has them
            folded[text] = next(name for name in names if name in known)
            left = [name for name in left if name not in known]
    return folded | fold_names(left)


def _whole_kinds(names: Iterable[str], kinds: Kinds) -> dict[str, frozenset[str]]:
    """Return a text such as "all 40 buffers" -> their names, for the kinds of which every tensor is named."""
    return {f"all {len(known)} {kind}s": frozenset(known) for kind, known in complete_kinds(names, kinds).items()}


def complete_kinds(names: Iterable[str], kinds: Kinds) -> dict[str, tuple[str, ...]]:
    """Return the kinds of which every tensor is named, unless they have so few that these are named one by one."""
    given = set(names)
    return {
        kind: tuple(sorted(known))
        for kind, known in kinds.items()
        if len(known) >= FEWEST_OF_ALL and given.issuperset(known)
    }


def paragraph(label: str, text: str) -> str:
    """Return a label and its text, wrapped and indented to the width of the label."""
    indent = " " * len(label)
    return textwrap.fill(
        text, WIDTH, initial_indent=label, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
