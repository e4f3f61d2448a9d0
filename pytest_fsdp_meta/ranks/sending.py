"""Send functions that the loader made to a world of one rank, with what belongs to that world in them."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.optim import Optimizer

from pytest_fsdp_meta.ranks.inventory import named_tensors, unwrapped
from pytest_fsdp_meta.ranks.joined_optimizer import parts_of_optimizer
from pytest_fsdp_meta.text import clean_name, first_line
from pytest_fsdp_meta.worlds import Rank, current
from pytest_fsdp_meta.worlds.system.pickling import Pickler

Place: TypeAlias = tuple[str, str]
"""The kind and the name of something that the ranks and the reference both have."""
OPTIMIZER: Place = ("optimizer", "")


@dataclass(frozen=True)
class PackedFunction:
    """A pickled function. ``code`` is empty if it cannot be pickled, for which ``problem`` has the reason."""

    code: bytes = b""
    problem: str = ""


def pack_function(function: Callable[..., Any], model: Module, optimizer: Optimizer | None) -> PackedFunction:
    """Pickle the function; what it holds of the model and the optimizer is pickled by name."""
    places = {id(thing): place for place, thing in _shared(model, optimizer).items()}
    file = io.BytesIO()
    try:
        _Pickler(file, places).dump(function)
    except Exception as error:  # pickling runs the author's code
        return PackedFunction(problem=first_line(error))
    return PackedFunction(file.getvalue())


def unpack_function(packed: PackedFunction, model: Module, optimizer: Optimizer | None) -> Any:
    """Return the function, which holds this model and this optimizer instead of those of the ranks.

    Raises PicklingError if it could not be pickled, and whatever the author's modules raise when they are imported.
    """
    if packed.problem:
        raise pickle.PicklingError(packed.problem)
    return _Unpickler(io.BytesIO(packed.code), _shared(model, optimizer)).load()


def pack_for_one_rank(function: Any) -> PackedFunction:
    """Pickle the function; in a world of one rank, the meshes and groups that it holds have one rank."""
    file = io.BytesIO()
    try:
        _OneRankPickler(file).dump(function)
    except Exception as error:  # pickling runs the author's code
        return PackedFunction(problem=f"data cannot be sent to a world of one rank: {first_line(error)}")
    return PackedFunction(file.getvalue())


def unpack_on_one_rank(packed: PackedFunction) -> Any:
    """Return the function. Raises whatever the author's modules raise when they are imported."""
    return _OneRankUnpickler(io.BytesIO(packed.code)).load()


def _shared(model: Module, optimizer: Optimizer | None) -> dict[Place, object]:
    """Return what the ranks and the reference both have: the modules and tensors of the model, and the optimizer."""
    modules = unwrapped(model).named_modules(remove_duplicate=False)
    shared: dict[Place, object] = {("module", clean_name(name)): module for name, module in modules}
    shared |= {("tensor", name): tensor for name, _, tensor in named_tensors(model)}
    if optimizer is None:
        return shared
    # A scheduler or a function may hold one of the optimizers in a container.
    parts = {("optimizer", str(number)): part for number, part in enumerate(parts_of_optimizer(optimizer))}
    return {**shared, **parts, OPTIMIZER: optimizer}


class _Pickler(Pickler):
    def __init__(self, file: io.BytesIO, places: Mapping[int, Place]) -> None:
        super().__init__(file)
        self._places = places

    def persistent_id(self, obj: object) -> Place | None:
        if isinstance(obj, (DeviceMesh, dist.ProcessGroup, DTensor)) and id(obj) not in self._places:
            raise pickle.PicklingError(f"it holds a {type(obj).__name__}, which the reference does not have")
        return self._places.get(id(obj))


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, shared: Mapping[Place, object]) -> None:
        super().__init__(file)
        self._shared = shared

    def persistent_load(self, pid: Place) -> object:
        if pid not in self._shared:
            raise pickle.UnpicklingError(f"the reference has no {' '.join(pid)}")
        return self._shared[pid]


class _OneRankPickler(Pickler):
    def persistent_id(self, obj: object) -> tuple[str, tuple[str, ...]] | None:
        if isinstance(obj, DTensor):
            raise pickle.PicklingError("it holds a DTensor, whose other parts are on other ranks")
        if isinstance(obj, DeviceMesh):
            return "mesh", _dim_names(obj)
        if isinstance(obj, dist.ProcessGroup):
            return "group", ()
        if isinstance(obj, Rank):
            return "rank", _dim_names(obj.mesh) if obj.has_mesh else ()
        return None


class _OneRankUnpickler(pickle.Unpickler):
    def persistent_load(self, pid: tuple[str, tuple[str, ...]]) -> object:
        kind, dims = pid
        if kind == "group":
            return dist.group.WORLD
        if not dims:
            return current()
        mesh = init_device_mesh(current().device.type, (1,) * len(dims), mesh_dim_names=dims)
        return mesh if kind == "mesh" else replace(current(), _mesh=mesh)


def _dim_names(mesh: DeviceMesh) -> tuple[str, ...]:
    return tuple(mesh.mesh_dim_names or (f"dim_{number}" for number in range(mesh.ndim)))
