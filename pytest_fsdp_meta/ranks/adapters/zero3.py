"""Describe the parameters of DeepSpeed's ZeRO-3, and its optimizer as one over these parameters.

ZeRO-3 leaves a placeholder of no elements in each parameter, and keeps this rank's equal part of the flattened tensor
as ``ds_tensor``, padded on the last ranks. Its optimizer steps flat float32 copies of many such parts at once
("sub-groups"), one after the other, with a torch optimizer that holds no parameter between steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from pytest_fsdp_meta.loader.adapter import ZERO3, Adapter, Part
from pytest_fsdp_meta.loader.validation import is_zero3_optimizer
from pytest_fsdp_meta.ranks.bits import is_low
from pytest_fsdp_meta.ranks.torch_private import before_other_step_hooks

HELD = "ds_tensor"
"""The attribute of a parameter that has this rank's part."""
ENGINE = "DeepSpeed's engine"
MASTER = "master weight"
"""The key under which the state has the float32 copy of a parameter in a lower precision."""


def adapter(model: Module) -> Adapter | None:
    """Return the adapter if ZeRO-3 has partitioned any parameter of the model."""
    return _part_of if any(hasattr(parameter, HELD) for parameter in model.parameters()) else None


def is_wrapper(module: Module) -> bool:
    """Whether the module is DeepSpeed's engine around a model."""
    return any(kind.__name__ == "DeepSpeedEngine" for kind in type(module).__mro__)


def _part_of(name: str, parameter: Tensor) -> Part | None:
    held = getattr(parameter, HELD, None)
    if held is None or held.numel() != held.ds_numel:
        return None  # a plain parameter, or one whose part lies on a disk
    whole = tuple(parameter.ds_shape)
    start, size = _place(parameter)
    gradient = None
    zero = getattr(parameter, "_z3_optimizer", None)
    if zero is not None:
        gradient = optimizer_of(zero).gradients.get(id(parameter))
    return replace(Part.run(held.detach().narrow(0, 0, size), whole, start, by=ZERO3), gradient=gradient)


def _place(parameter: Any) -> tuple[int, int]:
    """Return the position of this rank's first element in the flattened parameter, and how many it has."""
    length = parameter.ds_tensor.ds_numel
    start = min(length * parameter.ds_process_group.rank(), parameter.ds_numel)
    return start, min(length, parameter.ds_numel - start)


class Zero3Optimizer(Optimizer):  # type: ignore[misc]
    """ZeRO-3's optimizer with the model's parameters in its groups, and this rank's part of the state of each.

    It steps when DeepSpeed's engine does. Groups and state are made on demand, so that changing them changes nothing.
    """

    def __init__(self, zero: Any) -> None:
        self.zero = zero
        self.gradients: dict[int, Tensor] = {}
        """This rank's part of the gradient that each parameter is stepped with, by identity, during a step."""

    @property
    def inner(self) -> Optimizer:
        """The torch optimizer that steps the flat parts."""
        inner: Optimizer = self.zero.optimizer
        return inner

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        members: list[list[Parameter]] = [[] for _ in self.inner.param_groups]
        for number, parameters in enumerate(self.zero.fp16_groups):
            members[self.zero.sub_group_to_group_id[number]] += parameters
        return [{**group, "params": own} for group, own in zip(self.inner.param_groups, members, strict=True)]

    @property
    def state(self) -> Mapping[Parameter, dict[str, Any]]:
        return _State(self)

    @property
    def defaults(self) -> dict[str, Any]:
        return dict(self.inner.defaults)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.zero.zero_grad(set_to_none)

    @contextmanager
    def before_steps(self, hook: Callable[[Optimizer], object]) -> Iterator[None]:
        """Call the hook before each step of the engine with all gradients, as they are after scaling and clipping.

        The sub-groups before the last one have then been stepped: each has its gradient only while it is.
        """
        flats = {id(flat): number for number, flat in enumerate(self.zero.fp32_partitioned_groups_flat)}

        def before_sub_group(inner: Optimizer, *_: Any) -> None:
            stepped = [flats[id(p)] for group in inner.param_groups for p in group["params"] if id(p) in flats]
            for number in stepped:
                gradient = self.zero.fp32_partitioned_groups_flat[number].grad
                for parameter in self.zero.fp16_groups[number] if gradient is not None else ():
                    start, size = self.place(parameter)[1:]
                    self.gradients[id(parameter)] = gradient.detach().narrow(0, start, size).clone()
            if len(flats) - 1 in stepped:
                hook(self)

        try:
            with before_other_step_hooks(self.inner, before_sub_group):
                yield
        finally:
            self.gradients.clear()

    def place(self, parameter: Parameter) -> tuple[int, int, int]:
        """Return the sub-group of a parameter, and the start and size of its part in the flat tensors of that."""
        number, start, _ = self.zero.grad_position[self.zero.get_param_id(parameter)]
        return number, start, _place(parameter)[1]


class _State(Mapping[Parameter, dict[str, Any]]):
    """The state of each parameter that is stepped, cut out of that of the flat tensors when it is asked for."""

    def __init__(self, optimizer: Zero3Optimizer) -> None:
        self._optimizer = optimizer
        self._stepped = {id(p): p for parameters in optimizer.zero.fp16_groups for p in parameters}

    def __getitem__(self, parameter: Parameter) -> dict[str, Any]:
        if id(parameter) not in self._stepped:
            raise KeyError(parameter)
        number, start, size = self._optimizer.place(parameter)
        flat = self._optimizer.zero.fp32_partitioned_groups_flat[number]
        state = {
            key: value.narrow(0, start, size) if isinstance(value, Tensor) and value.shape == flat.shape else value
            for key, value in self._optimizer.inner.state.get(flat, {}).items()
        }
        if state and is_low(parameter.dtype):
            state[MASTER] = flat.detach().narrow(0, start, size)
        return state

    def __iter__(self) -> Iterator[Parameter]:
        return iter(self._stepped.values())

    def __len__(self) -> int:
        return len(self._stepped)


_known: WeakKeyDictionary[Any, Zero3Optimizer] = WeakKeyDictionary()


def optimizer_of(zero: Any) -> Zero3Optimizer:
    """Return the optimizer over the parameters for ZeRO-3's; always the same one."""
    assert is_zero3_optimizer(zero)
    if zero not in _known:
        _known[zero] = Zero3Optimizer(zero)
    return _known[zero]
