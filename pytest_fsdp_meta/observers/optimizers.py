"""Build and describe optimizers, and rebuild an optimizer of the ranks over the reference's parameters."""

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
"""Keys of a parameter group that list its parameters; all other keys are hyperparameters."""


def make_optimizer(subject: Subject) -> Optimizer | None:
    """Return the optimizer that the subject declares, or SGD; None where nothing is trainable."""
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
    """Return which of the model's parameters the optimizer holds, and what else it holds."""
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
    """Whether the parameter is on meta or its storage was freed, so that nothing can compute with it."""
    local = local_part(parameter)
    return bool(local.is_meta or (local.numel() > 0 and local.untyped_storage().nbytes() == 0))


@dataclass(frozen=True)
class PackedOptimizer:
    """The class of an optimizer and the hyperparameters of its groups, without parameters and state."""

    kind: type[Optimizer]
    defaults: Mapping[str, Any]
    groups: tuple[tuple[Mapping[str, Any], frozenset[str]], ...]
    """(hyperparameters, names of the parameters); parameters that the model does not register have no name."""

    def rebuild(self, model: Module, trainable: Iterable[Parameter]) -> Optimizer:
        """Return the same groups over the parameters of ``model`` of the same names.

        Trainable parameters that are in no group join the first.
        """
        names: dict[Parameter, set[str]] = {parameter: set() for parameter in trainable}
        for name, _, tensor in named_tensors(model):
            if tensor in names:
                names[tensor].add(name)
        members: list[list[Parameter]] = [[] for _ in self.groups]
        for parameter, own_names in names.items():
            own_groups = (number for number, (_, group_names) in enumerate(self.groups) if own_names & group_names)
            members[next(own_groups, 0)].append(parameter)
        filled = zip(self.groups, members, strict=True)
        groups = [{**options, "params": params} for (options, _), params in filled if params]
        try:
            accepted = inspect.signature(self.kind).parameters
            return self.kind(groups, **{key: value for key, value in self.defaults.items() if key in accepted})
        except Exception as error:
            _refuse(f"{type(error).__name__}: {error}")


def pack_optimizer(optimizer: Optimizer, model: Module) -> bytes:
    """Pickle the optimizer's present settings for the reference.

    Where that fails, pickle a function that raises the SubjectError when the reference builds its optimizer.
    """
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


def _refuse(problem: str, trainable: Iterable[Parameter] = ()) -> NoReturn:
    raise SubjectError(
        "optimizer",
        f"the reference cannot build the same optimizer ({problem}); "
        "declare a callable: optimizer=lambda parameters: ...",
    )
