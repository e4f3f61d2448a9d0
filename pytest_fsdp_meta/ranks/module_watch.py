"""Watch what enters and leaves every module in a forward and a backward, without changing it."""

from __future__ import annotations

import dis
import inspect
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass
from functools import cache, partial
from types import CodeType
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.nn import Linear, Module
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from pytest_fsdp_meta.checks.tracing.facts import (
    AGAIN_INPUT,
    AGAIN_OUTPUT,
    GRADIENT,
    INPUT,
    OUTPUT,
    RECOMPUTED,
    ModuleFacts,
)
from pytest_fsdp_meta.evidence import splits_model
from pytest_fsdp_meta.ranks.adapters.dtensor import local_part, mesh_facts
from pytest_fsdp_meta.ranks.generators import States, changed_generators, read_states
from pytest_fsdp_meta.ranks.inventory import named_modules
from pytest_fsdp_meta.ranks.torch_private import is_in_backward, is_written_view, write_count
from pytest_fsdp_meta.ranks.watching import takes_hooks
from pytest_fsdp_meta.text import first_line
from pytest_fsdp_meta.worlds.rank.tracebacks import shorten_path

WRITTEN = "a module writes to its inputs, which the modules around it then lack: it was given the reference's instead"
HARMLESS = "name", "verbose", "use_cache", "gradient_checkpointing"
"""Attributes that change no result, as transformers names them, and that loaders change."""
READ_BY_FUNCTIONS = ("is_causal",)
"""Attributes read by functions that get the module as an argument, as in transformers."""
DEEPEST = 4
"""Levels of containers in which tensors are looked for."""

T = TypeVar("T")


class Seen(NamedTuple):
    """Which tensor of a module's call was seen: ``path`` is its place among the arguments or results."""

    stage: str
    module: str
    turn: int
    path: str


class Entered(NamedTuple):
    """A module's call in the forward, before it runs."""

    module: str
    turn: int
    caller: str | None
    """The module that makes the call; None outside of all."""
    arguments: Mapping[str, object]
    """By path what ``plain_value`` returns."""


class Watcher(Protocol):
    """What is told of each call of a module."""

    def enter(self, entered: Entered) -> None:
        """Note the beginning of a call in the forward; its tensors are seen next."""

    def see(self, seen: Seen, tensor: Tensor) -> Tensor | None:
        """Return the tensor that takes the place of this one, None for as it is. Outputs always stay as they are."""


