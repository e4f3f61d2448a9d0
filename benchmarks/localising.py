"""Measure what tracing the first step module by module costs, beside the step itself: time, memory and disk.

``python -m benchmarks.localising`` prints one line for each size of a decoder on FSDP2 and TP.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn

from fixtures import localised
from pytest_fsdp_meta import Subject
from pytest_fsdp_meta.evidence.traces import TracedStep
from pytest_fsdp_meta.loader.call import Call
from pytest_fsdp_meta.observers.batches import batch_slice, global_batch, loss_of, own_rows
from pytest_fsdp_meta.observers.loading import loaded_subject
from pytest_fsdp_meta.observers.support.poison import deterministic
from pytest_fsdp_meta.observers.trace_comparison import TracedReference
from pytest_fsdp_meta.observers.traces import trace_rank, trace_reference
from pytest_fsdp_meta.trial import ON_RANKS
from pytest_fsdp_meta.worlds import ForkServerEngine, Rank, Sources, World, WorldSpec, current

REPEATS = 3
SIZES = {"2 blocks, 32 wide": (2, 32, 4, 9), "8 blocks, 512 wide": (8, 512, 8, 129)}
"""Name -> blocks, width, rows and tokens."""
MESHES = {"FSDP2": localised.FSDP, "TP 2": localised.TP}


def resize(blocks: int, width: int) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        localised.WIDTH = width
        torch.manual_seed(0)
        model = localised.Decoder()
        model.layers = nn.ModuleList(localised.Block() for _ in range(blocks))
        return model

    return build


def step() -> float:
    """Return the seconds of a plain forward and backward, the fastest of some."""
    rank = current()
    subject = loaded_subject(rank)
    rows = own_rows(global_batch(subject, 0), 0, batch_slice(subject, rank), rank.device)
    subject.model.eval()
    return min(timed(lambda: loss_of(subject, rows).backward()) for _ in range(REPEATS))


def reference_step() -> float:
    from pytest_fsdp_meta.observers.reference import declared_subject

    rank = current()
    subject = declared_subject(rank.state["reference"], rank.state["recipe"])
    rows = own_rows(global_batch(subject, 0), 0, (0, 1), rank.device)
    subject.model.eval()
    return min(timed(lambda: loss_of(subject, rows).backward()) for _ in range(REPEATS))


def timed(act: Callable[[], object]) -> float:
    with deterministic():
        began = time.perf_counter()
        act()
        return time.perf_counter() - began


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def traced_reference(recipe: Any, folder: str, size: int) -> tuple[TracedReference, float, int]:
    before, began = peak(), time.perf_counter()
    current().state["recipe"] = recipe
    traced = trace_reference(recipe, folder, size, ["float32"], TracedStep())
    assert not traced.problem, traced.problem
    return traced, time.perf_counter() - began, peak() - before


def traced_rank(traced: TracedReference, folder: str) -> tuple[float, int]:
    before, began = peak(), time.perf_counter()
    found = trace_rank(traced, (), folder)
    assert not found.problem, found.problem
    return time.perf_counter() - began, peak() - before


def measure(engine: ForkServerEngine, blocks: int, width: int, rows: int, tokens: int, mesh: dict[str, int]) -> str:
    build = resize(blocks, width)

    def batch(number: int) -> dict[str, Tensor]:
        return {"ids": torch.randint(0, localised.VOCABULARY, (rows, tokens))}

    def load(fsdp: Rank) -> Subject:
        model = build()
        localised.shard(model, fsdp.mesh)  # type: ignore[arg-type]
        return Subject(model, reference=build, batch=batch, loss=localised.loss)

    with TemporaryDirectory() as folder:
        world = World(WorldSpec(mesh), engine)
        alone = World(WorldSpec({"dp_shard": 1}), engine, "the reference")
        try:
            world.start()
            alone.start()
            call = Call(cloudpickle.dumps(load), wants_rank="fsdp")
            loaded = world.call("pytest_fsdp_meta.observers.loading:load", (call, ()))
            recipe, (_, size) = loaded[0].recipe, loaded[0].data_parallel
            record = str(Path(folder, "values.safetensors"))
            alone.run("pytest_fsdp_meta.observers.reference:record_reference", recipe, (), (), record)
            plain = max(world.run(step))
            traced, reference, grown = alone.run(traced_reference, recipe, folder, size)[0]
            alone_plain = alone.run(reference_step)[0]
            ranks = world.run(partial(traced_rank, traced, folder))
            disk = sum(file.stat().st_size for file in Path(traced.folder).iterdir())
            parameters = sum(p.numel() * p.element_size() for p in build().parameters())
        finally:
            alone.close()
            world.close()
    slowest = max(seconds for seconds, _ in ranks)
    return (
        f"model {parameters / 2**20:.1f} MiB, activations and gradients {disk / 2**20:.1f} MiB on disk; reference: "
        f"step {alone_plain:.3f} s, traced {reference:.3f} s ({reference / alone_plain:.1f} steps), peak + "
        f"{grown / 2**20:.0f} MiB; ranks: step {plain:.3f} s, traced {slowest:.3f} s ({slowest / plain:.1f} steps), "
        f"peak + {max(more for _, more in ranks) / 2**20:.0f} MiB"
    )


def main() -> None:
    engine = ForkServerEngine(Sources(tuple(sys.path)), [*ON_RANKS, "benchmarks.localising"])
    for name, (blocks, width, rows, tokens) in SIZES.items():
        for kind, mesh in MESHES.items():
            print(f"{name}, {kind}: {measure(engine, blocks, width, rows, tokens, mesh)}", flush=True)


if __name__ == "__main__":
    from benchmarks.localising import main as run  # ranks import the functions by the name of this module

    run()
