"""Tensor subclasses are read as the plain tensors that they wrap or stand for.

``conformance/systems/torchao`` judges real ones.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.testing import assert_close

from pytest_fsdp_meta.checks.training.observe.reference import restore
from pytest_fsdp_meta.ranks.adapters.dtensor import local_part, own_memory, plain, wrapped
from pytest_fsdp_meta.ranks.inventory import memory_key, take_inventory
from pytest_fsdp_meta.ranks.reference_record import Record, write_record
from pytest_fsdp_meta.worlds import current
from tests.world_help import world_of

VALUES = torch.arange(6.0).reshape(2, 3)


class Holding(Tensor):
    """Holds tensors and refuses all operations but ``detach``, as quantised weights refuse most."""

    INNER: tuple[str, ...] = ()

    @staticmethod
    def __new__(cls, *inner: Tensor, shape: torch.Size | None = None, dtype: torch.dtype = torch.float32):
        return Tensor._make_wrapper_subclass(cls, inner[0].shape if shape is None else shape, dtype=dtype)

    def __init__(self, *inner: Tensor, shape: torch.Size | None = None, dtype: torch.dtype = torch.float32) -> None:
        for name, tensor in zip(self.INNER, inner, strict=True):
            setattr(self, name, tensor)

    def __tensor_flatten__(self):
        return list(self.INNER), None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], _: None, size: torch.Size, stride: Any):
        return cls(*inner.values(), shape=size)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        if function is torch.ops.aten.detach.default:
            [own] = args
            return cls(*(getattr(own, name).detach() for name in cls.INNER), shape=own.shape, dtype=own.dtype)
        raise NotImplementedError(f"{cls.__name__}: {function}")


class Cast(Holding):
    """Weights in their own dtype, which a forward casts."""

    INNER = ("data_",)


class Quantised(Holding):
    INNER = ("numbers", "scale")

    def dequantize(self) -> Tensor:
        return self.numbers.float() * self.scale


class Opaque(Holding):
    """Says nothing about how to compute its values."""

    INNER = ("numbers", "scale")


def quantised(kind: type[Holding] = Quantised) -> Holding:
    scale = VALUES.amax(1, keepdim=True) / 127
    return kind((VALUES / scale).round().to(torch.int8), scale)


def test_one_tensor_of_the_same_kind_is_the_memory():
    weight = Cast(VALUES.clone())
    assert wrapped(weight) is weight.data_
    assert wrapped(Cast(weight)) is weight.data_
    own_memory(weight).zero_()
    assert not weight.data_.any()


@pytest.mark.parametrize("inner", [torch.zeros(3, 2), VALUES.bfloat16()])
def test_another_shape_or_dtype_is_not_unwrapped(inner):
    weight = Cast(inner, shape=torch.Size((2, 3)))
    assert wrapped(weight) is weight


def test_plain_tensors_stay_as_they_are():
    parameter = nn.Parameter(VALUES)
    assert wrapped(VALUES) is plain(VALUES) is VALUES
    assert plain(parameter) is parameter


def read_from_a_dtensor() -> tuple[str, float]:
    """Read a quantised shard, put into its DTensor as torchtune does; ``DTensor.from_local`` would need a view."""
    shard = DTensor.from_local(torch.zeros(2, 3), current().mesh, [Replicate()])
    shard._local_tensor = quantised()
    parameter = nn.Parameter(shard)
    return type(own_memory(parameter)).__name__, float(local_part(parameter).sum())


def test_a_parameter_that_lacks_even_views():
    with world_of(1) as world:
        assert world.run(read_from_a_dtensor) == [("Quantised", pytest.approx(15, abs=0.1))]


def test_quantised_values_are_computed():
    weight = quantised()
    assert type(local_part(weight)) is Tensor
    assert_close(local_part(weight), VALUES, atol=0.03, rtol=0)
    assert plain(quantised(Opaque)).__class__ is Opaque


def test_a_record_has_the_values(tmp_path):
    path = tmp_path / "values.safetensors"
    write_record(path, [("cast", Cast(VALUES)), ("quantised", quantised())])
    assert torch.equal(Record(path).read_whole("cast"), VALUES)
    assert torch.equal(Record(path).read_whole("quantised"), quantised().dequantize())
    model = nn.Module()
    model.quantised = nn.Parameter(quantised(), requires_grad=False)
    restore(model, Record(path))  # copies nothing: NF4 has other scales when it is quantised again


def test_the_key_of_the_memory():
    first, second = Cast(VALUES), Cast(VALUES)
    assert memory_key(first) == memory_key(second) is not None
    weight = quantised()
    assert memory_key(weight) != memory_key(quantised())
    assert memory_key(weight) == memory_key(weight.detach())


@pytest.mark.parametrize("make", [lambda: Cast(VALUES), quantised, lambda: quantised(Opaque)])
def test_an_inventory(make):
    model = nn.Module()
    model.weight = nn.Parameter(make())
    [facts] = take_inventory(model, 0, "cpu").tensors
    assert (facts.shape, facts.dtype, facts.nan) == ((2, 3), "float32", 0)
    assert bool(facts.unreadable) == (make().__class__ is Opaque)
