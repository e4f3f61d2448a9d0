"""Count the backwards of the author's own step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pytest_fsdp_meta import Subject
from pytest_fsdp_meta.checks.training.observe.author_step import run_author_step
from pytest_fsdp_meta.checks.training.observe.beside import Beside


def backwards_of(train_step: Any) -> int:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    subject = Subject(model, train_step=train_step)
    _, count = run_author_step(subject, optimizer, {"input": torch.ones(2, 2)}, 0, lambda: None, Beside())
    return count


def in_parts(model, optimizer, batch):
    for row in batch["input"]:
        model(row).sum().backward()
    optimizer.step()
    return 0.0


def by_the_function(model, optimizer, batch):
    torch.autograd.backward([model(batch["input"]).sum()])
    optimizer.step()
    return 0.0


def with_checkpointing(model, optimizer, batch):
    """Reentrant checkpointing runs a backward of its own inside of the step's."""
    checkpoint(model, batch["input"].requires_grad_(), use_reentrant=True).sum().backward()
    optimizer.step()
    return 0.0


@pytest.mark.parametrize(("step", "count"), [(in_parts, 2), (by_the_function, 1), (with_checkpointing, 1)])
def test_the_outermost_backwards_count(step, count):
    backward = torch.autograd.backward
    assert backwards_of(step) == count
    assert torch.autograd.backward is backward


def test_a_backward_that_raises_leaves_nothing_behind():
    def step(model, optimizer, batch):
        with pytest.raises(RuntimeError, match="does not require grad"):
            torch.zeros(1).backward()
        return in_parts(model, optimizer, batch)

    assert backwards_of(step) == 3


@pytest.mark.parametrize("step", [in_parts, by_the_function, with_checkpointing])
def test_gradients_can_be_scaled(step):
    def gradient(scale: float) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        subject = Subject(model, train_step=step)
        run_author_step(
            subject, optimizer, {"input": torch.ones(2, 2)}, 0, lambda: None, Beside(), gradient_scale=scale
        )
        assert model.weight.grad is not None
        return model.weight.grad

    assert torch.equal(gradient(0.25), gradient(1.0) / 4)


def test_gradients_that_are_given_to_a_backward_are_scaled():
    def step(model, optimizer, batch):
        output = model(batch["input"])
        output.backward(torch.full_like(output, 3.0))
        optimizer.step()
        return 0.0

    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    subject = Subject(model, train_step=step)
    run_author_step(subject, optimizer, {"input": torch.ones(2, 2)}, 0, lambda: None, Beside(), gradient_scale=0.5)
    assert model.bias.grad.tolist() == [3.0, 3.0]
