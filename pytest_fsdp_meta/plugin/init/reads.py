"""What the sources of a loader read of its arguments, through local names, attributes and calls."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pytest_fsdp_meta.plugin.init.source import Source

EMPTY = inspect.Parameter.empty
PASSES = 4
"""How often all sources are read for names: a function may be read before the one that calls it."""
DUMPS = {"asdict", "vars", "dict", "model_dump", "to_dict", "to_container", "_asdict"}
"""Functions and methods that return the parts of a config by their names."""

Chain = tuple[tuple[bool, str], ...]
"""The names that lead to a part of an argument: that of the argument, then attributes (True) and items (False)."""
Names = dict[str, Chain]
"""Name in a source, such as "cfg", "m" or "self.cfg" -> the part of an argument that it stands for."""


@dataclass
class Reads:
    """A value, and what sources read of it: attributes (``cfg.size``) or items (``cfg["size"]``), each with its own."""

    parts: dict[str, Reads] = field(default_factory=dict)
    attributes: bool = False
    unpacked: bool = False
    """Whether it is passed on as keyword arguments."""
    annotation: Any = EMPTY
    default: Any = EMPTY
    kind: Any = None
    """The class that takes the parts as arguments."""
    reader: str = ""
    """What reads it, and where: "hf_config (loading.py:23)"."""
    role: str = ""
    """Its role, where it gets something that exists on ranks only."""
    expression: str = ""
    """The value that the test passes; empty where none is known."""
    is_kept: bool = False
    """Whether the test leaves the default that its class has."""

    def add(self, chain: Chain, reader: str = "") -> Reads:
        here = self
        for attribute, name in chain:
            here.attributes = here.attributes or attribute
            here = here.parts.setdefault(name, Reads())
            here.reader = here.reader or reader
        return here

    def find(self, chain: Chain) -> Reads | None:
        here: Reads | None = self
        for _, name in chain:
            here = None if here is None else here.parts.get(name)
        return here


def find_reads(scopes: Mapping[Source, Names]) -> Reads:
    """Return what these sources read of each argument of the loader."""
    reads = Reads()
    for source, names in scopes.items():
        called = {id(call.func) for call in source.calls}
        for node in ast.walk(source.tree) if names else ():
            chain = chain_of(node, names)
            reader = f"{getattr(source.owner, '__name__', 'it')} ({source.place(node)})"
            if chain and id(node) not in called:
                part = reads.add(chain, reader)
                if (optional := _default_of(node)) is not None:
                    part.default = optional.value if isinstance(optional, ast.Constant) else None
            if isinstance(node, ast.Call):
                _add_call(source, node, names, reads, reader)
    return reads


def _add_call(source: Source, call: ast.Call, names: Names, reads: Reads, reader: str) -> None:
    """Add the parameters of Model for ``Model(**cfg)``."""
    for keyword in call.keywords:
        chain = chain_of(keyword.value, names) if keyword.arg is None else None
        target = source.resolve(call.func)
        if chain is not None and callable(target):
            here = reads.add(chain)
            here.unpacked = True
            for name, one in signature_of(target).items():
                if one.default is one.empty or (isinstance(one.default, int) and inspect.isclass(target)):
                    part = here.add(((False, name),), reader)
                    part.annotation, part.default = one.annotation, one.default


def find_scopes(sources: Sequence[Source]) -> dict[Source, Names]:
    """Return the names of the loader's arguments, and of their parts, in each source."""
    scopes: dict[Source, Names] = {source: {} for source in sources}
    for source in sources[:1]:
        scopes[source] = {name: ((True, name),) for name in source.parameters}
    owners = {id(inspect.unwrap(source.owner)): source for source in sources}
    for _ in range(PASSES):
        for source, names in scopes.items():
            for node in ast.walk(source.tree):
                if isinstance(node, ast.Assign) and len(node.targets) == 1:
                    chain = chain_of(node.value, names)
                    target = ast.unparse(node.targets[0])
                    for one in scopes if chain is not None else ():
                        if one is source or (target.startswith("self.") and one.cls is source.cls is not None):
                            scopes[one].setdefault(target, chain or ())
                elif isinstance(node, ast.Call):
                    target_of = source.resolve(node.func)
                    called = owners.get(id(inspect.unwrap(getattr(target_of, "__func__", target_of))))
                    for name, value in _bound(node, called) if called is not None else ():
                        chain = chain_of(value, names)
                        if called is not None and chain is not None:
                            scopes[called].setdefault(name, chain)
    return scopes


def _bound(call: ast.Call, called: Source) -> Iterator[tuple[str, ast.expr]]:
    """Yield the parameters that the call passes to a function, or to ``__init__`` of a class."""
    taken = [name for name in called.parameters if name not in ("self", "cls")]
    yield from zip(taken, call.args, strict=False)
    yield from ((keyword.arg, keyword.value) for keyword in call.keywords if keyword.arg in taken and keyword.arg)


def chain_of(node: ast.AST, names: Mapping[str, Chain]) -> Chain | None:
    """Return the names that lead from an argument to this node; None for other nodes."""
    if isinstance(node, ast.Call) and (asked := _asked(node)) is not None:
        chain = chain_of(asked[0], names)
        return None if chain is None else (*chain, asked[1])
    if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in DUMPS:
        is_method = isinstance(node.func, ast.Attribute) and not node.args
        dumped = node.func.value if is_method and isinstance(node.func, ast.Attribute) else next(iter(node.args), None)
        return None if dumped is None else chain_of(dumped, names)
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        if isinstance(node.value, ast.Name) and node.value.id == "self":
            return names.get(f"self.{node.attr}")
        chain = chain_of(node.value, names)
        return None if chain is None else (*chain, (True, node.attr))
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
        chain = chain_of(node.value, names)
        return None if chain is None else (*chain, (False, node.slice.value))
    return None


def _asked(call: ast.Call) -> tuple[ast.expr, tuple[bool, str]] | None:
    """Return what ``getattr(cfg, "size", 1)`` or ``cfg.get("size", 1)`` reads, and of what; None for other calls."""
    is_get = isinstance(call.func, ast.Attribute) and call.func.attr == "get"
    owner = call.func.value if is_get and isinstance(call.func, ast.Attribute) else next(iter(call.args), None)
    key = next(iter(call.args[0 if is_get else 1 :]), None)
    if owner is None or not isinstance(key, ast.Constant) or not isinstance(key.value, str):
        return None
    return (owner, (not is_get, key.value)) if is_get or ast.unparse(call.func) == "getattr" else None


def _default_of(node: ast.AST) -> ast.expr | None:
    """Return the default of such a call."""
    if not isinstance(node, ast.Call) or _asked(node) is None:
        return None
    is_get = isinstance(node.func, ast.Attribute)
    return next(iter(node.args[1 if is_get else 2 :]), None)


def signature_of(target: Any) -> dict[str, inspect.Parameter]:
    try:
        parameters = inspect.signature(target).parameters
    except (TypeError, ValueError):
        return {}
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {name: one for name, one in parameters.items() if one.kind in named}
