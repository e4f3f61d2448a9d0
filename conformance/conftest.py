"""Tiny checkpoints, made once per session, and the judgement of a loader without going through pytest items."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from conformance.judging import PRELOADED, Court, Verdicts
from fixtures.tiny import save_tiny

collect_ignore = ["systems"]  # judged in environments of their own: make systems


def pytest_fsdp_preload() -> list[str]:
    return list(PRELOADED)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``checkpoint("llama")``: the directory of a tiny checkpoint."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = save_tiny(name, tmp_path_factory.mktemp("checkpoint") / name)
        return made[name]

    return make


@pytest.fixture
def path(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]) -> Path:
    """The checkpoint that a test is parametrized with, indirectly, by its name."""
    return checkpoint(request.param)


@pytest.fixture(scope="session")
def judge_loader() -> Callable[..., Verdicts]:
    """``judge_loader(function, mesh, **arguments)``: the verdict of every check, as the plugin would give it."""
    return Court().judge
