"""What a simulated loader needs by world size: the lines of the summary, and the table of the page."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_fsdp_meta.checks.simulation.facts import (
    BytesOfRanks,
    ModuleTraffic,
    RankSize,
    SimulatedSize,
    SimulatedStep,
    Traffic,
)
from pytest_fsdp_meta.reports.sizes import BAR_WIDTH, describe_sizes, size_view
from pytest_fsdp_meta.text import as_bytes

GIB = 2**30
SENT = (Traffic("all_gather", ("dp_shard",), 8, 2, GIB), Traffic("all_reduce", (), 4, 1, GIB // 2))


def size(ranks: int, parameters: int, peak: int = 0, stepping: int = 0, problem: str = "") -> SimulatedSize:
    step = SimulatedStep(GIB, 2 * GIB, GIB, peak, SENT, stepping=stepping) if peak else SimulatedStep(problem=problem)
    return SimulatedSize((("dp_shard", ranks),), (RankSize(0, parameters, 0, step),))


FAILED = SimulatedSize((("dp_shard", 2),), (), problem="rank 0 raised KeyError: 2")
LARGE, SMALL = size(64, GIB, 10 * GIB, 8 * GIB), size(8, 4 * GIB, 11 * GIB, 16 * GIB)


def test_lines_name_what_each_size_needs_and_where_it_fits():
    assert [*describe_sizes((LARGE, SMALL, FAILED), 12 * GIB)] == [
        "    2 ranks: not simulated (rank 0 raised KeyError: 2)",
        "    8 ranks: 4 GiB of parameters on a rank, 1 GiB of gradients, 2 GiB of optimizer state; a step gathers up "
        "to 1 GiB at a time, peaks at 16 GiB in the optimizer's step (11 GiB in forward and backward) and sends 1 GiB "
        "over dp_shard, 512 MiB over 4 ranks",
        "   64 ranks: 1 GiB of parameters on a rank, 1 GiB of gradients, 2 GiB of optimizer state; a step gathers up "
        "to 1 GiB at a time, peaks at 10 GiB in forward and backward (8 GiB in the optimizer's step) and sends 1 GiB "
        "over dp_shard, 512 MiB over 4 ranks",
        "   a step fits into 12 GiB on 64 ranks, not on 8",
    ]
    [line] = describe_sizes((size(8, GIB, problem="no CUDA"),), 12 * GIB)
    assert line == "   8 ranks: 1 GiB of parameters on a rank; no step was simulated (no CUDA)"


def test_an_optimizer_that_cannot_be_simulated_is_named():
    unknown = replace(LARGE, ranks=(replace(LARGE.ranks[0], step=replace(LARGE.step, unstepped="TypeError: no")),))
    line, fit = describe_sizes((unknown,), 12 * GIB)
    assert "peaks at 10 GiB in forward and backward (more in the optimizer's step is possible: TypeError: no)" in line
    assert fit.endswith("on 64 ranks, but what the optimizer needs while it steps is unknown")


def test_what_all_ranks_hold_is_said_where_it_is_known():
    even, uneven = BytesOfRanks(GIB, GIB, GIB), BytesOfRanks(0, GIB // 2, GIB)
    known = [replace(size(ranks, 7, problem="?"), parameters=held) for ranks, held in ((8, even), (64, uneven))]
    lines = [*describe_sizes(known, 0)]
    assert lines == [
        "    8 ranks: 1 GiB of parameters on every rank; no step was simulated (?)",
        "   64 ranks: 0 bytes to 1 GiB of parameters on a rank (512 MiB in the median); no step was simulated (?)",
    ]
    assert known[1].largest == GIB


@pytest.mark.parametrize(("memory", "scale"), [(0, 16), (12, 16), (32, 32)])
def test_bars_are_to_scale_and_end_at_the_peak(memory, scale):
    view = size_view((LARGE, SMALL, FAILED), memory * GIB)
    assert [row.size.size for row in view.rows] == [2, 8, 64]
    assert view.limit == (pytest.approx(memory / scale * BAR_WIDTH) if memory else None)
    ends = [sum(bar.width for bar in row.bars) for row in view.rows]
    assert ends == pytest.approx([0, 16 / scale * BAR_WIDTH, 10 / scale * BAR_WIDTH])
    assert view.rows[0].why == "rank 0 raised KeyError: 2"
    assert size_view((), memory * GIB) is None


def test_the_modules_of_the_largest_world_are_listed_by_what_they_send():
    gathered = replace(SENT[0], modules=(ModuleTraffic("a", 1, 5), ModuleTraffic("layers.*", 64, 70)))
    reduced = replace(SENT[1], modules=tuple(ModuleTraffic(f"m{n}", 1, n) for n in range(20)))
    step = replace(LARGE.step, traffic=(gathered, reduced))
    large = replace(LARGE, ranks=(replace(LARGE.ranks[0], step=step),))
    listed = [(traffic.where, part.module) for traffic, part in size_view((large, SMALL), 0).sent]
    assert listed == [("dp_shard", "layers.*"), *(("4 ranks", f"m{n}") for n in range(19, 12, -1))]
    assert size_view((FAILED,), 0).sent == ()


def test_amounts_have_three_digits():
    assert [as_bytes(n) for n in (5, 1536, 1010 * GIB, 3 * GIB // 2)] == ["5 bytes", "1.5 KiB", "1010 GiB", "1.5 GiB"]
