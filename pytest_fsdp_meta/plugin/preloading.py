"""Starts ranks' imports in the background, as soon as the collected items show which modules they need."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace

import pytest

from pytest_fsdp_meta.plugin import _pytest_private
from pytest_fsdp_meta.trial import ON_RANKS
from pytest_fsdp_meta.worlds import Engine, Sources

WORLDS_OF_A_LOADER = 4
"""Its own, the reference's, and those of a second load and of one in another size."""


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
