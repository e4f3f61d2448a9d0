"""The catalogue page of the documentation: ``python -m tests.docs.catalogue_page`` prints it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby

from pytest_fsdp_meta.catalogue import Catalogue, Check, built_in
from pytest_fsdp_meta.reports.terminal import describe_needs

GITHUB = re.compile(r"([\w.-]+/[\w.-]+)#(\d+)")
INTRODUCTION = """\
<!-- Generated from the checks by `make docs`; a test keeps it current. -->
# The catalogue

Each check is a promise about the loaded model, and compares it with what was observed on the ranks. A tensor that has
failed one check is left out of the checks that run after it; they say how many tensors they left out, and why.
`pytest --fsdp-list-checks` prints this table; `only=`, `skip=` and `xfail=` of `@fsdp_conformance` accept the names.

{running} checks judge a loader on running ranks. {simulated} more are for [simulated worlds](large-worlds.md) only:
{names}.
"""


def catalogue_page(checks: Catalogue) -> str:
    """Return the whole page: a table of the checks, then each check by family."""
    listed = list(checks)
    only = [check for check in listed if check.simulated == "only"]
    names = ", ".join(f"`{check.id}`" for check in only)
    introduction = INTRODUCTION.format(running=len(listed) - len(only), simulated=len(only), names=names)
    return "\n".join([introduction, *_contents(listed), *_families(checks)])


def _contents(checks: list[Check]) -> Iterator[str]:
    yield "| family | check | promise |"
    yield "|---|---|---|"
    for family, members in groupby(checks, lambda check: check.family):
        first = f"[{family}](#{family.replace(' ', '-')})"
        for check in members:
            yield f"| {first} | [`{check.id}`](#{check.id}) | {check.promise} |"
            first = ""
    yield ""


def _families(checks: Catalogue) -> Iterator[str]:
    for family, members in groupby(checks, lambda check: check.family):
        yield f"## {family.capitalize()}\n"
        for check in members:
            yield from _check(check, checks)


def _check(check: Check, checks: Catalogue) -> Iterator[str]:
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
        before = {id for other in check.after for id in checks[other].after}
        last = [id for id in check.after if id not in before]
        more = ", and more basic ones" if len(last) < len(check.after) else ""
        yield f"* Runs after: {', '.join(f'[`{id}`](#{id})' for id in last)}{more}."
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
