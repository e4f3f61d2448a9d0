"""What only the ranks have is given to the reference, on real ranks: then the rest of the training is compared."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from pytest_fsdp_meta import Subject
from pytest_fsdp_meta.catalogue import Selection, built_in, judge
from pytest_fsdp_meta.worlds import Rank
from tests.trial_help import batch, build, loss, observe

FREEZING = "requires_grad_matches_reference"
PARITY = GRADIENTS, SECOND, UPDATES, LOSSES = "grad_parity", "second_grad_parity", "update_parity", "loss_parity"
BUGS = ("", GRADIENTS, SECOND, UPDATES)


def outcomes(load, expected: str = "") -> dict[str, str]:
    """Return the outcome of each parity check where a check is ``expected`` to fail."""
    selection = Selection(frozenset(PARITY), frozenset(filter(None, [expected])))
    catalogue, checks = built_in(), (*PARITY, *selection.xfailing)
    evidence = observe(load, checks, selection=selection)
    found = [judge(catalogue[check], evidence, catalogue, selection) for check in PARITY]
    return {verdict.check.id: verdict.why or verdict.status for verdict in found}


def stepping(wrong: str):
    """Return a step that the check named ``wrong`` has to find."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, rows: dict[str, Tensor]) -> Tensor:
        found = loss(model, rows)
        (2 * found if wrong == GRADIENTS else found).backward()
        optimizer.step()
        if wrong != SECOND:
            optimizer.zero_grad()
        if wrong == UPDATES:
            with torch.no_grad():
                next(model.parameters()).mul_(0.9)
        return found.detach()

    return step


def require(found: dict[str, str], wrong: str) -> None:
    assert [check for check, outcome in found.items() if outcome == "failed"] == [wrong] * bool(wrong)
    assert wrong or set(found.values()) == {"passed"}


@pytest.mark.parametrize("wrong", BUGS)
def test_a_frozen_parameter_that_is_expected_hides_nothing_else(wrong):
    def load(fsdp: Rank) -> Subject:
        model = build()
        model[1].bias.requires_grad_(False)
        model = fully_shard(model, mesh=fsdp.mesh)
        return Subject(model, reference=build, batch=batch, loss=loss, train_step=stepping(wrong))

    require(outcomes(load, expected=FREEZING), wrong)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    for parameter in model.parameters():
        moments = {"exp_avg": torch.full_like(parameter, 0.1), "exp_avg_sq": torch.full_like(parameter, 0.2)}
        optimizer.state[parameter] = {"step": torch.tensor(20.0), **moments}
    return optimizer


@pytest.mark.parametrize("wrong", ["", UPDATES])
def test_a_state_that_the_optimizer_already_has(wrong):
    def load(fsdp: Rank) -> Subject:
        model = fully_shard(build(), mesh=fsdp.mesh)
        step = stepping(wrong)
        return Subject(model, reference=build, batch=batch, loss=loss, optimizer=adamw(model), train_step=step)

    require(outcomes(load), wrong)


class Scaled(nn.Module):
    """Multiplies its output by a buffer that no checkpoint contains."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = build()
        self.register_buffer("scale", torch.ones(()), persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        return self.layers(input) * self.scale


@pytest.mark.parametrize(("apart", "outcome"), [(0.0, "partly checked"), (0.5, "differs")])
def test_a_schedule_in_a_buffer_is_given_if_the_ranks_agree_about_it(apart, outcome):
    def load(fsdp: Rank) -> Subject:
        def step(model: nn.Module, optimizer: torch.optim.Optimizer, rows: dict[str, Tensor]) -> Tensor:
            model.scale += 0.25 + apart * fsdp.rank
            return stepping("")(model, optimizer, rows)

        model = fully_shard(Scaled(), mesh=fsdp.mesh)
        return Subject(model, reference=Scaled, batch=batch, loss=loss, train_step=step)

    assert outcomes(load) == dict.fromkeys(PARITY, outcome)  # no selected check compares what is given
