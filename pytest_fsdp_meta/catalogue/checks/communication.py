"""Communication: ranks say the same things to each other, and no more than the sharding needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod

from pytest_fsdp_meta.catalogue.checks.structure import MANIFEST
from pytest_fsdp_meta.catalogue.findings import Finding
from pytest_fsdp_meta.catalogue.registry import check
from pytest_fsdp_meta.catalogue.view import NotDeclared, NotJudged, PartlyJudged, View, majority, ranks_by
from pytest_fsdp_meta.evidence.collectives import Collective, FsdpGroup, RankCollectives
from pytest_fsdp_meta.text import counted, first_of, fold_names, name_ranks

EQUAL_SIZES = frozenset({"all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter"})
"""Every rank hands over as many elements; lists and all_to_all may be cut unevenly, as tokens are among experts."""
ONE_TENSOR = frozenset({"all_reduce", "reduce", "broadcast"})
"""Every rank's memory stands for the same tensor; an optimizer may gather another parameter from each rank."""
ONE_DTYPE = EQUAL_SIZES | {"all_gather of lists", "reduce_scatter of lists", "gather", "scatter", "all_to_all"}
PHASES = {"loading": "while loading", "step": "in one training step"}


@check(
    promise="no collective moves a declared-unsharded parameter in forward and backward; its gradient may be reduced",
    family="sharding",
    needs=["inventory", "collectives"],
    fields=["unsharded", "batch"],
    uses=["training"],
    after=[MANIFEST, "unsharded_modules_stay_whole"],
    why="A parameter is kept whole so that nothing has to be gathered in a forward; gathering it all the same costs "
    "what it should save.",
    cause="a hook or a wrapper broadcasts or gathers it before it is used, as if it were sharded",
    remedy="use the rank's own copy, and reduce its gradient instead",
    references=["NVIDIA/Megatron-LM fsdp_no_shard"],
    since="0.2",
)
def unsharded_modules_are_not_gathered(view: View) -> Iterable[Finding]:
    ranks, names = view.evidence.collectives or (), view.evidence.subject.unsharded
    if not names:
        raise NotDeclared("unsharded")
    _require_step(view, ranks)
    for name, what, where in _moved(view, ranks, lambda _: set(view.names("parameter", only=names))):
        actual = f"moved by {what} in one training step"
        yield Finding(name, where, actual, "used where it is, as declared unsharded")


@check(
    promise="all ranks issue the same sequence of collectives while loading and in one training step",
    family="communication",
    needs=["collectives"],
    uses=["training"],
    why="Two broadcasts of one shape in another order on one rank exchange their values, and nothing fails.",
    cause="the ranks iterate in different orders (a set, a directory listing), or branch on the rank",
    remedy="iterate over sorted names or over the model itself, and branch on the rank around no collective",
    references=["huggingface/accelerate#3982", "verl-project/verl#6365", "NVIDIA/Megatron-LM#6573"],
    since="0.2",
)
def collectives_match_on_every_rank(view: View) -> Iterable[Finding]:
    ranks = view.evidence.collectives or ()
    for phase, words in PHASES.items():
        seen = {rank: getattr(one, phase) for rank, one in enumerate(ranks) if getattr(one, phase) is not None}
        for (_, members), sequences in _by_group(seen).items():
            if len(members) > 1 and set(members) <= set(seen):
                yield from _apart({rank: sequences.get(rank, []) for rank in members}, words)
    if any(one.step is None for one in ranks):
        raise PartlyJudged(_no_step(view))


def _no_step(view: View) -> str:
    why = view.evidence.unavailable.get("training")
    return "no training step was watched" + (f" ({why.summary})" if why is not None else "")


def _by_group(seen: dict[int, Sequence[Collective]]) -> dict[tuple[str, tuple[int, ...]], dict[int, list[Collective]]]:
    """What each rank said, in order, by process group."""
    groups: dict[tuple[str, tuple[int, ...]], dict[int, list[Collective]]] = {}
    for rank, collectives in seen.items():
        for one in collectives:
            groups.setdefault((one.group, one.ranks), {}).setdefault(rank, []).append(one)
    return groups


def _apart(sequences: dict[int, list[Collective]], phase: str) -> Iterator[Finding]:
    """The first collective that ranks do not share, and all the tensors that were taken for others."""
    length = max(map(len, sequences.values()))
    columns = [
        {rank: (*said, None)[min(index, len(said))] for rank, said in sequences.items()} for index in range(length)
    ]
    wrong = [(index, column) for index, column in enumerate(columns) if not _agree(list(column.values()))]
    if not wrong:
        return
    index, column = wrong[0]
    known = {name for _, column in wrong for one in column.values() if one is not None for name in one.tensors}
    told = [(rank, _said(one)) for rank, one in column.items()]
    usual = majority(told)
    agreeing = name_ranks(rank for rank, said in told if said == usual)
    more = f"{len(wrong)} of {length} differ" if len(wrong) > 1 else ""
    for said, ranks in ranks_by(told).items():
        if said != usual:
            where = f"collective {index + 1} of {name_ranks(sequences)} {phase}"
            actual, expected = f"{where} is {said}", f"{usual}, as on {agreeing}"
            yield Finding(None, ranks, actual, expected, more, condemns=tuple(sorted(known)))


def _agree(column: Sequence[Collective | None]) -> bool:
    first = column[0]
    return all(first is not None and other is not None and _pair(first, other) for other in column[1:])


