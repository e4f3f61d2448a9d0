"""This rank's own shards beside the same slices of the truth. Nothing is gathered."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pytest_fsdp_meta.evidence import Comparison, Measure
from pytest_fsdp_meta.loader.adapter import Part
from pytest_fsdp_meta.observers.adapters.dtensor import local_part
from pytest_fsdp_meta.observers.adapters.lookup import parts_of
from pytest_fsdp_meta.observers.inventory import named_tensors
from pytest_fsdp_meta.observers.loading import loaded_subject
from pytest_fsdp_meta.observers.support.reference_record import Record, global_index
from pytest_fsdp_meta.worlds import current, doing


def observe_values(path: str, names: Mapping[str, str] | None = None) -> tuple[Comparison, ...]:
    """This rank's subject beside the record or checkpoint at ``path``; ``names`` limits it, and maps to names there."""
    doing("comparing values")
    model = loaded_subject(current()).model
    parts = parts_of(model)
    tensors = ((n, parts.of(n, tensor)) for n, _, tensor in named_tensors(model) if names is None or n in names)
    label = "the reference" if names is None else "the verifier"
    return compare_all(tensors, Record(path, label), names)


def compare_all(
    parts: Iterable[tuple[str, Part]], truth: Record, names: Mapping[str, str] | None = None
) -> tuple[Comparison, ...]:
    """This rank's part of each tensor that the truth knows, compared; ``names`` maps to the names in the truth."""
    found = []
    for name, part in parts:
        there = name if names is None else names[name]
        if there in truth and not part.local.is_meta:
            found.append(compare(name, part, truth, there, measuring=True))
    return tuple(found)


def compare(name: str, part: Part, truth: Record, there: str, measuring: bool = False) -> Comparison:
    """The ``part`` of a tensor beside the same part of ``there``; measured where they differ, if that is wanted."""
    actual = local_part(part.local)
    if part.shape != truth.shape(there):
        return Comparison(
            name, False, problem=f"shape {part.shape}", should_be=f"{truth.shape(there)}, as in {truth.label}"
        )
    implied = tuple(sum(stop - start for start, stop in runs) for runs in part.regions)
    if implied != tuple(actual.shape):
        says = f"{part.by} says" if part.by else "its placements imply"
        return Comparison(name, False, problem=f"local shape {tuple(actual.shape)}", should_be=f"{implied}, as {says}")
    if not actual.numel():
        return Comparison(name, True)
    return _compare(name, actual, beside(part, truth, there), part, measuring)


def compare_gradients(parts: Iterable[tuple[str, Part]], truth: Record) -> tuple[Comparison, ...]:
    """Each gradient that the truth knows, compared and measured."""
    found = []
    for name, part in parts:
        if name in truth:
            comparison = compare(name, part, truth, name)
            if comparison.problem is None and comparison.elements:
                ours, theirs = comparable(local_part(part.local).cpu()), comparable(beside(part, truth, name))
                comparison = replace(comparison, measure=measure(ours, theirs))
            found.append(comparison)
    return tuple(found)


def beside(part: Part, truth: Record, name: str) -> Tensor:
    """What the truth has where the ``part`` lies; of another shape where the truth is."""
    return truth.read_run(name, part.regions[0]) if part.flat else truth.read(name, part.regions)


def measure(actual: Tensor, truth: Tensor, grain: float = 0.0) -> Measure:
    """Both as vectors, in float64."""
    ours, theirs = actual.double().flatten(), truth.double().flatten()
    return Measure(
        actual=float(ours.norm()),
        truth=float(theirs.norm()),
        apart=float((ours - theirs).norm()),
        dot=float(ours @ theirs),
        elements=ours.numel(),
        grain=grain,
    )


def _compare(name: str, actual: Tensor, expected: Tensor, part: Part, measuring: bool) -> Comparison:
    """Equal means equal in the shard's own type, and NaN like NaN; numbers are only told in float64.

    The CPU compares, where the truth is read to: it knows more types than other devices.
    """
    cast = expected.dtype != actual.dtype
    ours, truth = comparable(actual.cpu()), comparable(expected.to(actual.dtype))
    if torch.equal(ours, truth):  # nearly always so, and without a mask as large as the shard
        return Comparison(name, True, elements=actual.numel(), cast=cast)
    differs = (ours != truth) & ~((ours != ours) & (truth != truth))
    count = int(differs.sum())
    if not count:
        return Comparison(name, True, elements=actual.numel(), cast=cast)
    first = tuple(int(i) for i in differs.nonzero()[0])
    # Integers that differ do so by one at least, which float64 forgets of the large ones.
    least = 0.0 if ours.is_floating_point() else 1.0
    ours, truth = ours.double(), truth.double()
    distance = torch.where(differs, (ours - truth).abs().nan_to_num(nan=torch.inf).clamp_min(least), 0.0)
    relative = distance / truth.abs().clamp_min(torch.finfo(torch.float32).tiny)
    return Comparison(
        name,
        False,
        elements=actual.numel(),
        differing=count,
        max_abs=float(distance.max()),
        max_rel=float(relative.max()),
        index=whole_index(part, first[: actual.ndim]),
        expected=float(truth[first]),
        actual=float(ours[first]),
        cast=cast,
        measure=measure(ours, truth) if measuring else None,
    )


def whole_index(part: Part, local: Sequence[int]) -> tuple[int, ...]:
    """The index in the whole tensor of one in the part."""
    index = global_index(part.regions, local)
    if not part.flat:
        return index
    place = []
    for size in reversed(part.shape):
        place.append(index[0] % size)
        index = (index[0] // size,)
    return tuple(reversed(place))


def comparable(tensor: Tensor) -> Tensor:
    """The same values in a type that torch can compare.

    A complex tensor gives its real and imaginary parts in one more dimension, and a packed type its bytes.
    """
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    if tensor.element_size() > 1 or tensor.dtype in (torch.bool, torch.int8, torch.uint8):
        return tensor
    try:
        return tensor.float()  # float8: nothing is lost
    except (NotImplementedError, RuntimeError):
        return tensor.view(torch.uint8)
