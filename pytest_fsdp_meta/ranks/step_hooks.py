"""Carry the step hooks of an optimizer that the loader built over to the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.nn import Module, Parameter
from torch.optim import Optimizer

from pytest_fsdp_meta.ranks.sending import PackedFunction, pack_function, unpack_function
from pytest_fsdp_meta.ranks.torch_private import step_hooks
from pytest_fsdp_meta.text import first_line


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
    return tuple(PackedHook(_name(hook), before, pack_function(hook, model, optimizer)) for before, hook in hooks)


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
