"""What the catalogue costs beside the bare work: ``python -m benchmarks.catalogue``.

The bare work is what a test by hand would do for loss parity alone: load in a world of two and train, build the
reference in a world of one and train. What the checks of a single load cost is laid beside that. The whole catalogue
asks for three loads, two builds of the reference and more steps; that much is the work alone, without an observation
and without a checkpoint. Wanted on a tiny Llama: at most 1.5 times.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from pathlib import Path

import cloudpickle
import torch

from fixtures.conforming import load_conforming
from fixtures.tiny import save_tiny
from pytest_fsdp_meta.catalogue import built_in, judge
from pytest_fsdp_meta.catalogue.registry import OBSERVATIONS
from pytest_fsdp_meta.loader.call import Call
from pytest_fsdp_meta.trial import ON_RANKS, Trial
from pytest_fsdp_meta.worlds import ForkServerEngine, Sources, World, WorldSpec

STEPS = 3
ACCUMULATED = 2
"""Micro-batches of each rank whose gradients are added up; alone, of all ranks."""
FIRST = 1
"""Makes the state of an optimizer that is to be saved."""
GOING_ON = 2
"""Steps after a checkpoint, in the load that saved it and in the one that loads it."""
RELOADING = ("repetition", "state_dict", "export", "saved", "restored", "resharded", "continued", "resumed")


def bare(preload: ForkServerEngine, path: Path, world: int) -> None:
    """Load and train on ranks, then the reference alone."""
    _load(preload, path, world, STEPS)
    _reference(preload, path, STEPS, builds=1)


def once(preload: ForkServerEngine, path: Path, world: int) -> None:
    """What can be seen and judged of one load."""
    _judged(preload, path, world, [name for name in OBSERVATIONS if name not in RELOADING])


def alone(preload: ForkServerEngine, path: Path, world: int) -> None:
    """The loads and the steps that all observations together ask for, and nothing else."""
    beside = ACCUMULATED + FIRST + GOING_ON
    _load(preload, path, world, STEPS + beside)
    _reference(preload, path, 2 * STEPS + world * ACCUMULATED, builds=2)
    _load(preload, path, world, GOING_ON)
    _load(preload, path, world // 2, 0)


def whole(preload: ForkServerEngine, path: Path, world: int) -> None:
    """Every observation and every judgement of the same loader."""
    _judged(preload, path, world, OBSERVATIONS)


def _load(preload: ForkServerEngine, path: Path, world: int, steps: int) -> None:
    with World(WorldSpec({"dp_shard": world}, timeout=120), preload) as ranks:
        ranks.run("benchmarks.on_ranks:load_and_train", path, steps)


def _reference(preload: ForkServerEngine, path: Path, steps: int, builds: int) -> None:
    with World(WorldSpec({"dp_shard": 1}, timeout=120), preload) as one:
        one.run("benchmarks.on_ranks:train_reference", path, steps, builds)


def _judged(preload: ForkServerEngine, path: Path, world: int, wanted: Collection[str]) -> None:
    trial = Trial(WorldSpec({"dp_shard": world}, timeout=120), preload, STEPS, {})
    loader = Call(cloudpickle.dumps(load_conforming), {"path": cloudpickle.dumps(path)}, "fsdp")
    evidence = trial.observe(loader, wanted)
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
    preload = ForkServerEngine(Sources(tuple(sys.path)), [*ON_RANKS, "benchmarks.on_ranks", "fixtures.conforming"])
    with tempfile.TemporaryDirectory() as folder:
        path = save_tiny(options.architecture, Path(folder) / "tiny")
        works = (bare, once, alone, whole)
        for work in works:
            work(preload, path, options.world)
        taken = {work: [0.0] * options.repeats for work in works}
        for number in range(options.repeats):  # side by side, so that a busy machine slows both
            for work, times in taken.items():
                times[number] = seconds(lambda work=work: work(preload, path, options.world))
    print(f"torch {torch.__version__}, {options.architecture}, world of {options.world}, {time.strftime('%Y-%m-%d')}")
    for work, times in taken.items():
        print(f"{work.__name__:6} median {statistics.median(times):.3f} s, best {min(times):.3f} s")
    for work, beside in ((once, bare), (whole, alone), (whole, bare)):
        ratios = [after / before for before, after in zip(taken[beside], taken[work], strict=True)]
        print(f"{work.__name__} takes {statistics.median(ratios):.2f} times {beside.__name__} (wanted: 1.5)")


if __name__ == "__main__":
    main()
