"""Check that a rank keeps the memory of its own shards only, and never holds the whole model while loading."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod

from pytest_fsdp_meta.checks.memory.facts import COPIES, RankMemory
from pytest_fsdp_meta.checks.structure.judge import MANIFEST
from pytest_fsdp_meta.evidence import RankInventory, TensorFacts, sharded_dim
from pytest_fsdp_meta.judging.families import memory_check
from pytest_fsdp_meta.judging.findings import Explanation, Finding, Mismatch
from pytest_fsdp_meta.judging.view import NotJudged, View
from pytest_fsdp_meta.text import counted, name_ranks

FULL = 0.95
"""Fraction of a model's elements that counts as all: tiny tensors, or ones not in the checkpoint, may be absent."""
CLEARLY_LESS = 0.75
"""Fraction of a model; on ranks that keep more than this, sharding saves too little to judge what they held before."""
TINY = 2048
"""Bytes; in a smaller model, parameters cannot be distinguished from temporaries."""
FEW = 3
"""Number of largest tensors that a loader may hold at a time: a full tensor, its copy, and the next one."""
SLACK = 1.5
"""Factor by which a storage may exceed its tensors: flat buffers are padded; a full tensor is at least 2 shards."""
LEAST = 512
"""Bytes by which storages may exceed their tensors in total; alignment explains less."""


@memory_check(
    promise="the storage behind a shard is about as large as the shards in it, even if the shard is a view",
    after=[MANIFEST],
    why="A shard that is a view keeps the full tensor alive: the model is sharded but saves no memory.",
    cause="the shard is a view of the full tensor, which keeps the whole storage alive",
    remedy="clone() the slice before it becomes the parameter, or read only the slice from the checkpoint",
    references=["axolotl-ai-cloud/axolotl#3597"],
)
def shard_bytes_within_budget(view: View) -> Iterable[Finding]:
    names = set(view.names("parameter"))
    if not any(_cut(t) for rank in view.evidence.inventory for t in rank.tensors):
        raise NotJudged("no parameter is sharded")
    mismatches: dict[str, list[tuple[int, Mismatch]]] = {}
    details: dict[int, str] = {}
    for rank in view.evidence.inventory:
        for name, mismatch, detail in _oversized(rank):
            details[rank.rank] = detail
            if name in names:
                mismatches.setdefault(name, []).append((rank.rank, mismatch))
    for name, by_rank in mismatches.items():
        for finding in view.findings_for(name, by_rank):
            yield replace(finding, detail=details[finding.ranks[0]])


def _oversized(rank: RankInventory) -> Iterator[tuple[str, Mismatch, str]]:
    """Find the shards of a rank whose storages are much larger than needed, with a summary of the rank's memory."""
    behind: dict[str, list[TensorFacts]] = {}
    for tensor in rank.tensors:
        # Shards that only an adapter describes are in flat buffers, whose padding is unknown.
        if tensor.backing is not None and tensor.backing_bytes and not tensor.sharded_by:
            behind.setdefault(tensor.backing, []).append(tensor)
    total = sum(tensors[0].backing_bytes for tensors in behind.values())
    sizes = [(tensors, tensors[0].backing_bytes, _needed(tensors)) for tensors in behind.values()]
    needed_in_all = sum(needed for _, _, needed in sizes)
    large = [(tensors, kept, needed) for tensors, kept, needed in sizes if kept > SLACK * needed]
    # Alignment explains a small excess of one storage; over many shards of a small model it adds up.
    if sum(kept - needed for _, kept, needed in large) <= LEAST:
        return
    detail = f"rank {rank.rank} keeps {total} bytes in total; its tensors need {needed_in_all}"
    for tensors, kept, needed in large:
        others = f", shared with {counted(len(tensors) - 1, 'more tensor')}" if len(tensors) > 1 else ""
        mismatch = Mismatch(f"a storage of {kept} bytes behind its shard{others}", f"{needed} bytes")
        for tensor in filter(_cut, tensors):
            yield tensor.name, mismatch, detail


def _cut(tensor: TensorFacts) -> bool:
    """Return whether the tensor is a parameter and the rank holds only a part of it."""
    return tensor.kind == "parameter" and tensor.numel < prod(tensor.shape)


def _needed(tensors: list[TensorFacts]) -> int:
    """Return the bytes that the tensors in a storage need; tied ones count once, FSDP2 pads shards to equal sizes."""
    return sum({t.storage or t.name: t.width * max(t.numel, _padded(t)) for t in tensors}.values())


