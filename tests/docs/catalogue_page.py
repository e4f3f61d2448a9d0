"""The catalogue page of the documentation: ``python -m tests.docs.catalogue_page`` prints it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import groupby

from pytest_fsdp_meta.catalogue import Check, built_in
from pytest_fsdp_meta.reports.terminal import describe_needs

GITHUB = re.compile(r"([\w.-]+/[\w.-]+)#(\d+)")
INTRODUCTION = """\
<!-- Generated from the checks by `make docs`; a test keeps it current. -->
# The catalogue

Every check is a promise about the loaded model, with a judge that reads the evidence. A tensor that has failed a more
basic check is not judged again by later checks, which say how many tensors they left out, and why.
`pytest --fsdp-list-checks` prints the promises; `only=`, `skip=` and `xfail=` of `@fsdp_conformance` take the ids.
"""


def catalogue_page(checks: Iterable[Check]) -> str:
    """Return the whole page: a table of the checks, then each check by family."""
    listed = list(checks)
    return "\n".join([INTRODUCTION, *_contents(listed), *_families(listed)])


def _contents(checks: list[Check]) -> Iterator[str]:
    yield "| check | promise |"
    yield "|---|---|"
    for check in checks:
        yield f"| [`{check.id}`](#{check.id}) | {check.promise} |"
    yield ""


def _families(checks: list[Check]) -> Iterator[str]:
    for family, members in groupby(checks, lambda check: check.family):
        yield f"## {family.capitalize()}\n"
        for check in members:
            yield from _check(check)


def _check(check: Check) -> Iterator[str]:
    yield f"### {check.id}\n"
    yield f"**Promise:** {check.promise}.\n"
    yield f"* Why it matters: {check.why}"
    yield f"* Typical cause: {check.cause}."
    yield f"* Usual remedy: {check.remedy}."
    yield f"* Needs of `Subject`: {describe_needs(check) or 'the model alone'}."
    yield f"* Evidence: {_evidence(check)}."
    if check.tolerance:
        allowed = ", ".join(f"{value:g} in {dtype}" for dtype, value in check.tolerance.items())
        measured = "[the noise](how.md#noise); else " if check.family == "training" else ""
        yield f"* Relative tolerance, unless `tolerance=` sets another: {measured}{allowed}."
    if check.after:
        yield f"* Runs after: {', '.join(f'[`{id}`](#{id})' for id in check.after)}."
    if check.references:
        yield f"* Seen in: {', '.join(map(_with_links, check.references))}."
    yield ""


def _evidence(check: Check) -> str:
    optional = f"; where available, {', '.join(check.uses)}" if check.uses else ""
    return ", ".join(check.needs) + optional


def _with_links(reference: str) -> str:
    return GITHUB.sub(r"[\1#\2](https://github.com/\1/issues/\2)", reference)


if __name__ == "__main__":
    print(catalogue_page(built_in()), end="")
