"""Buffers that training changes, on real ranks: what rounds differently and what accumulates is no finding."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fixtures.forms_buffers import (
    alone,
    load_tracked,
    mean_of_ranks,
    routed_subject,
    step_in_pieces,
    sum_of_ranks,
    tracked,
    tracked_subject,
)
from pytest_fsdp_meta import Subject
from pytest_fsdp_meta.catalogue import Verdict
from pytest_fsdp_meta.worlds import Rank
from tests.trial.test_reloading import for_torch, from_torch
from tests.trial_help import batch, judge_all, loss, observe

CHECKS = ("buffers_follow_training", "replicas_stay_equal")


def judged(load: Callable[[Rank], Subject]) -> dict[str, Verdict]:
    return judge_all(observe(load, CHECKS), CHECKS)


def in_bfloat16(fsdp: Rank) -> Subject:
    model = tracked(mean_of_ranks)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    fully_shard(model.hidden, mesh=fsdp.mesh, mp_policy=policy)
    fully_shard(model, mesh=fsdp.mesh, mp_policy=policy)
    return tracked_subject(model)


def routed_in_pieces(fsdp: Rank) -> Subject:
    made = routed_subject(fsdp, sum_of_ranks)
    made.train_step = step_in_pieces
    return made


def routed_and_checkpointed(fsdp: Rank) -> Subject:
    made = routed_subject(fsdp, sum_of_ranks)
    made.model.router = checkpoint_wrapper(made.model.router)
    return made


@pytest.mark.parametrize(
    "load",
    [
        in_bfloat16,
        *(pytest.param(load, marks=pytest.mark.nightly) for load in (routed_in_pieces, routed_and_checkpointed)),
    ],
)
def test_right_buffers_pass(load):
    assert {id: (v.status, v.reason) for id, v in judged(load).items()} == dict.fromkeys(CHECKS, ("passed", ""))


def test_without_a_reference_the_replicas_are_compared():
    def load(fsdp: Rank) -> Subject:
        made = tracked_subject(load_tracked(fsdp, alone))
        made.reference = None
        return made

    verdicts = judged(load)
    assert [f.tensor for f in verdicts["replicas_stay_equal"].findings] == ["hidden.0.mean"]
    assert verdicts["buffers_follow_training"].why == "not declared"


@pytest.mark.nightly
def test_only_what_changed_is_recorded():
    def load(fsdp: Rank) -> Subject:
        model = load_tracked(fsdp, mean_of_ranks)
        model.register_buffer("constant", torch.ones(3))
        made = tracked_subject(model)
        made.reference = build_with_constant
        return made

    evidence = observe(load, CHECKS)
    for run in evidence.training:
        assert {c.name for c in run.buffers.first} == {c.name for c in run.buffers.last}
        assert {c.name for c in run.buffers.last} == {"hidden.0.mean", "hidden.0.forwards"}
        assert run.buffers.forwards == 0
    pieces = observe(routed_in_pieces, CHECKS).training[0].buffers
    assert pieces.forwards == 6


def build_with_constant() -> nn.Module:
    model = tracked()
    model.register_buffer("constant", torch.ones(3))
    return model


class Centred(nn.Module):
    """Subtracts a mean that no checkpoint has, as self-distillation does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)
        self.register_buffer("center", torch.zeros(4), persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        found = self.first(input)
        output: Tensor = self.last(found - self.center)
        if self.training:
            self.center = 0.5 * (self.center + self.mean(found.detach()))
        return output

    def mean(self, rows: Tensor) -> Tensor:
        return rows.mean(0)


class CentredOverRanks(Centred):
    def mean(self, rows: Tensor) -> Tensor:
        return mean_of_ranks(rows.mean(0))


def centred(kind: type[Centred] = Centred) -> Centred:
    torch.manual_seed(0)
    return kind()


def load_centred(fsdp: Rank, kind: type[Centred]) -> Subject:
    model, optimizer = fully_shard(centred(kind), mesh=fsdp.mesh), partial(torch.optim.SGD, lr=1e-3)
    declared: dict[str, Any] = {"reference": centred, "batch": batch, "loss": loss, "optimizer": optimizer}
    return Subject(model, **declared, save=for_torch, resume=from_torch)


def test_a_buffer_that_no_checkpoint_has_is_named_where_it_is_the_cause():
    checks = ("second_grad_parity", "resume_parity")
    right = judge_all(observe(partial(load_centred, kind=CentredOverRanks), checks), checks)
    assert right["second_grad_parity"].status == "passed"
    [lost] = right["resume_parity"].findings  # each load begins with zeros
    assert lost.cause.startswith("after loading, center has other values than in the uninterrupted run")
    wrong = judge_all(observe(partial(load_centred, kind=Centred), checks), checks)
    found = wrong["second_grad_parity"].findings
    assert found
    assert all("then the ranks change center otherwise" in finding.cause for finding in found)
