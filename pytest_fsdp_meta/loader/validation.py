"""Check the values of Subject's fields, with errors that name the field and a correct value."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from pytest_fsdp_meta.worlds import Misuse


class SubjectError(Misuse):
    """A field of Subject has a wrong value. The message names the field, the problem and a correct value."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"Subject({field}=...): {problem}")


def require_module(model: object) -> None:
    from torch.nn import Module

    if isinstance(model, Module):
        return
    raise SubjectError("model", f"{shorten(model)} is not a torch.nn.Module; return the loaded model itself")


def require_source(field: str, value: object) -> None:
    if value is None:
        return
    from torch.nn import Module

    if isinstance(value, Module):
        raise SubjectError(
            field, f"pass a function that builds the model, not the model: {field}=lambda: build_the_model()"
        )
    if isinstance(value, (str, os.PathLike)):
        folder = Path(value)
        if not folder.is_dir() or not any(folder.glob("*.safetensors")):
            raise SubjectError(field, f"{os.fspath(value)!r} is not a directory that holds *.safetensors files")
    elif not callable(value):
        raise SubjectError(
            field, f"{shorten(value)} should be a callable that builds the model, or a checkpoint directory"
        )


def require_optimizer(value: object) -> None:
    if value is None or callable(value) or is_zero3_optimizer(value):
        return
    from torch.optim import Optimizer

    if not isinstance(value, Optimizer):
        if type(value).__name__ == "DeepSpeedZeroOptimizer":
            raise SubjectError("optimizer", "is of ZeRO stage 1 or 2, which is not supported; stage 3 and FSDP are")
        inner = getattr(value, "optimizer", None)
        hint = "; give its .optimizer if that steps the model's own parameters" * isinstance(inner, Optimizer)
        raise SubjectError("optimizer", f"{shorten(value)} should be optimizer(parameters), or an Optimizer{hint}")


def is_zero3_optimizer(value: object) -> bool:
    """Return whether the value is the optimizer of DeepSpeed's ZeRO-3, which is no torch optimizer."""
    return any(kind.__name__ == "DeepSpeedZeroOptimizer_Stage3" for kind in type(value).__mro__)


BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
"""The kinds of parameters that can be passed by name."""


def is_stateful(value: object) -> bool:
    """Return whether the value is an object, and not a class, with ``state_dict()`` and ``load_state_dict()``."""
    methods = (getattr(value, name, None) for name in ("state_dict", "load_state_dict"))
    return not isinstance(value, type) and all(map(callable, methods))


def takes(function: object, name: str, any_keyword: bool = False) -> bool:
    """Return whether the function has a parameter of this name; or ``**kwargs``, if ``any_keyword``."""
    try:
        parameters = inspect.signature(function).parameters  # type: ignore[arg-type]
    except (TypeError, ValueError):  # not a function, or not one that is written in Python
        return False
    keyword = name in parameters and parameters[name].kind in BY_NAME
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return keyword or (any_keyword and open_ended)


def require_scheduler(value: object) -> None:
    steps = is_stateful(value) and callable(getattr(value, "step", None))
    if value is not None and not steps and not callable(value):
        raise SubjectError(
            "scheduler", f"{shorten(value)} should be scheduler(optimizer), or a scheduler with step() and state_dict()"
        )


def require_own_optimizer(scheduler: object, optimizer: object) -> None:
    """Raise SubjectError if the loader built the scheduler and leaves its optimizer to the plugin."""
    if is_stateful(scheduler) and not is_stateful(optimizer):
        raise SubjectError(
            "scheduler",
            "the loader built it, so optimizer= has to be the optimizer that it belongs to; or give a function: "
            "scheduler(optimizer)",
        )


def require_beside(value: object) -> None:
    if not isinstance(value, Mapping):
        raise SubjectError("beside", f"{shorten(value)} should be a mapping such as {{'ema': ema}}")
    for name, kept in value.items():
        if not isinstance(name, str) or not name or "." in name or name == "scheduler":
            raise SubjectError(
                "beside",
                f"the key {shorten(name)} should be a name such as 'ema', without dots, and not that of scheduler=",
            )
        if not is_stateful(kept) and not callable(kept):
            raise SubjectError(
                "beside",
                f"{name!r} is {shorten(kept)}, but should be an object with state_dict() and load_state_dict(), or a "
                "function of the model that returns one",
            )


