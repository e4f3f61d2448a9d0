"""Fixtures shared by the tests of real released packages."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest

from conformance.judging import judge_all
from pytest_fsdp_meta.catalogue.registry import OBSERVATIONS
from pytest_fsdp_meta.loader.call import Call
from pytest_fsdp_meta.reports.terminal import describe_failure
from pytest_fsdp_meta.trial import ON_RANKS, Trial
from pytest_fsdp_meta.worlds import ForkServerEngine, Sources, WorldSpec

Failures = dict[str, str]


@pytest.fixture(scope="session")
def failures_of() -> Callable[..., Failures]:
    """Return ``failures_of(loader, world, **arguments)``: the message of each check that fails, in one line.

    Tests use it where the message matters: ``xfail`` accepts any finding of its check.
    """

    def run(function: Callable[..., Any], world: WorldSpec, **arguments: Any) -> Failures:
        trial = Trial(world, ForkServerEngine(Sources(tuple(sys.path)), ON_RANKS), steps=3, tolerance={})
        packed = {name: cloudpickle.dumps(value) for name, value in arguments.items()}
        evidence = trial.observe(Call(cloudpickle.dumps(function), packed, "fsdp"), OBSERVATIONS)
        failed = {id: v for id, v in judge_all(evidence).items() if v.status in ("failed", "error")}
        return {id: " ".join(describe_failure(v, "world", "command").split()) for id, v in failed.items()}

    return run
