"""Count the backwards of the author's own step, and find the buffers that it changes by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pytest_fsdp_meta import Subject
from pytest_fsdp_meta.checks.training.observe.author_step import run_author_step
from pytest_fsdp_meta.checks.training.observe.beside import Beside
from pytest_fsdp_meta.checks.training.observe.trained_buffers import BufferWatch


def backwards_of(train_step: Any) -> int:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    subject = Subject(model, train_step=train_step)
    _, count, _ = run_author_step(subject, optimizer, {"input": torch.ones(2, 2)}, 0, lambda: None, Beside())
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


class Counting(nn.Module):
    """Two layers; hooks count their forwards, in either mode."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("own", torch.ones(()))
        self.first.register_forward_pre_hook(self.count)
        self.second.register_forward_hook(self.count)

    def count(self, *_: object) -> None:
        self.calls += 1

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)) * self.own


def learn(model, optimizer, batch):
    model(batch["input"]).sum().backward()
    optimizer.step()
    return 0.0


def count_first(model, optimizer, batch):
    model.own += 1
    return learn(model, optimizer, batch)


def count_last(model, optimizer, batch):
    learn(model, optimizer, batch)
    model.own += 1
    return 0.0


def count_between_closures(model, optimizer, batch):
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(batch["input"]).sum()
        loss.backward()
        model.own += 1
        return loss

    optimizer.step(closure)
    return 0.0


def one_after_another(model, optimizer, batch):
    model.second(model.first(batch["input"])).sum().backward()
    optimizer.step()
    return 0.0


def evaluate_afterwards(model, optimizer, batch):
    learn(model, optimizer, batch)
    model.eval()
    with torch.no_grad():
        model(batch["input"])
    model.train()
    return 0.0


def within_its_wrapper(step):
    def within(model, optimizer, batch):
        return step(model.module, optimizer, batch)

    return within


class Wrapper(nn.parallel.DistributedDataParallel):
    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize(
    ("step", "moments", "by_evaluation", "forwards"),
    [
        (learn, {}, [], 1),
        (count_first, {(2, "forward"): 2.0}, [], 1),
        (count_last, {(2, "end"): 2.0}, [], 1),
        (count_between_closures, {(2, "update"): 2.0}, [], 1),
        (one_after_another, {}, [], 0),
        (evaluate_afterwards, {}, ["calls"], 1),
    ],
)
def test_buffers_that_a_step_changes_by_itself(step, moments, by_evaluation, forwards, wrapped):
    model = Wrapper(Counting()) if wrapped else Counting()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    subject, watch = Subject(model, train_step=within_its_wrapper(step) if wrapped else step), BufferWatch(model)
    with watch.during(2):
        run_author_step(subject, optimizer, {"input": torch.ones(2, 2)}, 0, lambda: None, Beside(), buffers=watch)
    assert {when: changed["own"].item() for when, changed in watch.moments.items()} == moments
    assert (list(watch.by_evaluation), watch.forwards) == (by_evaluation, forwards)
