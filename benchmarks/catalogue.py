"""What the full catalogue costs beside the bare work: ``python -m benchmarks.catalogue``.

The bare work is what a test by hand would do for loss parity alone: load in a world of two and train, build the
reference in a world of one and train. Wanted on a tiny Llama: the whole catalogue in at most 1.5 times that.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import cloudpickle
import torch

from fixtures.conforming import load_conforming
from fixtures.tiny import save_tiny
from pytest_fsdp_meta.catalogue import built_in, judge
from pytest_fsdp_meta.catalogue.registry import OBSERVATIONS
from pytest_fsdp_meta.trial import ON_RANKS, Loader, Trial
from pytest_fsdp_meta.worlds import Preload, Sources, World, WorldSpec

STEPS = 3


def bare(preload: Preload, path: Path, world: int) -> None:
    """Load and train on ranks, then the reference alone."""
    with World(WorldSpec({"dp_shard": world}, timeout=120), preload) as ranks:
        ranks.run("benchmarks.on_ranks:load_and_train", path, STEPS)
    with World(WorldSpec({"dp_shard": 1}, timeout=120), preload) as alone:
        alone.run("benchmarks.on_ranks:train_reference", path, STEPS)


def whole(preload: Preload, path: Path, world: int) -> None:
    """Every observation and every judgement of the same loader."""
    trial = Trial(WorldSpec({"dp_shard": world}, timeout=120), preload, STEPS, {})
    loader = Loader(cloudpickle.dumps(load_conforming), {"path": cloudpickle.dumps(path)}, "fsdp")
    evidence = trial.observe(loader, OBSERVATIONS)
    catalogue = built_in()
    statuses = [judge(check, evidence, catalogue).status for check in catalogue]
    assert "failed" not in statuses
    assert "error" not in statuses


def seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description="the full catalogue beside the bare work")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--architecture", default="llama")
    options = parser.parse_args()
    preload = Preload(Sources(tuple(sys.path)), [*ON_RANKS, "benchmarks.on_ranks", "fixtures.conforming"])
    with tempfile.TemporaryDirectory() as folder:
        path = save_tiny(options.architecture, Path(folder) / "tiny")
        for work in (bare, whole):
            work(preload, path, options.world)
        taken = {work: [0.0] * options.repeats for work in (bare, whole)}
        for number in range(options.repeats):  # side by side, so that a busy machine slows both
            for work, times in taken.items():
                times[number] = seconds(lambda work=work: work(preload, path, options.world))
    print(f"torch {torch.__version__}, {options.architecture}, world of {options.world}, {time.strftime('%Y-%m-%d')}")
    for work, times in taken.items():
        print(f"{work.__name__:6} median {statistics.median(times):.3f} s, best {min(times):.3f} s")
    ratios = [after / before for before, after in zip(*taken.values(), strict=True)]
    print(f"{len(built_in().ids())} checks cost {statistics.median(ratios):.2f} of the bare work (median; wanted: 1.5)")


if __name__ == "__main__":
    main()
