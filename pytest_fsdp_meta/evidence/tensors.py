"""TODO."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

Region = tuple[tuple[int, int], ...]
"""The half-open runs of indices that a rank holds of one dimension of a tensor."""


@dataclass(frozen=True)
class MeshFacts:
    """A device mesh as one rank sees it; ``coordinate`` is None on a rank outside the mesh."""

    dims: tuple[str | None, ...]
    shape: tuple[int, ...]
    coordinate: tuple[int, ...] | None

    def __str__(self) -> str:
        return " x ".join(f"{name or 'unnamed'}={size}" for name, size in zip(self.dims, self.shape, strict=True))


@dataclass(frozen=True)
class TensorFacts:
    """One parameter or buffer on one rank.

    ``regions`` says, dimension by dimension of ``extent``, which global indices this rank holds. ``storage`` is equal
    for two tensors of one rank exactly when they are the same memory in one shape (None where there is none: meta,
    empty); ``identity`` is equal exactly when they are the same Python object. ``poisoned`` counts the elements that
    still hold the value that uninitialised memory was filled with (NaN, the integer maximum).
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    regions: tuple[Region, ...]
    dtype: str
    device: str
    requires_grad: bool = False
    persistent: bool = True
    placements: tuple[str, ...] | None = None
    mesh: MeshFacts | None = None
    storage: str | None = None
    identity: int = 0
    attributes: Mapping[str, str] = field(default_factory=dict)
    nan: int = 0
    poisoned: int = 0
    digest: str | None = None
    ddp: bool = False
    """Whether DistributedDataParallel or replicate() holds it: whole on every rank by intent, its gradients reduced."""
    flat: bool = False
    """Whether this rank holds a run of the elements of the tensor laid out as one row, and no block of it."""
    sharded_by: str = ""
    """Who sharded it, where it is no DTensor that says so by itself: the adapter's name."""
    managed: bool | None = None
    """Whether the registered parameter is the one that FSDP2 manages in its place; None where it manages none."""
    width: int = 0  # bytes per element
    backing: str | None = None  # equal where one storage is behind two tensors of a rank
    backing_bytes: int = 0  # the size of that storage; 0 for a mapped file, which is no memory
    unreadable: str = ""
    """Why torch could not read its elements (sparse, packed, without storage); nothing is known of its values then."""

    @property
    def on_meta(self) -> bool:
        return self.device.split(":")[0] == "meta"

    @property
    def numel(self) -> int:
        """Elements of the local shard."""
        return prod(self.local_shape)

    @property
    def extent(self) -> tuple[int, ...]:
        """The shape that ``regions`` are indices of: where ``flat``, of the tensor laid out as one row."""
        return (prod(self.shape),) if self.flat else self.shape

    @property
    def whole(self) -> bool:
        """Whether this rank holds all of it."""
        return all(
            sum(stop - start for start, stop in runs) == size
            for runs, size in zip(self.regions, self.extent, strict=False)  # on disk there are no regions
        )


@dataclass(frozen=True)
class OptimizerFacts:
    """``held``: how often its groups hold each parameter of the model; ``stepped``: those that it keeps a state of.

    ``others`` are (dtype, whether without memory) of what it holds and the model does not register.
    """

    kind: str
    held: Mapping[str, int] = field(default_factory=dict)
    others: tuple[tuple[str, bool], ...] = ()
    stepped: frozenset[str] = frozenset()


@dataclass(frozen=True)
class RankInventory:
    """Every parameter and buffer of one rank, in the order in which the model names them."""

    rank: int
    device: str
    tensors: tuple[TensorFacts, ...]
    poison_kept: bool = True
    """False when the loader switched off what fills uninitialised memory."""
    computes_in: tuple[str, ...] = ()
    """The dtypes that mixed-precision policies cast parameters to for the forward, where they name one."""
    reduces_in: tuple[str, ...] = ()
    """The dtypes that such policies reduce gradients in."""
    optimizer: OptimizerFacts | None = None
    """Of an optimizer that the loader built itself."""
    custom_attributes: tuple[str, ...] = ()
    """The names of all that tensors carry; noted where attributes are asked for."""

    @cached_property
    def by_name(self) -> dict[str, TensorFacts]:
        return {tensor.name: tensor for tensor in self.tensors}

    def ties(self) -> tuple[tuple[str, ...], ...]:
        """Groups of parameter names that are one object or one memory."""
        groups: dict[object, list[str]] = {}
        alias: dict[int, object] = {}
        for tensor in self.tensors:
            if tensor.kind == "parameter":
                key = alias.setdefault(tensor.identity, tensor.storage or tensor.identity)
                groups.setdefault(key, []).append(tensor.name)
        return tuple(tuple(names) for names in groups.values() if len(names) > 1)

    @cached_property
    def tied_with(self) -> dict[str, frozenset[str]]:
        """The group of each parameter that is tied, itself included."""
        return {name: frozenset(group) for group in self.ties() for name in group}
