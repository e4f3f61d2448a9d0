"""Carry the step hooks of an optimizer that the loader built over to the reference."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import cloudpickle
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from pytest_fsdp_meta.observers.inventory import named_tensors, unwrapped
from pytest_fsdp_meta.observers.support.torch_private import step_hooks
from pytest_fsdp_meta.text import clean_name, first_line

Place: TypeAlias = tuple[str, str]
"""The kind and the name of something that the ranks and the reference both have."""
OPTIMIZER: Place = ("optimizer", "")


@dataclass(frozen=True)
class PackedHook:
    """A step hook. ``code`` is empty if it cannot be pickled, for which ``problem`` has the reason."""

    name: str
    before: bool
    """Whether it runs before the step."""
    code: bytes = b""
    problem: str = ""


def pack_hooks(optimizer: Optimizer, model: Module) -> tuple[PackedHook, ...]:
    """Pickle the step hooks; what they hold of the model and the optimizer is pickled by name."""
    places = {id(thing): place for place, thing in _shared(optimizer, model).items()}
    return tuple(_pack(hook, before, places) for before, hook in step_hooks(optimizer))


def add_hooks(
    hooks: tuple[PackedHook, ...], optimizer: Optimizer, model: Module, report: Callable[[str], object]
) -> None:
    """Register the hooks on the reference's optimizer, and ``report`` those that cannot run there."""
    shared = _shared(optimizer, model)
    for packed in hooks:
        try:
            if packed.problem:
                raise pickle.PicklingError(packed.problem)
            hook = _Unpickler(io.BytesIO(packed.code), shared).load()
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


def _pack(hook: Callable[..., Any], before: bool, places: Mapping[int, Place]) -> PackedHook:
    function = hook.func if isinstance(hook, partial) else hook
    name = str(getattr(function, "__name__", type(function).__name__))
    file = io.BytesIO()
    try:
        _Pickler(file, places).dump(hook)
    except Exception as error:  # pickling runs the author's code
        return PackedHook(name, before, problem=first_line(error))
    return PackedHook(name, before, file.getvalue())


def _shared(optimizer: Optimizer, model: Module) -> dict[Place, object]:
    """Return what the ranks and the reference both have: the optimizer, and the modules and tensors of the model."""
    modules = unwrapped(model).named_modules(remove_duplicate=False)
    shared: dict[Place, object] = {("module", clean_name(name)): module for name, module in modules}
    return {**shared, **{("tensor", name): tensor for name, _, tensor in named_tensors(model)}, OPTIMIZER: optimizer}


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
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
