"""Starts ranks' imports in the background, so that they import torch at the same time as pytest, not after it.

The first begin as soon as pytest comes to a file with tests for ranks, before it imports that file itself; the others
when the collected items show which modules they need.
"""

from __future__ import annotations

import ast
import gc
import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_fsdp_meta.plugin import _pytest_private
from pytest_fsdp_meta.plugin.markers import MARK, SPMD, WORLD
from pytest_fsdp_meta.plugin.settings import runs_nothing
from pytest_fsdp_meta.trial import ON_RANKS
from pytest_fsdp_meta.worlds import Engine, Sources

STARTED = pytest.StashKey[bool]()
"""Whether the imports have begun."""
WORLDS_OF_A_LOADER = 4
"""Its own, the reference's, and those of a second load and of one in another size."""


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


def begin(engine: Engine, modules: Mapping[str, str], config: pytest.Config, loaders: bool) -> None:
    """Start importing these test modules, given as files by module name; with ``loaders`` also the observers."""
    results = config.hook.pytest_fsdp_preload()
    downstream = [name for names in results for name in ([names] if isinstance(names, str) else names)]
    names = {getattr(plugin, "__name__", "") for plugin in config.pluginmanager.get_plugins()}
    # Several may be called "conftest"; then the file is that of the module which ``sys.modules`` has.
    conftests = (name for name in names & sys.modules.keys() if name.rpartition(".")[2] == "conftest")
    files = {**modules, **{name: file for name in conftests if (file := sys.modules[name].__file__)}}
    engine.sources = Sources(tuple(sys.path), files, _assert_rewriting(files, config))
    engine.modules = [*(ON_RANKS if loaders else ()), *downstream]
    engine.test_modules = list(modules)
    engine.start()


def refresh(engine: Engine) -> None:
    """Copy ``sys.path`` before ranks start: fixtures may have extended it since collection."""
    engine.sources = replace(engine.sources, path=tuple(sys.path))


def _assert_rewriting(files: Mapping[str, str], config: pytest.Config) -> tuple[str, tuple[str, ...]] | None:
    """Return the function, and its arguments, that makes ranks explain a failing assert as pytest does."""
    if config.getoption("assertmode") != "rewrite":
        return None
    verbosity = str(config.get_verbosity(pytest.Config.VERBOSITY_ASSERTIONS))
    names = (*files, *_pytest_private.rewritten_modules())
    return f"{_pytest_private.__name__}:rewrite_asserts", (str(config.rootpath), verbosity, *names)
