"""Check what ranks hold: their own shards, never the whole model while loading, and one group at a time in a step."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import prod

from pytest_fsdp_meta.checks.memory.facts import COPIES, GatheredGroup, RankMemory, StepMemory
from pytest_fsdp_meta.checks.structure.judge import MANIFEST
from pytest_fsdp_meta.evidence import RankInventory, TensorFacts, sharded_dim, splits_experts
from pytest_fsdp_meta.judging.findings import Explanation, Finding, Mismatch
from pytest_fsdp_meta.judging.registry import memory_check
from pytest_fsdp_meta.judging.view import Differs, NotJudged, PartlyJudged, View, ranks_by
from pytest_fsdp_meta.text import counted, fold_names, grouped, name_ranks

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
LEAST_EXCESS = 512
"""Bytes by which storages may exceed their tensors in total; alignment explains less."""
MOST_OF_THE_MODEL = 0.5
"""Fraction of the bytes of all parameters; blocks with less than this are not what decides how much a step holds."""
ACTIVATIONS = 1.5
"""How much more than the reference a rank may keep for the same rows. Right loaders of transformers' models keep up to
1.1 times as much: DTensors save redistributed copies, and casts save both dtypes."""
LEAST_ACTIVATIONS = 1024
"""Bytes by which a rank may always keep more; in a model as small as that, scalars and indices count."""
BLOCK = re.compile(r"^(?P<stack>(?:.*?\.)?)(?P<index>[0-9]+)\.(?P<rest>.+)$")
"""The name of a tensor in a numbered block, such as "model.layers." "3" "mlp.weight"; inner numbers are in the rest."""


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
    # Shards that only an adapter describes are in flat buffers, whose padding is unknown.
    known = (t for t in rank.tensors if t.backing is not None and t.backing_bytes and not t.sharded_by)
    behind = grouped((tensor.backing, tensor) for tensor in known)
    total = sum(tensors[0].backing_bytes for tensors in behind.values())
    # Tied ones count once, and FSDP2 pads shards to equal sizes.
    due = [{t.storage or t.name: t.width * max(t.numel, _padded(t)) for t in own} for own in behind.values()]
    sizes = [(own, own[0].backing_bytes, sum(tied.values())) for own, tied in zip(behind.values(), due, strict=True)]
    needed_in_all = sum(needed for _, _, needed in sizes)
    large = [(tensors, kept, needed) for tensors, kept, needed in sizes if kept > SLACK * needed]
    # Alignment explains a small excess of one storage; over many shards of a small model it adds up.
    if sum(kept - needed for _, kept, needed in large) <= LEAST_EXCESS:
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
    cause="the model was built or read as a whole on the rank, or others were loaded beside it",
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
        meant = {*ranks, *declared}
        whole = "True" if len(meant) == len(sizes) else str(tuple(sorted(meant)))
        remedy = f"{BY_SLICES}; if a second model should stay whole on each rank, return one module that holds both; "
        remedy += f"or declare it as intended: Subject(whole_while_loading={whole})"
        yield Finding(None, ranks, "held as a whole while loading", expected, detail, remedy=remedy)
    unknown = [rank for rank, whole in held.items() if whole is None]
    if unknown:
        raise Differs(
            f"on {name_ranks(unknown)}, as many bytes as the model has were alive at a time; they may be copies of "
            "shards, which more ranks would tell from the whole model"
        )


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


@memory_check(
    promise="a training step gathers one group at a time where the model has repeated blocks, and saves about as "
    "many activations for backward as the reference does for the same rows, or fewer",
    needs=["inventory", "training"],
    fields=["batch"],
    uses=["reference"],
    after=[MANIFEST],
    why="Results are right, and the step needs the memory that sharding or activation checkpointing should have saved: "
    "it fails first on the model that is too large for one device.",
    cause="fully_shard() was applied to the root only, or the names of the classes to wrap match nothing",
    remedy="call fully_shard() on each block, and then on the root; Accelerator.prepare() does it with "
    "auto_wrap_policy='TRANSFORMER_BASED_WRAP', and other functions may ignore that policy; if the model is small "
    "enough to be gathered as a whole, skip this check with that reason",
    references=["huggingface/accelerate#4172", "NVIDIA-NeMo/Automodel#3708"],
)
def step_memory_bounded(view: View) -> Iterable[Finding]:
    ranks = [run.memory for run in view.evidence.training or ()]
    found = ((rank, text) for rank, memory in enumerate(ranks) for text in _describe_stacks(view, rank, memory.groups))
    for actual, where in ranks_by(found).items():
        yield Finding(None, where, actual, "gathered one block, or a few, at a time")
    reference = view.evidence.reference
    if reference is None or not reference.memory:
        short = [run.accumulation or run.short for run in view.evidence.training or ()]
        problem = next((one.problem for one in short if one is not None and one.problem), "")
        why = f": batch(0): {problem}; give it more rows" if problem else ", because no reference was trained"
        raise PartlyJudged(f"what backward keeps has nothing to be compared with{why}")
    if problem := next((memory.problem for memory in (*ranks, *reference.memory) if memory.kept is None), ""):
        raise PartlyJudged(f"what backward keeps is not compared: {problem}")
    yield from _kept_too_much(view, ranks, reference.memory)


@dataclass(frozen=True, eq=False)
class Stack:
    """The blocks of one list of modules that have the same tensors, such as all layers of a transformer.

    A block has modules inside: bare layers in a list are too small to be groups of their own.
    """

    name: str
    blocks: Mapping[str, frozenset[str]]
    """Index of a block -> the names of its tensors."""


def _describe_stacks(view: View, rank: int, groups: Sequence[GatheredGroup]) -> Iterator[str]:
    """Describe the stacks whose blocks a group gathers all at once, if they are most of the parameters."""
    tensors, stacks = view.evidence.inventory[rank].by_name, list(stacks_of(view.evidence.inventory[rank]))

    def count_bytes(names: Iterable[str]) -> int:
        held = {tensors[name].storage or name: tensors[name] for name in names if name in tensors}.values()
        return sum(prod(tensor.shape) * tensor.width for tensor in held)

    sharing = [frozenset(group.parameters) for group in groups if group.ranks > 1]
    shared = count_bytes(name for own in sharing for name in own)
    whole = count_bytes(name for name, tensor in tensors.items() if tensor.kind == "parameter")
    for own in sharing:
        gathered = [stack for stack in stacks if not any(map(own.isdisjoint, stack.blocks.values()))]
        sizes = {stack: count_bytes(own.intersection(chain(*stack.blocks.values()))) for stack in gathered}
        # An encoder and a decoder are about half each; adapters are little.
        if sum(sizes.values()) > MOST_OF_THE_MODEL * whole:
            for stack, size in sizes.items():
                yield (
                    f"one FSDP group gathers all {len(stack.blocks)} blocks of {stack.name} at once: {size} of the "
                    f"{shared} bytes that the ranks share"
                )


def stacks_of(inventory: RankInventory) -> Iterator[Stack]:
    """Yield the stacks of two or more equal blocks that share no weight, which could not be groups of their own."""
    stacks: dict[str, dict[str, set[tuple[str, str, tuple[int, ...]]]]] = {}
    for tensor in inventory.tensors:
        if tensor.kind == "parameter" and (match := BLOCK.match(tensor.name)):
            block = stacks.setdefault(match["stack"], {}).setdefault(match["index"], set())
            block.add((tensor.name, match["rest"], tensor.shape))
    for stack, blocks in stacks.items():
        alike: dict[frozenset[tuple[str, tuple[int, ...]]], dict[str, frozenset[str]]] = {}
        for index, entries in blocks.items():
            names = frozenset(name for name, _, _ in entries)
            alike.setdefault(frozenset((rest, shape) for _, rest, shape in entries), {})[index] = names
        for signature, equal in alike.items():
            tied = {other for names in equal.values() for name in names for other in inventory.tied_with.get(name, ())}
            composed = any("." in rest for rest, _ in signature)
            if composed and len(equal) > 1 and not any(len(names & tied) for names in equal.values()):
                yield Stack(stack.rstrip(".") or "the model", equal)


def _kept_too_much(view: View, ranks: Sequence[StepMemory], reference: Sequence[StepMemory]) -> Iterator[Finding]:
    # Ranks with experts of their own may get more tokens than those of their rows.
    meshes = (tensor.mesh for rank in view.evidence.inventory for tensor in rank.tensors if tensor.mesh)
    everyone = bool(view.on_some_ranks) or any(splits_experts(dim) for mesh in meshes for dim in mesh.dims)
    runs = view.evidence.training or ()
    slices = [reference if everyone else reference[run.data_parallel[0] :][:1] or reference for run in runs]
    due = [sum(memory.kept or 0 for memory in own) for own in slices]
    kept = [memory.kept or 0 for memory in ranks]
    large = [rank for rank, size in enumerate(kept) if size > ACTIVATIONS * due[rank] + LEAST_ACTIVATIONS]
    if not large:
        return
    worst = max(large, key=lambda rank: kept[rank] - due[rank])
    where = name_ranks([worst])
    yield Finding(
        None,
        tuple(large),
        f"{kept[worst]} bytes of activations kept for the backward on {where}",
        f"at most {ACTIVATIONS} times the {due[worst]} bytes that the reference keeps for the same rows",
        _largest_excess(ranks[worst], slices[worst], where),
        **(_KEPT_BY_STEP if "train_step" in view.evidence.subject.declared else _KEPT),
    )


_KEPT: Explanation = {
    "cause": "activation checkpointing, which the reference has, is missing on the ranks, or wraps smaller parts of "
    "which each keeps its input; or a rank runs more rows than its own, such as those that its loss gathers",
    "remedy": "wrap each block as a whole, and before fully_shard(); give each rank its own rows; if the loss has to "
    "gather rows, skip this check with that reason",
}

_KEPT_BY_STEP: Explanation = {
    "cause": "train_step runs a further forward with gradients, as for a metric, and holds its outputs until the "
    f"backward; or {_KEPT['cause']}",
    "remedy": f"compute metrics from the outputs of the training, or under torch.no_grad(); {_KEPT['remedy']}",
}


def _largest_excess(memory: StepMemory, reference: Sequence[StepMemory], where: str) -> str:
    """Say which modules keep most beyond what those of the reference keep for the same rows."""
    due: dict[str, int] = {}
    for own in reference:
        for name, size in own.modules.items():
            due[name] = due.get(name, 0) + size
    excess = {name: size - due.get(name, 0) for name, size in memory.modules.items()}
    if not excess:
        return ""
    largest = [name for name, size in excess.items() if 2 * size > max(excess.values())]
    folded, name = next(iter(fold_names(largest).items()))
    more = f"{memory.modules[name]} bytes on {where}, {due.get(name, 0)} in the reference"
    return f"{folded or 'the loss, or the model outside of its modules,'} keeps much of it: {more}"
