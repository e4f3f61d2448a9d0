"""Compare this rank's own shards with the same slices of the reference, without gathering anything."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice, product
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

import torch
from torch import Tensor

from pytest_fsdp_meta.checks.materialisation.observe import loaded_subject
from pytest_fsdp_meta.checks.values.facts import GRADIENT_TOLERANCE, Element, Pattern, smallest
from pytest_fsdp_meta.evidence import Comparison, Measure, PartFacts, Region
from pytest_fsdp_meta.loader.adapter import Part
from pytest_fsdp_meta.ranks.adapters.dtensor import local_part
from pytest_fsdp_meta.ranks.adapters.lookup import parts_of
from pytest_fsdp_meta.ranks.assembly import record_parts
from pytest_fsdp_meta.ranks.inventory import named_tensors
from pytest_fsdp_meta.ranks.reference_record import Record, global_index, record_at, select
from pytest_fsdp_meta.ranks.watching import DTensorDraws
from pytest_fsdp_meta.worlds import current, doing

SLICE = 2**15
"""Elements that are computed at a time: float64 copies of so many fit into a core's cache, and malloc keeps them."""
FEWEST = 4
"""Number of elements; fewer may have a common factor or shift by chance."""
CLOSE = 0.25
"""Fraction of the distance of unrelated elements; what was computed in a lower precision is closer."""
PLACES = 2**10
"""Parts of other places to compare at most."""
LARGEST = 2**28
"""Elements of a tensor that is read as a whole to look for a shard in other places."""


Rows: TypeAlias = tuple[int | None, int | None]
"""Start and stop of a slice of a tensor's rows."""


def observe_values(
    path: str, names: Mapping[str, str] | None = None, drawn: Mapping[str, Rows] = MappingProxyType({})
) -> tuple[Comparison, ...]:
    """Compare this rank's subject with the record or checkpoint at ``path``.

    ``names``, where given, limits the comparison to these tensors and maps each to its name at ``path``. The ``drawn``
    rows may have any values.
    """
    doing("comparing values")
    model = loaded_subject(current()).model
    parts = parts_of(model)
    tensors = ((n, parts.of(n, tensor)) for n, _, tensor in named_tensors(model) if names is None or n in names)
    label = "the reference" if names is None else "the verifier"
    found = compare_all(tensors, Record(path, label), names, drawn)
    draws: DTensorDraws | None = current().state.get("draws")
    if draws is None or not draws.seen or current().device.type != "cpu":
        return found
    return tuple(replace(c, pattern=Pattern("alike")) if c.pattern == Pattern("elsewhere") else c for c in found)


def record_own_values(names: Sequence[str], folder: str) -> dict[str, PartFacts]:
    """Record this rank's parts of these tensors in ``folder``; return where they lie in the whole tensors."""
    rank = current()
    model = loaded_subject(rank).model
    parts = parts_of(model)
    found = ((name, parts.of(name, tensor)) for name, _, tensor in named_tensors(model) if name in names)
    own = {name: part for name, part in found if part.local.numel()}
    return record_parts(own, own_values_of(rank.rank, folder))


def own_values_of(rank: int, folder: str) -> Path:
    return record_at(folder, f"own{rank}")


def compare_all(
    parts: Iterable[tuple[str, Part]],
    reference: Record,
    names: Mapping[str, str] | None = None,
    drawn: Mapping[str, Rows] = MappingProxyType({}),
) -> tuple[Comparison, ...]:
    """Compare this rank's part of each tensor that the reference has; ``names`` maps to the names in the reference."""
    comparisons = []
    for name, part in parts:
        recorded = name if names is None else names[name]
        if recorded in reference and not part.local.is_meta:
            comparisons.append(compare(name, part, reference, recorded, measuring=True, drawn=drawn.get(name)))
    return tuple(comparisons)


def compare(
    name: str, part: Part, reference: Record, recorded: str, measuring: bool = False, drawn: Rows | None = None
) -> Comparison:
    """Compare a part of a tensor with the same part of the tensor ``recorded`` in the reference.

    If ``measuring``, a comparison that differs has a ``measure``; that of ``drawn`` rows says whether they are finite.
    """
    actual = local_part(part.local)
    expected_shape = reference.shape(recorded)
    if part.shape != expected_shape:
        should_be = f"{expected_shape}, as in {reference.label}"
        return Comparison(name, False, problem=f"shape {part.shape}", should_be=should_be, shape=part.shape)
    implied = tuple(sum(stop - start for start, stop in runs) for runs in part.regions)
    if implied != tuple(actual.shape):
        source = f"{part.by} says" if part.by else "its placements imply"
        return Comparison(
            name, False, problem=f"local shape {tuple(actual.shape)}", should_be=f"{implied}, as {source}"
        )
    if not actual.numel():
        return Comparison(name, True)
    expected = read_part(part, reference, recorded)

    def read_whole() -> Tensor | None:
        searched = math.prod(part.shape) <= LARGEST and not actual.is_complex()
        return comparable(reference.read_whole(recorded).to(actual.dtype)) if searched else None

    whole = read_whole if measuring else None
    found = _compare(name, actual, expected, part, whole)
    if drawn is None or found.equal:
        return found
    mask = drawn_places(part, drawn).view(-1, *[1] * (actual.ndim - 1))
    kept = _compare(name, actual, torch.where(mask, actual.cpu(), expected.to(actual.dtype)), part, whole)
    return replace(kept, cast=found.cast, measure=kept.measure or found.measure)


