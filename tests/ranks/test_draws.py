"""Which modules draw random numbers, from which state, and what the numbers are applied to."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from pytest_fsdp_meta.checks.random_numbers.facts import OWN_GENERATOR, Draw
from pytest_fsdp_meta.checks.random_numbers.observe import DrawsWithoutDropout, watching_draws
from pytest_fsdp_meta.ranks.bits import digest
from pytest_fsdp_meta.ranks.generators import draw_from_all, read_states, seed_of, set_states
from pytest_fsdp_meta.worlds import SEED

CPU = torch.device("cpu")
ACTIVATION = torch.linspace(-1.0, 1.0, 24).view(2, 3, 4)


class Drawing(nn.Module):
    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, hidden: Tensor) -> Tensor:
        return self.draw(hidden)


def drawn(*inner: nn.Module | Callable[[Tensor], Tensor], seed: int = 5) -> list[Draw]:
    model = nn.Sequential(*(part if isinstance(part, nn.Module) else Drawing(part) for part in inner)).train()
    torch.manual_seed(seed)
    with watching_draws(model, CPU) as watch:
        model(ACTIVATION.clone())
        assert not watch.hidden
    return watch.draws


def masked(hidden: Tensor) -> Tensor:
    return hidden * (torch.rand_like(hidden) > 0.5)


def masked_by_a_probability(hidden: Tensor) -> Tensor:
    mask = torch.bernoulli(torch.full(hidden.shape, 0.5))
    return hidden * mask.div(0.5)


def masked_by_ones(hidden: Tensor) -> Tensor:
    """One mask for several uses, as in variational dropout."""
    return hidden * functional.dropout(torch.ones_like(hidden))


def path_dropped(hidden: Tensor) -> Tensor:
    kept = 0.9 + torch.rand(hidden.shape[0], 1, 1)
    return hidden.div(0.9) * kept.floor_()


def noisy(hidden: Tensor) -> Tensor:
    return hidden + torch.randn(hidden.shape) * 0.1


def jittered(hidden: Tensor) -> Tensor:
    """A router that overwrites its input."""
    return hidden.mul_(torch.empty_like(hidden).uniform_(0.9, 1.1))


def filled(hidden: Tensor) -> Tensor:
    return hidden.masked_fill(torch.rand(hidden.shape) < 0.1, 0.0)


@pytest.mark.parametrize(
    "draw",
    [
        *(functional.dropout, masked, masked_by_a_probability, masked_by_ones, path_dropped, noisy, jittered, filled),
        pytest.param(lambda hidden: functional.dropout(hidden.clone(), inplace=True), id="in place"),
    ],
)
def test_what_numbers_are_applied_to(draw):
    once, other, again = drawn(draw), drawn(draw, seed=6), drawn(lambda hidden: draw(hidden + 1))
    assert len(once) == 1
    assert once[0].operand
    assert (once[0].module, once[0].call, once[0].generator) == ("0", 0, "cpu")
    assert once[0].operand == other[0].operand != again[0].operand
    assert once[0].state == again[0].state != other[0].state


def test_the_operand_of_a_dropout_is_its_input():
    [draw] = drawn(nn.Dropout(0.5))
    assert (draw.operand, draw.shape, draw.operator) == (digest(ACTIVATION), (2, 3, 4), "bernoulli_")


def test_an_operand_of_one_byte_per_element():
    [draw] = drawn(lambda hidden: torch.rand_like(hidden.to(torch.float8_e4m3fn), dtype=torch.float32) + hidden)
    assert draw.operand


def test_attention_draws_for_its_own_scores():
    def attend(hidden: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(hidden, hidden, hidden, dropout_p=0.5)

    [draw] = drawn(attend)
    assert draw.operand


def test_a_module_that_is_skipped_at_random_has_no_operand():
    def skip(hidden: Tensor) -> Tensor:
        return hidden if torch.rand([]) < 0.5 else -hidden

    [draw] = drawn(skip)
    assert draw.operand == ""


def test_draws_have_their_module_and_number():
    draws = drawn(nn.Sequential(nn.Dropout(0.5), Drawing(lambda hidden: masked(noisy(hidden)))), nn.Dropout(0.5))
    assert [(draw.module, draw.call) for draw in draws] == [("0.0", 0), ("0.1", 0), ("0.1", 1), ("1", 0)]
    assert len({draw.state for draw in draws}) == 4


def test_draws_that_a_backward_repeats_are_those_of_the_same_module():
    model = nn.Sequential(nn.Dropout(0.5))
    with watching_draws(model, CPU) as watch:
        checkpoint(model[0], ACTIVATION.clone().requires_grad_(), use_reentrant=False).sum().backward()
    assert [(draw.module, draw.call) for draw in watch.draws] == [("0", 0), ("0", 1)]
    assert watch.draws[0].state == watch.draws[1].state


class Rounded(torch.autograd.Function):
    """Rounds activations and their gradients by chance."""

    @staticmethod
    def forward(ctx, hidden):
        return hidden + torch.rand_like(hidden)

    @staticmethod
    def backward(ctx, gradient):
        return gradient + torch.rand_like(gradient)


def test_a_backward_that_draws_for_itself_repeats_nothing():
    model = nn.Sequential(Drawing(lambda hidden: Rounded.apply(hidden) ** 2))
    with watching_draws(model, CPU) as watch:
        model(ACTIVATION.clone().requires_grad_()).sum().backward()
    assert [(draw.operator, draw.again) for draw in watch.draws] == [("rand_like", False)] * 2
    with watching_draws(model, CPU) as watch:
        checkpoint(model[0], ACTIVATION.clone().requires_grad_(), use_reentrant=False).sum().backward()
    assert [draw.again for draw in watch.draws] == [False, True, False]


@pytest.mark.parametrize(
    ("draw", "for_all_rows"),
    [
        (masked, False),
        (masked_by_a_probability, False),
        (path_dropped, False),
        (functional.dropout, False),
        (functional.dropout1d, False),
        (lambda hidden: hidden * (torch.rand(()) > 0.1), True),
        (lambda hidden: hidden * (torch.rand(1, 1, 4) > 0.1), True),
        (lambda hidden: hidden + torch.rand(4), True),
        (lambda hidden: hidden[:1] * torch.rand(1, 3, 4), False),
    ],
)
def test_numbers_for_all_rows(draw, for_all_rows):
    assert [draw.for_all_rows for draw in drawn(draw)] == [for_all_rows]


def test_what_draws_nothing():
    assert not drawn(nn.Dropout(0.0), nn.Linear(4, 4))
    model = nn.Sequential(nn.Dropout(0.5)).eval()
    with watching_draws(model, CPU) as watch:
        model(ACTIVATION)
    assert not watch.draws


def test_seeds():
    assert [(draw.seed, draw.seeded) for draw in drawn(nn.Dropout(0.5))] == [(5, True)]
    assert [draw.seeded for draw in drawn(nn.Dropout(0.5), seed=SEED)] == [False]
    generator = torch.Generator().manual_seed(SEED)
    [own] = drawn(lambda hidden: hidden + torch.rand(hidden.shape, generator=generator), seed=SEED)
    assert (own.generator, own.seed, own.seeded) == (OWN_GENERATOR, SEED, True)


def test_compiled_modules_run_eagerly():
    compiled = nn.Dropout(0.5)
    compiled.compile(backend="aot_eager")
    assert [draw.operator for draw in drawn(compiled)] == ["bernoulli_"]


def test_numbers_that_no_operator_draws_are_hidden():
    model = nn.Sequential(nn.Dropout(0.5))
    with watching_draws(model, CPU) as watch:
        torch.manual_seed(9)  # as a kernel that advances the generator by itself
    assert watch.hidden


def test_modules_that_draw_in_evaluation_mode():
    model = nn.Sequential(nn.Dropout(0.5), Drawing(functional.dropout)).eval()
    seen = DrawsWithoutDropout(model, CPU)
    for step in range(3):
        with seen.around(step):
            model(ACTIVATION)
    assert seen.modules == ("1",)
    silent = DrawsWithoutDropout(model[0], CPU)
    for step in range(3):
        with silent.around(step):
            model[0](ACTIVATION)
    assert silent.modules == ()


def test_states_of_generators():
    torch.manual_seed(3)
    states = read_states(CPU)
    draw_from_all(2, CPU)
    expected = torch.rand(4)
    set_states(states, CPU)
    assert seed_of("cpu") == 3
    torch.rand(1), torch.rand(1)
    assert torch.equal(torch.rand(4), expected)


def test_only_draws_of_a_training_are_recorded_on_request():
    """The one outside of modules is noise for training, unless it comes from a generator of its own."""
    model = nn.Sequential(nn.Dropout(0.5))
    with watching_draws(model, CPU, only_training=True) as watch:
        with torch.no_grad():
            model(ACTIVATION.clone())
            model.eval()
            torch.rand(2)
        model.train()
        torch.randn(3, generator=torch.Generator().manual_seed(1))
        assert (watch.draws, watch.hidden) == ([], False)
        torch.rand(2)
        with torch.no_grad():
            masked(ACTIVATION)
        model(ACTIVATION.clone())
    assert [draw.module for draw in watch.draws] == ["", "", "0"]
