"""Check the placements of every parameter: as declared, otherwise sharded over every sharding mesh dimension."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pytest_fsdp_meta.checks.materialisation.judge import MANAGED
from pytest_fsdp_meta.checks.structure.judge import MANIFEST, NAMES, SHAPES
from pytest_fsdp_meta.evidence import TensorFacts
from pytest_fsdp_meta.judging.expectations import (
    PLAIN,
    SHARDED,
    compare_with_declared,
    compare_with_default,
    data_dims,
    describe_placements,
    is_split,
    is_whole,
)
from pytest_fsdp_meta.judging.families import sharding_check
from pytest_fsdp_meta.judging.findings import Finding, Mismatch
from pytest_fsdp_meta.judging.view import NotDeclared, NotJudged, View, majority
from pytest_fsdp_meta.text import first_of, name_ranks


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
        mismatches = [(rank, _left_whole(tensor, dims, size)) for rank, tensor in facts]
        if all(tensor.ddp for _, tensor in facts):
            replicated += [name] if any(mismatch for _, mismatch in mismatches) else []
        else:
            yield from view.findings_for(name, _describe_plain(facts, mismatches))
    if replicated:
        raise NotJudged(
            f"DistributedDataParallel keeps {first_of(replicated)} whole on purpose; name the mesh dimension "
            "dp_replicate to declare it"
        )


def _divided_by_name(view: View, name: str, facts: list[tuple[int, TensorFacts]]) -> bool:
    """Return whether ranks have other plain tensors instead of shards of the same ones, such as experts."""
    return name in view.on_some_ranks and all(tensor.placements is None for _, tensor in facts)


def _left_whole(tensor: TensorFacts, dims: dict[str | None, int], world: int) -> Mismatch | None:
    mismatch = compare_with_default(tensor, dims, world)
    return mismatch if mismatch is not None and mismatch.expected.startswith(SHARDED) else None


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
