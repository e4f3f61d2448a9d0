"""Test the sensitivity of gradients to small parameter changes, on functions with known derivatives."""

from __future__ import annotations

import pytest
import torch

from pytest_fsdp_meta.observers.support.sensitivity import sensitivity
from pytest_fsdp_meta.observers.values import measure


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("power", "times"), [(2, 1.0), (4, 3.0), (12, 11.0)])
def test_sensitivity_of_a_power_is_known(power, times, dtype):
    parameter = torch.nn.Parameter(torch.linspace(1, 2, 4096).to(dtype))

    def gradient() -> torch.Tensor:
        return power * parameter.detach().double() ** (power - 1)

    before = gradient()
    found = sensitivity([parameter], lambda: [measure(gradient(), before)])
    # The scale is the gradient's norm plus that of as many typical elements, which halves the result.
    assert found == pytest.approx(times / 2, rel=0.3)


def test_without_gradients_the_sensitivity_is_one():
    parameter = torch.nn.Parameter(torch.ones(3))
    assert sensitivity([parameter], lambda: [None]) == 1.0
