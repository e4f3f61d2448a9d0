"""``Part`` and ``Adapter``: how authors describe shards that torch does not describe by itself.

DTensors, plain tensors, FSDP1, Megatron-FSDP and DeepSpeed's ZeRO-3 need no adapter; for anything else, such as weights
sharded by hand, authors set ``Subject(adapter=...)``. This module imports no torch, because test modules import it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from operator import index
from typing import TYPE_CHECKING, Protocol, SupportsIndex

from pytest_fsdp_meta.checks.structure.facts import MeshFacts, Region, join_runs

if TYPE_CHECKING:
    from torch import Tensor


FSDP1, MEGATRON_FSDP, ZERO3 = "FSDP1", "megatron-fsdp", "ZeRO-3"
BUILT_IN = frozenset({FSDP1, MEGATRON_FSDP, ZERO3})
"""The values of ``Part.by`` of the plugin's own adapters."""


class PartError(ValueError):
    """The arguments of ``Part.block``, ``Part.blocks`` or ``Part.run`` do not describe a part of the tensor."""


@dataclass(frozen=True)
class Part:
    """The part of one tensor that this rank holds. Create it with ``Part.block``, ``Part.blocks`` or ``Part.run``.

    ``local`` holds the elements of this rank and ``shape`` is the shape of the whole tensor. ``regions`` has the global
    indices of ``local``: half-open ranges for each dim or, if ``flat``, for the single dim of the flattened tensor.
    If ``local`` is a DTensor, because FSDP2 shards what was split by hand before, ``regions`` describes all of it, and
    the plugin takes this rank's shard. ``gradient`` is this rank's part of the gradient, if that is not
    ``parameter.grad``. ``by`` is the name of what sharded the tensor, for messages; it is empty for DTensors and plain
    tensors.
    """

    local: Tensor
    shape: tuple[int, ...]
    regions: tuple[Region, ...]
    flat: bool = False
    placements: tuple[str, ...] | None = None
    mesh: MeshFacts | None = None
    by: str = ""
    gradient: Tensor | None = None

    @classmethod
    def block(cls, local: Tensor, shape: Sequence[int], start: Sequence[int], by: str = "adapter") -> Part:
        """Describe ``local`` as a block of the whole tensor.

        ``shape`` is the shape of the whole tensor and ``start`` the global index of the block's first element, both
        with one entry for each dim of ``local``. Rank 1 of 2 that holds the last four of eight rows of 16 columns
        returns ``Part.block(local, shape=(8, 16), start=(4, 0))``.

        Raises PartError if the block does not lie within the tensor.
        """
        _require_tensor(local)
        shape, start = _integers("shape", shape), _integers("start", start)
        if not len(start) == len(shape) == local.ndim:
            raise PartError(
                f"start={start} and shape={shape} should have one entry for each of the "
                f"{local.ndim} dims of the local {tuple(local.shape)}"
            )
        regions = tuple(
            _region(first, size, whole) for first, size, whole in zip(start, local.shape, shape, strict=True)
        )
        return cls(local, shape, regions, by=by)

    @classmethod
    def blocks(
        cls, local: Tensor, shape: Sequence[int], ranges: Sequence[tuple[int, int]], dim: int = 0, by: str = "adapter"
    ) -> Part:
        """Describe ``local`` as several blocks of the whole tensor, one after another along ``dim``.

        ``ranges`` has the (start, stop) of each block in the whole tensor, in the order in which ``local`` holds them;
        all other dims are whole. For a fused weight of 8 rows each for q, k and v, of which rank 1 of 2 holds the
        second half of each: ``Part.blocks(local, shape=(24, 16), ranges=[(4, 8), (12, 16), (20, 24)])``.

        Raises PartError if the blocks overlap, do not lie within the tensor, or do not have the size of ``local``.
        """
        _require_tensor(local)
        shape, own, dim = _integers("shape", shape), tuple(local.shape), _integer("dim", dim)
        if not (len(shape) == len(own) and -len(own) <= dim < len(own)):
            raise PartError(f"shape={shape} and dim={dim} should fit the {local.ndim} dims of the local {own}")
        dim %= len(own)
        runs = tuple(_range(item, shape[dim]) for item in ranges)
        ordered = sorted(runs)
        if any(first[1] > second[0] for first, second in pairwise(ordered)):
            raise PartError(f"ranges={list(runs)} overlap")
        implied = (*shape[:dim], sum(stop - start for start, stop in runs), *shape[dim + 1 :])
        if implied != own:
            raise PartError(
                f"ranges={list(runs)} of dim {dim} make a block of {implied}, but the local tensor has {own}"
            )
        regions: list[Region] = [((0, size),) if size else () for size in shape]
        regions[dim] = join_runs((start, stop) for start, stop in runs if stop > start)
        return cls(local, shape, tuple(regions), by=by)

    @classmethod
    def run(cls, local: Tensor, shape: Sequence[int], start: int, by: str = "adapter") -> Part:
        """Describe ``local`` as consecutive elements of the flattened tensor.

        ``shape`` is the shape of the whole tensor and ``start`` the index, in its row-major order, of the first element
        of ``local``.

        Raises PartError if the elements do not lie within the tensor.
        """
        _require_tensor(local)
        shape, first = _integers("shape", shape), _integer("start", start)
        return cls(local.reshape(-1), shape, (_region(first, local.numel(), prod(shape)),), flat=True, by=by)


def _require_tensor(local: object) -> None:
    from torch import Tensor

    if not isinstance(local, Tensor):
        raise PartError(f"local={_shorten(local)} should be a tensor")


def _integers(field: str, value: Sequence[SupportsIndex]) -> tuple[int, ...]:
    try:
        return tuple(index(item) for item in value)
    except TypeError:
        raise PartError(f"{field}={_shorten(value)} should be a tuple of integers, one for each dim") from None


def _integer(field: str, value: SupportsIndex) -> int:
    try:
        return index(value)
    except TypeError:
        raise PartError(f"{field}={_shorten(value)} should be an integer") from None


def _range(value: tuple[int, int], whole: int) -> tuple[int, int]:
    ends = _integers("ranges", value)
    if len(ends) != 2 or not 0 <= ends[0] <= ends[1] <= whole:
        raise PartError(f"{_shorten(value)} in ranges should be (start, stop) within 0 to {whole}")
    return ends[0], ends[1]


def _shorten(value: object) -> str:
    return " ".join(repr(value).split())[:60]


def _region(start: int, size: int, whole: int) -> Region:
    if size and not 0 <= start <= start + size <= whole:
        raise PartError(f"indices {start} to {start + size} are outside the whole tensor (0 to {whole})")
    return ((start, start + size),) if size else ()


class Adapter(Protocol):
    """A function that describes which part of a parameter or buffer this rank holds.

    It is called on every rank with the FQN of each parameter and buffer, as findings show it, and the tensor itself. It
    returns a ``Part``, or None for a tensor that it does not shard.
    """

    def __call__(self, name: str, tensor: Tensor, /) -> Part | None: ...
