"""Build the scheduler and what is kept beside model and optimizer, step it, save it and describe it."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from pytest_fsdp_meta.checks.checkpoint.facts import Fingerprint
from pytest_fsdp_meta.checks.checkpoint.observe.fingerprints import fingerprint
from pytest_fsdp_meta.loader.adapter import Part
from pytest_fsdp_meta.loader.subject import Subject, SubjectError
from pytest_fsdp_meta.loader.validation import is_stateful, takes
from pytest_fsdp_meta.ranks.adapters.dtensor import local_part, own_part
from pytest_fsdp_meta.ranks.adapters.lookup import parts_of
from pytest_fsdp_meta.ranks.batches import calling
from pytest_fsdp_meta.ranks.bits import is_low
from pytest_fsdp_meta.ranks.inventory import named_tensors
from pytest_fsdp_meta.ranks.joined_optimizer import parts_of_optimizer
from pytest_fsdp_meta.ranks.optimizers import make_optimizer
from pytest_fsdp_meta.ranks.sending import PackedFunction, pack_function, unpack_function
from pytest_fsdp_meta.text import clean_name, first_line, grouped
from pytest_fsdp_meta.worlds import Rank

SCHEDULER = "scheduler"
UPDATES = ("update_parameters", "update")
"""The methods that update what is kept beside the model after a step; the first that an object has is called."""


@dataclass(frozen=True)
class Whole:
    """A value that a checkpoint pickles as a whole. torch would save the items of a mapping, and load a plain dict."""

    value: Any


@dataclass
class Beside:
    """The scheduler and the objects beside one model and its optimizer."""

    scheduler: Any = None
    objects: Mapping[str, Any] = field(default_factory=dict)
    compared: frozenset[str] = frozenset()
    """The objects that the reference has as well."""
    begun: Any = None
    """The scheduler's state at the beginning of its schedule."""
    model: Module | None = None

    def after_step(self, subject: Subject) -> None:
        """Step what ``train_step`` does not step by itself."""
        author = subject.train_step
        if self.scheduler is not None and not (author and (is_stateful(subject.scheduler) or takes(author, SCHEDULER))):
            with calling("Subject(scheduler=...)"), warnings.catch_warnings():
                # The reference's copy of a scheduler was made before its optimizer, which it takes for overridden.
                warnings.filterwarnings("ignore", message="Seems like `optimizer.step\\(\\)` has been overridden")
                self.scheduler.step()
        if author and takes(author, "beside"):
            return
        for name in self.compared:
            kept = self.objects[name]
            methods = [] if isinstance(kept, Mapping) else [method for method in UPDATES if hasattr(kept, method)]
            if methods:
                with calling(_where(name), f"{methods[0]}(model)"):
                    getattr(kept, methods[0])(subject.model)

    def arguments(self, subject: Subject, function: object, any_keyword: bool = False) -> dict[str, Any]:
        """Return the keyword arguments for a function of the author's that has such parameters.

        What is not declared is not handed over: a parameter of that name may have a default of the author's.
        """
        handed = {SCHEDULER: self.scheduler, "beside": dict(self.objects) or None}
        declared = {SCHEDULER: subject.scheduler is not None, "beside": bool(subject.beside)}
        return {name: handed[name] for name in handed if declared[name] and takes(function, name, any_keyword)}

    @contextmanager
    def kept_schedule(self, optimizer: Optimizer) -> Iterator[None]:
        """Begin the schedule again for the block: steps that are only looked at must not use up one that ends."""
        groups = optimizer.param_groups
        # Copies, because a rate may be a tensor; before the schedule begins again, which may set the rate.
        settings = [{key: deepcopy(value) for key, value in group.items() if key != "params"} for group in groups]
        state = None if self.scheduler is None else deepcopy(self.scheduler.state_dict())
        if self.begun is not None:
            self.scheduler.load_state_dict(deepcopy(self.begun))
        try:
            yield
        finally:
            if state is not None:
                self.scheduler.load_state_dict(state)
                for group, own in zip(groups, settings, strict=True):
                    group.update(own)

    def states(self) -> dict[str, Any]:
        """Return the state of all of it, as a part of a state dict; without anything, an empty one."""
        states: dict[str, Any] = {}
        if self.scheduler is not None:
            states[SCHEDULER] = Whole(_state_of(SCHEDULER, self.scheduler))
        if self.objects:
            states["beside"] = {name: _saved_whole(_state_of(name, kept)) for name, kept in self.objects.items()}
        return states

    def load(self, states: Mapping[str, Any]) -> None:
        if self.scheduler is not None:
            with calling(_where(SCHEDULER), "load_state_dict(state)"):
                self.scheduler.load_state_dict(states[SCHEDULER].value)
        for name, kept in self.objects.items():
            state = states["beside"][name]
            with calling(_where(name), "load_state_dict(state)"):
                kept.load_state_dict(state.value if isinstance(state, Whole) else state)

    def entries(self) -> Iterator[tuple[str, Any]]:
        """Yield name and value of each entry of each state dict: ("scheduler.last_epoch", 3)."""
        if self.scheduler is not None:
            state = _state_of(SCHEDULER, self.scheduler)
            items = state.items() if isinstance(state, Mapping) else [("state", state)]
            yield from ((f"{SCHEDULER}.{key}", value) for key, value in items)
        for name, owner in self.objects.items():
            yield from _flat(name, _state_of(name, owner))

    def tensors(self) -> Iterator[tuple[str, Part]]:
        """Yield what this rank holds of each tensor in the state dicts of the objects that the reference has too.

        A plain tensor of the size of a parameter's shard is the same part of the whole as the shard.
        """
        entries = {name: value for name, value in self.entries() if isinstance(value, Tensor)}
        shards = _shards_of(self.model, entries) if self.model is not None else {}
        for name, value in entries.items():
            if name.partition(".")[0] in self.compared:
                shard = shards.get(name)
                beside = shard is not None and local_part(shard.local).shape == value.shape
                if shard is None or not beside or isinstance(value, DTensor) or not value.ndim:
                    yield name, own_part(value)
                else:
                    yield name, replace(shard, local=value, gradient=None)

    def fingerprints(self) -> dict[str, Fingerprint]:
        return {name: fingerprint(value) for name, value in self.entries()}

    def plain(self) -> tuple[str, ...]:
        """Return the entries that are not DTensors: torch's checkpoint has one rank's value of each."""
        return tuple(name for name, value in self.entries() if not isinstance(value, DTensor))

    def aliases(self, model: Module) -> tuple[str, ...]:
        """Return the entries of averages that hold nothing but parameters which train, or views of them.

        Other objects may share parameters with the model: a loss its head, and an average may also save the model.
        """
        trained = {_memory(parameter) for parameter in model.parameters() if parameter.requires_grad}
        found: list[str] = []
        for owner, kept in self.objects.items():
            if owner in self.compared and any(hasattr(kept, method) for method in UPDATES):
                entries = _flat(owner, _state_of(owner, kept))
                tensors = {name: value for name, value in entries if isinstance(value, Tensor) and value.ndim}
                found += tensors if all(_memory(value) in trained for value in tensors.values()) else ()
        return tuple(found)

    def averages(self) -> dict[str, list[Tensor]]:
        """Map objects that can be updated with a model to their tensors, as far as these belong to parameters."""
        updated = {owner for owner, kept in self.objects.items() if any(hasattr(kept, method) for method in UPDATES)}
        values = {n: v for n, v in self.entries() if n.partition(".")[0] in updated and isinstance(v, Tensor)}
        known = _shards_of(self.model, values) if self.model is not None else {}
        return grouped((name.partition(".")[0], values[name]) for name in known)

    def rounded(self, model: Module) -> dict[str, Fingerprint]:
        """Return fingerprints of the tensors as they are after rounding to the dtype of low-precision parameters.

        Copies in float32 that are rebuilt from the parameters look like this.
        """
        low = {parameter.dtype for parameter in model.parameters() if is_low(parameter.dtype)}
        if len(low) != 1:
            return {}
        [dtype] = low
        found = {}
        for name, value in self.entries():
            if isinstance(value, Tensor) and value.dtype in (torch.float32, torch.float64) and value.ndim:
                rounded = local_part(value).to(dtype).to(value.dtype)
                found[name] = replace(fingerprint(rounded), shape=tuple(value.shape))
        return found


