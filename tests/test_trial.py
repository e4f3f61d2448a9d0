"""A trial on real ranks, from the loader to the verdicts."""

from __future__ import annotations

from collections.abc import Callable

import cloudpickle
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from pytest_fsdp_meta import Subject
from pytest_fsdp_meta.catalogue import Verdict, built_in, judge
from pytest_fsdp_meta.trial import Loader, Trial
from pytest_fsdp_meta.worlds import Rank, WorldSpec
from tests.evidence_factory import told
from tests.world_help import preload

TRAINABLE, PARITY = "requires_grad_matches_reference", "loss_parity"


def build() -> nn.Sequential:
    """The reference: it freezes nothing, like one that is just read from a checkpoint."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def batch(step: int) -> dict[str, Tensor]:
    return {"input": torch.linspace(-1.0, 1.0, 16).view(4, 4) + step}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).square().mean()


def subject(fsdp: Rank, freeze: bool, **declared: str) -> Subject:
    """Sharded, the first layer frozen or not."""
    model = build()
    model[0].requires_grad_(not freeze)
    fully_shard(model[0], mesh=fsdp.mesh)
    fully_shard(model, mesh=fsdp.mesh)
    return Subject(model, reference=build, batch=batch, loss=loss, **declared)


def frozen_as_declared(fsdp: Rank) -> Subject:
    return subject(fsdp, freeze=True, frozen="0.*")


def frozen_and_not_declared(fsdp: Rank) -> Subject:
    return subject(fsdp, freeze=True)


def declared_and_not_frozen(fsdp: Rank) -> Subject:
    return subject(fsdp, freeze=False, frozen="0.*")


def judged(function: Callable[[Rank], Subject]) -> dict[str, Verdict]:
    trial = Trial(WorldSpec({"dp_shard": 2}, timeout=60), preload(), steps=3, tolerance={})
    loader = Loader(cloudpickle.dumps(function), wants_rank="fsdp")
    evidence = trial.observe(loader, {"reference", "values", "verifier", "training"})
    catalogue = built_in()
    return {check.id: judge(check, evidence, catalogue) for check in catalogue}


def test_what_is_declared_frozen_is_frozen_in_the_reference_as_well():
    verdicts = judged(frozen_as_declared)
    assert {id: (found.status, found.reason) for id, found in verdicts.items() if found.status != "passed"} == {}
    assert {TRAINABLE, PARITY} <= set(verdicts)


def test_what_is_frozen_and_not_declared_is_trained_by_the_reference():
    verdicts = judged(frozen_and_not_declared)
    assert told(verdicts[TRAINABLE]) == [
        ("0.weight", (0, 1), "frozen", "trainable", ""),
        ("0.bias", (0, 1), "frozen", "trainable", ""),
    ]
    assert verdicts[PARITY].status == "skipped"
    assert verdicts[PARITY].reason.startswith("the losses differ (step 1: ")
    assert verdicts[PARITY].reason.endswith(f"which the findings of {TRAINABLE} explain; mend those first")


def test_what_is_declared_frozen_and_trains_is_found():
    verdicts = judged(declared_and_not_frozen)
    assert told(verdicts[TRAINABLE]) == [
        ("0.weight", (0, 1), "trainable", "frozen", ""),
        ("0.bias", (0, 1), "trainable", "frozen", ""),
    ]
    assert verdicts[PARITY].status == "skipped"
    assert verdicts[PARITY].reason.endswith(f"which the findings of {TRAINABLE} explain; mend those first")
