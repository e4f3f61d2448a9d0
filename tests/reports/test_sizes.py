"""What a simulated loader needs by world size: the lines of the summary, and the table of the page."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_fsdp_meta.checks.simulation.facts import (
    Assumptions,
    BytesOfRanks,
    ModuleTraffic,
    PhasePeak,
    RankSize,
    SimulatedSize,
    SimulatedStep,
    Traffic,
)
from pytest_fsdp_meta.evidence import WorldFacts
from pytest_fsdp_meta.reports.sizes import BAR_WIDTH, describe_sizes, size_view, why_no_step
from pytest_fsdp_meta.text import as_bytes

GIB = 2**30
SENT = (Traffic("all_gather", ("dp_shard",), 8, 2, GIB), Traffic("all_reduce", (), 4, 1, GIB // 2))


ASSUMED = Assumptions({"input_ids": (1, 8)}, "AdamW with state in float32", meshes=("dp_shard=64",))


def size(ranks: int, parameters: int, peak: int = 0, stepping: int = 0, problem: str = "") -> SimulatedSize:
    """Return a size with a step that holds ``peak`` GiB in the backward; one of them is gathered."""
    step = SimulatedStep(problem=problem)
    if peak:
        parts = {"held": parameters, "gathered": GIB, "activations": (peak - 1) * GIB - parameters}
        peaks = (
            PhasePeak("forward", "", {"held": parameters}),
            PhasePeak("backward", "layers.1", parts),
            PhasePeak("the optimizer's step", "", {"held": parameters, "temporary": stepping * GIB - parameters}),
        )
        step = SimulatedStep(GIB, 2 * GIB, GIB, peaks, SENT, assumed=ASSUMED)
    return SimulatedSize((("dp_shard", ranks),), (RankSize(0, parameters, 0, step),))


def device(memory: int) -> WorldFacts:
    return WorldFacts(64, (), "meta", "fake", device_memory=memory * GIB, memory_reserve=0.25)


FAILED = SimulatedSize((("dp_shard", 2),), (), problem="rank 0 raised KeyError: 2")
LARGE, SMALL = size(64, GIB, 10, 8), size(8, 4 * GIB, 11, 16)


def test_lines_name_what_each_size_needs_and_where_it_fits():
    of_step = "1 GiB of gradients, 2 GiB of optimizer state; a step gathers up to 1 GiB at a time and sends 1 GiB over "
    assert [*describe_sizes((LARGE, SMALL, FAILED), device(16))] == [
        "    2 ranks: not simulated (rank 0 raised KeyError: 2)",
        f"    8 ranks: 4 GiB of parameters on a rank, {of_step}dp_shard, 512 MiB over 4 ranks",
        "      peaks at 16 GiB in the optimizer's step (12 GiB of temporary tensors, 4 GiB of parameters and buffers), "
        "11 GiB in backward, 4 GiB in forward",
        f"   64 ranks: 1 GiB of parameters on a rank, {of_step}dp_shard, 512 MiB over 4 ranks",
        "      peaks at 10 GiB in backward at layers.1 (8 GiB of activations, 1 GiB of parameters and buffers, 1 GiB "
        "of gathered parameters), 8 GiB in the optimizer's step, 1 GiB in forward",
        "   assumed: input_ids 1 x 8 on each rank; AdamW with state in float32; no activation checkpointing; "
        "parameters on dp_shard=64",
        "   a step fits into 12 GiB (16 GiB less a reserve of 25%) on 64 ranks, not on 8",
    ]
    [line] = describe_sizes((size(8, GIB, problem="no CUDA"),), device(16))
    assert line == "   8 ranks: 1 GiB of parameters on a rank; no step was simulated (no CUDA)"


def test_an_optimizer_that_cannot_be_simulated_is_named():
    unknown = replace(LARGE, ranks=(replace(LARGE.ranks[0], step=replace(LARGE.step, unstepped="TypeError: no")),))
    _, peaks, _, fit = describe_sizes((unknown,), device(16))
    assert peaks.endswith(", more in the optimizer's step is possible: TypeError: no")
    assert fit.endswith("on 64 ranks, but what the optimizer needs while it steps is unknown")


def test_what_all_ranks_hold_is_said_where_it_is_known():
    even, uneven = BytesOfRanks(GIB, GIB, GIB), BytesOfRanks(0, GIB // 2, GIB)
    known = [replace(size(ranks, 7, problem="?"), parameters=held) for ranks, held in ((8, even), (64, uneven))]
    lines = [*describe_sizes(known, device(0))]
    assert lines == [
        "    8 ranks: 1 GiB of parameters on every rank; no step was simulated (?)",
        "   64 ranks: 0 bytes to 1 GiB of parameters on a rank (512 MiB in the median); no step was simulated (?)",
    ]
    assert known[1].largest == GIB


@pytest.mark.parametrize(("memory", "scale"), [(0, 16), (16, 16), (64, 48)])
def test_bars_are_to_scale_and_end_at_the_peak(memory, scale):
    view = size_view((LARGE, SMALL, FAILED), device(memory))
    assert [one.size for one in view.worlds] == [2, 8, 64]
    assert view.limit == (pytest.approx(0.75 * memory / scale * BAR_WIDTH) if memory else None)
    steps = [one.step for one in view.worlds]
    ends = [[sum(width for _, _, width in view.bars(peak)) for peak in step.peaks] if step else [] for step in steps]
    assert ends == [[], *(pytest.approx([n / scale * BAR_WIDTH for n in of]) for of in ((4, 11, 16), (1, 10, 8)))]
    assert why_no_step(view.worlds[0]) == "rank 0 raised KeyError: 2"
    assert size_view((), device(memory)) is None


def test_the_modules_of_the_largest_world_are_listed_by_what_they_send():
    gathered = replace(SENT[0], modules=(ModuleTraffic("a", 1, 5), ModuleTraffic("layers.*", 64, 70)))
    reduced = replace(SENT[1], modules=tuple(ModuleTraffic(f"m{n}", 1, n) for n in range(20)))
    step = replace(LARGE.step, traffic=(gathered, reduced))
    large = replace(LARGE, ranks=(replace(LARGE.ranks[0], step=step),))
    listed = [(traffic.where, part.module) for traffic, part in size_view((large, SMALL), device(0)).sent]
    assert listed == [("dp_shard", "layers.*"), *(("4 ranks", f"m{n}") for n in range(19, 12, -1))]
    assert size_view((FAILED,), device(0)).sent == ()


def test_amounts_have_three_digits():
    assert [as_bytes(n) for n in (5, 1536, 2**20 - 1, 1010 * GIB, 3 * GIB // 2)] == [
        *("5 bytes", "1.5 KiB", "1 MiB", "1010 GiB", "1.5 GiB")
    ]
