"""Look up which part of a tensor this rank holds, by asking the adapters of its model.

What an author's adapter returns is checked: a wrong part would raise deep inside an observer, or a check would silently
compare nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn import Module

from pytest_fsdp_meta.evidence import MeshFacts
from pytest_fsdp_meta.loader.adapter import BUILT_IN, FSDP1, Adapter, Part, PartError
from pytest_fsdp_meta.loader.subject import SubjectError
from pytest_fsdp_meta.ranks.adapters import megatron_fsdp, zero3
from pytest_fsdp_meta.ranks.adapters.dtensor import (
    fits,
    own_memory,
    own_part,
    own_share,
    sizes,
    with_elements,
    without_partial,
)
from pytest_fsdp_meta.ranks.torch_private import flat_parameters
from pytest_fsdp_meta.worlds import CallFailed


@dataclass(frozen=True)
class Parts:
    """The parts of one model's tensors that this rank holds; the first of ``adapters`` that knows a tensor answers."""

    adapters: Sequence[Adapter] = ()

    def of(self, name: str, tensor: Tensor) -> Part:
        """Return the part of a parameter or buffer."""
        return self._adapted(name, tensor) or own_part(tensor)

    def gradient(self, name: str, parameter: Tensor) -> Part | None:
        """Return the part of the parameter's gradient; None where this rank has none.

        Of a DTensor, it is the part of the reduced gradient.
        """
        part = self._adapted(name, parameter)
        gradient = parameter.grad if part is None or part.gradient is None else part.gradient
        if gradient is None:
            return None
        if part is not None:
            _require_fit(name, gradient, part)
            return with_elements(part, gradient)
        return own_part(without_partial(parameter, gradient))

    def _adapted(self, name: str, tensor: Tensor) -> Part | None:
        for adapter in self.adapters:
            part = adapter(name, tensor)
            if part is not None:
                return replace(part, local=own_memory(part.local))
        return None


def _require_fit(name: str, gradient: Tensor, part: Part) -> None:
    """Raise SubjectError for a gradient of another shape than its part: checks of gradients would skip it silently.

    FSDP1 and megatron-fsdp may hold whole gradients for a while, as FSDP1 does under no_sync().
    """
    if part.by not in BUILT_IN and (problem := _describe_misfit(gradient, part)):
        where = "parameter.grad is a" if part.gradient is None else "Part(gradient=...) is a"
        raise SubjectError("adapter", f"{name!r}: {where} {problem}")


_declared: WeakKeyDictionary[Module, Adapter] = WeakKeyDictionary()


def remember(model: Module, declared: Adapter | None) -> None:
    """Store the adapter that the author declared for this model."""
    if declared is not None:
        _declared[model] = _checked(declared)


def parts_of(model: Module) -> Parts:
    """Return the parts of a model; the adapter that the author declared is asked before the built-in ones."""
    own = [_declared[model]] if model in _declared else []
    candidates = (make(model) for make in (_fsdp1_adapter, megatron_fsdp.adapter, zero3.adapter))
    return Parts((*own, *(built_in for built_in in candidates if built_in is not None)))


def _fsdp1_adapter(model: Module) -> Adapter | None:
    """Return the adapter of FSDP1 with ``use_orig_params=True``, if it wraps any module of the model.

    It splits one flat tensor of many parameters, so a rank holds a run of elements that may begin and end anywhere in a
    parameter.
    """
    if not any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        return None
    layout = {id(parameter): (shape, start) for parameter, shape, start in flat_parameters(model)}

    def part(name: str, tensor: Tensor) -> Part | None:
        if id(tensor) not in layout:
            return None  # a buffer, an ignored parameter, or one that the strategy NO_SHARD keeps whole
        shape, start = layout[id(tensor)]
        return Part.run(tensor.detach(), shape, start, by=FSDP1)

    return part


