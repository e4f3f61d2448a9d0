"""Compare the speed of verifying weights with ``torch.equal``: ``python -m benchmarks.verification``.

Targets: at least 80% of the bytes per second of ``torch.equal``, at most twice the largest tensor of additional
memory, and time linear in the number of tensors.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from safetensors.torch import save_file

from benchmarks.on_ranks import load_shards
from pytest_fsdp_meta.catalogue import built_in, judge
from pytest_fsdp_meta.loader.call import Call
from pytest_fsdp_meta.trial import ON_RANKS, Trial
from pytest_fsdp_meta.worlds import ForkServerEngine, Sources, World, WorldSpec

WORLD = 2


def preload() -> ForkServerEngine:
    return ForkServerEngine(Sources(tuple(sys.path)), [*ON_RANKS, "benchmarks.on_ranks"])


def checkpoint(folder: Path, tensors: int, rows: int, columns: int) -> Path:
    folder.mkdir()
    weights = {f"weight_{number:05d}": torch.randn(rows, columns) for number in range(tensors)}
    save_file(weights, folder / "model.safetensors")
    return folder


def pack_loader(path: Path) -> Call:
    return Call(cloudpickle.dumps(load_shards), {"path": cloudpickle.dumps(path)}, "fsdp")


def measure_throughput(folder: Path, gib: float, repeats: int) -> list[dict[str, Any]]:
    tensors = max(1, round(gib * 16))
    path = checkpoint(folder / "large", tensors, 4096, 4096)  # 64 MiB each
    loader = pack_loader(path)
    with World(WorldSpec({"dp_shard": WORLD}, timeout=1800), preload()) as world:
        world.run("pytest_fsdp_meta.checks.materialisation.observe:load", loader)
        return list(world.run("benchmarks.on_ranks:verify", str(path), repeats))


def print_throughput(ranks: list[dict[str, Any]]) -> None:
    total = sum(rank["bytes"] for rank in ranks) / 2**30
    print(f"{total:.1f} GiB in a world of {len(ranks)}, best of {len(ranks[0]['equal'])}")
    for number, rank in enumerate(ranks):
        speed = {name: rank["bytes"] / min(rank[name]) / 2**30 for name in ("equal", "verify", "inventory")}
        print(f"rank {number}: " + ", ".join(f"{name} {value:.2f} GiB/s" for name, value in speed.items()))
        print(f"rank {number}: verify at {speed['verify'] / speed['equal']:.0%} of torch.equal (target: 80%)")
        for name, extra in rank["extra"].items():
            ratio = extra / rank["largest"] / len(ranks)
            print(f"rank {number}: {name} takes {ratio:.2f} times the largest tensor (target: at most 2)")


def measure_linearity(folder: Path, counts: list[int]) -> None:
    """Time loading with all observations that need no training, and all checks, by the number of tensors."""
    for count in counts:
        loader = pack_loader(checkpoint(folder / str(count), count, 4, 4))
        trial = Trial(WorldSpec({"dp_shard": WORLD}, timeout=1800), preload(), 3, {})
        start = time.perf_counter()
        evidence = trial.observe(loader, {"inventory", "reference", "values"})
        observed = time.perf_counter() - start
        catalogue = built_in()
        verdicts = [judge(check, evidence, catalogue) for check in catalogue]
        judged = time.perf_counter() - start - observed
        assert not [verdict for verdict in verdicts if verdict.status == "failed"]
        each = 1e6 * (observed + judged) / count
        print(f"{count:6d} tensors: observed in {observed:.2f} s, judged in {judged:.2f} s, {each:.0f} us each")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--gib", type=float, default=4.0, help="size of the checkpoint")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--counts", type=int, nargs="*", default=[1000, 2000, 5000, 10000])
    options = parser.parse_args()
    print(f"torch {torch.__version__}, world of {WORLD}, {time.strftime('%Y-%m-%d')}")
    with tempfile.TemporaryDirectory() as folder:
        if options.gib:
            print_throughput(measure_throughput(Path(folder), options.gib, options.repeats))
        measure_linearity(Path(folder), options.counts)


if __name__ == "__main__":
    main()