def _shards_of(model: Module, entries: Collection[str]) -> dict[str, Part]:
    """Map entries to the shards of the parameters after which they are named, or whose order in the model they have."""
    parts, found = parts_of(model), dict[str, Part]()
    held = {name: tensor for name, kind, tensor in named_tensors(model) if kind == "parameter"}
    names = {id(tensor): name for name, tensor in reversed(held.items())}  # the first of tied ones
    lists: dict[str, list[str]] = {}
    for entry in entries:
        owner, _, key = entry.rpartition(".")
        if named := max((name for name in held if clean_name(entry).endswith(f".{name}")), key=len, default=""):
            found[entry] = parts.of(named, held[named])
        elif key.isdigit():
            lists.setdefault(owner, []).append(entry)
    every = list(dict.fromkeys(map(id, held.values())))
    for numbered in lists.values():
        for own in (every, [one for one in every if held[names[one]].requires_grad]):
            if len(own) == len(numbered):
                pairs = zip(numbered, (names[one] for one in own), strict=True)
                found |= {entry: parts.of(name, held[name]) for entry, name in pairs}
    return found


def _memory(tensor: Tensor) -> tuple[int, int]:
    """Return address and size of what this rank holds; of nothing, they are equal to those of no other tensor."""
    local = local_part(tensor)
    return (local.data_ptr(), local.numel()) if local.numel() else (id(tensor), 0)


def _where(name: str) -> str:
    return "Subject(scheduler=...)" if name == SCHEDULER else f"Subject(beside={{{name!r}: ...}})"


def _state_of(name: str, owner: Any) -> Any:
    with calling(_where(name), "state_dict()"):
        return owner.state_dict()


