"""Helpers for tests of trials: run one on real ranks, and judge what it observes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn

from pytest_fsdp_meta.catalogue import Verdict, built_in, judge
from pytest_fsdp_meta.evidence import Evidence
from pytest_fsdp_meta.loader.call import Call
from pytest_fsdp_meta.trial import Trial
from pytest_fsdp_meta.worlds import WorldSpec
from tests.world_help import trial_preload


def build() -> nn.Sequential:
    """Build the reference, which freezes nothing, like one that is just read from a checkpoint."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def batch(step: int) -> dict[str, Tensor]:
    return {"input": torch.linspace(-1.0, 1.0, 16).view(4, 4) + step}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).square().mean()


def observe(
    loader: Callable[..., Any],
    checks: Iterable[str] = (),
    *,
    wanted: Iterable[str] = (),
    mesh: Mapping[str, int] | None = None,
    timeout: float = 60.0,
    steps: int = 3,
    arguments: Mapping[str, Any] | None = None,
    **options: Any,
) -> Evidence:
    """Run the loader on ranks, 2 by default, and take the observations that the checks need and those ``wanted``.

    ``arguments`` are those of the loader, beside the rank, and ``options`` those of ``Trial``.
    """
    spec = WorldSpec({"dp_shard": 2} if mesh is None else dict(mesh), timeout=timeout)
    packed = {name: cloudpickle.dumps(value) for name, value in (arguments or {}).items()}
    trial = Trial(spec, trial_preload(), steps, {}, **options)
    return trial.observe(Call(cloudpickle.dumps(loader), packed, "fsdp"), {*wanted, *built_in().observations(checks)})


def judge_all(evidence: Evidence, checks: Iterable[str]) -> dict[str, Verdict]:
    """Return the verdict of each check."""
    catalogue = built_in()
    return {id: judge(catalogue[id], evidence, catalogue) for id in checks}