class ModuleWatch:
    """Tell a watcher of every tensor that enters or leaves a module, and of the gradients of those that leave one.

    Gradients of inputs are not watched: in a tensor-parallel module they are partial sums. An error of the watcher is
    kept as ``problem`` and ends the watching, so that no rank leaves a step in which others wait for it.
    """

    def __init__(self, model: Module, watcher: Watcher, device: torch.device) -> None:
        self.problem = ""
        self.draws: dict[str, None] = {}
        """The modules that advanced a generator of the device themselves, not in those inside."""
        self._device = device
        self._states: States = {}
        self._running: list[str] = []
        self._handed: list[tuple[Tensor, int]] = []
        """What took the place of an input, with its version, by call that has not returned."""
        self._modules = innermost_modules(model)
        self._watcher = watcher
        self._turns: Counter[tuple[str, bool]] = Counter()
        self._hooks = ExitStack()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the block. What torch.compile has compiled runs eagerly, because it ignores new hooks."""
        self._states = read_states(self._device)
        with ExitStack() as hooks:
            self._hooks = hooks
            hooks.enter_context(torch.compiler.set_stance("force_eager"))
            for name, module in self._modules.items():
                before = module.register_forward_pre_hook(partial(self._before, name), with_kwargs=True)
                hooks.callback(before.remove)
                after = module.register_forward_hook(partial(self._after, name), always_call=True)
                hooks.callback(after.remove)
            yield

    def _before(self, name: str, module: Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        again = is_in_backward()
        self._turns[name, again] += 1
        turn = self._turns[name, again] - 1
        self._note_draws()
        caller = self._running[-1] if self._running else None
        self._running.append(name)
        inputs = {**dict(enumerate(args)), **kwargs}
        if not again:
            self._guard(f"a call of {name or 'the model'}", partial(self._enter, name, turn, caller, inputs))
        instead = {}
        for path, tensor in tensors_in(inputs):
            value = self._note(Seen(AGAIN_INPUT if again else INPUT, name, turn, path), tensor)
            if value is not None:
                instead[path] = _WithValue.apply(tensor, value)
                self._handed.append((instead[path], write_count(instead[path])))
        if not instead:
            return None
        inputs = _replace(inputs, instead)
        return tuple(inputs[index] for index in range(len(args))), {key: inputs[key] for key in kwargs}

    def _after(self, name: str, module: Module, args: Any, output: Any) -> None:
        again = is_in_backward()
        turn = self._turns[name, again] - 1
        self._note_draws()
        self._running.pop()
        if not self._running:
            written = any(write_count(value) != version for value, version in self._handed)
            self.problem = self.problem or (WRITTEN if written else "")
            self._handed.clear()
        for path, tensor in tensors_in(output):
            if not tensor.is_floating_point() and not tensor.is_complex():
                continue
            self._note(Seen(AGAIN_OUTPUT if again else OUTPUT, name, turn, path), tensor)
            # Torch may crash where a hook is set on a view from before a write to its base.
            if tensor.requires_grad and not self.problem and not is_written_view(tensor):
                handle = tensor.register_hook(partial(self._note, Seen(GRADIENT, name, turn, path)))
                self._hooks.callback(handle.remove)  # a module may return a parameter, which lives on

    def _note_draws(self) -> None:
        before, self._states = self._states, read_states(self._device)
        if self._running and changed_generators(before, self._states):
            self.draws[self._running[-1]] = None

    def _note(self, seen: Seen, tensor: Tensor) -> Tensor | None:
        # The backward computes the calls of one module again in an order of its own.
        if seen.stage in RECOMPUTED and self._turns[seen.module, False] > 1:
            return None
        what = f"{seen.stage} of {seen.module or 'the model'}"
        return self._guard(what, partial(self._watcher.see, seen, tensor))

    def _enter(self, name: str, turn: int, caller: str | None, inputs: Mapping[Any, Any]) -> None:
        arguments = {path: plain_value(value) for path, value in leaves_of(inputs)}
        self._watcher.enter(Entered(name, turn, caller, arguments))

    def _guard(self, what: str, tell: Callable[[], T]) -> T | None:
        if self.problem:
            return None
        try:
            with torch.no_grad():
                return tell()
        except Exception as error:
            self.problem = f"{what}: {type(error).__name__}: {first_line(error)}"
            return None


class _WithValue(torch.autograd.Function):  # type: ignore[misc]
    """Another value for a tensor, with the tensor's place in the graph: gradients pass as they are."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class RunningModule:
    """Know which module runs, by hooks for all modules; inside ``torch.compile`` it stays the one around it."""

    def __init__(self, model: Module) -> None:
        self._names = {id(module): name for name, module in named_modules(model)}
        self._running: list[str] = []
        self.is_learning = False
        """Whether gradients were enabled when the outermost one began to run."""

    @property
    def name(self) -> str:
        """The author's name of the innermost module of the model that runs; empty outside of all."""
        return self._running[-1] if self._running else ""

    @property
    def is_inside(self) -> bool:
        """Whether a module runs."""
        return bool(self._running)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Follow the modules that run in the block."""
        with ExitStack() as hooks:
            hooks.callback(register_module_forward_pre_hook(self._enter).remove)
            hooks.callback(register_module_forward_hook(self._leave, always_call=True).remove)
            yield

    def _enter(self, module: Module, _: Any) -> None:
        if not torch.compiler.is_compiling():
            self.is_learning = self.is_learning if self._running else torch.is_grad_enabled()
            self._running.append(self._names.get(id(module), self.name))

    def _leave(self, *_: Any) -> None:
        if self._running and not torch.compiler.is_compiling():
            self._running.pop()


def innermost_modules(model: Module) -> dict[str, Module]:
    """Return the modules that take hooks, by the author's names.

    Of a module and its wrappers, which share a name, it is the module itself.
    """
    return {name: module for name, module in named_modules(model) if takes_hooks(module)}


def tensors_in(value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in nested tuples, lists, mappings and dataclasses, each with its path."""
    return ((path, leaf) for path, leaf in leaves_of(value) if isinstance(leaf, Tensor))


