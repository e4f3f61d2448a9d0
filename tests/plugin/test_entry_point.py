"""The ways in which pytest loads the plugin: by its entry point, or by ``-p`` where entry points are switched off."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points

import pytest

from tests.conftest import Project


def test_the_plugin_loads_by_name_without_entry_points(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    command = f"{sys.executable} -m pytest --fsdp-list-checks"
    without = project.shell(command)
    assert without.ret == pytest.ExitCode.USAGE_ERROR
    assert "unrecognized arguments: --fsdp-list-checks" in without.stderr.str()
    listed = project.shell(f"{command} -p pytest_fsdp_meta.plugin")
    assert listed.ret == 0
    listed.stdout.fnmatch_lines(["  no_meta_params: *"])


def test_the_entry_point_loads_the_hooks() -> None:
    (entry,) = (entry for entry in entry_points(group="pytest11") if entry.name == "fsdp-meta")
    assert entry.value == "pytest_fsdp_meta.plugin.hooks"
    assert entry.load().__name__ == entry.value
