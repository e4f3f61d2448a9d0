"""How much a model makes of a small difference of its parameters, on functions whose derivative is known."""

from __future__ import annotations

import pytest
import torch

from pytest_fsdp_meta.observers.support.sensitivity import sensitivity
from pytest_fsdp_meta.observers.values import measure


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("power", "times"), [(2, 1.0), (4, 3.0), (12, 11.0)])
def test_gradients_change_by_a_power_less(power, times, dtype):
    parameter = torch.nn.Parameter(torch.linspace(1, 2, 4096).to(dtype))

    def gradient() -> torch.Tensor:
        return power * parameter.detach().double() ** (power - 1)

    before = gradient()
    found = sensitivity([parameter], lambda: [measure(gradient(), before)])
    # Beside its own length, a gradient is measured by that of as many typical elements: half of the change.
    assert found == pytest.approx(times / 2, rel=0.3)


def test_without_gradients_it_is_one():
    parameter = torch.nn.Parameter(torch.ones(3))
    assert sensitivity([parameter], lambda: [None]) == 1.0
