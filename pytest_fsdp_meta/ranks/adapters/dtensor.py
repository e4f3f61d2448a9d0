"""Describe tensors that know their own layout: DTensors, and plain tensors, which are whole.

Tensor subclasses, such as torchao's, are read as the plain tensors that they wrap or stand for.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from pytest_fsdp_meta.checks.structure.facts import regions as layout_regions
from pytest_fsdp_meta.checks.structure.facts import slice_runs
from pytest_fsdp_meta.evidence import MeshFacts, Region
from pytest_fsdp_meta.loader.adapter import Part
from pytest_fsdp_meta.loader.validation import short_placement
from pytest_fsdp_meta.ranks.torch_private import AsyncCollectiveTensor, local_tensor


def own_part(tensor: Tensor) -> Part:
    """Return the part of a DTensor or a plain tensor that this rank holds."""
    sharded = isinstance(tensor, DTensor)
    return Part(
        own_memory(tensor),
        sizes(tensor),
        held_regions(tensor),
        placements=tuple(short_placement(p) for p in tensor.placements) if sharded else None,
        mesh=mesh_facts(tensor) if sharded else None,
    )


def own_share(part: Part) -> Part:
    """Return this rank's shard of a part that describes a DTensor as a whole, else the part itself."""
    implied = tuple(sum(stop - start for start, stop in runs) for runs in part.regions)
    if part.flat or not isinstance(part.local, DTensor) or implied != tuple(part.local.shape):
        return part
    held = zip(part.regions, held_regions(part.local), strict=True)
    regions = tuple(tuple(run for span in own for run in slice_runs(runs, *span)) for runs, own in held)
    return replace(part, local=own_memory(part.local), regions=regions)


def fits(value: Tensor, part: Part) -> bool:
    """Return whether this rank's part of the value has the shape of the part; of a flat one, its number of elements."""
    own, local = own_memory(value), own_memory(part.local)
    return bool(own.numel() == local.numel() if part.flat else own.shape == local.shape)


def with_elements(part: Part, value: Tensor) -> Part:
    """Return the part with the elements of another tensor that is laid out like it, such as its gradient."""
    own = own_memory(value)
    return replace(part, local=own.reshape(-1) if part.flat else own, gradient=None)


def placed_like(parameter: Tensor, value: Any) -> Any:
    """Return a value with its parameter's placements.

    Optimizer state that was created from a gradient may have others with the same values, until it is loaded.
    """
    if isinstance(parameter, DTensor) and isinstance(value, DTensor) and value.placements != parameter.placements:
        return value.redistribute(placements=parameter.placements)
    return value


def without_partial(parameter: Tensor, gradient: Tensor) -> Tensor:
    """Return the gradient, reduced if its ranks hold parts of a sum, as any operation of an optimizer would do."""
    if isinstance(gradient, DTensor) and any(placement.is_partial() for placement in gradient.placements):
        assert isinstance(parameter, DTensor)
        return gradient.redistribute(placements=parameter.placements)
    return gradient


def sizes(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape, with 0 for a ragged dim, whose size is a different symbol in every tensor."""
    return tuple(size if isinstance(size, int) else 0 for size in tensor.shape)


def own_memory(tensor: Tensor) -> Tensor:
    """Return this rank's own part of a tensor, without autograd and without subclasses that only compute otherwise."""
    with torch.no_grad():
        return wrapped(local_tensor(tensor).detach())


def living_shards() -> list[Tensor]:
    """Return the DTensors of this process that are a part of a larger tensor, such as those of a second model."""
    # isinstance() would ask each object for its __class__, which runs code of lazy proxies.
    living = [one for one in gc.get_objects() if issubclass(type(one), DTensor)]
    return [tensor for tensor in living if local_tensor(tensor).numel() < tensor.numel()]


def local_part(tensor: Tensor) -> Tensor:
    """Return ``own_memory`` as a plain tensor: dequantised, and with a lazy conjugation or negation applied."""
    return plain(own_memory(tensor)).resolve_conj().resolve_neg()


def mesh_facts(tensor: DTensor) -> MeshFacts:
    """Return the device mesh of a DTensor as plain data."""
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    return MeshFacts(
        # NeMo Automodel names dimensions by an enumeration of strings.
        dims=tuple(map(str.__str__, mesh.mesh_dim_names)) if mesh.mesh_dim_names else (None,) * mesh.ndim,
        shape=tuple(mesh.shape),
        coordinate=None if coordinate is None else tuple(coordinate),
    )


def held_regions(tensor: Tensor) -> tuple[Region, ...]:
    """Return the global indices of the tensor that this rank holds."""
    if not isinstance(tensor, DTensor):
        return layout_regions(sizes(tensor), (), (), ())
    mesh = mesh_facts(tensor)
    if mesh.coordinate is None:
        return tuple(() for _ in tensor.shape)
    shards = [
        (p.dim, int(getattr(p, "split_factor", 1))) if getattr(p, "dim", None) is not None else None
        for p in tensor.placements
    ]
    return layout_regions(tensor.shape, shards, mesh.shape, mesh.coordinate)


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
        inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
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
