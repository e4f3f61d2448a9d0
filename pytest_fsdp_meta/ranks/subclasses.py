"""Read tensor subclasses, such as torchao's, as the plain tensors that they wrap or stand for."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from pytest_fsdp_meta.ranks.torch_private import AsyncCollectiveTensor


def is_wrapper(tensor: Tensor) -> bool:
    """Return whether the tensor consists of others, by the methods with which FSDP and torch.compile take it apart."""
    kind = type(tensor)
    return kind is not Tensor and hasattr(kind, "__tensor_flatten__") and hasattr(kind, "__tensor_unflatten__")


def wrapped(tensor: Tensor) -> Tensor:
    """Return the tensor inside of subclasses that change only how it is computed with, in the same memory.

    They hold one tensor of their own shape and dtype: float8 weights of torchao, which are cast when FSDP gathers them.
    A collective that is still running has to be waited for, which any operation does.
    """
    while is_wrapper(tensor) and not isinstance(tensor, (DTensor, AsyncCollectiveTensor)):
        inner = inner_tensors(tensor)
        if len(inner) != 1 or (inner[0].shape, inner[0].dtype) != (tensor.shape, tensor.dtype):
            break
        [tensor] = inner
    return tensor


def plain(tensor: Tensor) -> Tensor:
    """Return the values as a plain tensor: what is ``wrapped``, or a copy of what several tensors stand for.

    Quantised weights have their numbers and scales in tensors of other shapes. A subclass that does not say how to
    compute its values is returned as it is.
    """
    tensor = wrapped(tensor)
    if isinstance(tensor, DTensor) or not is_wrapper(tensor):
        return tensor
    compute = getattr(tensor, "get_original_weight", None)  # of NF4, whose dequantize() is another function
    if compute is None and type(tensor).dequantize is not Tensor.dequantize:
        compute = tensor.dequantize
    if compute is None:
        return tensor
    with torch.no_grad():
        values: Tensor = compute()
    return values


def inner_tensors(tensor: Tensor) -> list[Tensor]:
    """Return the tensors that a subclass consists of."""
    return [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
