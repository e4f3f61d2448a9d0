"""Implement pytest's hooks: each function passes the call on to the module that does the work."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import nullcontext
from typing import Any

import pytest

from pytest_fsdp_meta.plugin import (
    collection,
    hookspecs,
    loader_option,
    markers,
    outcomes,
    preloading,
    report_plugin,
    settings,
    usage_errors,
    xdist_workers,
)
from pytest_fsdp_meta.plugin.fixtures import fsdp, fsdp_world
from pytest_fsdp_meta.plugin.items import RanksItem, WorldItem
from pytest_fsdp_meta.plugin.loader_items import LoaderItem
from pytest_fsdp_meta.plugin.session import SESSION, PluginSession, read_catalogue
from pytest_fsdp_meta.reports.terminal import describe_checks

__all__ = ["fsdp", "fsdp_world"]


def pytest_addoption(parser: pytest.Parser) -> None:
    settings.add_options(parser)


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    pluginmanager.add_hookspecs(hookspecs)


@pytest.hookimpl(wrapper=True)
def pytest_load_initial_conftests(
    early_config: pytest.Config, parser: pytest.Parser, args: list[str]
) -> Generator[None, object, object]:
    result = yield
    settings.check_options(early_config, parser, args)
    return result


def pytest_configure(config: pytest.Config) -> None:
    markers.register(config)
    config.stash[SESSION] = PluginSession(config)
    report_plugin.register(config, config.stash[SESSION])


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int | None:
    if config.getoption("--fsdp-list-checks"):
        print(describe_checks(read_catalogue(config)))
        return 0
    if config.getoption("--fsdp-init") is not None:
        from pytest_fsdp_meta.plugin import init  # most runs do without it

        return init.run(config)
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    plugin = session.config.stash[SESSION]
    plugin.start()
    loader_option.plan(session.config, plugin.settings, plugin.engine)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    if not isinstance(collector, pytest.Module):
        return (yield)
    with preloading.importing(collector.path, collector.config, collector.config.stash[SESSION].engine):
        return (yield)


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    collection.parametrize(metafunc.config.stash[SESSION], metafunc)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_pycollect_makeitem() -> Generator[None, object, object]:
    return collection.make_items((yield))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None, None, None]:
    """Check all tests before other plugins deselect some, and the devices of those that are left."""
    usage_errors.check_usage(config.stash[SESSION], items)
    yield
    usage_errors.check_devices(config.stash[SESSION], items)


def pytest_collection_finish(session: pytest.Session) -> None:
    collection.plan(session.config.stash[SESSION], session.items)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    with item.running() if isinstance(item, LoaderItem) else nullcontext():
        return (yield)


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, object, object]:
    """Collect the ranks' coverage in the innermost wrapper, before the wrapper of pytest-cov saves its data."""
    try:
        return (yield)
    finally:
        session.config.stash[SESSION].listener.finish()


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, None, None]:
    """Listen to ranks in the innermost wrapper, in which output is still captured."""
    with item.config.stash[SESSION].listener.listening():
        if isinstance(item, RanksItem):
            item.begin()
        yield


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    with item.config.stash[SESSION].listener.listening():
        yield


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, None, None]:
    session = item.config.stash[SESSION]
    with session.listener.listening(), session.worlds.tearing_down(item, nextitem):
        yield


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    if isinstance(item, WorldItem):
        item.config.stash[SESSION].worlds.show_outputs(item, call)
    report = yield
    if isinstance(item, RanksItem):
        item.complete_report(call, report)
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_report_teststatus(report: pytest.TestReport | pytest.CollectReport) -> tuple[str, str, str] | None:
    return outcomes.status_of(report)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Raise the usage error of a worker in the process that has started it."""
    if message := getattr(node, "workeroutput", {}).get(xdist_workers.USAGE_ERROR):
        raise pytest.UsageError(message)


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Generator[None, Any, Any]:
    from pytest_fsdp_meta.plugin import xdist_scheduler  # imports xdist, which need not be installed

    return xdist_scheduler.keep_loaders_together((yield), config, log, config.stash[SESSION].catalogue)
