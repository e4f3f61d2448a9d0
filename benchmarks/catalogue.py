"""Measure the overhead of the catalogue over the work that it observes: ``python -m benchmarks.catalogue``.

``bare`` is a hand-written loss-parity test: load in a world of two and train, build the reference in a world of one
and train. ``once`` adds all observations and checks of a single load, and is compared with ``bare``. The whole
catalogue needs three loads, two builds of the reference and more steps; ``alone`` does that work without observations
and checkpoints, and is compared with ``whole``. Target on a tiny Llama: at most 1.5 times as long.
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
from pytest_fsdp_meta.judging.registry import OBSERVATIONS
from pytest_fsdp_meta.loader.call import Call
from pytest_fsdp_meta.trial import ON_RANKS, Trial
from pytest_fsdp_meta.trial.reloading import MORE_LOADS
from pytest_fsdp_meta.worlds import ForkServerEngine, Sources, World, WorldSpec

STEPS = 3
ACCUMULATED = 2
"""Micro-batches per rank whose gradients are accumulated; the reference accumulates those of all ranks."""
BEFORE_SAVING = 1
"""Steps that create the optimizer state before it is saved."""
AFTER_SAVING = 2
"""Steps after a checkpoint, in the load that saved it and in the load that resumes from it."""
RELOADING = frozenset(row.name for row in MORE_LOADS)


def bare(preload: ForkServerEngine, path: Path, world: int) -> None:
    """Load and train on the ranks, then train the reference."""
    _load(preload, path, world, STEPS)
    _reference(preload, path, STEPS, builds=1)


def once(preload: ForkServerEngine, path: Path, world: int) -> None:
    """Take and judge the observations of a single load."""
    _judge(preload, path, world, [name for name in OBSERVATIONS if name not in RELOADING])


def alone(preload: ForkServerEngine, path: Path, world: int) -> None:
    """Run the loads and steps that all observations need, without the observations."""
    more = ACCUMULATED + BEFORE_SAVING + AFTER_SAVING
    _load(preload, path, world, STEPS + more)
    _reference(preload, path, 2 * STEPS + world * ACCUMULATED, builds=2)
    _load(preload, path, world, AFTER_SAVING)
    _load(preload, path, world // 2, 0)


def whole(preload: ForkServerEngine, path: Path, world: int) -> None:
    """Take every observation of the same loader and run every check."""
    _judge(preload, path, world, OBSERVATIONS)


def _load(preload: ForkServerEngine, path: Path, world: int, steps: int) -> None:
    with World(WorldSpec({"dp_shard": world}, timeout=120), preload) as ranks:
        ranks.run("benchmarks.on_ranks:load_and_train", path, steps)


def _reference(preload: ForkServerEngine, path: Path, steps: int, builds: int) -> None:
    with World(WorldSpec({"dp_shard": 1}, timeout=120), preload) as alone:
        alone.run("benchmarks.on_ranks:train_reference", path, steps, builds)


def _judge(preload: ForkServerEngine, path: Path, world: int, wanted: Collection[str]) -> None:
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
    parser = argparse.ArgumentParser(description="overhead of the catalogue over the work that it observes")
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
        for number in range(options.repeats):  # interleaved, so that a busy machine slows all of them
            for work, times in taken.items():
                times[number] = seconds(lambda work=work: work(preload, path, options.world))
    print(f"torch {torch.__version__}, {options.architecture}, world of {options.world}, {time.strftime('%Y-%m-%d')}")
    for work, times in taken.items():
        print(f"{work.__name__:6} median {statistics.median(times):.3f} s, best {min(times):.3f} s")
    for work, baseline in ((once, bare), (whole, alone), (whole, bare)):
        ratios = [after / before for before, after in zip(taken[baseline], taken[work], strict=True)]
        print(f"{work.__name__} takes {statistics.median(ratios):.2f} times {baseline.__name__} (target: at most 1.5)")


if __name__ == "__main__":
    main()
