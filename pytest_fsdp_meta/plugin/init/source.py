"""Read the source of a loader, and of the functions and classes of its project that it calls, without calling it."""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

MOST = 60
"""How many functions and classes are read at most."""


@dataclass(frozen=True, eq=False)
class Source:
    """The syntax tree of one function, or of ``__init__`` for a class, and the names that its module has."""

    owner: Any
    tree: ast.FunctionDef
    file: Path
    cls: type | None = None
    """The class of a method."""

    @cached_property
    def names(self) -> Mapping[str, Any]:
        """Global names, and those that imports in its body give; ``self`` stands for its class, as ``cls`` does."""
        module = inspect.getmodule(self.owner)
        names = (node for node in ast.walk(self.tree) if isinstance(node, ast.Name))
        stored = [node.id for node in names if isinstance(node.ctx, ast.Store)]
        return {
            **(vars(module) if module is not None else {}),
            **dict.fromkeys([*stored, *self.parameters]),
            **_imported_inside(self.tree),
            **dict.fromkeys(("self", "cls"), self.cls),
        }

    @cached_property
    def assigned(self) -> Mapping[str, ast.expr]:
        """Local names -> what is assigned to them, where that is done once."""
        found: dict[str, list[ast.expr]] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Assign) and len(node.targets) == 1:
                found.setdefault(ast.unparse(node.targets[0]), []).append(node.value)
        return {name: values[0] for name, values in found.items() if len(values) == 1}

    @property
    def calls(self) -> Iterator[ast.Call]:
        return (node for node in ast.walk(self.tree) if isinstance(node, ast.Call))

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        """The names of the parameters: those of ``__init__`` for a class."""
        function: Any = self.owner
        if isinstance(self.owner, type):
            function = inspect.getattr_static(self.owner, "__init__")
        with suppress(TypeError, ValueError):
            return tuple(inspect.signature(function).parameters)
        return ()

    def resolve(self, node: ast.AST) -> Any:
        """Return what a name such as ``nn.Linear`` stands for in this source; None where that cannot be known."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id)
        if isinstance(node, ast.Attribute):
            owner = self.owner_of(node)
            with suppress(Exception):  # lazy modules import, and may fail to
                return getattr(owner, node.attr, None) if owner is not None else None
        return None

    def owner_of(self, node: ast.Attribute) -> Any:
        """Return what this is an attribute of; for an instance that the source makes, its class."""
        owner = self.resolve(node.value)
        return self._class_of(node.value) if owner is None else owner

    def _class_of(self, node: ast.AST) -> type | None:
        """Return the class that is called here, or where this local name is assigned."""
        made = self.assigned.get(node.id) if isinstance(node, ast.Name) else node
        called = made.func if isinstance(made, ast.Call) else None
        kind: Any = None
        if isinstance(called, ast.Name):
            kind = self.names.get(called.id)
        elif isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name):
            with suppress(Exception):  # as above
                kind = getattr(self.names.get(called.value.id), called.attr, None)
        return kind if inspect.isclass(kind) else None

    def place(self, node: ast.AST) -> str:
        return f"{self.file.name}:{getattr(node, 'lineno', 0)}"


def read_sources(function: Callable[..., Any], root: Path) -> list[Source]:
    """Return the sources of the loader and of what it calls in its own project, the loader first.

    Empty where the loader's source cannot be read.
    """
    called: Any = getattr(function, "func", function)  # that of a functools.partial
    package = str(getattr(called, "__module__", "")).partition(".")[0]
    found: dict[int, Source] = {}
    waiting: list[tuple[Any, Any]] = [(called, getattr(called, "__self__", None))]
    while waiting and len(found) < MOST:
        called, cls = waiting.pop(0)
        owner = inspect.unwrap(getattr(called, "__func__", called))
        source = None if id(owner) in found else _read(owner, cls if inspect.isclass(cls) else None)
        if source is None:
            continue
        found[id(owner)] = source
        for call in source.calls:
            target = source.resolve(call.func)
            cls = source.owner_of(call.func) if isinstance(call.func, ast.Attribute) else None
            is_python = inspect.isfunction(target) or inspect.ismethod(target) or inspect.isclass(target)
            if is_python and _is_own(target, package, root):
                waiting.append((target, target if inspect.isclass(target) else cls))
    return list(found.values())


def _read(owner: Any, cls: type | None) -> Source | None:
    try:
        lines, start = inspect.getsourcelines(owner)
        tree = ast.parse(textwrap.dedent("".join(lines))).body[0]
        file = Path(inspect.getsourcefile(owner) or "")
    except (OSError, TypeError, SyntaxError, IndexError):  # no file, or a part of a line, such as a lambda
        return None
    if isinstance(tree, ast.ClassDef):
        inherited = next((base for base in owner.__mro__ if "__init__" in vars(base)), owner)
        if inherited is not owner and inherited.__module__.partition(".")[0] == owner.__module__.partition(".")[0]:
            source = _read(inherited, cls)
            return None if source is None else replace(source, owner=owner)
        empty = ast.FunctionDef("__init__", ast.arguments([], [], None, [], [], None, []), [], [])
        tree = next((one for one in tree.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"), empty)
    if not isinstance(tree, ast.FunctionDef):
        return None
    ast.increment_lineno(tree, start - 1)
    return Source(owner, tree, file, cls)


def _is_own(called: Any, package: str, root: Path) -> bool:
    """Return whether this belongs to the loader's project: the same package, or a file below the root folder."""
    if str(getattr(called, "__module__", "")).partition(".")[0] == package:
        return True
    try:
        file = Path(inspect.getsourcefile(called) or "/").resolve()
    except TypeError:  # built in
        return False
    return file.is_relative_to(root) and "site-packages" not in file.parts


def _imported_inside(tree: ast.AST) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                with suppress(Exception):  # the loader itself may never come here
                    found[alias.asname or alias.name] = getattr(importlib.import_module(node.module), alias.name)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                with suppress(Exception):
                    module = importlib.import_module(alias.name)
                    whole = alias.asname or "." not in alias.name
                    name = alias.asname or alias.name.partition(".")[0]
                    found[name] = module if whole else importlib.import_module(name)
    return found