def drawn_places(part: Part, rows: Rows) -> Tensor:
    """Return a mask of the part's rows, or of the elements of a flat part, that are in these rows of the tensor."""
    places = torch.cat([torch.arange(start, stop) for start, stop in part.regions[0]])
    if part.flat:
        places //= math.prod(part.shape[1:])
    first, last, _ = slice(*rows).indices(part.shape[0])
    return (places >= first) & (places < last)


def compare_gradients(parts: Iterable[tuple[str, Part]], reference: Record) -> tuple[Comparison, ...]:
    """Compare and measure each gradient that the reference has."""
    found = ((name, part, _measure_gradient(name, part, reference)) for name, part in parts if name in reference)
    return tuple(
        compare_measured(name, part, reference, GRADIENT_TOLERANCE, measured) for name, part, measured in found
    )


def _measure_gradient(name: str, part: Part, reference: Record) -> Measure | None:
    local = local_part(part.local).cpu()
    if not local.numel() or part.shape != reference.shape(name):
        return None
    expected = read_part(part, reference, name)
    if expected.shape != local.shape:
        return None
    return measure(comparable(local), comparable(expected), elements=local.numel())


def compare_measured(
    name: str, part: Part, reference: Record, tolerance: Mapping[str, float], measured: Measure | None
) -> Comparison:
    """Compare a part with the same part of the reference, whose distance is already ``measured``.

    Within the smallest ``tolerance``, no check reports a difference, so its details are not looked for.
    """
    if measured is not None:
        least = smallest(tolerance, {str(part.local.dtype).removeprefix("torch.")})
        if measured.apart <= least * measured.truth:
            return Comparison(name, measured.apart == 0.0, elements=measured.elements, measure=measured)
    comparison = compare(name, part, reference, name)
    return comparison if comparison.problem is not None else replace(comparison, measure=measured)


def read_part(part: Part, record: Record, name: str) -> Tensor:
    """Read the elements of the recorded tensor that the ``part`` covers; the shapes differ where the tensors' do."""
    return record.read_run(name, part.regions[0]) if part.flat else record.read(name, part.regions)


def length(tensor: Tensor) -> float:
    """Return the Euclidean norm, computed in float64."""
    square = torch.zeros((), dtype=torch.float64, device=tensor.device)
    for part in tensor.flatten().split(SLICE if tensor.device.type == "cpu" else max(tensor.numel(), 1)):
        exact = part.double()
        square += exact.dot(exact)
    return math.sqrt(float(square))


def measure(
    actual: Tensor,
    expected: Tensor,
    grain: float = 0.0,
    elements: int | None = None,
    since: tuple[Tensor, Tensor] | None = None,
) -> Measure:
    """Measure both tensors as vectors; ``elements`` is their number where it is not that of the vectors.

    With ``since``, what both were before, their changes are measured. Slices are computed in float64 one after the
    other, because copies of large tensors take more time and memory than the sums.
    """
    vectors = [tensor.flatten() for tensor in (actual, expected, *(since or ()))]
    sums = torch.zeros(4, dtype=torch.float64, device=actual.device)
    for start in range(0, vectors[0].numel(), SLICE):
        ours, theirs, *before = (vector[start : start + SLICE].double() for vector in vectors)
        if before:  # not in place: in float64 these are the tensors themselves
            ours, theirs = ours - before[0], theirs - before[1]
        apart = ours - theirs
        sums += torch.stack([ours.dot(ours), theirs.dot(theirs), apart.dot(apart), ours.dot(theirs)])
    actual_square, truth_square, apart_square, dot = sums.tolist()
    return Measure(
        actual=math.sqrt(actual_square),
        truth=math.sqrt(truth_square),
        apart=math.sqrt(apart_square),
        dot=dot,
        elements=vectors[0].numel() if elements is None else elements,
        grain=grain,
    )


