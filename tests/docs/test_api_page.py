"""``docs/api.md`` has every public name, and no other ones in its tables."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_fsdp_meta.plugin import hookspecs
from pytest_fsdp_meta.plugin.fixtures import RANK_ATTRIBUTES
from pytest_fsdp_meta.plugin.markers import fsdp_conformance, fsdp_spmd

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "api.md").read_text("utf-8")
LAZY = {"pytest_fsdp_meta": {"planned"}}
"""Names that a module's ``__getattr__`` gives."""


def public(module: str) -> set[str]:
    """Return ``__all__`` from the source: importing transformers takes seconds."""
    file = ROOT / module.replace(".", "/") / "__init__.py"
    for node in ast.parse(file.read_text("utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value)) | LAZY.get(module, set())
    raise AssertionError(f"{module} has no __all__")


def named(heading: str) -> set[str]:
    """Return the names in the first column of the table below a heading."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = [line.split(" | ")[0] for line in section.splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`@?([\w.]+)", row)}


@pytest.mark.parametrize("package", ["", ".catalogue", ".strategies", ".transformers"])
def test_every_public_name_is_on_the_page(package: str) -> None:
    module = f"pytest_fsdp_meta{package}"
    assert named(f"`{module}`") == public(module)


def test_every_hook_is_on_the_page() -> None:
    hooks = {name for name, _ in inspect.getmembers(hookspecs, inspect.isfunction)}
    assert named("Hooks") == hooks


def test_the_markers_and_fixtures_are_on_the_page() -> None:
    marks = {f"pytest.mark.{name}" for name in ("fsdp_conformance", "fsdp_spmd", "fsdp_world")}
    assert named("Markers and fixtures") == {*marks, "fsdp", "fsdp_world"}
    assert all(f"`{name}" in PAGE for name in RANK_ATTRIBUTES)


@pytest.mark.parametrize("decorator", [fsdp_conformance, fsdp_spmd], ids=["fsdp_conformance", "fsdp_spmd"])
def test_the_decorators_have_their_arguments(decorator: Callable[..., object]) -> None:
    arguments = ", ".join(f"{name}=" for name in inspect.signature(decorator).parameters)
    assert f"`@{decorator.__name__}({arguments})`" in PAGE
