"""Sharding: the shards of all ranks, laid side by side, are the tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from math import prod

from pytest_fsdp_meta.catalogue.checks.materialisation import MANAGED
from pytest_fsdp_meta.catalogue.checks.structure import MANIFEST, NAMES, SHAPES
from pytest_fsdp_meta.catalogue.findings import Explanation, Finding, Mismatch
from pytest_fsdp_meta.catalogue.registry import check
from pytest_fsdp_meta.catalogue.view import View
from pytest_fsdp_meta.evidence import Region, TensorFacts, sharded_dim
from pytest_fsdp_meta.text import counted

Held = tuple[Region, ...]
"""What one rank holds, dimension by dimension."""
Pattern = tuple[tuple[int, ...], tuple[tuple[int, Held], ...], int]
"""The shape, what each rank holds of it, and how many ranks should hold each element."""
Flaw = tuple[tuple[int, ...], str, str]
"""The ranks of a finding, what they show, and what they should show."""


@check(
    promise="the shards of all ranks cover the global tensor exactly once, in each set of replicas",
    family="sharding",
    needs=["inventory"],
    after=[
        MANIFEST,
        NAMES,
        SHAPES,
        MANAGED,
        "unsharded_modules_stay_whole",
        "nothing_left_unsharded",
        "dtensor_placements",
    ],
    why="What no rank holds is lost when the model is saved; what two ranks hold is written twice, one over the other.",
    cause="ranks made meshes of their own, in which two have the same coordinate or some have none",
    remedy="make one mesh of all ranks, in the same order on each",
    references=["NVIDIA/TransformerEngine#3207", "huggingface/transformers#48237"],
    since="0.2",
)
def shards_tile_the_tensor(view: View) -> Iterable[Finding]:
    known: dict[Pattern, Flaw | None] = {}  # thousands of tensors lie in a few ways
    for name, facts in view.tensors("parameter", "buffer"):
        cut = [(rank, _cut_otherwise(tensor)) for rank, tensor in facts]
        if any(told for _, told in cut):
            yield from view.broken(name, cut)
            continue
        pattern = _pattern(facts)
        if pattern not in known:
            known[pattern] = _flaw(*pattern)
        flaw = known[pattern]
        if flaw is not None:
            by_hand = facts[0][1].sharded_by and facts[0][1].placements is None
            yield Finding(name, *flaw, **(_BY_HAND if by_hand else {}))


def _outside(tensor: TensorFacts) -> bool:
    """On a rank that is not in the mesh of the tensor there is nothing of it."""
    return tensor.mesh is not None and tensor.mesh.coordinate is None


def _cut_otherwise(tensor: TensorFacts) -> Mismatch | None:
    implied = tuple(sum(stop - start for start, stop in runs) for runs in tensor.regions)
    if tensor.local_shape == implied or _outside(tensor) or 0 in tensor.shape:  # fully_shard gives nothing of nothing
        return None
    return Mismatch(f"local shape {tensor.local_shape}", f"{implied}, as its placements imply", **_CUT)


_BY_HAND: Explanation = {
    "cause": "ranks were given the same part, or one that nobody else has was left out",
    "remedy": "choose the part by the rank's place in its group, and let Subject(adapter=...) say the same",
}
_CUT: Explanation = {
    "cause": "it was cut otherwise than its placements say: torch cuts a dim into chunks of ceil(size / ranks), so "
    "that the last ranks may hold less, or nothing",
    "remedy": "cut it as torch.chunk does, or let distribute_tensor cut it",
}


def _pattern(facts: list[tuple[int, TensorFacts]]) -> Pattern:
    held = tuple((rank, tensor.regions) for rank, tensor in facts if not _outside(tensor))
    first = next((tensor for _, tensor in facts if not _outside(tensor)), facts[0][1])
    if first.placements is None and first.sharded_by:
        # Nothing says how many replicas there are, but how much there is in all.
        copies = round(sum(tensor.numel for _, tensor in facts) / max(1, prod(first.shape)))
        return first.extent, held, max(1, copies)
    sizes = zip(first.placements or (), first.mesh.shape if first.mesh else (), strict=True)
    shards = prod(size for placement, size in sizes if sharded_dim(placement) is not None)
    # A mesh may span a part of the ranks, which then hold the tensor several times.
    return first.extent, held, max(1, len(held) // shards)


def _flaw(shape: tuple[int, ...], held: Sequence[tuple[int, Held]], replicas: int) -> Flaw | None:
    if 0 in shape or not held:
        return None
    cuts = [sorted({0, size, *_edges(regions[dim] for _, regions in held)}) for dim, size in enumerate(shape)]
    holders = _holders(cuts, held)
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


def _edges(runs: Iterable[Region]) -> Iterator[int]:
    return (edge for region in runs for run in region for edge in run)


def _holders(cuts: list[list[int]], held: Sequence[tuple[int, Held]]) -> dict[tuple[int, ...], list[int]]:
    """The ranks of each cell between neighbouring cuts."""
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
    """ "[4:8, 0:4]": the indices of the first of the cells."""
    first = ", ".join(f"{edges[index]}:{edges[index + 1]}" for edges, index in zip(cuts, cells[0], strict=True))
    return f"[{first}]" + (f" and {counted(len(cells) - 1, 'more part')}" if len(cells) > 1 else "")
