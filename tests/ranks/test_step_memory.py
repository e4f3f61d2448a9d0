"""What ``StepMemoryWatch`` counts, on one process: storages that autograd keeps, by the module that saved them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from fixtures.releases import needs_gather_in_backward
from pytest_fsdp_meta import Subject
from pytest_fsdp_meta.checks.memory.facts import StepMemory
from pytest_fsdp_meta.checks.memory.observe import OWN_STEP, StepMemoryWatch, memory_of, observe_step_memory
from pytest_fsdp_meta.checks.training.observe.first_batch_again import FirstBatchAgain, accumulate, micro_batches
from pytest_fsdp_meta.checks.training.observe.gradients import gradients_of
from pytest_fsdp_meta.ranks import modes
from pytest_fsdp_meta.worlds import current
from tests.world_help import world_of

ROWS, WIDTH = 8, 16
TENSOR = ROWS * WIDTH * 4
"""The bytes of one activation."""


@pytest.fixture(autouse=True)
def a_rank(monkeypatch):
    """What is observed outside of a world knows the device of a rank, and no reason for eval()."""
    monkeypatch.setattr(modes, "current", lambda: SimpleNamespace(device=torch.device("cpu"), state={}))


class Net(nn.Module):
    """Each of the blocks keeps its input for the linear layer, and the output of tanh."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(blocks))

    def forward(self, x: torch.Tensor, again: bool = False) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if again else block(x)
        return x.sum()


def observe(model: nn.Module, run):
    """Let the loss of a subject run something, and then a backward of nothing."""
    return memory_of(Subject(model, batch=dict, loss=partial(loss_after, run)), {})


def loss_after(run, model: nn.Module, _: object) -> torch.Tensor:
    run()
    return torch.zeros((), requires_grad=True) * 1


def batch() -> torch.Tensor:
    return torch.ones(ROWS, WIDTH, requires_grad=True)


def test_storages_are_counted_once_and_weights_not_at_all():
    model, x = Net(), batch()
    seen = observe(model, lambda: model(x).backward())
    assert seen.kept == 3 * TENSOR  # the input, and the output of each tanh, which is also the next input
    assert seen.modules == {"blocks.0.0": TENSOR, "blocks.0.1": TENSOR, "blocks.1.1": TENSOR}
    assert seen.groups == ()


def test_a_checkpointed_block_keeps_its_input_only():
    model, x = Net(4), batch()
    seen = observe(model, lambda: model(x, again=True).backward())
    assert seen.kept == 4 * TENSOR
    assert observe(model, lambda: model(x).backward()).kept == 5 * TENSOR


def test_the_most_at_a_time_counts():
    model, x = Net(), batch()

    def micro_batches() -> None:
        for half in x.chunk(2):
            model(half.clone()).backward()

    assert observe(model, micro_batches).kept == 3 * TENSOR // 2


def gathered_before_its_forward() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """As a linear layer that is an FSDP2 group of its own: hooks for all modules run before its own ones."""
    model = nn.Linear(WIDTH, WIDTH, bias=False)

    def gather(module: nn.Module, _: object) -> None:
        module.weight = nn.Parameter(module.weight.detach().clone())

    model.register_forward_pre_hook(gather)
    return model, lambda: model(batch()).sum()


def gathered_and_used_without_its_module() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    model, x = Net(), batch()

    def head() -> torch.Tensor:
        return nn.functional.linear(x, nn.Parameter(torch.ones(WIDTH, WIDTH))).sum()

    return model, head


def cast_by_autocast(frozen: bool) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    model, x = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(not frozen), batch().bfloat16()

    def run() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).sum()

    return model, run


