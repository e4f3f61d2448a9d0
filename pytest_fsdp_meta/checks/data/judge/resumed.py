"""The author's own batches after resuming: those that the uninterrupted run sees next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from pytest_fsdp_meta.checks.data.judge.epoch import DATA
from pytest_fsdp_meta.evidence import RankBatches
from pytest_fsdp_meta.judging.findings import Explanation, Finding, Mismatch
from pytest_fsdp_meta.judging.registry import data_check
from pytest_fsdp_meta.judging.view import Differs, NotDeclared, NotJudged, NotTaken, View, ranks_by
from pytest_fsdp_meta.text import counted

NEXT = "the batches that follow the checkpoint"
BEGINNING = "the epoch from its beginning after resuming"
FIRST_BEGINNING = "the first epoch from its beginning after resuming"
OTHERS = "other rows after resuming"
Rows = tuple[str, ...]


class _Run(NamedTuple):
    """What one rank sees: the batches of the epoch, the rows after the checkpoint, and those after resuming from it.

    ``earlier`` are the batches of the epoch before, if there is one.
    """

    batches: tuple[Rows, ...]
    earlier: tuple[Rows, ...]
    position: int
    rest: Rows
    resumed: Rows
    place: int


@data_check(
    promise="after saving within an epoch and resuming, each rank sees the batches that would have come next, and a "
    "whole epoch after them",
    needs=["inventory", "batches", "batches_resumed"],
    why="A run that restarts often then trains on some rows several times and never on others.",
    cause="the state of the loader, its sampler or its dataset is saved or loaded in part",
    remedy="save the position, the epoch and the seed of each rank's loader, and load them before the iteration begins",
    references=[
        *("KempnerInstitute/KempnerForge#51", "pytorch/torchtitan#409", "huggingface/accelerate#2016"),
        "wyim-pgl/transgenic#59",
    ],
    fields=["data"],
    uses=["batches_resharded"],
)
def batches_resume(view: View) -> Iterator[Finding]:
    epoch, resumed = view.evidence.batches, view.evidence.batches_resumed
    if epoch is None or resumed is None:
        raise NotDeclared(DATA)
    pairs = {number: pair for number, pair in enumerate(zip(epoch.ranks, resumed, strict=True)) if pair[0].loader}
    runs = {number: _run(rank, rank.saved_after, later.batches) for number, (rank, later) in pairs.items()}
    if not any(run.rest for run in runs.values()):
        raise NotJudged("the epoch ends at the checkpoint, after its first batches; give data at least 3 batches")
    known = {row for rank in epoch.ranks for row in (*rank.rows, *_flat(rank.resumable))}
    if len(known) == 1:
        raise NotJudged("all rows of data are equal, so no position in it can be distinguished")
    if all(rank.ended for rank in epoch.ranks):
        strange = sum(row not in known for run in runs.values() for row in run.resumed)
        total = sum(len(run.resumed) for run in runs.values())
        if 2 * strange > total:
            raise Differs(
                f"{strange} of {total} rows after resuming are in no rank's epoch: they are other rows, or drawn or "
                "augmented at random, which can be switched off in the test"
            )
    found = [*_findings(runs)]
    if not found and all(later.resumed_again is not None for _, later in pairs.values()):
        again = {
            number: _run(rank, rank.saved_after + later.saved_after, later.resumed_again or ())
            for number, (rank, later) in pairs.items()
        }
        found = [*_findings(again)]
        if all(rank.ended for rank in epoch.ranks):
            found = [replace(finding, actual=f"{finding.actual} a second time", **_SECOND) for finding in found]
    if not found:
        batch = {number: max(2, len(own.resumable[0])) for number, (own, _) in pairs.items() if own.resumable}
        thirds = {number: (own.next_rows, later.next_rows) for number, (own, later) in pairs.items()}
        ended = {number: (own.next_rows, later.rows_after_end) for number, (own, later) in pairs.items()}
        found = [
            *_short_epochs(batch, thirds, "in the epoch after the resumed one", _STAYS),
            *_short_epochs(batch, ended, "in the epoch after one at whose end the run has resumed", _ENDED_WITH_IT),
        ]
    yield from found
    if not found:
        _compare_in_other_size(view, epoch.ranks)


def _short_epochs(
    batch: Mapping[int, int], rows: Mapping[int, tuple[int | None, int | None]], where: str, explanation: Explanation
) -> Iterator[Finding]:
    """Report ranks that lack a batch of the expected rows; sequences that are packed at random may be one less."""
    found = ranks_by((number, (*rows[number], batch[number])) for number in batch)
    for (expected, actual, least), ranks in found.items():
        if expected is not None and actual is not None and expected - actual >= least:
            whole = f"{expected}, as without resuming"
            yield Finding(DATA, ranks, f"{counted(actual, 'row')} {where}", whole, **explanation)


def _compare_in_other_size(view: View, ranks: Sequence[RankBatches]) -> None:
    """Raise if rows of an epoch are repeated or missing where another number of data-parallel ranks goes on in it."""
    others = view.evidence.batches_resharded
    if others is None:
        if (reason := view.evidence.unavailable.get("batches_resharded")) and reason.error:
            raise NotTaken("batches_resharded")
        return
    firsts, theirs = ([*{rank.data_parallel: rank for rank in run if rank.loader}.values()] for run in (ranks, others))
    if len(firsts) == len(theirs) or not all(rank.ended for rank in (*ranks, *others)):
        return
    whole, before, after = (
        Counter(row for rank in run for row in _flat(rank.resumable[:end]))
        for run, end in ((firsts, None), (firsts, max(rank.saved_after for rank in ranks)), (theirs, None))
    )
    again = sum(count for row, count in (before + after - whole).items() if row in whole)
    missing = (whole - before - after).total()
    sizes = [len(run) * max((len(b) for rank in run for b in rank.resumable), default=0) for run in (firsts, theirs)]
    if max(again, missing) >= max(sizes):
        raise Differs(
            f"with {counted(len(theirs), 'data-parallel rank')} instead of {len(firsts)} after resuming, "
            f"{counted(again, 'row')} of the epoch come again and {missing} are on no rank; let resume() convert the "
            "position to the number of ranks, or raise if that is another one than before"
        )


def _findings(runs: Mapping[int, _Run]) -> Iterator[Finding]:
    found = ranks_by((number, _compare(run, runs)) for number, run in runs.items())
    for mismatch, ranks in found.items():
        if mismatch is None:
            continue
        explanation: Explanation = {"cause": mismatch.cause, "remedy": mismatch.remedy}
        if mismatch.actual in (BEGINNING, FIRST_BEGINNING) and len(ranks) < len(runs):
            explanation = _OF_ANOTHER_RANK
        detail = _count_rows(runs[ranks[0]]) if mismatch.actual == OTHERS else ""
        yield Finding(DATA, ranks, mismatch.actual, mismatch.expected, detail, **explanation)


def _run(epoch: RankBatches, position: int, resumed: Sequence[Rows]) -> _Run:
    rest, own = _flat(epoch.resumable[position:]), _flat(resumed)
    if not epoch.ended:
        own = own[: len(rest)]  # both go on, and this one was read further
    start = epoch.first_pass if not epoch.ended and position >= epoch.first_pass else 0
    earlier = epoch.batches[:start] if epoch.later is None else epoch.batches
    return _Run(epoch.resumable[start:], earlier, position - start, rest, own, epoch.data_parallel[0])


def _flat(batches: Sequence[Rows]) -> Rows:
    return tuple(row for batch in batches for row in batch)


def _compare(run: _Run, runs: Mapping[int, _Run]) -> Mismatch | None:
    if run.resumed == run.rest:
        return None
    if run.resumed == run.rest[: len(run.resumed)]:
        return Mismatch("ends early after resuming" if run.resumed else "no batches after resuming", NEXT, **_ENDED)
    if (start := _start_of(run, run.batches)) not in (None, run.position):
        return _describe_start(start, run.position)
    if (start := _start_of(run, run.earlier)) == 0:
        return Mismatch(FIRST_BEGINNING, NEXT, **_FROM_THE_BEGINNING)
    if start == run.position:
        return Mismatch("the batches at this position of the first epoch after resuming", NEXT, **_EPOCH_LOST)
    for other, theirs in runs.items():
        if theirs.place != run.place and run.resumed == theirs.rest:
            return Mismatch(f"the batches of rank {other} after resuming", NEXT, **_OF_ANOTHER_RANK)
    if Counter(run.resumed) == Counter(run.rest):
        return Mismatch("the rows that follow the checkpoint, in another order", NEXT, **_ANOTHER_ORDER)
    resumed, rest = _flat([own.resumed for own in runs.values()]), _flat([own.rest for own in runs.values()])
    return Mismatch(OTHERS, NEXT, **({} if Counter(resumed) == Counter(rest) else _ANOTHER_ORDER))


def _count_rows(run: _Run) -> str:
    before = set(_flat(run.batches[: run.position]))
    again = sum(row in before for row in run.resumed)
    missing = (Counter(run.rest) - Counter(run.resumed)).total()
    return f"{counted(again, 'row')} seen again, {counted(missing, 'row')} of those that follow missing"


def _start_of(run: _Run, epoch: Sequence[Rows]) -> int | None:
    """Return the number of the batch of this epoch at which the resumed rank has started, if there is one."""
    for start in range(len(epoch)):
        rows = _flat(epoch[start:])
        # Of a stream, what follows are the rows of later passes.
        if rows[: len(run.resumed)] == run.resumed[: len(rows)] and len(run.resumed) >= min(len(rows), len(run.rest)):
            return start
    return None


def _describe_start(start: int, position: int) -> Mismatch:
    if start == 0:
        return Mismatch(BEGINNING, NEXT, **_FROM_THE_BEGINNING)
    number = counted(abs(start - position), "batch")
    if start < position:
        return Mismatch(f"the last {number} before the checkpoint again after resuming", NEXT, **_OFF)
    return Mismatch(f"{number} after the checkpoint skipped after resuming", NEXT, **_SKIPPED)


_SECOND: Explanation = {
    "cause": "the position is counted from the first time that the run has resumed: loading sets where to begin, and "
    "not the number of batches that were handed out before",
    "remedy": "let load_state_dict() set the number that state_dict() returns",
}
_STAYS: Explanation = {
    "cause": "the position that was loaded stays set, so that each later epoch begins there as well",
    "remedy": "forget the position when the first epoch ends; where the loop itself builds another loader for later "
    "epochs, let data() return an object that does so",
}
_ENDED_WITH_IT: Explanation = {
    "cause": "the position at the end of an epoch is saved and loaded as one in the next epoch, which begins behind it",
    "remedy": "set the position to 0 when an epoch ends, and count the epoch, before the state is saved",
}
_FROM_THE_BEGINNING: Explanation = {
    "cause": "the position is not saved or not loaded: save() and resume() leave the loader out, or the loader is "
    "built again after its state was loaded",
    "remedy": "save the loader's state_dict() in save() and load it in resume(); a loop that skips batches instead "
    "should do so in what data() returns",
}
_SKIPPED: Explanation = {
    "cause": "batches that were prefetched count as seen, or the position is counted in other units when it is loaded "
    "(rows, steps, batches of all ranks)",
    "remedy": "save the position of the last batch that was handed out, and the unit of it",
}
_OFF: Explanation = {
    "cause": "the saved position is that of an earlier batch: it is updated after the step, or counted in other units "
    "(rows, steps, accumulated batches)",
    "remedy": "save the number of batches that were handed out",
}
_OF_ANOTHER_RANK: Explanation = {
    "cause": "this rank loads the state of another one, or none: only one rank saves its loader, or several ranks save "
    "theirs under one name",
    "remedy": "save the state of each rank's loader under a name of its own, such as data_<rank>.pt",
}
_ANOTHER_ORDER: Explanation = {
    "cause": "the order is drawn again: the seed, the epoch or the generator of the sampler is not restored, or a "
    "shuffle buffer is filled again",
    "remedy": "save the generator's state as it was when the epoch began, or derive the order from seed and epoch",
}
_EPOCH_LOST: Explanation = {
    "cause": "the position is restored and the epoch is not, so that the order is that of the first epoch again",
    "remedy": "save the number of the epoch with the position, and load both",
}
_ENDED: Explanation = {
    "cause": "the loader considers its epoch as over: a position beyond the end, or an iterator that was used up",
    "remedy": "save the position of this rank, in the units in which it is loaded",
}
