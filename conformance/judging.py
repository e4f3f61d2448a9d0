"""Judge a loader directly, without pytest items."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import cloudpickle

from pytest_fsdp_meta.catalogue import Verdict, built_in, judge
from pytest_fsdp_meta.catalogue.registry import OBSERVATIONS
from pytest_fsdp_meta.evidence import Evidence
from pytest_fsdp_meta.loader.call import Call
from pytest_fsdp_meta.trial import ON_RANKS, Trial
from pytest_fsdp_meta.worlds import ForkServerEngine, Sources, WorldSpec

Verdicts = dict[str, Verdict]
KINDS = ("llama", "qwen3", "qwen3_moe", "gemma3", "gpt2")
PRELOADED = ("fixtures.defects", "fixtures.forms", *(f"transformers.models.{kind}.modeling_{kind}" for kind in KINDS))
"""Modules that ranks inherit from the fork server. transformers imports an architecture when a model of it is built,
which otherwise each rank would do."""


class LoaderJudge:
    """Judge one loader after another, each in a fresh world, as the plugin does."""

    def __init__(self) -> None:
        self._preload = ForkServerEngine(Sources(tuple(sys.path)), [*ON_RANKS, *PRELOADED])

    def judge(self, function: Callable[..., Any], mesh: Mapping[str, int], **arguments: Any) -> Verdicts:
        """Call ``function`` with ``fsdp`` and the arguments on every rank, and return the verdict of every check."""
        trial = Trial(WorldSpec(mesh, timeout=120), self._preload, steps=3, tolerance={})
        packed = {name: cloudpickle.dumps(value) for name, value in arguments.items()}
        return judge_all(trial.observe(Call(cloudpickle.dumps(function), packed, "fsdp"), OBSERVATIONS))


def judge_all(evidence: Evidence) -> Verdicts:
    """Return the verdict of every built-in check."""
    catalogue = built_in()
    return {check.id: judge(check, evidence, catalogue) for check in catalogue}