def _padded(tensor: TensorFacts) -> int:
    """Return the number of elements in the largest shard of any rank."""
    shape = list(tensor.shape)
    for placement, ranks in zip(tensor.placements or (), tensor.mesh.shape if tensor.mesh else (), strict=True):
        if (dim := sharded_dim(placement)) is not None:
            shape[dim] = -(-shape[dim] // ranks)
    return prod(shape)


@dataclass(frozen=True)
class _Sizes:
    """Sizes of a model (bytes unless noted), and of the part that one rank keeps."""

    whole: int
    elements: int
    """Number of elements of all parameters."""
    largest: int
    """The largest tensor, buffers included: they are copied while loading as well."""
    kept: int
    """The parameters that the rank keeps after loading."""
    two: int
    """Number of elements of the two largest tensors: the one being read and the one before it."""


BY_SLICES = "build the model on meta, shard it, call to_empty(), then read only the rank's own slices"


@memory_check(
    promise="no rank holds the whole model while loading, unless declared (memory-mapped files do not count)",
    needs=["inventory", "memory"],
    after=[MANIFEST],
    why="A loader that holds the whole model on a rank fails for models that need sharding.",
    cause="the model was built or read as a whole on the rank, and sharded afterwards",
    remedy=f"{BY_SLICES}; or declare it as intended: Subject(whole_while_loading=(0,))",
    references=["huggingface/transformers#43749", "huggingface/transformers#45649"],
)
def load_peak_memory_bounded(view: View) -> Iterable[Finding]:
    memory, declared = view.evidence.memory or (), set(view.evidence.subject.whole_while_loading)
    sizes = {rank.rank: _sizes(rank) for rank in view.evidence.inventory}
    judged = [rank for rank, size in sizes.items() if size.kept <= CLEARLY_LESS * size.whole and size.whole]
    if not judged:
        raise NotJudged("every rank keeps nearly all of the model, so every rank has to hold it while loading")
    if all(size.two >= FULL * size.elements or size.whole < TINY for size in sizes.values()):
        raise NotJudged(
            f"the model has one or two large tensors or less than {TINY} bytes, so reading it holds it whole"
        )
    if declared >= set(judged):
        raise NotJudged("Subject(whole_while_loading=...) allows every rank to hold the whole model")
    held = {rank: _held_whole(memory[rank], sizes[rank]) for rank in judged if rank not in declared}
    ranks = tuple(rank for rank, whole in held.items() if whole)
    if ranks:
        first = memory[ranks[0]]
        detail = f"rank {ranks[0]} held up to {max(first.host, first.device or 0)} bytes; the model has "
        detail += f"{sizes[ranks[0]].whole} bytes, of which the rank keeps {sizes[ranks[0]].kept}"
        expected = "a few full tensors at a time besides the shards"
        advice = _advise({*ranks, *declared}, sizes)
        yield Finding(None, ranks, "held as a whole while loading", expected, detail, **advice)
    unknown = [rank for rank, whole in held.items() if whole is None]
    if unknown:
        raise NotJudged(
            f"on {name_ranks(unknown)}, as many bytes as the model has were alive at a time, but they may be copies "
            "of shards; more ranks make the difference clear"
        )


def _advise(ranks: Collection[int], world: Collection[int]) -> Explanation:
    declared = "True" if len(ranks) == len(world) else str(tuple(sorted(ranks)))
    return {"remedy": f"{BY_SLICES}; or declare it as intended: Subject(whole_while_loading={declared})"}


def _held_whole(memory: RankMemory, sizes: _Sizes) -> bool | None:
    """Return whether the rank held the whole model; None if it may have been copies of shards.

    What the allocator of a device counts says less: the state of an optimizer, and what libraries of CUDA keep.
    """
    few = FEW * sizes.largest
    if memory.whole >= FULL * sizes.elements or memory.beyond > sizes.kept + few:
        return True
    return None if memory.beyond > few else False


def load_limits(rank: RankInventory) -> tuple[int, int]:
    """Return the bytes of the whole model, and those that this rank may hold while loading."""
    sizes = _sizes(rank)
    return sizes.whole, max(sizes.whole, (COPIES + 1) * sizes.kept + FEW * sizes.largest)


def _sizes(rank: RankInventory) -> _Sizes:
    distinct = {t.storage or t.identity: t for t in rank.tensors if t.kind == "parameter"}.values()
    whole = [prod(tensor.shape) * tensor.width for tensor in distinct]
    buffers = [t.numel * t.width for t in rank.tensors if t.kind == "buffer" and not t.on_meta]
    return _Sizes(
        whole=sum(whole),
        elements=sum(prod(tensor.shape) for tensor in distinct),
        largest=max([*whole, *buffers], default=0),
        kept=sum(tensor.numel * tensor.width for tensor in distinct if not tensor.on_meta),
        two=sum(sorted(prod(tensor.shape) for tensor in distinct)[-2:]),
    )