def _compare(
    name: str, actual: Tensor, expected: Tensor, part: Part, whole: Callable[[], Tensor | None] | None
) -> Comparison:
    """Compare on the CPU, in the shard's own dtype, with NaN equal to NaN; only distances are computed in float64.

    The reference is read to the CPU anyway, and the CPU supports more dtypes than other devices. If the
    ``whole`` tensor can be read, what differs is measured, and its pattern looked for.
    """
    cast = expected.dtype != actual.dtype
    ours, theirs = comparable(actual.cpu()), comparable(expected.to(actual.dtype))
    if torch.equal(ours, theirs):  # the usual case, and it needs no mask as large as the shard
        return Comparison(name, True, elements=actual.numel(), cast=cast)
    differs = differing(ours, theirs)
    if not differs.any():
        return Comparison(name, True, elements=actual.numel(), cast=cast)
    first = tuple(int(i) for i in differs.nonzero()[0])
    measured, pattern = None, None
    if whole is not None:
        measured = measure(ours, theirs, elements=actual.numel())
        pattern = _find_pattern((ours, theirs, differs), measured, part, whole)
    # Different integers differ by at least one, but large ones may be equal in float64.
    least = 0.0 if ours.is_floating_point() else 1.0
    ours, theirs = ours.double(), theirs.double()
    distance = torch.where(differs, (ours - theirs).abs().nan_to_num(nan=torch.inf).clamp_min(least), 0.0)
    size = theirs.abs()
    farthest = tuple(int(i) for i in torch.unravel_index(distance.argmax(), distance.shape))
    if actual.is_complex():  # real and imaginary part are one element
        distance, size = distance.norm(dim=-1), size.norm(dim=-1)
    relative = distance / size.clamp_min(torch.finfo(torch.float32).tiny)
    return Comparison(
        name,
        False,
        elements=actual.numel(),
        differing=int((distance > 0).sum()),
        max_abs=float(distance.max()),
        max_rel=float(relative.max()),
        index=whole_index(part, first[: actual.ndim]),
        expected=float(theirs[first]),
        actual=float(ours[first]),
        cast=cast,
        measure=measured,
        pattern=pattern,
        farthest=Element(whole_index(part, farthest[: actual.ndim]), float(ours[farthest]), float(theirs[farthest])),
    )


def _find_pattern(
    tensors: tuple[Tensor, Tensor, Tensor], measured: Measure, part: Part, read_whole: Callable[[], Tensor | None]
) -> Pattern | None:
    """Make each candidate of the reference's slice, the second tensor, and return the one that equals the first.

    The third says which elements differ. What is computed is tried on a sample first.
    """
    ours, theirs, differs = tensors
    first = int(differs.flatten().int().argmax())
    sample = [tensor.flatten()[first : first + SLICE] for tensor in tensors]
    tried = (p for p, make in _computed(*sample) if all(_gives(p, make, *of) for of in (sample, tensors)))
    computed = next(tried, None)
    if computed is not None and computed.kind != "plus":  # the positions of another rank are these plus a number, too
        return computed
    varied = ours.dtype != torch.bool and bool((ours != ours.flatten()[0]).any())  # a constant may be from anywhere
    whole = read_whole() if varied else None
    for pattern, moved in _moved(part, whole) if whole is not None else ():
        if torch.equal(moved, ours):
            return pattern
    if computed is not None:
        return computed
    if varied and whole is not None and _has_rows_of(whole, ours, differs, part):
        return Pattern("reordered")
    alike = varied and math.isclose(measured.actual, measured.truth, rel_tol=1e-9)  # known sooner than their order
    if alike and torch.equal(*(tensor.double().flatten().sort().values for tensor in (ours, theirs))):
        return Pattern("reordered")
    share, is_matrix = float(differs.double().mean()), len(part.shape) > 1
    # Unrelated elements of one spread are apart by the square root of 2 times it. Vectors start as ones or zeros, so
    # they are close to one another and right in part by chance.
    if is_matrix and measured.apart < CLOSE * math.sqrt(2 * share) * measured.truth:
        return Pattern("close")
    return Pattern("part") if share < (0.9 if is_matrix else 0.5) else None


