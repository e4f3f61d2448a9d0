"""What ranks shall find imported, and how: known once the items are, and imported beside whatever runs first."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace

import pytest

from pytest_fsdp_meta.plugin import _pytest_private
from pytest_fsdp_meta.plugin.collection import case_of, world_case_of
from pytest_fsdp_meta.trial import ON_RANKS
from pytest_fsdp_meta.worlds import Engine, Sources


def plan(engine: Engine, items: Iterable[pytest.Item], config: pytest.Config) -> None:
    """Starts importing torch and the modules of those tests that will run on ranks."""
    modules: dict[str, str] = {}
    loaders = False
    for item in items:
        case = case_of(item)
        judged = case is not None and case.check not in case.order.skip
        if judged or world_case_of(item) is not None:
            assert isinstance(item, pytest.Function)
            loaders = loaders or judged
            modules[item.module.__name__] = str(item.path)
    if modules:
        begin(engine, modules, config, loaders)


def begin(engine: Engine, modules: Mapping[str, str], config: pytest.Config, loaders: bool) -> None:
    """Starts importing these modules, files by name; ``loaders`` says whether there is anything to judge."""
    named = config.hook.pytest_fsdp_preload()
    downstream = [name for names in named for name in ([names] if isinstance(names, str) else names)]
    files = {**modules, **_conftests(config)}
    engine.sources = Sources(tuple(sys.path), files, _rewriting(files, config))
    engine.modules = [*(ON_RANKS if loaders else ()), *downstream]
    engine.test_modules = list(modules)
    engine.start()


def refresh(engine: Engine) -> None:
    """Before ranks are started: fixtures may have extended the search path since collection."""
    engine.sources = replace(engine.sources, path=tuple(sys.path))


def _rewriting(files: Mapping[str, str], config: pytest.Config) -> tuple[str, tuple[str, ...]] | None:
    """What makes a failing assert tell on a rank what it tells in the pytest process."""
    if config.getoption("assertmode") != "rewrite":
        return None
    verbosity = str(config.get_verbosity(pytest.Config.VERBOSITY_ASSERTIONS))
    names = (*files, *_pytest_private.rewritten_modules())
    return f"{_pytest_private.__name__}:rewrite_asserts", (str(config.rootpath), verbosity, *names)


def _conftests(config: pytest.Config) -> dict[str, str]:
    """Files by module name. Of several that are all called "conftest", the one that this name stands for."""
    names = {getattr(plugin, "__name__", "") for plugin in config.pluginmanager.get_plugins()}
    modules = {name: sys.modules.get(name) for name in names if name.rpartition(".")[2] == "conftest"}
    return {name: module.__file__ for name, module in modules.items() if module is not None and module.__file__}
