"""Which part of a tensor this rank holds, whoever sharded it.

DTensors and plain tensors say so by themselves. For others there is one small protocol, ``Adapter``, with one file per
way of sharding here, and authors bring theirs as ``Subject(adapter=...)``. Observers ask ``lookup.Parts`` and nothing
else. No torch is imported here: this is what authors import.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from operator import index
from typing import TYPE_CHECKING, Protocol, SupportsIndex

from pytest_fsdp_meta.evidence import MeshFacts, Region

if TYPE_CHECKING:
    from torch import Tensor


class PartError(ValueError):
    """What ``Part.block`` or ``Part.run`` was given describes no part of a tensor."""


@dataclass(frozen=True)
class Part:
    """What this rank holds of one tensor. Make it with ``block`` or ``run``.

    ``regions`` says which global indices, dimension by dimension; where ``flat``, of the tensor laid out as one row of
    elements. ``by`` names who sharded it in messages; it is empty for DTensors and plain tensors.
    """

    local: Tensor
    shape: tuple[int, ...]
    """Of the whole tensor."""
    regions: tuple[Region, ...]
    flat: bool = False
    placements: tuple[str, ...] | None = None
    mesh: MeshFacts | None = None
    by: str = ""
    gradient: Tensor | None = None
    """This rank's part of the gradient, where it is not ``parameter.grad``."""

    @classmethod
    def block(cls, local: Tensor, shape: Sequence[int], start: Sequence[int], by: str = "adapter") -> Part:
        """``local`` is the block of a tensor of this shape whose first element has the global index ``start``."""
        _require_tensor(local)
        shape, start = _numbers("shape", shape), _numbers("start", start)
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
    def run(cls, local: Tensor, shape: Sequence[int], start: int, by: str = "adapter") -> Part:
        """``local`` is the run of elements from number ``start`` of the tensor laid out as one row."""
        _require_tensor(local)
        shape, first = _numbers("shape", shape), _number("start", start)
        return cls(local.reshape(-1), shape, (_region(first, local.numel(), prod(shape)),), flat=True, by=by)


def _require_tensor(local: object) -> None:
    from torch import Tensor

    if not isinstance(local, Tensor):
        raise PartError(f"local={_shown(local)} should be a tensor")


def _numbers(field: str, value: Sequence[SupportsIndex]) -> tuple[int, ...]:
    try:
        return tuple(index(one) for one in value)
    except TypeError:
        raise PartError(f"{field}={_shown(value)} should be a tuple of whole numbers, one for each dim") from None


def _number(field: str, value: SupportsIndex) -> int:
    try:
        return index(value)
    except TypeError:
        raise PartError(f"{field}={_shown(value)} should be one whole number") from None


def _shown(value: object) -> str:
    return " ".join(repr(value).split())[:60]


def _region(start: int, size: int, whole: int) -> Region:
    if size and not 0 <= start <= start + size <= whole:
        raise PartError(f"indices {start} to {start + size} are not within the {whole} of the whole tensor")
    return ((start, start + size),) if size else ()


class Adapter(Protocol):
    """Says which part of a parameter or buffer this rank holds; None for one that it knows nothing of.

    ``name`` is the FQN as findings tell it.
    """

    def __call__(self, name: str, tensor: Tensor, /) -> Part | None: ...
