"""This rank's own shards beside the same slices of the truth. Nothing is gathered."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from pytest_fsdp_meta.evidence import Comparison, Region
from pytest_fsdp_meta.observers.inventory import held_regions, local_part, named_tensors
from pytest_fsdp_meta.observers.loading import loaded_subject
from pytest_fsdp_meta.reference import Record, global_index
from pytest_fsdp_meta.worlds import current


def observe_values(path: str, names: Mapping[str, str] | None = None) -> tuple[Comparison, ...]:
    """This rank's subject beside the record or checkpoint at ``path``; ``names`` limits it, and maps to names there."""
    tensors = (
        (name, t) for name, _, t in named_tensors(loaded_subject(current()).model) if names is None or name in names
    )
    label = "the reference" if names is None else "the verifier"
    return compare_all(tensors, Record(path, label), names)


def compare_all(
    tensors: Iterable[tuple[str, Tensor]], truth: Record, names: Mapping[str, str] | None = None
) -> tuple[Comparison, ...]:
    """Each tensor that the truth knows, compared; ``names`` maps to the names in the truth."""
    found = []
    for name, tensor in tensors:
        there = name if names is None else names[name]
        if there in truth and not local_part(tensor).is_meta:
            found.append(compare(name, tensor, truth, there))
    return tuple(found)


def compare(name: str, tensor: Tensor, truth: Record, there: str) -> Comparison:
    """The local shard of ``tensor`` beside its slice of ``there``."""
    actual, held = local_part(tensor), held_regions(tensor)
    if tuple(tensor.shape) != truth.shape(there):
        return Comparison(
            name, False, problem=f"shape {tuple(tensor.shape)}", should_be=f"{truth.shape(there)}, as in {truth.label}"
        )
    implied = tuple(sum(stop - start for start, stop in runs) for runs in held)
    if implied != tuple(actual.shape):
        return Comparison(
            name, False, problem=f"local shape {tuple(actual.shape)}", should_be=f"{implied}, as its placements imply"
        )
    if not actual.numel():
        return Comparison(name, True)
    return _compare(name, actual, truth.read(there, held), held)


def _compare(name: str, actual: Tensor, expected: Tensor, held: Sequence[Region]) -> Comparison:
    cast = expected.dtype != actual.dtype
    expected = expected.to(device=actual.device, dtype=actual.dtype)
    if torch.equal(actual, expected):
        return Comparison(name, True, elements=actual.numel(), cast=cast)
    ours, truth = _widen(actual), _widen(expected)
    differs = (ours != truth) & ~(torch.isnan(ours) & torch.isnan(truth))
    count = int(differs.sum())
    if not count:
        return Comparison(name, True, elements=actual.numel(), cast=cast)
    distance = torch.where(differs, (ours - truth).abs().nan_to_num(nan=torch.inf), 0.0)
    relative = distance / truth.abs().clamp_min(torch.finfo(torch.float32).tiny)
    first = tuple(int(i) for i in differs.nonzero()[0])
    return Comparison(
        name,
        False,
        elements=actual.numel(),
        differing=count,
        max_abs=float(distance.max()),
        max_rel=float(relative.max()),
        index=global_index(held, first[: actual.ndim]),
        expected=float(truth[first]),
        actual=float(ours[first]),
        cast=cast,
    )


def _widen(tensor: Tensor) -> Tensor:
    """In float64; a complex tensor as its real and imaginary parts in one more dimension."""
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double()
