"""What the fields of Subject may be: a table of rules, whose messages name the field and a correct value."""

from __future__ import annotations

import inspect
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral, Real
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeAlias

from pytest_fsdp_meta.text import first_of
from pytest_fsdp_meta.worlds import Misuse

LOSS_OVER_RANKS = ("mean", "sum", "same")
"""The values of ``Subject.loss_over_ranks``."""
SIGNATURES = {
    "batch": "batch(step) -> dict of tensors",
    "loss": "loss(model, batch) -> scalar",
    "train_step": "train_step(model, optimizer, batch) -> loss",
    "data": "data() -> iterable of batches",
    "clip_grad_norm": "clip_grad_norm(parameters, max_norm) -> norm",
    "adapter": "adapter(name, tensor) -> Part or None",
    "save": "save(model, optimizer, folder)",
    "resume": "resume(model, optimizer, folder)",
    "state_dict": "state_dict(model) -> dict by name",
}
"""How the fields that are functions are called, as error messages show it."""
BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
"""The kinds of parameters that can be passed by name."""
PLACEMENT = re.compile(
    r"(?:(?P<replicate>R|Replicate\(\))|(?:S|Shard)\((?:dim=)?(?P<dim>\d+)\)"
    r"|(?:_S|_StridedShard)\((?:dim=)?(?P<strided>\d+),\s*(?:sf=|split_factor=)?(?P<factor>\d+)\))\s*(?:,\s*|$)"
)


class SubjectError(Misuse):
    """A field of Subject has a wrong value. The message names the field, the problem and a correct value."""

    def __init__(self, field: str, problem: str, tensors: Sequence[str] = ()) -> None:
        self.field = field
        self.tensors = tuple(tensors)
        super().__init__(f"Subject({field}=...): {problem}")


def is_zero3_optimizer(value: object) -> bool:
    """Return whether the value is the optimizer of DeepSpeed's ZeRO-3, which is no torch optimizer."""
    return any(kind.__name__ == "DeepSpeedZeroOptimizer_Stage3" for kind in type(value).__mro__)


def is_stateful(value: object) -> bool:
    """Return whether the value is an object, and not a class, with ``state_dict()`` and ``load_state_dict()``.

    accelerate's loaders have both methods, which raise unless they use torchdata's loader with a state.
    """
    methods = (getattr(value, name, None) for name in ("state_dict", "load_state_dict"))
    unused = getattr(value, "use_stateful_dataloader", True) is False
    return not isinstance(value, type) and not unused and all(map(callable, methods))


def takes(function: object, name: str, any_keyword: bool = False) -> bool:
    """Return whether the function has a parameter of this name; or ``**kwargs``, if ``any_keyword``."""
    try:
        parameters = inspect.signature(function).parameters  # type: ignore[arg-type]
    except (TypeError, ValueError):  # not a function, or not one that is written in Python
        return False
    keyword = name in parameters and parameters[name].kind in BY_NAME
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return keyword or (any_keyword and open_ended)


def yields_batches(value: object) -> bool:
    """Return whether iterating over the value may yield batches; text, a mapping or a tensor is one batch at most."""
    from torch import Tensor

    iterable = hasattr(type(value), "__iter__") or hasattr(type(value), "__getitem__")
    return iterable and not isinstance(value, (str, bytes, Mapping, Tensor))


def shorten(value: object) -> str:
    """Describe a value by its type and what fits on a line: the shape of a tensor, not its elements."""
    kind = type(value).__name__
    if _has_shape(value):
        return f"{kind} of shape {tuple(value.shape)}"  # type: ignore[attr-defined]
    if isinstance(value, Mapping) and any(map(_has_shape, value.values())):
        parts = [f"{key!r} ({shorten(part)})" if _has_shape(part) else repr(key) for key, part in value.items()]
        return f"{kind} of {first_of(parts, 2)}"
    if isinstance(value, (list, tuple)) and any(map(_has_shape, value)):
        return f"{kind} of {first_of([shorten(part) for part in value], 2)}"
    text = str(value)[:60]
    return "None" if value is None else f"{kind} {text if isinstance(value, (int, float)) else repr(text)}"


def _has_shape(value: object) -> bool:
    return isinstance(getattr(value, "shape", None), tuple)


def _torch(name: str) -> Any:
    import torch  # not at the top: importing the plugin imports no torch

    return attrgetter(name)(torch)


def _is_path(value: object) -> bool:
    return isinstance(value, (str, os.PathLike))


def _path(value: Any) -> list[str]:
    return [os.fspath(value)] if _is_path(value) else []


def _is_callable(value: object) -> bool:
    return value is None or callable(value)


def _is_optimizer(value: object) -> bool:
    return _is_callable(value) or is_zero3_optimizer(value) or isinstance(value, _torch("optim.Optimizer"))


def _is_bound(value: object) -> bool:
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and 0 < float(value) < math.inf
    except OverflowError:
        return False


