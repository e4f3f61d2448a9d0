"""Compute the shapes of torch's grouped matrix product, whose implementation without values takes bfloat16 only."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from pytest_fsdp_meta.ranks.torch_private import TorchDispatchMode, operator_arguments, operator_name

OPERATOR = "_grouped_mm"


class GroupedProductsOfAnyDtype(TorchDispatchMode):  # type: ignore[misc]
    """Give grouped products of other dtypes their shape; what does not fit together is left to torch to refuse."""

    supports_higher_order_operators = True
    """Without it, flex attention and other higher-order operators refuse to run."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor runs first, and multiplies what this rank has
        if getattr(func, "namespace", "") == "aten" and operator_name(func) == OPERATOR:
            given = operator_arguments(func, args, kwargs)
            one, other = given["self"], given["mat2"]
            shape = product_shape(one, other, given.get("offs"))
            if one.dtype != torch.bfloat16 and shape is not None:
                return torch.empty(shape, dtype=given.get("out_dtype") or one.dtype, device=one.device)
        return func(*args, **kwargs)


def product_shape(one: Tensor, other: Tensor, offsets: Tensor | None) -> tuple[int, ...] | None:
    """Return the shape of the product of each group's rows, columns or matrices; None if these do not fit together."""
    if one.ndim not in (2, 3) or other.ndim not in (2, 3) or one.shape[-1] != other.shape[-2]:
        return None
    rows, columns = one.shape[-2], other.shape[-1]
    if one.ndim == other.ndim == 3:
        return (len(one), rows, columns) if len(one) == len(other) and offsets is None else None
    if offsets is None or any(tensor.ndim == 3 and len(tensor) != len(offsets) for tensor in (one, other)):
        return None
    return (len(offsets), rows, columns) if one.ndim == other.ndim else (rows, columns)
