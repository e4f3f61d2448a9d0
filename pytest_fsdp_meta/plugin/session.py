"""Hold the settings, the checks, the engine that starts ranks, and the objects that use them, for one session."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from pytest_fsdp_meta import standin
from pytest_fsdp_meta.catalogue import Catalogue
from pytest_fsdp_meta.plugin import collection, evidence_items, loader_option, preloading, report_plugin
from pytest_fsdp_meta.plugin.fixture_worlds import FixtureWorlds
from pytest_fsdp_meta.plugin.loader_items import LoaderSession
from pytest_fsdp_meta.plugin.outcomes import ReportAttacher
from pytest_fsdp_meta.plugin.rank_io.listener import RankListener
from pytest_fsdp_meta.plugin.report_plugin import ReportPlugin
from pytest_fsdp_meta.plugin.settings import Settings, read_settings
from pytest_fsdp_meta.plugin.usage_errors import UsageProblem, check_usage
from pytest_fsdp_meta.plugin.xdist_workers import Devices
from pytest_fsdp_meta.worlds import Engine, ForkServerEngine, RayEngine


class PluginSession:
    """The plugin's state, one per pytest process: created in pytest_configure and started in pytest_sessionstart."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self.settings = read_settings(config)
        self.engine = _engine(self.settings)
        self.listener = RankListener(config, self.engine.importing)
        self.devices = Devices(config, self.settings, self.engine)
        self.attacher = ReportAttacher(Path(self.settings.report) if self.settings.report else None)
        self.catalogue = Catalogue()
        self.loaders = LoaderSession(
            self.settings, self.catalogue, self.engine, self.listener, self.devices, self.attacher
        )
        self.worlds = FixtureWorlds(self.engine, self.listener, self.devices)
        self._usage_problems: list[UsageProblem] = []
        self._check_plugins: tuple[object, ...] = ()
        """The plugins whose checks are in the catalogue."""
        if not hasattr(config, "workerinput"):  # under xdist, only the controller writes the report
            config.pluginmanager.register(ReportPlugin(config, self.settings), report_plugin.NAME)
        config.add_cleanup(self._close)

    def _close(self) -> None:
        self.worlds.close()
        self.engine.close()

    def start(self) -> None:
        """Read the checks, also those of conftest files, and prepare to collect the loader of ``--fsdp-loader``."""
        if self.settings.device == standin.NAME and not collection.runs_nothing(self._config):
            _build_standin(self._config)
        self.listener.start_debugger()
        self._check_plugins = tuple(impl.plugin for impl in self._config.hook.pytest_fsdp_checks.get_hookimpls())
        self.catalogue = self.loaders.catalogue = collection.read_catalogue(self._config)
        evidence_items.register(self._config, self.catalogue, self.settings.given)
        loader_option.plan(self._config, self.settings, self.engine)
        if writer := self._config.pluginmanager.get_plugin(report_plugin.NAME):
            writer.begin(self.catalogue)

    def parametrize(self, metafunc: pytest.Metafunc) -> None:
        """Create the items of a test that uses ranks; record an invalid argument of its marker as a usage problem."""
        mark = collection.marker_name(metafunc)
        if mark is None:
            return
        try:
            # With --collect-only, for example, devices need not exist, and counting them takes seconds.
            gpus = None if collection.runs_nothing(self._config) else self.devices.count_gpus()
            collection.parametrize(metafunc, self.settings, self.catalogue, gpus)
        except ValueError as error:
            self._usage_problems.append(UsageProblem(metafunc.definition.nodeid, f"@{mark}: {error}"))

    def check_usage(self, items: list[pytest.Item]) -> None:
        """Raise UsageError if a collected test cannot work, for example because it combines two markers."""
        check_usage(self._config, items, self._usage_problems, self._check_plugins)

    def plan(self, items: list[pytest.Item]) -> None:
        """Prepare for the selected items: which checks each loader needs, and what ranks import."""
        if not collection.runs_nothing(self._config):
            self.loaders.plan(items)
            preloading.plan(self.engine, items, self._config)


SESSION = pytest.StashKey[PluginSession]()


def _build_standin(config: pytest.Config) -> None:
    """Compile the stand-in device if that was not done before; with pytest-xdist, the controller does it."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    try:
        standin.prepare(reporter.write_line if reporter else lambda line: None)
    except standin.Unavailable as error:
        raise pytest.UsageError(f"--fsdp-device={standin.NAME}: {error}") from None


def _engine(settings: Settings) -> Engine:
    if settings.engine == "local":
        return ForkServerEngine()
    if importlib.util.find_spec("ray") is None:
        raise pytest.UsageError(
            "--fsdp-engine=ray needs Ray, which is not installed; install it with: pip install 'pytest-fsdp-meta[ray]'"
        )
    return RayEngine()
