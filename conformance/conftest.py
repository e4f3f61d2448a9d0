"""Fixtures: tiny checkpoints, made once per session, and a function that judges a loader without pytest items."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from conformance.judging import PRELOADED, LoaderJudge, Verdicts
from fixtures.forms import FORMS
from fixtures.tiny import save_tiny
from pytest_fsdp_meta import standin
from pytest_fsdp_meta.plugin.settings import read_settings

BEGAN = time.monotonic()
collect_ignore = ["systems"]  # these need separate environments: make systems


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--say-it-works", action="store_true", help="end with one line: what worked here (make conformance)"
    )


def pytest_unconfigure(config: pytest.Config) -> None:
    """Say in the very last line that the product works on this machine, and with what."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or hasattr(config, "workerinput") or not config.getoption("--say-it-works", False):
        return
    passed, bad = (
        sum(len(reporter.stats.get(kind, ())) for kind in kinds) for kinds in (["passed"], ["failed", "error"])
    )
    settings, gpus = read_settings(config), torch.cuda.device_count()
    auto = f"{gpus} GPUs where a world has enough, else the CPU" if gpus else "the CPU, with gloo"
    device = auto if settings.device == "auto" else f"{settings.device}, backend {settings.backend}"
    said = (
        f"works on this machine: {passed} tests passed" if passed and not bad else f"does not work: {bad} tests failed"
    )
    print(f"pytest-fsdp-meta {said} in {time.monotonic() - BEGAN:.0f} s (on {device}; torch {torch.__version__})")


def pytest_fsdp_preload() -> list[str]:
    return list(PRELOADED)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that maps an architecture, such as "llama", to the directory of its tiny checkpoint."""
    saved: dict[str, Path] = {}

    def save(name: str) -> Path:
        if name not in saved:
            saved[name] = save_tiny(name, tmp_path_factory.mktemp("checkpoint") / name)
        return saved[name]

    return save


@pytest.fixture
def path(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]) -> Path:
    """Return the checkpoint whose name the test is parametrized with (``indirect=True``)."""
    return checkpoint(request.param)


@pytest.fixture(scope="session")
def loader_judge(request: pytest.FixtureRequest) -> LoaderJudge:
    """Return a judge of loaders on the device of ``--fsdp-device``, which is the CPU unless one is named."""
    settings = read_settings(request.config)
    if settings.device == standin.NAME:
        standin.prepare()
    return LoaderJudge("cpu" if settings.device == "auto" else settings.device, settings.backend)


@pytest.fixture(scope="session")
def judge_loader(loader_judge: LoaderJudge) -> Callable[..., Verdicts]:
    """Return ``judge_loader(function, mesh, **arguments)``, which returns the verdict of every check."""
    return loader_judge.judge


@pytest.fixture(scope="session")
def usual_skips(checkpoint: Callable[[str], Path], judge_loader: Callable[..., Verdicts]) -> set[str]:
    """Return the checks that do not apply to the model in any form (nothing is frozen, nothing is tied)."""
    usual = FORMS["per_block_and_root"]
    verdicts = judge_loader(usual.load, usual.mesh, device="cpu", path=checkpoint(usual.architecture or ""))
    return {id for id, verdict in verdicts.items() if verdict.status == "skipped"}
