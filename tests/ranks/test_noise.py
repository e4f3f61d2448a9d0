"""Nudges change a training by about one rounding, and leave the model as it was."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from pytest_fsdp_meta.ranks.nudges import Nudges

EPSILON = torch.finfo(torch.bfloat16).eps


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4)).to(dtype)


def gradients(model: nn.Module, nudges: Nudges | None = None) -> dict[str, Tensor]:
    model.zero_grad()
    weight = next(model.parameters())
    rows = torch.randn(16, 32, generator=torch.Generator().manual_seed(1)).to(weight.dtype)
    if nudges is None:
        model(rows).square().sum().backward()
    else:
        with nudges.outputs(), nudges.weights():
            model(rows).square().sum().backward()
    return {name: p.grad.double().clone() for name, p in model.named_parameters() if p.grad is not None}


def distance(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    return max(float((ours[name] - theirs[name]).norm() / theirs[name].norm()) for name in theirs)


@pytest.mark.parametrize("unit", [torch.finfo(torch.float32).eps, EPSILON])
def test_nudged_gradients_differ_by_some_roundings(unit):
    model = network()
    plain = gradients(model)
    apart = distance(gradients(model, Nudges(model, unit, 0.0, 0)), plain)
    assert 0.1 * unit < apart < 10 * unit


def test_weights_are_put_back_and_no_hook_stays():
    model = network()
    before = copy.deepcopy(model.state_dict())
    plain = gradients(model)
    gradients(model, Nudges(model, EPSILON, 0.0, 0))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert distance(gradients(model), plain) == 0
    with pytest.raises(RuntimeError, match="stop"), Nudges(model, EPSILON, 0.0, 0).weights():
        raise RuntimeError("stop")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_an_update_inside_of_the_backward_is_an_error():
    """It would be lost where weights are put back, and count as noise."""
    model = network()

    def step(parameter: Tensor) -> None:
        with torch.no_grad():
            parameter.sub_(parameter.grad)

    next(model.parameters()).register_post_accumulate_grad_hook(step)
    with pytest.raises(RuntimeError, match="the forward or the backward writes to parameters"):
        gradients(model, Nudges(model, EPSILON, 0.0, 0))


def test_gradients_that_are_reduced_in_a_low_precision():
    model = network()
    single = torch.finfo(torch.float32).eps
    plain = gradients(model)
    apart = distance(gradients(model, Nudges(model, single, EPSILON, 0)), plain)
    assert 0.1 * EPSILON < apart < EPSILON
    added = {parameter: 100 * parameter.grad.abs() for parameter in model.parameters()}  # which nearly cancel
    apart = distance(gradients(model, Nudges(model, single, EPSILON, 0, added)), plain)
    assert 10 * EPSILON < apart < 100 * EPSILON


def test_another_seed_nudges_otherwise_and_the_same_seed_alike():
    model = network()
    first, again, other = (gradients(model, Nudges(model, EPSILON, 0.0, seed)) for seed in (0, 0, 1))
    assert distance(again, first) == 0
    assert distance(other, first) > 0


def test_an_output_of_a_coarser_dtype_is_nudged_by_its_own_unit():
    """As under autocast, where weights stay in float32."""
    model = network()
    single = torch.finfo(torch.float32).eps
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = gradients(model)
        apart = distance(gradients(model, Nudges(model, single, 0.0, 0)), plain)
    assert apart > 0.1 * EPSILON


def test_random_numbers_of_the_model_stay_the_same():
    model = network()
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    gradients(model, Nudges(model, EPSILON, 0.0, 0))
    assert torch.equal(torch.rand(2), expected)


def test_only_products_in_a_low_precision_are_nudged_in_an_optimizer():
    nudges = Nudges(network(), EPSILON, 0.0, 0)
    wide, narrow = torch.randn(64, 64), torch.randn(64, 64).bfloat16()
    with nudges.products():
        assert torch.equal(wide @ wide, torch.matmul(wide, wide))
        product = narrow @ narrow
        total = narrow + narrow
    plain = narrow @ narrow
    assert not torch.equal(product, plain)
    assert (product - plain).norm() < 2 * EPSILON * plain.norm()
    assert torch.equal(total, 2 * narrow)
