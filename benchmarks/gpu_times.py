"""Print how long worlds on GPUs take to start, to reduce a tensor and to end; a step of ``benchmarks.gpu``."""

from __future__ import annotations

import statistics
import sys
import time

from pytest_fsdp_meta.worlds import ForkServerEngine, Sources, World, WorldError
from tests.gpu.gpu_help import gpu_spec, gpus

REPEATS = 3


def first_collective() -> float:
    """Return the seconds of an all-reduce on this rank's device; the first one opens the backend's connections."""
    import torch
    import torch.distributed as dist

    from pytest_fsdp_meta.worlds import current

    began = time.monotonic()
    dist.all_reduce(torch.ones(1, device=current().device))
    torch.get_device_module(current().device).synchronize()
    return time.monotonic() - began


def speed(size: int, backend: str, engine: ForkServerEngine) -> str:
    """Return a row of medians in seconds: starting a world, its first collective, a warm call, closing it."""
    spec = gpu_spec(size, backend)
    took: dict[str, list[float]] = {"start": [], "first": [], "warm": [], "end": []}
    try:
        for _ in range(REPEATS):
            began = time.monotonic()
            world = World(spec, engine)
            world.start()
            took["start"].append(time.monotonic() - began)
            took["first"].append(max(world.run(first_collective)))
            began = time.monotonic()
            world.run(first_collective)
            took["warm"].append(time.monotonic() - began)
            began = time.monotonic()
            world.close()
            took["end"].append(time.monotonic() - began)
    except WorldError as error:
        return f"| {size} | {backend} | {error.summary} | | | |"
    columns = " | ".join(f"{statistics.median(seconds):.3f}" for seconds in took.values())
    return f"| {size} | {backend} | {columns} |"


def speeds() -> list[str]:
    engine = ForkServerEngine(Sources(tuple(sys.path)), ["benchmarks.gpu_times"])
    began = time.monotonic()
    engine.ready()
    took = time.monotonic() - began
    worlds = [(1, "nccl"), (2, "gloo"), (4, "gloo"), *([(2, "nccl")] if gpus() > 1 else [])]
    return [
        f"Ranks are started by {engine.method} (expected: forkserver); importing torch beforehand took {took:.1f} s.",
        "",
        f"Seconds, median of {REPEATS}; the first collective is the slowest rank's.",
        "",
        *("| ranks | backend | start | first collective | warm call | end |", "|---|---|---|---|---|---|"),
        *(speed(size, backend, engine) for size, backend in worlds),
    ]


if __name__ == "__main__":
    print("\n".join(speeds()))
