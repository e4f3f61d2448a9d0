"""The plugin's state: the settings, the checks, the engine that starts ranks, and what uses them."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable

import pytest

from pytest_fsdp_meta import standin
from pytest_fsdp_meta.catalogue import Catalogue, Check, built_in
from pytest_fsdp_meta.plugin.fixture_worlds import FixtureWorlds
from pytest_fsdp_meta.plugin.rank_io.listener import RankListener
from pytest_fsdp_meta.plugin.settings import Settings, read_settings, runs_nothing
from pytest_fsdp_meta.plugin.xdist_workers import Devices
from pytest_fsdp_meta.worlds import Engine, ForkServerEngine, RayEngine


class PluginSession:
    """One per pytest process: created in pytest_configure, and started in pytest_sessionstart."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.settings = read_settings(config)
        self.engine = _engine(self.settings)
        self.listener = RankListener(config, self.engine.importing)
        self.devices = Devices(config, self.settings, self.engine)
        self.worlds = FixtureWorlds(self.engine, self.listener, self.devices)
        self.catalogue = Catalogue()
        self.known_plugins: list[object] = []
        """The plugins whose checks are in the catalogue."""
        self.usage_problems: list[tuple[str, str]] = []
        """Node id -> invalid argument of its marker."""
        config.add_cleanup(self.engine.close)
        config.add_cleanup(self.worlds.close)  # the last is called first

    def start(self) -> None:
        """Read the checks, also those of conftest files."""
        if self.settings.device == standin.NAME and not runs_nothing(self.config):
            # It may have to be compiled; with pytest-xdist, the controller does it.
            reporter = self.config.pluginmanager.get_plugin("terminalreporter")
            try:
                standin.prepare(reporter.write_line if reporter else lambda line: None)
            except standin.Unavailable as error:
                raise pytest.UsageError(f"--fsdp-device={standin.NAME}: {error}") from None
        self.listener.start_debugger()
        self.known_plugins = self.check_plugins()
        self.catalogue = read_catalogue(self.config)

    def check_plugins(self) -> list[object]:
        """Return the plugins that have implemented ``pytest_fsdp_checks`` by now."""
        return [impl.plugin for impl in self.config.hook.pytest_fsdp_checks.get_hookimpls()]


SESSION = pytest.StashKey[PluginSession]()


def read_catalogue(config: pytest.Config) -> Catalogue:
    """Return the built-in checks and those of ``pytest_fsdp_checks`` hooks. Raises UsageError for a bad hook."""
    catalogue = built_in()
    for impl in config.hook.pytest_fsdp_checks.get_hookimpls():
        try:
            checks = impl.function()
            if isinstance(checks, (Check, str)) or not isinstance(checks, Iterable):
                raise ValueError(f"should return a list of checks, but returned {checks!r:.60}")
            for check in checks:
                catalogue.add(check)
        except ValueError as error:
            raise pytest.UsageError(f"{place_of(impl.plugin, config)}: hook pytest_fsdp_checks: {error}") from None
    return catalogue


def place_of(plugin: object, config: pytest.Config) -> str:
    """Return the file of a plugin relative to pytest's root folder, or its name where it has no file."""
    file = getattr(plugin, "__file__", None)
    return os.path.relpath(file, config.rootpath) if file else str(plugin)


def _engine(settings: Settings) -> Engine:
    if settings.engine == "local":
        return ForkServerEngine()
    if importlib.util.find_spec("ray") is None:
        raise pytest.UsageError(
            "--fsdp-engine=ray needs Ray, which is not installed; install it with: pip install 'pytest-fsdp-meta[ray]'"
        )
    return RayEngine()
