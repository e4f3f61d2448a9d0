"""``docs/reference.md`` has every field of Subject, in the groups and with the words of its docstrings, and the checks
that each field enables.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import inspect
import re
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from pytest_fsdp_meta import Subject
from pytest_fsdp_meta.catalogue import built_in
from pytest_fsdp_meta.loader.subject import SIGNATURES
from pytest_fsdp_meta.reports.terminal import describe_needs

PAGE = (Path(__file__).parents[2] / "docs" / "reference.md").read_text("utf-8")
FIELDS = [field.name for field in dataclasses.fields(Subject) if field.name != "model"]
CHECKS = {check.id for check in built_in()}


def sections(text: str, level: str) -> dict[str, str]:
    """Return the text below each heading of a level, such as "##", by heading."""
    parts = re.split(rf"^{level} (.+)\n", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


GROUPS = sections(PAGE, "##")
SECTIONS = {field: text for group in GROUPS.values() for field, text in sections(group, "###").items()}


def described(field: str) -> dict[str, str]:
    """Return the list below the heading of a field, by the word before the colon."""
    items = re.findall(r"^\* (\w+): (.+(?:\n  .+)*)", SECTIONS[field], re.MULTILINE)
    return {label: " ".join(text.split()) for label, text in items}


def docstrings() -> dict[str, str]:
    """Return the first line of the docstring below each field, in the words of the page."""
    body = ast.parse(textwrap.dedent(inspect.getsource(Subject))).body[0]
    assert isinstance(body, ast.ClassDef)
    found = {}
    for field, below in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
            found[ast.unparse(field.target)] = ast.literal_eval(below.value).split("\n")[0].replace("``", "`")
    return found


def enabled_by(field: str) -> str:
    """Return the checks that need a field, in groups by the other fields that they need; "" if none needs it."""
    groups: dict[str, list[str]] = {}
    for check in built_in():
        needs = describe_needs(check).split(", ")
        needed = [[word for word in re.findall(r"\w+", need) if word in FIELDS] for need in needs]
        if any(field in need for need in needed):
            others = [" or ".join(f"`{one}`" for one in need) for need in needed if field not in need]
            groups.setdefault(" and ".join(others), []).append(f"`{check.id}`")
    return "; ".join(
        f"with {others}: {', '.join(ids)}" if others else ", ".join(ids) for others, ids in sorted(groups.items())
    )


def test_the_page_and_the_docstring_group_the_fields_alike() -> None:
    on_page = {group: list(sections(text, "###")) for group, text in GROUPS.items()}
    items = re.findall(r"^\* ([\w ]+): ((?:``\w+``[,.]\s+)+)", inspect.getdoc(Subject) or "", re.MULTILINE)
    assert on_page == {group: re.findall(r"\w+", fields) for group, fields in items}
    assert [field for fields in on_page.values() for field in fields] == FIELDS


def test_the_tables_list_the_fields_with_their_first_sentence() -> None:
    for text in GROUPS.values():
        rows = re.findall(r"^\| \[`(\w+)`\]\(#(\w+)\) \| (.+) \|$", text, re.MULTILINE)
        first = [(field, field, SECTIONS[field].strip().split("\n")[0]) for field in sections(text, "###")]
        assert [(*row, f"{sentence}.") for *row, sentence in rows] == first


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_is_described_as_in_its_docstring(field: str) -> None:
    sentence = SECTIONS[field].strip().split("\n")[0]
    assert docstrings()[field].startswith(sentence.removesuffix("."))


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_has_its_signature_and_default(field: str) -> None:
    items = described(field)
    assert [*items] == ["Signature" if "Signature" in items else "Value", "Default", "Enables", "Example"]
    assert ("Signature" in items) == ("Callable" in Subject.__dataclass_fields__[field].type or field in SOURCES)
    if field in SIGNATURES:
        assert items["Signature"].startswith(f"`{SIGNATURES[field]}`")


SOURCES = ("reference", "verifier", "export_reference", "adapter")
"""Fields that are functions by a name for their type."""


@pytest.mark.parametrize("field", FIELDS)
def test_the_checks_that_a_field_enables_are_those_of_the_registry(field: str) -> None:
    listed = described(field)["Enables"]
    assert listed == enabled_by(field) or (not enabled_by(field) and listed.startswith("no further check; "))
    named = {name for name in re.findall(r"`(\w+)`", listed) if name not in FIELDS}
    assert named <= CHECKS


RANK = SimpleNamespace(rank=2, world_size=4)


class Names(dict[str, Any]):
    """Stand-ins for the functions of a project that the examples name."""

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name):
            raise KeyError(name)
        return torch if name == "torch" else lambda *_: None


@pytest.mark.parametrize("field", FIELDS)
def test_the_example_of_a_field_is_accepted(field: str) -> None:
    example = described(field)["Example"].strip("`")
    assert example.startswith(f"{field}=")
    subject = eval(f"Subject(model, {example})", {}, Names(Subject=Subject, model=nn.Linear(2, 2), fsdp=RANK))
    assert getattr(subject, field) != Subject.__dataclass_fields__[field].default
