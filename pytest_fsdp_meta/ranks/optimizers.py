"""Build and describe optimizers, and rebuild an optimizer of the ranks over the reference's parameters."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn
from unittest import mock
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.nn import Module, Parameter
from torch.optim import SGD, Optimizer
from torch.utils.hooks import RemovableHandle

from pytest_fsdp_meta.evidence import OptimizerFacts
from pytest_fsdp_meta.loader.subject import Subject, SubjectError
from pytest_fsdp_meta.ranks.adapters.dtensor import local_part
from pytest_fsdp_meta.ranks.batches import calling
from pytest_fsdp_meta.ranks.inventory import named_tensors
from pytest_fsdp_meta.ranks.joined_optimizer import (
    JoinedOptimizer,
    computing_optimizer,
    parts_of_optimizer,
    unwrapped_optimizer,
)
from pytest_fsdp_meta.ranks.sending import PackedHook, add_hooks, pack_hooks
from pytest_fsdp_meta.text import counted
from pytest_fsdp_meta.worlds.system.pickling import dumps

IMPLEMENTATION = frozenset({"foreach", "fused", "capturable", "differentiable", "initial_lr"})
"""Settings of a parameter group that change how a step is computed, and not its result."""
BY_NAME = frozenset({"params", "param_names"})
"""Keys of a parameter group that list its parameters; all other keys are hyperparameters."""


def make_optimizer(subject: Subject) -> Optimizer | None:
    """Return the optimizer that the subject declares, or SGD; None where nothing is trainable."""
    trainable = [parameter for parameter in subject.model.parameters() if parameter.requires_grad]
    declared = subject.optimizer
    if not trainable:
        return None
    if built := built_optimizer(subject):
        return _require_no_closure(built)
    if declared is None:
        # foreach kernels refuse a list that mixes DTensors and plain tensors.
        return SGD(trainable, lr=0.1, foreach=False)
    assert not isinstance(declared, Optimizer)
    wanted, argument = _argument(declared, subject.model, trainable)
    for earlier in _HOOKS.pop(subject.model, []):  # would step the optimizer that an earlier call has returned
        earlier.remove()
    with calling("Subject(optimizer=...)", f"optimizer({wanted})"), _collecting_hooks() as hooks:
        returned = declared(argument)
    _HOOKS[subject.model] = hooks
    if not isinstance(returned, Optimizer):
        raise SubjectError("optimizer", f"it returned {type(returned).__name__}, but should return an Optimizer")
    _require_no_closure(returned)
    inner = unwrapped_optimizer(returned)
    return returned if inner is None or inner is returned else JoinedOptimizer(parts_of_optimizer(inner), returned)


_HOOKS: WeakKeyDictionary[Module, list[RemovableHandle]] = WeakKeyDictionary()
"""The hooks on accumulated gradients that the author's function has added to the parameters of a model."""


@contextmanager
def _collecting_hooks() -> Iterator[list[RemovableHandle]]:
    found, register = list[RemovableHandle](), Tensor.register_post_accumulate_grad_hook

    def collect(tensor: Tensor, hook: Callable[[Tensor], None]) -> RemovableHandle:
        found.append(register(tensor, hook))
        return found[-1]

    with mock.patch.object(Tensor, "register_post_accumulate_grad_hook", collect):
        yield found


def handed_over(subject: Subject, optimizer: Optimizer | None) -> Any:
    """Return the optimizer as its author knows it, in the wrapper or container of a framework."""
    if isinstance(optimizer, JoinedOptimizer) and optimizer.container is not None:
        return optimizer.container
    return optimizer if optimizer is None or built_optimizer(subject) is None else subject.optimizer


