"""Shapes of grouped matrix products without values, compared with those that torch computes with values."""

from __future__ import annotations

import pytest
import torch

from pytest_fsdp_meta.checks.simulation.observe.step import GroupedProductsOfAnyDtype, product_shape
from pytest_fsdp_meta.ranks.torch_private import FakeTensorMode

OFFSETS = (1, 4, 8)
SHAPES = [((8, 16), (3, 16, 24)), ((3, 4, 16), (16, 8)), ((16, 8), (8, 24)), ((3, 4, 8), (3, 8, 16))]


def product(one, other):
    return torch._grouped_mm(one, other, None if one.ndim == other.ndim == 3 else torch.tensor(OFFSETS).int())


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_the_shape_is_that_of_a_product_with_values(shapes):
    expected = product(*(torch.ones(shape, dtype=torch.bfloat16) for shape in shapes))
    with FakeTensorMode(allow_non_fake_inputs=True), GroupedProductsOfAnyDtype():
        computed = product(*(torch.ones(shape) for shape in shapes))
    assert (computed.shape, computed.dtype) == (expected.shape, torch.float32)


def test_gradients_have_the_shapes_of_what_they_are_of():
    with FakeTensorMode(allow_non_fake_inputs=True), GroupedProductsOfAnyDtype():
        rows, experts = torch.ones(6, 8, requires_grad=True), torch.ones(3, 8, 16, requires_grad=True)
        product(rows, experts).sum().backward()
    assert (rows.grad.shape, experts.grad.shape) == ((6, 8), (3, 8, 16))


@pytest.mark.parametrize(
    ("one", "other"), [((6, 8), (3, 7, 16)), ((6, 8), (4, 8, 16)), ((2, 4, 8), (3, 8, 16)), ((8,), (8, 2))], ids=str
)
def test_what_does_not_fit_together_is_left_to_torch(one, other):
    offsets = None if len(one) == len(other) == 3 else torch.tensor(OFFSETS)
    assert product_shape(torch.ones(one), torch.ones(other), offsets) is None
