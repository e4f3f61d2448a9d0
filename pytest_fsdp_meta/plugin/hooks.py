"""pytest hooks. Thin: each says when something happens, and the module it calls says what."""

from __future__ import annotations

import importlib.util
from collections.abc import Generator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pytest_fsdp_meta.catalogue import Catalogue
from pytest_fsdp_meta.plugin import (
    collection,
    evidence_items,
    hookspecs,
    loader_option,
    preloading,
    report_plugin,
    spmd_items,
    usage_errors,
)
from pytest_fsdp_meta.plugin.collection import SKIPPED, case_of, world_case_of
from pytest_fsdp_meta.plugin.evidence_items import EvidenceFile, EvidenceItem, is_asked_for
from pytest_fsdp_meta.plugin.fixture_worlds import FixtureWorlds
from pytest_fsdp_meta.plugin.fixtures import FIXTURE_WORLDS, fsdp, fsdp_world
from pytest_fsdp_meta.plugin.loader_items import LoaderSession
from pytest_fsdp_meta.plugin.markers import MARK, SPMD, WORLD
from pytest_fsdp_meta.plugin.outcomes import ReportAttacher, settles, unjudged
from pytest_fsdp_meta.plugin.rank_io.listener import RankListener
from pytest_fsdp_meta.plugin.report_plugin import ReportPlugin
from pytest_fsdp_meta.plugin.settings import Settings, add_options, read_settings
from pytest_fsdp_meta.plugin.usage_errors import UsageProblem
from pytest_fsdp_meta.plugin.xdist_workers import Controller, Devices
from pytest_fsdp_meta.reports.terminal import describe_checks
from pytest_fsdp_meta.worlds import Engine, ForkServerEngine, RayEngine, count_gpus

__all__ = ["fsdp", "fsdp_world"]

LOADER_SESSION = pytest.StashKey[LoaderSession]()
USAGE_PROBLEMS = pytest.StashKey[list[UsageProblem]]()
CHECKED = pytest.StashKey[tuple[object, ...]]()
"""The plugins whose checks are in the catalogue."""
GPUS = pytest.StashKey[int]()
FROM_WORKER = "fsdp_mistakes"


def pytest_addoption(parser: pytest.Parser) -> None:
    add_options(parser)


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    pluginmanager.add_hookspecs(hookspecs)


def pytest_configure(config: pytest.Config) -> None:
    for mark in (
        f"{MARK}(world_size, mesh, only, skip, xfail, ...): the test is a loader, judged by the catalogue",
        f"{SPMD}(world_size, mesh, scope, timeout, process_group): the body of the test runs on every rank",
        f"{WORLD}(world_size, mesh, scope, timeout, process_group): how the fixture fsdp_world shall be",
    ):
        config.addinivalue_line("markers", mark)
    settings = read_settings(config)
    engine, ear, devices = _engine(settings), RankListener(config), Devices(config, settings)
    teller = ReportAttacher(Path(settings.report) if settings.report else None, settings.keep_evidence)
    config.stash[LOADER_SESSION] = LoaderSession(settings, Catalogue(), engine, ear, devices, teller)
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(ReportPlugin(config, settings), report_plugin.NAME)
    config.stash[FIXTURE_WORLDS] = FixtureWorlds(engine, ear, devices)
    config.pluginmanager.register(Controller(), "fsdp_controller")
    config.stash[USAGE_PROBLEMS] = []


def _engine(settings: Settings) -> Engine:
    if settings.engine == "local":
        return ForkServerEngine()
    if importlib.util.find_spec("ray") is None:
        raise pytest.UsageError(
            "--fsdp-engine=ray needs Ray, which is not installed; install it with: pip install 'pytest-fsdp-meta[ray]'"
        )
    return RayEngine(settings.ray_address)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int | None:
    if not config.getoption("--fsdp-list-checks"):
        return None
    print(describe_checks(collection.read_catalogue(config)))
    return 0


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    config = session.config
    config.stash[LOADER_SESSION].ear.debug()
    config.stash[CHECKED] = tuple(impl.plugin for impl in config.hook.pytest_fsdp_checks.get_hookimpls())
    catalogue = config.stash[LOADER_SESSION].catalogue = collection.read_catalogue(config)
    config.stash[evidence_items.CATALOGUE] = catalogue
    config.stash[evidence_items.GIVEN] = config.stash[LOADER_SESSION].settings.given
    loader_option.plan(config, config.stash[LOADER_SESSION].settings, config.stash[LOADER_SESSION].engine)
    if writer := config.pluginmanager.get_plugin(report_plugin.NAME):
        writer.begin(catalogue)


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> EvidenceFile | None:
    return EvidenceFile.from_parent(parent, path=file_path) if is_asked_for(file_path, parent.config) else None


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    mark = collection.mark_of(metafunc)
    if mark is None:
        return
    config = metafunc.config
    conductor = config.stash[LOADER_SESSION]
    try:
        collection.generate(metafunc, conductor.settings, conductor.catalogue, _gpus(config))
    except ValueError as error:
        config.stash[USAGE_PROBLEMS].append(UsageProblem(metafunc.definition.nodeid, f"@{mark}: {error}"))


