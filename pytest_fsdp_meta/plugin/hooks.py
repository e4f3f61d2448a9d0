"""Implement pytest's hooks: each function passes the call on to the module that does the work."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest

from pytest_fsdp_meta.plugin import (
    collection,
    early_imports,
    evidence_items,
    failure_lines,
    hookspecs,
    markers,
    mistyped_options,
    outcomes,
    run_scope,
    settings,
    spmd_items,
    xdist_workers,
)
from pytest_fsdp_meta.plugin.evidence_items import EvidenceFile
from pytest_fsdp_meta.plugin.fixtures import fsdp, fsdp_world
from pytest_fsdp_meta.plugin.session import SESSION, PluginSession

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
    mistyped_options.check_options(early_config, parser, args)
    return result


def pytest_configure(config: pytest.Config) -> None:
    markers.register(config)
    config.pluginmanager.register(xdist_workers.Controller(), "fsdp_controller")
    config.stash[SESSION] = PluginSession(config)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int | None:
    status = collection.list_checks(config)
    if status is None and config.getoption("--fsdp-init") is not None:
        from pytest_fsdp_meta.plugin.init import command  # most runs do without it

        return command.run(config)
    return status


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[SESSION].start()


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> EvidenceFile | None:
    return evidence_items.collect_file(file_path, parent)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    if not isinstance(collector, pytest.Module):
        return (yield)
    with early_imports.importing(collector.path, collector.config, collector.config.stash[SESSION].engine):
        return (yield)


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    metafunc.config.stash[SESSION].parametrize(metafunc)


@pytest.hookimpl(tryfirst=True)
def pytest_itemcollected(item: pytest.Item) -> None:
    collection.stash_identity(item)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    config.stash[SESSION].check_usage(items)


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    if items:
        run_scope.send_deselected(items[0].config, items)


def pytest_collection_finish(session: pytest.Session) -> None:
    session.config.stash[SESSION].plan(session.items)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    with item.config.stash[SESSION].loaders.running(item):
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
    """Run loaders in the innermost wrapper: after ``yield``, fixtures are set up and output is still captured."""
    session = item.config.stash[SESSION]
    with session.listener.listening():
        session.loaders.before_fixtures(item)
        spmd_items.before_fixtures(item, session.worlds)
        yield
        session.loaders.after_fixtures(item)
        spmd_items.after_fixtures(item, session.worlds)


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    with item.config.stash[SESSION].listener.listening():
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    session = pyfuncitem.config.stash[SESSION]
    return session.loaders.call(pyfuncitem) or spmd_items.call(pyfuncitem, session.worlds, session.settings.given)


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, None, None]:
    session = item.config.stash[SESSION]
    with session.listener.listening(), session.worlds.tearing_down(item, nextitem):
        yield


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    session = item.config.stash[SESSION]
    session.worlds.show_outputs(item, call)
    report = yield
    session.loaders.attach(item, call, report)
    evidence_items.attach(item, call, report, session.attacher)
    collection.place_skip(item, report)
    failure_lines.point_to_user(item, report)
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_report_teststatus(report: pytest.TestReport | pytest.CollectReport) -> tuple[str, str, str] | None:
    return outcomes.repeated_error_status(report)


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Generator[None, Any, Any]:
    from pytest_fsdp_meta.plugin import xdist_scheduler  # imports xdist, which need not be installed

    return xdist_scheduler.keep_loaders_together((yield), config, log, config.stash[SESSION].catalogue)
