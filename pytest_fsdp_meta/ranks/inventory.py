"""Collect facts about every parameter and buffer of this rank, and tell memory from mapped files.

The system may drop the pages of mapped files, so they cost nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from pytest_fsdp_meta.evidence import RankInventory, TensorFacts
from pytest_fsdp_meta.loader.adapter import Part
from pytest_fsdp_meta.ranks.adapters import megatron_fsdp, zero3
from pytest_fsdp_meta.ranks.adapters.dtensor import local_part, own_part, sizes
from pytest_fsdp_meta.ranks.adapters.lookup import parts_of
from pytest_fsdp_meta.ranks.bits import count_poison, digest
from pytest_fsdp_meta.ranks.torch_private import (
    drop_unreduced_gradients,
    is_replicated,
    managed_places,
    non_persistent_names,
)
from pytest_fsdp_meta.ranks.watching import tensors_in
from pytest_fsdp_meta.text import WRAPPERS, clean_name, first_line, grouped

FABRIC = frozenset({"_forward_module", "_original_module"})
"""The children of Fabric's wrapper. The first, what the strategy made of the model, contains the second or is the same
module."""
MAPS = Path("/proc/self/maps")
"""The kernel's list of mappings. torch knows only files that it mapped itself, and no slices of them."""
NO_FILES = ("/dev/", "/memfd:", "/SYSV")
"""Path prefixes of mappings that are memory, such as shared memory."""


def take_inventory(model: Module, rank: int, device: str, attributes: Sequence[str] = ()) -> RankInventory:
    """Return the inventory of one rank, with these custom parameter attributes."""
    transient, parts = non_persistent(model), parts_of(model)
    holders = (m for m in model.modules() if isinstance(m, DistributedDataParallel) or is_replicated(m))
    by_ddp = {id(parameter) for module in holders for parameter in module.parameters()}
    files = MappedFiles() if MAPS.exists() else None
    facts_of = partial(tensor_facts, attributes=attributes, files=files)
    with torch.no_grad():
        tensors = [
            replace(facts_of(name, kind, t, parts.of(name, t), persistent=name not in transient), ddp=id(t) in by_ddp)
            for name, kind, t in named_tensors(model)
        ]
    own = (key for _, _, tensor in named_tensors(model) for key in vars(tensor)) if attributes else ()
    carried = {key for key in own if key != "_is_param"}  # torch marks parameters of tensor subclasses with it
    return RankInventory(rank, device, tuple(tensors), custom_attributes=tuple(sorted(carried)))


def managed_names(model: Module) -> dict[str, bool]:
    """Map the FQNs that FSDP2 manages to whether the registered parameter is the one that it manages."""
    names = grouped((module, prefix) for prefix, module in named_modules(model, remove_duplicate=False))
    return {
        f"{prefix}.{name}".removeprefix("."): live
        for module, name, live in managed_places(model)
        for prefix in names.get(module, ())
    }


def named_tensors(model: Module) -> Iterator[tuple[str, str, Tensor]]:
    """Yield (FQN, kind, tensor) of all parameters, then all buffers; tied ones under each of their names."""
    modules = list(named_modules(model, remove_duplicate=False))
    for kind, named in (("parameter", Module.named_parameters), ("buffer", Module.named_buffers)):
        for prefix, module in modules:
            for name, tensor in named(module, recurse=False, remove_duplicate=False):
                yield clean_name(f"{prefix}.{name}".removeprefix(".")), kind, tensor


def named_modules(model: Module, remove_duplicate: bool = True) -> Iterator[tuple[str, Module]]:
    """Yield the modules by the author's names. A wrapper and what it wraps, also within the model, share theirs."""
    names, replicated = {"": ""}, set[str]()
    for path, module in unwrapped(model).named_modules(remove_duplicate=remove_duplicate):
        around, _, own = path.rpartition(".")
        is_wrapped = own in WRAPPERS or (around in replicated and own == "module")
        names[path] = names[around] if is_wrapped else f"{names[around]}.{own}".removeprefix(".")
        if isinstance(module, DistributedDataParallel):
            replicated.add(path)
        yield names[path], module


