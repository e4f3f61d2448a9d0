"""Schedulers and state beside the model, on real ranks: what authors may declare, and what they may not."""

from __future__ import annotations

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.trial.test_train_step import judged, load, plain_step

CHECKS = ("update_parity", "beside_parity", "beside_round_trip", "resume_parity")


def halve(optimizer):
    return LambdaLR(optimizer, lambda step: 0.5**step)


class Sum:
    """Adds up the loss; not a tensor, so only saved and loaded."""

    total = 0.0

    def state_dict(self):
        return {"total": self.total}

    def load_state_dict(self, state):
        self.total = state["total"]


def test_torchs_own_average_of_a_model_that_is_not_sharded_in_place():
    """AveragedModel copies the model, which fully_shard refuses: an average of the plain weights is one line."""
    average = {"ema": lambda model: AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))}
    found = judged(None, CHECKS, beside=average)
    assert {one.status for one in found.values()} == {"error"}
    assert "Subject(beside={'ema': ...})" in found["beside_parity"].reason


def test_a_step_that_gets_everything_by_name():
    def step(model, optimizer, batch, scheduler, beside):
        found = plain_step(model, optimizer, batch)
        scheduler.step()
        beside["sum"].total += found.item()
        return found

    found = judged(step, CHECKS, scheduler=halve, beside={"sum": Sum()})
    assert {id: one.status for id, one in found.items()} == {
        "update_parity": "passed",
        "beside_parity": "skipped",
        "beside_round_trip": "skipped",
        "resume_parity": "passed",
    }, found
    assert "sum.total differs between the ranks, and torch.distributed.checkpoint keeps one rank's value" in (
        found["beside_round_trip"].reason
    )


def test_a_scheduler_that_steps_by_a_metric_is_refused():
    found = judged(None, CHECKS, scheduler=lambda optimizer: ReduceLROnPlateau(optimizer))
    assert found["update_parity"].status == "error"
    assert "ReduceLROnPlateau steps by a metric, which the reference lacks; leave it out" in (
        found["update_parity"].reason
    )


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        (
            {"scheduler": lambda optimizer: 3},
            "Subject(scheduler=...): it returned int, but should return a scheduler with step() and state_dict()",
        ),
        (
            {"beside": {"ema": lambda model: 3}},
            "Subject(beside=...): 'ema' returned int, but should return an object with state_dict() and "
            "load_state_dict()",
        ),
    ],
)
def test_a_function_that_returns_something_else(declared, message):
    found = judged(None, CHECKS, **declared)
    assert all(one.status == "error" for one in found.values())
    assert found["update_parity"].reason.endswith(message)


def test_a_scheduler_that_the_reference_cannot_build():
    def function(fsdp):
        made = load(fsdp)
        optimizer = made.optimizer = torch.optim.SGD(made.model.parameters(), lr=0.1)
        mesh = fsdp.mesh
        made.scheduler = LambdaLR(optimizer, lambda step: 1.0 / mesh.size())
        return made

    found = judged(None, CHECKS, function=function)
    assert found["update_parity"].status == "error"
    assert "Subject(scheduler=...): the reference cannot build the same scheduler (it holds a DeviceMesh" in (
        found["update_parity"].reason
    )
