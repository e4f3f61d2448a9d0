"""What the judgements of the real packages share."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest

from conformance.judging import verdicts
from pytest_fsdp_meta.catalogue.registry import OBSERVATIONS
from pytest_fsdp_meta.loader.call import Call
from pytest_fsdp_meta.reports.terminal import describe_failure
from pytest_fsdp_meta.trial import ON_RANKS, Trial
from pytest_fsdp_meta.worlds import ForkServerEngine, Sources, WorldSpec

Mismatch = dict[str, str]


@pytest.fixture(scope="session")
def told() -> Callable[..., Mismatch]:
    """``told(loader, world, **arguments)``: what each check that does not pass says of the loader, words in one line.

    For findings whose words matter: an expected failure (``xfail``) accepts any finding of its check.
    """

    def run(function: Callable[..., Any], world: WorldSpec, **arguments: Any) -> Mismatch:
        trial = Trial(world, ForkServerEngine(Sources(tuple(sys.path)), ON_RANKS), steps=3, tolerance={})
        packed = {name: cloudpickle.dumps(value) for name, value in arguments.items()}
        evidence = trial.observe(Call(cloudpickle.dumps(function), packed, "fsdp"), OBSERVATIONS)
        broken = {id: v for id, v in verdicts(evidence).items() if v.status in ("failed", "error")}
        return {id: " ".join(describe_failure(v, "world", "command").split()) for id, v in broken.items()}

    return run