@pytest.mark.parametrize(
    ("prepare", "kept"),
    [
        (gathered_before_its_forward, TENSOR),
        (gathered_and_used_without_its_module, TENSOR),
        (partial(cast_by_autocast, frozen=False), TENSOR // 2),
        (partial(cast_by_autocast, frozen=True), 0),
    ],
    ids=["own group", "no module", "cast", "frozen and cast"],
)
def test_gathered_and_cast_weights_are_not_counted(prepare, kept):
    model, run = prepare()
    assert observe(model, lambda: run().backward()).kept == kept


def test_code_that_refuses_hooks_is_not_observed_and_gives_the_reason():
    model, x = Net(), batch().detach()
    seen = observe(model, lambda: torch.func.grad(lambda y: model(y))(x))
    assert seen.kept is None
    assert seen.problem.startswith("RuntimeError: torch.func.{grad, vjp, jacrev, hessian} don't yet support saved")
    assert observe(model, lambda: model(batch()).backward()).kept == 3 * TENSOR


class Scaled(torch.autograd.Function):
    """As Megatron's fused gradients, it wants the parameter itself, with its attributes, in the backward."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, slope):
        x, weight = ctx.saved_tensors
        if not isinstance(weight, nn.Parameter):
            raise AttributeError("no main_grad")
        return slope * weight, (slope * x).sum(0)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((WIDTH,), 1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Scaled.apply(x, self.weight)


def accumulated(watched: bool) -> tuple[str, dict[str, list[float]]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Scale(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    for module in (*model, model):
        fully_shard(module, mesh=current().mesh)
    rows = {"x": torch.arange(2.0 * WIDTH).view(2, WIDTH) / WIDTH}
    subject = Subject(model, batch=lambda step: rows, loss=lambda model, batch: model(batch["x"]).square().mean())
    optimizer = torch.optim.SGD(model.parameters())
    again = FirstBatchAgain(subject, current(), (0, 1), {}, optimizer)
    if watched:
        again.run_micro_batches(optimizer)
    else:
        accumulate(subject, optimizer, current().device, [[piece] for piece in micro_batches((0, 1))])
    gradients = {name: part.local.flatten().tolist() for name, part in gradients_of(model)}
    return again.memory.problem if again.memory else "", gradients


@needs_gather_in_backward
def test_a_backward_that_fails_when_it_is_watched_leaves_nothing_behind():
    with world_of(1) as world:
        problem, gradients = world.run(accumulated, True)[0]
        assert problem == "AttributeError: no main_grad"
        assert gradients == world.run(accumulated, False)[0][1]


def test_an_error_after_the_watched_block_is_raised():
    def run(watching):
        with watching:
            pass
        raise ValueError("the second micro-batch")

    with pytest.raises(ValueError, match="the second micro-batch"):
        observe_step_memory(Subject(Net(), batch=dict), run)


def test_the_step_of_the_author_is_not_run_again():
    subject = Subject(Net(), batch=dict, train_step=lambda model, optimizer, batch: 1 / 0)
    assert memory_of(subject, {}) == StepMemory(None, problem=OWN_STEP)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_have_no_rows():
    model = nn.Linear(WIDTH, WIDTH)

    def run() -> None:
        nested = torch.nested.nested_tensor([torch.ones(3, WIDTH), torch.ones(5, WIDTH)])
        torch.nested.to_padded_tensor(model(nested), 0.0).sum().backward()

    assert observe(model, run).kept == 2 * TENSOR


def test_compiled_functions_may_call_modules():
    model, x = Net(), batch()
    compiled = torch.compile(lambda y: model.blocks[0](y), backend="eager", fullgraph=True)
    assert observe(model, lambda: compiled(x).sum().backward()).kept == 2 * TENSOR


def test_second_derivatives_still_work():
    model, x, reached = Net(), batch(), []

    def penalised() -> None:
        [slope] = torch.autograd.grad(model(x), x, create_graph=True)
        slope.square().sum().backward()
        reached.append(model.blocks[0][0].weight.grad is not None)

    assert observe(model, penalised).kept is not None
    assert reached == [True]


def test_nothing_is_held_after_the_step():
    model, x = Net(), batch()
    watch = StepMemoryWatch(model)
    with watch.watching():
        loss = model(x)
        loss.backward()
    del loss
    assert watch._storages == {}