def unwrapped(model: Module) -> Module:
    """Return the module inside the wrappers of DDP, megatron-fsdp, DeepSpeed and lightning's Fabric."""
    while True:
        children = dict(model.named_children())
        if isinstance(model, DistributedDataParallel) or megatron_fsdp.is_wrapper(model) or zero3.is_wrapper(model):
            model = model.module
        elif "_forward_module" in children and {*children} <= FABRIC:
            model = children["_forward_module"]
        else:
            return model


def non_persistent(model: Module) -> set[str]:
    """Return the FQNs of the buffers that a state dict leaves out."""
    return {
        f"{prefix}.{name}".removeprefix(".")
        for prefix, module in named_modules(model, remove_duplicate=False)
        for name in non_persistent_names(module)
    }


def tensor_facts(
    name: str,
    kind: str,
    tensor: Tensor,
    part: Part | None = None,
    *,
    persistent: bool,
    attributes: Sequence[str],
    files: MappedFiles | None = None,
) -> TensorFacts:
    """Return the facts of one tensor; without a ``part``, the tensor describes its layout itself."""
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
        attributes={key: _describe_value(getattr(tensor, key)) for key in attributes if hasattr(tensor, key)},
        flat=part.flat,
        sharded_by=part.by,
        width=tensor.element_size(),
        **_memory_facts(own, files),
    )


def _describe_value(value: object) -> str:
    """Return the repr of a plain value, or the type of another one: its repr may have an address."""
    parts = value if isinstance(value, (tuple, list)) else [value]
    plain = all(isinstance(part, (bool, int, float, str, type(None), torch.dtype, torch.Size)) for part in parts)
    return repr(value) if plain else f"a {type(value).__name__}"


def _memory_facts(own: Tensor, files: MappedFiles | None) -> dict[str, Any]:
    """Return the facts that need to read the memory, or why torch cannot read this tensor."""
    if own.is_meta:
        return {}
    try:
        local = local_part(own)
        nan, poisoned = count_poison(local)
        facts = {"storage": memory_key(own), "nan": nan, "poisoned": poisoned, "digest": digest(local)}
        # A tensor subclass, or a tensor without a storage, has no backing.
        held = next(tensors_in(own), None)
        if files is not None and held is not None and held is own:
            storage = held.untyped_storage()
            facts["backing"] = str(storage.data_ptr())
            facts["backing_bytes"] = 0 if files.hold(storage) else storage.nbytes()
        return facts
    except Exception as error:  # torch raises many types for sparse, packed and lazy tensors
        return {"unreadable": f"{type(error).__name__}: {first_line(error, 100)}"}


def memory_key(local: Tensor) -> str | None:
    """Return a key of the tensor's memory and shape; None where it has no address: meta, empty, lazy backends."""
    held = None if local.is_meta or not local.numel() else next(tensors_in(local), None)
    address = 0 if held is None else held.data_ptr()
    return f"{address}:{tuple(local.shape)}" if address else None


def reshard(model: Module) -> None:
    """Free the gathered parameters: FSDP2 keeps those with ``reshard_after_forward=False`` after a forward."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    megatron_fsdp.reshard(model)


def drop_gradients(model: Module) -> None:
    """Set every gradient to None. A method ``zero_grad`` of the author's or an engine's need not take set_to_none."""
    for parameter in model.parameters():
        parameter.grad = None
    drop_unreduced_gradients(model)


class MappedFiles:
    """The mapped files at the time of the last ``refresh``, all or those in ``folder``.

    None where the system does not list mappings.
    """

    def __init__(self, folder: str = "/") -> None:
        self._folder = folder
        self._ranges = sorted(_mapped_ranges(folder))

    def hold(self, storage: torch.UntypedStorage) -> bool:
        """Whether the storage lies in a mapped file."""
        address = storage.data_ptr()
        index = bisect_right(self._ranges, (address, 2**64))
        return index > 0 and address < self._ranges[index - 1][1]

    def refresh(self) -> None:
        self._ranges = sorted(_mapped_ranges(self._folder))


def _mapped_ranges(folder: str) -> Iterator[tuple[int, int]]:
    for line in MAPS.read_text().splitlines() if MAPS.exists() else ():
        bounds, *_, path = line.split(maxsplit=5) if "/" in line else (line, "")
        if path.startswith(folder) and not path.startswith(NO_FILES):
            first, _, last = bounds.partition("-")
            yield int(first, 16), int(last, 16)
