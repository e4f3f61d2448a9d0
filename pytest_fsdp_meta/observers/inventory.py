"""Facts about every parameter and buffer of this rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from pytest_fsdp_meta.evidence import RankInventory, TensorFacts
from pytest_fsdp_meta.loader.adapter import Part
from pytest_fsdp_meta.observers.adapters import megatron_fsdp
from pytest_fsdp_meta.observers.adapters.dtensor import local_part, own_part, sizes
from pytest_fsdp_meta.observers.adapters.lookup import parts_of
from pytest_fsdp_meta.observers.support.bits import count_poison, digest
from pytest_fsdp_meta.observers.support.mapped import MAPS, MappedFiles
from pytest_fsdp_meta.observers.support.torch_private import is_replicated, managed_places, non_persistent_names
from pytest_fsdp_meta.observers.support.watching import tensors_in
from pytest_fsdp_meta.text import clean_name, first_line


def take_inventory(model: Module, rank: int, device: str, attributes: Sequence[str] = ()) -> RankInventory:
    """The inventory of one rank; ``attributes`` are the custom parameter attributes to note."""
    transient, replicated, parts = non_persistent(model), held_by_ddp(model), parts_of(model)
    files = MappedFiles() if MAPS.exists() else None
    told = partial(describe, attributes=attributes, files=files)
    with torch.no_grad():
        tensors = [
            replace(
                told(name, kind, t, parts.of(name, t), persistent=name not in transient),
                ddp=id(t) in replicated,
            )
            for name, kind, t in named_tensors(model)
        ]
    carried = {key for _, _, tensor in named_tensors(model) for key in vars(tensor)} if attributes else ()
    return RankInventory(rank, device, tuple(tensors), custom_attributes=tuple(sorted(carried)))


def managed_names(model: Module) -> dict[str, bool]:
    """What FSDP2 manages, by FQN: whether the parameter that is registered there is the one that it manages."""
    names: dict[Module, list[str]] = {}
    for prefix, module in unwrapped(model).named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(prefix)
    return {
        clean_name(f"{prefix}.{name}" if prefix else name): live
        for module, name, live in managed_places(model)
        for prefix in names.get(module, ())
    }


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
    while isinstance(model, DistributedDataParallel) or megatron_fsdp.is_wrapper(model):
        model = model.module
    return model


def non_persistent(model: Module) -> set[str]:
    """The buffers that a state dict leaves out."""
    return {
        clean_name(f"{prefix}.{name}" if prefix else name)
        for prefix, module in unwrapped(model).named_modules()
        for name in non_persistent_names(module)
    }


def describe(
    name: str,
    kind: str,
    tensor: Tensor,
    part: Part | None = None,
    *,
    persistent: bool,
    attributes: Sequence[str],
    files: MappedFiles | None = None,
) -> TensorFacts:
    part = part or own_part(tensor)
    own = part.local
    return TensorFacts(
        name=name,
        kind=kind,
        shape=part.shape,
        local_shape=sizes(own),
        regions=part.regions,
        dtype=str(tensor.dtype).removeprefix("torch."),
        device=str(own.device),
        requires_grad=tensor.requires_grad,
        persistent=persistent,
        placements=part.placements,
        mesh=part.mesh,
        identity=id(tensor),
        attributes={key: _shown(getattr(tensor, key)) for key in attributes if hasattr(tensor, key)},
        flat=part.flat,
        sharded_by=part.by,
        width=tensor.element_size(),
        **_read(own, files),
    )


def _shown(value: object) -> str:
    """An attribute's value, the same for the same; of what has no plain value (its repr is an address), its type."""
    parts = value if isinstance(value, (tuple, list)) else [value]
    plain = all(isinstance(part, (bool, int, float, str, type(None), torch.dtype, torch.Size)) for part in parts)
    return repr(value) if plain else f"a {type(value).__name__}"


def _read(own: Tensor, files: MappedFiles | None) -> dict[str, Any]:
    """The facts that take a look at the memory; a tensor that torch cannot read must not cost the others theirs."""
    if own.is_meta:
        return {}
    try:
        local = local_part(own)
        nan, poisoned = count_poison(local)
        return {"storage": _storage(own), "nan": nan, "poisoned": poisoned, "digest": digest(local)} | _backing(
            own, files
        )
    except Exception as error:  # torch raises nearly anything here
        return {"unreadable": f"{type(error).__name__}: {first_line(error, 100)}"}


def _storage(local: Tensor) -> str | None:
    """The same for the same memory; None where there is none to point at: meta, empty shards, lazy backends."""
    address = 0 if local.is_meta or not local.numel() else local.data_ptr()
    return f"{address}:{tuple(local.shape)}" if address else None


def _backing(own: Tensor, files: MappedFiles | None) -> dict[str, Any]:
    plain = list(tensors_in(own))
    if files is None or not plain or plain[0] is not own:
        return {}
    storage = own.untyped_storage()
    return {"backing": str(storage.data_ptr()), "backing_bytes": 0 if files.hold(storage) else storage.nbytes()}


def reshard(model: Module) -> None:
    """Back to shards: after a forward FSDP2 leaves gathered what it was told not to free."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    megatron_fsdp.reshard(model)
