"""Evidence about one rank's model: each parameter and buffer, the mesh it lies on, and the optimizer that holds it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

Region = tuple[tuple[int, int], ...]
"""The half-open index ranges that a rank holds along one dim of a tensor."""
Dims = tuple[tuple[str | None, int], ...]
"""The name and the size of each dimension of a mesh."""


def describe_mesh(dims: Iterable[tuple[str | None, int]]) -> str:
    """Return a text such as "dp_replicate=2 x dp_shard=4"."""
    return " x ".join(f"{name or 'unnamed'}={size}" for name, size in dims)


@dataclass(frozen=True)
class MeshFacts:
    """A device mesh as one rank sees it; ``coordinate`` is None on a rank outside the mesh."""

    dims: tuple[str | None, ...]
    shape: tuple[int, ...]
    coordinate: tuple[int, ...] | None

    @property
    def pairs(self) -> Dims:
        """The name and the size of each dimension."""
        return tuple(zip(self.dims, self.shape, strict=True))

    def __str__(self) -> str:
        return describe_mesh(self.pairs)


@dataclass(frozen=True)
class PartFacts:
    """Where some elements of a tensor lie: ``regions`` index a tensor of this shape, or its elements if ``flat``."""

    shape: tuple[int, ...]
    regions: tuple[Region, ...]
    flat: bool = False

    @property
    def whole(self) -> bool:
        """Whether the part has all elements of the tensor."""
        return _covers(self.regions, (prod(self.shape),) if self.flat else self.shape)


@dataclass(frozen=True)
class TensorFacts:
    """One parameter or buffer on one rank.

    ``regions`` has, for each dim of ``extent``, the global indices that this rank holds. Two tensors of one rank have
    the same ``storage`` exactly when they are the same memory in the same shape; it is None for a tensor without
    memory (on meta, or empty). They have the same ``identity`` exactly when they are the same Python object.
    ``poisoned`` is the number of elements that still have the value with which uninitialised memory was filled: NaN,
    or the largest integer of the dtype (True for bool).
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
    """Whether DistributedDataParallel or ``replicate()`` manages it: replicated on purpose, with reduced gradients."""
    flat: bool = False
    """Whether this rank holds a run of elements of the flattened tensor instead of a block."""
    sharded_by: str = ""
    """The adapter that describes its sharding; empty for DTensors and plain tensors."""
    managed: bool | None = None
    """Whether the registered parameter is the object that FSDP2 manages; None for parameters outside FSDP2."""
    width: int = 0
    """Bytes per element."""
    backing: str | None = None
    """Equal for two tensors of one rank that share one storage."""
    backing_bytes: int = 0
    """The size of that storage in bytes; 0 for a memory-mapped file, which takes no memory of its own."""
    unreadable: str = ""
    """Why torch could not read its elements (sparse, packed, without storage); its values are then unknown."""

    @property
    def on_meta(self) -> bool:
        return self.device.split(":")[0] == "meta"

    @property
    def numel(self) -> int:
        """The number of elements in the local shard."""
        return prod(self.local_shape)

    @property
    def extent(self) -> tuple[int, ...]:
        """The shape that ``regions`` index into: the global shape, or one dim with all elements if ``flat``."""
        return (prod(self.shape),) if self.flat else self.shape

    @property
    def whole(self) -> bool:
        """Whether this rank holds all elements of the tensor."""
        return _covers(self.regions, self.extent)

    @property
    def held(self) -> tuple[tuple[Region, ...], ...]:
        """The elements that this rank holds, as regions of ``shape``: equal for a block and a run of the same ones."""
        if not self.flat:
            return (self.regions,)
        return tuple(tuple((span,) for span in box) for run in self.regions[0] for box in boxes(self.shape, *run))