def _checked(declared: Adapter) -> Adapter:
    """Return the adapter with its errors and its results checked."""

    def adapter(name: str, tensor: Tensor) -> Part | None:
        try:
            part = declared(name, tensor)
        except PartError as error:
            raise SubjectError("adapter", f"{name!r}: {error}") from None
        except Exception as error:
            raise CallFailed(f"Subject(adapter=...), adapter({name!r}, ...)") from error
        if part is not None and not isinstance(part, Part):
            raise SubjectError(
                "adapter",
                f"it returned {type(part).__name__} for {name!r}, but should return pytest_fsdp_meta.Part, or None for "
                "a tensor that it does not describe",
            )
        if part is not None and (problem := next(_faults(part), "")):
            raise SubjectError("adapter", f"{name!r}: {problem}")
        return part and replace(own_share(part), shape=tuple(part.shape))  # messages should not show torch.Size([4, 8])

    return adapter


def _describe_misfit(gradient: Tensor, part: Part) -> str:
    """Return what is wrong with the shape of the gradient's local part; empty where it fits."""
    if fits(gradient, part):
        return ""
    shape, wanted = sizes(own_memory(gradient)), sizes(own_memory(part.local))
    return f"gradient of shape {shape}, but should have the part's {wanted}"


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_run(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(map(_is_size, value))


FIELDS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("local", lambda value: isinstance(value, Tensor), "a tensor"),
    ("shape", lambda v: isinstance(v, tuple) and all(_is_size(n) and n >= 0 for n in v), "a tuple of sizes: (4, 8)"),
    ("flat", lambda value: isinstance(value, bool), "True or False"),
    (
        "regions",
        lambda value: (
            isinstance(value, tuple) and all(isinstance(runs, tuple) and all(map(_is_run, runs)) for runs in value)
        ),
        "one tuple of (start, stop) for each dim: (((0, 4),), ((0, 8),))",
    ),
    (
        "placements",
        lambda value: value is None or (isinstance(value, tuple) and all(isinstance(place, str) for place in value)),
        "None or a tuple of strings: ('S(0)',)",
    ),
    ("mesh", lambda value: value is None or isinstance(value, MeshFacts), "None or MeshFacts"),
    ("by", lambda value: isinstance(value, str), "a string"),
    ("gradient", lambda value: value is None or isinstance(value, Tensor), "None or a tensor"),
)
"""The fields of a ``Part``, what holds for the value of each, and how a message says it."""


def _faults(part: Part) -> Iterator[str]:
    """Yield what is wrong; read only the first, since later checks rely on the earlier ones having passed."""
    for field, is_right, wanted in FIELDS:
        value = getattr(part, field)
        if not is_right(value):
            shown = "None" if value is None else f"{type(value).__name__} {' '.join(repr(value).split())[:60]}"
            yield f"Part({field}=...): {shown} should be {wanted}"
    placements, mesh = part.placements, part.mesh
    if placements is not None and mesh is None:
        yield f"Part(placements={placements}) needs mesh=... as well, or should have no placements"
    elif placements is not None and mesh is not None and len(mesh.shape) != len(placements):
        yield f"Part(placements={placements}) should have one entry for each of the {len(mesh.shape)} dims of its mesh"
    yield from _wrong_regions(part)
    if part.gradient is not None and (problem := _describe_misfit(part.gradient, part)):
        yield f"Part(gradient=...) is a {problem}"


def _wrong_regions(part: Part) -> Iterator[str]:
    extent = (prod(part.shape),) if part.flat else part.shape
    if len(part.regions) != len(extent):
        dims = ", because it is flat" if part.flat else f" for each of the {len(extent)} dims of the shape {part.shape}"
        yield f"Part(regions={part.regions}) should have one entry{dims}"
        return
    for runs, whole in zip(part.regions, extent, strict=True):
        for start, stop in runs:
            if not 0 <= start <= stop <= whole:
                yield f"Part(regions=...): ({start}, {stop}) is not within the {whole} of the shape {part.shape}"
    implied, local = tuple(sum(stop - start for start, stop in runs) for runs in part.regions), own_memory(part.local)
    if implied not in (sizes(local), sizes(part.local)):  # a DTensor may be described as a whole
        yield f"Part(local=...) has the shape {sizes(local)}, but should have {implied}, as its regions say"
