"""pytest hooks. Thin: each says when something happens, and the module it calls says what."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Generator
from typing import Any

import pytest

from pytest_fsdp_meta import collection, hookspecs
from pytest_fsdp_meta.catalogue import Catalogue, built_in
from pytest_fsdp_meta.collection import case_of, fsdp
from pytest_fsdp_meta.items import VERDICT, Conductor
from pytest_fsdp_meta.markers import MARK
from pytest_fsdp_meta.reports.terminal import describe_checks
from pytest_fsdp_meta.settings import add_options, read_settings
from pytest_fsdp_meta.trial import ON_RANKS
from pytest_fsdp_meta.worlds import Preload, Sources, count_gpus

__all__ = ["fsdp"]

CONDUCTOR = pytest.StashKey[Conductor]()
MISUSES = pytest.StashKey[list[str]]()
GPUS = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    add_options(parser)


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    pluginmanager.add_hookspecs(hookspecs)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", f"{MARK}(world_size, mesh, only, skip, xfail, ...): the test is a loader, judged by the catalogue"
    )
    config.stash[CONDUCTOR] = Conductor(read_settings(config), Catalogue(), Preload())
    config.stash[MISUSES] = []


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int | None:
    if not config.getoption("--fsdp-list-checks"):
        return None
    _fill_catalogue(config)
    print(describe_checks(config.stash[CONDUCTOR].catalogue))
    return 0


def pytest_collection(session: pytest.Session) -> None:
    _fill_catalogue(session.config)


def _fill_catalogue(config: pytest.Config) -> None:
    catalogue = config.stash[CONDUCTOR].catalogue
    if catalogue.ids():
        return
    try:
        for check in built_in():
            catalogue.add(check)
        for checks in config.hook.pytest_fsdp_checks():
            for check in checks:
                catalogue.add(check)
    except ValueError as error:
        raise pytest.UsageError(f"hook pytest_fsdp_checks: {error}") from None


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    conductor, stash = metafunc.config.stash[CONDUCTOR], metafunc.config.stash
    if metafunc.definition.get_closest_marker(MARK) is None:
        return
    if GPUS not in stash:
        stash[GPUS] = count_gpus(Preload(method="spawn"))
    try:
        collection.generate(metafunc, conductor.settings, conductor.catalogue, stash[GPUS])
    except ValueError as error:
        stash[MISUSES].append(f"{metafunc.definition.nodeid}: @{MARK}: {error}")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wrong = [*config.stash[MISUSES], *collection.misuses(items)]
    if wrong:
        raise pytest.UsageError("\n".join(dict.fromkeys(wrong)))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Starts importing torch and the test modules beside whatever runs first."""
    loaders = [item for item in session.items if case_of(item) is not None]
    if not loaders or session.config.getoption("collectonly"):
        return
    conductor = session.config.stash[CONDUCTOR]
    conductor.plan(loaders)
    modules = {item.module.__name__: str(item.path) for item in loaders if isinstance(item, pytest.Function)}
    conductor.preload.sources = Sources(tuple(sys.path), modules | _conftests(session.config))
    conductor.preload.modules = [*ON_RANKS, *(name for names in session.config.hook.pytest_fsdp_preload() for name in names)]
    conductor.preload.test_modules = list(modules)
    conductor.preload.start()


def _conftests(config: pytest.Config) -> dict[str, str]:
    files = {getattr(plugin, "__name__", ""): getattr(plugin, "__file__", None) for plugin in config.pluginmanager.get_plugins()}
    return {name: file for name, file in files.items() if file and name.rpartition(".")[2] == "conftest"}


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, None, None]:
    case = case_of(item)
    conductor = item.config.stash[CONDUCTOR]
    if case is not None:
        conductor.before_fixtures(item, case)
    yield
    if case is not None and not (item.config.getoption("setuponly") or item.config.getoption("setupplan")):
        conductor.after_fixtures(item, case)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    case = case_of(pyfuncitem)
    if case is None:
        return None
    pyfuncitem.config.stash[CONDUCTOR].call(pyfuncitem, case)
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    verdict = item.stash.get(VERDICT, None)
    if verdict is not None and verdict.status == "skipped" and report.skipped:
        # The place of the test, not of the line in the plugin that skips.
        report.longrepr = (str(item.path), (item.location[1] or 0) + 1, f"Skipped: {verdict.reason}")
    return report


if importlib.util.find_spec("xdist") is not None:

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
        if config.getoption("dist") != "load":
            return None
        from pytest_fsdp_meta.scheduling import loader_scheduling

        _fill_catalogue(config)
        return loader_scheduling(config, log, config.stash[CONDUCTOR].catalogue)
