"""Facts about every parameter and buffer of this rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from pytest_fsdp_meta.evidence import MeshFacts, RankInventory, Region, TensorFacts
from pytest_fsdp_meta.observers.bits import count_poison, digest
from pytest_fsdp_meta.observers.layout import regions
from pytest_fsdp_meta.observers.torch_private import is_replicated
from pytest_fsdp_meta.subject import short_placement

WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""Name components that torch's own wrappers insert; the reference, which is not wrapped, does not have them."""


def take_inventory(model: Module, rank: int, device: str, attributes: Sequence[str] = ()) -> RankInventory:
    """The inventory of one rank; ``attributes`` are the custom parameter attributes to note."""
    transient, replicated = non_persistent(model), held_by_ddp(model)
    with torch.no_grad():
        tensors = [
            replace(
                describe(name, kind, tensor, persistent=name not in transient, attributes=attributes),
                ddp=id(tensor) in replicated,
            )
            for name, kind, tensor in named_tensors(model)
        ]
    return RankInventory(rank, device, tuple(tensors))


def held_by_ddp(model: Module) -> set[int]:
    """The identities of the parameters that DDP or replicate() holds, be it on the root or on a part of the model."""
    held = (m for m in model.modules() if isinstance(m, DistributedDataParallel) or is_replicated(m))
    return {id(parameter) for module in held for parameter in module.parameters()}


def named_tensors(model: Module) -> Iterator[tuple[str, str, Tensor]]:
    """(FQN, kind, tensor) of all parameters, then all buffers; tied ones under each of their names."""
    root = unwrapped(model)
    for name, parameter in root.named_parameters(remove_duplicate=False):
        yield clean_name(name), "parameter", parameter
    for name, buffer in root.named_buffers(remove_duplicate=False):
        yield clean_name(name), "buffer", buffer


def unwrapped(model: Module) -> Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


def clean_name(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def non_persistent(model: Module) -> set[str]:
    """The buffers that a state dict leaves out; torch says it only through this attribute."""
    return {
        clean_name(f"{prefix}.{name}" if prefix else name)
        for prefix, module in unwrapped(model).named_modules()
        for name in module._non_persistent_buffers_set
    }


def describe(name: str, kind: str, tensor: Tensor, *, persistent: bool, attributes: Sequence[str]) -> TensorFacts:
    own = _own_memory(tensor)
    return TensorFacts(
        name=name,
        kind=kind,
        shape=tuple(tensor.shape),
        local_shape=tuple(own.shape),
        regions=held_regions(tensor),
        dtype=str(tensor.dtype).removeprefix("torch."),
        device=str(own.device),
        requires_grad=tensor.requires_grad,
        persistent=persistent,
        placements=tuple(short_placement(p) for p in tensor.placements) if isinstance(tensor, DTensor) else None,
        mesh=mesh_facts(tensor) if isinstance(tensor, DTensor) else None,
        identity=id(tensor),
        attributes={key: _shown(getattr(tensor, key)) for key in attributes if hasattr(tensor, key)},
        **_read(tensor, own),
    )


def _shown(value: object) -> str:
    """An attribute's value, the same for the same; of what has no plain value (its repr is an address), its type."""
    parts = value if isinstance(value, (tuple, list)) else [value]
    plain = all(isinstance(part, (bool, int, float, str, type(None), torch.dtype, torch.Size)) for part in parts)
    return repr(value) if plain else f"a {type(value).__name__}"


def _read(tensor: Tensor, own: Tensor) -> dict[str, Any]:
    """The facts that take a look at the memory; a tensor that torch cannot read must not cost the others theirs."""
    if own.is_meta:
        return {}
    try:
        local = local_part(tensor)
        nan, poisoned = count_poison(local)
        return {"storage": _storage(own), "nan": nan, "poisoned": poisoned, "digest": digest(local)}
    except Exception as error:  # torch raises nearly anything here
        return {"unreadable": f"{type(error).__name__}: {str(error).splitlines()[0][:100] if str(error) else ''}"}


def local_part(tensor: Tensor) -> Tensor:
    """This rank's own part of a tensor, without autograd; a lazy conjugate or negative is worked out."""
    return _own_memory(tensor).resolve_conj().resolve_neg()


def _own_memory(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _storage(local: Tensor) -> str | None:
    """The same for the same memory; None where there is none to point at: meta, empty shards, lazy backends."""
    address = 0 if local.is_meta or not local.numel() else local.data_ptr()
    return f"{address}:{tuple(local.shape)}" if address else None


def reshard(model: Module) -> None:
    """Back to shards: after a forward FSDP2 leaves gathered what it was told not to free."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def mesh_facts(tensor: DTensor) -> MeshFacts:
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    return MeshFacts(
        dims=tuple(mesh.mesh_dim_names or [None] * mesh.ndim),
        shape=tuple(mesh.shape),
        coordinate=None if coordinate is None else tuple(coordinate),
    )


def held_regions(tensor: Tensor) -> tuple[Region, ...]:
    """Which global indices of the tensor this rank holds."""
    if not isinstance(tensor, DTensor):
        return regions(tensor.shape, (), (), ())
    mesh = mesh_facts(tensor)
    if mesh.coordinate is None:
        return tuple(() for _ in tensor.shape)
    shards = [
        (p.dim, int(getattr(p, "split_factor", 1))) if getattr(p, "dim", None) is not None else None
        for p in tensor.placements
    ]
    return regions(tensor.shape, shards, mesh.shape, mesh.coordinate)
