"""The interpreter in the command that reruns an item: as short as it can be while it is the same one."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from pytest_fsdp_meta.plugin.items import _interpreter


@pytest.fixture
def on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the only folder on the PATH, which has no interpreter yet."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", os.fspath(folder))
    return folder


def script(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_the_interpreter_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable))
    assert _interpreter(tmp_path) == "python"


def test_a_script_that_runs_the_interpreter(on_path: Path, tmp_path: Path) -> None:
    script(on_path / "python", f'exec {sys.executable} "$@"')
    assert _interpreter(tmp_path) == "python"


@pytest.mark.parametrize("text", ["exec /bin/echo /usr/bin/python", "exit 127", "kill -9 $$"])
def test_a_script_that_runs_another_interpreter(on_path: Path, tmp_path: Path, text: str) -> None:
    script(on_path / "python", text)
    assert _interpreter(tmp_path) != "python"


def test_a_link_to_the_interpreter_of_an_environment_is_another_interpreter(on_path: Path, tmp_path: Path) -> None:
    (on_path / "python").symlink_to(sys.executable)
    assert _interpreter(tmp_path) != "python"


def test_the_shortest_path(on_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = Path(sys.executable).parent
    assert _interpreter(here) == f"./{Path(sys.executable).name}"
    assert _interpreter(here.parent) == f"bin/{Path(sys.executable).name}"
    assert _interpreter(Path("/")) == sys.executable.removeprefix("/")
    monkeypatch.setattr(sys, "executable", "/opt/x/bin/python")
    assert _interpreter(Path("/opt/y")) == "../x/bin/python"
    assert _interpreter(Path("/a/b/c/d/e")) == "/opt/x/bin/python"