def boxes(shape: Sequence[int], first: int, last: int) -> list[Region]:
    """Return the blocks, in order, that make up elements ``first`` to ``last`` of a tensor laid out as one row.

    A block is one run of indices per dim. There are at most two blocks for every dim but the last.
    """
    if first >= last:
        return []
    if len(shape) < 2:
        return [((first, last),) if shape else ()]
    row = prod(shape[1:])
    top, bottom = -(-first // row), last // row
    if top > bottom:  # within one row
        return [((bottom, bottom + 1), *box) for box in boxes(shape[1:], first - bottom * row, last - bottom * row)]
    head = [((top - 1, top), *box) for box in boxes(shape[1:], first - (top - 1) * row, row)] if first % row else []
    body = [((top, bottom), *((0, size) for size in shape[1:]))] if top < bottom else []
    tail = [((bottom, bottom + 1), *box) for box in boxes(shape[1:], 0, last - bottom * row)]
    return [*head, *body, *tail]


def join_runs(runs: Iterable[tuple[int, int]]) -> Region:
    """Return the runs with neighbours joined: ((0, 2), (2, 4)) is ((0, 4),)."""
    joined: list[tuple[int, int]] = []
    for start, stop in runs:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(joined)


def _covers(regions: tuple[Region, ...], extent: tuple[int, ...]) -> bool:
    return all(
        sum(stop - start for start, stop in runs) == size
        for runs, size in zip(regions, extent, strict=False)  # tensors read from a checkpoint have no regions
    )


@dataclass(frozen=True)
class OptimizerFacts:
    """An optimizer and the tensors that it holds.

    ``held`` counts how often its parameter groups contain each parameter of the model. ``stepped`` names the
    parameters for which it has state. ``others`` describes the tensors that it holds although the model does not
    register them, as (dtype, whether it has no memory). ``counted`` are the steps that an optimizer
    which the loader built has counted, if all other state of it is zero. ``renamed`` are the parameters that a wrapper
    gives another name, which the function that builds the optimizer may have seen.
    """

    kind: str
    held: Mapping[str, int] = field(default_factory=dict)
    others: tuple[tuple[str, bool], ...] = ()
    stepped: frozenset[str] = frozenset()
    counted: float = 0.0
    renamed: frozenset[str] = frozenset()
    settings: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """The settings of the group that each parameter is in, before the training, such as "weight_decay" -> "0.1"."""


@dataclass(frozen=True)
class RankInventory:
    """All parameters and buffers of one rank, in the order in which the model lists them."""

    rank: int
    device: str
    tensors: tuple[TensorFacts, ...]
    poison_kept: bool = True
    """False if the loader switched off the filling of uninitialised memory."""
    computes_in: tuple[str, ...] = ()
    """The dtypes to which mixed-precision policies cast parameters for the forward."""
    reduces_in: tuple[str, ...] = ()
    """The dtypes in which mixed-precision policies reduce gradients."""
    optimizer: OptimizerFacts | None = None
    """The optimizer that the loader built itself, or that which it trained with if this is taken after the steps."""
    compiled: bool = False
    """Whether ``torch.compile`` has wrapped a module of it."""
    evaluating: tuple[str, ...] = ()
    """The modules of frozen parts that the loader has put into ``eval()``, beside others that train."""
    custom_attributes: tuple[str, ...] = ()
    """The names of all custom attributes on parameters; recorded only if a check asks for attributes."""

    @cached_property
    def by_name(self) -> dict[str, TensorFacts]:
        return {tensor.name: tensor for tensor in self.tensors}

    def ties(self) -> tuple[tuple[str, ...], ...]:
        """Return the groups of parameter names that are one object or share one memory."""
        groups: dict[object, list[str]] = {}
        alias: dict[int, object] = {}
        for tensor in self.tensors:
            if tensor.kind == "parameter":
                key = alias.setdefault(tensor.identity, tensor.storage or tensor.identity)
                groups.setdefault(key, []).append(tensor.name)
        return tuple(tuple(names) for names in groups.values() if len(names) > 1)

    @cached_property
    def tied_with(self) -> dict[str, frozenset[str]]:
        """Map each tied parameter to its group, itself included."""
        return {name: frozenset(group) for group in self.ties() for name in group}