def leaves_of(value: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield what nested tuples, lists, mappings and dataclasses contain, such as the outputs of transformers.

    What other objects contain is not looked at.
    """
    parts: Iterable[tuple[Any, Any]] | None = None
    if isinstance(value, Mapping):
        parts = value.items()
    elif isinstance(value, (tuple, list)):
        parts = enumerate(value)
    elif is_dataclass(value) and not isinstance(value, type):
        parts = ((field.name, getattr(value, field.name, None)) for field in fields(value))
    if parts is None or depth == DEEPEST:
        yield path, value
        return
    for key, part in parts:
        yield from leaves_of(part, f"{path}.{key}", depth + 1)


def plain_value(value: Any) -> object:
    """Return the number in an argument, or a text: that of a string, or of all else what it is.

    Nothing is known of containers at the greatest depth: they are NaN, which equals nothing.
    """
    if isinstance(value, Tensor):
        local = local_part(value)
        return f"a tensor of {value.ndim} dims" if value.ndim or local.is_meta else local.item()
    if value is None or type(value) in (bool, int, float, complex):
        return value
    if type(value) is str:
        return repr(value)
    if isinstance(value, (Mapping, tuple, list)) or (is_dataclass(value) and not isinstance(value, type)):
        return math.nan
    return f"an object of {type(value).__qualname__}"


def _replace(value: Any, instead: Mapping[str, Tensor], path: str = "") -> Any:
    """Return the value with other tensors at these paths, which are those of ``tensors_in``.

    Containers of other classes than Python's own stay as they are: how such an object is made is not known.
    """
    if path in instead:
        return instead[path]
    if type(value) is dict:
        return {key: _replace(part, instead, f"{path}.{key}") for key, part in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_replace(part, instead, f"{path}.{index}") for index, part in enumerate(value))
    return value


def describe_modules(model: Module) -> dict[str, ModuleFacts]:
    """Return the class of each module, and where its forward is defined."""
    modules = innermost_modules(model)
    kinds = {base for module in modules.values() for base in type(module).__mro__}
    used = frozenset[str]().union(*map(_attributes_used_by, kinds))
    return {name: _describe(module, used) for name, module in modules.items()}


def _describe(module: Module, used: Collection[str]) -> ModuleFacts:
    kind = type(module)
    while issubclass(kind, FSDPModule) and len(kind.__bases__) > 1:
        kind = kind.__bases__[-1]  # fully_shard() changes the class of a module to one made of both
    forward = inspect.unwrap(vars(module).get("forward", kind.forward))
    code = getattr(getattr(forward, "__func__", forward), "__code__", None)
    file, line = ("", 0) if code is None else (shorten_path(code.co_filename), code.co_firstlineno)
    weight, splits = module.weight if isinstance(module, Linear) else None, False
    if isinstance(weight, DTensor):
        placed = zip(mesh_facts(weight).dims, weight.placements, strict=True)
        # A fused weight has another kind of placement: its slices lie elsewhere.
        splits = any(type(place) is Shard and place.dim == 0 and splits_model(dim) for dim, place in placed)
    return ModuleFacts(kind.__name__, file, line, settings=_settings(module, used), splits_output=splits)


def _settings(module: Module, used: Collection[str]) -> dict[str, str]:
    plain = (bool, int, float, str, type(None))
    kept = _written_by_forward(type(module).forward) | {"training", *HARMLESS}
    return {
        name: repr(value)
        for name, value in vars(module).items()
        if type(value) in plain and not name.startswith("_") and name not in kept
        if name in used or name in READ_BY_FUNCTIONS
    }


@cache
def _attributes_used_by(kind: type) -> frozenset[str]:
    """Return the names by which a class may read attributes; what is only written, as for a log, configures nothing."""
    if kind in (Module, object):
        return frozenset()
    functions = [
        getattr(own, "fget", own) for name, own in vars(kind).items() if name not in ("__init__", "extra_repr")
    ]
    codes = [code for own in functions if callable(own) for code in codes_of(own)]
    read = (one.argval for code in codes for one in dis.get_instructions(code) if one.opname.startswith("LOAD_ATTR"))
    return frozenset((*read, *(text for code in codes for text in code.co_consts if isinstance(text, str))))


@cache
def _written_by_forward(forward: Callable[..., Any]) -> frozenset[str]:
    codes = codes_of(forward)
    return frozenset(i.argval for code in codes for i in dis.get_instructions(code) if i.opname == "STORE_ATTR")


def codes_of(function: Any) -> list[CodeType]:
    """Return the code of a function and of all functions that are written in it; none if it is not Python's."""
    found, new = [], [getattr(inspect.unwrap(function), "__code__", None)]
    while new:
        if isinstance(code := new.pop(), CodeType):
            found.append(code)
            new += code.co_consts
    return found
