"""Test hashing and counting poison, on tensors of every kind."""

from __future__ import annotations

import pytest
import torch

from pytest_fsdp_meta.ranks.bits import PIECE, count_poison, digest

DTYPES = [
    torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.int64, torch.int8,
    torch.uint16, torch.bool,
]  # fmt: skip


def numbers(dtype: torch.dtype, size: int = 37) -> torch.Tensor:
    bits = torch.randint(0, 2, (size, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    return bits.view(dtype) if dtype != torch.bool else bits.bool()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_digest_does_not_depend_on_the_memory_layout(dtype):
    tensor = numbers(dtype)
    shifted = torch.cat([tensor.view(torch.uint8).view(-1)[:1], tensor.view(torch.uint8).view(-1)])[1:]
    assert digest(tensor) == digest(tensor.clone()) == digest(shifted)
    assert digest(tensor.t().contiguous().t()) == digest(tensor)


@pytest.mark.parametrize("size", [1, 7, 9, 8 * PIECE - 1, 8 * PIECE + 3])
def test_a_changed_bit_or_order_changes_the_digest(size):
    tensor = torch.randint(0, 255, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    digests = {digest(tensor)}
    for place in {0, size // 2, size - 1}:
        for bit in (1, 128):
            changed = tensor.clone()
            changed[place] ^= bit
            digests.add(digest(changed))
    assert len(digests) == 1 + 2 * len({0, size // 2, size - 1})
    if size > 1:
        assert digest(tensor.flip(0)) not in digests


def test_the_digest_depends_on_the_number_of_bytes():
    assert digest(torch.zeros(8)) != digest(torch.zeros(9))
    assert digest(torch.zeros(0)) == digest(torch.zeros(0, 4))


@pytest.mark.filterwarnings("ignore:.*quantize")
def test_quantized_tensors_are_refused():
    with pytest.raises(TypeError, match=r"torch.quint8 cannot be read as bytes"):
        digest(torch.quantize_per_tensor(torch.eye(4), 0.1, 0, torch.quint8))


@pytest.mark.parametrize(
    ("tensor", "found"),
    [
        (torch.tensor([1.0, float("nan"), 2.0]), (1, 1)),
        (torch.tensor([float("inf"), float("-inf")]), (0, 0)),
        (torch.full((4,), 3e38), (0, 0)),
        (torch.full((3,), float("nan"), dtype=torch.bfloat16), (3, 3)),
        (torch.full((3,), float("nan")).to(torch.float8_e4m3fn), (3, 3)),
        (torch.tensor([complex(1, float("nan"))]), (1, 1)),
        (torch.tensor([5, torch.iinfo(torch.int64).max]), (0, 1)),
        (torch.tensor([5, 6], dtype=torch.int8), (0, 0)),
        (torch.tensor([True, True]), (0, 0)),
        (torch.empty(0), (0, 0)),
    ],
)
def test_poison_is_counted(tensor, found):
    assert count_poison(tensor) == found