def _pair(one: Collective, other: Collective) -> bool:
    if one.op != other.op or one.root != other.root:
        return False
    if one.reduction and other.reduction and one.reduction != other.reduction:
        return False
    if one.op in ONE_DTYPE and one.shapes and other.shapes and one.dtype != other.dtype:
        return False
    if one.op in EQUAL_SIZES and _elements(one) != _elements(other):
        return False
    return one.op not in ONE_TENSOR or not (one.tensors and other.tensors) or bool({*one.tensors} & {*other.tensors})


def _elements(one: Collective) -> list[int]:
    return [prod(shape) for shape in one.shapes]


def _said(one: Collective | None) -> str:
    """A collective in words: "a broadcast of a.weight (float32 [4, 8]) from rank 0"."""
    if one is None:
        return "missing"
    shapes = ", ".join(str(list(shape)) for shape in one.shapes[:3]) + (", ..." if len(one.shapes) > 3 else "")
    of = f" of {_named(one.tensors)}" if one.tensors else ""
    what = f" ({one.dtype} {shapes})" if one.shapes else ""
    reduction = f" by {one.reduction}" if one.reduction else ""
    root = f" from rank {one.root}" if one.root is not None else ""
    return f"{'an' if one.op[0] in 'aeiou' else 'a'} {one.op}{of}{what}{reduction}{root}"


def _named(names: Sequence[str]) -> str:
    folded = list(fold_names(names))
    return first_of(folded, 2)


@check(
    promise="one training step gathers and reduces each FSDP group as often as its forward and backward need, and no "
    "parameter besides",
    family="communication",
    needs=["inventory", "collectives"],
    fields=["batch"],
    uses=["training"],
    after=[MANIFEST, "collectives_match_on_every_rank"],
    why="A weight that is gathered once more in every step costs bandwidth and memory, and nothing shows it.",
    cause="a hook, a tied head or an auxiliary loss calls full_tensor() or unshard() on what FSDP2 gathers already",
    remedy="use the weight within its module's own forward, where it is whole, or compute on the local shard",
    references=["pytorch/pytorch#105635", "pytorch/torchtitan#3123"],
    since="0.2",
)
def collectives_within_budget(view: View) -> Iterable[Finding]:
    ranks = view.evidence.collectives or ()
    _require_step(view, ranks)
    if not any(one.groups for one in ranks):
        raise NotJudged("FSDP2 manages nothing here, so no groups say what is to be gathered")
    unsharded = set(view.evidence.subject.unsharded)
    for name, what, where in _moved(view, ranks, lambda one: _managed(one) - unsharded):
        yield Finding(name, where, f"{what} in one training step, besides FSDP2's own", "gathered by FSDP2 alone")
    for op, of in (("all_gather", _gathers), ("reduce_scatter", _reductions), ("all_reduce", _replicated)):
        told = [(rank, _excess(op, one, sum(map(of, one.groups or ())))) for rank, one in enumerate(ranks)]
        for excess, where in ranks_by(told).items():
            if excess is not None:
                yield Finding(None, where, *excess)


def _require_step(view: View, ranks: Sequence[RankCollectives]) -> None:
    if not ranks or any(one.step is None for one in ranks):
        raise NotJudged(_no_step(view))
    if view.evidence.world.size == 1:
        raise NotJudged("alone, a rank has nobody to communicate with")


def _managed(one: RankCollectives) -> set[str]:
    return {name for group in one.groups or () for name in group.parameters}


def _gathers(group: FsdpGroup) -> int:
    """One per forward, and one for each backward where the forward has freed the parameters; prefetched unused ones."""
    return max(1, group.forwards) * (2 if group.reshards else 1)


def _reductions(group: FsdpGroup) -> int:
    return max(1, group.forwards) if group.trainable else 0


def _replicated(group: FsdpGroup) -> int:
    return _reductions(group) if group.replicates else 0


def _excess(op: str, one: RankCollectives, budget: int) -> tuple[str, str] | None:
    count = sum(1 for c in one.step or () if c.by_fsdp and c.op == op)
    groups = len(one.groups or ())
    if count <= budget:
        return None
    actual = f"{counted(count, op)} of FSDP groups in one training step"
    return actual, f"at most {budget} for {counted(groups, 'group')}"


def _moved(
    view: View, ranks: Sequence[RankCollectives], names: Callable[[RankCollectives], set[str]]
) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """(name, the collectives of forward and backward that move it, ranks) of the parameters that ``names`` gives."""
    told: dict[str, list[tuple[int, str]]] = {}
    for rank, one in enumerate(ranks):
        moves: dict[str, list[Collective]] = {}
        for collective in one.step or ():
            if not collective.optimizing and not collective.by_fsdp and len(collective.ranks) > 1:
                for name in names(one) & set(collective.tensors):
                    moves.setdefault(name, []).append(collective)
        for name, found in moves.items():
            told.setdefault(name, []).append((rank, _counted(found)))
    for name in filter(view.judgeable, told):
        yield from ((name, what, where) for what, where in ranks_by(told[name]).items())


def _counted(found: Sequence[Collective]) -> str:
    """ "2 all_gathers (float32 [3, 4]) and 1 broadcast (float32 [8, 4])"."""
    by_op: dict[str, list[Collective]] = {}
    for one in found:
        by_op.setdefault(one.op, []).append(one)
    return " and ".join(
        f"{_times(len(same), op)} ({same[0].dtype} {list(same[0].shapes[0])})" for op, same in by_op.items()
    )


def _times(number: int, op: str) -> str:
    """ "2 all_gathers of lists"."""
    kind, of, what = op.partition(" of ")
    return counted(number, kind) + of + what
