"""The author's own batches: which rows the ranks of a mesh see, and how they go on after resuming."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from pytest_fsdp_meta.evidence import Evidence, RankBatches
from tests.checks.evidence_factory import findings_of, healthy, place, undeclared, verdict, with_batches

FOLLOW, RESUME = "batches_follow_the_mesh", "batches_resume"
SAME, DIFFERENT = "the same rows on these ranks", "different rows on each of them"
ONCE = "each row once"
OTHER_ROWS = "the epoch of a single rank has other rows (packed, padded, drawn or augmented otherwise)"
NEXT = "the batches that follow the checkpoint"
BOTH = "both have data-parallel index"
AS_RANK_0 = ("the rows of rank 0 in their order", f"{BOTH} 0 of 2")
REPEATING = "rows repeat in the part of a single rank as well, so repeated rows are not judged"
ON_EACH = [("data", (0, 1), SAME, DIFFERENT, "4 rows on each")]
TP = {"dp_shard": 2, "tp": 2}


def epoch(*by_rank: str, alone: str | None = "all", **facts: Any) -> Evidence:
    """Return evidence with the batches of each rank, separated by spaces; one letter is one row."""
    single = alone if alone in ("all", None) else alone.split()
    return with_batches(healthy(len(by_rank)), [text.split() for text in by_rank], single, **facts)


def assert_found(check: str, evidence: Evidence, findings: list[object], cause: str) -> None:
    found = verdict(check, evidence)
    assert findings_of(found) == findings
    assert all(finding.cause.startswith(cause) for finding in found.findings)


def on_tp(*by_rank: str, alone: str | None = None, mesh: dict[str, int] = TP) -> Evidence:
    """Return the evidence of a mesh of 2 x 2 ranks, where two ranks share each data-parallel index."""
    single = alone.split() if alone else None
    found = with_batches(healthy(mesh=mesh), [text.split() for text in by_rank], single)
    ranks = tuple(replace(rank, data_parallel=(number // 2, 2)) for number, rank in enumerate(found.batches.ranks))
    return replace(found, batches=replace(found.batches, ranks=ranks))


def endless_alone(evidence: Evidence) -> Evidence:
    alone = replace(evidence.batches.alone, ended=False)
    return replace(evidence, batches=replace(evidence.batches, alone=alone))


def one_index(*by_rank: str) -> Evidence:
    found = epoch(*by_rank, alone=None)
    ranks = tuple(replace(rank, data_parallel=(0, 1)) for rank in found.batches.ranks)
    return replace(found, batches=replace(found.batches, ranks=ranks))


def without_loader(evidence: Evidence, *numbers: int) -> Evidence:
    ranks = [
        replace(rank, loader=False, batches=()) if number in numbers else rank
        for number, rank in enumerate(evidence.batches.ranks)
    ]
    return replace(evidence, batches=replace(evidence.batches, ranks=tuple(ranks)))


RIGHT = {
    "all once": epoch("AB CD", "EF GH"),
    "filled up, by as many rows as there are ranks": epoch("AC EA", "BD FB", alone="AB CD EF"),
    "one row filled up": epoch("AC E", "BD A", alone="AB CD E"),
    "last batches filled up": epoch("ABC GAB", "DEF CDE", alone="ABC DEF G"),
    "rows left out that fill no batch": epoch("ABC", "DEF", alone="ABC DEF GHI JK"),
    "a row left out by the sampler": epoch("AB C", "DE F", alone="AB CD EF G"),
    "a single rank drops other rows": epoch("AB CD", "EF GI", alone="AB CD EF GH"),
    "rows that the data repeats": epoch("AA BC", "AB DD", alone="AA AB BC DD"),
    "all rows are equal": epoch("AA AA", "AA AA", alone="AA AA AA AA"),
    "along tp": on_tp("AB CD", "AB CD", "EF GH", "EF GH", alone="AB CD EF GH"),
    "one data-parallel rank": one_index("AB", "AB"),
}
RIGHT["other ranks get their batches from the first one"] = without_loader(RIGHT["along tp"], 1, 3)


@pytest.mark.parametrize("name", RIGHT)
def test_right_batches_pass(name):
    found = verdict(FOLLOW, RIGHT[name])
    assert (found.status, found.findings, found.reason) == ("passed", (), "")


IN_PART = {
    "a function that holds the rank": (
        epoch("AB CD", "EF GH", alone="AB CD"),
        "missing rows were not looked for: in a world of one rank, data() returns the part of rank 0; let it ask for "
        "the rank when it runs",
    ),
    "random rows": (epoch("AB CD", "EF GH", alone="IJ KL MN OP"), f"missing rows were not looked for: {OTHER_ROWS}"),
    "rows drawn with replacement": (epoch("AA BC", "AD DE", alone="AB BD CC EA"), REPEATING),
    "rows that may repeat by themselves": (epoch("AA BC", "AD EE", alone=None), REPEATING),
    "one batch each": (
        epoch("ABC", "ABC", alone="ABC"),
        "an epoch of one batch is too short to distinguish repeated rows from padding",
    ),
    "without an end on a single rank": (
        endless_alone(epoch("AB CD", "EF GH")),
        "missing rows were not looked for: the epoch of a single rank has more batches than are read",
    ),
    "parts of split sequences": (
        on_tp("AB CD", "ab cd", "EF GH", "ef gh", mesh={"dp_shard": 2, "cp": 2}),
        "the ranks of one data-parallel index see different rows, maybe parts of split sequences",
    ),
}


@pytest.mark.parametrize("name", IN_PART)
def test_what_cannot_be_known_is_not_green(name):
    evidence, reason = IN_PART[name]
    found = verdict(FOLLOW, evidence)
    assert (found.status, found.findings) == ("skipped", ())
    assert found.reason == reason


BUILT = {
    "a loader that was built": epoch("AB CD", "EF GH", alone=None),
    "a loader that was built, and fills up": epoch("AC EA", "BD FB", alone=None),
    "without an end": epoch("AB CD AB CD", "EF GH EF GH", alone=None, ended=False),
    "another split in each epoch": epoch("AB CD IJ KL EF GA", "EF GH MN OP AB DC", alone=None, ended=False),
}
"""Epochs of loaders that were built: a world of one rank has none."""


@pytest.mark.parametrize("name", BUILT)
def test_a_loader_that_was_built_passes_and_says_what_a_function_would_add(name):
    found = verdict(FOLLOW, BUILT[name])
    assert found.status == "passed"
    assert found.reason == "missing rows are only looked for where data is a function: data=lambda: DataLoader(...)"


WRONG = {
    "the same on all, in another order": (epoch("AB CD", "DC AB", alone=None), ON_EACH, "nothing splits the data"),
    "parts that overlap by a row": (
        epoch("AB CD E", "EF GH", alone="AB CD EF GH"),
        [("data", (1,), "Subject(data=...) ends after 2 batches", "3, as on rank 0", "")],
        "the ranks have different numbers of rows or files",
    ),
    "parts that overlap by a row, with as many batches": (
        epoch("ABC DE", "EFG H", alone="ABC DEF GH"),
        [("data", (0, 1), "1 of 9 rows of an epoch are repetitions", ONCE, "on several data-parallel ranks")],
        "the ranks take their parts from different orders",
    ),
    "workers that all read everything": (
        epoch("AB AB CD CD", "EF EF GH GH", alone="AB CD EF GH"),
        [("data", (0, 1), "8 of 16 rows of an epoch are repetitions", ONCE, "on the same rank")],
        "the loader of one rank repeats rows",
    ),
    "an end that is left out": (
        epoch("AB C", "EF G", alone="AB CD EF GH"),
        [("data", (0, 1), "2 of 8 rows of an epoch are on no rank", "each row on one data-parallel rank", "")],
        "the parts do not cover the data",
    ),
    "empty on one rank": (
        epoch("AB CD", "", alone=None),
        [("data", (1,), "Subject(data=...) ends after 0 batches", "2, as on rank 0", "")],
        "the ranks have different numbers of rows or files",
    ),
    "fewer batches along tp": (
        on_tp("AB CD", "AB", "EF GH", "EF GH"),
        [("data", (1,), "1 batch instead of 2 batches as on rank 0", *AS_RANK_0)],
        "the data is split over all ranks",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_batches_are_found_with_their_cause(name):
    assert_found(FOLLOW, *WRONG[name])


@pytest.mark.parametrize(
    ("evidence", "status", "reason"),
    [
        (
            *(epoch("", "", alone=None), "error"),
            "Subject(data=...): it has no batches, but should have some on every rank",
        ),
        (epoch("AB CD", alone=None), "skipped", "a single rank sees all rows"),
    ],
)
def test_data_that_is_not_judged(evidence, status, reason):
    assert (verdict(FOLLOW, evidence).status, verdict(FOLLOW, evidence).reason) == (status, reason)


def test_a_dimension_of_the_models_own_mesh_may_split_sequences():
    evidence = on_tp("AB CD", "ab cd", "EF GH", "ef gh", mesh={"dp_shard": 4})
    own = place(evidence, "layers.0.weight", {"dp": 2, "cp": 2}, "S(0)", "R")
    assert verdict(FOLLOW, evidence).status == "failed"
    assert verdict(FOLLOW, own).status == "skipped"


# After resuming; the checkpoint is after the first batch.


def resumed(*by_rank: str, size: int = 2, epochs: Sequence[str] = ("AB CD EF", "GH IJ KL"), **facts: Any) -> Evidence:
    """Return evidence of an epoch whose ranks see these batches after resuming."""
    evidence = epoch(*epochs[:size], alone=None, **facts)
    ranks = tuple(
        replace(rank, batches=tuple(map(tuple, text.split())), saved_after=0)
        for rank, text in zip(evidence.batches.ranks, by_rank, strict=True)
    )
    return replace(evidence, batches_resumed=ranks)


RESUMED = {
    "another order": (
        resumed("FC ED", "IJ KL"),
        [("data", (0,), "the rows that follow the checkpoint, in another order", NEXT, "")],
        "the order is drawn again",
    ),
    "nothing": (
        resumed("", ""),
        [("data", (0, 1), "no batches after resuming", NEXT, "")],
        "the loader considers its epoch as over",
    ),
    "ends early": (
        resumed("CD", "IJ"),
        [("data", (0, 1), "ends early after resuming", NEXT, "")],
        "the loader considers its epoch as over",
    ),
    "the last batch again": (
        resumed("CD EF MN", "IJ KL OP", epochs=("AB CD EF MN", "GH IJ KL OP"), saved_after=2),
        [("data", (0, 1), "the last 1 batch before the checkpoint again after resuming", NEXT, "")],
        "the saved position is that of an earlier batch",
    ),
}


@pytest.mark.parametrize("name", RESUMED)
def test_other_batches_after_resuming_are_found_with_their_cause(name):
    assert_found(RESUME, *RESUMED[name])


@pytest.mark.parametrize(
    "evidence",
    [
        resumed("CD EF", "IJ KL"),
        resumed("CDE F", "IJ KL"),
        resumed("CD EF AB CD", "IJ KL GH", ended=False),
        without_loader(resumed("CD EF", ""), 1),
        resumed("CD EF", size=1),
    ],
    ids=["next", "in other batches", "without an end", "another rank without a loader", "alone"],
)
def test_the_batches_that_follow_pass(evidence):
    found = verdict(RESUME, evidence)
    assert (found.status, found.findings, found.reason) == ("passed", (), "")


@pytest.mark.parametrize(
    ("evidence", "reason"),
    [
        (
            resumed("", "", epochs=("AB", "CD")),
            "the epoch ends at the checkpoint, after its first batches; give data at least 3 batches",
        ),
        (
            resumed("AA", "AA", epochs=("AA AA", "AA AA")),
            "all rows of data are equal, so no position in it can be distinguished",
        ),
        (
            resumed("MN OP", "QR ST"),
            "8 of 8 rows after resuming are in no rank's epoch: they are other rows, or drawn or augmented at random, "
            "which can be switched off in the test",
        ),
    ],
    ids=["too short", "equal", "random"],
)
def test_what_cannot_be_known_after_resuming_is_not_green(evidence, reason):
    found = verdict(RESUME, evidence)
    assert (found.status, found.findings, found.reason) == ("skipped", (), reason)


def in_two_epochs(*later: str, shuffled_by: str = "DistributedSampler", **facts: Any) -> Evidence:
    """Return evidence of a first epoch "ABCD EFGH" and "IJKL MNOP", and of this second one."""
    found = epoch("ABCD EFGH", "IJKL MNOP")
    ranks = tuple(
        replace(rank, later=tuple(map(tuple, text.split())), shuffled_by=shuffled_by, **facts)
        for rank, text in zip(found.batches.ranks, later, strict=True)
    )
    return replace(found, batches=replace(found.batches, ranks=ranks))


@pytest.mark.parametrize(
    "evidence",
    [
        in_two_epochs("ABCD EFGH", "IJKL MNOP", shuffled_by=""),
        in_two_epochs("ABCD EFGH", "IJKL MPON"),
        in_two_epochs("QRST UVWX", "YZab cdef"),
    ],
    ids=["not shuffled", "another order on one rank", "other rows"],
)
def test_other_second_epochs_pass(evidence):
    assert (verdict(FOLLOW, evidence).status, verdict(FOLLOW, evidence).findings) == ("passed", ())


def test_what_is_wrong_in_the_second_epoch_only():
    [found] = verdict(FOLLOW, in_two_epochs("ABCD EFGH", "ABCD EFGH", shuffled_by="")).findings
    assert found.actual == f"in the second epoch: {SAME}"


def test_an_epoch_that_was_set_and_shuffles_alike_has_its_own_cause():
    found = verdict(FOLLOW, in_two_epochs("ABCD EFGH", "IJKL MNOP", shuffled_by="Chunks", has_set_epoch=True))
    assert [finding.cause.split(",")[0] for finding in found.findings] == [
        "set_epoch(1) was called before the second epoch"
    ]


def test_few_rows_of_a_rank_may_have_the_same_order_twice():
    found = epoch("AB CD", "EF GH", "IJ KL")
    ranks = tuple(replace(rank, later=rank.batches, shuffled_by="RandomSampler") for rank in found.batches.ranks)
    assert verdict(FOLLOW, replace(found, batches=replace(found.batches, ranks=ranks))).status == "passed"


def test_rows_that_only_the_second_epoch_has_can_be_resumed():
    """Masked or rotating rows follow from the seed, the epoch and the row."""
    found = resumed("OP QR", "UV WX")
    ranks = tuple(
        replace(rank, later=tuple(map(tuple, text.split())))
        for rank, text in zip(found.batches.ranks, ("MN OP QR", "ST UV WX"), strict=True)
    )
    assert verdict(RESUME, replace(found, batches=replace(found.batches, ranks=ranks))).status == "passed"


def resumed_again(*by_rank: str) -> Evidence:
    """Return evidence of ranks that have resumed after the first batch, and again after two more."""
    evidence = resumed("CD EF GH IJ", "MN OP QR ST", epochs=("AB CD EF GH IJ", "KL MN OP QR ST"))
    ranks = tuple(
        replace(rank, saved_after=2, resumed_again=tuple(map(tuple, text.split())))
        for rank, text in zip(evidence.batches_resumed, by_rank, strict=True)
    )
    return replace(evidence, batches_resumed=ranks)


def test_resuming_a_second_time():
    assert verdict(RESUME, resumed_again("GH IJ", "QR ST")).status == "passed"
    evidence = resumed_again("EF GH IJ", "OP QR ST")
    assert [f.actual for f in verdict(RESUME, evidence).findings] == [
        "the last 1 batch before the checkpoint again after resuming a second time"
    ]
    # A first time that fails explains the second.
    first = tuple(replace(rank, batches=rank.batches[1:]) for rank in evidence.batches_resumed)
    found = verdict(RESUME, replace(evidence, batches_resumed=first))
    assert [finding.actual for finding in found.findings] == ["1 batch after the checkpoint skipped after resuming"]


def in_other_size(text: str, **facts: Any) -> Evidence:
    """Return evidence of two ranks that have seen "ABCD" and "EFGH", and of one that goes on from there."""
    evidence = resumed("IJ KL", "MN OP", epochs=("AB CD IJ KL", "EF GH MN OP"), saved_after=2)
    alone = RankBatches((0, 1), tuple(map(tuple, text.split())), **facts)
    return replace(evidence, batches_resharded=(alone,))


def test_resuming_with_another_number_of_ranks():
    for right in (in_other_size("IM JN KO LP"), in_other_size("IM JN KO"), in_other_size("AE BF CG", ended=False)):
        assert verdict(RESUME, right).status == "passed"
    found = verdict(RESUME, in_other_size("CG DH IM JN KO LP"))
    assert (found.status, found.why, found.reason.partition(";")[0]) == (
        *("skipped", "differs"),
        "with 1 data-parallel rank instead of 2 after resuming, 4 rows of the epoch come again and 0 are on no rank",
    )
    refused = undeclared(resumed("CD EF", "IJ KL"), "batches_resharded", why="raised ValueError")
    assert verdict(RESUME, refused).status == "passed"
    hung = undeclared(resumed("CD EF", "IJ KL"), "batches_resharded", why="rank 0 hung", error=True)
    assert verdict(RESUME, hung).status == "error"
