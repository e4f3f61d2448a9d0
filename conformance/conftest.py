"""Tiny checkpoints, made once per session, and the judgement of a loader without going through pytest items."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from fixtures.tiny import save_tiny
from pytest_fsdp_meta.catalogue import Verdict, built_in, judge
from pytest_fsdp_meta.catalogue.registry import OBSERVATIONS
from pytest_fsdp_meta.evidence import Evidence
from pytest_fsdp_meta.trial import ON_RANKS, Loader, Trial
from pytest_fsdp_meta.worlds import Preload, Sources, WorldSpec

Verdicts = dict[str, Verdict]


def pytest_fsdp_preload() -> list[str]:
    return ["fixtures.defects"]


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
    preload = Preload(Sources(tuple(sys.path)), [*ON_RANKS, "fixtures.defects"])

    def run(function: Callable[..., Any], mesh: Mapping[str, int], **arguments: Any) -> Verdicts:
        trial = Trial(WorldSpec(mesh, timeout=120), preload, steps=3, tolerance={})
        packed = {name: cloudpickle.dumps(value) for name, value in arguments.items()}
        loader = Loader(cloudpickle.dumps(function), packed, "fsdp")
        evidence = trial.observe(loader, OBSERVATIONS)
        return verdicts(evidence)

    return run


def verdicts(evidence: Evidence) -> Verdicts:
    catalogue = built_in()
    return {check.id: judge(check, evidence, catalogue) for check in catalogue}
