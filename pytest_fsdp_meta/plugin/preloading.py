"""Starts ranks' imports in the background, as soon as the collected items show which modules they need."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace

import pytest

from pytest_fsdp_meta.plugin import _pytest_private
from pytest_fsdp_meta.plugin.collection import LOADER_ITEM, WORLD_ITEM, LoaderItem
from pytest_fsdp_meta.trial import ON_RANKS
from pytest_fsdp_meta.worlds import Engine, Sources

WORLDS_OF_A_LOADER = 4
"""Its own, the reference's, and those of a second load and of one in another size."""


def plan(engine: Engine, items: Iterable[pytest.Item], config: pytest.Config) -> None:
    """Start importing torch, and the test modules of the items that will run on ranks."""
    modules: dict[str, str] = {}
    loaders = False
    worlds: set[str] = set()
    for item in items:
        loader = item.stash.get(LOADER_ITEM, None)
        runs_loader = loader is not None and loader.check not in loader.spec.skip
        if runs_loader or WORLD_ITEM in item.stash:
            assert isinstance(item, pytest.Function)
            loaders = loaders or runs_loader
            worlds.update(_worlds_of(item, loader))
            modules[item.module.__name__] = str(item.path)
    if modules:
        engine.worlds = len(worlds)
        begin(engine, modules, config, loaders)


def _worlds_of(item: pytest.Item, loader: LoaderItem | None) -> list[str]:
    """Return a name for each world that the item starts; items that share a world return the same ones."""
    if loader is not None:
        return [f"{loader.key} {number}" for number in range(WORLDS_OF_A_LOADER)]
    world = item.stash[WORLD_ITEM]
    return [item.nodeid if world.scope == "function" else f"{world.scope} {world.world}"]


def begin(engine: Engine, modules: Mapping[str, str], config: pytest.Config, loaders: bool) -> None:
    """Start importing these test modules, given as files by module name; with ``loaders`` also the observers."""
    results = config.hook.pytest_fsdp_preload()
    downstream = [name for names in results for name in ([names] if isinstance(names, str) else names)]
    files = {**modules, **_conftests(config)}
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


def _conftests(config: pytest.Config) -> dict[str, str]:
    """Return the files of conftest modules by module name.

    Several may be called "conftest"; then the file is that of the module which ``sys.modules`` has.
    """
    names = {getattr(plugin, "__name__", "") for plugin in config.pluginmanager.get_plugins()}
    modules = {name: sys.modules.get(name) for name in names if name.rpartition(".")[2] == "conftest"}
    return {name: module.__file__ for name, module in modules.items() if module is not None and module.__file__}