def require_handed_over(field: str, function: object, made_here: Mapping[str, object]) -> None:
    """Raise SubjectError if ``save`` or ``resume`` does not take what is built for it: it could not reach that."""
    for name, value in made_here.items():
        built = value is None or is_stateful(value)
        if isinstance(value, Mapping):
            built = all(map(is_stateful, value.values()))
        if function is not None and not built and not takes(function, name, any_keyword=True):
            raise SubjectError(
                field, f"{name} is built by a function, so {field}() has to take it: {field}(..., folder, {name})"
            )


def yields_batches(value: object) -> bool:
    """Return whether iterating over the value may yield batches; text, a mapping or a tensor is one batch at most."""
    from torch import Tensor

    iterable = hasattr(type(value), "__iter__") or hasattr(type(value), "__getitem__")
    return iterable and not isinstance(value, (str, bytes, Mapping, Tensor))


def require_data(value: object) -> None:
    """Raise SubjectError unless the value is a function, or something whose iteration may yield batches."""
    if value is None or callable(value):
        return
    if not yields_batches(value):
        raise SubjectError(
            "data", f"{shorten(value)} should be data(), which returns a loader of batches, or the loader itself"
        )


def require_choice(field: str, value: object, choices: Sequence[str]) -> None:
    if value not in choices:
        raise SubjectError(field, f"invalid value {value!r} (choose {', '.join(choices[:-1])} or {choices[-1]})")


def require_bound(field: str, value: object) -> None:
    try:
        number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else 0.0
    except OverflowError:
        number = math.inf
    if value is not None and not 0 < number < math.inf:
        raise SubjectError(field, f"{shorten(value)} should be a positive number, the norm to which training clips")


def require_slice(value: object) -> None:
    if value is None:
        return
    valid = isinstance(value, tuple) and len(value) == 2 and all(map(_is_integer, value))
    if not valid or not 0 <= value[0] < value[1]:  # type: ignore[index]
        raise SubjectError("data_parallel", f"{value!r} should be (index, size) with 0 <= index < size")


def as_mapping(field: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping) and value != ():
        raise SubjectError(
            field, f"{shorten(value)} should be a mapping of patterns to placements: {{'*.weight': 'S(0)'}}"
        )
    return dict(value)


def require_names(field: str, value: Any, mapping: bool = False) -> None:
    listed = [value] if isinstance(value, str) else value
    if not (isinstance(listed, (list, tuple, set, frozenset)) or (mapping and isinstance(listed, Mapping))):
        raise SubjectError(field, f"{shorten(value)} should be a name, a pattern, or a list of them")
    texts = [*listed, *(listed.values() if isinstance(listed, Mapping) else ())]
    for text in texts:
        if not isinstance(text, str) or not text:
            raise SubjectError(field, f"{text!r} should be a name or a pattern such as 'layers.*.weight'")


def require_attributes(value: Any) -> None:
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, (list, tuple, set, frozenset)):
        raise SubjectError("kept_attributes", f"{shorten(value)} should be a name, or a list of them")
    from torch.nn import Parameter

    for name in listed:
        if not isinstance(name, str) or not name:
            raise SubjectError("kept_attributes", f"{name!r} should be the name of an attribute")
        if hasattr(Parameter, name):
            raise SubjectError(
                "kept_attributes", f"every parameter has {name!r}; give custom attributes, such as '_fsdp_no_shard'"
            )


def _is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)  # Integral includes numpy's integers


def require_ranks(field: str, value: object) -> None:
    listed = () if isinstance(value, bool) else value
    valid = isinstance(listed, (list, tuple, set, frozenset, range))
    if not valid or not all(_is_integer(rank) and rank >= 0 for rank in listed):  # type: ignore[attr-defined]
        raise SubjectError(field, f"{value!r} should be True, or the ranks that may hold the whole model, such as (0,)")


def require_groups(value: object) -> None:
    for group in value if isinstance(value, (list, tuple)) else [value]:
        if isinstance(group, str) or not isinstance(group, (list, tuple)) or len(group) < 2:
            raise SubjectError("tied", f"{group!r} should be a group of two or more names: tied=[('a', 'b')]")
        require_names("tied", group)
        if len(set(group)) < len(group):
            twice = next(name for name in group if list(group).count(name) > 1)
            raise SubjectError("tied", f"{group!r} has {twice!r} twice; the names of a group must differ")


def shorten(value: object) -> str:
    return "None" if value is None else f"{type(value).__name__} {str(value)[:60]!r}"
