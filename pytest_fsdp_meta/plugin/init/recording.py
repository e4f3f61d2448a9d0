"""Arguments for a loader that is called to see what it does with them: what it reads becomes a tree of parts."""

from __future__ import annotations

import dataclasses
import inspect
import sys
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from pytest_fsdp_meta.plugin.init.layout import literal
from pytest_fsdp_meta.plugin.init.values import SIZES, VARIABLES, annotation_text, expression_for, role_of

EMPTY = inspect.Parameter.empty
NO_CONFIGS = {"builtins", "types", "typing", "argparse", "inspect", "omegaconf", "ml_collections", "collections"}
"""Packages whose classes take no fields as arguments."""


@dataclass
class Part:
    """An argument, or what the loader reads of one: an attribute (``cfg.size``) or an item (``cfg["size"]``)."""

    name: str
    path: str
    is_argument: bool = False
    is_positional: bool = False
    is_other: bool = False
    """Whether it is a mesh or a group of another dimension than the one over which FSDP shards."""
    parts: dict[str, Part] = field(default_factory=dict)
    is_attribute: bool = False
    annotation: Any = EMPTY
    default: Any = EMPTY
    kind: Any = None
    """The class that takes the parts as arguments; (module, name) once it was sent."""
    reader: str = ""
    """What reads it, and where: "to_llama (loading.py:23)"."""
    role: str = ""
    expression: str = ""
    """The value that the test passes, as Python; empty where none is known yet."""
    is_kept: bool = False
    """Whether the loader or its class has a default, which stays."""
    is_fitted: bool = False
    """Whether the value is that of a tiny transformers config."""

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what another process may not be able to import."""
        kind = self.kind if not inspect.isclass(self.kind) else (self.kind.__module__, self.kind.__name__)
        default = self.default if self.default in (EMPTY, None) else ...
        return {**vars(self), "annotation": annotation_text(self.annotation), "default": default, "kind": kind}

    @property
    def attributes(self) -> bool:
        """Whether the parts that it needs are attributes."""
        return any(part.is_attribute and not part.is_kept for part in self.parts.values())

    def walk(self) -> Iterator[Part]:
        yield self
        for part in self.parts.values():
            yield from part.walk()

    def add(self, name: str, *, attribute: bool, annotation: Any = EMPTY, default: Any = EMPTY) -> Part:
        """Return the part of this name, with a value if its name, annotation and default suffice to choose one."""
        if name not in self.parts:
            path = f"{self.path}.{name}" if attribute else f'{self.path}["{name}"]'
            part = Part(name, path, is_attribute=attribute, annotation=annotation, default=default)
            self.parts[name] = part
            part.settle()
        return self.parts[name]

    def settle(self) -> None:
        """Choose a value or a class, where name, annotation and default suffice."""
        role = role_of(self.name, self.annotation)
        nested = [one for one in (self.annotation, *typing.get_args(self.annotation)) if _has_fields(one)]
        if role == "config" and self.is_argument and _is_config_class(self.annotation):
            nested = [self.annotation]
        if nested and role not in VARIABLES:
            self._add_fields(nested[0])
        else:
            self.role, self.expression, self.is_kept = expression_for(
                self.name, self.annotation, self.default, is_argument=self.is_argument
            )

    def _add_fields(self, kind: Any) -> None:
        self.kind = kind
        hints = hints_of(kind) or hints_of(kind.__init__)
        made = {one.name: one for one in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else {}
        for name, one in signature_of(kind).items():
            factory = made[name].default_factory if name in made else None
            annotation = factory if inspect.isclass(factory) else hints.get(name, one.annotation)
            self.add(name, attribute=True, annotation=annotation, default=one.default)
        all_kept = all(part.is_kept for part in self.parts.values())
        self.is_kept = self.default is None or (self.default is not EMPTY and all_kept)


def _is_config_class(kind: Any) -> bool:
    """Return whether a config of this class is made by passing its fields."""
    known = inspect.isclass(kind) and kind.__module__.partition(".")[0] not in NO_CONFIGS
    return known and not typing.is_typeddict(kind) and kind is not EMPTY


def _has_fields(kind: Any) -> bool:
    names = ("__dataclass_fields__", "model_fields", "__attrs_attrs__")  # dataclasses, pydantic, attrs
    return inspect.isclass(kind) and any(hasattr(kind, name) for name in names)


def hints_of(kind: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(kind)
    except Exception:  # a name that only type checkers import
        return {}


def signature_of(target: Any) -> dict[str, inspect.Parameter]:
    """Return the parameters that can be passed by name."""
    try:
        parameters = inspect.signature(target).parameters
    except (TypeError, ValueError):
        return {}
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {name: one for name, one in parameters.items() if one.kind in named}


class Missing(AttributeError, KeyError):
    """The part is missing; a loader that has a default for it catches this."""

    def __init__(self, part: Part) -> None:
        super().__init__(part.path)
        self.part = part


class Number(int):
    """An integer that knows which part it is, so that the model's sizes can be written as parts of the config."""

    part: Part | None

    def __new__(cls, value: int, part: Part | None = None) -> Number:
        made = super().__new__(cls, value)
        made.part = part
        return made

    def __deepcopy__(self, memo: object) -> Number:
        return self


