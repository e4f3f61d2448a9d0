"""The catalogue as a page of Markdown, made from the checks: ``python -m pytest_fsdp_meta.reports.catalogue_page``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import groupby

from pytest_fsdp_meta.catalogue import Check, built_in
from pytest_fsdp_meta.reports.terminal import describe_needs

GITHUB = re.compile(r"([\w.-]+/[\w.-]+)#(\d+)")
INTRODUCTION = """\
<!-- Made from the checks by `make docs`; a test keeps it current. -->
# The catalogue

Every check is a promise with a judge. A tensor that a more basic check has condemned is not judged again by a later
one, which then says how many tensors it left out and why. `pytest --fsdp-list-checks` prints the promises; `only=`,
`skip=` and `xfail=` of `@fsdp_conformance` take the ids.
"""


def catalogue_page(checks: Iterable[Check]) -> str:
    """The whole page: a table of contents by family, then every check."""
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
        yield f"* Tolerance, relative, unless `tolerance=` sets another: {allowed}."
    if check.after:
        yield f"* Comes after: {', '.join(f'[`{id}`](#{id})' for id in check.after)}."
    if check.references:
        yield f"* Seen in: {', '.join(map(_linked, check.references))}."
    yield f"* Since: {check.since}.\n"


def _evidence(check: Check) -> str:
    used = f"; where there is any, {', '.join(check.uses)}" if check.uses else ""
    return ", ".join(check.needs) + used


def _linked(reference: str) -> str:
    return GITHUB.sub(r"[\1#\2](https://github.com/\1/issues/\2)", reference)


if __name__ == "__main__":
    print(catalogue_page(built_in()), end="")
