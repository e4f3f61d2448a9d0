"""What ``StepMemoryWatch`` counts, on one process: storages that autograd keeps, by the module that saved them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pytest_fsdp_meta.observers.step_memory import StepMemoryWatch

ROWS, WIDTH = 8, 16
TENSOR = ROWS * WIDTH * 4
"""The bytes of one activation."""


class Net(nn.Module):
    """Each of the blocks keeps its input for the linear layer, and the output of tanh."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(blocks))

    def forward(self, x: torch.Tensor, again: bool = False) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if again else block(x)
        return x.sum()


def observe(model: nn.Module, run, rows: int = ROWS):
    watch = StepMemoryWatch(model, rows)
    with watch.around(0):
        run()
    return watch.observed()


def batch() -> torch.Tensor:
    return torch.ones(ROWS, WIDTH, requires_grad=True)


def test_storages_are_counted_once_and_weights_not_at_all():
    model, x = Net(), batch()
    seen = observe(model, lambda: model(x).backward())
    assert seen.kept == 3 * TENSOR  # the input, and the output of each tanh, which is also the next input
    assert seen.modules == {"blocks.0.0": TENSOR, "blocks.0.1": TENSOR, "blocks.1.1": TENSOR}
    assert seen.fixed == 0
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


@pytest.mark.parametrize(("rows", "fixed"), [(ROWS, 0), (ROWS // 2, 0), (5, 3 * TENSOR)])
def test_what_is_not_in_rows_is_fixed(rows, fixed):
    model, x = Net(), batch()
    assert observe(model, lambda: model(x).backward(), rows).fixed == fixed


def test_what_has_the_shape_of_a_weight_may_be_a_cast_of_it():
    model = Net()
    x = torch.ones(WIDTH, WIDTH, requires_grad=True)
    seen = observe(model, lambda: model(x).backward(), rows=WIDTH)
    assert seen.fixed == seen.kept == 6 * TENSOR


def test_only_the_first_step_is_watched():
    model, x = Net(), batch()
    watch = StepMemoryWatch(model)
    with watch.around(1):
        model(x).backward()
    assert watch.observed().kept == 0


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


@pytest.mark.parametrize(
    "transform",
    [
        lambda f, x: torch.func.grad(lambda y: f(y).sum())(x),
        lambda f, x: torch.func.vmap(torch.func.jacrev(f))(x),
        lambda f, x: torch.func.jvp(f, (x,), (x,))[1],
    ],
    ids=["grad", "vmap of jacrev", "jvp"],
)
def test_transforms_of_torch_func_run_as_without_the_watch(transform):
    """torch.func.grad() refuses hooks for saved tensors, and its tensors have no storage."""
    model, x, after = Net(), batch().detach(), batch()
    expected, found = transform(model.blocks[0], x), []

    def run() -> None:
        found.append(transform(model.blocks[0], x).detach())
        model(after).backward()

    assert observe(model, run).kept >= 3 * TENSOR  # the hooks are back
    assert torch.equal(found[0], expected)


def test_hooks_of_the_author_are_refused_as_without_the_watch():
    model, x = Net(), batch().detach()

    def run() -> None:
        with torch.autograd.graph.save_on_cpu():
            torch.func.grad(lambda y: model(y))(x)

    with pytest.raises(RuntimeError, match="don't yet support saved tensor hooks"):
        observe(model, run)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_have_no_rows():
    model = nn.Linear(WIDTH, WIDTH)

    def run() -> None:
        nested = torch.nested.nested_tensor([torch.ones(3, WIDTH), torch.ones(5, WIDTH)])
        torch.nested.to_padded_tensor(model(nested), 0.0).sum().backward()

    seen = observe(model, run)
    assert seen.fixed == seen.kept == 2 * TENSOR


def test_compiled_functions_may_call_modules():
    model, x = Net(), batch()
    compiled = torch.compile(lambda y: model.blocks[0](y), backend="eager", fullgraph=True)
    assert observe(model, lambda: compiled(x).sum().backward()).kept == 2 * TENSOR


@pytest.mark.parametrize("compile_it", ["wrapped", "in place"])
def test_compiled_modules_are_left_alone(compile_it):
    model, x = Net(), batch()
    if compile_it == "wrapped":
        model.blocks[0] = torch.compile(model.blocks[0], backend="eager")
    else:
        model.blocks[0].compile(backend="eager")
    assert observe(model, lambda: model(x).backward()).kept is None


def test_gradients_are_the_same_bits():
    model = Net()
    plain, watched = batch(), batch()
    model(plain).backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    observe(model, lambda: model(watched).backward())
    assert torch.equal(plain.grad, watched.grad)
    assert all(torch.equal(p.grad, truth) for p, truth in zip(model.parameters(), expected, strict=True))


def test_second_derivatives_still_work():
    model, x = Net(), batch()

    def penalised() -> None:
        [slope] = torch.autograd.grad(model(x), x, create_graph=True)
        slope.square().sum().backward()

    observe(model, penalised)
    assert all(parameter.grad is not None for parameter in model.blocks[0].parameters())


def test_an_overwritten_tensor_is_an_error_as_without_the_watch():
    """Where a hook sees what is saved, torch no longer compares its version."""
    model, x = Net(), batch()

    def overwrite() -> None:
        y = x * 2
        z = y * y
        with torch.no_grad():
            y.add_(1)
        z.sum().backward()

    message = r"has been modified by an inplace operation"
    with pytest.raises(RuntimeError, match=message):
        overwrite()
    with pytest.raises(RuntimeError, match=message + r": a \[8, 16\] tensor is at version 1, but version 0 is needed"):
        observe(model, overwrite)


def test_nothing_is_held_after_the_step():
    model, x = Net(), batch()
    watch = StepMemoryWatch(model)
    with watch.around(0):
        loss = model(x)
        loss.backward()
    del loss
    assert watch._storages == {}
