"""Check the placements of every parameter, and that the shards of all ranks together cover each tensor once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, product
from math import prod

from pytest_fsdp_meta.checks.materialisation.judge import MANAGED
from pytest_fsdp_meta.checks.sharding.facts import mesh_and_place, order_of, possible_orders
from pytest_fsdp_meta.checks.structure.judge import MANIFEST, NAMES, SHAPES
from pytest_fsdp_meta.evidence import Region, TensorFacts, WorldFacts, sharded_dim
from pytest_fsdp_meta.judging.expectations import (
    PLAIN,
    compare_with_declared,
    compare_with_default,
    data_dims,
    describe_placements,
    is_split,
    is_whole,
)
from pytest_fsdp_meta.judging.findings import Explanation, Finding, Mismatch
from pytest_fsdp_meta.judging.registry import sharding_check
from pytest_fsdp_meta.judging.view import Differs, NotDeclared, PartlyJudged, View, majority, ranks_by
from pytest_fsdp_meta.text import counted, first_of, name_ranks


@sharding_check(
    promise="parameters declared unsharded are whole on every rank, as plain or replicated tensors",
    fields=["unsharded"],
    uses=["reference"],
    after=[MANIFEST, NAMES, SHAPES, MANAGED],
    why="A module that reads its weight outside forward, or without FSDP's hooks, gets a shard instead.",
    cause="the parameter is declared unsharded but was passed to fully_shard() or parallelize_module()",
    remedy="exclude it from fully_shard() (ignored_params), or remove it from Subject(unsharded=...)",
    references=["NVIDIA/Megatron-LM fsdp_no_shard"],
    simulated="too",
)
def unsharded_modules_stay_whole(view: View) -> Iterable[Finding]:
    unsharded = view.evidence.subject.unsharded
    if not unsharded:
        raise NotDeclared("unsharded")
    for name, facts in view.tensors("parameter", only=set(unsharded)):
        yield from view.findings_for(name, [(rank, None if is_whole(t) else _split(view, t)) for rank, t in facts])


def _split(view: View, tensor: TensorFacts) -> Mismatch:
    found = Mismatch(describe_placements(tensor), "whole on every rank, as declared")
    reference = view.evidence.reference
    own = reference.inventory.by_name.get(tensor.name) if reference is not None else None
    expected = own.attributes if own is not None else {}
    lost = [
        name for name in view.evidence.subject.kept_attributes if name in expected and name not in tensor.attributes
    ]
    if not lost:
        return found
    cause = f"it lost the attribute {lost[0]}, which may be what the loader reads to leave it whole"
    return found._replace(cause=cause, remedy="set the attribute again after the parameter is re-created, then shard")


@sharding_check(
    promise="no parameter is whole on every rank unless declared",
    after=[MANIFEST, NAMES, SHAPES, MANAGED],
    why="An unsharded parameter takes its full size on every rank, and its gradients may never be reduced.",
    cause="its module was not passed to fully_shard() or parallelize_module(), was ignored, or its mesh has one rank",
    remedy="shard it, or declare the intent with Subject(unsharded=...) or Subject(placements=...)",
    references=["huggingface/accelerate#2947", "verl-project/verl#6289"],
    simulated="too",
)
def nothing_left_unsharded(view: View) -> Iterable[Finding]:
    subject, size = view.evidence.subject, view.evidence.world.size
    declared = {*subject.unsharded, *subject.placements}
    dims = data_dims(view)
    replicated = []
    for name, facts in view.tensors("parameter"):
        if name in declared or _divided_by_name(view, name, facts) or not all(is_whole(t) for _, t in facts):
            continue
        mismatches = [(rank, compare_with_default(tensor, dims, size, ["shard"])) for rank, tensor in facts]
        if all(tensor.ddp for _, tensor in facts):
            replicated += [name] if any(mismatch for _, mismatch in mismatches) else []
        else:
            found = view.findings_for(name, _describe_plain(facts, mismatches))
            everywhere = name in subject.on_some_ranks and len(facts) == len(view.evidence.inventory)
            yield from (finding.explained_by(_ON_EVERY_RANK) for finding in found) if everywhere else found
    if replicated:
        raise Differs(
            f"DistributedDataParallel keeps {first_of(replicated)} whole; name the mesh dimension dp_replicate to "
            "declare it"
        )


_ON_EVERY_RANK: Explanation = {
    "cause": "Subject(on_some_ranks=...) declares that some ranks lack it, as experts of other ranks, and the loader "
    "creates it on every rank",
    "remedy": "create only the rank's own parts; or leave it out of on_some_ranks and shard it",
}


def _divided_by_name(view: View, name: str, facts: list[tuple[int, TensorFacts]]) -> bool:
    """Return whether ranks have other plain tensors instead of shards of the same ones, such as experts."""
    return name in view.on_some_ranks and all(tensor.placements is None for _, tensor in facts)


@sharding_check(
    promise="every parameter has the declared placements; by default it is replicated over dp_replicate and sharded "
    "over the other data-parallel mesh dimensions",
    after=[MANIFEST, NAMES, SHAPES, MANAGED, "unsharded_modules_stay_whole", "nothing_left_unsharded"],
    why="Shards on a wrong dim hold other elements; a forgotten mesh dimension leaves redundant, unreduced copies.",
    cause="its module was not passed to fully_shard() or parallelize_module(), was ignored, or was sharded on another "
    "mesh or dim",
    remedy="shard it, or declare the intent with Subject(unsharded=...) or Subject(placements=...)",
    references=["pytorch/pytorch#129229", "NVIDIA/TransformerEngine#2713"],
    simulated="too",
)
def dtensor_placements(view: View) -> Iterable[Finding]:
    dims, declared = data_dims(view), view.evidence.subject.placements
    for name, facts in view.tensors("parameter"):
        if name not in declared and (any(is_split(t) for _, t in facts) or _divided_by_name(view, name, facts)):
            continue  # there are no placements to compare
        mismatches = [(rank, _misplaced(view, tensor, dims)) for rank, tensor in facts]
        yield from view.findings_for(name, _describe_plain(facts, _add_disagreements(facts, mismatches)))


def _misplaced(view: View, tensor: TensorFacts, dims: dict[str | None, int]) -> Mismatch | None:
    subject, size = view.evidence.subject, view.evidence.world.size
    if tensor.name in subject.unsharded:
        return None
    declared = subject.placements.get(tensor.name)
    if declared is not None:
        return compare_with_declared(tensor, declared, size)
    return None if tensor.ddp else compare_with_default(tensor, dims, size)


Mismatches = list[tuple[int, Mismatch | None]]


def _add_disagreements(facts: list[tuple[int, TensorFacts]], mismatches: Mismatches) -> Mismatches:
    """Add the ranks whose placements are right by themselves but differ from those of most other ranks."""
    right = [
        (rank, describe_placements(t))
        for (rank, t), (_, mismatch) in zip(facts, mismatches, strict=True)
        if mismatch is None
    ]
    if not right:
        return mismatches
    usual = majority(right)
    others = name_ranks(rank for rank, place in right if place == usual)
    odd = {rank: Mismatch(place, f"{usual}, as on {others}", *_BRANCHES) for rank, place in right if place != usual}
    return [(rank, odd.get(rank, mismatch)) for rank, mismatch in mismatches]


def _describe_plain(
    facts: list[tuple[int, TensorFacts]], mismatches: Mismatches
) -> Iterator[tuple[int, Mismatch | None]]:
    """Call a plain tensor whole on every rank only if no rank has a DTensor."""
    plain = PLAIN if all(tensor.placements is None for _, tensor in facts) else "a plain tensor, not a DTensor"
    for rank, found in mismatches:
        if found is not None:
            actual, expected = (text.replace(PLAIN, plain) for text in (found.actual, found.expected))
            yield rank, found._replace(actual=actual, expected=expected)
        else:
            yield rank, None


_BRANCHES = (
    "sharding depends on the rank, or ranks created different meshes",
    "create one mesh of all ranks, and apply the same sharding plan on each",
)


Held = tuple[Region, ...]
"""The regions of one part that a rank holds, dim by dim."""
Pattern = tuple[tuple[int, ...], tuple[tuple[int, tuple[Held, ...]], ...], int]
"""The shape, the parts that each rank holds, and how many ranks should hold each element."""
Facts = list[tuple[int, TensorFacts]]
Flaw = tuple[tuple[int, ...], str, str]
"""Ranks, actual and expected of a finding."""


@sharding_check(
    promise="within each set of replicas, the shards of all ranks cover the global tensor exactly once",
    after=[
        MANIFEST,
        NAMES,
        SHAPES,
        MANAGED,
        "unsharded_modules_stay_whole",
        "nothing_left_unsharded",
        "dtensor_placements",
    ],
    why="Elements that no rank holds are lost when saving; for elements on two ranks, one copy overwrites the other.",
    cause="ranks created their own meshes, in which two ranks have the same coordinate or some have none",
    remedy="create one mesh of all ranks, in the same order on every rank",
    references=["NVIDIA/TransformerEngine#3207", "huggingface/transformers#48237"],
    simulated="too",
)
def shards_tile_the_tensor(view: View) -> Iterable[Finding]:
    world = view.evidence.world
    known: dict[Pattern, Flaw | None] = {}  # thousands of tensors share a few patterns
    by_hand, own_mesh = list[str](), list[str]()
    orders = possible_orders(world.mesh, view.evidence.inventory) if world.simulated else []
    for name, facts in view.tensors("parameter", "buffer"):
        shape = majority((rank, tensor.shape) for rank, tensor in facts)
        sizes = [(rank, _compare_sizes(tensor, shape)) for rank, tensor in facts]
        if any(mismatch for _, mismatch in sizes):
            yield from view.findings_for(name, sizes)
            continue
        if world.simulated:
            by_hand += [name] * _is_by_hand(facts)
            crowded = [*_crowded(name, facts, world)]
            # Where some ranks are numbered regularly, all are, and the chunks of DTensor's placements tile.
            own_mesh += [name] * (not crowded and order_of(facts, orders) is None)
            yield from crowded
            continue
        pattern = _pattern(facts)
        if pattern not in known:
            known[pattern] = _flaw(*pattern)
        flaw = known[pattern]
        if flaw is not None:
            yield Finding(name, *flaw, **(_BY_HAND if _is_by_hand(facts) else {}))
    if by_hand:
        raise PartlyJudged(f"the parts of {first_of(by_hand)} have no placements, so those of other ranks are unknown")
    if own_mesh:
        raise PartlyJudged(
            f"{first_of(own_mesh)}: on a mesh of the loader's own, in which the places of other ranks are unknown"
        )


def _crowded(name: str, facts: Facts, world: WorldFacts) -> Iterator[Finding]:
    """Find more ranks at one place of a tensor's mesh than the world has copies of the mesh."""
    for (mesh, coordinate), ranks in ranks_by((rank, mesh_and_place(tensor)) for rank, tensor in facts).items():
        most = max(1, world.size // prod(mesh.shape)) if mesh is not None else len(ranks)
        if coordinate is not None and len(ranks) > most:
            place = f"at {coordinate} of the mesh {mesh}"
            yield Finding(name, ranks, f"{len(ranks)} ranks are {place}", f"{counted(most, 'rank')} there")


def _outside(tensor: TensorFacts) -> bool:
    """Return whether the rank is not in the tensor's mesh, and so holds no part of it."""
    return tensor.mesh is not None and tensor.mesh.coordinate is None


def _is_by_hand(facts: Facts) -> bool:
    """Return whether an adapter describes the part of a rank, without placements; None on others means a whole."""
    return any(tensor.placements is None and tensor.sharded_by for _, tensor in facts)


def _compare_sizes(tensor: TensorFacts, shape: tuple[int, ...]) -> Mismatch | None:
    if tensor.shape != shape:
        return Mismatch(f"shape {tensor.shape}", f"{shape}, as on the other ranks")
    implied = tuple(sum(stop - start for start, stop in runs) for runs in tensor.regions)
    if (
        tensor.local_shape == implied or _outside(tensor) or 0 in tensor.shape
    ):  # fully_shard() makes empty shards of an empty tensor
        return None
    return Mismatch(f"local shape {tensor.local_shape}", f"{implied}, as its placements imply", **_CUT)


_BY_HAND: Explanation = {
    "cause": "two ranks were given the same part, or a part was given to no rank",
    "remedy": "choose the part by the rank's index in its group, and describe the same part in Subject(adapter=...)",
}
_CUT: Explanation = {
    "cause": "the shard's size does not match its placements: torch splits a dim into chunks of ceil(size / ranks), so "
    "the last ranks may hold less, or nothing",
    "remedy": "split it as torch.chunk does, or use distribute_tensor",
}


def _pattern(facts: list[tuple[int, TensorFacts]]) -> Pattern:
    inside = [(rank, tensor) for rank, tensor in facts if not _outside(tensor)]
    first = (inside or facts)[0][1]
    # Runs of the flattened tensor on some ranks only are compared with the blocks of others as blocks.
    flat = all(tensor.flat for _, tensor in inside)
    extent = first.extent if flat else first.shape
    held = tuple((rank, (tensor.regions,) if flat else tensor.held) for rank, tensor in inside)
    if _is_by_hand(inside):
        # Without placements, the number of replicas follows from the number of elements on all ranks.
        copies = round(sum(tensor.numel for _, tensor in inside) / max(1, prod(first.shape)))
        return extent, held, max(1, copies)
    sizes = zip(first.placements or (), first.mesh.shape if first.mesh else (), strict=True)
    shards = prod(size for placement, size in sizes if sharded_dim(placement) is not None)
    # Each of several meshes may span a part of the ranks; each then holds the tensor once.
    return extent, held, max(1, len(held) // shards)


def _flaw(shape: tuple[int, ...], held: Sequence[tuple[int, Sequence[Held]]], replicas: int) -> Flaw | None:
    if 0 in shape or not held:
        return None
    apart = [(rank, regions) for rank, own in held for regions in own]
    runs = [[run for _, regions in apart for run in regions[dim]] for dim in range(len(shape))]
    cuts = [sorted({0, size, *chain.from_iterable(own)}) for size, own in zip(shape, runs, strict=True)]
    holders = _holders(cuts, apart)
    cells = list(product(*(range(len(edges) - 1) for edges in cuts)))
    often = [cell for cell in cells if len(holders.get(cell, ())) > replicas]
    seldom = [cell for cell in cells if len(holders.get(cell, ())) < replicas]
    if not often and not seldom:
        return None
    ranks = tuple(holders[often[0]]) if often else tuple(rank for rank, _ in held)
    parts = []
    if often:
        parts.append(f"{len(ranks)} ranks hold {_box(cuts, often)}")
    if seldom:
        count = len(holders.get(seldom[0], ()))
        few = f"only {counted(count, 'rank')} hold{'s' * (count == 1)}" if count else "no rank holds"
        parts.append(f"{few} {_box(cuts, seldom)}")
    once = "exactly once" if replicas == 1 else f"exactly once in each of {replicas} replicas"
    return ranks, " and ".join(parts), f"shards that cover {shape} {once}"


def _holders(cuts: list[list[int]], held: Sequence[tuple[int, Held]]) -> dict[tuple[int, ...], list[int]]:
    """Return the ranks that hold each cell between neighbouring cuts."""
    number = [{cut: index for index, cut in enumerate(edges)} for edges in cuts]
    holders: dict[tuple[int, ...], list[int]] = {}
    for rank, regions in held:
        spans = [
            [index for start, stop in runs for index in range(at[start], at[stop])]
            for at, runs in zip(number, regions, strict=True)
        ]
        for cell in product(*spans):
            holders.setdefault(cell, []).append(rank)
    return holders


def _box(cuts: list[list[int]], cells: list[tuple[int, ...]]) -> str:
    """Return the indices of the first cell, like "[4:8, 0:4]", and the number of others."""
    first = ", ".join(f"{edges[index]}:{edges[index + 1]}" for edges, index in zip(cuts, cells[0], strict=True))
    return f"[{first}]" + (f" and {counted(len(cells) - 1, 'more part')}" if len(cells) > 1 else "")
