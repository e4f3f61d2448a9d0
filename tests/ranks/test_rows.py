"""One digest for each row of a batch, whatever the batch is made of."""

from __future__ import annotations

from collections import UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch

from pytest_fsdp_meta.checks.data.observe import MOST_ROWS, digest_rows
from pytest_fsdp_meta.loader.subject import SubjectError

X = torch.arange(12.0).view(3, 4)
Y = torch.arange(3)
Pair = namedtuple("Pair", ["x", "y"])


@dataclass
class Record:
    x: Any
    y: Any


@pytest.mark.parametrize(
    "make",
    [
        lambda x, y: x,
        lambda x, y: y,
        lambda x, y: (x, y),
        lambda x, y: [x, y],
        lambda x, y: {"x": x, "y": y},
        lambda x, y: {"in": {"x": x}, "out": (y, None)},
        lambda x, y: UserDict(x=x, y=y),
        lambda x, y: Pair(x, y),
        lambda x, y: Record(x, y),
        lambda x, y: {"x": x.numpy(), "y": y},
        lambda x, y: {"x": x.to(torch.bfloat16), "scale": torch.tensor(2.0), "step": 3},
        lambda x, y: {"x": x, "sizes": torch.tensor([3, 4, 5, 6])},
        lambda x, y: [{"x": row, "y": label} for row, label in zip(x, y, strict=True)],
        lambda x, y: {"x": x, "name": [f"row {int(label)}" for label in y]},
    ],
)
def test_a_row_has_the_same_digest_in_every_batch(make):
    whole = digest_rows(make(X, Y), 0)
    assert len(set(whole)) == 3
    assert digest_rows(make(X[[2, 0]], Y[[2, 0]]), 0) == (whole[2], whole[0])


def test_every_entry_counts():
    plain = digest_rows({"x": X, "y": Y}, 0)
    other = digest_rows({"x": X, "y": Y.flip(0)}, 0)
    assert [a == b for a, b in zip(plain, other, strict=True)] == [False, True, False]
    assert (
        digest_rows({"x": X, "name": ["a", "b", "c"]}, 0)[1:] != digest_rows({"x": X, "name": ["a", "b", "d"]}, 0)[1:]
    )


def padded(*rows: list[int], length: int, left: bool = False) -> dict[str, torch.Tensor]:
    def fill(row: list[int], value: int) -> list[int]:
        rest = [value] * (length - len(row))
        return rest + row if left else row + rest

    return {
        "input_ids": torch.tensor([fill(row, 0) for row in rows]),
        "attention_mask": torch.tensor([fill([1] * len(row), 0) for row in rows]),
        "labels": torch.tensor([fill(row, -100) for row in rows]),
        "class": torch.arange(len(rows)),
    }


@pytest.mark.parametrize("left", [False, True])
def test_padding_depends_on_the_other_rows_and_does_not_count(left):
    short = digest_rows(padded([5, 6], [7], length=2, left=left), 0)
    long = digest_rows(padded([5, 6], [7], [8, 9, 8, 9], length=4, left=left), 0)
    assert long[:2] == short
    assert len(set(long)) == 3


@pytest.mark.parametrize(
    "batch",
    [
        {"tokens": torch.arange(MOST_ROWS + 1)},
        {"tokens": torch.arange(8), "cu_seqlens": torch.tensor([0, 3, 8])},
    ],
)
def test_packed_tokens_are_one_row(batch):
    assert len(digest_rows(batch, 0)) == 1


def test_numbers_of_numpy_and_objects():
    names = numpy.array(["a", "b"], dtype=object)
    first, second = digest_rows({"x": torch.ones(2, 3), "name": names}, 0)
    assert first != second


@pytest.mark.parametrize("batch", [None, 3, "text", {}, {"x": torch.tensor(1.0)}, ["a", "b"], {"name": ["a", "b"]}])
def test_a_batch_without_rows_is_refused(batch):
    with pytest.raises(
        SubjectError, match=r"Subject\(data=...\): batch 4 is \w+ without a tensor that has rows, but sh"
    ):
        digest_rows(batch, 4)


def test_a_batch_with_no_rows_is_refused():
    with pytest.raises(SubjectError, match=r"Subject\(data=...\): batch 4 has no rows"):
        digest_rows({"x": torch.ones(0, 3)}, 4)
