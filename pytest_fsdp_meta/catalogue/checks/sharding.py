"""Sharding: every parameter lies on the mesh as declared, sharded where nothing is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pytest_fsdp_meta.catalogue.checks.materialisation import MANAGED
from pytest_fsdp_meta.catalogue.checks.structure import MANIFEST, NAMES, SHAPES
from pytest_fsdp_meta.catalogue.diagnosis.expectations import (
    PLAIN,
    SHARDED,
    as_declared,
    by_default,
    data_dims,
    in_parts,
    is_whole,
    placed,
)
from pytest_fsdp_meta.catalogue.findings import Finding, Mismatch
from pytest_fsdp_meta.catalogue.registry import check
from pytest_fsdp_meta.catalogue.view import NotDeclared, NotJudged, View, majority
from pytest_fsdp_meta.evidence import TensorFacts
from pytest_fsdp_meta.text import first_of, name_ranks


@check(
    promise="what is declared unsharded is whole on every rank, plain or replicated",
    family="sharding",
    needs=["inventory"],
    fields=["unsharded"],
    after=[MANIFEST, NAMES, SHAPES, MANAGED, "parameter_attributes_kept"],
    why="A module that reads its weight outside of forward, or without FSDP's hooks, finds a shard in its place.",
    cause="it is declared unsharded, and sharded all the same",
    remedy="keep it out of fully_shard (ignored_params), or take it out of Subject(unsharded=...)",
    references=["NVIDIA/Megatron-LM fsdp_no_shard"],
    since="0.2",
)
def unsharded_modules_stay_whole(view: View) -> Iterable[Finding]:
    unsharded = view.evidence.subject.unsharded
    if not unsharded:
        raise NotDeclared("unsharded")
    for name, facts in view.tensors("parameter", only=set(unsharded)):
        wanted = "whole on every rank, as declared"
        yield from view.broken(
            name, [(rank, None if is_whole(t) else Mismatch(placed(t), wanted)) for rank, t in facts]
        )


@check(
    promise="no parameter is whole on every rank unless it is declared so",
    family="sharding",
    needs=["inventory"],
    after=[MANIFEST, NAMES, SHAPES, MANAGED],
    why="A parameter that is not sharded costs its full size on every rank, and nobody may reduce its gradients.",
    cause="the module was not passed to fully_shard or parallelize_module, or was ignored, or was sharded on a mesh of "
    "one rank",
    remedy="shard it; or declare what is meant with Subject(unsharded=...) or Subject(placements=...)",
    references=["huggingface/accelerate#2947", "verl-project/verl#6289"],
    since="0.2",
)
def nothing_left_unsharded(view: View) -> Iterable[Finding]:
    subject, size = view.evidence.subject, view.evidence.world.size
    meant = {*subject.unsharded, *subject.placements}
    dims = data_dims(view)
    replicated = []
    for name, facts in view.tensors("parameter"):
        if name in meant or not all(is_whole(tensor) for _, tensor in facts):
            continue
        told = [(rank, _left_whole(tensor, dims, size)) for rank, tensor in facts]
        if all(tensor.ddp for _, tensor in facts):
            replicated += [name] if any(one for _, one in told) else []
        else:
            yield from view.broken(name, _written(facts, told))
    if replicated:
        raise NotJudged(
            f"DistributedDataParallel keeps {first_of(replicated)} whole by intent; call the mesh dimension "
            "dp_replicate to say so"
        )


def _left_whole(tensor: TensorFacts, dims: dict[str | None, int], world: int) -> Mismatch | None:
    told = by_default(tensor, dims, world)
    return told if told is not None and told.expected.startswith(SHARDED) else None


@check(
    promise="every parameter has its placements on its mesh dimensions: as declared, else sharded over every dimension "
    "that shards and replicated over dp_replicate",
    family="sharding",
    needs=["inventory"],
    after=[MANIFEST, NAMES, SHAPES, MANAGED, "unsharded_modules_stay_whole", "nothing_left_unsharded"],
    why="A parameter on the wrong dim is another tensor; one that a mesh dimension forgets is held too often.",
    cause="the module was not passed to fully_shard or parallelize_module, was ignored, or was sharded on another mesh "
    "or dim",
    remedy="shard it; or declare what is meant with Subject(unsharded=...) or Subject(placements=...)",
    references=["pytorch/pytorch#129229", "NVIDIA/TransformerEngine#2713"],
)
def dtensor_placements(view: View) -> Iterable[Finding]:
    dims, declared = data_dims(view), view.evidence.subject.placements
    for name, facts in view.tensors("parameter"):
        if name not in declared and any(in_parts(tensor) for _, tensor in facts):
            continue  # it is sharded, and has no placements
        told = [(rank, _misplaced(view, tensor, dims)) for rank, tensor in facts]
        yield from view.broken(name, _written(facts, _odd(facts, told)))


def _misplaced(view: View, tensor: TensorFacts, dims: dict[str | None, int]) -> Mismatch | None:
    subject, size = view.evidence.subject, view.evidence.world.size
    if tensor.name in subject.unsharded:
        return None
    declared = subject.placements.get(tensor.name)
    if declared is not None:
        return as_declared(tensor, declared, size)
    return None if tensor.ddp else by_default(tensor, dims, size)


Cases = list[tuple[int, Mismatch | None]]


def _odd(facts: list[tuple[int, TensorFacts]], told: Cases) -> Cases:
    """What is told, and of the ranks that keep the promise those that keep it in another way than the others."""
    kept = [(rank, placed(tensor)) for (rank, tensor), (_, one) in zip(facts, told, strict=True) if one is None]
    if not kept:
        return told
    usual = majority(kept)
    others = name_ranks(rank for rank, place in kept if place == usual)
    odd = {rank: Mismatch(place, f"{usual}, as on {others}", *_BRANCHES) for rank, place in kept if place != usual}
    return [(rank, odd.get(rank, one)) for rank, one in told]


def _written(facts: list[tuple[int, TensorFacts]], told: Cases) -> Iterator[tuple[int, Mismatch | None]]:
    """A plain tensor is called whole on every rank only where it is."""
    plain = PLAIN if all(tensor.placements is None for _, tensor in facts) else "a plain tensor, not a DTensor"
    for rank, one in told:
        if one is not None:
            one = one._replace(actual=one.actual.replace(PLAIN, plain), expected=one.expected.replace(PLAIN, plain))
        yield rank, one


_BRANCHES = (
    "the loader branches on the rank while it shards, or ranks made different meshes",
    "make one mesh of all ranks, and shard by the same plan on each",
)
