"""Evidence about one rank's model: each parameter and buffer, the mesh it lies on, and the optimizer that holds it.

Also which indices of a global tensor a rank holds, from mesh coordinates and without torch, whose private helpers
return one offset per dimension. A strided shard (FSDP2 over TP on the same dim) has no such offset: it holds several
separate runs.
"""

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


def regions(
    shape: Sequence[int], shards: Sequence[tuple[int, int] | None], mesh_shape: Sequence[int], coordinate: Sequence[int]
) -> tuple[Region, ...]:
    """Return the runs of every dimension that the rank at ``coordinate`` holds.

    ``shards`` has one entry per mesh dimension: None where the tensor is not sharded over it, else the tensor dim and
    the split factor (1 for an ordinary shard). Each dim is cut into chunks of ceil(size / ranks) as in torch, so the
    last ranks may hold less, or nothing.
    """
    held: list[Region] = [((0, size),) if size else () for size in shape]
    for mesh_dim, dim, factor in _cuts(shards, mesh_shape):
        pieces = [_chunk(held[dim], factor, number) for number in range(factor)]
        own = [_chunk(piece, mesh_shape[mesh_dim], coordinate[mesh_dim]) for piece in pieces]
        held[dim] = join_runs([run for runs in own for run in runs])
    return tuple(held)


def _cuts(shards: Sequence[tuple[int, int] | None], mesh_shape: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return (mesh dimension, tensor dim, pieces to cut each of) in the order in which the tensor is cut.

    A strided shard means that mesh dimensions to its right cut first, into as many pieces as its split factor; FSDP2
    creates it that way. Reading the placements from left to right instead (cut every piece, then join) gives the same
    result for even sizes only.
    """
    order: list[tuple[int, int, int]] = []
    for mesh_dim, shard in reversed(list(enumerate(shards))):
        if shard is None:
            continue
        dim, factor = shard
        before, pieces = 0, 1
        while before < len(order) and pieces < factor:
            other, cut, _ = order[before]
            pieces *= mesh_shape[other] if cut == dim else 1
            before += 1
        order.insert(*((before, (mesh_dim, dim, 1)) if pieces == factor else (0, (mesh_dim, dim, factor))))
    return order


def _chunk(runs: Region, count: int, index: int) -> Region:
    """Return chunk ``index`` of ``count`` chunks of these runs, as ``torch.chunk`` cuts them."""
    total = sum(stop - start for start, stop in runs)
    size = -(-total // count)
    return slice_runs(runs, index * size, (index + 1) * size)


def slice_runs(runs: Region, first: int, last: int) -> Region:
    """Return the runs that cover the indices from position ``first`` up to position ``last`` of these runs."""
    taken, position = [], 0
    for start, stop in runs:
        low, high = max(first, position), min(last, position + stop - start)
        if low < high:
            taken.append((start + low - position, start + high - position))
        position += stop - start
    return tuple(taken)
