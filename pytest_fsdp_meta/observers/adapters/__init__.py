"""Which part of a tensor this rank holds, whoever sharded it.

DTensors and plain tensors say so by themselves. For others there is one small protocol, ``Adapter``, with one file per
way of sharding here, and authors bring theirs as ``Subject(adapter=...)``. Observers ask ``lookup.Parts`` and nothing
else. No torch is imported here: this is what authors import.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Protocol

from pytest_fsdp_meta.evidence import MeshFacts, Region

if TYPE_CHECKING:
    from torch import Tensor


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
        if not len(start) == len(shape) == local.ndim:
            raise ValueError(
                f"start={tuple(start)} and shape={tuple(shape)} should have one entry for each of the "
                f"{local.ndim} dims of the local {tuple(local.shape)}"
            )
        regions = tuple(
            _region(first, size, whole) for first, size, whole in zip(start, local.shape, shape, strict=True)
        )
        return cls(local, tuple(shape), regions, by=by)

    @classmethod
    def run(cls, local: Tensor, shape: Sequence[int], start: int, by: str = "adapter") -> Part:
        """``local`` is the run of elements from number ``start`` of the tensor laid out as one row."""
        return cls(local.reshape(-1), tuple(shape), (_region(start, local.numel(), prod(shape)),), flat=True, by=by)


def _region(start: int, size: int, whole: int) -> Region:
    if size and not 0 <= start <= start + size <= whole:
        raise ValueError(f"indices {start} to {start + size} are not within the {whole} of the whole tensor")
    return ((start, start + size),) if size else ()


class Adapter(Protocol):
    """Says which part of a parameter or buffer this rank holds; None for one that it knows nothing of.

    ``name`` is the FQN as findings tell it.
    """

    def __call__(self, name: str, tensor: Tensor, /) -> Part | None: ...
