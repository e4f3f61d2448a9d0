"""Lay out Python source as ruff formats it: calls, comments, and imports in order."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterable
from typing import Any

WIDTH = 88
"""Columns of a line, as ruff and black format by default."""


def indent(lines: Iterable[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def comment(text: str) -> list[str]:
    """Return the comment in lines that still fit when they are indented twice."""
    return textwrap.wrap(
        text, WIDTH - 8, initial_indent="# ", subsequent_indent="# ", break_long_words=False, break_on_hyphens=False
    )


def todo(start: str, what: str, end: str = "", within: int = 4) -> list[str]:
    """Return the lines of a call of ``todo`` that will be indented by ``within``, as ruff formats a long text."""
    line = f"{start}todo({quoted(what)}){end}"
    if len(line) + within <= WIDTH:
        return [line]
    parts = textwrap.wrap(what, WIDTH - within - 7, break_long_words=False, break_on_hyphens=False)
    texts = [quoted(part + " " * (part is not parts[-1])) for part in parts]
    return [f"{start}todo(", *indent(texts), f"){end}"]


def quoted(text: str) -> str:
    """Return the string as ruff writes it: in double quotes, unless that needs more backslashes."""
    return repr(text) if '"' in text else f'"{text}"'


def literal(value: Any) -> str:
    """Return the value as ruff writes it."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{literal(key)}: {literal(one)}' for key, one in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(literal, value))}]"
    return quoted(value) if isinstance(value, str) else repr(value)


def call(start: str, arguments: list[str], within: int = 4) -> list[str]:
    """Return the lines of a call that will be indented by ``within``: one line if that is short enough."""
    line = f"{start}({', '.join(arguments)})"
    if len(line) + within <= WIDTH or not arguments:
        return [line]
    return [f"{start}(", *indent(f"{argument}," for argument in arguments), ")"]


def function(head: str, doc: str, body: list[str]) -> str:
    return "\n".join([head, *indent([f'"""{doc}"""', *body])])


def import_lines(imports: set[tuple[str, str]], is_own: Callable[[str], bool]) -> str:
    """Return the import statements of (module, name) in ruff's order: standard library, other packages, the project's.

    The name is empty for ``import module``.
    """
    sections: list[list[str]] = [[], [], []]
    for module in sorted({module for module, _ in imports}):
        standard = module.partition(".")[0] in sys.stdlib_module_names
        names = sorted((name for one, name in imports if one == module and name), key=_member_order)
        place = 0 if standard else 2 if is_own(module) else 1
        if (module, "") in imports:
            sections[place].append(f"import {module}")
        if names:
            line = f"from {module} import {', '.join(names)}"
            long = [f"from {module} import (", *indent(f"{name}," for name in names), ")"]
            sections[place].append(line if len(line) <= WIDTH else "\n".join(long))
    for section in sections:
        section.sort(key=lambda line: line.startswith("from"))  # stable: "import x" comes first
    return "\n\n".join("\n".join(section) for section in sections if section)


def _member_order(name: str) -> tuple[int, str]:
    """Sort constants before classes before functions."""
    return (0 if name.isupper() and len(name) > 1 else 1 if name[0].isupper() else 2), name