def _gpus(config: pytest.Config) -> int | None:
    """None where nothing will run. Counting takes seconds on a machine that has some."""
    if collection.runs_nothing(config):
        return None
    conductor = config.stash[LOADER_SESSION]
    if isinstance(conductor.engine, RayEngine):
        conductor.engine.start()  # a cluster that is not there is told while collecting
    if conductor.settings.device == "cpu":
        return 0
    if GPUS not in config.stash:
        engine = conductor.engine
        local = partial(count_gpus, ForkServerEngine(method="spawn"))
        count = engine.count_gpus if isinstance(engine, RayEngine) else partial(conductor.devices.count_gpus, local)
        config.stash[GPUS] = count()
    return config.stash[GPUS]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    told = usage_errors.tell(
        [
            *config.stash[USAGE_PROBLEMS],
            *usage_errors.late_checks(config, config.stash[CHECKED]),
            *usage_errors.usage_problems(items, {mistake.where for mistake in config.stash[USAGE_PROBLEMS]}),
            *usage_errors.duplicate_names(items, scheduled=hasattr(config, "workerinput")),
        ]
    )
    if told and hasattr(config, "workeroutput"):
        # A worker of xdist that raises is replaced by another; the controller raises in its place.
        config.workeroutput[FROM_WORKER] = told
        items.clear()
    elif told:
        raise pytest.UsageError(told)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    told = getattr(node, "workeroutput", {}).get(FROM_WORKER)
    if told:
        raise pytest.UsageError(told)


def pytest_collection_finish(session: pytest.Session) -> None:
    config = session.config
    if not collection.runs_nothing(config):
        conductor = config.stash[LOADER_SESSION]
        conductor.plan(session.items)
        preloading.plan(conductor.engine, session.items, config)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    case = case_of(item)
    with nullcontext() if case is None else item.config.stash[LOADER_SESSION].running(item, case):
        return (yield)


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, object, object]:
    """The innermost wrapper: pytest-cov saves what was measured in one around it."""
    try:
        return (yield)
    finally:
        session.config.stash[LOADER_SESSION].ear.finish()


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, None, None]:
    """The innermost wrapper: the fixtures are there when it goes on, and output is still captured."""
    case, world_case = case_of(item), world_case_of(item)
    conductor, keeper = item.config.stash[LOADER_SESSION], item.config.stash[FIXTURE_WORLDS]
    with conductor.ear.hearing():
        if case is not None:
            conductor.before_fixtures(item, case)
        elif world_case is not None:
            spmd_items.before_fixtures(item, world_case, keeper)
        yield
        if collection.runs_nothing(item.config):
            return
        if case is not None:
            conductor.after_fixtures(item, case)
        elif world_case is not None:
            spmd_items.after_fixtures(item, world_case, keeper)


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    with item.config.stash[LOADER_SESSION].ear.hearing():
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    case, world_case = case_of(pyfuncitem), world_case_of(pyfuncitem)
    conductor = pyfuncitem.config.stash[LOADER_SESSION]
    if case is not None:
        conductor.call(pyfuncitem, case)
    elif world_case is not None and world_case.spmd:
        spmd_items.call(pyfuncitem, pyfuncitem.config.stash[FIXTURE_WORLDS], conductor.settings.given)
    else:
        return None
    return True


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, None, None]:
    """After the fixtures' own ends, which may use the world; an error of theirs goes first."""
    keeper = item.config.stash[FIXTURE_WORLDS]
    with keeper.ear.hearing():
        try:
            yield
        except BaseException:
            keeper.end(item, nextitem)
            raise
        if told := keeper.end(item, nextitem):
            pytest.fail(told, pytrace=False)


def pytest_unconfigure(config: pytest.Config) -> None:
    if FIXTURE_WORLDS in config.stash:
        config.stash[FIXTURE_WORLDS].close()
        config.stash[FIXTURE_WORLDS].engine.close()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    if call.excinfo is not None and world_case_of(item) is not None:
        item.config.stash[FIXTURE_WORLDS].show_outputs(item, call.when)
    report = yield
    conductor, case = item.config.stash[LOADER_SESSION], case_of(item)
    raised = call.excinfo.value if call.excinfo is not None else None
    if not settles(report):
        return report
    if case is not None:
        conductor.tell(item, case, report, raised)
    elif isinstance(item, EvidenceItem):
        item.attach_to(report, conductor.teller, raised)
    reason = item.stash.get(SKIPPED, None)
    if reason is not None and report.skipped:
        report.longrepr = (str(item.path), (item.location[1] or 0) + 1, f"Skipped: {reason}")
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_report_teststatus(report: pytest.TestReport | pytest.CollectReport) -> tuple[str, str, str] | None:
    return unjudged(report)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from pytest_fsdp_meta.plugin.xdist_scheduler import DISTRIBUTIONS, LoaderScheduling

    if config.getoption("dist") not in DISTRIBUTIONS:
        return None
    return LoaderScheduling(config, log, config.stash[LOADER_SESSION].catalogue)
