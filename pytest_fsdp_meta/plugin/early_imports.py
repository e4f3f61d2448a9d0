"""Starts ranks' imports as soon as pytest comes to a file with tests for ranks, before it imports that file itself.

pytest and the fork server then import torch at the same time instead of one after the other.
"""

from __future__ import annotations

import ast
import gc
import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from pytest_fsdp_meta.plugin.markers import MARK, SPMD, WORLD
from pytest_fsdp_meta.plugin.settings import runs_nothing
from pytest_fsdp_meta.worlds import Engine

STARTED = pytest.StashKey[bool]()
"""Whether the imports have begun."""


@contextmanager
def importing(file: Path, config: pytest.Config, engine: Engine) -> Iterator[None]:
    """Start the fork server's first imports if this file has tests for ranks and they will run here.

    Within the block, this process imports the file, and with it most likely torch. Imports make no garbage, and looking
    for it takes a seventh of their time.
    """
    collects = gc.isenabled()
    if _begin(file, config, engine):
        gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _begin(file: Path, config: pytest.Config, engine: Engine) -> bool:
    """Start the imports; return whether this file is the first that needs them."""
    if config.stash.get(STARTED, False):
        return False
    distributed = hasattr(config, "workerinput") or config.pluginmanager.hasplugin("dsession")
    if distributed or runs_nothing(config):
        return False  # an xdist worker imports with several others at a time
    try:
        text = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError):  # pytest reports it
        return False
    config.stash[STARTED] = begins = any(name in text for name in (MARK, SPMD, WORLD))
    if begins:
        engine.start_early(_installed_imports(text), sys.path)
    return begins


def _installed_imports(text: str) -> Mapping[str, Sequence[str]]:
    """Return the modules of installed packages that a file imports at its top, with the names that it takes from them.

    Modules of the project are not among them: they may depend on what conftest files or earlier imports have done.
    """
    found: dict[str, list[str]] = {}
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError):  # pytest reports it
        return {}
    for node in body:
        if isinstance(node, ast.Import):
            for alias in node.names:
                found.setdefault(alias.name, [])
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.setdefault(node.module, []).extend(alias.name for alias in node.names)
    return {name: names for name, names in found.items() if _is_installed(name.partition(".")[0])}


def _is_installed(package: str) -> bool:
    """Return whether a package lies in site-packages; pytest and this plugin are imported in their own order."""
    if package in sys.stdlib_module_names or package in ("pytest", "_pytest", __name__.partition(".")[0]):
        return False
    with suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(package)
        return spec is not None and bool({"site-packages", "dist-packages"} & set(Path(spec.origin or "").parts))
    return False
