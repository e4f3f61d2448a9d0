"""Check what a training step holds at a time: one group of gathered parameters, and what backward needs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from pytest_fsdp_meta.checks.memory.facts import GatheredGroup, StepMemory
from pytest_fsdp_meta.checks.structure.judge import MANIFEST
from pytest_fsdp_meta.evidence import splits_experts
from pytest_fsdp_meta.judging.families import memory_check
from pytest_fsdp_meta.judging.findings import Explanation, Finding
from pytest_fsdp_meta.judging.view import PartlyJudged, View, ranks_by
from pytest_fsdp_meta.text import fold_names, name_ranks

MOST = 0.5
"""Fraction of the bytes of all parameters; blocks with less than this are not what decides how much a step holds."""
FACTOR = 1.5
"""How much more than the reference a rank may keep for the same rows. Right loaders of transformers' models keep up to
1.1 times as much: DTensors save redistributed copies, and casts save both dtypes."""
LEAST = 1024
"""Bytes by which a rank may always keep more; in a model as small as that, scalars and indices count."""
BLOCK = re.compile(r"^(?P<stack>(?:.*?\.)?)(?P<index>[0-9]+)\.(?P<rest>.+)$")
"""The name of a tensor in a numbered block, such as "model.layers." "3" "mlp.weight"; inner numbers are in the rest."""


@memory_check(
    promise="a training step gathers one group at a time where the model has repeated blocks, and keeps for the "
    "backward at most about what the reference keeps for the same rows",
    needs=["inventory", "training"],
    fields=["batch"],
    uses=["reference"],
    after=[MANIFEST],
    why="Results are right, and the step needs the memory that sharding or activation checkpointing should have saved: "
    "it fails first on the model that is too large for one device.",
    cause="fully_shard() was applied to the root only, or the names of the classes to wrap match nothing",
    remedy="call fully_shard() on each block, and then on the root; with accelerate, "
    "auto_wrap_policy='TRANSFORMER_BASED_WRAP' does it; if the model is small enough to be gathered as a whole, skip "
    "this check with that reason",
    references=["huggingface/accelerate#4172", "NVIDIA-NeMo/Automodel#3708"],
)
def step_memory_bounded(view: View) -> Iterable[Finding]:
    ranks = [run.memory for run in view.evidence.training or ()]
    yield from _gathered_as_one(view, ranks)
    reference = view.evidence.reference
    if reference is None or not reference.memory:
        raise PartlyJudged("what backward keeps has nothing to be compared with, because no reference was trained")
    if problem := next((memory.problem for memory in (*ranks, *reference.memory) if memory.kept is None), ""):
        raise PartlyJudged(f"what backward keeps is not compared: {problem}")
    yield from _kept_too_much(view, ranks, reference.memory)


@dataclass(frozen=True, eq=False)
class _Stack:
    """The blocks of one list of modules that have the same tensors, such as all layers of a transformer.

    A block has modules inside: bare layers in a list are too small to be groups of their own.
    """

    name: str
    blocks: Mapping[str, frozenset[str]]
    """Index of a block -> the names of its tensors."""


def _gathered_as_one(view: View, ranks: Sequence[StepMemory]) -> Iterator[Finding]:
    found = [
        (rank, text)
        for rank, memory in enumerate(ranks)
        for group in memory.groups
        if group.ranks > 1
        for text in _describe_stacks(view, rank, group, memory.groups)
    ]
    for actual, where in ranks_by(found).items():
        yield Finding(None, where, actual, "gathered one block, or a few, at a time")


def _describe_stacks(view: View, rank: int, group: GatheredGroup, groups: Sequence[GatheredGroup]) -> Iterator[str]:
    """Describe the stacks whose blocks a group gathers all at once, if they are most of the parameters."""
    tensors = view.evidence.inventory[rank].by_name

    def count_bytes(names: Iterable[str]) -> int:
        held = {tensors[name].storage or name: tensors[name] for name in names if name in tensors}.values()
        return sum(prod(tensor.shape) * tensor.width for tensor in held)

    shared = count_bytes(name for other in groups if other.ranks > 1 for name in other.parameters)
    sizes: dict[_Stack, int] = {}
    for stack in _stacks(view, rank):
        own = [names.intersection(group.parameters) for names in stack.blocks.values()]
        if all(own):
            sizes[stack] = count_bytes(name for names in own for name in names)
    whole = count_bytes(name for name, tensor in tensors.items() if tensor.kind == "parameter")
    if sum(sizes.values()) > MOST * whole:  # an encoder and a decoder are about half each; adapters are little
        for stack, size in sizes.items():
            yield (
                f"one FSDP group gathers all {len(stack.blocks)} blocks of {stack.name} at once: {size} of the "
                f"{shared} bytes that the ranks share"
            )


def _stacks(view: View, rank: int) -> Iterator[_Stack]:
    """Yield the stacks of two or more equal blocks that share no weight, which could not be groups of their own."""
    inventory = view.evidence.inventory[rank]
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
                yield _Stack(stack.rstrip(".") or "the model", equal)


def _kept_too_much(view: View, ranks: Sequence[StepMemory], reference: Sequence[StepMemory]) -> Iterator[Finding]:
    everyone = _has_tokens_of_others(view)
    runs = view.evidence.training or ()
    slices = [reference if everyone else reference[run.data_parallel[0] :][:1] or reference for run in runs]
    due = [sum(memory.kept or 0 for memory in own) for own in slices]
    kept = [memory.kept or 0 for memory in ranks]
    large = [rank for rank, size in enumerate(kept) if size > FACTOR * due[rank] + LEAST]
    if not large:
        return
    worst = max(large, key=lambda rank: kept[rank] - due[rank])
    where = name_ranks([worst])
    yield Finding(
        None,
        tuple(large),
        f"{kept[worst]} bytes of activations kept for the backward on {where}",
        f"at most {FACTOR} times the {due[worst]} bytes that the reference keeps for the same rows",
        _largest_excess(ranks[worst], slices[worst], where),
        **_KEPT,
    )


def _has_tokens_of_others(view: View) -> bool:
    """Return whether ranks have experts of their own, to which they may get more tokens than those of their rows."""
    meshes = (tensor.mesh for rank in view.evidence.inventory for tensor in rank.tensors if tensor.mesh)
    return bool(view.on_some_ranks) or any(splits_experts(dim) for mesh in meshes for dim in mesh.dims)


_KEPT: Explanation = {
    "cause": "activation checkpointing, which the reference has, is missing on the ranks, or wraps smaller parts of "
    "which each keeps its input; or a rank runs more rows than its own, such as those that its loss gathers",
    "remedy": "wrap each block as a whole, and before fully_shard(); give each rank its own rows; if the loss has to "
    "gather rows, skip this check with that reason",
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