def _are_ranks(value: Any) -> bool:
    # Integral includes numpy's integers.
    return all(isinstance(rank, Integral) and not isinstance(rank, bool) and int(rank) >= 0 for rank in value)


def _is_name(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _are_rows(value: object) -> bool:
    ends = (value.start, value.stop) if isinstance(value, slice) and value.step is None else (0.5,)
    return all(end is None or isinstance(end, int) for end in ends)


def _is_list(value: object) -> bool:
    return isinstance(value, (str, list, tuple, set, frozenset))


def _names(value: Any) -> list[Any]:
    return [value] if isinstance(value, str) else [*value]


def _values(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, Mapping) else ()


def _whole(value: object) -> tuple[object]:
    return (value,)


SOURCES, PATTERNS = "reference verifier export_reference", "on_some_ranks unsharded offloaded"
NAME = "{shown} should be a name or a pattern such as 'layers.*.weight'"
LISTED = "{value} should be a name, a pattern, or a list of them"
Rule: TypeAlias = tuple[str, Callable[[Any], Iterable[Any]], Callable[[Any], object], str]
"""Fields, the parts of a value, what holds for each of them, and the problem of a part for which it does not.

The problem may contain the ``field``, the ``part``, and its type and short text as ``value``. A rule may rely on the
rules before it.
"""
RULES: tuple[Rule, ...] = (
    (
        "model",
        _whole,
        lambda one: isinstance(one, _torch("nn.Module")),
        "{value} is not a torch.nn.Module; return the loaded model itself",
    ),
    (
        SOURCES,
        _whole,
        lambda one: not isinstance(one, _torch("nn.Module")),
        "pass a function that builds the model, not the model: {field}=lambda: build_the_model()",
    ),
    *(
        (SOURCES, _path, holds, problem)
        for holds, problem in (
            (os.path.exists, "{shown} does not exist; give a directory that holds *.safetensors files"),
            (os.path.isdir, "{shown} is a file; give a directory that holds *.safetensors files"),
            (lambda p: any(Path(p).glob("*.safetensors")), "{shown} is not a directory that holds *.safetensors files"),
        )
    ),
    (
        SOURCES,
        _whole,
        lambda one: _is_callable(one) or _is_path(one),
        "{value} should be a callable that builds the model, or a checkpoint directory",
    ),
    *(
        (name, _whole, _is_callable, f"{{value}} is not callable; give a function {call}")
        for name, call in SIGNATURES.items()
        if name != "data"
    ),
    (
        "optimizer",
        _whole,
        lambda one: type(one).__name__ != "DeepSpeedZeroOptimizer",
        "is of ZeRO stage 1 or 2, which is not supported; stage 3 and FSDP are",
    ),
    (
        "optimizer",
        _whole,
        lambda one: _is_optimizer(one) or not isinstance(getattr(one, "optimizer", None), _torch("optim.Optimizer")),
        "{value} should be a function optimizer(parameters), or an Optimizer; give its .optimizer if that steps the "
        "model's own parameters",
    ),
    ("optimizer", _whole, _is_optimizer, "{value} should be a function optimizer(parameters), or an Optimizer"),
    (
        "scheduler",
        _whole,
        lambda one: _is_callable(one) or (is_stateful(one) and callable(getattr(one, "step", None))),
        "{value} should be a function scheduler(optimizer), or a scheduler with step() and state_dict()",
    ),
    ("beside", _whole, lambda one: isinstance(one, Mapping), "{value} should be a mapping such as {{'ema': ema}}"),
    (
        "beside",
        list,
        lambda name: _is_name(name) and "." not in name and name != "scheduler",
        "the key {value} should be a name such as 'ema', without dots, and not that of scheduler=",
    ),
    (
        "beside",
        lambda one: [
            (name, shorten(kept)) for name, kept in one.items() if not is_stateful(kept) and not callable(kept)
        ],
        lambda wrong: False,
        "{part[0]!r} is {part[1]}, but should be an object with state_dict() and load_state_dict(), or a function of "
        "the model that returns one",
    ),
    (
        "data",
        _whole,
        lambda one: _is_callable(one) or yields_batches(one),
        "{value} should be a function data(), which returns a loader of batches, or the loader itself",
    ),
    (
        "data_parallel",
        _whole,
        lambda one: one is None or (isinstance(one, tuple) and len(one) == 2 and _are_ranks(one) and one[0] < one[1]),
        "{shown} should be (index, size) with 0 <= index < size",
    ),
    (
        "max_grad_norm",
        _whole,
        lambda one: one is None or _is_bound(one),
        "{value} should be a positive number, the norm to which training clips",
    ),
    ("loss_over_ranks", _whole, lambda one: one in LOSS_OVER_RANKS, "invalid value {shown} (choose mean, sum or same)"),
    ("frozen drawn", _whole, lambda one: _is_list(one) or isinstance(one, Mapping), LISTED),
    (PATTERNS, _whole, _is_list, LISTED),
    (f"frozen drawn {PATTERNS}", _names, _is_name, NAME),
    ("frozen", _values, _is_name, NAME),
    (
        "drawn",
        _values,
        _are_rows,
        "{value} should be the slice of the rows that are drawn, without a step, such as slice(56, None)",
    ),
    ("kept_attributes", _whole, _is_list, "{value} should be a name, or a list of them"),
    ("kept_attributes", _names, _is_name, "{shown} should be the name of an attribute"),
    (
        "kept_attributes",
        _names,
        lambda name: not hasattr(_torch("nn.Parameter"), name),
        "every parameter has {shown}; give custom attributes, such as '_fsdp_no_shard'",
    ),
    (
        "tied",
        lambda one: one if isinstance(one, (list, tuple)) else [one],
        lambda group: isinstance(group, (list, tuple)) and len(group) > 1,
        "{shown} should be a group of two or more names: tied=[('a', 'b')]",
    ),
    ("tied", lambda groups: [name for group in groups for name in group], _is_name, NAME),
    (
        "tied",
        lambda groups: [(group, name) for group in groups for name in group],
        lambda pair: pair[0].count(pair[1]) == 1,
        "{part[0]!r} has {part[1]!r} twice; the names of a group must differ",
    ),
    (
        "whole_while_loading",
        _whole,
        lambda one: (
            isinstance(one, bool) or (isinstance(one, (list, tuple, set, frozenset, range)) and _are_ranks(one))
        ),
        "{shown} should be True, or the ranks that may hold the whole model, such as (0,)",
    ),
    (
        "placements",
        _whole,
        lambda one: isinstance(one, Mapping) or one == (),
        "{value} should be a mapping of patterns to placements: {{'*.weight': 'S(0)'}}",
    ),
    ("placements", list, _is_name, NAME),
)


def check_fields(subject: Any) -> None:
    """Raise SubjectError for the first field that breaks a rule, or that does not go with another one."""
    for fields, parts, holds, problem in RULES:
        for field in fields.split():
            for part in parts(getattr(subject, field)):
                if not holds(part):
                    shown = shorten(part) if _has_shape(part) else repr(part)
                    message = problem.format(field=field, part=part, shown=shown, value=shorten(part))
                    raise SubjectError(field, message)
    for name, other in (("save", "resume"), ("resume", "save")):
        if getattr(subject, name) is not None and getattr(subject, other) is None:
            raise SubjectError(name, f"set without {other}; set both or neither")
    if is_stateful(subject.scheduler) and not is_stateful(subject.optimizer):
        raise SubjectError(
            "scheduler",
            "the loader built it, so optimizer= has to be the optimizer that it belongs to; or give a function: "
            "scheduler(optimizer)",
        )
    if subject.max_grad_norm is not None and subject.train_step is None:
        raise SubjectError("max_grad_norm", "set without train_step, which clips; without it nothing is clipped")
    built = {
        "scheduler": subject.scheduler is None or is_stateful(subject.scheduler),
        "beside": all(map(is_stateful, subject.beside.values())),
    }
    for field, name in ((field, name) for field in ("save", "resume") for name in built if not built[name]):
        function = getattr(subject, field)
        if function is not None and not takes(function, name, any_keyword=True):
            raise SubjectError(
                field, f"{name} is built by a function, so {field}() has to take it: {field}(..., folder, {name})"
            )


def short_placement(placement: object) -> str:
    """Return the short form of a placement: ``S(0)``, ``R``, ``P(sum)``, or ``_S(0, 2)`` for a strided shard."""
    dim = getattr(placement, "dim", None)
    if dim is not None:
        factor = getattr(placement, "split_factor", None)
        return f"S({dim})" if factor is None else f"_S({dim}, {factor})"
    kind = type(placement).__name__
    if kind == "Partial":
        return f"P({getattr(placement, 'reduce_op', 'sum')})"
    return "R" if kind == "Replicate" else str(placement)


def parse_placements(declared: Any) -> tuple[str, ...]:
    """Return declared placements in their short form, one for each mesh dimension.

    Raises SubjectError for anything that is not a placement of a parameter.
    """
    if isinstance(declared, str):
        found, position = [], 0
        while match := PLACEMENT.match(declared, position):
            if match["replicate"]:
                found.append("R")
            else:
                found.append(f"S({match['dim']})" if match["dim"] else f"_S({match['strided']}, {match['factor']})")
            position = match.end()
            if position == len(declared):
                return tuple(found)
        raise SubjectError(
            "placements", f"{declared!r} is not a placement; write 'S(0)', 'R' or, on two mesh dimensions, 'R, S(0)'"
        )
    if isinstance(declared, Sequence) and declared:
        return tuple(part for placement in declared for part in parse_placements(placement))
    short = short_placement(declared)
    if not PLACEMENT.fullmatch(short):
        raise SubjectError("placements", f"{declared!r} is not a placement; write 'S(0)' or use Shard(0), Replicate()")
    return (short,)