def _computed(ours: Tensor, theirs: Tensor, differs: Tensor) -> Iterator[tuple[Pattern, Callable[[Tensor], Tensor]]]:
    """Yield what may have been done to each element of the reference, with the numbers that are nearest to a sample.

    A constant, such as the initial weight of a norm, is every other constant times or plus a number, or rounded.
    """
    yield Pattern("zeros"), torch.zeros_like
    if ours.dtype in (torch.float32, torch.float64) and bool((ours[differs] != ours[differs][0]).any()):
        for dtype in (torch.bfloat16, torch.float16):
            rounded = Pattern("rounded", str(dtype).removeprefix("torch."))
            yield rounded, lambda exact, dtype=dtype: exact.to(dtype).to(exact.dtype)  # type: ignore[misc]
    vary = all(bool((tensor != tensor[0]).any()) for tensor in (ours, theirs))
    if ours.numel() >= FEWEST and ours.dtype != torch.bool and vary:
        actual, expected = ours.double(), theirs.double()
        factor, shift = float(actual.dot(expected) / expected.dot(expected)), float((actual - expected).mean())
        yield Pattern("times", f"{factor:.7g}"), lambda exact: exact.double() * factor
        yield Pattern("plus", f"{shift:.3g}"), lambda exact: exact.double() + shift


def _gives(pattern: Pattern, make: Callable[[Tensor], Tensor], ours: Tensor, theirs: Tensor, differs: Tensor) -> bool:
    made = make(theirs)
    if pattern.kind in ("times", "plus"):
        actual = ours.double()
        near = float(actual.abs().max()) * (2 * torch.finfo(ours.dtype).eps if ours.is_floating_point() else 0.0)
        return float((actual - made).abs().max()) <= near < CLOSE * float((actual - theirs.double()).abs().max())
    return bool(torch.equal(torch.where(differs, made, ours) if pattern.kind == "rounded" else made, ours))


def _moved(part: Part, whole: Tensor) -> Iterator[tuple[Pattern, Tensor]]:
    """Yield the same part of the transposed tensor, and the parts of other places that have its sizes."""
    shape = (math.prod(part.shape),) if part.flat else part.shape
    whole = whole.reshape(shape)
    if len(shape) > 1 and shape[-1] == shape[-2]:
        yield Pattern("transposed"), select(whole.mT, part.regions)
    for regions in islice(product(*map(_places, part.regions, shape)), PLACES):
        yield Pattern("elsewhere"), select(whole, regions)


def _places(runs: Region, size: int) -> Iterator[Region]:
    """Yield where other ranks hold runs as long as these: each is moved by a multiple of its length."""
    for times in range(-PLACES, PLACES):
        moved = tuple((start + times * (stop - start), stop + times * (stop - start)) for start, stop in runs)
        if all(start >= 0 and stop <= size for start, stop in moved):
            yield moved


def _has_rows_of(whole: Tensor, ours: Tensor, differs: Tensor, part: Part) -> bool:
    """Return whether the wrong rows are different rows of the ``whole`` tensor, or parts of those in these columns."""
    if ours.ndim < 2 or not ours.dtype.is_signed or len(part.regions[-1]) > 1:  # torch 2.9 indexes no uint16
        return False
    [columns] = part.regions[-1]
    rows, places = whole[..., slice(*columns)].flatten(0, -2), differs.flatten(0, -2).any(1)
    wrong = ours.flatten(0, -2)[places]
    if not bool((rows == wrong[0]).all(1).any()):
        return False
    held, known = (Counter(hash(row.numpy().tobytes()) for row in every.double()) for every in (wrong, rows))
    return held <= known


def whole_index(part: Part, local: Sequence[int]) -> tuple[int, ...]:
    """Return the index in the whole tensor of an index in the part."""
    index = global_index(part.regions, local)
    if not part.flat:
        return index
    place = []
    for size in reversed(part.shape):
        place.append(index[0] % size)
        index = (index[0] // size,)
    return tuple(reversed(place))


def differing(ours: Tensor, theirs: Tensor) -> Tensor:
    """Return which elements of two ``comparable`` tensors differ; NaN equals NaN."""
    return (ours != theirs) & ~((ours != ours) & (theirs != theirs))


def all_equal(ours: Tensor, theirs: Tensor) -> bool:
    """Return whether two tensors have the same shape and elements; NaN equals NaN."""
    ours, theirs = comparable(ours), comparable(theirs)
    if ours.dtype == theirs.dtype and torch.equal(ours, theirs):
        return True  # the usual case, and it needs no mask as large as the tensor
    return ours.shape == theirs.shape and not bool(differing(ours, theirs).any())


def comparable(tensor: Tensor) -> Tensor:
    """Return the same values in a dtype that torch can compare.

    A complex tensor becomes its real and imaginary parts in one more dimension, a packed dtype its bytes.
    """
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    if tensor.element_size() > 1 or tensor.dtype in (torch.bool, torch.int8, torch.uint8):
        return tensor
    try:
        return tensor.float()  # float8: float32 holds every value exactly
    except (NotImplementedError, RuntimeError):
        return tensor.view(torch.uint8)