def _flat(name: str, state: Any) -> Iterator[tuple[str, Any]]:
    """Yield the values of nested mappings, and of sequences of them or of tensors, with the keys that lead to each."""
    if isinstance(state, Mapping):
        for key, value in state.items():
            yield from _flat(f"{name}.{key}", value)
    elif isinstance(state, (list, tuple)) and any(isinstance(value, (Tensor, Mapping)) for value in state):
        for number, value in enumerate(state):
            yield from _flat(f"{name}.{number}", value)
    else:
        yield name, state


def _saved_whole(state: Any) -> Any:
    """Return a state without DTensors as a whole: what an object creates later is not in the state of a new one."""
    sharded = any(isinstance(value, DTensor) for _, value in _flat("", state))
    return state if sharded and isinstance(state, Mapping) else Whole(state)


def make_beside(subject: Subject, optimizer: Optimizer | None) -> Beside:
    """Return what the subject declares, built for its model and this optimizer where it declares functions."""
    scheduler = subject.scheduler
    if optimizer is None:
        scheduler = None  # nothing is trainable
    elif scheduler is not None and not is_stateful(scheduler):
        with calling("Subject(scheduler=...)", "scheduler(optimizer)"):
            scheduler = scheduler(optimizer)
        if not is_scheduler(scheduler):
            raise SubjectError(
                SCHEDULER,
                f"it returned {type(scheduler).__name__}, but should return a scheduler with step() and state_dict()",
            )
    if isinstance(scheduler, ReduceLROnPlateau):
        raise SubjectError(SCHEDULER, "ReduceLROnPlateau steps by a metric, which the reference lacks; leave it out")
    objects: dict[str, Any] = {}
    for name, kept in subject.beside.items():
        objects[name] = kept
        if is_stateful(kept):
            continue
        with calling(_where(name), f"{name}(model)"):
            objects[name] = built = kept(subject.model)
        if not is_stateful(built):
            raise SubjectError(
                "beside",
                f"{name!r} returned {type(built).__name__}, but should return an object with state_dict() and "
                "load_state_dict()",
            )
    made = {name: kept for name, kept in objects.items() if not is_stateful(subject.beside[name])}
    compared = frozenset(name for name, kept in made.items() if not isinstance(kept, GradScaler))  # no average
    begun = None if scheduler is None else deepcopy(_state_of(SCHEDULER, scheduler))
    return Beside(scheduler, objects, compared, begun, subject.model)


def is_scheduler(value: object) -> bool:
    return is_stateful(value) and callable(getattr(value, "step", None)) and not isinstance(value, Optimizer)


def last_optimizer(subject: Subject, rank: Rank) -> Optimizer | None:
    """Return the optimizer that has trained the model last, or a new one; None if nothing is trainable."""
    return rank.state.get("resumable") or rank.state.get("optimizer") or make_optimizer(subject)


def last_beside(subject: Subject, rank: Rank, optimizer: Optimizer) -> Beside:
    """Return what is beside the ``last_optimizer``: the rank's state keeps what was made for the newest one."""
    return rank.state.get("beside") or make_beside(subject, optimizer)


def rates_of(optimizer: Optimizer) -> tuple[float, ...]:
    """Return the learning rate of each parameter group that has one."""
    rates = (group.get("lr") for group in optimizer.param_groups)  # None where the optimizer chooses its own
    return tuple(float(rate) for rate in rates if isinstance(rate, (int, float, Tensor)))


def scheduler_for_reference(subject: Subject, optimizer: Optimizer | None) -> Any:
    """Return the author's function, or a scheduler that the loader built, packed without its optimizer.

    A framework's scheduler that wraps another one (accelerate) steps as its framework says; the reference gets the
    inner one, its ``.scheduler``.
    """
    scheduler: Any = subject.scheduler
    while is_stateful(inner := getattr(scheduler, SCHEDULER, None)) and inner is not scheduler:
        scheduler = inner
    if not is_stateful(scheduler):
        return scheduler
    scheduled = getattr(scheduler, "optimizer", None)
    if optimizer is None or not any(scheduled is part for part in parts_of_optimizer(optimizer)):
        # It schedules another optimizer by mistake: the reference shows what it should do to the one that trains.
        optimizer = scheduled or optimizer
    return pack_function(scheduler, subject.model, optimizer)


def declare_beside(subject: Subject, scheduler: Any, beside: Mapping[str, Any]) -> None:
    """Declare for the reference what rank 0 has packed for it."""
    packed = isinstance(scheduler, PackedFunction)
    subject.scheduler = partial(_copy_scheduler, scheduler, subject.model) if packed else scheduler
    subject.beside = beside


def _copy_scheduler(packed: PackedFunction, model: Module, optimizer: Optimizer) -> Any:
    """Return the scheduler that the loader has built, for the reference's optimizer."""
    try:
        return unpack_function(packed, model, optimizer)
    except Exception as error:
        raise SubjectError(
            SCHEDULER,
            f"the reference cannot build the same scheduler ({first_line(error)}); declare a function: "
            "scheduler=lambda optimizer: ...",
        ) from None
