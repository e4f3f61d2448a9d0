"""What is wrong with a part that an author's adapter returns, in one sentence.

The observers compute with parts on every rank; a wrong one would fail there, in the midst of them, or make a check
compare nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import Any

from torch import Tensor

from pytest_fsdp_meta.evidence import MeshFacts
from pytest_fsdp_meta.loader.adapter import Part
from pytest_fsdp_meta.observers.adapters.dtensor import own_memory, sizes


def fault(part: Part) -> str:
    """The first thing that is wrong, and what would be right; empty for a part that can be."""
    return next(_faults(part), "")


def misfit(gradient: Tensor, part: Part) -> str:
    """What is wrong with the shape of the gradient's local part."""
    own, local = own_memory(gradient), own_memory(part.local)
    fits = own.numel() == local.numel() if part.flat else own.shape == local.shape
    return "" if fits else f"gradient of shape {sizes(own)}, but should have the part's {sizes(local)}"


def _faults(part: Part) -> Iterator[str]:
    """Each is looked for only where those before it were not found: later ones rely on it."""
    yield from _wrong_types(part)
    if part.placements is not None:
        yield from _wrong_mesh(part.placements, part.mesh)
    yield from _wrong_regions(part)
    if part.gradient is not None and (problem := misfit(part.gradient, part)):
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
    for field, right, wanted in wants:
        value = getattr(part, field)
        if not right(value):
            yield f"Part({field}=...): {shown(value)} should be {wanted}"


def _wrong_mesh(placements: tuple[str, ...], mesh: MeshFacts | None) -> Iterator[str]:
    if mesh is None:
        yield f"Part(placements={placements}) should have a mesh, or be without placements"
    elif len(mesh.shape) != len(placements):
        yield f"Part(placements={placements}) should have one entry for each of the {len(mesh.shape)} dims of its mesh"


def _wrong_regions(part: Part) -> Iterator[str]:
    extent = (prod(part.shape),) if part.flat else part.shape
    if len(part.regions) != len(extent):
        dims = ", as it is flat" if part.flat else f" for each of the {len(extent)} dims of the shape {part.shape}"
        yield f"Part(regions={part.regions}) should have one entry{dims}"
        return
    for runs, whole in zip(part.regions, extent, strict=True):
        for start, stop in runs:
            if not 0 <= start <= stop <= whole:
                yield f"Part(regions=...): ({start}, {stop}) is not within the {whole} of the shape {part.shape}"
    implied, local = tuple(sum(stop - start for start, stop in runs) for runs in part.regions), own_memory(part.local)
    if implied != sizes(local):
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
    return value is None or (isinstance(value, tuple) and all(isinstance(one, str) for one in value))


def shown(value: object) -> str:
    """A value in one line."""
    return "None" if value is None else f"{type(value).__name__} {' '.join(repr(value).split())[:60]}"
