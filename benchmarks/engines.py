"""Measure how long a world of two, and a call to it, takes with each engine: ``python -m benchmarks.engines``.

The first world includes the costs that later ones share: starting Ray, and imports. "spawned" is a cluster in which
every rank imports torch itself, instead of being forked from a server that has imported it.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from pytest_fsdp_meta.worlds import Engine, ForkServerEngine, RayEngine, Sources, World, WorldSpec

SOURCES = Sources(tuple(sys.path))
SPEC = WorldSpec({"dp_shard": 2})
CALLS = 200


@dataclass(frozen=True)
class Cost:
    """Times in seconds; ``megabytes`` is the throughput of arguments in MB/s."""

    engine: str
    first: float
    later: float
    call: float
    megabytes: float


def reduce_ones() -> float:
    import torch
    import torch.distributed as dist

    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    return tensor.item()


def time_call(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def measure(name: str, engine: Engine, worlds: int) -> Cost:
    def run_world() -> None:
        with World(SPEC, engine) as world:
            assert world.run(reduce_ones) == [2.0, 2.0]

    first = time_call(run_world)
    later = statistics.median(time_call(run_world) for _ in range(worlds))
    with World(SPEC, engine) as world:
        call = statistics.median(time_call(lambda: world.run(reduce_ones)) for _ in range(CALLS))
        data = b"x" * 20_000_000
        sent = statistics.median(time_call(lambda: world.run(len, data)) for _ in range(5))
    engine.close()
    return Cost(name, first, later, call, 2 * len(data) / 1e6 / sent)


def main() -> None:
    spawning = RayEngine("local", SOURCES)
    spawning.method = "spawn"
    costs = [
        measure("local", ForkServerEngine(SOURCES), 20),
        measure("ray", RayEngine("local", SOURCES), 20),
        measure("ray, spawned", spawning, 3),
    ]
    print("| engine | first world | later world | call with all-reduce | arguments |")
    print("|---|---|---|---|---|")
    for cost in costs:
        print(
            f"| {cost.engine} | {cost.first:.1f} s | {cost.later:.3f} s | {1000 * cost.call:.2f} ms "
            f"| {cost.megabytes:.0f} MB/s |"
        )


if __name__ == "__main__":
    main()
