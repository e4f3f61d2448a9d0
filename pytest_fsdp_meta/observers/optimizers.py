"""Optimizers: built, looked into, taken apart on the ranks and put together again over the reference's parameters."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import cloudpickle
from torch.nn import Module, Parameter
from torch.optim import SGD, Optimizer

from pytest_fsdp_meta.evidence import OptimizerFacts
from pytest_fsdp_meta.loader.subject import Subject, SubjectError
from pytest_fsdp_meta.observers.adapters.dtensor import local_part
from pytest_fsdp_meta.observers.batches import calling
from pytest_fsdp_meta.observers.inventory import named_tensors

BY_NAME = frozenset({"params", "param_names"})
"""Entries of a group that say which parameters are in it; all others are hyperparameters."""


def make_optimizer(subject: Subject) -> Optimizer | None:
    """The optimizer that the subject declares, or SGD; None where nothing is trainable."""
    trainable = [parameter for parameter in subject.model.parameters() if parameter.requires_grad]
    declared = subject.optimizer
    if not trainable:
        return None
    if isinstance(declared, Optimizer):
        return declared
    if declared is None:
        # foreach kernels refuse a list that mixes DTensors and plain tensors.
        return SGD(trainable, lr=0.1, foreach=False)
    with calling("Subject(optimizer=...)"):
        built = declared(trainable)
    if not isinstance(built, Optimizer):
        raise SubjectError("optimizer", f"it returned {type(built).__name__}, but should return an Optimizer")
    return built


def optimizer_facts(optimizer: Optimizer, model: Module) -> OptimizerFacts:
    """What the optimizer holds of the model's parameters, and what it holds that the model does not register."""
    held = Counter(id(parameter) for group in optimizer.param_groups for parameter in group["params"])
    parameters = [(name, tensor) for name, kind, tensor in named_tensors(model) if kind == "parameter"]
    live = {id(tensor) for _, tensor in parameters}
    others = {id(p): p for group in optimizer.param_groups for p in group["params"] if id(p) not in live}
    return OptimizerFacts(
        kind=type(optimizer).__name__,
        held={name: held[id(tensor)] for name, tensor in parameters},
        stepped=frozenset(name for name, tensor in parameters if optimizer.state.get(tensor)),
        others=tuple((str(p.dtype).removeprefix("torch."), _without_memory(p)) for p in others.values()),
    )


def _without_memory(parameter: Parameter) -> bool:
    """On meta, or with its storage freed: certainly no parameter that anything computes with."""
    local = local_part(parameter)
    return bool(local.is_meta or (local.numel() > 0 and local.untyped_storage().nbytes() == 0))


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