def _require_no_closure(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer, or raise SubjectError if its step() needs a closure, as that of LBFGS does."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        name = type(optimizer).__name__
        why = f"{name}.step() needs a closure, but the reference steps with gradients that are already computed"
        raise SubjectError("optimizer", f"{why}; declare another one, such as SGD")
    return optimizer


def _argument(function: Callable[..., Any], model: Module, trainable: list[Parameter]) -> tuple[str, Any]:
    """Return (name, argument) that the author's function expects, by the name of its first parameter."""
    try:
        wanted = next(iter(inspect.signature(function).parameters), "")
    except ValueError:  # a function that is not written in Python
        wanted = ""
    if wanted == "model":
        return wanted, model
    if wanted == "named_parameters":
        return wanted, [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    return "parameters", trainable


def built_optimizer(subject: Subject) -> Optimizer | None:
    """Return the optimizer that the loader built, without the wrapper or container of a framework.

    Such a wrapper cannot be rebuilt for the reference, and it steps only when its framework says so.
    """
    return unwrapped_optimizer(subject.optimizer)


def optimizer_facts(optimizer: Optimizer, subject: Subject) -> OptimizerFacts:
    """Return which of the model's parameters the optimizer holds, and what else it holds."""
    model = subject.model
    held = Counter(id(parameter) for group in optimizer.param_groups for parameter in group["params"])
    parameters = [(name, tensor) for name, kind, tensor in named_tensors(model) if kind == "parameter"]
    live = {id(tensor) for _, tensor in parameters}
    raw = {id(tensor): name for name, tensor in model.named_parameters()}
    kinds = dict.fromkeys(type(computing_optimizer(part)).__name__ for part in parts_of_optimizer(optimizer))
    built = built_optimizer(subject) is not None
    wrapped = built and subject.optimizer is not optimizer
    others = {id(p): p for group in optimizer.param_groups for p in group["params"] if id(p) not in live}
    return OptimizerFacts(
        kind=" and ".join(kinds) + f" inside {type(subject.optimizer).__name__}" * wrapped,
        held={name: held[id(tensor)] for name, tensor in parameters},
        stepped=frozenset(name for name, tensor in parameters if optimizer.state.get(tensor)),
        others=tuple((str(p.dtype).removeprefix("torch."), _without_memory(p)) for p in others.values()),
        renamed=frozenset(name for name, tensor in parameters if raw.get(id(tensor), name) != name),
        settings=settings_of(optimizer, model),
        counted=_count_steps(optimizer, (tensor for _, tensor in parameters)) if built else 0.0,
    )


def settings_of(optimizer: Optimizer, model: Module) -> dict[str, Mapping[str, str]]:
    """Return ``OptimizerFacts.settings``."""
    shown: dict[int, Mapping[str, str]] = {}
    for group in optimizer.param_groups:
        # A scheduler sets lr when it is built, which the other side may do later.
        own = {**group, "lr": group.get("initial_lr", group.get("lr"))}
        plain = {key: _as_plain(value) for key, value in own.items() if key not in BY_NAME | IMPLEMENTATION}
        texts = {key: repr(value) for key, value in plain.items() if value is not None}
        shown |= {id(parameter): texts for parameter in group["params"]}
    parameters = ((name, tensor) for name, kind, tensor in named_tensors(model) if kind == "parameter")
    return {name: shown[id(tensor)] for name, tensor in parameters if id(tensor) in shown}


def _as_plain(value: Any) -> Any:
    """Return a setting whose text says all; None for an object such as a mesh, and for a setting that is not set."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else None
    if isinstance(value, (tuple, list)):
        return tuple(map(_as_plain, value))
    return value if isinstance(value, (bool, int, float, str)) else None


def _count_steps(optimizer: Optimizer, parameters: Iterable[Tensor]) -> float:
    """Return the steps that the optimizer has counted beside moments that are all zero, if there is nothing else."""
    counts: set[float] = set()
    for parameter in parameters:
        values = [value for value in optimizer.state.get(parameter, {}).values() if value is not None]
        moments = [value for value in values if isinstance(value, Tensor) and value.ndim]
        numbers = [
            float(value)
            for value in values
            if not getattr(value, "ndim", 0) and isinstance(value, (Tensor, int, float))
        ]
        if values:
            empty = moments and not any(_has_values(moment) for moment in moments)
            counts.add(numbers[0] if empty and len(numbers) == 1 else 0.0)
    return counts.pop() if len(counts) == 1 else 0.0


def _has_values(moment: Tensor) -> bool:
    try:
        return bool(local_part(moment).count_nonzero())
    except (NotImplementedError, RuntimeError, TypeError):
        return True  # a packed dtype, whose elements torch cannot read


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
    hooks: tuple[PackedHook, ...] = ()

    def rebuild(self, model: Module, trainable: Iterable[Parameter]) -> Optimizer:
        """Return the same groups over the parameters of ``model`` of the same names.

        Trainable parameters that are in no group join the first. Only a group that was empty stays empty.
        """
        members = _divide(model, trainable, [names for _, names in self.groups])
        filled = zip(self.groups, members, strict=True)
        groups = [{**options, "params": params} for (options, names), params in filled if params or not names]
        try:
            accepted = inspect.signature(self.kind).parameters
            return self.kind(groups, **{key: value for key, value in self.defaults.items() if key in accepted})
        except Exception as error:
            _refuse(f"{type(error).__name__}: {error}")


@dataclass
class Rebuilding:
    """``Subject.optimizer`` of the reference where the loader has built an optimizer, or several in a container."""

    packed: tuple[PackedOptimizer, ...]
    model: Module
    give_state: Callable[[Module, Optimizer], object]
    """Called with what was built."""
    hooks_left_out: list[str] = field(default_factory=list)
    """The step hooks that cannot run on the reference, each with the reason."""

    def __call__(self, trainable: Iterable[Parameter]) -> Optimizer:
        built = []
        names = [frozenset[str]().union(*(own for _, own in packed.groups)) for packed in self.packed]
        for packed, own in zip(self.packed, _divide(self.model, trainable, names), strict=True):
            if own:
                optimizer = packed.rebuild(self.model, own)
                add_hooks(packed.hooks, optimizer, self.model, self.hooks_left_out.append)
                built.append(optimizer)
        rebuilt = built[0] if len(built) == 1 else JoinedOptimizer(built)
        self.give_state(self.model, rebuilt)
        return rebuilt


def _divide(model: Module, trainable: Iterable[Parameter], wanted: Sequence[Set[str]]) -> list[list[Parameter]]:
    """Return the trainable parameters that have each set of names; the first set gets those that none has."""
    names = _names_by_id(model)
    divided: list[list[Parameter]] = [[] for _ in wanted]
    for parameter in trainable:
        numbers = (number for number, own in enumerate(wanted) if not own.isdisjoint(names.get(id(parameter), ())))
        divided[next(numbers, 0)].append(parameter)
    return divided


def _names_by_id(model: Module) -> dict[int, set[str]]:
    names: dict[int, set[str]] = {}
    for name, _, tensor in named_tensors(model):
        names.setdefault(id(tensor), set()).add(name)
    return names


def optimizer_state(model: Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return torch's state dict of the optimizer, by name.

    Raises SubjectError if torch raises a KeyError, because the optimizer holds parameters that are not the model's.
    """
    try:
        state: dict[str, Any] = get_optimizer_state_dict(model, parts_of_optimizer(optimizer))
        return state
    except KeyError:  # not looked for before: DeepSpeed's and FSDP1's optimizers hold others, and torch knows them
        names = _names_by_id(model)
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if not (others := held - names.keys()):
            raise
        lacking = [name for name, _, tensor in named_tensors(model) if tensor.requires_grad and id(tensor) not in held]
    raise SubjectError(
        "optimizer",
        f"it holds {counted(len(others), 'tensor')} that the model does not register, as after "
        "load_state_dict(assign=True), and torch's get_optimizer_state_dict(), the default of Subject(save=...), knows "
        "no name for them; build it after the weights are loaded, or declare save and resume",
        lacking,
    )


def hooks_left_out(subject: Subject) -> tuple[str, ...]:
    """Return the step hooks of the loader's optimizer that the reference did not run, each with the reason."""
    rebuilding = subject.optimizer
    return tuple(dict.fromkeys(rebuilding.hooks_left_out)) if isinstance(rebuilding, Rebuilding) else ()


def pack_optimizer(optimizer: Optimizer, model: Module) -> bytes:
    """Pickle the present settings of the optimizer, or of each one that is joined, for the reference.

    Where that fails, pickle a function that raises the SubjectError when the reference builds its optimizer.
    """
    try:
        return dumps(tuple(_pack_one(part, model) for part in parts_of_optimizer(optimizer)))
    except Exception as error:
        return dumps(partial(_refuse, f"{type(error).__name__}: {error}"))


def _pack_one(optimizer: Optimizer, model: Module) -> PackedOptimizer:
    names = _names_by_id(model)
    groups = tuple(
        (
            {key: value for key, value in group.items() if key not in BY_NAME},
            frozenset[str]().union(*(names.get(id(parameter), ()) for parameter in group["params"])),
        )
        for group in optimizer.param_groups
    )
    computing = computing_optimizer(optimizer)
    return PackedOptimizer(type(computing), dict(optimizer.defaults), groups, pack_hooks(computing, model))


def _refuse(problem: str, trainable: Iterable[Parameter] = ()) -> NoReturn:
    raise SubjectError(
        "optimizer",
        f"the reference cannot build the same optimizer ({problem}); "
        "declare a callable: optimizer=lambda parameters: ... (the loader's own optimizer is then not judged)",
    )