@dataclass
class Attempt:
    """One call of the loader: the values that exist in it, and what was passed."""

    names: dict[str, Any]
    made: dict[int, Part] = field(default_factory=dict)
    """Which part an object of a config class is, by its id."""
    unpacked: Part | None = None
    """What was passed on as ``**`` last."""
    is_changed: bool = False
    """Whether a use was seen that gives a part its value in the next attempt."""

    def value_of(self, part: Part) -> Any:
        if part.expression:
            value = eval(part.expression, dict(self.names))
            return Number(value, part) if type(value) is int else value
        if part.kind is not None:
            given = {}
            for name, below in part.parts.items():
                if not below.is_kept:
                    given[name] = self.value_of(below)
                elif type(below.default) is int:
                    given[name] = Number(below.default, below)
            value = part.kind(**given)
            self.made[id(value)] = part
            return value
        return Recorder(part, self)

    def settle(self, part: Part, expression: str) -> Any:
        part.expression, self.is_changed = expression, True
        return eval(expression, dict(self.names))


class Recorder:
    """A value of unknown type: it notes what is read of it, and its first use decides what it is.

    A part is missing when it is read first; only if the loader fails because of that, the next attempt has it.
    """

    __slots__ = ("_attempt", "_part")

    def __init__(self, part: Part, attempt: Attempt) -> None:
        object.__setattr__(self, "_part", part)
        object.__setattr__(self, "_attempt", attempt)

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        return Recorder(self._part, self._attempt)  # for vars()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._read(name, attribute=True)

    def __getitem__(self, name: Any) -> Any:
        if not isinstance(name, str):
            raise KeyError(name)
        return self._read(name, attribute=False)

    def _read(self, name: str, *, attribute: bool) -> Any:
        whole: Part = self._part
        is_new = name not in whole.parts
        part = whole.add(name, attribute=attribute)
        if is_new:
            part.reader = _place(sys._getframe(2))
            part.is_kept = not part.expression and not SIZES.keys() & set(name.lower().split("_"))
        if part.is_kept:
            raise Missing(part)
        return self._attempt.value_of(part)

    def get(self, name: str, default: Any = None) -> Any:
        if name not in self._part.parts:
            self._part.add(name, attribute=False, default=default).reader = _place(sys._getframe(1))
        part = self._part.parts[name]
        if part.expression or part.parts:
            return self._attempt.value_of(part)
        return Number(default, part) if type(default) is int else default

    def __contains__(self, name: str) -> bool:
        try:
            self[name]
        except Missing:
            return False
        return True

    def keys(self) -> list[str]:
        self._attempt.unpacked = self._part
        return [name for name, part in self._part.parts.items() if not part.is_kept]

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def items(self) -> list[tuple[str, Any]]:
        return [(name, self[name]) for name in self.keys()]

    def __bool__(self) -> bool:
        if self._part.parts:
            return True
        self._attempt.settle(self._part, "False")
        return False

    def __eq__(self, other: object) -> bool:
        if isinstance(other, (str, int, float)):
            self._attempt.settle(self._part, literal(other))
        return True

    def __hash__(self) -> int:
        """Take the first key of a table in the function that looks this up: the use as a key shows nothing else."""
        frame = sys._getframe(1)
        for name in frame.f_code.co_names + frame.f_code.co_varnames:
            table = {**frame.f_globals, **frame.f_locals}.get(name)
            if isinstance(table, dict) and table and all(isinstance(key, str) for key in table):
                return hash(self._attempt.settle(self._part, literal(next(iter(table)))))
        return id(self)

    def __fspath__(self) -> str:
        return str(self._attempt.settle(self._part, "checkpoint" if self._part.is_argument else "str(folder)"))

    def __truediv__(self, other: Any) -> Any:
        if isinstance(other, str):
            folder: Path = self._attempt.settle(self._part, "checkpoint" if self._part.is_argument else "folder")
            return folder / other
        return self._number() / other

    def _number(self) -> int:
        return int(self._attempt.settle(self._part, number_for(self._part.name)))

    __index__ = __int__ = _number

    def __float__(self) -> float:
        return float(self._number())


def part_of(value: Any) -> Part | None:
    """Return which part a recorder or a number stands for."""
    found: Part | None = value._part if isinstance(value, Recorder) else getattr(value, "part", None)
    return found if isinstance(value, (Recorder, Number)) else None


def number_for(name: str) -> str:
    """Return a small number for something of this name that is used as a number."""
    return expression_for(name, int, EMPTY, is_argument=True)[1] or "4"


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"


def _calculate(name: str) -> Callable[..., Any]:
    def calculate(self: Recorder, *others: Any) -> Any:
        plain = [other._number() if isinstance(other, Recorder) else other for other in others]
        return getattr(self._number(), name)(*plain)

    return calculate


for _name in ("add", "sub", "mul", "floordiv", "mod", "pow"):
    for _side in ("", "r"):
        setattr(Recorder, f"__{_side}{_name}__", _calculate(f"__{_side}{_name}__"))
for _name in ("rtruediv", "lt", "le", "gt", "ge", "neg"):
    setattr(Recorder, f"__{_name}__", _calculate(f"__{_name}__"))
