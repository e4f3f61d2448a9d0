"""Memory: a rank keeps its shards, and never holds what sharding is there to spare it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod

from pytest_fsdp_meta.catalogue.checks.structure import MANIFEST
from pytest_fsdp_meta.catalogue.findings import Explanation, Finding, Mismatch
from pytest_fsdp_meta.catalogue.registry import check
from pytest_fsdp_meta.catalogue.view import NotJudged, View
from pytest_fsdp_meta.evidence import RankInventory, TensorFacts, sharded_dim
from pytest_fsdp_meta.evidence.collectives import RankMemory
from pytest_fsdp_meta.text import name_ranks

FULL = 0.95
"""Of the elements of a model: as good as whole, for what is left out may be tiny, or not in the checkpoint."""
CLEARLY_LESS = 0.75
"""Of the whole model: a rank that keeps more than this is not relieved by sharding, whatever it held before."""
TINY = 2048
"""Bytes of a model among which those of temporaries cannot be told."""
FEW = 3
"""Of the largest tensors, which a loader may hold at one time: one whole, its copy, and the next."""
SLACK = 1.5
"""Of the bytes that explain a storage: flat buffers are padded; a full tensor is at least twice its shard."""
LEAST = 512
"""Bytes of a storage beyond what explains it, below which alignment is as good an explanation."""


@check(
    promise="the memory behind a shard is about as large as the shards in it: storages are counted, not views",
    family="memory",
    needs=["inventory"],
    after=[MANIFEST],
    why="A shard that is a view keeps the full tensor alive: the model is sharded, and saves nothing.",
    cause="the shard was cut out of the full tensor as a view, which keeps all of its storage alive",
    remedy="clone() the slice before it becomes the parameter, or read only the slice from the checkpoint",
    references=["axolotl-ai-cloud/axolotl#3597"],
    since="0.2",
)
def shard_bytes_within_budget(view: View) -> Iterable[Finding]:
    names = set(view.names("parameter"))
    if not any(_cut(t) for rank in view.evidence.inventory for t in rank.tensors):
        raise NotJudged("no parameter is sharded, so every rank keeps all of them")
    kept: dict[str, list[tuple[int, Mismatch]]] = {}
    details: dict[int, str] = {}
    for rank in view.evidence.inventory:
        for name, told, detail in _kept(rank):
            details[rank.rank] = detail
            if name in names:
                kept.setdefault(name, []).append((rank.rank, told))
    for name, by_rank in kept.items():
        for finding in view.broken(name, by_rank):
            yield replace(finding, detail=details[finding.ranks[0]])


def _kept(rank: RankInventory) -> Iterator[tuple[str, Mismatch, str]]:
    """The shards of a rank behind which much more is kept than they explain, with what the rank keeps in all."""
    behind: dict[str, list[TensorFacts]] = {}
    for tensor in rank.tensors:
        # What only an adapter knows lies in flat buffers, which whoever made them pads as they like.
        if tensor.backing is not None and tensor.backing_bytes and not tensor.sharded_by:
            behind.setdefault(tensor.backing, []).append(tensor)
    total = sum(tensors[0].backing_bytes for tensors in behind.values())
    sizes = [(tensors, tensors[0].backing_bytes, _explained(tensors)) for tensors in behind.values()]
    needed = sum(explained for _, _, explained in sizes)
    large = [(tensors, kept, explained) for tensors, kept, explained in sizes if kept > SLACK * explained]
    # Alignment explains a little behind one shard; what many shards of a small model keep adds up.
    if sum(kept - explained for _, kept, explained in large) <= LEAST:
        return
    detail = f"rank {rank.rank} keeps {total} bytes, and its tensors explain {needed}"
    for tensors, kept, explained in large:
        others = f", with {len(tensors) - 1} more in it" if len(tensors) > 1 else ""
        told = Mismatch(f"a storage of {kept} bytes behind its shard{others}", f"{explained} bytes")
        for tensor in filter(_cut, tensors):
            yield tensor.name, told, detail


def _cut(tensor: TensorFacts) -> bool:
    """Whether a rank holds, of a parameter, a part only."""
    return tensor.kind == "parameter" and tensor.numel < prod(tensor.shape)


def _explained(tensors: list[TensorFacts]) -> int:
    """The bytes of a storage that its tensors need, what is tied once; FSDP2 pads shards to equal sizes."""
    return sum({t.storage or t.name: t.width * max(t.numel, _padded(t)) for t in tensors}.values())


def _padded(tensor: TensorFacts) -> int:
    """Elements of the largest shard that any rank has."""
    shape = list(tensor.shape)
    for placement, ranks in zip(tensor.placements or (), tensor.mesh.shape if tensor.mesh else (), strict=True):
        if (dim := sharded_dim(placement)) is not None:
            shape[dim] = -(-shape[dim] // ranks)
    return prod(shape)


@dataclass(frozen=True)
class _Sizes:
    """The parameters in bytes and elements, and what one rank keeps of them."""

    whole: int
    elements: int
    largest: int
    """Of all tensors: buffers are copied as well."""
    kept: int
    buffers: int
    two: int
    """Elements of the two largest tensors: one that is read, and the one before it."""


BY_SLICES = "build it on meta, shard it, then to_empty() and read only the rank's own slices"


@check(
    promise="no rank ever holds the whole model while loading, unless declared; pages mapped from a file do not count",
    family="memory",
    needs=["inventory", "memory"],
    after=[MANIFEST],
    why="A loader that holds the whole model on a rank works until the model is one that needs sharding.",
    cause="the model was built or read whole on the rank, and sharded afterwards",
    remedy=f"{BY_SLICES}; or declare the ranks that mean it: Subject(whole_while_loading=(0,))",
    references=["huggingface/transformers#43749", "huggingface/transformers#45649"],
    since="0.2",
)
def load_peak_memory_bounded(view: View) -> Iterable[Finding]:
    memory, declared = view.evidence.memory or (), set(view.evidence.subject.whole_while_loading)
    sizes = {rank.rank: _sizes(rank) for rank in view.evidence.inventory}
    judged = [rank for rank, size in sizes.items() if size.kept <= CLEARLY_LESS * size.whole and size.whole]
    if not judged:
        raise NotJudged("every rank keeps the model, or nearly all of it: it has to be held while loading, too")
    if all(size.two >= FULL * size.elements or size.whole < TINY for size in sizes.values()):
        raise NotJudged(
            f"the model is no more than a tensor or two, or than {TINY} bytes: reading it is holding it whole"
        )
    if declared >= set(judged):
        raise NotJudged("Subject(whole_while_loading=...) declares that every rank may hold the whole model")
    held = {rank: _held_whole(memory[rank], sizes[rank]) for rank in judged if rank not in declared}
    ranks = tuple(rank for rank, whole in held.items() if whole)
    if ranks:
        first = memory[ranks[0]]
        detail = f"rank {ranks[0]} held {max(first.host, first.device or 0)} bytes at one time; the model has "
        detail += f"{sizes[ranks[0]].whole}, of which the rank keeps {sizes[ranks[0]].kept}"
        expected = "a few tensors at a time beside the shards"
        yield Finding(None, ranks, "held whole while loading", expected, detail, **_meant({*ranks, *declared}, sizes))
    unknown = [rank for rank, whole in held.items() if whole is None]
    if unknown:
        raise NotJudged(
            f"{name_ranks(unknown)}: as many bytes as the model has were alive at one time, which may as well be "
            "copies of shards; more ranks tell them apart"
        )


def _meant(ranks: Collection[int], world: Collection[int]) -> Explanation:
    declared = "True" if len(ranks) == len(world) else str(tuple(sorted(ranks)))
    return {"remedy": f"{BY_SLICES}; or declare the ranks that mean it: Subject(whole_while_loading={declared})"}


def _held_whole(memory: RankMemory, sizes: _Sizes) -> bool | None:
    """None where the sizes of what was alive do not tell the whole model from copies of shards."""
    few = FEW * sizes.largest
    if memory.whole >= FULL * sizes.elements or memory.beyond > sizes.kept + few:
        return True
    device = (memory.device or 0) - sizes.buffers
    if device >= sizes.whole:
        return True if device > 2 * sizes.kept + few else None
    return None if memory.beyond > few else False


def _sizes(rank: RankInventory) -> _Sizes:
    distinct = {t.storage or t.identity: t for t in rank.tensors if t.kind == "parameter"}.values()
    whole = [prod(tensor.shape) * tensor.width for tensor in distinct]
    buffers = [t.numel * t.width for t in rank.tensors if t.kind == "buffer" and not t.on_meta]
    return _Sizes(
        whole=sum(whole),
        elements=sum(prod(tensor.shape) for tensor in distinct),
        largest=max([*whole, *buffers], default=0),
        kept=sum(tensor.numel * tensor.width for tensor in distinct if not tensor.on_meta),
        buffers=sum(buffers),
        two=sum(sorted(prod(tensor.shape) for tensor in distinct)[-2:]),
    )
