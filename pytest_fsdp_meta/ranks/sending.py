"""Send functions that the loader made to a world of one rank, with what belongs to that world in them.

Among them are the step hooks of an optimizer that the loader built, which the reference's optimizer gets.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from pytest_fsdp_meta.ranks.inventory import named_modules, named_tensors
from pytest_fsdp_meta.ranks.joined_optimizer import parts_of_optimizer
from pytest_fsdp_meta.ranks.torch_private import step_hooks
from pytest_fsdp_meta.text import first_line
from pytest_fsdp_meta.worlds import Rank, current
from pytest_fsdp_meta.worlds.system.pickling import Pickler

Address: TypeAlias = tuple[str, str]
"""The kind and the name of something that the ranks and the reference both have."""
OPTIMIZER: Address = ("optimizer", "")


@dataclass(frozen=True)
class PackedFunction:
    """A pickled function. ``code`` is empty if it cannot be pickled, for which ``problem`` has the reason."""

    code: bytes = b""
    problem: str = ""


def pack_function(function: Any, model: Module, optimizer: Optimizer | None, one_rank: bool = False) -> PackedFunction:
    """Pickle the function; what it holds of the model and the optimizer is pickled by name.

    With ``one_rank``, it may hold meshes and groups, which have one rank in the world of the reference.
    """
    places = {id(thing): place for place, thing in _shared(model, optimizer).items()}
    file = io.BytesIO()
    try:
        (_OneRankPickler if one_rank else _Pickler)(file, places).dump(function)
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


def _shared(model: Module, optimizer: Optimizer | None) -> dict[Address, object]:
    """Return what the ranks and the reference both have: the modules and tensors of the model, and the optimizer."""
    modules = named_modules(model, remove_duplicate=False)
    shared: dict[Address, object] = {("module", name): module for name, module in modules}
    shared |= {("tensor", name): tensor for name, _, tensor in named_tensors(model)}
    if optimizer is None:
        return shared
    # A scheduler or a function may hold one of the optimizers in a container.
    parts = {("optimizer", str(number)): part for number, part in enumerate(parts_of_optimizer(optimizer))}
    return {**shared, **parts, OPTIMIZER: optimizer}


class _Pickler(Pickler):
    def __init__(self, file: io.BytesIO, places: Mapping[int, Address]) -> None:
        super().__init__(file)
        self._places = places

    def persistent_id(self, obj: object) -> Address | None:
        if isinstance(obj, (DeviceMesh, dist.ProcessGroup, DTensor)) and id(obj) not in self._places:
            raise pickle.PicklingError(f"it holds a {type(obj).__name__}, which the reference does not have")
        return self._places.get(id(obj))


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, shared: Mapping[Address, object]) -> None:
        super().__init__(file)
        self._shared = shared

    def persistent_load(self, pid: Any) -> object:
        if pid in self._shared:
            return self._shared[pid]
        kind, dims = pid
        if not isinstance(dims, tuple):
            raise pickle.UnpicklingError(f"the reference has no {kind} {dims}")
        if kind == "group":
            return dist.group.WORLD
        if not dims:
            return current()
        mesh = init_device_mesh(current().device.type, (1,) * len(dims), mesh_dim_names=dims)
        return mesh if kind == "mesh" else replace(current(), _mesh=mesh)


class _OneRankPickler(_Pickler):
    """Sends meshes, groups and the rank as those of a world of one rank."""

    def persistent_id(self, obj: object) -> Any:
        if id(obj) in self._places:
            return self._places[id(obj)]
        if isinstance(obj, DTensor):
            raise pickle.PicklingError("it holds a DTensor, whose other parts are on other ranks")
        if isinstance(obj, DeviceMesh):
            return "mesh", _dim_names(obj)
        if isinstance(obj, dist.ProcessGroup):
            return "group", ()
        if isinstance(obj, Rank):
            return "rank", _dim_names(obj.mesh) if obj.has_mesh else ()
        return None


def _dim_names(mesh: DeviceMesh) -> tuple[str, ...]:
    return tuple(mesh.mesh_dim_names or (f"dim_{number}" for number in range(mesh.ndim)))


@dataclass(frozen=True)
class PackedHook:
    """A step hook, without its model and optimizer."""

    name: str
    before: bool
    """Whether it runs before the step."""
    function: PackedFunction


def pack_hooks(optimizer: Optimizer, model: Module) -> tuple[PackedHook, ...]:
    """Pickle the step hooks; what they hold of the model and the optimizer is pickled by name."""
    hooks = step_hooks(optimizer)
    packed = ((before, hook, pack_function(hook, model, optimizer, one_rank=True)) for before, hook in hooks)
    return tuple(PackedHook(_name(hook), before, function) for before, hook, function in packed)


def add_hooks(
    hooks: tuple[PackedHook, ...], optimizer: Optimizer, model: Module, report: Callable[[str], object]
) -> None:
    """Register the hooks on the reference's optimizer, and ``report`` those that cannot run there."""
    for packed in hooks:
        try:
            hook = unpack_function(packed.function, model, optimizer)
        except Exception as error:  # unpickling imports and runs the author's code
            report(f"{packed.name}: {first_line(error)}")
            continue
        register = optimizer.register_step_pre_hook if packed.before else optimizer.register_step_post_hook
        register(_Reported(packed.name, hook, model, report))


@dataclass
class _Reported:
    """A hook that is reported, and not called again, if it raises or replaces parameters of the reference.

    It may need what only ranks have. A reference with other parameters is no longer the one that was built.
    """

    name: str
    hook: Callable[..., Any] | None
    model: Module
    report: Callable[[str], object]

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if self.hook is None:
            return None
        before = _registered(self.model)
        try:
            returned = self.hook(optimizer, args, kwargs)
        except Exception as error:
            self._give_up(f"it raises {type(error).__name__}: {first_line(error)}")
            return None
        now = _registered(self.model)
        if {place: id(parameter) for place, parameter in now.items()} != {p: id(own) for p, own in before.items()}:
            for (module, name), parameter in before.items():
                setattr(module, name, parameter)
            self._give_up("it replaces parameters of the model")
        return returned

    def _give_up(self, problem: str) -> None:
        self.hook = None
        self.report(f"{self.name}: {problem}")


def _registered(model: Module) -> dict[tuple[Module, str], Parameter]:
    return {
        (module, name): parameter
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
    }


def _name(hook: Callable[..., Any]) -> str:
    function = hook.func if isinstance(hook, partial) else hook
    return str(getattr(function, "__name__", type(function).__name__))
