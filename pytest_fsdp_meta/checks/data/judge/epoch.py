"""The author's own batches: each row of an epoch on one data-parallel rank, and the same rows along other dims."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import NamedTuple

from pytest_fsdp_meta.evidence import Epoch, RankBatches, splits_sequence
from pytest_fsdp_meta.judging.findings import Explanation, Finding
from pytest_fsdp_meta.judging.registry import data_check
from pytest_fsdp_meta.judging.view import NotDeclared, Noted, NotJudged, PartlyJudged, Unjudgeable, View, ranks_by
from pytest_fsdp_meta.text import counted, grouped, name_ranks

DATA = "data"
SEQUENCES = "the ranks of one data-parallel index see different rows, maybe parts of split sequences"
ROUGHLY = 0.1
"""How far the share of missing rows may be from that of a second split, which is then the cause."""
FEW_ROWS = 8
"""Fewer rows of a rank may have the same order twice by chance: one of 40,320 orders of 8 rows."""
Places = Mapping[int, Sequence[tuple[int, RankBatches]]]
"""Data-parallel index -> the ranks that have it, with their batches."""


class _Part(NamedTuple):
    """What the ranks of one data-parallel index see."""

    ranks: tuple[int, ...]
    batches: tuple[tuple[str, ...], ...]
    rows: Counter[str]


@data_check(
    promise="data-parallel ranks share out the rows, each row once per epoch; ranks with one data-parallel index see "
    "the same rows; if shuffled, the second epoch has a new order",
    needs=["inventory", "batches"],
    why="Training on repeated or missing rows is a little worse, and never fails; different rows along tp are noise.",
    cause="the ranks do not take their parts from one order of the whole data",
    remedy="give every data-parallel rank its own part of one order: DistributedSampler(dataset, num_replicas=<number "
    "of data-parallel ranks>, rank=<data-parallel index>, seed=<the same on all ranks>)",
    references=[
        *("NVlabs/LongLive#71", "huggingface/accelerate#3092", "huggingface/accelerate#4201"),
        *("NVIDIA-NeMo/Megatron-Bridge#5944", "axolotl-ai-cloud/axolotl#3920", "areal-project/AReaL#632"),
    ],
    fields=["data"],
)
def batches_follow_the_mesh(view: View) -> Iterator[Finding]:
    epoch = view.evidence.batches
    if epoch is None:
        raise NotDeclared(DATA)
    if not any(rank.batches for rank in epoch.ranks):
        raise Unjudgeable("Subject(data=...): it has no batches, but should have some on every rank")
    yield from _repeating(epoch)
    if len(epoch.ranks) == 1:
        raise NotJudged("a single rank sees all rows")
    places = grouped((rank.data_parallel[0], (number, rank)) for number, rank in enumerate(epoch.ranks) if rank.loader)
    size = epoch.ranks[0].data_parallel[1]
    differing = [*_differing(places, size)]
    # Ranks of one data-parallel index that see the same row do not hold parts of it.
    rows = ([set(rank.rows) for _, rank in ranks] for ranks in places.values())
    shared = (not mine.isdisjoint(theirs) for ranks in rows for mine, theirs in combinations(ranks, 2))
    split = differing and _splits_sequences(view) and not any(shared)
    found = differing if differing and not split else [*_ending_early(places)]
    yield from found
    if found:
        return  # which explains rows that are repeated or missing
    doubts = [SEQUENCES] if split else []
    refused = [(number, rank.refused) for ranks in places.values() for number, rank in ranks if rank.refused]
    if refused and len(refused) == sum(map(len, places.values())):
        doubts.append(f"the second epoch was not read: {refused[0][1]}")
    else:
        for problem, ranks in ranks_by(refused).items():
            yield Finding(DATA, ranks, f"in the second epoch: {problem}", "batches, as on the other ranks", **_REFUSED)
    known = None
    if size > 1:
        parts = _parts(epoch, places)
        whole, problem = _whole(epoch, parts)
        repeated, doubt = _judge_repeated(parts, whole)
        yield from repeated
        if repeated:
            return
        doubts += filter(None, [doubt])
        if problem:
            doubts.append(f"missing rows were not looked for: {problem}")
        elif whole is not None and not doubt:
            known = whole
            missing = [*_missing(parts, whole)]
            yield from missing
            if missing:
                return
    yield from _wrong_second_epoch(epoch, places, size, bool(split), known)
    if doubts:
        raise PartlyJudged("; ".join(doubts))
    if size > 1 and epoch.alone is None:
        raise Noted("missing rows are only looked for where data is a function: data=lambda: DataLoader(...)")


_REFUSED: Explanation = {
    "cause": "the loader cannot be iterated over once more on these ranks",
    "remedy": "open what the epoch reads when it begins, and in the same way on every rank",
}


def _splits_sequences(view: View) -> bool:
    """Return whether ranks of one data-parallel index may see different parts of the same rows."""
    meshes = [t.mesh.dims for rank in view.evidence.inventory for t in rank.tensors if t.mesh is not None]
    dims = {dim for dims in (tuple(name for name, _ in view.evidence.world.mesh), *meshes) for dim in dims}
    return any(splits_sequence(dim) for dim in dims if dim is not None)


def _wrong_second_epoch(
    epoch: Epoch, places: Places, size: int, split: bool, whole: Counter[str] | None
) -> Iterator[Finding]:
    """Yield what is wrong in the second epoch only. Without ``whole``, repeated and missing rows are not looked for."""
    if any(rank.later is None for ranks in places.values() for _, rank in ranks):
        return
    later = {
        index: [(number, replace(rank, batches=rank.later or ())) for number, rank in ranks]
        for index, ranks in places.items()
    }
    found = [*(() if split else _differing(later, size)), *_ending_early(later)]
    parts = _parts(epoch, later)
    if not found and whole is not None and _total(parts).keys() <= whole.keys():  # else an epoch has rows of its own
        found, doubt = _judge_repeated(parts, whole)
        found = found or ([] if doubt else [*_missing(parts, whole)])
    yield from (replace(finding, actual=f"in the second epoch: {finding.actual}") for finding in found)


def _repeating(epoch: Epoch) -> Iterator[Finding]:
    """Yield a finding if the loader shuffles, and the order of the second epoch is that of the first on every rank."""
    ranks = {number: rank for number, rank in enumerate(epoch.ranks) if rank.loader}
    shufflers = {rank.shuffled_by for rank in ranks.values()}
    if "" in shufflers or max((len({*rank.rows}) for rank in ranks.values()), default=0) < FEW_ROWS:
        return
    if any(rank.later != rank.batches for rank in ranks.values()):
        return
    shuffler = " and ".join(sorted(shufflers))
    explanation = _SET_EPOCH_IGNORED if any(rank.has_set_epoch for rank in ranks.values()) else _NO_SET_EPOCH
    actual = "the order of the first epoch again in the second"
    yield Finding(DATA, tuple(ranks), actual, f"another order, as {shuffler} shuffles", **explanation)


# Ranks of one data-parallel index.


def _differing(places: Places, size: int) -> Iterator[Finding]:
    for index, ranks in places.items():
        (first, expected), *others = ranks
        for number, rank in others:
            if rank.batches == expected.batches:
                continue
            both = f"both have data-parallel index {index} of {size}"
            if rank.batches == expected.batches[: len(rank.batches)] or rank.rows == expected.rows[: len(rank.rows)]:
                actual, explanation = f"{_number(rank)} instead of {_number(expected)} as on rank {first}", _GROUPS
            elif Counter(rank.rows) == Counter(expected.rows):
                actual, explanation = f"the rows of rank {first} in another order", _OWN_ORDER
            elif len(set(rank.rows) & set(expected.rows)) <= size * len(ranks):  # a sampler repeats some to fill up
                actual, explanation = f"other rows than rank {first}", _GROUPS
            else:
                actual, explanation = f"partly other rows than rank {first}", _OWN_ORDER
            yield Finding(DATA, (number,), actual, f"the rows of rank {first} in their order", both, **explanation)


def _number(rank: RankBatches) -> str:
    return f"{'' if rank.ended else 'at least '}{counted(len(rank.batches), 'batch')}"


def _ending_early(places: Places) -> Iterator[Finding]:
    lengths = {number: len(rank.batches) for ranks in places.values() for number, rank in ranks}
    most = max(lengths.values())
    longest = name_ranks([number for number, length in lengths.items() if length == most])
    for length in sorted(set(lengths.values()) - {most}):
        ranks = tuple(number for number, own in lengths.items() if own == length)
        actual = f"Subject(data=...) ends after {counted(length, 'batch')}"
        yield Finding(DATA, ranks, actual, f"{most}, as on {longest}", **_UNEVEN)


# Data-parallel ranks.


def _parts(epoch: Epoch, places: Places) -> list[_Part]:
    """Return what each data-parallel index sees, in the first part of an epoch if a loader may never end."""
    firsts = [ranks[0][1] for _, ranks in sorted(places.items())]
    length = None if all(rank.ended for rank in epoch.ranks) else _half_an_epoch(firsts)
    found = []
    for (_, ranks), first in zip(sorted(places.items()), firsts, strict=True):
        batches = first.batches[:length]
        rows = Counter(row for batch in batches for row in batch)
        found.append(_Part(tuple(number for number, _ in ranks), batches, rows))
    return found


def _half_an_epoch(ranks: Sequence[RankBatches]) -> int:
    """Return how many batches surely lie in the first epoch, which may be followed by others in another order.

    An epoch hands out each row once, except for those at its end that are dropped.
    """
    distinct = len({row for rank in ranks for row in rank.rows})
    length, rows = 0, 0
    for batches in zip(*(rank.batches for rank in ranks), strict=False):
        rows += sum(map(len, batches))
        if rows > distinct:
            break
        length += 1
    return max(2, length // 2)


def _whole(epoch: Epoch, parts: Sequence[_Part]) -> tuple[Counter[str] | None, str]:
    """Return all rows of the data with their numbers, by the epoch of a single rank; or None and the reason.

    The reason is empty for a data loader that was built: it exists on the ranks only.
    """
    alone = epoch.alone
    if alone is None:
        return None, epoch.problem
    if not alone.ended:
        return None, "the epoch of a single rank has more batches than are read"
    rows = Counter(alone.rows)
    if rows == parts[0].rows and any(part.rows != rows for part in parts):
        return None, "in a world of one rank, data() returns the part of rank 0; let it ask for the rank when it runs"
    strange = sum(count for row, count in _total(parts).items() if row not in rows)
    if strange >= max(map(len, alone.batches), default=1):  # a loader of one rank may drop its last rows
        return None, "the epoch of a single rank has other rows (packed, padded, drawn or augmented otherwise)"
    return rows, ""


def _total(parts: Sequence[_Part]) -> Counter[str]:
    return sum((part.rows for part in parts), Counter[str]())


def _judge_repeated(parts: Sequence[_Part], whole: Counter[str] | None) -> tuple[list[Finding], str]:
    """Return the findings about rows that are seen more often than the data has them, or why there may be none."""
    total = _total(parts)
    expected = Counter({row: 1 if whole is None else whole.get(row, 1) for row in total})
    excess = total - expected
    number = excess.total()
    if not number or _is_padding(parts, number, expected):
        return [], ""
    own = sum((part.rows - Counter(set(part.rows)) for part in parts), Counter[str]()).total()
    natural = (expected - Counter(set(expected))).total() if whole is not None else (len(parts) - 1) * own
    everything = whole is not None and 2 * len(whole) >= whole.total() and all(part.rows == whole for part in parts)
    if number <= 2 * natural and not everything:
        return [], "rows repeat in the part of a single rank as well, so repeated rows are not judged"
    if len(parts[0].batches) == 1 and number < _global_batch(parts):
        return [], "an epoch of one batch is too short to distinguish repeated rows from padding"
    return [*_describe_repeated(parts, excess, number)], ""


def _is_padding(parts: Sequence[_Part], number: int, expected: Counter[str]) -> bool:
    """Return whether repeated rows fill up the parts, or their last batches, to the same length."""
    if len({part.rows.total() for part in parts}) > 1:
        return False
    if number < len(parts):
        return True
    earlier = Counter(row for part in parts for batch in part.batches[:-1] for row in batch)
    return len(parts[0].batches) > 1 and number < _global_batch(parts) and not earlier - expected


def _global_batch(parts: Sequence[_Part]) -> int:
    return len(parts) * max(len(batch) for part in parts for batch in part.batches)


def _describe_repeated(parts: Sequence[_Part], excess: Counter[str], number: int) -> Iterator[Finding]:
    alike = grouped((frozenset(part.rows.items()), part) for part in parts)
    same = [found for found in alike.values() if len(found) > 1]
    detail = f"{counted(parts[0].rows.total(), 'row')} on each"
    for found in same:
        ranks = tuple(sorted(rank for part in found for rank in part.ranks))
        explanation = _NOT_SPLIT if len(alike) == 1 else _SPLIT_BY_ONE_DIM
        yield Finding(
            DATA, ranks, "the same rows on these ranks", "different rows on each of them", detail, **explanation
        )
    if same:
        return
    holders = [part for part in parts if not excess.keys().isdisjoint(part.rows)]
    shared = any(sum(row in part.rows for part in parts) > 1 for row in excess)
    yield Finding(
        DATA,
        tuple(sorted(rank for part in holders for rank in part.ranks)),
        f"{number} of {_total(parts).total()} rows of an epoch are repetitions",
        "each row once",
        "on several data-parallel ranks" if shared else "on the same rank",
        **(_OVERLAP if shared else _REPEATED_ALONE),
    )


def _missing(parts: Sequence[_Part], whole: Counter[str]) -> Iterator[Finding]:
    total = _total(parts)
    number = (whole - total).total()
    sizes = {len(batch) for part in parts for batch in part.batches}
    # Full batches only: the last rows, which fill none, are dropped. Otherwise a sampler drops less than one per rank.
    allowed = _global_batch(parts) if len(sizes) == 1 else len(parts)
    if number < allowed:
        return
    ranks = tuple(sorted(rank for part in parts for rank in part.ranks))
    twice = abs(number / whole.total() - (1 - 1 / len(parts))) < ROUGHLY
    actual = f"{number} of {whole.total()} rows of an epoch are on no rank"
    yield Finding(DATA, ranks, actual, "each row on one data-parallel rank", **(_SPLIT_TWICE if twice else _LEFT_OUT))


_NO_SET_EPOCH: Explanation = {
    "cause": "the order is derived from a seed that stays the same: nothing in what data() returns calls set_epoch() "
    "of the sampler, or its generator is seeded again where an epoch begins",
    "remedy": "call set_epoch(epoch) of the sampler where an epoch begins; if your trainer does, give what data() "
    "returns a set_epoch(), which is called with 1 before the second epoch is read",
}
_SET_EPOCH_IGNORED: Explanation = {
    "cause": "set_epoch(1) was called before the second epoch, and did not reach what shuffles: it is another sampler, "
    "or a copy of it",
    "remedy": "pass the epoch on to the sampler from which the loader takes its order",
}
_GROUPS: Explanation = {
    "cause": "the data is split over all ranks, by the world's size and the global rank, or by a framework that does "
    "not know the mesh, although these ranks compute one result together",
    "remedy": "split it by the data-parallel size and index: mesh['dp'].size() and mesh['dp'].get_local_rank() of all "
    "data-parallel dimensions",
}
_OWN_ORDER: Explanation = {
    "cause": "each rank shuffles or augments with its own seed or without one, although these ranks compute one result "
    "together",
    "remedy": "seed what shuffles and augments by the data-parallel index, or the same on all ranks",
}
_UNEVEN: Explanation = {
    "cause": "the ranks have different numbers of rows or files, or drop incomplete batches each on its own; in "
    "training the longer ones would wait for the others in a collective",
    "remedy": "cut the whole order to a multiple of (ranks x batch size) before it is split, or fill it up, as "
    "DistributedSampler does",
}
_NOT_SPLIT: Explanation = {
    "cause": "nothing splits the data: the sampler is missing or not used, or was built for one rank (before the "
    "process group, or with num_replicas=1)",
}
_SPLIT_BY_ONE_DIM: Explanation = {
    "cause": "the data is split over some of the data-parallel ranks only, such as those of dp_shard and not of "
    "dp_replicate, or those of one node (LOCAL_RANK)",
    "remedy": "split it over all data-parallel dimensions together: dp_replicate times dp_shard parts",
}
_OVERLAP: Explanation = {
    "cause": "the ranks take their parts from different orders, because each shuffles with its own seed, or the parts "
    "overlap",
    "remedy": "shuffle with the same seed on all ranks before the parts are taken, and take them with a stride: "
    "order[index::size]",
}
_REPEATED_ALONE: Explanation = {
    "cause": "the loader of one rank repeats rows, for example because each of its worker processes reads all of them",
    "remedy": "let each worker read its own part (torch.utils.data.get_worker_info())",
}
_SPLIT_TWICE: Explanation = {
    "cause": "the data is split twice: for example the dataset by rank, and then the loader by a sampler or a "
    "framework (prepare(), use_distributed_sampler)",
    "remedy": "split in one place only",
}
_LEFT_OUT: Explanation = {
    "cause": "the parts do not cover the data: a size that is rounded down, an end that is left out, or other seeds",
    "remedy": "take the parts with a stride, order[index::size], and fill them up to the same length",
}
