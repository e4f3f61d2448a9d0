"""Check the parts that an author's adapter returns, and describe the first mistake in one sentence.

Without this check, a wrong part would raise deep inside an observer, or a check would silently compare nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import Any

from torch import Tensor

from pytest_fsdp_meta.evidence import MeshFacts
from pytest_fsdp_meta.loader.adapter import Part
from pytest_fsdp_meta.ranks.adapters.dtensor import fits, own_memory, sizes


def find_fault(part: Part) -> str:
    """Return the first thing that is wrong with the part, and what would be right; empty for a valid part."""
    return next(_faults(part), "")


def describe_misfit(gradient: Tensor, part: Part) -> str:
    """Return what is wrong with the shape of the gradient's local part; empty where it fits."""
    if fits(gradient, part):
        return ""
    shape, wanted = sizes(own_memory(gradient)), sizes(own_memory(part.local))
    return f"gradient of shape {shape}, but should have the part's {wanted}"


def _faults(part: Part) -> Iterator[str]:
    """Yield what is wrong; read only the first, since later checks rely on the earlier ones having passed."""
    yield from _wrong_types(part)
    if part.placements is not None:
        yield from _wrong_mesh(part.placements, part.mesh)
    yield from _wrong_regions(part)
    if part.gradient is not None and (problem := describe_misfit(part.gradient, part)):
        yield f"Part(gradient=...) is a {problem}"


def _wrong_types(part: Part) -> Iterator[str]:
    wants: list[tuple[str, Callable[[Any], bool], str]] = [
        ("local", _is_tensor, "a tensor"),
        ("shape", _is_shape, "a tuple of sizes: (4, 8)"),
        ("flat", lambda value: isinstance(value, bool), "True or False"),
        ("regions", _is_regions, "one tuple of (start, stop) for each dim: (((0, 4),), ((0, 8),))"),
        ("placements", _is_placements, "None or a tuple of strings: ('S(0)',)"),
        ("mesh", lambda value: value is None or isinstance(value, MeshFacts), "None or MeshFacts"),
        ("by", lambda value: isinstance(value, str), "a string"),
        ("gradient", lambda value: value is None or _is_tensor(value), "None or a tensor"),
    ]
    for field, is_right, wanted in wants:
        value = getattr(part, field)
        if not is_right(value):
            yield f"Part({field}=...): {_shown(value)} should be {wanted}"


def _wrong_mesh(placements: tuple[str, ...], mesh: MeshFacts | None) -> Iterator[str]:
    if mesh is None:
        yield f"Part(placements={placements}) needs mesh=... as well, or should have no placements"
    elif len(mesh.shape) != len(placements):
        yield f"Part(placements={placements}) should have one entry for each of the {len(mesh.shape)} dims of its mesh"


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


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_shape(value: object) -> bool:
    return isinstance(value, tuple) and all(_is_size(size) and size >= 0 for size in value)


def _is_regions(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(runs, tuple) and all(map(_is_run, runs)) for runs in value)


def _is_run(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(map(_is_size, value))


def _is_placements(value: object) -> bool:
    return value is None or (isinstance(value, tuple) and all(isinstance(placement, str) for placement in value))


def _shown(value: object) -> str:
    """Return the value with its type in one short line."""
    return "None" if value is None else f"{type(value).__name__} {' '.join(repr(value).split())[:60]}"
