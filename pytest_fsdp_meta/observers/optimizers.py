"""A built optimizer, taken apart on the ranks and put together again over the reference's own parameters."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import cloudpickle
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from pytest_fsdp_meta.observers.inventory import named_tensors
from pytest_fsdp_meta.subject import SubjectError

BY_NAME = frozenset({"params", "param_names"})
"""Entries of a group that say which parameters are in it; all others are hyperparameters."""


@dataclass(frozen=True)
class PackedOptimizer:
    """The class of an optimizer and its groups, without parameters and without state."""

    kind: type[Optimizer]
    defaults: Mapping[str, Any]
    groups: tuple[tuple[Mapping[str, Any], frozenset[str]], ...]
    """(hyperparameters, names of the parameters); what the model does not register has no name."""

    def rebuild(self, model: Module, trainable: Iterable[Parameter]) -> Optimizer:
        """The same groups over the parameters of ``model`` that have the names; those in no group join the first."""
        names: dict[Parameter, set[str]] = {parameter: set() for parameter in trainable}
        for name, _, tensor in named_tensors(model):
            if tensor in names:
                names[tensor].add(name)
        members: list[list[Parameter]] = [[] for _ in self.groups]
        for parameter, known_as in names.items():
            own = (number for number, (_, held) in enumerate(self.groups) if known_as & held)
            members[next(own, 0)].append(parameter)
        groups = [{**options, "params": held} for (options, _), held in zip(self.groups, members, strict=True) if held]
        try:
            accepted = inspect.signature(self.kind).parameters
            return self.kind(groups, **{key: value for key, value in self.defaults.items() if key in accepted})
        except Exception as error:
            _refuse(f"{type(error).__name__}: {error}")


def pack_optimizer(optimizer: Optimizer, model: Module) -> bytes:
    """The optimizer as it is now, packed for the reference. One that cannot be packed fails there, when it is asked."""
    try:
        names: dict[int, set[str]] = {}
        for name, _, tensor in named_tensors(model):
            names.setdefault(id(tensor), set()).add(name)
        groups = tuple(
            (
                {key: value for key, value in group.items() if key not in BY_NAME},
                frozenset[str]().union(*(names.get(id(parameter), ()) for parameter in group["params"])),
            )
            for group in optimizer.param_groups
        )
        packed = cloudpickle.dumps(PackedOptimizer(type(optimizer), dict(optimizer.defaults), groups))
    except Exception as error:
        packed = cloudpickle.dumps(partial(_refuse, f"{type(error).__name__}: {error}"))
    return bytes(packed)


def _refuse(why: str, trainable: Iterable[Parameter] = ()) -> NoReturn:
    raise SubjectError(
        "optimizer", f"the reference cannot build the same ({why}); give a callable: optimizer=lambda parameters: ..."
    )
