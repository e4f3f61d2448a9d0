"""Communication: ranks issue the same collectives, and no more of them than the sharding needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod

from pytest_fsdp_meta.checks.collectives.facts import Collective, FsdpGroup, RankCollectives
from pytest_fsdp_meta.checks.structure.judge import MANIFEST
from pytest_fsdp_meta.judging.findings import Finding
from pytest_fsdp_meta.judging.registry import communication_check, sharding_check
from pytest_fsdp_meta.judging.view import NotDeclared, Noted, NotJudged, PartlyJudged, View, majority, ranks_by
from pytest_fsdp_meta.text import counted, first_of, fold_names, grouped, name_ranks

EQUAL_SIZES = frozenset({"all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter"})
"""Ops in which every rank passes equally many elements. Lists and all_to_all may have unequal sizes, like the tokens
of experts."""
ONE_TENSOR = frozenset({"all_reduce", "reduce", "broadcast"})
"""Ops in which every rank passes the same tensor. In others it may not: an optimizer may gather another parameter from
each rank."""
ONE_DTYPE = EQUAL_SIZES | {"all_gather of lists", "reduce_scatter of lists", "gather", "scatter", "all_to_all"}
FSDP_OPS = ("all_gather", "reduce_scatter")
LOW_PRECISION = ("bfloat16", "float16")
PHASES = {"loading": "while loading", "step": "in one training step"}


@sharding_check(
    promise="no collective communicates a declared-unsharded parameter in forward and backward; its gradient may be "
    "reduced",
    needs=["inventory", "collectives"],
    fields=["unsharded", "batch"],
    uses=["training"],
    after=[MANIFEST, "unsharded_modules_stay_whole"],
    why="A parameter is kept unsharded to avoid gathering it in the forward; gathering it anyway defeats that.",
    cause="a hook or a wrapper broadcasts or gathers it before it is used, as if it were sharded",
    remedy="use the rank's own copy in the forward, and reduce only its gradient",
    references=["NVIDIA/Megatron-LM fsdp_no_shard"],
)
def unsharded_modules_are_not_gathered(view: View) -> Iterable[Finding]:
    ranks, names = view.evidence.collectives or (), view.evidence.subject.unsharded
    if not names:
        raise NotDeclared("unsharded")
    _require_step(view, ranks)
    for name, collectives, where in _communicated(view, ranks, lambda _: set(view.names("parameter", only=names))):
        actual = f"communicated by {collectives} in one training step"
        yield Finding(name, where, actual, "used locally, because it is declared unsharded")
    _require_known(ranks)


@communication_check(
    promise="all ranks issue the same sequence of collectives while loading and in one training step",
    needs=["collectives"],
    uses=["training"],
    why="If one rank issues two broadcasts of the same shape in the other order, their values are swapped without an "
    "error.",
    cause="the ranks iterate in different orders (a set, a directory listing), or branch on the rank",
    remedy="iterate over sorted names or over the model itself, and issue no collective in a branch on the rank",
    references=["huggingface/accelerate#3982", "verl-project/verl#6365", "NVIDIA/Megatron-LM#6573"],
)
def collectives_match_on_every_rank(view: View) -> Iterable[Finding]:
    ranks = view.evidence.collectives or ()
    for phase, when in PHASES.items():
        recorded = {rank: getattr(own, phase) for rank, own in enumerate(ranks) if getattr(own, phase) is not None}
        by_group = grouped(((c.group, c.ranks), (rank, c)) for rank, issued in recorded.items() for c in issued)
        for (_, members), pairs in by_group.items():
            if len(members) > 1 and set(members) <= set(recorded):
                sequences = grouped(pairs)
                yield from _compare_sequences({rank: sequences.get(rank, []) for rank in members}, when)
    if any(own.step is None for own in ranks):
        raise PartlyJudged(_describe_no_step(view))
    _require_known(ranks)


def _require_known(ranks: Sequence[RankCollectives]) -> None:
    """Raise PartlyJudged for operators that the recorder does not know: they may be collectives."""
    if unknown := sorted({name for own in ranks for name in own.unknown}):
        raise PartlyJudged(f"torch ran {first_of(unknown)}, which pytest-fsdp-meta does not know; please report it")


def _describe_no_step(view: View) -> str:
    why = view.evidence.unavailable.get("training")
    return "no training step was recorded" + (f" ({why.summary})" if why is not None else "")


def _compare_sequences(sequences: dict[int, list[Collective]], phase: str) -> Iterator[Finding]:
    """Report the first collective on which ranks disagree, with all tensors that took part in a disagreement."""
    length = max(map(len, sequences.values()))
    columns = [
        {rank: (*issued, None)[min(index, len(issued))] for rank, issued in sequences.items()}
        for index in range(length)
    ]
    wrong = [(index, column) for index, column in enumerate(columns) if not _agree(list(column.values()))]
    if not wrong:
        return
    index, column = wrong[0]
    known = {name for _, column in wrong for collective in column.values() if collective for name in collective.tensors}
    described = [(rank, _describe_collective(collective)) for rank, collective in column.items()]
    usual = majority(described)
    agreeing = name_ranks(rank for rank, description in described if description == usual)
    detail = f"{len(wrong)} of {length} differ" if len(wrong) > 1 else ""
    for description, ranks in ranks_by(described).items():
        if description != usual:
            where = f"collective {index + 1} of {name_ranks(sequences)} {phase}"
            actual, expected = f"{where} is {description}", f"{usual}, as on {agreeing}"
            yield Finding(None, ranks, actual, expected, detail, condemns=tuple(sorted(known)))


def _agree(column: Sequence[Collective | None]) -> bool:
    first = column[0]
    return all(first is not None and other is not None and _match(first, other) for other in column[1:])


def _match(first: Collective, other: Collective) -> bool:
    if first.op != other.op or first.root != other.root:
        return False
    if first.reduction and other.reduction and first.reduction != other.reduction:
        return False
    if first.op in ONE_DTYPE and first.shapes and other.shapes and first.dtype != other.dtype:
        return False
    if first.op in EQUAL_SIZES and _count_elements(first) != _count_elements(other):
        return False
    if first.op not in ONE_TENSOR or not first.tensors or not other.tensors:
        return True
    return bool({*first.tensors} & {*other.tensors})


def _count_elements(collective: Collective) -> list[int]:
    return [prod(shape) for shape in collective.shapes]


def _describe_collective(collective: Collective | None) -> str:
    """ "a broadcast of a.weight (float32 [4, 8]) from rank 0"."""
    if collective is None:
        return "missing"
    more = ", ..." if len(collective.shapes) > 3 else ""
    shapes = ", ".join(str(list(shape)) for shape in collective.shapes[:3]) + more
    tensors = f" of {first_of(list(fold_names(collective.tensors)), 2)}" if collective.tensors else ""
    size = f" ({collective.dtype} {shapes})" if collective.shapes else ""
    reduction = f" by {collective.reduction}" if collective.reduction else ""
    root = f" from rank {collective.root}" if collective.root is not None else ""
    return f"{'an' if collective.op[0] in 'aeiou' else 'a'} {collective.op}{tensors}{size}{reduction}{root}"


@communication_check(
    promise="one training step gathers and reduces each FSDP group only as often as its forward and backward need, and "
    "nothing else communicates its parameters",
    fields=["batch"],
    uses=["training"],
    after=[MANIFEST, "collectives_match_on_every_rank"],
    why="An additional gather of a weight in every step costs bandwidth and memory, and nothing else shows it.",
    cause="a hook, a tied head or an auxiliary loss calls full_tensor() or unshard() on a weight that FSDP2 gathers "
    "already; or the step runs another sharded model, such as a teacher",
    remedy="use the weight in its own module's forward, where FSDP2 has gathered it, or compute on the local shard",
    references=["pytorch/pytorch#105635", "pytorch/torchtitan#3123"],
)
def collectives_within_budget(view: View) -> Iterable[Finding]:
    ranks = view.evidence.collectives or ()
    _require_step(view, ranks)
    if not any(own.groups for own in ranks):
        raise NotJudged("FSDP2 manages no parameters here, so there are no FSDP groups to gather")
    unsharded = set(view.evidence.subject.unsharded)
    for name, collectives, where in _communicated(
        view, ranks, lambda own: {name for group in own.groups or () for name in group.parameters} - unsharded
    ):
        actual = f"{collectives} in one training step, in addition to FSDP2's own"
        yield Finding(name, where, actual, "communicated by FSDP2 only")
    for op, needed in (("all_gather", _gathers), ("reduce_scatter", _reductions), ("all_reduce", _replica_reductions)):
        excesses = [(rank, _excess(op, own, sum(map(needed, own.groups or ())))) for rank, own in enumerate(ranks)]
        for excess, where in ranks_by(excesses).items():
            if excess is not None:
                yield Finding(None, where, *excess)
    _require_known(ranks)
    for op in FSDP_OPS:
        if any(_unattributed(op, own) for own in ranks):
            off = "if set_requires_gradient_sync(False) did not turn them off, " * (op == "reduce_scatter")
            report = f"{off}please report this, with your torch version"
            raise PartlyJudged(f"none of the {op}s could be attributed to FSDP2; {report}")
    _note_reductions_in_low_precision(view, ranks)


def _note_reductions_in_low_precision(view: View, ranks: Sequence[RankCollectives]) -> None:
    """Raise Noted if gradients are summed in a lower precision than FSDP2's policy asks for (pytorch#190626).

    FSDP2 applies the policy to its own mesh dimensions only. Along the others, DTensor sums the gradient of a
    replicated parameter in the gradient's own dtype.
    """
    for own, inventory in zip(ranks, view.evidence.inventory, strict=True):
        if inventory.reduces_in != ("float32",):
            continue
        replicated = {t.shape: t.name for t in inventory.tensors if t.requires_grad and "R" in (t.placements or ())}
        for c in own.step or ():
            by_dtensor = c.op == "all_reduce" and len(c.ranks) > 1 and not c.by_fsdp and not c.optimizing
            if by_dtensor and c.dtype in LOW_PRECISION and c.shapes[0] in replicated:
                raise Noted(
                    f"gradients such as that of {replicated[c.shapes[0]]} are summed in {c.dtype} over the ranks that "
                    "replicate it, although the mixed-precision policy reduces in float32: FSDP2 applies the policy to "
                    "its own mesh only (pytorch#190626)"
                )


def _require_step(view: View, ranks: Sequence[RankCollectives]) -> None:
    if not ranks or any(own.step is None for own in ranks):
        raise NotJudged(_describe_no_step(view))
    if view.evidence.world.size == 1:
        raise NotJudged("a single rank does not communicate")


def _gathers(group: FsdpGroup) -> int:
    """Return how many gathers a step needs: one per forward, two if it frees the parameters before the backward.

    A group without a forward may be prefetched once.
    """
    return max(1, group.forwards) * (2 if group.reshards else 1)


def _reductions(group: FsdpGroup) -> int:
    return max(1, group.forwards) if group.trainable else 0


def _replica_reductions(group: FsdpGroup) -> int:
    return _reductions(group) if group.replicates else 0


def _unattributed(op: str, own: RankCollectives) -> bool:
    """Return whether groups need the collective, and none that might be theirs was recognised as such."""
    groups = [g for g in own.groups or () if g.ranks > 1 and g.forwards and (g.trainable or op == "all_gather")]
    issued = [c for c in own.step or () if c.op == op and not c.optimizing and not c.tensors and len(c.ranks) > 1]
    return bool(groups and issued) and not any(collective.by_fsdp for collective in issued)


def _excess(op: str, own: RankCollectives, budget: int) -> tuple[str, str] | None:
    count = sum(1 for collective in own.step or () if collective.by_fsdp and collective.op == op)
    groups = len(own.groups or ())
    if count <= budget:
        return None
    actual = f"{counted(count, op)} of FSDP groups in one training step"
    return actual, f"at most {budget} for {counted(groups, 'group')}"


def _communicated(
    view: View, ranks: Sequence[RankCollectives], names: Callable[[RankCollectives], set[str]]
) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yield (name, collectives, ranks) for those of ``names`` that collectives outside FSDP communicate.

    Only forward and backward count, not the optimizer step.
    """
    by_name: dict[str, list[tuple[int, str]]] = {}
    for rank, own in enumerate(ranks):
        found: dict[str, list[Collective]] = {}
        for collective in own.step or ():
            if not collective.optimizing and not collective.by_fsdp and len(collective.ranks) > 1:
                for name in names(own) & set(collective.tensors):
                    found.setdefault(name, []).append(collective)
        for name, collectives in found.items():
            by_name.setdefault(name, []).append((rank, _count_by_op(collectives)))
    for name in filter(view.judgeable, by_name):
        yield from ((name, collectives, where) for collectives, where in ranks_by(by_name[name]).items())


def _count_by_op(collectives: Sequence[Collective]) -> str:
    """ "2 all_gathers of lists (float32 [3, 4]) and 1 broadcast (float32 [8, 4])"."""
    parts = []
    for op, same in grouped((collective.op, collective) for collective in collectives).items():
        kind, of, operand = op.partition(" of ")
        parts.append(f"{counted(len(same), kind)}{of}{operand} ({same[0].dtype} {list(same[0].shapes[0])})")
    return " and ".join(parts)
