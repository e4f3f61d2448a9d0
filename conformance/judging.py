"""Judge a loader directly, without pytest items."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import cloudpickle
import pytest

from conformance.contract import judge_all
from fixtures.needs import lacking
from pytest_fsdp_meta.catalogue import Selection, Verdict, built_in
from pytest_fsdp_meta.evidence import Evidence
from pytest_fsdp_meta.loader.call import Call
from pytest_fsdp_meta.reports.terminal import describe_failure
from pytest_fsdp_meta.trial import ON_RANKS, Trial, judge_smaller_worlds
from pytest_fsdp_meta.worlds import ForkServerEngine, Sources, WorldSpec, choose, choose_simulated

Verdicts = dict[str, Verdict]
KINDS = ("llama", "qwen3", "qwen3_moe", "gemma3", "gpt2")
PRELOADED = ("fixtures.defects", "fixtures.forms", *(f"transformers.models.{kind}.modeling_{kind}" for kind in KINDS))
"""Modules that ranks inherit from the fork server. transformers imports an architecture when a model of it is built,
which otherwise each rank would do."""
DEVICE_MEMORY = 64 * 2**20
"""Bytes of the device that a simulated rank would have: the steps of all forms fit."""
RESERVE = 0.06
MAY_SKIP = {
    "grad_norm_parity": "torch cannot compute the norm of these gradients",
    "shard_bytes_within_budget": "no parameter is sharded",
    "load_peak_memory_bounded": "",
    "step_memory_bounded": "what backward keeps is not compared",
    "grad_accumulation_parity": "train_step runs one backward",
    "ranks_skip_alike": "",
}
"""Skips that forms need not declare, with a part of their reason: for models that are whole on every rank or compiled,
steps of the author's own, and gradients that lie on several meshes, which torch's clip_grad_norm_ cannot mix."""


class LoaderJudge:
    """Judge one loader after another, each in a fresh world, as the plugin does."""

    def __init__(self, device: str = "cpu", backend: str = "auto") -> None:
        self.device, self._backend = device, backend
        self._preload = ForkServerEngine(Sources(tuple(sys.path)), [*ON_RANKS, *PRELOADED])

    def judge(
        self,
        function: Callable[..., Any],
        mesh: Mapping[str, int],
        checks: Collection[str] = (),
        simulated: bool = False,
        device: str = "",
        **arguments: Any,
    ) -> Verdicts:
        """Call ``function`` with ``fsdp`` and the arguments on every rank, and return the verdict of every check.

        With ``checks``, only what these checks and the more basic ones read is observed; the checks that read anything
        else are skipped.
        """
        return judge_all(self.observe(function, mesh, checks, simulated=simulated, device=device, **arguments))

    def observe(
        self,
        function: Callable[..., Any],
        mesh: Mapping[str, int],
        checks: Collection[str] = (),
        localise: bool = False,
        simulated: bool = False,
        device: str = "",
        timeout: float = 120,
        smaller: bool = False,
        **arguments: Any,
    ) -> Evidence:
        """Return what these checks read; with ``localise``, the first step is traced module by module in any case.

        With ``smaller``, what fails is judged once more in smaller worlds, as the plugin does.
        """
        if simulated:
            ranks = choose_simulated(mesh)
            spec = WorldSpec(
                mesh, timeout=timeout, simulated=ranks, device_memory=DEVICE_MEMORY, memory_reserve=RESERVE
            )
        else:
            spec = self._on_device(WorldSpec(mesh, device or self.device, timeout=timeout))
        trial = Trial(spec, self._preload, steps=3, tolerance={}, localise=localise)
        catalogue = built_in()
        ids = list(checks or catalogue.ids())
        packed = {name: cloudpickle.dumps(value) for name, value in arguments.items()}
        call = Call(cloudpickle.dumps(function), packed, "fsdp")
        evidence = trial.observe(call, catalogue.observations(ids))
        return judge_smaller_worlds(trial, call, evidence, catalogue, ids, Selection()) if smaller else evidence

    def _on_device(self, world: WorldSpec) -> WorldSpec:
        if world.device_type != "cuda":
            return world
        gpus = self._preload.count_gpus()
        _, backend = choose(world.size, "cuda", self._backend, gpus)
        if "pp" in world.mesh and backend == "gloo":
            pytest.skip("a pipeline needs NCCL: gloo cannot send tensors from GPU memory between stages")
        return replace(world, backend=backend, devices=tuple(rank % gpus for rank in range(world.size)))


def unexpected(verdicts: Verdicts, skips: Mapping[str, str], usual: Collection[str]) -> dict[str, str]:
    """Return what is wrong with the verdicts of a conforming form, by check; empty if it conforms.

    ``skips`` are those of the form, each with a part of its reason; it may also skip what the ``usual`` form does.
    """
    found = {}
    for id, verdict in verdicts.items():
        skipped = verdict.status == "skipped"
        if verdict.status in ("failed", "error"):
            found[id] = describe_failure(verdict, "world", "command")
        elif id in skips and not (skipped and skips[id] in verdict.reason):
            found[id] = f"{verdict.status} ({verdict.reason}), but should be skipped: {skips[id]}"
        elif skipped and id not in skips and id not in usual and not _may_skip(verdict):
            found[id] = f"skipped, but should be judged: {verdict.reason}"
    return found


def _may_skip(verdict: Verdict) -> bool:
    id = verdict.check.id
    return id in MAY_SKIP and MAY_SKIP[id] in verdict.reason and verdict.why != "differs"


def require(needed: str) -> None:
    """Skip the test if the installed releases lack what a loader needs."""
    if lack := lacking(needed):
        pytest.skip(lack)
