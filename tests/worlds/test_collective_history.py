"""The description of a hang names the first collective that differs between ranks, and shows those around it."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

import pytest

from pytest_fsdp_meta.worlds.diagnosis.flight_recorder import Collective, Flight, Group
from pytest_fsdp_meta.worlds.diagnosis.hang import describe
from tests.world_help import fails, world_of


def collective(
    number: int, name: str = "all_reduce", done: bool = False, tensors: str = "float[1]", line: int = 7
) -> Collective:
    return Collective("0", number, name, tensors, f"x.py:{line}" if line else "", done)


def flight(*collectives: Collective, size: int = 2) -> Flight:
    return Flight(collectives, {"0": Group("the default group", tuple(range(size)))})


def history(*lines: int, waits: bool = False, first: int = 1, size: int = 2) -> Flight:
    """Return the flight of a rank that called all_reduce at these lines; it may wait in the last one."""
    last = first + len(lines) - 1
    return flight(*(collective(n, done=n < last or not waits, line=at) for n, at in enumerate(lines, first)), size=size)


def view_of(*flights: Flight | None, returned: Collection[int] = ()) -> list[str]:
    """Return the description without the line that names the group, and without its indentation."""
    title, *lines = describe(dict(enumerate(flights)), returned).splitlines() or ["in the default group:"]
    assert title == "in the default group:"
    assert all(line.startswith("  ") for line in lines)
    return [line[2:] for line in lines]


TABLE = "collectives of each rank (> marks the first difference):"


@pytest.mark.parametrize(
    ("flights", "lines"),
    [
        ([flight(collective(1, done=True)), flight(collective(1, done=True))], []),
        ([flight(), flight()], []),
        ([None, None], []),
        (
            [flight(collective(4)), flight(collective(4))],
            [
                "ranks 0, 1 wait in all_reduce number 4 (float[1], x.py:7)",
                "all ranks entered it, but it does not complete",
            ],
        ),
        (
            [flight(collective(4)), None],
            ["rank 0 waits in all_reduce number 4 (float[1], x.py:7)", "rank 1 did not respond"],
        ),
        (
            [flight(collective(1)), flight()],
            ["rank 0 waits in all_reduce number 1 (float[1], x.py:7)", "rank 1 did not enter it, nor any earlier one"],
        ),
        (
            [flight(collective(1)), flight(collective(1, "broadcast", done=True), collective(2))],
            [
                "rank 0 waits in all_reduce number 1 (float[1], x.py:7)",
                "rank 1 waits in all_reduce number 2 (float[1], x.py:7)",
                "mismatch: collective number 1 differs between these ranks; if rank 1 skipped its collective 1, it "
                "would match rank 0",
                TABLE,
                "  > 1  rank 0  all_reduce (float[1], x.py:7)  waits",
                "       rank 1  broadcast (float[1], x.py:7)   completed",
                "    2  rank 1  all_reduce (float[1], x.py:7)  waits",
                "       rank 0  did not enter",
            ],
        ),
        (
            [flight(collective(1)), flight(collective(1, "broadcast", done=True))],
            [
                "rank 0 waits in all_reduce number 1 (float[1], x.py:7)",
                "rank 1 completed broadcast number 1 (float[1], x.py:7)",
                "mismatch: collective number 1 differs between these ranks",
            ],
        ),
        (
            [flight(collective(1)), flight(collective(1, tensors="float[2]"))],
            [
                "rank 0 waits in all_reduce number 1 (float[1], x.py:7)",
                "rank 1 waits in all_reduce number 1 (float[2], x.py:7)",
                "mismatch: collective number 1 differs between these ranks",
            ],
        ),
        (
            [flight(collective(1, "scatter")), flight(collective(1, "scatter", tensors=""))],
            [
                "rank 0 waits in scatter number 1 (float[1], x.py:7)",
                "rank 1 waits in scatter number 1 (x.py:7)",
                "all ranks entered it, but it does not complete",
            ],
        ),
    ],
)
def test_describe_collectives(flights: list[Flight | None], lines: list[str]) -> None:
    assert view_of(*flights) == lines


def mismatched(tensors: str, name: str = "all_reduce", size: int = 3) -> Flight:
    """Return the flight of a rank that waits in number 4 and completed number 2 with these tensors."""
    return flight(
        collective(1, done=True),
        collective(2, name, done=True, tensors=tensors, line=8),
        collective(3, done=True, line=9),
        collective(4, line=10),
        size=size,
    )


def test_a_mismatch_that_completed_earlier_is_named_and_shown() -> None:
    last = flight(*mismatched("float[6]").collectives[:3], size=3)
    assert view_of(mismatched("float[6]"), mismatched("int[6]"), last, returned=[2]) == [
        "ranks 0, 1 wait in all_reduce number 4 (float[1], x.py:10)",
        "rank 2 returned; last in this group: all_reduce number 3 (float[1], x.py:9)",
        "mismatch: collective number 2 is the first that differs between these ranks, although it completed",
        TABLE,
        "    1  ranks 0-2   all_reduce (float[1], x.py:7)   completed",
        "  > 2  ranks 0, 2  all_reduce (float[6], x.py:8)   completed",
        "       rank 1      all_reduce (int[6], x.py:8)     completed",
        "    3  ranks 0-2   all_reduce (float[1], x.py:9)   completed",
        "    4  ranks 0, 1  all_reduce (float[1], x.py:10)  wait",
        "       rank 2      returned",
    ]


@pytest.mark.parametrize(
    ("mine", "others"),
    [
        (mismatched("float[6]"), mismatched("float[6]")),
        (mismatched("float[2, 3]"), mismatched("float[6]")),
        (mismatched("float[]"), mismatched("float[1]")),
        (mismatched("float[6]", "all_to_all"), mismatched("float[2]", "all_to_all")),
        (mismatched("", "gather"), mismatched("int[2], int[3]", "gather")),
    ],
)
def test_histories_that_match_say_nothing(mine: Flight, others: Flight) -> None:
    assert view_of(mine, others, others) == [
        "ranks 0-2 wait in all_reduce number 4 (float[1], x.py:10)",
        "all ranks entered it, but it does not complete",
    ]


def test_many_ranks_need_few_lines() -> None:
    ranks = [mismatched(f"float[{rank}]", size=64) for rank in range(64)]
    view = view_of(*ranks)
    assert "  > 2  rank 0      all_reduce (float[0], x.py:8)                   completed" in view
    assert "       ranks 3-63  all_reduce (61 other kinds of tensors, x.py:8)  completed" in view
    assert len(view) == 10
    uneven = [flight(collective(1, "all_to_all", tensors=f"int[{rank}]"), size=64) for rank in range(64)]
    assert view_of(*uneven)[3] == "ranks 3-63 wait in all_to_all number 1 (61 other kinds of tensors, x.py:7)"
    left = [flight(collective(1, "gather", tensors=f"int[{rank}]", done=True), size=64) for rank in range(63)]
    view = view_of(*left, flight(collective(1, "gather"), size=64))
    assert len(view) == 5
    assert view[4] == "ranks 3-62 completed gather number 1 (60 other kinds of tensors, x.py:7)"


def test_recordings_that_do_not_overlap_are_not_compared() -> None:
    late = flight(*(collective(number, "broadcast", done=True) for number in range(21, 41)), size=3)
    early = flight(*(collective(number, done=number < 5) for number in range(1, 6)), size=3)
    assert view_of(early, late, late) == [
        "rank 0 waits in all_reduce number 5 (float[1], x.py:7)",
        "ranks 1, 2 completed broadcast number 40 (float[1], x.py:7)",
    ]
    assert view_of(early, flight(collective(5, "broadcast"), size=3), late)[3] == (
        "mismatch: collective number 5 differs between these ranks"
    )


def test_only_what_every_rank_still_has_is_compared() -> None:
    ranks = [mismatched("float[6]"), mismatched("int[6]"), flight(*mismatched("int[6]").collectives[2:], size=3)]
    assert view_of(*ranks) == [
        "ranks 0-2 wait in all_reduce number 4 (float[1], x.py:10)",
        "all ranks entered it, but it does not complete",
    ]


def test_a_mismatch_in_the_first_collective_is_the_first() -> None:
    ranks = [flight(collective(1, done=True, tensors=f"{kind}[1]"), collective(2)) for kind in ("float", "int")]
    assert view_of(*ranks)[1] == (
        "mismatch: collective number 1 is the first that differs between these ranks, although it completed"
    )


def test_a_mismatch_in_the_oldest_collective_may_not_be_the_first() -> None:
    mine = flight(*(collective(number, done=number < 9) for number in range(3, 10)))
    other = flight(*(collective(number, done=number < 9, tensors="int[1]") for number in range(6, 10)))
    view = view_of(mine, other)
    assert view[2:5] == [
        "mismatch: collective number 6 differs between these ranks, although it completed; older ones are no longer "
        "recorded",
        TABLE,
        "  > 6  rank 0  all_reduce (float[1], x.py:7)  completed",
    ]


def test_a_mismatch_is_the_first_of_those_that_are_recorded() -> None:
    ranks = [
        flight(*(collective(n, done=n < 9, tensors=f"{kind if n == 7 else 'float'}[1]") for n in range(3, 10)))
        for kind in ("float", "int")
    ]
    assert view_of(*ranks)[1] == (
        "mismatch: collective number 7 is the first since number 3 that differs between these ranks, although it "
        "completed"
    )


def test_what_differs_behind_the_hang_is_not_its_cause() -> None:
    both = [flight(collective(1), collective(2, name), size=3) for name in ("all_reduce", "broadcast")]
    assert view_of(*both, flight(size=3)) == [
        "ranks 0, 1 wait in all_reduce number 1 (float[1], x.py:7)",
        "rank 2 did not enter it, nor any earlier one",
    ]


EXTRA = "hint: collective number {} was called at x.py:{} by ranks 0, 2, but at x.py:{} by rank 1"


@pytest.mark.parametrize(
    ("others", "mine", "hint"),
    [
        # An extra all_reduce of rank 1 pairs up with the next one of the others, and so on.
        (
            (5, 8, 9, 11),
            (5, 7, 8, 9, 11),
            EXTRA.format(2, 8, 7) + "; if rank 1 skipped its collective 2, it would match ranks 0, 2",
        ),
        (
            (8, 8, 8),
            (7, 8, 8, 8),
            EXTRA.format(1, 8, 7) + "; if rank 1 skipped its collective 1, it would match ranks 0, 2",
        ),
        # Rank 1 leaves one out.
        (
            (5, 7, 8, 9),
            (5, 8, 9),
            EXTRA.format(2, 7, 8) + "; if rank 1 also called collective 2 of ranks 0, 2, it would match them",
        ),
        # Rank 1 has fewer batches, and evaluates while the others still train.
        ((3, 3, 3, 6), (3, 6, 6), EXTRA.format(2, 3, 6)),
        (
            (3, 6),
            (3, 3, 3, 6),
            EXTRA.format(2, 6, 3) + "; if rank 1 skipped its collectives 2-3, it would match ranks 0, 2",
        ),
        # Ranks in two branches to the end.
        ((5, 31, 32), (5, 51, 52, 53), EXTRA.format(2, 31, 51)),
        # Branches that belong together; the last one was taken before.
        ((5, 31, 6), (5, 51, 6, 7), ""),
        ((31, 6, 31), (51, 6, 51, 7), ""),
        ((31, 31), (51, 51, 7), ""),
        # Unknown lines, as in a backward.
        ((5, 0), (5, 7, 9), ""),
        # Nothing precedes the hang.
        ((31,), (31, 7), ""),
    ],
)
def test_calls_at_other_lines_are_a_hint(others: tuple[int, ...], mine: tuple[int, ...], hint: str) -> None:
    ranks = history(*others, size=3), history(*mine, waits=len(mine) > len(others), size=3)
    flights = [ranks[0], ranks[1], ranks[0]]
    if len(mine) < len(others):
        flights = [history(*others, waits=True, size=3), ranks[1], history(*others, waits=True, size=3)]
    view = view_of(*flights)
    assert [line for line in view if line.startswith(("hint", "mismatch"))] == ([hint] if hint else [])
    assert (TABLE in view) == bool(hint)


def test_ranks_that_wait_at_other_lines_are_listed_without_a_hint() -> None:
    assert view_of(flight(collective(1, line=3)), flight(collective(1, line=4))) == [
        "rank 0 waits in all_reduce number 1 (float[1], x.py:3)",
        "rank 1 waits in all_reduce number 1 (float[1], x.py:4)",
        "all ranks entered it, but it does not complete",
    ]


def test_a_hint_before_a_mismatch() -> None:
    view = view_of(
        flight(collective(1, done=True), collective(2, line=8)),
        flight(collective(1, done=True, line=3), collective(2, "barrier", tensors="", line=4)),
    )
    assert view[2:6] == [
        "mismatch: collective number 2 differs between these ranks",
        "hint: collective number 1 was called at x.py:7 by rank 0, but at x.py:3 by rank 1",
        TABLE,
        "  > 1  rank 0  all_reduce (float[1], x.py:7)  completed",
    ]


def test_a_hint_counts_the_lines_of_many_ranks() -> None:
    flights = [history(rank, *((70,) if rank == 2 else ()), waits=rank == 2, size=8) for rank in range(1, 9)]
    hint = "hint: collective number 1 was called at x.py:1 by rank 0, at x.py:2 by rank 1 and at 6 other lines"
    assert hint in view_of(*flights)


def hang_view(function: Callable[[], object]) -> list[str]:
    stuck = world_of(3, timeout=2.0)
    stuck.start()
    return fails(stuck, function).view.splitlines()


def test_gloo_completes_an_all_reduce_of_integers_and_floats() -> None:
    """The ranks then have wrong numbers, and hang when rank 1 takes a branch because of them."""

    def add() -> None:
        import torch
        import torch.distributed as dist

        dist.barrier()
        count = torch.ones(4, dtype=torch.int32 if dist.get_rank() == 1 else torch.float32)
        dist.all_reduce(count)
        dist.all_reduce(torch.ones(3))
        if (count > 1000).any():  # the bits of floats, on the rank with integers
            dist.barrier()

    title, waits, _, mismatch, _, *table = hang_view(add)
    assert title == "in the default group:"
    assert waits.startswith("  rank 1 waits in barrier number 4")
    assert mismatch == (
        "  mismatch: collective number 2 is the first that differs between these ranks, although it completed"
    )
    assert re.match(r"    > 2  ranks 0, 2  all_reduce \(float\[4\], test_\w+\.py:\d+\)  completed", table[1])
    assert re.match(r"         rank 1      all_reduce \(int\[4\], test_\w+\.py:\d+\)    completed", table[2])
    assert table[-1] == "         ranks 0, 2  returned"


def test_an_extra_all_reduce_pairs_up_with_the_next_line() -> None:
    def add() -> None:
        import torch
        import torch.distributed as dist

        for number in range(2):
            dist.all_reduce(torch.ones(4))
            if number == 0 and dist.get_rank() == 1:
                dist.all_reduce(torch.ones(4))
        dist.all_reduce(torch.ones(4))

    view = hang_view(add)
    hint = next(line for line in view if line.startswith("  hint"))
    assert re.fullmatch(
        r"  hint: collective number 2 was called at (\S+) by ranks 0, 2, but at (\S+) by rank 1; "
        "if rank 1 skipped its collective 2, it would match ranks 0, 2",
        hint,
    )
    assert view[1].startswith("  rank 1 waits in all_reduce number 4 ")
