"""Fixtures of all tests: inner pytest projects with tiny loaders."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import hypothesis
import numpy  # noqa: F401 - loads only once, and a test whose inner run in this process imports it unloads it
import pytest

from tests import warm_runs
from tests.world_help import preload, total, world_of

pytest_plugins = "pytester"

# Inner runs, and the commands that they print, call "python"; this finds it without an activated environment.
os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
# A busy machine makes an example slow, not wrong.
hypothesis.settings.register_profile("without deadline", deadline=None)
hypothesis.settings.load_profile("without deadline")

TINY = """
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from pytest_fsdp_meta import Subject, fsdp_conformance


def build():
    torch.manual_seed(0)
    return nn.Linear(4, 4)


def load(fsdp, **declared):
    model = build()
    fully_shard(model, mesh=fsdp.mesh)
    return Subject(model, **declared)


def note(word, folder={folder!r}):
    with open(f"{{folder}}/notes", "a") as file:
        file.write(word + "\\n")
"""
"""The head of an inner test module: a model with two parameters, and notes that all processes write to one file."""


CHECK = """
from pytest_fsdp_meta.catalogue import check

@check(
    promise="every expert has its share", family="own", needs=["inventory"], after={after}, why="", cause="", remedy=""
)
def {name}(view):
    return []

def pytest_fsdp_checks():
    return {value}
"""
"""A conftest.py with one check."""


class Project:
    """A downstream repository in a temporary folder."""

    def __init__(self, pytester: pytest.Pytester) -> None:
        self._pytester = pytester
        self.path = pytester.path
        self._runs = 0

    def write(self, name: str, text: str) -> Path:
        """Write a file, dedented."""
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text), encoding="utf-8")
        return path

    def loaders(self, text: str, name: str = "test_it.py") -> Path:
        """Write a test module for loaders: ``load(fsdp)`` returns a subject, ``note(word)`` adds to ``notes``."""
        return self.write(name, TINY.format(folder=os.fspath(self.path)) + "\n\n" + dedent(text))

    def collect(self, *args: str) -> pytest.RunResult:
        """Run pytest in this process, for runs that start no rank; Hypothesis' plugin is off, as it costs 0.8 s."""
        return self._pytester.runpytest_inprocess("-p", "no:cacheprovider", "-p", "no:hypothesispytest", *args)

    def run(self, *args: str) -> pytest.RunResult:
        """Run pytest in a process of its own, forked from one that has imported pytest and torch."""
        options = [f"--basetemp={self._basetemp()}", "-p", "no:cacheprovider"]
        path = os.pathsep.join(filter(None, [os.fspath(self.path), os.environ.get("PYTHONPATH")]))
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(self.path)
            patch.setenv("PYTHONPATH", path)
            status, out, err, seconds = warm_runs.run([*options, *args], self.path, timeout=300)
        print(*out, sep="\n")
        print(*err, sep="\n", file=sys.stderr)
        return pytest.RunResult(status, out, err, seconds)

    def run_cold(self, *args: str) -> pytest.RunResult:
        """Run pytest in a new interpreter, as a user starts it."""
        return self._pytester.runpytest_subprocess("-p", "no:cacheprovider", *args, timeout=300)

    def _basetemp(self) -> Path:
        self._runs += 1
        return self.path / f"runpytest-{self._runs}"

    def shell(self, command: str, folder: str = ".") -> pytest.RunResult:
        """Run a shell command, as a user would paste it. ``python -m pytest`` forks its run as ``run`` does."""
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(self.path / folder)
            for name, value in warm_runs.shell_functions().items():
                patch.setenv(name, value)
            return self._pytester.run("bash", "-c", command, timeout=120)

    @property
    def notes(self) -> list[str]:
        file = self.path / "notes"
        return file.read_text().split() if file.exists() else []


@pytest.fixture
def next_world_works(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Check after the test that worlds left nothing on the disk, and that the next world works."""
    folder = tmp_path_factory.mktemp("worlds")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    preload().start()
    yield
    with world_of(2) as world:
        assert world.run(total, 1.0) == [1.0, 1.0]
    assert not [str(path.relative_to(folder)) for path in folder.rglob("*") if "fsdp-world-" in str(path)]


@pytest.fixture
def project(pytester: pytest.Pytester) -> Project:
    return Project(pytester)


def errors(result: pytest.RunResult) -> list[str]:
    """Return the lines of a usage error without the word ERROR; fail for another exit code, and for tracebacks."""
    assert result.ret == pytest.ExitCode.USAGE_ERROR, result.stdout.str() + result.stderr.str()
    text = result.stdout.str() + result.stderr.str()
    assert "Traceback" not in text
    assert "INTERNALERROR" not in text
    return [line.removeprefix("ERROR: ") for line in result.errlines if line.strip()]
