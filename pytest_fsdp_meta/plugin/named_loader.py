"""A loader given by name (``--fsdp-loader``): imported by that name, and called with ``fsdp`` and ``checkpoint``.

Ranks import this module, so nothing here imports pytest.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import traceback
import warnings
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

from pytest_fsdp_meta.loader.subject import Subject
from pytest_fsdp_meta.text import did_you_mean
from pytest_fsdp_meta.worlds import Rank

GIVEN = ("fsdp", "checkpoint")
"""The arguments of a loader: passed by these names, or in this order."""
MICRO_BATCHES = 2
"""Equal parts into which each rank cuts its rows of a batch."""


class Unfit(ValueError):
    """There is no such loader, or it cannot be called with ``fsdp`` and ``checkpoint``; the message is one line."""


class NamedLoader:
    """Calls the loader ``MODULE:NAME`` on a rank, and derives a Subject from the checkpoint for a bare model.

    Pickled by name: each rank imports the loader itself.
    """

    def __init__(self, name: str, checkpoint: Path) -> None:
        self.name = name
        self.checkpoint = checkpoint

    def __call__(self, fsdp: Rank) -> Any:
        function = import_loader(self.name)[1]
        returned = function(*(bound := bind(function, fsdp, self.checkpoint)).args, **bound.kwargs)
        from torch.nn import Module

        return derive_subject(returned, self.checkpoint, fsdp.world_size) if isinstance(returned, Module) else returned

    def __reduce__(self) -> tuple[type[NamedLoader], tuple[str, Path]]:
        return type(self), (self.name, self.checkpoint)


def derive_subject(model: Any, checkpoint: Path, size: int) -> Subject:
    """Return the model with the reference, and the batches for a world of ``size``, that its checkpoint gives."""
    if (kind := model_type(checkpoint)) and importlib.util.find_spec("transformers") is not None:
        from transformers import CONFIG_MAPPING

        from pytest_fsdp_meta.transformers import subject

        if kind in CONFIG_MAPPING:  # else the checkpoint has custom code, which only its loader can run
            return subject(model, checkpoint, rows=rows_for(size))
    if any(checkpoint.glob("*.safetensors")):
        return Subject(model, reference=checkpoint)
    message = (
        f"--fsdp-checkpoint={checkpoint} has neither *.safetensors nor a config.json of a model that transformers "
        "knows, so no values are checked; pass the folder that has them, or return Subject(model, reference=...)"
    )
    warnings.warn(message, stacklevel=2)
    return Subject(model)


def model_type(checkpoint: Path) -> str:
    """Return the ``model_type`` in the checkpoint's config.json; empty if it is not a transformers checkpoint."""
    try:
        config = json.loads((checkpoint / "config.json").read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return ""
    return str(config.get("model_type") or "") if isinstance(config, dict) else ""


def modelling_modules(checkpoint: Path) -> list[str]:
    """Return the modules that ``derive_subject`` needs for this checkpoint, without importing them."""
    kind, spec = model_type(checkpoint).replace("-", "_"), importlib.util.find_spec("transformers")
    if not kind or spec is None or not spec.submodule_search_locations:
        return []
    models = Path(spec.submodule_search_locations[0], "models")
    names = [name for name in (kind, kind.removesuffix("_text")) if (models / name / f"modeling_{name}.py").exists()]
    return ["pytest_fsdp_meta.transformers", *(f"transformers.models.{name}.modeling_{name}" for name in names[:1])]


def rows_for(size: int, least: int = 8) -> int:
    """Return a number of rows, at least ``least``, that gives each of ``size`` ranks the same even number of rows."""
    each = max(1, -(-least // (MICRO_BATCHES * size)))
    return each * MICRO_BATCHES * size


def import_loader(name: str) -> tuple[ModuleType, Callable[..., Any]]:
    """Import the loader ``MODULE:NAME`` and return its module and function. Raises Unfit."""
    module, function = find_function(name)
    bind(function, None, Path())
    return module, function


def find_function(name: str) -> tuple[ModuleType, Callable[..., Any]]:
    """Import ``MODULE:NAME`` and return the module and what the name stands for, with any parameters. Raises Unfit."""
    module_name, _, attribute = name.partition(":")
    module = _import(module_name)
    try:
        function = attrgetter(attribute)(module)
    except AttributeError:
        owner, _, last = attribute.rpartition(".")
        try:
            known = dir(attrgetter(owner)(module) if owner else module)
        except AttributeError:
            known = []
        raise Unfit(f"module {module_name!r} has no {attribute!r}{did_you_mean(last, known)}") from None
    if not callable(function):
        raise Unfit(f"{name} is of type {type(function).__name__}, but should be a function that loads the model")
    return module, function


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            missing = "" if error.name == name else f" (no module {error.name!r})"
            raise Unfit(f"module {name!r} not found{missing}; the search path is that of python -m pytest") from None
        raise Unfit(_describe_import_error(name, error)) from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # pytest.skip and SystemExit at module level are BaseExceptions
        raise Unfit(_describe_import_error(name, error)) from error


def _describe_import_error(name: str, error: BaseException) -> str:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    own = [frame for frame in frames if not os.path.relpath(frame.filename).startswith("..")]
    where = f", at {os.path.relpath(own[-1].filename)}:{own[-1].lineno}" if own else ""
    return f"module {name!r} cannot be imported{where}: {type(error).__name__}: {' '.join(str(error).split())}"


def bind(function: Callable[..., Any], fsdp: Rank | None, checkpoint: Path) -> inspect.BoundArguments:
    """Bind the arguments of one call: by name where the loader has the name, else in order. Raises Unfit.

    The loader must take the checkpoint. It need not take ``fsdp``: it may use torch.distributed instead.
    """
    values = dict(zip(GIVEN, (fsdp, checkpoint), strict=True))
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # written in C, without a signature
        signature = inspect.signature(lambda *arguments: None)
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = {p.name for p in signature.parameters.values() if p.kind not in variadic}
    bound: dict[str, Any] = {name: values.pop(name) for name in GIVEN if name in named}
    others = [p for p in signature.parameters.values() if p.name not in GIVEN]
    required = [
        p.name for p in others if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    if required:
        if len(required) != len(values):
            raise _unfit(function, signature)
        bound.update(zip(required, values.values(), strict=True))
        values = {}
    rest = _rest(others)
    if values and rest is not None:
        bound[rest.name] = values if rest.kind is rest.VAR_KEYWORD else tuple(values.values())
        values = {}
    if "checkpoint" in values or any(p.default is p.empty and p.kind is p.KEYWORD_ONLY for p in others):
        raise _unfit(function, signature)
    ordered = {name: bound[name] for name in signature.parameters if name in bound}
    return inspect.BoundArguments(signature, ordered)


def _rest(others: list[inspect.Parameter]) -> inspect.Parameter | None:
    """Return ``*args`` if no named positional parameter precedes it, else ``**kwargs``, else None."""
    for parameter in others:
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            break
        if parameter.kind is parameter.VAR_POSITIONAL:
            return parameter
    return next((p for p in others if p.kind is p.VAR_KEYWORD), None)


def _unfit(function: Callable[..., Any], signature: inspect.Signature) -> Unfit:
    name = getattr(function, "__qualname__", type(function).__name__)
    return Unfit(
        f"{name}{signature} should take fsdp (the rank) and checkpoint (a pathlib.Path), by these names or in this "
        f"order: {name}(fsdp, checkpoint); for one that takes something else, --fsdp-init writes a test file"
    )
